"""Hazards and likelihood agree with each other, and people whose observation ends count for what was seen."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from unpad.errors import RecipeError
from unpad.models.set_sequence.heads import bin_edges, bins_until, class_scores, cumulative_hazard, hazard_nll

F64 = torch.float64
EDGES = [0.0, 30.0, 100.0, 365.0, 1825.0]
BINS = len(EDGES) - 1


def hazards(num: int, dtype: torch.dtype = F64) -> Tensor:
    logits = torch.randn(num, BINS, generator=torch.Generator().manual_seed(0), dtype=F64)
    return logits.to(dtype).requires_grad_()


def people(*outcomes: tuple[float, bool]) -> tuple[Tensor, Tensor]:
    return torch.tensor([days for days, _ in outcomes]), torch.tensor([seen for _, seen in outcomes], dtype=torch.bool)


def brute_force(logits: list[float], days: float, seen: bool) -> float:
    """Bin by bin, of one person."""
    total = 0.0
    for logit, (start, end) in zip(logits, pairwise(EDGES), strict=True):
        hazard = 1 / (1 + math.exp(-logit))
        if days > end or (days == end and not seen):
            total -= math.log(1 - hazard)
        elif seen and (start < days or start == 0):
            return total - math.log(hazard)
        else:
            return total
    return total


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.sampled_from([*EDGES, -3.0, 0.5, 29.5, 30.5, 200.0, 1826.0, 9e9]), st.booleans())))
def test_the_likelihood_equals_brute_force(outcomes: list[tuple[float, bool]]) -> None:
    logits = hazards(len(outcomes))
    got = hazard_nll(logits, *people(*outcomes), bin_edges(EDGES, ""))
    wanted = [brute_force(row, *outcome) for row, outcome in zip(logits.tolist(), outcomes, strict=True)]
    torch.testing.assert_close(got, torch.tensor(wanted, dtype=F64), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("days", "seen", "survived", "died"),
    [
        (10, True, 0, 0),
        (10, False, 0, None),  # censored within the first bin: nothing is known
        (0, True, 0, 0),  # an outcome at the landmark belongs to the first bin
        (30, True, 0, 0),  # on an edge, to the bin that ends there
        (30, False, 1, None),  # and who is censored there has survived it
        (50, True, 1, 1),
        (50, False, 1, None),
        (1825, True, 3, 3),
        (1825, False, 4, None),
        (5000, True, 4, None),  # beyond the last edge all bins were survived, whatever came then
        (5000, False, 4, None),
    ],
)
def test_the_convention_for_ends_of_observation(days: float, seen: bool, survived: int, died: int | None) -> None:
    logits = hazards(1)
    logs = torch.log(1 - logits[0].sigmoid())
    wanted = -logs[:survived].sum() - (logits[0, died].sigmoid().log() if died is not None else 0)
    got = hazard_nll(logits, *people((days, seen)), bin_edges(EDGES, ""))
    torch.testing.assert_close(got[0], wanted, rtol=1e-12, atol=1e-12)
    grad = torch.autograd.grad(got.sum(), logits)[0][0]
    assert (grad != 0).tolist() == [k < survived or k == died for k in range(BINS)]


def test_the_probabilities_of_all_outcomes_add_up_to_one() -> None:
    ends = [(days, True) for days in EDGES[1:]] + [(EDGES[-1], False)]
    logits = hazards(6).repeat_interleave(len(ends), 0)
    durations, observed = (x.repeat(6) for x in people(*ends))
    probability = (-hazard_nll(logits, durations, observed, bin_edges(EDGES, ""))).exp()
    torch.testing.assert_close(probability.view(6, -1).sum(1), torch.ones(6, dtype=F64), rtol=1e-12, atol=1e-12)


@pytest.mark.promise("patients.outcomes")
def test_minimising_it_gives_the_kaplan_meier_estimate() -> None:
    """With ends of observation on the edges, one set of hazards for all people has that closed form."""
    outcomes = [(30.0, True)] * 2 + [(30.0, False)] * 3 + [(100.0, True)] * 4 + [(365.0, False)] * 2
    outcomes += [(1825.0, True)] * 1 + [(1825.0, False)] * 5
    durations, observed = people(*outcomes)
    logits = torch.zeros(1, BINS, dtype=F64, requires_grad=True)
    optimizer = torch.optim.LBFGS([logits], max_iter=200, tolerance_grad=1e-12, line_search_fn="strong_wolfe")

    def closure() -> float:
        optimizer.zero_grad()
        loss = hazard_nll(logits.expand(len(durations), -1), durations, observed, bin_edges(EDGES, "")).sum()
        loss.backward()
        return loss.item()

    optimizer.step(closure)
    wanted, alive = [], 1.0
    for end in EDGES[1:]:
        events = sum(days == end and seen for days, seen in outcomes)
        at_risk = sum(days >= end for days, _ in outcomes)
        alive *= 1 - events / at_risk
        wanted.append(alive)
    survival = (-cumulative_hazard(logits)).exp()
    torch.testing.assert_close(survival[0], torch.tensor(wanted, dtype=F64), rtol=1e-4, atol=1e-5)


def test_hazards_add_up_to_minus_the_logarithm_of_the_product_of_what_is_left() -> None:
    logits = hazards(5)
    got = cumulative_hazard(logits)
    torch.testing.assert_close(got, -(1 - logits.sigmoid()).cumprod(1).log(), rtol=1e-12, atol=1e-12)
    assert (got.diff(dim=1) >= 0).all()


def test_who_survived_all_bins_has_the_whole_hazard_as_likelihood() -> None:
    logits = hazards(3)
    survived = hazard_nll(logits, *people(*[(5000, False)] * 3), bin_edges(EDGES, ""))
    torch.testing.assert_close(cumulative_hazard(logits)[:, -1], survived, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_certain_hazards_stay_finite(dtype: torch.dtype) -> None:
    edges = bin_edges(EDGES, "")
    logits = torch.tensor([[-500.0] * BINS, [500.0] * BINS], dtype=dtype, requires_grad=True)
    outcomes = people((50, True), (5000, False))
    values = [hazard_nll(logits, *outcomes, edges), cumulative_hazard(logits)]
    for value in values:
        assert value.dtype == torch.float32
        assert value.isfinite().all()
        assert torch.autograd.grad(value.sum(), logits)[0].isfinite().all()
    assert values[0].tolist() == [500.0, 2000.0]


def test_gradients_are_those_of_the_values() -> None:
    outcomes, edges = people((50, True), (50, False), (5000, False), (30, True)), bin_edges(EDGES, "")
    logits = hazards(4)
    assert torch.autograd.gradcheck(lambda x: hazard_nll(x, *outcomes, edges), (logits,))
    assert torch.autograd.gradcheck(cumulative_hazard, (logits,))


def test_a_person_counts_in_a_batch_as_alone() -> None:
    edges, logits = bin_edges(EDGES, ""), hazards(4)
    durations, observed = people((50, True), (50, False), (5000, False), (30, True))
    whole = hazard_nll(logits, durations, observed, edges)
    for i in range(4):
        alone = hazard_nll(logits[i : i + 1], durations[i : i + 1], observed[i : i + 1], edges)
        torch.testing.assert_close(whole[i : i + 1], alone, rtol=1e-12, atol=1e-12)
    none = hazards(0)
    empty = hazard_nll(none, *people(), edges)
    assert empty.shape == (0,)
    assert torch.autograd.grad(empty.sum(), none)[0].shape == (0, BINS)
    assert cumulative_hazard(none).shape == (0, BINS)


def test_a_duration_that_is_no_number_is_not_taken_for_a_long_one() -> None:
    got = hazard_nll(hazards(2), *people((math.nan, False), (50, True)), bin_edges(EDGES, ""))
    assert got.isnan().tolist() == [True, False]


def test_thousands_of_people_and_edges_that_fp32_cannot_hold() -> None:
    """An edge and a duration of the same decimal number are the same day, whatever dtype each is in."""
    num = 4000
    durations, observed = torch.full((num,), 0.1), torch.arange(num) % 2 == 0
    logits = torch.zeros(num, 2, dtype=F64)
    got = hazard_nll(logits, durations, observed, torch.tensor([0, 0.1, 0.3], dtype=F64))
    assert got.tolist() == pytest.approx([math.log(2)] * num)  # the outcome in the first bin, or that bin survived


@pytest.mark.parametrize("days", [[], [0], [0, 0], [0, 5, 3], [-1, 5], [0, math.nan], [0, math.inf]])
def test_edges_that_make_no_bins_are_refused(days: list[float]) -> None:
    with pytest.raises(RecipeError, match="at least two rising edges") as caught:
        bin_edges(days, "model.bins")
    assert caught.value.where == "model.bins"
    assert caught.value.fix


@pytest.mark.parametrize(
    ("horizon", "whole", "share"), [(30.0, 1, 0.0), (100.0, 2, 0.0), (65.0, 1, 0.5), (1825.0, 4, 0.0)]
)
def test_the_classes_are_those_of_the_hazards_up_to_the_horizon(horizon: float, whole: int, share: float) -> None:
    logits = hazards(5).detach()
    left = 1 - logits.sigmoid()  # of every bin, who is left of those who reach it
    part = left[:, whole] ** share if share else 1.0  # at a constant rate
    wanted = 1 - left[:, :whole].prod(1) * part
    scores = class_scores(logits, bins_until(horizon, bin_edges(EDGES, "")))
    assert scores[:, 1].exp().tolist() == pytest.approx(wanted.tolist(), abs=1e-6)
    assert scores.exp().sum(1).tolist() == pytest.approx([1.0] * 5, abs=1e-12)


@pytest.mark.promise("patients.horizon")
def test_probability_and_risk_to_the_last_edge_order_people_alike() -> None:
    logits = hazards(50).detach()
    p = class_scores(logits, bins_until(EDGES[-1], bin_edges(EDGES, "")))[:, 1]
    assert torch.equal(p.argsort(), cumulative_hazard(logits)[:, -1].argsort())


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_a_horizon_of_certain_hazards_has_scores_and_gradients(dtype: torch.dtype) -> None:
    logits = torch.tensor([[-200.0] * BINS, [200.0] * BINS], dtype=dtype, requires_grad=True)
    scores = class_scores(logits, bins_until(100.0, bin_edges(EDGES, "")))
    scores.log_softmax(1).sum().backward()
    assert scores.isfinite().all()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert scores.detach()[0, 1].exp() < 1e-30
    assert scores.detach()[1, 1].exp() == 1


@pytest.mark.parametrize("horizon", [0.0, 1826.0])
def test_a_horizon_outside_of_the_bins_is_refused(horizon: float) -> None:
    with pytest.raises(RecipeError) as error:
        bins_until(horizon, bin_edges(EDGES, ""))
    assert f"the horizon is day {horizon:g}" in error.value.what
    assert error.value.where == "model.bins"
