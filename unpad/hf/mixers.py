"""Isolation of layers that mix tokens but are no attention of ours: convolutions and recurrences.

Such a layer reads a flat run as a few rectangles of sequences of like length, padded on the right. Whatever is causal
then begins anew with every sequence, by whatever kernel it has. The layers are found by trial and not by name.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from unpad.batching.layout import Layout
from unpad.errors import PlanError
from unpad.hf.attention import find_sequences, hand, noted, outside_graphs
from unpad.proof.foreign.lengths import RowLimit, refuse_long
from unpad.proof.foreign.model import untouched
from unpad.proof.foreign.update import BOUNDARIES, has_media

LENGTH = 13  # tokens of the trial; a prime, so that no width of a model is mistaken for it
CHANGED = 3  # its first tokens, which are exchanged
MOVED = 1e-4  # of the largest output; a later token with an output that moves by more has seen them


class Boundaries:
    """Forward pre-hook of a model that finds the sequences of its batch, for attention and for isolated layers.

    A batch that brings positions alone gets `cu_seq_lens_q` too, since keyword arguments reach the attention of more
    families than positions do. An object and not a function, so that a copy of a model has boundaries of its own.
    Layers that are computed again in a backward pass find the boundaries of the last forward pass.

    Args:
        takes_cache: whether the model has a parameter `use_cache`.
        limit: of a batch of several sequences, see `refuse_long`.

    Attributes:
        pictures: whether flat batches may have pixels.
        hands: whether layers get the boundaries by `hand`: then the model makes no mask, and reads no tensor for it.
    """

    def __init__(self, takes_cache: bool, limit: RowLimit | None) -> None:
        self.takes_cache, self.limit = takes_cache, limit
        self.pictures = self.hands = False
        self.isolated = tuple[str, ...]()
        self.layout: Layout | None = None
        self.shape = (0, 0)  # (batch, seq) of the rectangle that holds the run

    @outside_graphs
    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self.layout = None
        given = args[0] if args else kwargs.get("input_ids")
        given = kwargs.get("inputs_embeds") if given is None else given
        named = kwargs.get("cu_seq_lens_q") is not None or kwargs.get("position_ids") is not None
        if given is None or not named or kwargs.get("attention_mask") is not None:
            return None
        batch, seq = given.shape[:2]
        layout = find_sequences(batch, seq, None, kwargs).layout
        hands = self.hands and not has_media(kwargs)
        if layout.num_seqs > batch:
            refuse_long(self.limit, seq)
        elif not hands or kwargs.get("cu_seq_lens_q") is None:
            return None
        if has_media(kwargs) and kwargs.get("token_type_ids") is not None:
            what = "the model makes its mask of token_type_ids, which join the pictures and prefixes of a flat batch"
            raise PlanError(what, fix="pad it, one sequence a row")
        if not self.pictures and has_media(kwargs):
            raise PlanError(
                "a flat batch has pixels besides its tokens, and not every model keeps pictures apart there",
                fix="pad it; or use unpad.hf.prepare(model, pictures=True), and prove it by unpad.prove_callable",
            )
        self.layout, self.shape = layout, (batch, seq)
        changed = {name: value for name, value in kwargs.items() if name not in BOUNDARIES}
        if hands:
            changed["attention_mask"] = hand(layout)
        else:
            changed |= dict.fromkeys(BOUNDARIES[:2], layout.cu_seqlens) | dict.fromkeys(
                BOUNDARIES[2:4], layout.max_seqlen
            )
        if self.takes_cache:
            changed["use_cache"] = False
        return args, changed


class Rectangles:
    """`forward` of an isolated layer."""

    def __init__(self, layer: nn.Module, boundaries: Boundaries) -> None:
        self.inner = layer.forward
        self.boundaries = boundaries

    @outside_graphs
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kwargs = {name: value for name, value in kwargs.items() if name not in BOUNDARIES}
        layout = self.boundaries.layout
        if layout is None:
            return self.inner(*args, **kwargs)
        parts, rest = [], None
        run, device = layout.grouped, layout.cu_seqlens.device
        places = run.ordered(torch.arange(math.prod(self.boundaries.shape), device=device))
        for group in run.groups:
            take = partial(_gathered, group.rectangle(places), self.boundaries.shape)
            out = self.inner(*map(take, args), **{name: take(value) for name, value in kwargs.items()})
            if isinstance(out, tuple | list):  # weights and caches of rectangles are of no use
                out, rest = out[0], type(out)([None] * (len(out) - 1))
            parts.append(group.tokens(out))
        whole = run.restored(parts).unflatten(0, self.boundaries.shape)
        return whole if rest is None else type(rest)((whole, *rest))


def _gathered(cells: Tensor, shape: tuple[int, int], value: Any) -> Any:
    """A layer's argument for some tokens, (num_seqs, longest) int64, of a (batch, seq) rectangle of this shape: what
    has an entry for every token is gathered."""
    if isinstance(value, tuple | list):
        return type(value)(_gathered(cells, shape, one) for one in value)
    batch, seq = shape
    if not isinstance(value, Tensor) or value.dim() < 2 or value.shape[0] not in (1, batch) or value.shape[1] != seq:
        return value
    flat = value.expand(batch, *value.shape[1:]).flatten(0, 1)
    return flat.index_select(0, cells.flatten()).unflatten(0, cells.shape)


# --------------------------------------------------------------------------- search


def isolate_mixers(model: nn.Module, inner: nn.Module, boundaries: Boundaries) -> list[str]:
    """Isolate all layers that need it.

    Args:
        model: what is called; inner: the model of transformers in it.

    Returns:
        Names of the layers in `inner`.
    """
    names = find_mixers(model, inner)
    for name in names:
        layer = inner.get_submodule(name)
        layer.__dict__["forward"] = Rectangles(layer, boundaries)
    return names


def join_mixers(inner: nn.Module, names: tuple[str, ...]) -> None:
    """Undo `isolate_mixers`."""
    for name in names:
        inner.get_submodule(name).__dict__.pop("forward", None)


@dataclass(frozen=True, eq=False)
class _Call:
    """One call of a module in the trial."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Tensor

    def mixes(self, module: nn.Module) -> bool:
        """True if the output of later tokens changes with the first ones."""
        hidden = self.args[0] if self.args else self.kwargs["hidden_states"]
        changed = hidden.clone()
        changed[:, :CHANGED] = hidden[:, :CHANGED].flip(2) + hidden.abs().mean() + 0.5
        args, kwargs = self.args, self.kwargs
        if args:
            args = (changed, *args[1:])
        else:
            kwargs = {**kwargs, "hidden_states": changed}
        after = _first(module(*args, **kwargs))
        if after is None or after.shape != self.out.shape:  # it keeps state from call to call
            return True
        return bool((after - self.out)[:, CHANGED:].abs().max() > MOVED * self.out.abs().max())


@torch.no_grad()
def find_mixers(model: nn.Module, inner: nn.Module) -> list[str]:
    """Names of the layers that mix tokens without attention of ours, by a trial of a few tokens.

    Where layers are nested, it is the one inside a block: a layer that mixes, with the children that mix explaining it.
    """
    calls: dict[nn.Module, _Call] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        given, made = args[0] if args else kwargs.get("hidden_states"), _first(out)
        if made is not None and isinstance(given, Tensor) and all(_per_token(x) for x in (given, made)):
            calls.setdefault(module, _Call(args, kwargs, made.clone()))

    device = next(model.parameters()).device
    ids = torch.arange(3, 3 + LENGTH, device=device)[None]
    names = {module: name for name, module in inner.named_modules()}
    with untouched(model):
        model.eval()
        hooks = [m.register_forward_hook(note, with_kwargs=True) for m in inner.modules() if m is not inner]
        attending = set[object]()
        with noted.of(attending):
            model(input_ids=ids, use_cache=False)
        for hook in hooks:
            hook.remove()
        return [names[module] for module in _outermost(inner, calls, attending)]


def _outermost(module: nn.Module, calls: dict[nn.Module, _Call], attending: set[object]) -> Iterator[nn.Module]:
    """The outermost layers below a module that mix tokens and hold no attention of ours, or their children that do."""
    for child in module.children():
        if attending.isdisjoint(child.modules()) and child in calls:
            if calls[child].mixes(child):
                parts = [part for part in child.children() if part in calls and calls[part].mixes(part)]
                yield from parts or [child]
        elif child not in attending:
            yield from _outermost(child, calls, attending)


def _first(out: Any) -> Tensor | None:
    first = out[0] if isinstance(out, tuple | list) and out else out
    return first if isinstance(first, Tensor) else None


def _per_token(x: Tensor) -> bool:
    """True for (1, LENGTH, width) of numbers."""
    return x.dim() == 3 and x.shape[:2] == (1, LENGTH) and x.is_floating_point()
