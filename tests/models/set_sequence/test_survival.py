"""Hazards and likelihood agree with each other, and people whose observation ends count for what was seen."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from unpad.errors import RecipeError
from unpad.models.set_sequence import heads

F64 = torch.float64
EDGES = [0.0, 30.0, 100.0, 365.0, 1825.0]
BINS = len(EDGES) - 1


def hazards(num: int, dtype: torch.dtype = F64, causes: int = 1) -> Tensor:
    logits = torch.randn(num, BINS, causes, generator=torch.Generator().manual_seed(0), dtype=F64)
    return logits.to(dtype).requires_grad_()


def people(*outcomes: tuple[float, int]) -> tuple[Tensor, Tensor]:
    return torch.tensor([days for days, _ in outcomes]), torch.tensor([int(cause) for _, cause in outcomes])


def softmax(logits: list[float]) -> list[float]:
    """Hazards of nothing and of every cause in a bin."""
    odds = [1.0, *map(math.exp, logits)]
    return [one / sum(odds) for one in odds]


def brute_force(logits: list[list[float]], days: float, cause: int) -> float:
    """Bin by bin, of one person."""
    total = 0.0
    for row, (start, end) in zip(logits, pairwise(EDGES), strict=True):
        if days > end or (days == end and not cause):
            total -= math.log(softmax(row)[0])
        elif cause and (start < days or start == 0):
            return total - math.log(softmax(row)[cause])
        else:
            return total
    return total


DAYS = st.sampled_from([*EDGES, -3.0, 0.5, 29.5, 30.5, 200.0, 1826.0, 9e9])


@pytest.mark.parametrize("causes", [1, 3])
@settings(deadline=None, max_examples=60)
@given(st.data())
def test_the_likelihood_equals_brute_force(causes, data):
    outcomes = data.draw(st.lists(st.tuples(DAYS, st.integers(0, causes))))
    logits = hazards(len(outcomes), causes=causes)
    got = heads.hazard_nll(logits, *people(*outcomes), heads.bin_edges(EDGES, ""))
    wanted = [brute_force(row, *outcome) for row, outcome in zip(logits.tolist(), outcomes, strict=True)]
    torch.testing.assert_close(got, torch.tensor(wanted, dtype=F64), rtol=1e-10, atol=1e-10)


def likeliest(outcomes: list[tuple[float, int]], causes: int) -> Tensor:
    """The one set of logits for all people, (1, BINS, causes), that minimises the likelihood's negative logarithm."""
    logits = torch.zeros(1, BINS, causes, dtype=F64, requires_grad=True)
    optimizer = torch.optim.LBFGS([logits], max_iter=200, tolerance_grad=1e-12, line_search_fn="strong_wolfe")

    def closure() -> float:
        optimizer.zero_grad()
        loss = heads.hazard_nll(
            logits.expand(len(outcomes), -1, -1), *people(*outcomes), heads.bin_edges(EDGES, "")
        ).sum()
        loss.backward()
        return loss.item()

    optimizer.step(closure)
    return logits.detach()


def aalen_johansen(outcomes: list[tuple[float, int]], cause: int) -> list[float]:
    """Cumulative incidence of a cause at the end of every bin, of ends of observation on the edges."""
    incidences, total, left = [], 0.0, 1.0
    for end in EDGES[1:]:
        at_risk = [what for days, what in outcomes if days >= end]
        now = [what for days, what in outcomes if days == end and what]
        total += left * now.count(cause) / len(at_risk)
        left *= 1 - len(now) / len(at_risk)
        incidences.append(total)
    return incidences


@pytest.mark.promise("patients.competing")
def test_minimising_it_gives_the_aalen_johansen_estimate_of_every_cause():
    """Who has a competing event is told apart from who is censored: else the outcome is overestimated."""
    outcomes = [(30.0, 1)] * 2 + [(30.0, 0)] * 3 + [(30.0, 2)] * 4 + [(100.0, 1)] * 4 + [(100.0, 2), (100.0, 3)] * 3
    outcomes += [(365.0, 3)] * 2 + [(365.0, 1)] + [(1825.0, 1)] * 2 + [(1825.0, 2)] + [(1825.0, 0)] * 5
    logits, edges = likeliest(outcomes, causes=3), heads.bin_edges(EDGES, "")
    censored = likeliest([(days, cause if cause == 1 else 0) for days, cause in outcomes], causes=1)
    for place, end in enumerate(EDGES[1:]):
        found = heads.incidence(logits, heads.bins_until(end, edges)).exp()[0]
        wanted = [aalen_johansen(outcomes, cause)[place] for cause in (1, 2, 3)]
        assert found.tolist() == pytest.approx([1 - sum(wanted), *wanted], abs=1e-4)
        scores = heads.class_scores(logits, heads.bins_until(end, edges)).exp()[0]
        assert scores.tolist() == pytest.approx([1 - wanted[0], wanted[0]], abs=1e-4)
        if place:  # nobody at risk of the first bin has left before
            assert heads.class_scores(censored, heads.bins_until(end, edges)).exp()[0, 1] > 1.1 * wanted[0]


@pytest.mark.promise("patients.competing")
@pytest.mark.parametrize("horizon", [10.0, 30.0, 65.0, 1000.0, 1825.0])
def test_the_incidence_of_a_cause_is_that_of_constant_rates_within_every_bin(horizon):
    logits = hazards(4, causes=3).detach()
    found = heads.incidence(logits, heads.bins_until(horizon, heads.bin_edges(EDGES, ""))).exp()
    for person, rows in enumerate(logits.tolist()):
        left, wanted = 1.0, [0.0, 0.0, 0.0]
        for row, (start, end) in zip(rows, pairwise(EDGES), strict=True):
            nothing, *causes = softmax(row)
            came = left * (1 - nothing ** min(max((horizon - start) / (end - start), 0), 1))
            wanted = [one + came * cause / sum(causes) for one, cause in zip(wanted, causes, strict=True)]
            left -= came
        assert found[person].tolist() == pytest.approx([left, *wanted], abs=1e-6)


@pytest.mark.promise("patients.competing")
def test_beside_competing_events_probability_and_risk_order_people_alike_and_a_sure_other_event_leaves_no_risk():
    logits = hazards(50, causes=3).detach()
    p = heads.class_scores(logits, heads.bins_until(EDGES[-1], heads.bin_edges(EDGES, "")))[:, 1]
    assert torch.equal(p.argsort(), heads.risk(logits).argsort())
    assert not torch.equal(p.argsort(), heads.cumulative_hazard(logits)[:, -1].argsort()), (
        "the risk of any event is another"
    )
    logits[:, 0, 1] = 60.0  # the first competing event comes in the first bin
    assert heads.risk(logits).max() < 1e-20


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_without_competing_events_values_and_gradients_have_the_bits_of_the_formulas_of_one_event(dtype):
    """So runs without them are what they were before there were any."""
    edges = heads.bin_edges(EDGES, "")
    until = heads.bins_until(200.0, edges)
    durations, cause = people(*[(days, cause) for days in (10.0, 30.0, 77.0, 400.0, 5000.0) for cause in (0, 1)])
    logits, alone = (3 * hazards(10, dtype).detach() for _ in range(2))
    logits.requires_grad_()
    alone = alone[..., 0].requires_grad_()
    tried, came = heads.observed_bins(durations, cause, edges)
    total = (-F.logsigmoid(-alone) * until).sum(1)
    scores = torch.stack([-total, (-torch.expm1(-total)).log()], 1)
    nll = torch.where(tried, -F.logsigmoid(torch.where(came, alone, -alone)), 0).sum(1)
    pairs = [(heads.hazard_nll(logits, durations, cause, edges), nll), (heads.class_scores(logits, until), scores)]
    for found, wanted in pairs:
        assert torch.equal(found, wanted)
        [gradient], [expected] = (
            torch.autograd.grad(x.square().sum(), y) for x, y in ((found, logits), (wanted, alone))
        )
        assert torch.equal(gradient[..., 0], expected)


def test_hazards_add_up_to_minus_the_logarithm_of_the_product_of_what_is_left():
    logits = hazards(5)
    got = heads.cumulative_hazard(logits)
    torch.testing.assert_close(got, -(1 - logits[..., 0].sigmoid()).cumprod(1).log(), rtol=1e-12, atol=1e-12)
    assert (got.diff(dim=1) >= 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_certain_hazards_stay_finite(dtype):
    edges = heads.bin_edges(EDGES, "")
    logits = torch.tensor([[[-500.0]] * BINS, [[500.0]] * BINS], dtype=dtype, requires_grad=True)
    values = [heads.hazard_nll(logits, *people((50, True), (5000, False)), edges), heads.cumulative_hazard(logits)]
    for value in values:
        assert value.dtype == torch.float32
        assert value.isfinite().all()
        assert torch.autograd.grad(value.sum(), logits)[0].isfinite().all()
    assert values[0].tolist() == [500.0, 2000.0]


@pytest.mark.parametrize("causes", [1, 3])
def test_gradients_are_those_of_the_values(causes):
    outcomes, edges = people((50, 1), (50, 0), (5000, 0), (30, causes)), heads.bin_edges(EDGES, "")
    logits, until = hazards(4, causes=causes), heads.bins_until(200.0, heads.bin_edges(EDGES, ""))
    assert torch.autograd.gradcheck(lambda x: heads.incidence(x, until.double()), (logits,))
    assert torch.autograd.gradcheck(lambda x: heads.hazard_nll(x, *outcomes, edges), (logits,))
    assert torch.autograd.gradcheck(heads.cumulative_hazard, (logits,))


def test_a_duration_that_is_no_number_is_not_taken_for_a_long_one():
    got = heads.hazard_nll(hazards(2), *people((math.nan, False), (50, True)), heads.bin_edges(EDGES, ""))
    assert got.isnan().tolist() == [True, False]


def test_thousands_of_people_and_edges_that_fp32_cannot_hold():
    """An edge and a duration of the same decimal number are the same day, whatever dtype each is in."""
    num = 4000
    durations, cause = torch.full((num,), 0.1), (torch.arange(num) + 1) % 2
    logits = torch.zeros(num, 2, 1, dtype=F64)
    got = heads.hazard_nll(logits, durations, cause, torch.tensor([0, 0.1, 0.3], dtype=F64))
    assert got.tolist() == pytest.approx([math.log(2)] * num)  # the outcome in the first bin, or that bin survived


@pytest.mark.parametrize("days", [[], [0], [0, 0], [0, 5, 3], [-1, 5], [0, math.nan], [0, math.inf]])
def test_edges_that_make_no_bins_are_refused(days):
    with pytest.raises(RecipeError, match="at least two rising edges") as caught:
        heads.bin_edges(days, "model.bins")
    assert caught.value.where == "model.bins"
    assert caught.value.fix


@pytest.mark.promise("patients.horizon")
def test_probability_and_risk_to_the_last_edge_order_people_alike():
    logits = hazards(50).detach()
    p = heads.class_scores(logits, heads.bins_until(EDGES[-1], heads.bin_edges(EDGES, "")))[:, 1]
    assert torch.equal(p.argsort(), heads.cumulative_hazard(logits)[:, -1].argsort())


@pytest.mark.parametrize("causes", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_a_horizon_of_certain_hazards_has_scores_and_gradients(dtype, causes):
    logits = torch.tensor([[[-200.0] * causes] * BINS, [[200.0] * causes] * BINS], dtype=dtype, requires_grad=True)
    scores = heads.class_scores(logits, heads.bins_until(100.0, heads.bin_edges(EDGES, "")))
    scores.log_softmax(1).sum().backward()
    assert scores.isfinite().all()
    assert logits.grad.isfinite().all()
    assert scores.detach()[0, 1].exp() < 1e-30
    assert float(scores.detach()[1, 1].exp()) == pytest.approx(1 / causes)


@pytest.mark.parametrize("horizon", [0.0, 1826.0])
def test_a_horizon_outside_of_the_bins_is_refused(horizon):
    with pytest.raises(RecipeError) as error:
        heads.bins_until(horizon, heads.bin_edges(EDGES, ""))
    assert f"the horizon is day {horizon:g}" in error.value.what
    assert error.value.where == "model.bins"
