"""The equivalence certificate: batching changed nothing.

Part one runs in fp64 on the same code path, except for the kernel's precision: every way to batch a few sequences must
equal the same sequences one at a time, in outputs, loss terms and all gradients. Part two runs in the run's own
precision and kernels: it must agree with fp64 within stated bounds, and isolation must be exact.
"""

import copy
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from unpad.batching.batch import RaggedBatch, Side, concatenate
from unpad.batching.layout import Layout, PaddedLayout
from unpad.errors import ProofError
from unpad.models.contract import ORIGIN, WEIGHTS, LearnsPreferences, Model, ReadsTokens
from unpad.models.objective import Objective
from unpad.nn.attention import MATMUL
from unpad.nn.kernel import Kernel, as_weighted, by_definition, noted
from unpad.nn.losses import Terms
from unpad.nn.native import library
from unpad.nn.precision import Precision
from unpad.nn.preference import PER_TOKEN
from unpad.proof import measure
from unpad.proof.content import gap_of, is_zero, units_of
from unpad.proof.line import Certificate, Line, Lines, not_applicable
from unpad.recipes.training import Weight
from unpad.terminal.progress import counted
from unpad.terminal.table import number_of

LABELS = "labels stay within their sequence"
IMAGES = "images stay within their sequence"
REPEAT = "the same batch twice is bit-equal (no dropout left on)"
CROSSING = "no gradient crosses between sequences"
MANY, MANY_ISOLATED = "many in one run", "many in one run are isolated, bit for bit"
PADDING = "what padding holds is invisible"
WEIGHTED = {kernel.value for kernel in MATMUL}
SIDES: tuple[Side, Side] = ("left", "right")
NOT_RUN = "training runs this kernel at lengths that the sample does not have"


class Provable(Protocol):
    """A torch module that `unpad.prove` accepts without being a `Model`."""

    def __call__(self, batch: RaggedBatch) -> Tensor:
        """Hidden states, (total_tokens, width)."""

    def losses(self, batch: RaggedBatch) -> Terms: ...

    def count_targets(self, batch: RaggedBatch) -> dict[str, int]: ...


class PlainModel(ReadsTokens):
    """Model around a module with the members of `Provable`, and optionally `embed`, `weights`, `config.causal` and
    `config.head_dim`."""

    def __init__(self, module: Provable) -> None:
        super().__init__()
        self.module = module
        self.weights = getattr(module, "weights", WEIGHTS)
        config = getattr(module, "config", None)
        self.causal, self.head_dim = getattr(config, "causal", True), getattr(config, "head_dim", None)

    def forward(self, batch: RaggedBatch) -> Tensor:
        return self.module(batch)

    def losses(self, batch: RaggedBatch) -> Terms:
        return self.module.losses(batch)

    def count_targets(self, batch: RaggedBatch) -> dict[str, int]:
        return self.module.count_targets(batch)

    def embed_tokens(self, ids: Tensor) -> Tensor:
        return self.module.embed(ids)  # type: ignore[attr-defined]  # a module of tokens has it


def prove(
    model: Model | Provable, batch: RaggedBatch, *, precision: Precision = "fp32", device: torch.device | None = None
) -> Certificate:
    """Prove a model on a batch of token sequences, ready for any training loop.

    Args:
        model: a `Model`, or any torch module with `forward(batch) -> (total_tokens, dim)`, `losses(batch)` with the
            terms of its `weights`, or one named cross_entropy, `count_targets(batch)`, and an `embed` module for
            tokens.
        batch: a flat run of token sequences.
        precision: of training.
        device: device of the computation; default the model's.

    Raises:
        ProofError: the batch is padded, or has no target.
    """
    if not isinstance(batch.layout, Layout) or batch.num_targets == 0:
        raise ProofError("prove needs a flat run of sequences with targets", fix="use a RaggedBatch that is not padded")
    model = model if isinstance(model, Model) else PlainModel(model)
    batch = batch.select([i for i, length in enumerate(batch.attended.lengths().tolist()) if length])
    alone = measure.claims_of(model).alone(batch)
    whole = list(range(len(alone)))
    return certify(model, alone, [measure.Variant("packed", [batch], [whole])], precision=precision, device=device)


def certify(
    model: Model,
    alone: list[RaggedBatch],
    variants: list[measure.Variant],
    *,
    precision: Precision = "fp32",
    device: torch.device | None = None,
    expected_kernels: set[str] | None = None,
    losses: dict[str, Weight] | None = None,
    trained: measure.Variant | None = None,
    broken: Sequence[Line] = (),
    few: str = "",
    many: Sequence[RaggedBatch] = (),
) -> Certificate:
    """Prove that every variant equals the sequences taken one at a time; the first variant should be ragged.

    A check that ends in an exception is a line that fails.

    Args:
        alone: the reference: every sequence as a batch of its own, directly from the data and not from any batch.
        variants: ways to batch them, such as the plans of all strategies. Paddings and splits are added here.
        expected_kernels: attention kernels of the run; kernels that no line ran are NOT PROVEN.
        losses: the recipe's weights of loss terms; gradients are of their weighted sum.
        trained: the variant that training uses, if its kernels may differ from those of the first.
        broken: lines of variants that could not be built.
        few: remark on the sequences, added to the reason if they are too few or too similar.
        many: short sequences, each as a batch of its own, for lines on one run of them all.
    """
    device = device or next(model.parameters()).device
    if len(model.modes) > 1:  # all lines but `more_lines` need an output for every token
        model = copy.deepcopy(model)
        model.mode = ORIGIN
    claims, lines = measure.claims_of(model), Lines(broken)
    weights = Objective.of(model, losses).final(model)
    exact = copy.deepcopy(model).double().to(device).eval()
    alone = [one.to(device) for one in alone]
    with library.switched_off(), by_definition():
        truth = lines.value(
            "each sequence alone", lambda: measure.bundles_at_a_time(exact, alone, weights, claims.outputs)
        )
    units = lines.value("content of each sequence", lambda: units_of(alone))
    if units is None:
        return lines.certificate()
    variants = [replace(one, gap=_gap(one, units, few)) for one in variants]
    trained = next((one for one in variants if trained is not None and one.name == trained.name), None)
    lines.add(LABELS, lambda: _labels_line(alone, variants))
    base = lines.value("all sequences in one run", lambda: concatenate(alone))
    if base is not None:
        if base.media is not None:
            lines.add(IMAGES, lambda: _images_line([base, *(batch for one in variants for batch in one.micros)]))
        lines.add(REPEAT, lambda: _repeat_line(exact, base))
    if base is None or truth is None:
        return lines.certificate()
    if not variants or any(isinstance(batch.layout, PaddedLayout) for batch in variants[0].micros):
        joined = measure.Variant("joined", [base], [list(range(len(alone)))])
        variants = [replace(joined, gap=_gap(joined, units, few)), *variants]
    packed, subject = variants[0], measure.ProofSubject(exact, truth, device, claims.outputs, gap=_gap_of_truth(truth))
    whole = _with(few, gap_of([range(base.num_seqs)], units))
    _add_exact_lines(lines, subject, variants, base, claims, whole)
    if len(many) > 1:
        lines.add(subject.claim(MANY), lambda: _many_lines(subject, [one.to(device) for one in many]))
    ran = _add_own_precision_lines(
        lines, measure.in_own_precision(subject, model), packed, trained, precision, expected_kernels or ()
    )
    case = measure.Case(model, alone, base, packed, weights, precision, device)
    lines.add("further claims", lambda: claims.more_lines(case))
    missing = sorted(set(expected_kernels or ()) - ran)
    lines.done += [
        Line("attention of this run's longer or shorter sequences", name, None, None, None, NOT_RUN) for name in missing
    ]
    return lines.certificate()


def _add_exact_lines(
    lines: Lines,
    subject: measure.ProofSubject,
    variants: list[measure.Variant],
    base: RaggedBatch,
    claims: measure.Claims,
    gap: str,
) -> None:
    """Lines in fp64; `gap` is the gap of all sequences in one batch."""
    model = subject.model
    for variant in counted(variants, "comparing", len(variants), "ways to batch"):
        lines.add(subject.claim(variant.name), partial(measure.equal_line, subject, variant))
    more = measure.more_variants(base, gap)
    for name, make in more.items():
        lines.add(subject.claim(name), partial(measure.made_and_equal, subject, make))
    lines.add(subject.claim(f"{variants[0].name}, torch alone"), lambda: measure.torch_lines(subject, variants[0]))
    if library.enabled():
        unsorted = subject.claim(f"{measure.UNSORTED}, torch alone")
        lines.add(unsorted, lambda: measure.torch_lines(subject, more[measure.UNSORTED]()))
    lines.add(CROSSING, lambda: _cross_gradient_line(model, base, claims))
    lines.add(PADDING, lambda: _pad_contents_line(model, base, claims))
    if model.causal:
        lines.add(claims.order, lambda: claims.order_line(model, base))
    else:
        lines.done.append(not_applicable(claims.order, "this model reads in both directions"))


def _with(few: str, gap: str) -> str:
    """A gap, with the remark on the sequences."""
    return gap and gap + few


def _gap(variant: measure.Variant, units: Sequence[bytes], few: str) -> str:
    """The reason why comparing a variant with sequences alone proves nothing; empty if it can."""
    return _with(few, gap_of(variant.rows, units, split=variant.is_plan))


def _gap_of_truth(truth: measure.Measurement) -> str:
    """The reason why equality with the reference proves nothing."""
    if is_zero(truth.outputs):
        return "all outputs are 0 with these weights"
    return "all gradients are 0 with these weights" if is_zero(list(truth.gradients.values())) else ""


def _add_own_precision_lines(
    lines: Lines,
    own: measure.ProofSubject,
    packed: measure.Variant,
    trained: measure.Variant | None,
    precision: Precision,
    expected: Collection[str],
) -> set[str]:
    """Lines in the run's precision; returns the kernels that ran.

    The plan's own batches, and the kernel of attention dropout, which evaluation lacks, get lines if training would run
    kernels that the first lines did not.
    """
    first, against = len(lines.done), f"{precision} against fp64"
    # The loss of a pair depends on a small difference of large sums, and their rounding is not small relative to it.
    terms = PER_TOKEN if isinstance(own.model, LearnsPreferences) and own.model.beta is not None else None
    near = lines.add(against, lambda: measure.error_lines(own, packed, precision, terms))
    if near:
        lines.add(f"{precision} native kernels", lambda: measure.native_lines(own, packed, precision, near[-1]))
        lines.add(f"{precision} targets left out", lambda: measure.target_lines(own, packed, precision))
    lines.add(f"{precision} isolation", lambda: measure.isolation_line(own, packed, precision))
    if trained is not None and trained is not packed and set(expected) - _kernels(lines.done[first:]):
        on_plan = replace(own, prefix=f"{trained.name}: ")
        lines.add(on_plan.prefix + against, lambda: measure.error_lines(on_plan, trained, precision, terms))
    if WEIGHTED & (set(expected) - _kernels(lines.done[first:])):
        weighted = replace(own, prefix="kernel of dropout: ")
        with as_weighted():
            lines.add(
                weighted.prefix + against, lambda: measure.error_lines(weighted, trained or packed, precision, terms)
            )
    return _kernels(lines.done[first:])


def _kernels(lines: Sequence[Line]) -> set[str]:
    """Kernels of lines that completed."""
    return {kernel for line in lines for kernel in line.kernel.split(", ")}


# --------------------------------------------------------------------------- lines in fp64


def _labels_line(alone: list[RaggedBatch], variants: list[measure.Variant]) -> Line:
    """Labels and positions equal those of the sequence alone, and no other place has a label."""
    wrong = 0
    for variant in variants:
        for batch, rows in zip(variant.micros, variant.rows, strict=True):
            labels, masks = measure.per_sequence(batch.labels, batch), measure.per_sequence(batch.loss_mask, batch)
            positions = measure.per_sequence(batch.position_ids, batch)
            for row, label, mask, position in zip(rows, labels, masks, positions, strict=True):
                wrong += _wrong_labels(alone[row] if row >= 0 else None, label, mask, position)
            wrong += batch.target_index.numel() - sum(int(mask.sum()) for mask in masks)  # a label in the padding
            if batch.seq_labels is not None:
                wanted = [alone[row].seq_labels for row in rows]
                classes = torch.cat([label for label in wanted if label is not None]).to(batch.seq_labels.device)
                wrong += int((batch.seq_labels != classes).sum())
    ends = [_crossing(variant.micros[0]) for variant in variants[:1] if variant.micros]
    wrong += sum(len(one) for one in ends if len(one) > 1 and all(one))
    gap = next((variant.gap for variant in variants), "") if all(variant.gap for variant in variants) else ""
    if [True] in ends and not variants[0].is_plan:
        gap = "the one label at the end of a sequence is the first token of the next: by chance or by a fault"
    return Line(LABELS, "", float(wrong), 0.0, wrong == 0).unless(gap)


def _wrong_labels(alone: RaggedBatch | None, labels: Tensor, mask: Tensor, positions: Tensor) -> int:
    if alone is None:
        return int(mask.sum())
    if labels.numel() != alone.total_tokens:
        return 1
    wanted, counts, places = (x.to(labels.device) for x in (alone.labels, alone.loss_mask, alone.position_ids))
    return int(((labels != wanted) & mask).sum()) + int((mask != counts).sum()) + int((positions != places).sum())


def _images_line(batches: Sequence[RaggedBatch]) -> Line:
    """Every image belongs to the sequence that contains its patches."""
    wrong = most = 0
    for batch in batches:
        if batch.media is None or batch.media_seqs is None or batch.media_index is None:
            continue
        owners = batch.media_seqs.repeat_interleave(batch.media.layout.lengths())
        if isinstance(batch.layout, Layout):
            rows = batch.layout.seq_of_token()[batch.media_index]
        else:
            rows = batch.media_index // batch.layout.attention_mask.shape[1]
        wrong += int((rows != owners).sum()) if rows.shape == owners.shape else batch.num_seqs
        most = max(most, len(batch.media_seqs.unique()))
    gap = "" if most > 1 else "no batch holds images of two sequences"
    return Line(IMAGES, "", float(wrong), 0.0, wrong == 0).unless(gap)


def _crossing(batch: RaggedBatch) -> list[bool]:
    """For every label at the end of a sequence: whether it is the first token of the next one. One match may be
    chance."""
    if not isinstance(batch.layout, Layout) or batch.input_ids is None:
        return []
    starts = [
        b for b in batch.layout.cu_seqlens.tolist()[1:-1] if 0 < b < batch.total_tokens and batch.loss_mask[b - 1]
    ]
    return [int(batch.labels[b - 1]) == int(batch.input_ids[b]) for b in starts]


@torch.no_grad()
def _repeat_line(model: Model, batch: RaggedBatch) -> Line:
    once = model(batch)
    difference = float((once - model(batch)).abs().max()) if once.numel() else 0.0
    line = Line(REPEAT, "", difference, 0.0, difference == 0)
    return line.unless("all outputs are 0 with these weights" if is_zero([once]) else "")


def _cross_gradient_line(model: Model, batch: RaggedBatch, claims: measure.Claims) -> Line:
    """The gradient of one sequence's output with respect to the inputs of all others is exactly zero.

    Outputs are traced back in groups, by the binary digits of each sequence's number: two sequences differ in some
    digit, so they are in different groups, and the gradient of either group shows a leak from the other.
    """
    worst, reached = 0.0, False
    changed, leaves = claims.leaves(model, batch)
    inputs, outputs = [x for x, _ in leaves], claims.outputs(model, changed) or []
    for chosen in _groups(len(outputs)):
        total = torch.stack([outputs[seq].square().sum() for seq in chosen]).sum()
        gradients = torch.autograd.grad(total, inputs, allow_unused=True, retain_graph=True)
        for gradient, (_, owner) in zip(gradients, leaves, strict=True):
            if gradient is not None:
                own = torch.isin(owner, torch.tensor(chosen, device=owner.device))
                reached = reached or not is_zero([gradient[own]])
                worst = max(worst, float(gradient[~own].abs().max()) if not bool(own.all()) else 0.0)
    gap = "" if reached else "no gradient reaches a sequence's own inputs; does the model read `inputs_embeds`?"
    if sum(bool(output.numel()) for output in outputs) < 2:
        gap = "there is no second sequence for a gradient to cross to"
    return Line(CROSSING, "", worst, 0.0, worst == 0).unless(gap)


@torch.no_grad()
def _many_lines(subject: measure.ProofSubject, alone: Sequence[RaggedBatch]) -> list[Line]:
    """Outputs of more sequences in one run than in the other lines, with and without native kernels.

    Code that depends on the number of sequences shows here.
    """
    model, base, note = subject.model, concatenate(alone), ""
    if len(alone) < measure.MOST_MANY:
        note = f"{number_of(len(alone), 'sequences')}: no more short ones of unlike content were found"

    def equal(name: str, kernels: set[Kernel], worst: float, note: str = "") -> Line:
        ran = measure.kernel_names(kernels)
        return Line(subject.claim(name), ran, worst, measure.EXACT, worst <= measure.EXACT, note)

    with library.switched_off(), by_definition():
        wanted = [hidden for one in alone for hidden in subject.outputs(model, one) or []]
    with noted() as ran:
        before = subject.outputs(model, base) or []
        worst, num_wrong = measure.largest_error(before, wanted), 0
        for turn in (0, 1):
            changed = base
            for seq in range(turn, base.num_seqs, 2):
                changed = measure.change_sequence(changed, seq)
            after = subject.outputs(model, changed) or []
            num_wrong += sum(not torch.equal(before[seq], after[seq]) for seq in range(1 - turn, base.num_seqs, 2))
    lines = [
        equal(MANY, ran, worst, note),
        Line(MANY_ISOLATED, measure.kernel_names(ran), float(num_wrong), 0.0, num_wrong == 0),
    ]
    if library.enabled():
        with library.switched_off(), noted() as ran:
            worst = measure.largest_error(subject.outputs(model, base) or [], wanted)
        lines.append(equal(f"{MANY}, torch alone", ran, worst))
    gap = "all outputs are 0 with these weights" if is_zero(wanted) else ""
    return [line.unless(gap) for line in lines]


def _groups(num: int) -> list[list[int]]:
    """Groups of numbers below `num`: for any two numbers, some group has the first but not the second."""
    digits = max(num - 1, 1).bit_length()
    groups = [[seq for seq in range(num) if seq >> digit & 1 == value] for digit in range(digits) for value in (0, 1)]
    return [group for group in groups if group]


@torch.no_grad()
def _pad_contents_line(model: Model, batch: RaggedBatch, claims: measure.Claims) -> Line:
    """Contents of padding change no output. A causal model could see padding on the left, any other on either side."""
    worst, compared = 0.0, 0
    longest = batch.layout.max_seqlen if isinstance(batch.layout, Layout) else 0
    with noted() as ran:
        for side in SIDES:
            # Wider than the longest, or sequences of one length would have no padding.
            both = [batch.pad(side, pad_to=longest + measure.FURTHER, pad_id=fill) for fill in (0, 1)]
            zeros, ones = (claims.outputs(model, padded) or [] for padded in both)
            gaps = [float((a - b).abs().max()) for a, b in zip(zeros, ones, strict=True) if a.numel()]
            worst, compared = max([worst, *gaps]), compared + len(gaps)
    line = Line(PADDING, measure.kernel_names(ran), worst, 0.0, worst == 0)
    return line.unless("" if compared else "no output of a rectangle could be read")
