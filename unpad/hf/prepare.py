"""Models of transformers, made ready for flat batches."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from unpad.errors import RecipeError, is_memory_error
from unpad.hf.attention import NAME, noted
from unpad.hf.loader import collate
from unpad.hf.mixers import Boundaries, isolate_mixers, join_mixers
from unpad.proof.foreign.collators import Batching
from unpad.proof.foreign.lengths import RowLimit, row_limit
from unpad.proof.foreign.model import base_of, untouched
from unpad.proof.foreign.update import converted

TRIAL = (5, 3, 6)  # lengths of the sequences of a first flat batch


@dataclass(frozen=True)
class Prepared:
    """A model that `prepare` made ready.

    Args:
        model: what is called: the model of transformers, or the one of peft around it.
        inner: the model of transformers.
        attention: name of the attention that its layers use: "unpad", or another where they cannot use that.
        mixers: names of the layers that are isolated.
        limit: of `row_limit`.
        before: the attention that the model had; empty if it was ready before.
    """

    model: nn.Module
    inner: PreTrainedModel
    attention: str
    mixers: tuple[str, ...]
    limit: RowLimit | None
    before: str = ""


def prepare(model: nn.Module, *, pictures: bool = False) -> Prepared:
    """Make a model ready for flat batches: attention "unpad", boundaries for every layer, isolated mixers.

    Layers that raise with attention "unpad" keep their own, and are isolated like mixers. Called again it changes
    nothing. Whether the model then keeps sequences apart is for the proof to say.

    Args:
        model: a causal model of transformers, or one of peft around it.
        pictures: True lets flat batches have pixels besides tokens. Masks and positions of some families depend on
            pictures, and are wrong there: prove such batches by `unpad.prove_callable`.

    Raises:
        RecipeError: neither of them, or it computes no flat batch.
    """
    with preparing(model) as prepared:
        for hook in model._forward_pre_hooks.values():
            if isinstance(hook, Boundaries):
                hook.pictures = pictures
        return prepared


@contextmanager
def preparing(model: nn.Module) -> Iterator[Prepared]:
    """`prepare` a model, which is as it was before if anything inside raises."""
    inner = base_of(model)
    if not isinstance(inner, PreTrainedModel):
        raise RecipeError(
            f"{type(model).__name__} is no model of transformers", fix="pass a PreTrainedModel or a PeftModel of one"
        )
    for hook in model._forward_pre_hooks.values():
        if isinstance(hook, Boundaries):
            yield Prepared(model, inner, _attention(inner), hook.isolated, hook.limit)
            return
    before = _attention(inner)
    prepared = _prepare(model, inner, before)
    try:
        yield prepared
    except BaseException:
        undo(prepared)
        raise


def undo(prepared: Prepared) -> None:
    """Let a model be as it was before `prepare`, unless another had made it ready then."""
    if not prepared.before:
        return
    hooks = prepared.model._forward_pre_hooks
    for key in [key for key, hook in hooks.items() if isinstance(hook, Boundaries)]:
        del hooks[key]
        prepared.model._forward_pre_hooks_with_kwargs.pop(key, None)
    join_mixers(prepared.inner, prepared.mixers)
    prepared.inner.set_attn_implementation(prepared.before)


def _prepare(model: nn.Module, inner: PreTrainedModel, before: str) -> Prepared:
    """The model, made ready with the first attention that computes a flat batch."""
    reason = ""
    for attention in dict.fromkeys((NAME, before if before != NAME else "sdpa", "eager")):
        with suppress(ValueError):  # the family has attention of its own alone
            inner.set_attn_implementation(attention)
        parameters = inspect.signature(inner.forward).parameters.values()
        takes_cache = any(one.name == "use_cache" or one.kind is one.VAR_KEYWORD for one in parameters)
        boundaries = Boundaries(takes_cache, row_limit(inner.config.get_text_config().to_dict()))
        handle: RemovableHandle | None = None
        try:
            boundaries.isolated = tuple(isolate_mixers(model, inner, boundaries))
            handle = model.register_forward_pre_hook(boundaries, with_kwargs=True)
            found, is_same = set[object](), False
            with noted.of(found):
                output = _try(model)
            # Of other models masks say more, or routers and isolated layers read them.
            read = boundaries.isolated or hasattr(inner.config.get_text_config(), "output_router_logits")
            boundaries.hands = bool(found) and not read and all(isinstance(one, nn.Module) for one in found)
            with suppress(Exception):
                is_same = boundaries.hands and torch.equal(_try(model), output)
            boundaries.hands &= is_same
            return Prepared(model, inner, _attention(inner), boundaries.isolated, boundaries.limit, before)
        except Exception as error:
            join_mixers(inner, boundaries.isolated)
            if handle is not None:
                handle.remove()
            if is_memory_error(error):
                inner.set_attn_implementation(before)
                raise
            reason = reason or f"{type(error).__name__}: {error}"
    inner.set_attn_implementation(before)
    raise RecipeError(
        f"{type(inner).__name__} computes no flat batch: {reason}", fix="train it on padded batches, one sequence a row"
    )


@torch.no_grad()
def _try(model: nn.Module) -> Any:
    """Output for a flat batch of a few tokens, of several the first one; the model's state stays as it is."""
    device = next(model.parameters()).device
    rows = [{"input_ids": torch.arange(3, 3 + length)} for length in TRIAL]
    batch = converted(collate(rows), device=device)
    del batch["labels"]
    with untouched(model):
        model.eval()
        out = model(**batch)
        return next(iter(out.values())) if isinstance(out, dict) else out


def _attention(inner: PreTrainedModel) -> str:
    return str(inner.config._attn_implementation)


UNPAD = Batching(
    "unpad",
    True,
    lambda sequences: collate([{"input_ids": ids} for ids in sequences]),
    prepare=lambda model: prepare(model).model,
    proves=True,
    instead="unpad.hf.attach(trainer)",
)
