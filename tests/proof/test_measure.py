"""Errors of measurements are relative norms, and each line holds up to its own bound."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.conftest import random_batch, tiny_model
from unpad.nn.kernel import Kernel
from unpad.nn.native import library
from unpad.proof import measure
from unpad.proof import measure as module
from unpad.proof.line import Line

OUTPUTS = [torch.tensor([3.0, 4.0]), torch.tensor([2.0])]
TRUTH = measure.Measurement(
    OUTPUTS, {"a": 4.0, "b": -0.5}, {"a": 3, "b": 2}, {"a": 1.0}, {"v": torch.tensor([6.0]), "w": torch.tensor([8.0])}
)
# Relative errors that are allowed of outputs, loss terms and gradients, by precision.
ALLOWED = {"fp32": (1e-5, 1e-6, 1e-4), "fp16": (5e-3, 1e-3, 2e-2), "bf16": (3e-2, 5e-3, 6e-2)}


def off(outputs: float = 0.0, terms: float = 0.0, gradient: float = 0.0) -> measure.Measurement:
    """The truth with relative errors."""
    moved = [OUTPUTS[0], OUTPUTS[1].double() * (1 + outputs)]
    grads = {"v": torch.tensor([6.0]), "w": torch.tensor([8 + 10 * gradient], dtype=torch.float64)}
    return replace(TRUTH, outputs=moved, terms={"a": 4.0, "b": -0.5 * (1 + terms)}, gradients=grads)


def test_errors_are_the_largest_of_outputs_and_terms_and_one_of_all_gradients():
    assert measure.errors(TRUTH, TRUTH) == (0, 0, 0)
    assert measure.errors(off(0.01, 0.02, 0.03), TRUTH) == pytest.approx((0.01, 0.02, 0.03))
    both = replace(TRUTH, outputs=[torch.tensor([3.0, 4.5]), torch.tensor([2.5])])
    assert measure.errors(both, TRUTH)[0] == pytest.approx(max(0.5 / 5, 0.5 / 2))
    nothing = measure.Measurement([], {}, {}, {}, {})
    assert measure.errors(nothing, nothing) == (0, 0, 0)


def test_what_cannot_be_compared_is_infinitely_far():
    inf, nan = math.inf, math.nan
    assert measure.errors(replace(TRUTH, outputs=[OUTPUTS[0][:1], OUTPUTS[1]]), TRUTH) == (inf, 0, 0)
    assert measure.errors(replace(TRUTH, outputs=[torch.tensor([nan, 4.0]), OUTPUTS[1]]), TRUTH)[0] == inf
    assert measure.errors(replace(TRUTH, counts={"a": 3, "b": 3}), TRUTH) == (0, inf, inf)
    assert measure.errors(replace(TRUTH, terms={"a": nan, "b": nan}), TRUTH)[1] == inf
    assert measure.errors(replace(TRUTH, gradients={"v": torch.tensor([6.0])}), TRUTH) == (0, 0, inf)
    assert measure.errors(replace(TRUTH, gradients={"v": torch.tensor([6.0]), "x": torch.tensor([8.0])}), TRUTH) == (
        0,
        0,
        inf,
    )
    assert measure.errors(replace(TRUTH, gradients={**TRUTH.gradients, "w": torch.tensor([nan])}), TRUTH)[2] == inf
    zero = replace(TRUTH, outputs=[torch.zeros(2), OUTPUTS[1]])
    assert measure.errors(zero, zero)[0] == 0
    assert measure.errors(TRUTH, zero)[0] > 1e20


def subject(truth: measure.Measurement = TRUTH, **fields: Any) -> measure.ProofSubject:
    return measure.ProofSubject(tiny_model(), truth, torch.device("cpu"), lambda *_: None, **fields)


def measuring(monkeypatch: pytest.MonkeyPatch, *found: measure.Measurement) -> None:
    """Let measurements give these, one after the other, and the last of them ever after."""
    left = list(found)
    monkeypatch.setattr(module, "measure", lambda *_: left.pop(0) if len(left) > 1 else left[0])


VARIANT = measure.Variant("packed", [], [])


@pytest.mark.parametrize("precision", ALLOWED)
@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("factor", [0.99, 1.01])
def test_every_error_has_its_own_bound(monkeypatch, precision, which, factor):
    allowed = ALLOWED[precision]
    wrong = [factor * allowed[i] if i == which else 0.0 for i in range(3)]
    measuring(monkeypatch, off(*wrong))
    lines = measure.error_lines(subject(prefix="soft: "), VARIANT, precision)
    names = [f"soft: {precision} {what} against fp64" for what in ("outputs", "loss terms", "gradients")]
    assert [line.name for line in lines] == names
    assert [line.bound for line in lines] == list(allowed)
    assert [line.measured for line in lines] == pytest.approx(wrong)
    assert [line.passed for line in lines] == [factor < 1 or i != which for i in range(3)]


def test_some_terms_can_be_left_out_of_a_comparison(monkeypatch):
    measuring(monkeypatch, replace(off(terms=0.5), counts={"a": 3, "b": 9}))
    assert [line.passed for line in measure.error_lines(subject(), VARIANT, "fp32")] == [True, False, False]
    assert [line.passed for line in measure.error_lines(subject(), VARIANT, "fp32", ["a"])] == [True, True, True]
    assert [line.passed for line in measure.error_lines(subject(), VARIANT, "fp32", ["b"])] == [True, False, False]


@pytest.mark.parametrize("which", range(3))
def test_a_way_to_batch_is_equal_up_to_one_part_in_ten_billion(monkeypatch, which):
    for error, passed in ((0.9e-10, True), (1.1e-10, False)):
        measuring(monkeypatch, off(*(error if i == which else 0.0 for i in range(3))))
        line = measure.equal_line(subject(prefix="hard: ", truth_name="reference"), VARIANT)
        assert line == Line("hard: packed = reference", "", pytest.approx(error, rel=1e-4), 1e-10, passed)
    measuring(monkeypatch, replace(TRUTH, compared=False))
    assert measure.equal_line(subject(), VARIANT).name == "packed = alone, terms and gradients"


def test_native_kernels_may_err_two_fifths_more_than_those_of_torch(monkeypatch):
    mine = Line("bf16 gradients against fp64", f"{Kernel.NATIVE.value}, padded sdpa", 0.02, 0.06, True)
    for by_torch, passed in ((0.02 / 1.39, True), (0.02 / 1.41, False)):
        measuring(monkeypatch, off(gradient=by_torch))
        [line] = measure.native_lines(subject(), VARIANT, "bf16", mine)
        assert (line.name, line.kernel) == ("bf16 gradient error over that of torch's kernels", mine.kernel)
        assert (line.measured, line.bound, line.passed) == (pytest.approx(0.02 / by_torch), 1.4, passed)
    monkeypatch.setattr(module, "measure", lambda *_: off(gradient=0.02 if library.enabled() else 0.01))
    assert measure.native_lines(subject(), VARIANT, "bf16", mine)[0].measured == pytest.approx(2), (
        "they are switched off"
    )
    for other in (replace(mine, kernel="group sdpa"), replace(mine, measured=None)):
        [line] = measure.native_lines(subject(), VARIANT, "bf16", other)
        assert (line.passed, line.applies) == (None, False)


def test_gradients_are_copies_of_those_that_exist():
    model = tiny_model()
    names = list(dict(model.named_parameters()))
    model.get_parameter(names[0]).grad = torch.ones_like(model.get_parameter(names[0]))
    found = measure.gradients(model)
    assert list(found) == names[:1]
    model.zero_grad(set_to_none=False)
    assert float(found[names[0]].min()) == 1


def test_other_batches_hold_every_sequence_once():
    batch = random_batch([5, 2, 7, 1])
    made = {name: make() for name, make in measure.more_variants(batch).items()}
    assert {name: variant.rows for name, variant in made.items()} == {
        "padded right": [[0, 2], [1, 3]], "padded left": [[0, 2], [1, 3]], "padded further": [[0, 1, 2, 3]],
        "split into micro-batches, one empty": [[1], [], [3, 0], [2]],
            "not sorted by length": [[0, 1, 3, 2]],
    }  # fmt: skip
    for name, variant in made.items():
        assert variant.name == name
        for micro, rows in zip(variant.micros, variant.rows, strict=True):
            assert micro.attended.lengths().tolist() == [[5, 2, 7, 1][row] - 1 for row in rows]
    assert {name: shapes(one) for name, one in made.items() if "pad" in name} == {
        "padded right": [(2, 6), (2, 1)], "padded left": [(2, 6), (2, 1)], "padded further": [(4, 13)],
    }  # fmt: skip
    assert made["padded left"].micros[0].layout.attention_mask[0].tolist() == [False] * 2 + [True] * 4


def shapes(variant: measure.Variant) -> list[tuple[int, ...]]:
    return [tuple(micro.layout.attention_mask.shape) for micro in variant.micros]


@pytest.mark.promise("certificate.every-line")
@pytest.mark.parametrize("num", [2, 3, 4, 5])
def test_rectangles_of_sequences_of_one_length_have_padding(num):
    made = {name: make() for name, make in measure.more_variants(random_batch([6] * num)).items()}
    for name in ("padded right", "padded left", "padded further"):
        masks = [micro.layout.attention_mask for micro in made[name].micros]
        assert not all(bool(mask.all()) for mask in masks), name
        assert num < 4 or name == "padded further" or bool(masks[0].all()), "and one that is full"


@pytest.mark.promise("certificate.every-line")
@pytest.mark.parametrize("lengths", [[6] * 3, [6] * 4, [6] * 16, [9, 5, 9, 5], [3, 4, 8]])
def test_a_split_has_unlike_numbers_of_targets(lengths):
    split = measure.more_variants(random_batch(lengths, share=1.0))["split into micro-batches, one empty"]()
    assert len({micro.num_targets for micro in split.micros if micro.num_seqs}) > 1
    assert split.gap == ""


@pytest.mark.parametrize("num", [4, 5, 8])
def test_a_split_has_a_third_micro_batch_that_a_step_could_forget(num):
    split = measure.more_variants(random_batch([6] * num))["split into micro-batches, one empty"]()
    assert [micro.num_seqs > 0 for micro in split.micros] == [True, False, True, True]
    assert sorted(seq for rows in split.rows for seq in rows) == list(range(num))


def test_a_split_of_two_alike_says_that_it_shows_nothing():
    split = measure.more_variants(random_batch([6, 6], share=1.0))["split into micro-batches, one empty"]()
    assert "mean of micro-batch means" in split.gap


def test_one_token_of_every_sequence_or_of_one_is_changed():
    batch = random_batch([5, 2, 7])
    bounds = batch.layout.cu_seqlens.tolist()
    for only, where, places in (
        (None, lambda a, b: a, bounds[:-1]),
        (None, lambda a, b: b - 1, [end - 1 for end in bounds[1:]]),
        (1, lambda a, b: a, bounds[1:2]),
    ):
        changed, found = measure.change_tokens(batch, where, only)
        assert found == places
        assert (changed.input_ids != batch.input_ids).nonzero().flatten().tolist() == places
