"""A stand-in of a card: a device whose tensors lie in the processor's memory, and never meet tensors that lie there."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from tests.helpers.toy import run
from unpad.inference import loaded
from unpad.training import setup

aten = torch.ops.aten
MOVES = (aten._to_copy.default, aten.copy_.default)


class OnCard(Tensor):
    """A tensor on the card; `held` has its numbers."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> OnCard:
        with torch.inference_mode(False):
            made: OnCard = Tensor._make_wrapper_subclass(
                cls, held.shape, held.stride(), held.storage_offset(), dtype=held.dtype, device=torch.device("card:0")
            )
        made.held = held
        return made

    def tolist(self) -> Any:
        return self.held.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})


class Card(TorchDispatchMode):
    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})


def computed(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Compute on the held tensors, as a card does: it reads numbers of the processor, but no tensors there."""
    given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
    on_card = any(isinstance(one, OnCard) for one in given)
    wanted = kwargs.get("device")
    if on_card and func not in MOVES:
        assert all(isinstance(one, OnCard) or not one.dim() for one in given), f"{func} of tensors on two devices"
    if wanted is not None:
        on_card, kwargs = torch.device(wanted).type == "card", {**kwargs, "device": "cpu"}
    made = func(
        *tree_map_only(OnCard, lambda one: one.held, args), **tree_map_only(OnCard, lambda one: one.held, kwargs)
    )
    if func is aten.copy_.default:
        return args[0]
    return tree_map_only(Tensor, OnCard, made) if on_card else made


def _empty(size: Any, stride: Any, dtype: Any = None, **kwargs: Any) -> Tensor:
    return OnCard(torch.empty_strided(size, stride, dtype=dtype))


def _copy(source: Any, target: Any, non_blocking: bool = False) -> Tensor:
    given, made = (one.held if isinstance(one, OnCard) else one for one in (source, target))
    made.copy_(given)
    return target


@contextmanager
def card() -> Iterator[None]:
    """Compute on a card; once in a process, and in one that ends then, as torch keeps a device that it knows."""
    _setup_privateuseone_for_python_backend("card")
    torch.card.get_amp_supported_dtype = lambda: [torch.bfloat16]
    for name, kernel in (("empty_strided", _empty), ("_copy_from", _copy)):  # of `new_tensor`, which no mode sees
        torch.library.impl(f"aten::{name}", "PrivateUse1", kernel)
    with pytest.MonkeyPatch.context() as patch, Card():
        patch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
        for module in (loaded, setup):
            patch.setattr(module, "computing_device", lambda: torch.device("card:0"))
        yield


def train_and_go_on(recipe: Path, folder: Path) -> None:
    """Train for two steps, and go on to the third."""
    run(recipe, folder, "train.max_steps=2")
    run(recipe, folder, "train.max_steps=3", resume=True)


if __name__ == "__main__":
    with card():
        train_and_go_on(Path(sys.argv[1]), Path(sys.argv[2]))
