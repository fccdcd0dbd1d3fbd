"""External models: their outputs, their accepted inputs, and calls without side effects."""

import inspect
import random
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unpad.errors import ProofError
from unpad.proof.foreign.update import ForeignBatch, LabelledSequence

Inputs = Mapping[str, object]
PLACEHOLDER = re.compile(r"(image|video|audio|vision|[be]o[ia])\w*_(id|index)$")  # fields of configurations


def base_of(model: nn.Module) -> nn.Module:
    """The model under adapters."""
    return getattr(model, "get_base_model", lambda: model)()


def config_of(model: nn.Module) -> Any:
    return getattr(base_of(model), "config", None)


def accepts(model: nn.Module, name: str) -> bool:
    """True if `forward` of a model, or of the model under its adapters, has a parameter of this name."""
    return any(name in inspect.signature(one.forward).parameters for one in (model, base_of(model)))


def alone_inputs(model: nn.Module, sequence: LabelledSequence) -> dict[str, object]:
    """Inputs of one sequence: its tokens and what stands beside them, without mask, positions or cache."""
    device = next(model.parameters()).device
    cache = {"use_cache": False} if accepts(model, "use_cache") else {}
    return {"input_ids": torch.tensor([sequence.ids], device=device), **sequence.beside, **cache}


def placeholders(model: nn.Module) -> set[int]:
    """Tokens in whose places a model puts pictures or sounds, or that begin and end them."""
    config = config_of(model)
    named = config.to_dict() if hasattr(config, "to_dict") else {}
    return {value for name, value in named.items() if PLACEHOLDER.match(name) and type(value) is int}


def logits_of(output: object, batch: ForeignBatch | None = None) -> Tensor:
    """Logits of every token, (rows, width, vocabulary).

    Raises:
        ProofError: they are missing, or not one per token of the batch.
    """
    if isinstance(output, Mapping):
        output = output.get("logits")
    elif hasattr(output, "logits"):
        output = output.logits
    elif isinstance(output, tuple):  # (loss, logits, ...) or (logits, ...)
        output = next((one for one in output if isinstance(one, Tensor) and one.dim() > 1), None)
    if not isinstance(output, Tensor):
        fix = "return logits as a tensor, in a tuple, or as `logits` of an object or mapping"
        raise ProofError("the model's output has no logits", fix=fix)
    if batch is None:
        return output
    if output.shape[:-1].numel() != batch.ids.numel():
        what = f"logits of shape {tuple(output.shape)} for input_ids of shape {tuple(batch.ids.shape)}"
        raise ProofError(what, fix="return logits of every token")
    return output.reshape(*batch.ids.shape, output.shape[-1])


def logits_alone(output: object, ids: Tensor) -> Tensor:
    """Logits of a sequence alone, (length, vocabulary), of `ids`, (1, length).

    Raises:
        ProofError: there are more or fewer than tokens.
    """
    logits = logits_of(output)[0]
    if len(logits) != ids.numel():
        raise ProofError(
            f"the model computes {len(logits)} logits for a sequence of {ids.numel()} tokens, as one does that puts "
            "learnt vectors before each row",
            fix="return the logits of the tokens alone",
        )
    return logits


def loss_of(output: object) -> Tensor | None:
    """The loss that a model returns when called with labels."""
    if isinstance(output, Mapping):
        output = output.get("loss")
    elif hasattr(output, "loss"):
        output = output.loss
    elif isinstance(output, tuple) and output:
        output = output[0]
    else:
        return None
    return output if isinstance(output, Tensor) and output.numel() == 1 else None


def taken_labels(model: nn.Module, batch: ForeignBatch) -> dict[str, Tensor]:
    """The labels of a batch that `forward` takes: with `labels`, also `shift_labels`."""
    return dict(batch.labels) if "labels" in batch.labels and accepts(model, "labels") else {}


@contextmanager
def untouched_generators(seed: int | None = None) -> Iterator[None]:
    """Restore the generators of Python, numpy and torch afterwards; inside they start from `seed` if it is given."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            if seed is not None:
                random.seed(seed)
                np.random.seed(seed)
                torch.manual_seed(seed)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Restore gradients, buffers, modes, attributes and hooks afterwards; inside, no parameter has a gradient."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    # Also sizes and tables that a module keeps of the longest sequence that it has seen, and the hooks with which
    # transformers collects hidden states once they are asked for.
    tables = [vars(module) for module in model.modules()]
    tables += [value for table in tables for value in table.values() if isinstance(value, dict)]
    contents = [(table, dict(table)) for table in tables]
    model.zero_grad(set_to_none=True)
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for table, content in contents:
            table.clear()
            table.update(content)
        for buffer, numbers in buffers:
            with torch.no_grad():
                if not torch.equal(buffer, numbers):
                    buffer.copy_(numbers)


@contextmanager
def no_router_loss(model: nn.Module) -> Iterator[bool]:
    """Leave out the auxiliary loss of a router, a mean over a micro-batch; yields True if there was one."""
    config = config_of(model)
    configs: list[Any] = [config, config.get_text_config()] if hasattr(config, "get_text_config") else [config]
    before = [(one, one.output_router_logits) for one in configs if hasattr(one, "output_router_logits")]
    for one, _ in before:
        one.output_router_logits = False
    try:
        yield any(value for _, value in before)
    finally:
        for one, value in before:
            one.output_router_logits = value
