"""The certificate for a model and a collator that are not ours."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import unpad
from tests.proof.foreign.toy import IGNORE, Causal, flat, padded, sequences
from unpad.errors import ProofError

Batch = dict[str, Tensor]
Collate = Callable[[list[list[int]]], "Batch | list[Batch]"]


def without(batch: Batch, *names: str) -> Batch:
    return {name: value for name, value in batch.items() if name not in names}


def two_batches(given: list[list[int]]) -> list[Batch]:
    return [padded(given[::2]), padded(given[1::2])] if len(given) > 1 else [padded(given)]


SOUND: dict[str, Collate] = {
    "padded right": padded,
    "padded right without a mask": lambda given: without(padded(given), "attention_mask"),
    "packed": flat,
    "several batches": two_batches,
    "shifted labels": lambda given: {
        **without(flat(given), "labels"),
        "shift_labels": torch.cat([flat(given)["labels"][:, 1:], torch.tensor([[IGNORE]])], 1),
    },
    "prompts masked": lambda given: (
        (batch := flat(given)) | {"labels": torch.where(batch["position_ids"] < 2, IGNORE, batch["labels"])}
    ),
}


@pytest.mark.promise("proof.formats")
@pytest.mark.parametrize("name", SOUND)
def test_sound_batches_of_any_format_pass(name):
    certificate = unpad.prove_callable(Causal(), SOUND[name], sequences())
    assert certificate.passed, str(certificate)
    assert certificate.precision == "fp64"
    assert certificate.num_sequences == 7


def crossing(given: list[list[int]]) -> Batch:
    batch = flat(given)
    return {**batch, "labels": batch["input_ids"]}


def padding_scored(given: list[list[int]]) -> Batch:
    batch = padded(given)
    return {**batch, "labels": batch["input_ids"]}


def shifted_twice(given: list[list[int]]) -> Batch:
    batch = padded(given)
    return {**batch, "labels": torch.cat([batch["labels"][:, 1:], torch.full((len(given), 1), IGNORE)], 1)}


def restarted_in_part(given: list[list[int]]) -> Batch:
    """Positions that restart at the second half of the sequences alone; the model reads nothing else."""
    batch = without(flat(given), "document_ids")
    places = batch["position_ids"].clone()
    first = sum(map(len, given[: len(given) // 2]))
    places[0, :first] = torch.arange(first)
    return {**batch, "position_ids": places}


FAULTS: dict[str, tuple[Collate, str, str, str]] = {  # collator, verdict, kind, part of the advice
    "padded left": (lambda given: padded(given, "left"), "wrong loss", "padding", "targets predicted from padding: "),
    "positions of padding": (lambda given: padded(given, "left"), "wrong loss", "logits", "positions count from the"),
    "labels cross": (crossing, "leaking", "crossing", "predicted from another document: 6; set the label of each"),
    "no documents": (lambda given: without(flat(given), "document_ids"), "leaking", "isolation", "keep them apart"),
    "no positions": (
        lambda given: without(flat(given), "document_ids", "position_ids"), "leaking", "isolation", "set position_ids",
    ),
    "positions restart in part": (restarted_in_part, "leaking", "isolation", "position_ids that restart at 0"),
    "padding scored": (padding_scored, "wrong loss", "padding", "set the labels of padding"),
    "cut": (lambda given: padded([one[:9] for one in given]), "cut", "cut", "9 tokens of 2 sequences"),
    "shifted twice": (shifted_twice, "wrong loss", "targets", "shifted twice"),
}  # fmt: skip


@pytest.mark.promise("proof.faults")
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_and_named(name):
    collate, verdict, kind, advice = FAULTS[name]
    certificate = unpad.prove_callable(Causal(), collate, sequences())
    assert certificate.verdict == verdict
    assert advice in {finding.kind: finding.advice for finding in certificate.failed}[kind]


@pytest.mark.promise("proof.changes-nothing")
def test_nothing_of_the_model_and_of_the_generators_changes():
    model = Causal()
    model.head.weight.grad = torch.ones_like(model.head.weight)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    for precision in ("fp64", "fp32"):
        assert unpad.prove_callable(model, flat, sequences(), precision=precision).passed
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert bool((model.head.weight.grad == 1).all())
    assert model.embed.weight.grad is None


def test_a_model_that_does_not_learn_is_judged_without_a_gradient():
    certificate = unpad.prove_callable(Causal().requires_grad_(False), flat, sequences())
    assert certificate.passed
    assert certificate.finding("gradient") is None


@pytest.mark.promise("proof.precision")
def test_fp32_has_bounds_of_the_model_s_own_error():
    exact = unpad.prove_callable(Causal(), flat, sequences())
    own = unpad.prove_callable(Causal(), flat, sequences(), precision="fp32")
    assert own.passed
    assert own.precision == "fp32"
    for one, other in zip(exact.findings[-3:], own.findings[-3:], strict=True):
        assert one.bound == 1e-10
        assert 1e-6 < other.bound < 1e-4


@pytest.mark.parametrize("given", [[], [[1, 2, 3]], [[1], []]])
def test_too_few_sequences_are_an_error(given):
    with pytest.raises(ProofError, match=r"two sequences|an empty one"):
        unpad.prove_callable(Causal(), padded, given)
