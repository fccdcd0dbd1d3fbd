"""Measurements of one batching variant, the lines that compare them with the reference, and the claims of a model.

The claims about each kind of input have a file of this folder, which `Model.claims` names.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import pairwise

import torch
from torch import Tensor

from unpad.batching.batch import RaggedBatch, Side, concatenate, from_padded
from unpad.batching.layout import Layout, PaddedLayout
from unpad.models.contract import Model
from unpad.nn.kernel import Kernel, noted
from unpad.nn.losses import all_rows
from unpad.nn.native import library
from unpad.nn.precision import Precision, autocast
from unpad.proof.foreign.measure import relative
from unpad.proof.line import Line, not_applicable
from unpad.training.step import accumulate

EXACT = 1e-10
# Relative error allowed of (outputs, loss terms, gradients) against fp64. bf16 keeps 8 bits: one rounding is 0.4 %,
# and a deep network's gradient adds up a few.
BOUNDS = {"fp32": (1e-5, 1e-6, 1e-4), "fp16": (5e-3, 1e-3, 2e-2), "bf16": (3e-2, 5e-3, 6e-2)}
# Largest ratio of the native kernels' error to torch's in the same precision. In fp32 both are a few roundings in
# different orders of sums; in the other precisions the same numbers are rounded.
NATIVE_ERROR = {"fp32": 2.0, "fp16": 1.4, "bf16": 1.4}
# Largest addition to the gradients' error from leaving out targets (nn/losses.py).
FEWER_ERROR = 1.1
FURTHER = 7  # cells that a rectangle is wider than its longest row, to be padded further
NO_NATIVE = "no native kernel of attention runs here"
PADDED_RIGHT, PADDED_LEFT, PADDED_MORE = "padded right", "padded left", "padded further"
SPLIT = "split into micro-batches, one empty"
UNSORTED = "not sorted by length"
MOST_MANY = 40  # number of sequences of the run with the most sequences
MOST_CHANGED = 6  # sequences of a micro-batch that the isolation line changes

# Reads the outputs of every sequence of a batch; returns None if a rectangle does not separate them from padding.
Outputs = Callable[[Model, RaggedBatch], list[Tensor] | None]


@dataclass(frozen=True)
class Variant:
    """One way to batch all sequences once: its micro-batches, and the sequence of each row (-1: filler).

    Args:
        is_plan: whether a planner made it, which cuts a step into several micro-batches.
        gap: the reason why its comparison with sequences alone proves nothing; empty if it can.
    """

    name: str
    micros: Sequence[RaggedBatch]
    rows: Sequence[Sequence[int]]
    is_plan: bool = False
    gap: str = ""


@dataclass(frozen=True)
class Measurement:
    """Outputs of all sequences, loss terms that have targets, and gradients; all on the processor.

    Args:
        weights: weights of the terms in the gradients.
        compared: False if the outputs could not be read; `outputs` are then the reference's.
    """

    outputs: list[Tensor]
    terms: dict[str, float]
    counts: dict[str, int]
    weights: dict[str, float]
    gradients: dict[str, Tensor]
    compared: bool = True


def kernel_names(kernels: Iterable[Kernel]) -> str:
    """Names of attention kernels, each once; a model without attention runs none."""
    return ", ".join(sorted(kernel.value for kernel in set(kernels)))


@dataclass(frozen=True)
class ProofSubject:
    """A model under proof, its reference, and the functions that compare both.

    Args:
        model: in evaluation mode, on `device`.
        truth: results of every sequence alone, in fp64.
        outputs: reads the outputs of a batch.
        prefix: before the names of lines.
        truth_name: in the names of lines.
        gap: the reason why equality with this reference proves nothing; empty for none.
    """

    model: Model
    truth: Measurement
    device: torch.device
    outputs: Outputs
    prefix: str = ""
    truth_name: str = "alone"
    gap: str = ""

    def claim(self, variant: str) -> str:
        """Name of the line on a variant."""
        return f"{self.prefix}{variant} = {self.truth_name}"


# --------------------------------------------------------------------------- measurements


def one_at_a_time(
    model: Model, alone: Sequence[RaggedBatch], weights: dict[str, float], outputs: Outputs
) -> Measurement:
    """Measure each sequence as a batch of its own; each loss is divided by its count over all of them."""
    model.zero_grad()
    per_batch = [model.count_targets(batch) for batch in alone]
    counts = {name: sum(one[name] for one in per_batch) for name in per_batch[0]}
    hidden: list[Tensor] = []
    sums: dict[str, float] = {}
    for batch, present in zip(alone, per_batch, strict=True):
        with torch.no_grad():
            hidden += outputs(model, batch) or []
        if any(present[name] for name in weights):
            terms = model.losses(batch)
            trained = [weight * terms[name][0] / counts[name] for name, weight in weights.items() if counts[name]]
            torch.stack(trained).sum().backward()
            sums = {name: sums.get(name, 0.0) + float(value[0].detach()) for name, value in terms.items()}
    counts = {name: counts[name] for name in sums if counts[name]}
    means = {name: sums[name] / count for name, count in counts.items()}
    return Measurement([one.cpu() for one in hidden], means, counts, weights, gradients(model))


def bundles_at_a_time(
    model: Model, alone: Sequence[RaggedBatch], weights: dict[str, float], outputs: Outputs
) -> Measurement:
    """Measure each bundle of sequences, such as the two replies of a pair, as a batch of its own; most bundles are
    single sequences. Outputs are in the order of `alone`."""
    bundles = concatenate(alone).bundles
    if len(bundles) == len(alone):
        return one_at_a_time(model, alone, weights, outputs)
    together = [concatenate([alone[seq] for seq in members]) for members in bundles]
    found = one_at_a_time(model, together, weights, outputs)
    order = [seq for members in bundles for seq in members]
    by_seq = dict(zip(order, found.outputs, strict=True))
    return replace(found, outputs=[by_seq[seq] for seq in range(len(alone))])


def measure(subject: ProofSubject, variant: Variant, precision: Precision) -> Measurement:
    """Measure a variant through the same `accumulate` that training uses."""
    model, truth, device = subject.model, subject.truth, subject.device
    model.zero_grad()
    micros = [batch.to(device) for batch in variant.micros]
    sums, counts = accumulate(model, micros, truth.weights, precision)
    counts = {name: count for name, count in counts.items() if count}
    terms = {name: float(sums[name]) / count for name, count in counts.items()}
    outputs, compared = [torch.zeros(0)] * len(truth.outputs), True
    with torch.no_grad(), autocast(precision, device):
        for batch, rows in zip(micros, variant.rows, strict=True):
            hidden = subject.outputs(model, batch)
            if hidden is None:
                compared = False
                continue
            for row, output in zip(rows, hidden, strict=True):
                if row >= 0:
                    outputs[row] = output.cpu()
    return Measurement(outputs if compared else truth.outputs, terms, counts, truth.weights, gradients(model), compared)


def gradients(model: Model) -> dict[str, Tensor]:
    """Copies of all gradients, on the processor."""
    return {name: p.grad.clone().cpu() for name, p in model.named_parameters() if p.grad is not None}


def per_sequence(values: Tensor, batch: RaggedBatch) -> list[Tensor]:
    """Split (total_tokens, ...) by sequence, without padding."""
    if isinstance(batch.layout, PaddedLayout):
        mask = batch.layout.attention_mask
        values = from_padded(values.unflatten(0, mask.shape), mask)
    return list(values.split(batch.layout.lengths().tolist()))


def largest_error(got: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """Largest of the relative errors of outputs."""
    return max((relative(a, b) for a, b in zip(got, wanted, strict=True)), default=0.0)


def errors(got: Measurement, wanted: Measurement) -> tuple[float, float, float]:
    """Largest relative errors of outputs, loss terms (counts must be equal) and gradients as one vector."""
    outputs = largest_error(got.outputs, wanted.outputs)
    if got.counts != wanted.counts:
        return outputs, float("inf"), float("inf")
    terms = max((abs(got.terms[n] - v) / max(abs(v), 1e-30) for n, v in wanted.terms.items()), default=0.0)
    if got.gradients.keys() != wanted.gradients.keys():
        return outputs, terms, float("inf")
    flat = [torch.cat([g.double().flatten() for g in m.gradients.values()] or [torch.zeros(0)]) for m in (got, wanted)]
    return outputs, terms if terms == terms else float("inf"), relative(*flat)


# --------------------------------------------------------------------------- lines in fp64


def equal_line(subject: ProofSubject, variant: Variant) -> Line:
    """The variant equals the truth, in fp64."""
    with noted() as ran:
        got = measure(subject, variant, "fp32")
    error = max(errors(got, subject.truth))
    name = subject.claim(variant.name) + ("" if got.compared else ", terms and gradients")
    return Line(name, kernel_names(ran), error, EXACT, error <= EXACT).unless(variant.gap or subject.gap)


def made_and_equal(subject: ProofSubject, make: Callable[[], Variant]) -> Line:
    """`equal_line` for a variant that is built first, so that a fault in building it fails this line."""
    return equal_line(subject, make())


def torch_lines(subject: ProofSubject, variant: Variant) -> list[Line]:
    """The same without native kernels."""
    name = f"{variant.name}, torch alone"
    if not library.enabled():
        return [not_applicable(subject.claim(name), NO_NATIVE)]
    with library.switched_off():
        return [equal_line(subject, replace(variant, name=name))]


# --------------------------------------------------------------------------- lines in the run's own precision


def in_own_precision(subject: ProofSubject, given: Model) -> ProofSubject:
    """The same subject with weights in fp32, as in training, and frozen low-precision weights as in `given`."""
    model = copy.deepcopy(subject.model).float().to(subject.device).eval()
    for name, parameter in given.named_parameters():
        if parameter.dtype.itemsize < 4 and not parameter.requires_grad:
            own = model.get_parameter(name)
            own.data = own.data.to(parameter.dtype)
    return replace(subject, model=model)


def error_lines(
    subject: ProofSubject, variant: Variant, precision: Precision, terms: Sequence[str] | None = None
) -> list[Line]:
    """Outputs, loss terms and gradients are near fp64.

    Args:
        terms: names of the terms to compare; default all.
    """
    with noted() as ran:
        got, truth = (_of_terms(one, terms) for one in (measure(subject, variant, precision), subject.truth))
    bounded = zip(("outputs", "loss terms", "gradients"), errors(got, truth), BOUNDS[precision], strict=True)
    lines = [
        Line(f"{subject.prefix}{precision} {name} against fp64", kernel_names(ran), error, bound, error <= bound)
        for name, error, bound in bounded
    ]
    return [line.unless(variant.gap or subject.gap) for line in lines]


def _of_terms(measured: Measurement, names: Sequence[str] | None) -> Measurement:
    if names is None:
        return measured
    terms = {name: measured.terms[name] for name in names}
    return replace(measured, terms=terms, counts={name: measured.counts[name] for name in names})


def native_lines(subject: ProofSubject, variant: Variant, precision: Precision, gradients: Line) -> list[Line]:
    """Gradients of native kernels are about as close to fp64 as those of torch's kernels.

    Args:
        gradients: the line on the gradients of native kernels.
    """
    name = f"{precision} gradient error over that of torch's kernels"
    if gradients.measured is None or Kernel.NATIVE.value not in gradients.kernel:
        return [not_applicable(name, NO_NATIVE)]
    with library.switched_off():
        by_torch = errors(measure(subject, variant, precision), subject.truth)[2]
    ratio = gradients.measured / max(by_torch, 1e-30)
    bound = NATIVE_ERROR[precision]
    return [Line(name, gradients.kernel, ratio, bound, ratio <= bound).unless(variant.gap or subject.gap)]


def target_lines(subject: ProofSubject, variant: Variant, precision: Precision) -> list[Line]:
    """Gradients without the targets that `losses.cross_entropy` leaves out are about as close to fp64 as those of all
    targets; no line if it leaves out none."""
    if precision != "bf16":
        return []
    with noted() as ran:
        fewer = measure(subject, variant, precision)
    with all_rows():
        whole = measure(subject, variant, precision)
    if all(torch.equal(value, whole.gradients[name]) for name, value in fewer.gradients.items()):
        return []
    ratio = errors(fewer, subject.truth)[2] / max(errors(whole, subject.truth)[2], 1e-30)
    name = f"{precision} gradient error over that of all targets"
    return [Line(name, kernel_names(ran), ratio, FEWER_ERROR, ratio <= FEWER_ERROR).unless(variant.gap or subject.gap)]


@torch.no_grad()
def isolation_line(subject: ProofSubject, variant: Variant, precision: Precision) -> Line:
    """Change the tokens and images of one sequence after another: every other sequence's output stays bit-equal, and
    its own does not.

    A change that alters the number of tokens left in its own sequence is skipped: the products of the others then have
    another shape, which affects their rounding. Nothing is proven without two sequences, or if the tokens of a sequence
    do not affect each other under these weights: no leak would show.
    """
    wrong = num_changed = num_others = 0
    acts, kernels = list[bool](), set[Kernel]()
    for micro in variant.micros:
        batch = micro.to(subject.device)
        lengths = batch.layout.lengths().tolist()  # a patient without events has an output, and nothing to change
        with autocast(precision, subject.device), noted() as ran:
            before = subject.outputs(subject.model, batch)
            for index in range(min(batch.num_seqs, MOST_CHANGED) if before is not None else 0):
                after = subject.outputs(subject.model, change_sequence(batch, index))
                if before is None or after is None or before[index].shape != after[index].shape:
                    continue
                same = [torch.equal(a, b) for a, b in zip(before, after, strict=True)]
                others = [i for i, one in enumerate(before) if i != index and one.numel()]
                wrong += sum(not same[i] for i in others) + (same[index] and lengths[index] > 0)
                num_changed, num_others = num_changed + 1, num_others + len(others)
                if not any(acts):
                    acts += _acts(subject, batch, before, index)
        kernels |= ran
    name, gap = f"{subject.prefix}{precision} sequences are isolated, bit for bit", ""
    if not num_changed:
        gap = "no sequence could be changed that is as long afterwards"
    elif not num_others:
        gap = "no micro-batch holds two sequences, so there was no other one to look at"
    elif kernels and acts and not any(acts):
        gap = "with these weights no token acts on a later one of its own sequence, so a leak would not show"
    return Line(name, kernel_names(kernels), float(wrong), 0.0, wrong == 0).unless(gap)


def _acts(subject: ProofSubject, batch: RaggedBatch, before: list[Tensor], index: int) -> list[bool]:
    """True if the first token of a sequence changes its last output; None if this cannot be determined."""
    other, places = change_tokens(batch, lambda a, b: a, only=index)
    if not places or len(before[index]) < 2:
        return []
    after = (subject.outputs(subject.model, other) or before)[index]
    return [not torch.equal(before[index][-1], after[-1])] if len(after) else []


# --------------------------------------------------------------------------- other batches of the same sequences


def more_variants(packed: RaggedBatch, gap: str = "") -> dict[str, Callable[[], Variant]]:
    """Rectangles padded on either side and further than needed, a split with an empty micro-batch in between, and a run
    that is not sorted by length.

    Args:
        gap: gap of a batch of all sequences.
    """
    whole = list(range(packed.num_seqs))
    further = _longest(packed) + FURTHER
    return {
        PADDED_RIGHT: lambda: _rectangles(PADDED_RIGHT, packed, "right", gap),
        PADDED_LEFT: lambda: _rectangles(PADDED_LEFT, packed, "left", gap),
        PADDED_MORE: lambda: Variant(PADDED_MORE, [packed.pad("right", pad_to=further)], [whole], gap=gap),
        SPLIT: lambda: _split(packed, gap),
        UNSORTED: lambda: _unsorted(packed, gap),
    }


def _longest(packed: RaggedBatch) -> int:
    return packed.layout.max_seqlen if isinstance(packed.layout, Layout) else 0


def _rectangles(name: str, packed: RaggedBatch, side: Side, gap: str) -> Variant:
    """Two rectangles, as wide as their longest sequences; the last has padding also where all are of one length."""
    bundles = packed.bundles
    halves = [bundles[::2], bundles[1::2]] if len(bundles) >= 4 else [bundles]
    rows = [[seq for bundle in half for seq in bundle] for half in halves]
    micros = [packed.select(half) for half in rows]
    wider = _longest(packed) + 1 if len(micros[-1].layout.lengths().unique()) < 2 else 0
    return Variant(name, [*(one.pad(side) for one in micros[:-1]), micros[-1].pad(side, pad_to=wider)], rows, gap=gap)


def _split(packed: RaggedBatch, gap: str) -> Variant:
    """Three micro-batches in another order, or two for fewer than four bundles, and an empty one. Their numbers of
    targets and pairs differ where possible: otherwise the mean of their means would equal the mean."""
    bundles = packed.bundles
    num, third = len(bundles), max(len(bundles) // 3, 1)
    shuffled, are_single = bundles[1::2] + bundles[::2], num == packed.num_seqs

    def cut(size: int) -> Variant:
        # A third one shows a step that forgets it; with only three bundles it would make all alike.
        last = max(num - 1, size + 1) if num > 3 else num
        cuts: tuple[Sequence[list[int]], ...] = (shuffled[:size], [], shuffled[size:last], shuffled[last:])
        parts = [[seq for bundle in part for seq in bundle] for part in (cuts if last < num else cuts[:3])]
        return Variant(SPLIT, [packed.select(part) for part in parts], parts, gap=gap)

    for size in sorted(range(1, num), key=lambda size: (abs(size - third), size)):
        variant = cut(size)
        targets = [micro.num_targets for micro in variant.micros if micro.num_seqs]
        if len(set(targets)) > 1 and (are_single or 2 * size != num):
            return variant
    even = "no split has unlike numbers of targets, so a mean of micro-batch means would be the mean"
    return replace(cut(1), gap=gap or even)


def _unsorted(packed: RaggedBatch, gap: str) -> Variant:
    """One run in which sequences of one length are neighbours, and the longest ones are last.

    Where the lengths allow it, the order in which torch's kernels sort it is not its own inverse, so one cannot pass
    for the other.
    """
    lengths = packed.attended.lengths().tolist()
    bundles = sorted(packed.bundles, key=lambda members: -sum(lengths[seq] for seq in members))
    sizes = [sum(lengths[seq] for seq in members) for members in bundles]
    between = [place for place in range(1, len(sizes)) if sizes[place - 1] != sizes[place]]
    variant = Variant(UNSORTED, [packed], [list(range(packed.num_seqs))], gap=gap)
    for place in [*between, *range(1, len(sizes))]:
        rows = [seq for members in bundles[place:] + bundles[:place] for seq in members]
        variant = Variant(UNSORTED, [packed.select(rows)], [rows], gap=gap)
        layout = variant.micros[0].attended
        assert isinstance(layout, Layout), "certify has flat runs"
        order, inverse = layout.grouped.by_length, layout.grouped.undo
        if order is not None and inverse is not None and not torch.equal(order, inverse):
            break
    return variant


def change_sequence(batch: RaggedBatch, seq: int) -> RaggedBatch:
    """Replace every text token and every patch of a sequence, so that any of them seen by another sequence has
    changed."""
    tokens = (batch.flat_layout.seq_of_token() == seq).nonzero().flatten()
    media, media_seqs, places = batch.media, batch.media_seqs, batch.media_index
    if media is not None and media_seqs is not None and places is not None:
        patches = (media_seqs[media.flat_layout.seq_of_token()] == seq).nonzero().flatten()
        batch = replace(batch, media=_with_others(media, patches))
        tokens = tokens[~torch.isin(tokens, places)]
    return _with_others(batch, tokens)


def change_tokens(
    batch: RaggedBatch, where: Callable[[int, int], int], only: int | None = None
) -> tuple[RaggedBatch, list[int]]:
    """Replace one token of every sequence, or of sequence `only`; return the batch and the places.

    Placeholders of images are skipped: the next token of text is replaced, and none if no text follows.
    """
    bounds = batch.flat_layout.cu_seqlens.tolist()
    spans = [(index, a, b) for index, (a, b) in enumerate(pairwise(bounds)) if b > a]
    images = set() if batch.media_index is None else set(batch.media_index.tolist())
    texts = [
        [place for place in range(where(a, b), b) if place not in images]
        for index, a, b in spans
        if only in (None, index)
    ]
    places = [text[0] for text in texts if text]
    return _with_others(batch, torch.tensor(places, dtype=torch.int64, device=batch.position_ids.device)), places


def _with_others(batch: RaggedBatch, places: Tensor) -> RaggedBatch:
    """The batch with other tokens, or vectors, at some places, (num,) int64."""
    if batch.input_ids is None:
        assert batch.inputs_embeds is not None
        ones = batch.inputs_embeds.new_ones(len(places), *batch.inputs_embeds.shape[1:])
        return replace(batch, inputs_embeds=batch.inputs_embeds.index_add(0, places, ones))
    ids = batch.input_ids.clone()
    # Token 0 or 1, whichever differs: ids that every vocabulary has.
    ids[places] = (ids[places] == 0).to(ids.dtype)
    return replace(batch, input_ids=ids)


@dataclass(frozen=True)
class Case:
    """A model under proof and its sequences.

    Args:
        model: in training's precision, in mode origin.
        alone: every sequence as a batch of its own, straight from the data.
        base: all of them in one run.
        packed: the same sequences as the data batches them.
        weights: of the loss terms.
    """

    model: Model
    alone: list[RaggedBatch]
    base: RaggedBatch
    packed: Variant
    weights: dict[str, float]
    precision: Precision
    device: torch.device


@dataclass(frozen=True)
class Claims:
    """Functions of the certificate for models of one kind of input.

    Args:
        alone: the sequences of a flat run, each as a batch of its own.
        outputs: hidden states of every sequence of a batch.
        leaves: returns the batch with inputs that require gradients, and each such input with the sequence of each row.
        order: name of the line of `order_line`.
        order_line: later inputs never change an earlier output; for causal models.
        more_lines: further lines, at the end of the certificate.
    """

    alone: Callable[[RaggedBatch], list[RaggedBatch]]
    outputs: Outputs
    leaves: Callable[[Model, RaggedBatch], tuple[RaggedBatch, list[tuple[Tensor, Tensor]]]]
    order: str
    order_line: Callable[[Model, RaggedBatch], Line]
    more_lines: Callable[[Case], list[Line]] = lambda case: []


def claims_of(model: Model) -> Claims:
    """Import the claims of a model."""
    return import_module(f"unpad.proof.{model.claims}").CLAIMS
