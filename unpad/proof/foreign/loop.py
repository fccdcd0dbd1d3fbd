"""The certificate for a training loop of one's own: the steps of one update."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, distributed, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from unpad.errors import ProofError
from unpad.proof.foreign import measure
from unpad.proof.foreign.certificate import ForeignCertificate
from unpad.proof.foreign.judge import NO_ROUTER_LOSS, ComparedUpdate, Precision, judge, refused
from unpad.proof.foreign.model import base_of, no_router_loss, untouched, untouched_generators
from unpad.proof.foreign.undisturbed import without_dropout
from unpad.proof.foreign.update import (
    IGNORE,
    LABELS,
    Batch,
    LabelledSequence,
    converted,
    has_media,
    read_batch,
    read_update,
)

Step = Callable[[Any], object]
WRAPPED = ("module", "_orig_mod", "_forward_module")  # in what torch, its compiler and Lightning put around a model
UNREAD = "the loss is told by the size of the gradient; what the loop reports is not read"


def prove_loop(step: Step, batches: Sequence[Batch], *, precision: Precision = "auto") -> ForeignCertificate:
    """Prove that a training loop has, over the batches of one update, the gradient of its sequences one at a time.

        batches = list(itertools.islice(loader, 2))    # as many as the loop accumulates
        certificate = unpad.prove_loop(lambda batch: (model(**batch).loss / 2).backward(), batches)

    The steps run as they are, without dropout and a router's auxiliary loss. The reference is the mean cross-entropy
    over all targets, of each sequence alone. Weights, gradients, generators and modes are as before afterwards.

    Args:
        step: `step(batch)` computes a batch forward and backward, its loss divided as the loop divides it, in full
            precision, and calls a causal model once with `input_ids`. It updates nothing.
        batches: those of one update, as the loop gets them: `input_ids`, and `labels` or `shift_labels`. Sequences
            begin where `cu_seq_lens_q` or, without it, `position_ids` that restart say so, and leave out what
            `attention_mask` hides.
        precision: as of `prove_callable`; "fp32" suits a model in DistributedDataParallel.

    Raises:
        ProofError: no batches; pictures; several processes; a step that calls no model, calls it twice, or updates
            weights.
    """
    if not batches:
        raise ProofError("there are no batches", fix="pass those of one update")
    if any(map(has_media, batches)):
        raise ProofError("the batches have pictures or sounds", fix="prove them by unpad.prove_callable")
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise ProofError("the loop runs in several processes", fix="prove it in one process")
    sequences = [one for batch in batches for one in _sequences(batch)]
    with untouched_generators(), register_optimizer_step_pre_hook(_refuse_update):
        model = _model_of(step, batches)
        with untouched(model), no_router_loss(model) as router, without_dropout(model):
            notes = [UNREAD, *([NO_ROUTER_LOSS] if router else [])]
            return judge(model, precision, partial(_compare, step, batches, model, sequences), notes)


def _compare(
    step: Step, batches: Sequence[Batch], model: nn.Module, sequences: Sequence[LabelledSequence], exact: bool
) -> ComparedUpdate:
    """The update where weights are in their precision already; `exact` for fp64."""
    if exact:
        batches = converted(list(batches), floats=torch.float64)
    try:
        calls, _ = _run(step, batches, model)
    except Exception as error:
        raise error if isinstance(error, ProofError) else refused(error) from error
    update = read_update([read_batch(one) for one in calls], sequences)
    alone = update.one_at_a_time()
    truth = measure.one_at_a_time(model, alone)

    def forward(inputs: Any) -> object:
        return model(**inputs)

    def together() -> measure.UpdateResults:
        logits, (_, gradient) = measure.logits_in_batches(forward, update), _run(step, batches, model)
        size = _dot(gradient, truth.gradient) / (_dot(truth.gradient, truth.gradient) or 1.0)
        return measure.UpdateResults(logits, size * truth.loss, gradient)

    is_other = (measure.error_of_loss(model, alone) or 0) > measure.OTHER_LOSS
    own = f"the loss of {type(model).__name__}" if is_other else ""
    return ComparedUpdate(update, lambda: measure.one_at_a_time(model, alone), together, forward, own=own)


def _run(step: Step, batches: Sequence[Batch], model: nn.Module) -> tuple[list[dict[str, object]], dict[str, Tensor]]:
    """What each step calls the model with, and the labels of its batch if it has none; and the gradient of all."""
    names, calls = [*inspect.signature(base_of(model).forward).parameters], list[dict[str, object]]()

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append({**dict(zip(names, args, strict=False)), **kwargs})

    with model.register_forward_pre_hook(note, with_kwargs=True):
        for number, batch in enumerate(batches, 1):
            step(batch)
            if len(calls) != number:
                what = f"a step calls {type(model).__name__} {len(calls) + 1 - number} times"
                raise ProofError(what, fix="let it call the model once for a batch")
            if not set(LABELS) & set(calls[-1]):
                calls[-1] |= {name: batch[name] for name in LABELS if name in batch}
    return calls, measure.take_gradient(model)


def _dot(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return sum(float((one[name].double() * other[name].double()).sum()) for name in one.keys() & other.keys())


def _model_of(step: Step, batches: Sequence[Batch]) -> nn.Module:
    """The outermost module that a step calls with `input_ids`, without what other libraries put around it."""
    found = list[nn.Module]()

    def note(module: nn.Module, args: object, kwargs: dict[str, Any], made: object) -> None:
        if "input_ids" in kwargs:
            found.append(module)  # the outermost one ends last

    with register_module_forward_hook(note, with_kwargs=True, always_call=True), torch.no_grad():
        for batch in batches:  # all of them, as some loops count the batches of an update
            with suppress(Exception):  # a backward pass raises without gradients
                step(batch)
    if not found:
        raise ProofError("the step calls no model with input_ids", fix="let it call model(input_ids=..., ...)")
    model = found[-1]
    while name := next((name for name in WRAPPED if name in model._modules), ""):
        model = model.get_submodule(name)
    return model


def _refuse_update(optimizer: object, args: object, kwargs: object) -> NoReturn:
    raise ProofError("the step updates weights", fix="leave optimizer.step() out of it")


def _sequences(batch: Batch) -> Iterator[LabelledSequence]:
    """The sequences of a batch, with the targets that it gives them."""
    read, bounds = read_batch(batch), batch.get("cu_seq_lens_q")
    starts = read.starts()
    if isinstance(bounds, Tensor):
        starts = torch.zeros_like(read.real)
        starts.view(-1)[bounds[:-1].long()] = True
    for row, real in enumerate(read.real):
        number = starts[row].cumsum(0)
        for one in number.unique().tolist():
            cells = (number == one) & real
            if ids := read.ids[row, cells].tolist():
                yield LabelledSequence(ids, [IGNORE, *read.targets[row, cells].tolist()[:-1]])
