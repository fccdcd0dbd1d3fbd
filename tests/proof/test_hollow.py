"""A line that compared nothing says so and why, and is never PASS."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.conftest import random_batch, tiny_model
from tests.helpers.models import Own
from tests.proof.foreign.toy import Causal
from unpad import prove_callable
from unpad.batching.batch import RaggedBatch, from_sequences
from unpad.proof.certificate import _groups, prove
from unpad.proof.foreign.collators import padded
from unpad.proof.line import Line
from unpad.proof.processes import _Case, _UpdateResults
from unpad.recipes.recipe import Recipe

ISOLATED = "fp32 sequences are isolated, bit for bit"


def lines_of(model: Any, batch: RaggedBatch) -> dict[str, Line]:
    certificate = prove(model, batch)
    assert certificate.passed is None, "\n".join(certificate.text())
    open_lines = {line.name: line for line in certificate.lines if line.passed is None}
    assert all(line.note for line in open_lines.values()), "every one has its reason"
    return open_lines


def small(**fields: Any) -> Any:
    return tiny_model(torch.float32, blocks=1, **fields)


def test_one_sequence_alone_proves_no_isolation():
    found = lines_of(small(), random_batch([7]))
    for name in (
        "labels stay within their sequence",
        "packed = alone",
        "padded right = alone",
        "fp32 outputs against fp64",
    ):
        assert found[name].note == "there is only one sequence", name
    assert (
        found["no gradient crosses between sequences"].note == "there is no second sequence for a gradient to cross to"
    )
    assert found[ISOLATED].note == "no micro-batch holds two sequences, so there was no other one to look at"


def test_copies_of_a_sequence_are_not_compared_with_each_other():
    found = lines_of(small(), from_sequences([[3, 1, 4, 1, 5]] * 4))
    assert found["packed = alone"].note == "all 4 sequences have the same content"
    assert ISOLATED not in found, "a change makes them unlike"


@pytest.mark.promise("certificate.not-proven")
def test_attention_without_effect_hides_leaks():
    model = small()
    for part in model.blocks:
        part.attention.to_out.weight.data.zero_()
    assert "no token acts on a later one" in lines_of(model, random_batch([5, 7, 6]))[ISOLATED].note


@pytest.mark.promise("certificate.not-proven")
def test_a_module_that_does_not_read_its_embeddings_shows_no_gradient():
    class Deaf(Own):
        def forward(self, batch: RaggedBatch) -> Tensor:
            return self.inner(replace(batch, inputs_embeds=None))

    found = lines_of(Deaf(small()), random_batch([5, 7, 6]))
    assert "does the model read `inputs_embeds`" in found["no gradient crosses between sequences"].note


def test_sequences_of_one_token_have_no_order():
    certificate = prove(small(), from_sequences([[1, 2], [3, 4], [5, 6]]))
    line = next(line for line in certificate.lines if line.name == "a token never changes an earlier output")
    assert (line.applies, line.note) == (False, "no sequence has two tokens")
    assert certificate.passed is True, certificate.text()


@pytest.mark.parametrize("num", [2, 3, 4, 7, 16])
def test_groups_tell_any_two_sequences_apart(num):
    groups = _groups(num)
    for one in range(num):
        for other in range(num):
            assert one == other or any(one in group and other not in group for group in groups)


# --------------------------------------------------------------------------- several processes


@pytest.mark.promise("certificate.not-proven")
def test_a_process_without_work_shows_no_sum():
    recipe = Recipe(model={"kind": "decoder"})
    case = _Case(SimpleNamespace(recipe=recipe, device=torch.device("cpu")), None, {})
    one, ones = torch.ones(3), torch.zeros(3)
    for gradients, shares, passed in ((one, [2, 2], True), (one, [1, 0], None), (ones, [2, 2], None)):
        update = _UpdateResults(gradients, one, shares, ["a", "a"])
        lines = case.lines(2, update, update)
        assert [line.passed for line in lines] == [passed, passed]
        assert all(line.note for line in lines if line.passed is None)


# --------------------------------------------------------------------------- models of others


def sequences(lengths: list[int]) -> list[list[int]]:
    generator = np.random.default_rng(3)
    return [generator.integers(1, 30, n).tolist() for n in lengths]


@pytest.mark.promise("certificate.not-proven")
def test_copies_show_nothing_of_a_foreign_model():
    certificate = prove_callable(Causal(), padded("right"), [[5, 3, 8, 2]] * 3)
    assert (certificate.verdict, certificate.passed) == ("not proven", None)
    assert certificate.to_dict()["passed"] is None
    assert "all sequences of the update are alike" in " ".join(str(certificate).split())


def test_a_frozen_model_without_a_gradient_is_no_evidence():
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Causal().requires_grad_(False)
            self.nothing = nn.Parameter(torch.zeros(1))

        def forward(self, input_ids: Tensor, **inputs: Any) -> Any:
            return self.inner(input_ids=input_ids, **inputs) + 0 * self.nothing

    certificate = prove_callable(Flat(), padded("right"), sequences([6, 4, 5]))
    finding = certificate.finding("gradient")
    assert finding.passed is None
    assert finding.gap == "the gradient of the sequences alone is 0"
