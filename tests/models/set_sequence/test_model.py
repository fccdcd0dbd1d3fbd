"""The model of patients gives each what it gives the patient alone, looks at no later set, and its terms are what they
say they are."""

import math
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.helpers.patients import (
    NUM_CODES,
    SET_SEQUENCES,
    patient_batch,
    permute_members,
    random_patients,
    tiny_patients_model,
)
from unpad.batching.batch import RaggedBatch
from unpad.errors import RecipeError
from unpad.models import build_model, model_config
from unpad.models.objective import Objective
from unpad.models.set_sequence.event_sets import EventSets
from unpad.models.set_sequence.heads import hazard_nll
from unpad.models.set_sequence.losses import chamfer, gaussian_kl
from unpad.models.set_sequence.model import SetSequence
from unpad.nn.linear import independent_rows
from unpad.nn.native import library
from unpad.training.step import train_step

TERMS = ("classification", "hazard", "reconstruction", "made_code", "kl", "next_code", "next_time", "next_value")
LENGTHS = [0, 513, 1, 0, 2, 300, 40, *np.random.default_rng(1).integers(0, 40, 57).tolist()]  # of 64 patients


def model_of(kind: str, dtype: torch.dtype = torch.float64, **fields: Any) -> SetSequence:
    model = tiny_patients_model(dtype, **{**SET_SEQUENCES[kind], **fields})
    if model.config.code_vectors:
        model.load_code_vectors(torch.randn(NUM_CODES, 5, generator=torch.Generator().manual_seed(4)))
    return model


def events_of(batch: RaggedBatch) -> EventSets:
    return batch.require(EventSets)


def answers(model: SetSequence, batch: RaggedBatch) -> dict[str, Tensor]:
    """Everything the model says of patients, sets and events, one row each."""
    mean, log_var, divergence = model.posterior(batch)
    probability, attention = model.course(batch)
    with torch.no_grad():
        hazards = model.hazards(batch)
        found = {"classify": model.classify(batch)} | ({} if hazards is None else {"hazards": hazards})
    return found | {
        "nll": model.nll(batch), "mean": mean, "log_var": log_var, "divergence": divergence,
        "next_codes": model.next_codes(batch), "reconstruct": model.reconstruct(batch),
        "patients": model.vectors(batch, "patient"), "sets": model.vectors(batch, "set"),
        "code_nll": model.code_nll(batch), "probability": probability, "attention": attention,
    }  # fmt: skip


def summed(model: SetSequence, batches: list[RaggedBatch]) -> tuple[dict[str, Tensor], dict[str, int], list[Tensor]]:
    """Sums and counts of all terms over batches, and the gradient of a mixture of the sums."""
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}
    model.zero_grad()
    for batch in batches:
        terms = model.losses(batch)
        assert {name: count for name, (_, count) in terms.items()} == model.count_targets(batch)
        torch.stack([(1 + math.sqrt(i)) * terms[name][0] for i, name in enumerate(TERMS)]).sum().backward()
        for name, (total, count) in terms.items():
            sums[name] = sums.get(name, torch.zeros(())) + total.detach()
            counts[name] = counts.get(name, 0) + count
    return sums, counts, [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


def assert_same_terms(model: SetSequence, alone: list[RaggedBatch], others: list[list[RaggedBatch]]) -> None:
    """Sums, counts and gradients of the patients one by one are those of every other way to batch them."""
    sums, counts, grads = summed(model, alone)
    for batches in others:
        other_sums, other_counts, other_grads = summed(model, batches)
        assert counts == other_counts
        for name, value in sums.items():
            torch.testing.assert_close(other_sums[name], value, rtol=1e-10, atol=1e-10, msg=name)
        for (name, _), grad, other in zip(model.named_parameters(), grads, other_grads, strict=True):
            assert (other - grad).norm() <= 1e-10 * max(float(grad.norm()), 1e-3), name


# --------------------------------------------------------------------------- equalities


@pytest.mark.promise("patients.batch")
def test_many_patients_of_0_to_513_events_in_one_batch_equal_each_alone():
    model, batch = model_of("plain"), random_patients(LENGTHS)
    alone = [batch.select([i]) for i in range(batch.num_seqs)]
    assert_same_terms(model, alone, [[batch]])
    mean, _, divergence = model.posterior(batch)
    each = [model.posterior(one) for one in alone]
    torch.testing.assert_close(mean, torch.cat([one[0] for one in each]), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(divergence, torch.cat([one[2] for one in each]), rtol=1e-10, atol=1e-10)


@pytest.mark.promise("patients.flat")
@pytest.mark.parametrize("path", [nullcontext, pytest.param(library.switched_off, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("kind", SET_SEQUENCES)
def test_all_ways_to_batch_patients_give_the_same(kind, path):
    model = model_of(kind)
    batch = random_patients([0, 61, 1, 0, 17, 2], causes=model.patient.causes, classes=model.patient.num_classes)
    model.label_smoothing = 0.1
    alone = [batch.select([i]) for i in range(batch.num_seqs)]
    with path():
        each = [answers(model, one) for one in alone]
        truth = {name: torch.cat([one[name] for one in each]) for name in each[0]}
        for other in (batch, batch.pad("left", pad_to=70)):
            for name, got in answers(model, other).items():
                torch.testing.assert_close(got, truth[name], rtol=1e-10, atol=1e-10, equal_nan=True, msg=name)
        split = [batch.select([4, 0]), batch.select([]), batch.select([5, 1, 3, 2])]
        assert_same_terms(model, alone, [[batch], [batch.pad()], split])


def test_training_without_noise_is_evaluation():
    batch = random_patients([9, 0, 30, 1])
    model = model_of("filter", sample=False, slot_noise=0.0, dropout=0.0)
    sums, counts, grads = summed(model, [batch])
    model.train()
    other_sums, other_counts, other_grads = summed(model, [batch])
    assert counts == other_counts
    assert all(torch.equal(other_sums[name], value) for name, value in sums.items())
    assert all(torch.equal(a, b) for a, b in zip(grads, other_grads, strict=True))


@pytest.mark.promise("patients.sets")
@pytest.mark.parametrize("kind", SET_SEQUENCES)
def test_the_order_of_the_events_of_a_set_changes_nothing(kind):
    model, batch = model_of(kind), random_patients([40, 3, 0, 21], largest=20)
    shuffled, order = permute_members(batch)
    assert not torch.equal(shuffled.input_ids, batch.input_ids)
    before, after = answers(model, batch), answers(model, shuffled)
    before["code_nll"] = before["code_nll"][order]
    for name, got in after.items():
        torch.testing.assert_close(got, before[name], rtol=1e-10, atol=1e-10, equal_nan=True, msg=name)
    assert_same_terms(model, [batch], [[shuffled]])


# --------------------------------------------------------------------------- nothing looks ahead


def change_events(batch: RaggedBatch, chosen: Tensor) -> RaggedBatch:
    """Other codes and values in these sets, (num_sets,) bool, and other times."""
    events = events_of(batch)
    at = chosen.repeat_interleave(events.members.lengths())
    changed = replace(
        events,
        values=torch.where(at, events.values + 2, events.values),
        has_value=events.has_value | at,
        times=torch.where(chosen, events.times + 0.5, events.times),
    )
    input_ids = torch.where(at, (batch.input_ids + 1) % NUM_CODES, batch.input_ids)
    return replace(batch, input_ids=input_ids).with_part(changed)


@pytest.mark.promise("patients.causal")
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", ["plain", "filter"])
def test_a_later_set_changes_no_earlier_output(kind, training):
    """To the bit, and of no other patient either; in training for the same draws."""
    model, batch = model_of(kind, dropout=0.1).train(training), random_patients([30, 0, 60, 9])
    begin, end = events_of(batch).history.cu_seqlens[2:4].tolist()
    cut = begin + (end - begin) // 2
    chosen = torch.zeros(events_of(batch).num_sets, dtype=torch.bool)
    chosen[cut:end] = True
    found = []
    for given in (batch, change_events(batch, chosen)):
        torch.manual_seed(5)
        codes = model.next_codes(given)
        torch.manual_seed(5)
        found.append((codes, *model.posterior(given)))
    for before, after in zip(*found, strict=True):
        assert torch.equal(before[~chosen], after[~chosen])
        assert (before[chosen] != after[chosen]).any(1).all()


def test_the_course_is_what_a_patient_cut_after_each_set_would_get():
    model, batch = model_of("filter"), random_patients([25])
    events = events_of(batch)
    probability, attention = model.course(batch)
    assert ((attention > 0) & (attention < 1)).all()
    assert attention.sum() < 1
    with independent_rows():
        whole, *parts = (model.course(batch, part) for part in (slice(None), slice(0, 9), slice(9, 25)))
    assert all(map(torch.equal, whole, map(torch.cat, zip(*parts, strict=True))))
    bounds = events.members.cu_seqlens.tolist()
    for ends in range(1, events.num_sets + 1):
        sizes, stop = np.diff(bounds[: ends + 1]).tolist(), bounds[ends]
        cut = patient_batch(
            [sizes], batch.input_ids[:stop].numpy(), events.values[:stop].numpy(), events.has_value[:stop].numpy(),
            events.times[:ends].numpy(),
        )  # fmt: skip
        torch.testing.assert_close(model.classify(cut).softmax(1)[0], probability[ends - 1], rtol=1e-10, atol=1e-12)


def test_a_readout_attends_as_the_last_block_does():
    """The share of a set, measured by taking the set out of the last block's keys."""
    model, batch = model_of("plain", blocks=1), random_patients([14])
    history, reading = model.history, model._read(batch)
    with torch.no_grad():
        attention = history.attention(reading.latents[-1].z, reading.course)
        block, course = history.blocks[0], reading.course
        y = block.norm_1(history._embed(reading.latents[-1].z, course))[1]
        q, k = block.attention.queries_and_keys(y, history._rotary(course))
        scores = torch.einsum("hd,khd->hk", q[-1], k) / math.sqrt(q.shape[2])
    torch.testing.assert_close(attention, scores.softmax(1).mean(0), rtol=1e-10, atol=1e-12)


# --------------------------------------------------------------------------- terms


@pytest.mark.promise("patients.next-set")
def test_terms_are_what_they_say():
    """Every one by a loop over patients, sets and events."""
    model, batch = model_of("plain", positive_weight=3.0, free_bits=0.4), random_patients([22, 0, 9, 1, 30])
    batch = replace(batch, seq_labels=torch.tensor([1, 0, -1, 0, 1]))
    model.label_smoothing = 0.2
    events, codes = events_of(batch), batch.input_ids
    events = replace(events, durations=torch.tensor([50.0, math.nan, 400.0, 3000.0, 120.0]))
    batch = batch.with_part(events)
    terms = {name: float(total.detach()) for name, (total, _) in model.losses(batch).items()}
    counts = model.count_targets(batch)
    with torch.no_grad():
        logits, hazards, reading = model.classify(batch), model.hazards(batch), model._read(batch)
        states = model._states(reading)[reading.course.sets]
        scores = model.next_codes(batch).log_softmax(1)
    smooth = F.cross_entropy(
        logits.clamp(-50, 50), batch.seq_labels.clamp_min(0), reduction="none", label_smoothing=0.2
    )
    assert terms["classification"] == pytest.approx(float((smooth * torch.tensor([3, 1, 0, 1, 3])).sum()))
    known = [0, 1, 3, 4]
    assert terms["nll"] == pytest.approx(
        float(F.cross_entropy(logits[known], batch.seq_labels[known], reduction="sum"))
    )
    timed = [0, 2, 3, 4]
    wanted = hazard_nll(hazards[timed], events.durations[timed], events.cause[timed], model.patient.edges)
    assert terms["hazard"] == pytest.approx(float(wanted.sum()))
    assert (counts["classification"], counts["nll"], counts["hazard"]) == (4, 4, 4)

    floor = [gaussian_kl(latent.mean, latent.log_var).clamp_min(0.4).sum().item() for latent in reading.latents]
    assert terms["kl"] == pytest.approx((floor[0] + 2 * floor[1]) / 3)
    mean, log_var, divergence = model.posterior(batch)
    assert terms["raw_kl"] == pytest.approx(float(divergence.sum()))
    closed = 0.5 * (log_var.exp() + mean.square() - 1 - log_var)
    torch.testing.assert_close(divergence, closed, rtol=1e-9, atol=1e-12)

    bounds, first = events.members.cu_seqlens.tolist(), set(events.history.cu_seqlens.tolist())
    next_code = next_time = next_value = 0.0
    num_following = num_values = 0
    for t in range(events.num_sets):
        if t in first:
            continue
        num_following += 1
        inside = range(bounds[t], bounds[t + 1])
        next_code -= float(np.mean([float(scores[t - 1, codes[e]]) for e in inside]))
        made, raw = model.next_set.time(states[t - 1]).detach()
        spread = math.exp(float(6 * torch.tanh(raw / 6)) / 2)
        gap = math.log1p(float(events.times[t] - events.times[t - 1]))
        next_time -= float(torch.distributions.Normal(float(made), spread).log_prob(torch.tensor(gap)))
        for e in inside:
            if events.has_value[e]:
                num_values += 1
                value = (
                    states[t - 1] @ model.next_set.values.weight[codes[e]] + model.next_set.value_bias.weight[codes[e]]
                )
                next_value += float((value - math.asinh(float(events.values[e]))).detach() ** 2)
    assert terms["next_code"] == pytest.approx(next_code)
    assert terms["next_time"] == pytest.approx(next_time, rel=1e-5)  # the reference is in fp32
    assert terms["next_value"] == pytest.approx(next_value)
    assert (counts["next_code"], counts["next_time"], counts["next_value"]) == (
        num_following,
        num_following,
        num_values,
    )


@pytest.mark.promise("patients.ready-labels")
def test_the_loss_of_several_classes_is_the_cross_entropy_of_those_that_are_known():
    model = tiny_patients_model(classes=3, bins=None, last_values=True)
    batch = replace(random_patients([9, 0, 30, 4, 12]), seq_labels=torch.tensor([2, 0, -1, 1, 2]))
    model.label_smoothing = 0.2
    terms, scores = model.losses(batch), model.classify(batch)
    assert scores.shape == (5, 3)
    labels = batch.seq_labels
    for name, smoothing in (("classification", 0.2), ("nll", 0.0)):
        wanted = F.cross_entropy(scores, labels, reduction="sum", ignore_index=-1, label_smoothing=smoothing)
        torch.testing.assert_close(terms[name][0], wanted.detach() if name == "nll" else wanted)
        assert terms[name][1] == model.count_targets(batch)[name] == 4
    unknown = torch.autograd.grad(terms["classification"][0], model.patient.classes.bias)[0]
    shares = (0.8 * F.one_hot(labels.clamp_min(0), 3) + 0.2 / 3 - scores.softmax(1)) * (labels >= 0)[:, None]
    torch.testing.assert_close(unknown, -shares.sum(0).detach())
    torch.testing.assert_close(model.nll(batch)[[0, 1, 3, 4]].sum(), terms["nll"][0])


@pytest.mark.promise("patients.ready-labels")
def test_a_class_that_never_comes_leaves_the_probability_of_an_outcome():
    """With tied parameters, and losses and gradients too: two classes are the special case of several."""
    models = [tiny_patients_model(bins=None, last_values=True, classes=num) for num in (None, 3)]
    two, three = (model.state_dict() for model in models)
    for name, part in three.items():
        part[tuple(slice(size) for size in two[name].shape)].copy_(two[name])
    models[1].patient.classes.bias.data[2] = -800
    batch = random_patients([9, 0, 30, 4, 12])
    found = [model.classify(batch).softmax(1) for model in models]
    torch.testing.assert_close(found[1][:, :2], found[0], rtol=1e-14, atol=1e-14)
    assert found[1][:, 2].max() == 0
    losses = [model.losses(batch)["classification"] for model in models]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-14, atol=1e-14)
    grads = [
        torch.autograd.grad(loss[0], model.patient.classes.weight)[0]
        for loss, model in zip(losses, models, strict=True)
    ]
    torch.testing.assert_close(grads[1][:2], grads[0], rtol=1e-12, atol=1e-12)


def test_several_classes_have_neither_hazards_nor_a_weight_of_one():
    for field, value, said in (
        ("bins", [0, 9], "leave model.bins out"),
        ("positive_weight", 2.0, "positive_weight is"),
    ):
        with pytest.raises(RecipeError, match=said):
            model_config({"kind": "set_sequence", "classes": 3, field: value})
        model_config({"kind": "set_sequence", "classes": 2, field: value})


def test_reconstruction_is_of_all_levels_and_no_gradient_reaches_its_target():
    model, batch = model_of("plain"), random_patients([22, 9, 1])
    reading = model._read(batch)
    per_level = []
    for latent in reading.latents:
        made = model.decoder(latent.z, reading.events.members)
        per_level.append(chamfer(made, reading.embedded, reading.events.members).sum().item())
    terms = model.losses(batch)
    assert float(terms["reconstruction"][0].detach()) == pytest.approx((per_level[0] + 2 * per_level[1]) / 3)
    assert float(model.reconstruct(batch).sum()) == pytest.approx(per_level[1])
    assert float(terms["made_code"][0].detach()) == pytest.approx(float(model.code_nll(batch).sum()))
    assert float(model.losses(replace(batch, seq_labels=None))["nll"][0]) == pytest.approx(per_level[1])
    # With the encoder out of the way nothing is left that could move the embedding.
    for parameter in model.encoder.parameters():
        parameter.data.zero_()
    grads = torch.autograd.grad(
        model.losses(batch)["reconstruction"][0], list(model.embedding.parameters()), allow_unused=True
    )
    assert all(grad is None or torch.equal(grad, torch.zeros_like(grad)) for grad in grads)


def test_other_latents_are_decoded_where_they_are_given():
    for kind in ("plain", "filter"):
        model, batch = model_of(kind), random_patients([22, 9, 1])
        own = model.vectors(batch, "set")
        assert torch.equal(model.reconstruct(batch, own), model.reconstruct(batch))
        assert (model.reconstruct(batch, own.roll(1, 0)) != model.reconstruct(batch)).all()


@pytest.mark.promise("patients.sets")
def test_nothing_is_drawn_in_eval_and_training_draws_from_torch():
    model, batch = model_of("filter"), random_patients([22, 0, 9])
    before = torch.get_rng_state()
    answers(model, batch)
    model.losses(batch)
    assert torch.equal(torch.get_rng_state(), before)
    model.train()
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(model.losses(batch)["reconstruction"][0].item())
    assert found[0] == found[1] != found[2]


def test_draws_have_the_mean_and_the_spread_of_the_posterior():
    model, batch = model_of("plain", dropout=0.0, levels=1), random_patients([3, 4])
    model.train()
    torch.manual_seed(0)
    latents = [model._read(batch).latents[-1] for _ in range(150)]
    draws = torch.stack([latent.z for latent in latents]).detach()
    sigma = (latents[0].log_var / 2).exp().detach()
    assert ((draws.mean(0) - latents[0].mean) / sigma).abs().max() < 5 / 150**0.5
    torch.testing.assert_close(draws.std(0), sigma, rtol=0.3, atol=0)


def test_only_terms_with_a_weight_are_computed_in_training():
    model, batch = model_of("plain").train(), random_patients([22, 9])
    always = {"classification", "hazard", "nll", "kl", "raw_kl"}
    assert model.begin_step(0, 10, {"classification": 1.0}) == []
    assert set(model.losses(batch)) == always
    model.begin_step(0, 10, {"next_time": 1.0})
    assert set(model.losses(batch)) == always | {"next_time"}
    assert set(model.losses(replace(batch, seq_labels=None))) == always | {"next_time", "reconstruction", "made_code"}
    model.eval()
    assert set(model.losses(batch)) == set(model.count_targets(batch)) == always | set(TERMS)


def test_weights_start_without_divergence():
    objective = Objective.of(model_of("plain"))
    assert "kl" not in objective.at(0, 100)
    assert objective.at(500, 10_000)["kl"] == pytest.approx(objective.at(1000, 10_000)["kl"] / 2)
    assert set(objective.at(5000, 10_000)) == set(TERMS)
    assert "hazard" not in Objective.of(model_of("vectors")).at(0, 1)


def test_without_labels_durations_or_values_terms_have_no_targets():
    model, batch = model_of("plain"), random_patients([30, 5])
    events = events_of(batch)
    bare = replace(events, durations=None, cause=None, has_value=torch.zeros_like(events.has_value))
    bare = replace(bare, values=torch.zeros_like(events.values))
    batch = replace(batch, seq_labels=None).with_part(bare)
    counts = model.count_targets(batch)
    assert {name for name, count in counts.items() if not count} == {"classification", "hazard", "next_value"}
    assert {name: count for name, (_, count) in model.losses(batch).items()} == counts


# --------------------------------------------------------------------------- the filter


def test_the_prior_of_a_set_is_predicted_from_the_sets_before():
    """The divergence of a first set is that from the start; a later one depends on what came before."""
    model, batch = model_of("filter", update="none"), random_patients([30])
    chosen = torch.zeros(events_of(batch).num_sets, dtype=torch.bool)
    chosen[1] = True
    before, after = model.posterior(batch), model.posterior(change_events(batch, chosen))
    assert torch.equal(before[2][0], after[2][0])
    assert torch.equal(before[0][2:], after[0][2:])  # a posterior that is no product does not know the prior
    assert (before[2][2:] != after[2][2:]).any(1).all()


# --------------------------------------------------------------------------- settings and precision


def test_bins_without_rising_edges_are_refused():
    with pytest.raises(RecipeError, match="rising edges"):
        build_model(model_config({"kind": "set_sequence", "bins": [0, 10, 5]}), NUM_CODES)


def test_bf16_stays_close_to_fp64_and_answers_are_fp32():
    batch = random_patients([40, 0, 9, 1])
    exact, low = model_of("filter"), model_of("filter", torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        got, terms = answers(low, batch), low.losses(batch)
    truth = answers(exact, batch)
    for name, value in got.items():
        assert value.dtype == torch.float32, name
        if name in ("classify", "mean", "next_codes", "reconstruct"):
            assert (value.double() - truth[name]).norm() <= 5e-2 * truth[name].norm(), name
    torch.stack([terms[name][0] for name in TERMS]).sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in low.parameters())


# --------------------------------------------------------------------------- learning


def rising_patients(num: int, seed: int) -> RaggedBatch:
    """Patients of 2 to 8 sets; the label says whether the value of code 0, measured in two of the sets, rose."""
    rng = np.random.default_rng(seed)
    sets, codes, values, times, labels = [], [], [], [], []
    for _ in range(num):
        label, count = int(rng.integers(2)), int(rng.integers(2, 9))
        measured = np.sort(rng.choice(count, 2, replace=False))
        sizes = rng.integers(1, 4, count)
        for index, size in enumerate(sizes):
            inside, told = rng.integers(1, NUM_CODES, size), rng.normal(0, 1, size)
            if index in measured:
                inside[0] = 0
                told[0] += 2 * (1 if (index == measured[1]) == bool(label) else -1)
            codes.append(inside)
            values.append(told)
        sets.append(sizes.tolist())
        times.append(np.sort(-rng.exponential(100, count)))
        labels.append(label)
    flat = np.concatenate(codes)
    batch = patient_batch(sets, flat, np.concatenate(values), np.ones(len(flat), np.bool_), np.concatenate(times))
    return replace(batch, seq_labels=torch.tensor(labels))


@pytest.mark.nightly
def test_it_learns_what_only_the_order_of_values_tells():
    sizes = {"width": 64, "heads": 2, "hidden": 128, "latent": 32, "levels": 1, "inducing": 2, "dropout": 0.0}
    model = tiny_patients_model(torch.float32, moved=False, bins=None, **sizes)
    objective = Objective.of(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(60):
        torch.manual_seed(step)
        weights, _ = objective.begin(model.train(), step, 60)
        train_step(model, [rising_patients(32, step)], optimizer, weights=weights, precision="fp32", clip=1.0)
    test = rising_patients(300, 10_000)
    with torch.no_grad():
        right = model.eval().classify(test).argmax(1) == test.seq_labels
    assert right.double().mean() > 0.9


@pytest.mark.promise("patients.competing")
def test_the_loss_of_which_event_came_is_told_apart_and_is_of_those_who_had_one():
    model, batch = model_of("competing"), random_patients([9, 0, 30, 1, 4, 12], causes=3)
    durations, cause = torch.tensor([50.0, math.nan, 400.0, 3000.0, 120.0, 700.0]), torch.tensor([2, 1, 3, 2, 0, 1])
    batch = batch.with_part(replace(events_of(batch), durations=durations, cause=cause))
    total, count = model.losses(batch)["cause"]
    assert count == model.count_targets(batch)["cause"] == 3, "not of the one without a duration, or beyond the bins"
    with torch.no_grad():
        hazards = model.hazards(batch)
        logs = hazards.log_softmax(2)  # of a cause, given an event
    assert float(total) == pytest.approx(-float(logs[0, 0, 1] + logs[2, 1, 2] + logs[5, 2, 0]))
    assert "cause" not in model_of("plain").losses(random_patients([3]))
