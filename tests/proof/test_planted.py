"""Every line of the certificate fails for a fault of its claim, whether lengths are ragged, all alike, or two."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.conftest import random_batch, tiny_model
from tests.helpers.paths import NATIVE_PRECISION
from unpad.batching import batch as batch_module
from unpad.batching import layout as layout_module
from unpad.batching.batch import RaggedBatch
from unpad.batching.layout import Layout, PaddedLayout, build_layout
from unpad.models.decoder import Decoder
from unpad.nn import attention, block
from unpad.nn.attend import Attend
from unpad.nn.attention import reference_attention
from unpad.nn.native import library
from unpad.nn.precision import Precision
from unpad.proof.certificate import certify
from unpad.proof.line import Certificate
from unpad.proof.measure import Variant, claims_of

SHAPES = {"ragged": [9, 3, 13, 6, 11, 4, 8], "one length": [9] * 7, "two lengths": [11, 6, 11, 6, 11, 6, 11]}
PACK = ([0, 2, 4], [1, 3, 5, 6])
Patch = pytest.MonkeyPatch
REPEAT, CROSSING = "the same batch twice is bit-equal (no dropout left on)", "no gradient crosses between sequences"
PADDING, LABELS = "what padding holds is invisible", "labels stay within their sequence"
ORDER = "a token never changes an earlier output"
RIGHT, LEFT, FURTHER = "padded right = alone", "padded left = alone", "padded further = alone"
UNSORTED, UNSORTED_TORCH = "not sorted by length = alone", "not sorted by length, torch alone = alone"
SPLIT, PLAN, TORCH = (
    "split into micro-batches, one empty = alone",
    "plan pack = alone",
    "plan pack, torch alone = alone",
)


def plan_pack(batch: RaggedBatch) -> Variant:
    return Variant("plan pack", [batch.select(rows) for rows in PACK], PACK, is_plan=True)


def certified(
    shape: str, change: Callable[[Variant], Variant] = lambda made: made, precision: Precision = "fp32", **fields: Any
) -> Certificate:
    """Certificate of a decoder on seven sequences in micro-batches of three and four, like that of a recipe."""
    model = tiny_model(torch.float32, **{"blocks": 1, **fields})
    batch = random_batch(SHAPES[shape], share=1.0)
    return certify(model, claims_of(model).alone(batch), [change(plan_pack(batch))], precision=precision)


# --------------------------------------------------------------------------- faults


def leak(patch: Patch) -> None:
    """The first token of every sequence but the first sees the last token of the one before."""

    def across(qkv: Tensor, layout: Layout | PaddedLayout, heads: int, how: Attend) -> Tensor:
        out = attention.self_attention(qkv, layout, heads, how)
        if isinstance(layout, PaddedLayout) or layout.num_seqs < 2:
            return out
        out, kv_heads = out.clone(), (qkv.shape[1] - heads) // 2
        q, k, v = qkv.split([heads, kv_heads, kv_heads], 1)
        pair = build_layout(np.array([2]))
        for start in layout.cu_seqlens[1:-1].tolist():
            both = slice(start - 1, start + 1)
            out[start : start + 1] = reference_attention(q[both], k[both], v[both], pair, Attend(how.causal))[1:]
        return out

    patch.setattr(block, "self_attention", across)


def positions_go_on(made: Variant) -> Variant:
    return replace(made, micros=[replace(one, position_ids=torch.arange(one.total_tokens)) for one in made.micros])


def labels_across(made: Variant) -> Variant:
    """The last label of every sequence is the first token of the next."""

    def across(one: RaggedBatch) -> RaggedBatch:
        return replace(one, labels=torch.cat([one.input_ids[1:], one.labels[-1:]]))

    return replace(made, micros=[across(one) for one in made.micros])


def loses_a_gradient(patch: Patch) -> None:
    """The gradient of the first micro-batch is thrown away where there are two."""
    measure = sys.modules["unpad.proof.measure"]
    right = measure.accumulate

    def without_first(model: Any, micros: Sequence[RaggedBatch], *rest: Any) -> Any:
        result = right(model, micros, *rest)
        if sum(bool(one.num_targets) for one in micros) > 1:
            own = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            model.zero_grad()
            right(model, micros[:1], *rest)
            lost = {name: p.grad for name, p in model.named_parameters()}
            for name, p in model.named_parameters():
                p.grad = own[name] - lost[name] if lost[name] is not None else own[name]
        return result

    patch.setattr(measure, "accumulate", without_first)


def mean_of_means(patch: Patch) -> None:
    def means(model: Any, micros: Sequence[RaggedBatch], weights: Any, precision: str, scale: float = 1.0) -> Any:
        sums: dict[str, Tensor] = {}
        counts: dict[str, int] = {}
        full = [one for one in micros if one.num_targets]
        for one in full:
            terms = model.losses(one)
            (terms["cross_entropy"][0] / one.num_targets / len(full)).backward()
            for name, (total, count) in terms.items():
                sums[name] = sums.get(name, torch.zeros(())) + total.detach()
                counts[name] = counts.get(name, 0) + count
        return sums, counts

    patch.setattr(sys.modules["unpad.proof.measure"], "accumulate", means)


def padding_counts(patch: Patch) -> None:
    right = RaggedBatch.pad

    def counted(self: RaggedBatch, *args: Any, **kwargs: Any) -> RaggedBatch:
        padded = right(self, *args, **kwargs)
        everywhere = torch.ones_like(padded.loss_mask)
        return replace(padded, loss_mask=everywhere, target_index=everywhere.nonzero().flatten())

    patch.setattr(batch_module.RaggedBatch, "pad", counted)


def padding_is_seen(patch: Patch) -> None:
    right = attention._padded
    patch.setattr(attention, "_padded", lambda q, k, v, mask, *rest: right(q, k, v, torch.ones_like(mask), *rest))


def dropout_stays_on(patch: Patch) -> None:
    right = Decoder.forward

    def noisy(own: Decoder, batch: RaggedBatch, *rest: Any, **options: Any) -> Tensor:
        return right(own, batch, *rest, **options) * (1 + 1e-3 * torch.rand(()))

    patch.setattr(Decoder, "forward", noisy)


def order_is_open(patch: Patch) -> None:
    def open_mask(qkv: Tensor, layout: Layout | PaddedLayout, heads: int, how: Attend) -> Tensor:
        return attention.self_attention(qkv, layout, heads, replace(how, causal=False))

    patch.setattr(block, "self_attention", open_mask)


def torch_is_off(patch: Patch) -> None:
    """What runs without native kernels is off where a run has two sequences."""
    right = block.self_attention

    def off(qkv: Tensor, layout: Layout | PaddedLayout, *rest: Any, **options: Any) -> Tensor:
        factor = 1.0 if library.enabled() or layout.num_seqs < 2 else 1.01
        return factor * right(qkv, layout, *rest, **options)

    patch.setattr(block, "self_attention", off)


def native_is_off(patch: Patch) -> None:
    right = attention.native_attention
    patch.setattr(attention, "native_attention", lambda *args, **options: 1.05 * right(*args, **options))


def low_precision(patch: Patch) -> None:
    """In fp32, runs of several sequences are rounded to eight bits."""
    right = Decoder.forward

    def rounded(own: Decoder, batch: RaggedBatch, *rest: Any, **options: Any) -> Tensor:
        out = right(own, batch, *rest, **options)
        return out if out.dtype == torch.float64 or batch.num_seqs < 2 else out.bfloat16().float()

    patch.setattr(Decoder, "forward", rounded)


def rounds_losses(patch: Patch) -> None:
    right = Decoder.losses

    def rounded(own: Decoder, batch: RaggedBatch, *rest: Any) -> Any:
        terms = right(own, batch, *rest)
        exact = own.embed.weight.dtype == torch.float64
        return terms if exact else {name: (total * (1 + 1e-4), count) for name, (total, count) in terms.items()}

    patch.setattr(Decoder, "losses", rounded)


def undo_is_the_order(patch: Patch) -> None:
    """Tokens sorted by length are put back by the order that sorted them."""
    right = layout_module._group_run

    def same_twice(lengths: np.ndarray) -> Any:
        made = right(lengths)
        return replace(made, undo=made.by_length)

    patch.setattr(layout_module, "_group_run", same_twice)


def merges_equal_neighbours(patch: Patch) -> None:
    """Neighbours of one length are one sequence."""
    right = block.self_attention

    def merged(qkv: Tensor, layout: Layout | PaddedLayout, *rest: Any, **options: Any) -> Tensor:
        if isinstance(layout, Layout):
            runs = [list(run) for _, run in groupby(layout.lengths().tolist())]
            layout = build_layout(np.array([sum(run) for run in runs]))
        return right(qkv, layout, *rest, **options)

    patch.setattr(block, "self_attention", merged)


@dataclass(frozen=True)
class Fault:
    """A fault, and lines that fail for it; those in `fields` need a model of this kind."""

    lines: tuple[str, ...]
    plant: Callable[[Patch], None] = lambda patch: None
    change: Callable[[Variant], Variant] = lambda made: made
    fields: dict[str, Any] = field(default_factory=dict)
    precision: Precision = "fp32"


OFF = {"width": 64, "heads": 2}  # head size 32, which the native kernels take in bf16
NATIVE = f"{NATIVE_PRECISION} gradient error over that of torch's kernels"
FAULTS = {
    "a key across": Fault((PLAN, CROSSING, SPLIT, UNSORTED, "fp32 sequences are isolated, bit for bit"), leak),
    "positions go on": Fault((LABELS, PLAN), change=positions_go_on, fields={"positions": "learned"}),
    "labels across": Fault((LABELS,), change=labels_across),
    "a lost gradient": Fault((PLAN, SPLIT), loses_a_gradient),
    "mean of means": Fault((PLAN, SPLIT, "fp32 gradients against fp64"), mean_of_means),
    "padding counts": Fault((RIGHT, LEFT, FURTHER), padding_counts),
    "padding is seen": Fault((RIGHT, LEFT, FURTHER, PADDING), padding_is_seen, fields={"causal": False}),
    "dropout stays on": Fault((REPEAT, PLAN), dropout_stays_on),
    "order is open": Fault((ORDER,), order_is_open),
    "torch is off": Fault((TORCH, UNSORTED_TORCH), torch_is_off),
    "native is off": Fault((PLAN, NATIVE), native_is_off, fields=OFF, precision=NATIVE_PRECISION),
    "low precision": Fault(("fp32 outputs against fp64", "fp32 gradients against fp64"), low_precision),
    "losses off": Fault(("fp32 loss terms against fp64",), rounds_losses),
}  # fmt: skip
NEEDS_NATIVE = {"torch is off", "native is off"}


@pytest.mark.promise("certificate.every-line", "certificate.faults")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_fails_its_lines_on_every_shape_of_data(name, shape, monkeypatch):
    if name in NEEDS_NATIVE and not library.enabled():
        pytest.skip("no native kernels here")
    fault = FAULTS[name]
    fault.plant(monkeypatch)
    certificate = certified(shape, fault.change, fault.precision, **fault.fields)
    failed = {line.name for line in certificate.lines if line.passed is False}
    assert set(fault.lines) <= failed, "\n".join(certificate.text())
    assert certificate.passed is False


APART = {"sorted": [13, 11, 9, 8, 6, 4, 3], "equal ones apart": [9, 3, 13, 6, 11, 4, 9]}


@pytest.mark.promise("certificate.orders")
@pytest.mark.parametrize(
    ("shape", "plant", "lines"),
    [("sorted", undo_is_the_order, {UNSORTED_TORCH}), ("equal ones apart", merges_equal_neighbours, {UNSORTED})],
)
def test_a_fault_fails_a_line_though_no_plan_has_the_order_that_shows_it(shape, plant, lines, monkeypatch):
    if plant is undo_is_the_order and not library.enabled():
        lines = {UNSORTED}
    model = tiny_model(torch.float32, blocks=1)
    batch = random_batch(APART[shape], share=1.0)
    alone, packs = claims_of(model).alone(batch), ([0, 1, 2], [3, 4, 5, 6])
    made = Variant("plan pack", [batch.select(rows) for rows in packs], packs, is_plan=True)
    assert certify(model, alone, [made]).passed
    plant(monkeypatch)
    certificate = certify(model, alone, [made])
    failed = {line.name for line in certificate.lines if line.passed is False}
    assert lines <= failed, "\n".join(certificate.text())
    assert "plan pack = alone" not in failed
    assert "plan pack, torch alone = alone" not in failed


def runs_on(from_seq: int, native: bool) -> Callable[[Patch], None]:
    """From a sequence on all are one, in native kernels or without them."""

    def plant(patch: Patch) -> None:
        right = block.self_attention

        def joined(qkv: Tensor, layout: Layout | PaddedLayout, *rest: Any, **options: Any) -> Tensor:
            if isinstance(layout, Layout) and library.enabled() == native and layout.num_seqs > from_seq:
                lengths = layout.lengths().numpy()
                layout = build_layout(np.append(lengths[:from_seq], lengths[from_seq:].sum()))
            return right(qkv, layout, *rest, **options)

        patch.setattr(block, "self_attention", joined)

    return plant


@pytest.mark.promise("certificate.orders")
@pytest.mark.parametrize(
    ("from_seq", "native", "line"),
    [
        (32, library.enabled(), "many in one run = alone"),
        (32, library.enabled(), "many in one run are isolated, bit for bit"),
        (32, False, "many in one run, torch alone = alone" if library.enabled() else "many in one run = alone"),
        (4, False, UNSORTED_TORCH if library.enabled() else UNSORTED),
    ],
)
def test_a_fault_from_some_number_of_sequences_on_fails_a_line(from_seq, native, line, monkeypatch):
    model, batch = tiny_model(torch.float32, blocks=1), random_batch(SHAPES["ragged"], share=1.0)
    alone, many = (claims_of(model).alone(one) for one in (batch, random_batch([2, 3, 4, 5] * 10, share=1.0)))
    assert certify(model, alone, [plan_pack(batch)], many=many).passed
    runs_on(from_seq, native)(monkeypatch)
    certificate = certify(model, alone, [plan_pack(batch)], many=many)
    failed = {line.name for line in certificate.lines if line.passed is False}
    assert line in failed, "\n".join(certificate.text())
    assert not {PLAN, TORCH} & failed, "micro-batches of a plan have fewer"


@pytest.mark.promise("certificate.every-line")
@pytest.mark.parametrize("shape", SHAPES)
def test_without_a_fault_every_line_is_shown_on_every_shape_and_has_a_fault(shape):
    certificate = certified(shape, precision=NATIVE_PRECISION, **OFF)
    assert certificate.passed is True, "\n".join(certificate.text())
    planted = {line.replace("fp32", NATIVE_PRECISION) for fault in FAULTS.values() for line in fault.lines}
    assert {line.name for line in certificate.lines if line.applies} <= planted
