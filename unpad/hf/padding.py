"""Padded rows of any trainer, end to end or one at a time: the backbone sees tokens alone, all around it sees rows."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle
from transformers import Trainer

from unpad.errors import ProofError, RecipeError
from unpad.hf.head import with_hidden
from unpad.hf.prepare import preparing
from unpad.hf.rows import Collator
from unpad.proof.foreign.certificate import FOLLOWS, BatchClaim, ForeignCertificate
from unpad.proof.foreign.judge import ComparedUpdate, Precision, judge, refused
from unpad.proof.foreign.kinds import NOT_TRAINED, TRAINER_FIX
from unpad.proof.foreign.measure import (
    EPS,
    LEAST,
    UpdateResults,
    by_rounding,
    logits_in_batches,
    not_below_fp32,
    take_gradient,
)
from unpad.proof.foreign.model import base_of, no_router_loss, untouched, untouched_generators
from unpad.proof.foreign.undisturbed import attributes_kept, proving, without_dropout
from unpad.proof.foreign.update import IGNORE, ForeignBatch, converted, has_media, labelled, read_update

MODELS = ("model", "ref_model")  # of a trainer
SUCH = "let the first batch have several rows of other lengths, with a gradient"
KEPT = ("past_key_values", "output_hidden_states", "output_attentions")  # asked for these, rows stay padded


@dataclass(repr=False)
class WithoutPadding:
    """What `without_padding` did to a trainer.

    Args:
        trainer: whose models have the hooks.
        loss, gradient: relative errors of a `training_step` beside the same step with padding; 0 if none was proved.
        num_cells, num_tokens: of the batches that were computed since then.
        most_rows: of a batch.
        sides: on which batches had padding; is_proved: whether a step was compared.
    """

    trainer: Trainer
    loss: float = 0.0
    gradient: float = 0.0
    num_cells: int = 0
    num_tokens: int = 0
    most_rows: int = 0
    sides: set[str] = field(default_factory=set)
    is_proved: bool = False
    handles: list[RemovableHandle] = field(default_factory=list)

    def __repr__(self) -> str:
        padding = f", {1 - self.num_tokens / self.num_cells:.0%} padding left out" if self.num_cells else ""
        return f"WithoutPadding(loss {self.loss:.0e}, gradient {self.gradient:.0e}{padding})"

    def remove(self) -> None:
        """Let rows be computed with their padding again."""
        for handle in self.handles:
            handle.remove()

    def hook(self, backbone: nn.Module) -> None:
        """Let a backbone compute the real tokens of padded rows end to end."""
        rows = _Rows(self)
        before = backbone.register_forward_pre_hook(rows.flatten, with_kwargs=True, prepend=True)
        self.handles += [before, backbone.register_forward_hook(rows.restore)]


class _Rows:
    """Hooks of one backbone."""

    def __init__(self, owner: WithoutPadding) -> None:
        self.owner = owner
        self.shape = (0, 0)
        self.real: Tensor | None = None  # cells of the padded rows that hold a token, (num_tokens,) int64

    def flatten(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Rows of (batch, seq) tokens as one of all that are real."""
        self.real = None
        ids, mask = args[0] if args else kwargs.get("input_ids"), kwargs.get("attention_mask")
        if not isinstance(ids, Tensor) or not isinstance(mask, Tensor) or mask.shape != ids.shape or has_media(kwargs):
            return None
        if len(args) > 1 or any(kwargs.get(name) not in (None, False) for name in KEPT):
            return None
        lengths = mask.sum(1)
        if not bool(lengths.all()):
            return None
        sides = {side for side, edge in (("left", mask[:, 0]), ("right", mask[:, -1])) if not bool(edge.all())}
        if self.owner.is_proved and (new := sides - self.owner.sides):
            warnings.warn(f"padding on the {' and '.join(sorted(new))} was not compared: {SUCH}", stacklevel=2)
        self.owner.sides |= sides
        self.real = mask.flatten().nonzero().flatten()
        self.shape = ids.shape[0], ids.shape[1]
        self.owner.num_cells += mask.numel()
        self.owner.num_tokens += len(self.real)
        self.owner.most_rows = max(self.owner.most_rows, len(ids))
        bounds = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        given = {**kwargs, "input_ids": ids}
        if given.get("position_ids") is None:
            given["position_ids"] = mask.cumsum(1) - 1
        flat = {  # ids, positions, and what else has a value a token
            name: value.flatten()[self.real][None] if isinstance(value, Tensor) and value.shape == ids.shape else value
            for name, value in given.items()
        }
        flat |= {"attention_mask": None, "use_cache": False, "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
        flat |= dict.fromkeys(("max_length_q", "max_length_k"), int(lengths.max()))
        return (), flat

    def restore(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Hidden states of the real tokens in their cells; zeros in those of padding."""
        if self.real is None:
            return None
        hidden = output[0]  # (1, num_tokens, dim)
        cells = hidden.new_zeros(self.shape[0] * self.shape[1], hidden.shape[-1]).index_copy(0, self.real, hidden[0])
        return _with_hidden(output, cells.unflatten(0, self.shape))


def _models(trainer: Trainer) -> list[nn.Module]:
    found = [getattr(trainer, name, None) for name in MODELS]
    return [trainer.accelerator.unwrap_model(model) for model in found if isinstance(model, nn.Module)]


def _backbones(trainer: Trainer) -> list[nn.Module]:
    """What computes hidden states in a trainer's model, and in its reference model."""
    return [getattr(base_of(model), "base_model", base_of(model)) for model in _models(trainer)]


def _with_hidden(output: Any, hidden: Tensor) -> Any:
    """The output of a backbone with other hidden states.

    Raises:
        ProofError: it has more of each row than these.
    """
    if getattr(output, "pooler_output", None) is not None:
        raise ProofError("the model pools rows before its head", fix="train with padding")
    return with_hidden(output, hidden)


def without_padding(trainer: Trainer, *, prove: bool = True) -> WithoutPadding:
    """Compute the padded rows of a trainer end to end, without their padding; its batches and its loss stay its own.

    For trainers with another objective than the next token, such as those of pairs of TRL (DPO, KTO, reward, ORPO,
    CPO, GRPO). A `training_step` is computed with padding and without, and compared. A trainer that is refused is as
    it was before.

    Args:
        trainer: of transformers or TRL, before `train`.
        prove: False leaves the proof out, for a trainer that was proved before.

    Raises:
        RecipeError: its model is none of transformers, or computes no flat batch; noise that depends on padding.
        ProofError: a step without padding has another loss or gradient.
    """
    if getattr(trainer, "neftune_noise_alpha", None):
        what = "neftune_noise_alpha adds noise by the width of the padded rows"
        raise RecipeError(what, fix="leave it out, or train with padding")
    done, model = WithoutPadding(trainer), trainer.accelerator.unwrap_model(trainer.model)
    with ExitStack() as stack:
        if stack.enter_context(no_router_loss(model)) or getattr(trainer, "aux_loss_enabled", False):
            fix = "set output_router_logits=False, and router_aux_loss_coef=0 of TRL"
            raise RecipeError("a router's auxiliary loss reads padded rows", fix=fix)
        padded = _step(trainer) if prove else None
        stack.push(lambda kind, *_: done.remove() if kind else None)
        for backbone in _backbones(trainer):
            stack.enter_context(preparing(backbone))
            done.hook(backbone)
        if padded is None:
            return done
        try:
            found = _step(trainer)
        except ProofError:
            raise
        except Exception as error:
            raise RecipeError(f"no step without padding: {refused(error)}", fix="train with padding") from error
        errors = found.errors(padded)
        done.loss, done.gradient = errors.loss, errors.gradient
        if done.most_rows < 2 or not done.sides or not any(bool(one.any()) for one in found.gradient.values()):
            what = f"{done.most_rows} rows of tokens reach the model in the first batch, without padding or gradient"
            raise RecipeError(f"{what}: nothing can be compared", fix=SUCH)
        bounds = errors
        if max(errors.loss, errors.gradient) > LEAST:  # the least bound takes no further step
            bounds = by_rounding(model, EPS, lambda: _step(trainer)).errors(found).bounds()
        if errors.loss > bounds.loss or errors.gradient > bounds.gradient:
            what = f"without padding a step has another loss ({done.loss:.1e}) and gradient ({done.gradient:.1e})"
            raise ProofError(what, where=type(trainer).__name__, fix="train with padding")
        done.num_cells, done.num_tokens, done.is_proved = 0, 0, True
    return done


@contextmanager
def _fp32(trainer: Trainer) -> Iterator[None]:
    """No mixed precision in models that accelerate prepared for it, such as reference models."""
    with ExitStack() as stack:
        for model in _models(trainer):
            if (forward := vars(model).get("_original_forward")) is not None:
                stack.enter_context(attributes_kept(model))
                vars(model)["forward"] = forward
        yield


def _step(trainer: Trainer) -> UpdateResults:
    """Loss and gradient of `training_step` on the first batch of the trainer's loader, without dropout."""
    models = nn.ModuleList(_models(trainer))  # a reference model in training mode has dropout too
    with proving(trainer), _fp32(trainer), untouched_generators(0), not_below_fp32(models), without_dropout(models):
        batches, num_items = trainer.get_batch_samples(iter(trainer.get_train_dataloader()), 1, trainer.args.device)
        trainer.current_gradient_accumulation_steps = 1  # `train` sets it
        loss = trainer.training_step(trainer.model, batches[0], num_items)
        return UpdateResults([], float(loss.detach()), take_gradient(trainer.model))


# --------------------------------------------------------------------------- trainers of pairs, judged

OWN_LOSS = "logits are hidden states here; the loss is {}'s own, of its batches with every row computed alone"
READS = "the rows are right and the loss is not: it reads cells of padding, or a row by its place in the batch"
UNLIKE = "the collator gives a row other tokens, masks or labels beside others: place them by the row's own length"
EMBEDDED = "{} gives its model something else than rows of token ids, or rows that the data do not have"
Step = Callable[[Sequence[Mapping[str, Any]]], tuple[float, dict[str, Tensor]]]
LABELS = ("crossing", "padding", "targets")  # which a loss of its own does not have


@dataclass(frozen=True, eq=False)
class PairsUpdate:
    """The first update of a trainer of pairs.

    Args:
        step: loss and gradient of batches by `training_step`.
        trained: tokens of the rows that the data have; others: those of rows that are computed and not trained on.
        num_unlike: cells in which batches have something else for a row than the collator gives it alone.
    """

    trainer: Trainer
    step: Step
    batches: Sequence[Mapping[str, Any]]
    trained: Sequence[Sequence[int]]
    others: Sequence[Sequence[int]]
    num_unlike: int

    @classmethod
    def of(
        cls,
        trainer: Trainer,
        step: Step,
        batches: Sequence[Mapping[str, Any]],
        columns: Sequence[Sequence[str]],
        examples: Sequence[Sequence[Mapping[str, Any]]],
        collator: Collator,
    ) -> PairsUpdate:
        """An update of the rows of a trainer's data.

        Args:
            columns: of `columns_of_rows`.
            examples: of each batch, as the collator was given them.

        Raises:
            ProofError: they have none of the columns, or the collator makes no batch of one.
        """
        rows: dict[bool, list[list[int]]] = {True: [], False: []}
        part = slice(None, trainer.args.max_length)
        if getattr(trainer.args, "truncation_mode", "") == "keep_end" and trainer.args.max_length:
            part = slice(-trainer.args.max_length, None)
        for example in (example for some in examples for example in some):
            for names in columns:
                if all(name in example for name in names):
                    rows[NOT_TRAINED not in names].append([token for name in names for token in example[name]][part])
        if not rows[True]:
            raise ProofError(f"{type(trainer).__name__} has rows without the columns {columns[0]}", fix=TRAINER_FIX)
        try:
            alone = [[collator([copy.deepcopy(one)]) for one in some] for some in examples]
        except Exception as error:
            raise ProofError(f"the collator makes no batch of one row: {refused(error)}", fix=TRAINER_FIX) from error
        num_unlike = sum(_num_unlike(batch, some) for batch, some in zip(batches, alone, strict=True))
        return cls(trainer, step, batches, rows[True], rows[False], num_unlike)

    def certificate(self, precision: Precision, notes: Sequence[str]) -> ForeignCertificate:
        """Judge the update by the same step in which every row is computed alone, as the data have it."""
        name = type(self.trainer).__name__
        if any(map(has_media, self.batches)):
            raise ProofError(f"{name} has pictures or sounds", fix="try unpad.hf.without_padding(trainer)")
        models = nn.ModuleList(_models(self.trainer))
        with untouched(models), _fp32(self.trainer), without_dropout(models):
            found = judge(models, precision, self._compare, [*notes, OWN_LOSS.format(name)])
        claims = [
            replace(one, kind="step", advice=READS if one.advice not in ("", FOLLOWS) else one.advice)
            if one.kind == "loss"
            else one
            for one in found.findings
            if one.kind not in LABELS
        ]
        if found.refused is None:
            claims.insert(0, BatchClaim("collated", self.num_unlike, 0, UNLIKE if self.num_unlike else ""))
        return replace(found, findings=tuple(claims), num_targets=0)

    def _compare(self, exact: bool) -> ComparedUpdate:
        """The update where weights are in their precision already; `exact` for fp64."""
        batches = converted(list(self.batches), floats=torch.float64) if exact else self.batches
        backbone = _backbones(self.trainer)[0]
        calls: list[ForeignBatch] = []

        def forward(inputs: Mapping[str, object]) -> Any:
            return backbone(**inputs)[0]

        def record(module: nn.Module, args: tuple[Any, ...], inputs: dict[str, Any]) -> None:
            if torch.is_grad_enabled():  # as it is not for reference passes
                calls.append(self._read(args, inputs))

        handle = backbone.register_forward_pre_hook(record, with_kwargs=True)
        try:
            self.step(batches)
        except Exception as error:
            raise refused(error) from error
        finally:
            handle.remove()
        update = read_update(calls, labelled(self.trained, None))
        pieces = [replace(piece, row=row, start=0) for row, piece in enumerate(update.pieces)]
        rows = [torch.tensor([update.ids_of(piece)], device=self.trainer.args.device) for piece in update.pieces]
        alone = replace(update, batches=[self._read((row,), {}) for row in rows], pieces=pieces)
        return ComparedUpdate(
            update,
            lambda: UpdateResults(logits_in_batches(forward, alone), *self._step_alone(batches)),
            lambda: UpdateResults(logits_in_batches(forward, update), *self.step(batches)),
            forward,
        )

    def _read(self, args: tuple[Any, ...], inputs: Mapping[str, Any]) -> ForeignBatch:
        """A call of a backbone as a batch without labels.

        Raises:
            ProofError: it has no token ids.
        """
        ids, mask = args[0] if args else inputs.get("input_ids"), inputs.get("attention_mask")
        if not isinstance(ids, Tensor):
            raise ProofError(EMBEDDED.format(type(self.trainer).__name__), fix=TRAINER_FIX)
        real = mask > 0 if isinstance(mask, Tensor) and mask.shape == ids.shape else ids == ids
        given = {**inputs, "input_ids": ids, "use_cache": False}
        return ForeignBatch(given, {}, ids, torch.full_like(ids, IGNORE), real)

    def _step_alone(self, batches: Sequence[Mapping[str, Any]]) -> tuple[float, dict[str, Tensor]]:
        """A step in which the models compute every row alone."""
        with ExitStack() as stack:
            for backbone in _backbones(self.trainer):
                stack.enter_context(attributes_kept(backbone))
                vars(backbone)["forward"] = partial(self._forward_alone, backbone.forward)
            return self.step(batches)

    def _forward_alone(self, forward: Callable[..., Any], *args: Any, **inputs: Any) -> Any:
        """Hidden states of the rows of a call that are known, one row at a time and without mask; zeros elsewhere."""
        batch = self._read(args, inputs)
        batch = replace(batch, real=batch.ids == batch.ids)  # tokens that a wrong mask hides are of their rows too
        shape, width, output = batch.ids.shape, batch.ids.shape[1], None
        hidden = dict[int, Tensor]()
        for _, row, cells in read_update([batch], labelled([*self.trained, *self.others], None)).places(0):
            given = {
                name: value[row : row + 1, cells] if isinstance(value, Tensor) and value.shape == shape else value
                for name, value in batch.inputs.items()
                if name not in ("attention_mask", "position_ids", "cache_position")
            }
            output = forward(**given)
            hidden[row] = F.pad(output[0][0], (0, 0, cells.start, width - cells.stop))  # (seq, dim)
        if output is None:
            raise ProofError(EMBEDDED.format(type(self.trainer).__name__), fix=TRAINER_FIX)
        blank = torch.zeros_like(next(iter(hidden.values())))
        return _with_hidden(output, torch.stack([hidden.get(row, blank) for row in range(len(batch.ids))]))


def _num_unlike(batch: Mapping[str, Any], alone: Sequence[Mapping[str, Any]]) -> int:
    """Cells of a batch that differ from those of its examples alone, where these begin or end its rows.

    An example may have several rows: the first of all examples come first, then the second ones.
    """
    num = 0
    for name, whole in batch.items():
        if isinstance(whole, Tensor) and whole.dim():
            for index, one in enumerate(alone):
                rows = whole[index :: len(alone)].cpu()
                own = one[name].cpu()
                ends = [(), ()] if own.dim() == 1 else [(slice(own.shape[1]),), (slice(-own.shape[1], None),)]
                num += sum(
                    min(int((row[end] != mine).sum()) for end in ends) for row, mine in zip(rows, own, strict=False)
                )
    return num
