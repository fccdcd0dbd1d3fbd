"""The linear path of last values: what it reads, equal however patients are batched, and where it begins."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers.patients import BINS, NUM_CODES, patient_batch, random_patients
from unpad.batching.batch import RaggedBatch
from unpad.models import build_model, model_config
from unpad.models.set_sequence.event_sets import EventSets
from unpad.models.set_sequence.linear_path import (
    CHANGE_UNIT,
    COLUMNS,
    FARTHEST,
    TOLERANCE,
    LinearPath,
    Regression,
    values_of_patients,
)
from unpad.models.set_sequence.model import SetSequence

LENGTHS = [0, 60, 1, 0, 2, 130, 40, 7, 90, 11]


def path_of(dtype: torch.dtype = torch.float64, causes: int = 1) -> LinearPath:
    path = LinearPath(NUM_CODES, causes).to(dtype)
    torch.nn.init.normal_(path.weight, generator=torch.Generator().manual_seed(3))
    return path


def by_hand(path: LinearPath, batch: RaggedBatch, sets_read: int | None = None, cause: int = 0) -> float:
    """Sum of a patient alone for one cause, in plain loops; of its first sets."""
    events, codes, total = batch.require(EventSets), batch.input_ids, 0.0
    bounds = events.members.cu_seqlens.tolist()
    for code in range(1, NUM_CODES):
        means, present = [], False
        for begin, end in list(pairwise(bounds))[:sets_read]:
            mine = [at for at in range(begin, end) if codes[at] == code]
            present = present or bool(mine)
            values = [float(events.values[at].clamp(-FARTHEST, FARTHEST)) for at in mine if events.has_value[at]]
            means += [float(np.mean(values))] if values else []
        if present:
            last = means[-1] if means else 0.0
            change = last - float(np.mean(means[:-1])) if len(means) > 1 else 0.0
            weight = path.weight[code, COLUMNS * cause :][:COLUMNS].detach()
            total += float(weight @ torch.tensor([last, change / CHANGE_UNIT, 1.0]).double())
    return total


def summed(path: LinearPath, batch: RaggedBatch) -> Tensor:
    found: Tensor = path(batch.input_ids, batch.require(EventSets))
    return found.detach()


def test_it_reads_the_last_value_its_change_and_the_presence_of_every_known_code():
    path, batch = path_of(), random_patients(LENGTHS)
    found = summed(path, batch)[:, 0].tolist()
    for row, value in enumerate(found):
        assert value == pytest.approx(by_hand(path, batch.select([row])), abs=1e-6)
    assert found[0] == 0, "nobody without events has a shift"
    assert len(set(found)) >= len(LENGTHS) - 2


@pytest.mark.promise("patients.linear")
@pytest.mark.parametrize("causes", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_patient_has_the_bits_of_a_batch_of_its_own(dtype, causes):
    path, batch = path_of(dtype, causes), random_patients(LENGTHS)
    alone = torch.cat([summed(path, batch.select([row])) for row in range(len(LENGTHS))])
    assert torch.equal(summed(path, batch), alone)


def test_at_every_set_is_the_record_that_ends_there():
    path, batch = path_of(causes=2), random_patients(LENGTHS)
    found = path.at_every_set(batch.input_ids, batch.require(EventSets)).detach()
    wanted = [
        [by_hand(path, batch.select([row]), number + 1, cause) for cause in range(2)]
        for row in range(len(LENGTHS))
        for number in range(batch.select([row]).require(EventSets).num_sets)
    ]
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), rtol=0, atol=1e-6)
    bare = random_patients([0, 0])
    assert path.at_every_set(bare.input_ids, bare.require(EventSets)).shape == (0, 2)


# --------------------------------------------------------------------------- where it begins


def cohort(num: int, effect: float, seed: int = 0) -> RaggedBatch:
    """Patients with two values of code 1, of which the last decides, and a value of code 2, which does not."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(num, 3))
    batch = patient_batch(
        [[1, 2]] * num, np.tile([1, 1, 2], num), values.ravel(), np.ones(3 * num, np.bool_), np.tile([-9.0, 0.0], num)
    )
    wait = rng.exponential(300, num) / np.exp(effect * values[:, 1])
    events = replace(
        batch.require(EventSets),
        durations=torch.from_numpy(np.minimum(wait, 900).astype(np.float32)),
        cause=torch.from_numpy((wait < 900).astype(np.int64)),
    )
    labels = torch.from_numpy((wait < 200).astype(np.int64))
    return replace(batch.with_part(events), seq_labels=labels)


def model_of(**fields: object) -> SetSequence:
    torch.manual_seed(0)
    config = model_config({"kind": "set_sequence", "width": 12, "hidden": 16, "latent": 8, "blocks": 1, **fields})
    return build_model(config, NUM_CODES).eval()


FIELDS: dict[str, dict[str, object]] = {
    "times": {"bins": BINS}, "a horizon": {"bins": BINS, "horizon": 200.0}, "labels": {},
    "labels beside bins": {"bins": [0.0, 90.0]},
}  # fmt: skip


@pytest.mark.promise("patients.linear")
@pytest.mark.parametrize("known", FIELDS)
def test_a_model_begins_as_the_regression_on_its_patients(known):
    def shown(seed: int) -> RaggedBatch:
        batch = cohort(400, 1.0, seed)
        bare = replace(batch.require(EventSets), durations=None, cause=None)
        return batch.with_part(bare) if "labels" in known else batch

    model, batch = model_of(last_values=True, **FIELDS[known]), shown(0)
    before = {name: part.clone() for name, part in model.state_dict().items()}
    model.begin(batch)
    weight = model.last_values.weight.detach()
    assert weight[1, 0] > 0.6, "the last value of code 1 decides"
    assert weight[2].abs().max() < 0.2
    assert not weight[3:].any(), "codes that no patient has"
    moved = {name for name, part in model.state_dict().items() if not torch.equal(part, before[name])}
    head = "patient.classes" if "labels" in known else "patient.bins"
    assert moved == {"last_values.weight", f"{head}.weight", f"{head}.bias"}
    new = shown(1)
    with torch.no_grad():
        answers = model.classify(new) if "labels" in known else model.hazards(new)
    values = new.require(EventSets).values.view(-1, 3)[:, 1]
    assert float(torch.corrcoef(torch.stack([answers.flatten(1)[:, -1], values]))[0, 1]) > 0.9, (
        "untrained, it knows already"
    )


@pytest.mark.promise("patients.ready-labels")
@pytest.mark.parametrize("commonest", [0, 1, 2])
def test_several_classes_begin_as_a_regression_of_each_against_the_commonest(commonest):
    """Whichever that is, and whatever its place: the others' scores beside it are those of a model of these two."""
    batch = cohort(400, 1.0)
    batch = batch.with_part(replace(batch.require(EventSets), durations=None, cause=None))
    values, draw = batch.require(EventSets).values.view(-1, 3)[:, 1], np.random.default_rng(1)
    lower, higher = (one for one in range(3) if one != commonest)
    drawn = 1.5 * values.numpy() + draw.logistic(size=400)
    labels = torch.from_numpy(np.where(drawn < -2, lower, np.where(drawn > 1.5, higher, commonest)))
    labels[::9] = -1
    assert int(torch.bincount(labels[labels >= 0]).argmax()) == commonest
    model = model_of(last_values=True, classes=3)
    model.begin(replace(batch, seq_labels=labels))
    weight = model.last_values.weight.detach()
    weights = [torch.zeros_like(weight[:, :COLUMNS]), *weight.split(COLUMNS, 1)]
    biases = model.patient.classes.bias.detach()
    for one in (lower, higher):
        pair = model_of(last_values=True)
        known = torch.where(labels == one, 1, torch.where(labels == commonest, 0, -1))
        pair.begin(replace(batch, seq_labels=known))
        torch.testing.assert_close(weights[one] - weights[commonest], pair.last_values.weight.detach())
        torch.testing.assert_close((biases[one] - biases[commonest]), pair.patient.classes.bias.detach()[1])
    with torch.no_grad():
        p = model.classify(batch).softmax(1)
    assert (p.argmax(1) == labels)[labels >= 0].double().mean() > 0.6
    shares = torch.bincount(labels[labels >= 0]) / (labels >= 0).sum()
    torch.testing.assert_close(p[labels >= 0].mean(0), shares.to(p.dtype), atol=0.03, rtol=0)


@pytest.mark.parametrize("absent", [0, 1, 2])
def test_a_class_without_a_training_patient_begins_as_an_unlikely_one(absent):
    batch = cohort(60, 1.0)
    batch = batch.with_part(replace(batch.require(EventSets), durations=None, cause=None))
    others = torch.tensor([one for one in range(3) if one != absent])
    model = model_of(last_values=True, classes=3)
    model.begin(replace(batch, seq_labels=others[batch.seq_labels.clamp_min(0)]))
    with torch.no_grad():
        p = model.classify(batch).softmax(1)
    assert p.isfinite().all()
    assert p[:, absent].mean() < 0.02


@pytest.mark.parametrize("known", ["a horizon", "labels"])
def test_a_weight_of_a_class_moves_where_a_model_begins_and_what_it_learns(known):
    batch, shares, losses = cohort(400, 1.0), [], []
    for weight in (1.0, 5.0):
        model = model_of(last_values=True, positive_weight=weight, **FIELDS[known])
        model.begin(batch)
        with torch.no_grad():
            shares.append(float(model.classify(batch).softmax(1)[:, 1].mean()))
            model.load_state_dict(model_of(last_values=True, **FIELDS[known]).state_dict())
            losses.append(float(model.losses(batch)["hazard" if known == "a horizon" else "classification"][0]))
    assert shares[1] > shares[0] + 0.1
    assert losses[1] > 1.5 * losses[0]


def test_where_nothing_is_known_a_model_begins_at_random():
    batch = cohort(20, 1.0)
    bare = batch.with_part(replace(batch.require(EventSets), durations=None, cause=None))
    model = model_of(last_values=True, bins=BINS)
    before = {name: part.clone() for name, part in model.state_dict().items()}
    model.begin(replace(bare, seq_labels=None))
    model_of(bins=BINS).begin(batch)
    assert all(torch.equal(part, before[name]) for name, part in model.state_dict().items())


def test_the_penalty_is_weak_where_there_is_much_to_learn_and_strong_where_there_is_nothing():
    known: dict[str, Tensor] = {}
    nothing: dict[str, Tensor] = {}
    for effect, found in ((1.5, known), (0.0, nothing)):
        model = model_of(last_values=True, bins=BINS)
        model.begin(cohort(250, effect, seed=5))
        found["weight"] = model.last_values.weight.detach()
    assert known["weight"][1, 0] > 1.0
    assert nothing["weight"].abs().max() < 0.1


def test_a_solution_has_no_gradient_left():
    batch = cohort(200, 1.0)
    label = batch.seq_labels.double()[:, None]
    last = values_of_patients(batch.input_ids, batch.require(EventSets), torch.float64)
    problem = Regression(last, NUM_CODES, torch.ones_like(label), label)
    everyone = torch.ones(200, dtype=torch.float64)
    begin = torch.zeros(NUM_CODES * COLUMNS + 1, dtype=torch.float64)
    with torch.no_grad():
        found = problem.solve(3.0, everyone, begin)
    found = found.clone().requires_grad_()
    losses, logits = problem.losses(found)
    cross_entropy = torch.nn.functional.binary_cross_entropy_with_logits(logits, label, reduction="none")[:, 0]
    torch.testing.assert_close(losses, cross_entropy)
    weight, _ = problem.parts(found)
    (losses.sum() + 1.5 * weight.square().sum()).backward()
    assert found.grad.abs().max() < 200 * 2 * TOLERANCE
    assert weight.abs().max() > 0.5


def test_what_the_network_adds_is_small_at_first_and_everything_learns():
    model, batch = model_of(last_values=True, bins=BINS, horizon=200.0), cohort(50, 1.0)
    model.begin(batch)
    with torch.no_grad():
        whole = model.hazards(batch)
        model.patient.bins.weight.zero_()
        alone = model.hazards(batch)
    assert float((whole - alone).abs().max()) < 0.3
    model.train()
    model.patient.bins.weight.data.fill_(0.01)
    model.losses(batch)["hazard"][0].backward()
    parts = [(name, part.grad) for name, part in model.named_parameters() if "history.blocks" in name]
    idle = [name for name, gradient in parts if gradient is None or not gradient.any()]
    assert not idle


# --------------------------------------------------------------------------- competing events


def competing_cohort(num: int) -> RaggedBatch:
    """As `cohort`, of effect 1; half of the patients have, whatever their values, another event before the outcome, and
    a fifth is censored before both."""
    rng, batch = np.random.default_rng(7), cohort(num, 1.0)
    values = batch.require(EventSets).values.view(num, 3)[:, 1].double().numpy()
    scales = (300 / np.exp(values), np.full(num, 200.0), np.full(num, 700.0))
    outcome, other, censored = (rng.exponential(scale) for scale in scales)
    wait = np.minimum.reduce([outcome, other, censored, np.full(num, 900.0)])
    cause = np.select([wait == outcome, wait == other], [1, 2], 0)
    events = replace(
        batch.require(EventSets),
        durations=torch.from_numpy(wait.astype(np.float32)),
        cause=torch.from_numpy(cause.astype(np.int64)),
    )
    return replace(batch.with_part(events), seq_labels=None)


def observed_incidence(events: EventSets, cause: int, horizon: float) -> float:
    """Cumulative incidence of a cause (Aalen and Johansen 1978), person by person in the order of time."""
    ends = sorted(zip(events.durations.tolist(), events.cause.tolist(), strict=True))
    total, left = 0.0, 1.0
    for place, (wait, what) in enumerate(ends):
        if wait <= horizon:
            hazard = 1 / (len(ends) - place)
            total += left * hazard * (what == cause)
            left *= 1 - hazard * (what > 0)
    return total


@pytest.mark.promise("patients.competing")
def test_the_mean_probability_is_the_observed_cumulative_incidence_and_censoring_overestimates_it():
    horizon, num = 200.0, 1000  # within a bin
    batch, found, weights = competing_cohort(num), {}, {}
    events = batch.require(EventSets)
    alone = batch.with_part(replace(events, cause=torch.where(events.cause == 1, 1, 0)))
    for competing, given in ((1, batch), (0, alone)):
        model = model_of(last_values=True, bins=BINS, horizon=horizon, competing=competing)
        model.begin(given)
        with torch.no_grad():
            hazards = model.hazards(batch)
            found[competing] = float(model.classify(batch).exp()[:, 1].mean()), model.competing(hazards).exp()
            weights[competing] = model.last_values.weight.split(COLUMNS, 1)
    wanted = [observed_incidence(events, cause, horizon) for cause in (1, 2)]
    assert found[1][0] == pytest.approx(wanted[0], abs=0.03), "the outcome"
    assert found[1][1].mean(0).tolist() == pytest.approx([wanted[1]], abs=0.03), "the other event"
    assert found[0][0] > wanted[0] + 0.1, "the probability of a world without the other event"
    assert found[0][1].shape == (num, 0)
    outcome, other = weights[1]
    assert outcome[1, 0] > 0.6, "the last value of code 1 decides when the outcome comes"
    assert other.abs().max() < 0.3, "the other event does not depend on values"
