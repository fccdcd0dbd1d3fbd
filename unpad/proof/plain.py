"""Adapter from a user's torch module to a model of tokens (apart: it is what such a module has to look like)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from unpad.batching.batch import RaggedBatch
from unpad.models.contract import WEIGHTS, Model, ReadsTokens
from unpad.nn.losses import Terms
from unpad.proof.members import HasMembers
from unpad.recipes.training import Weight


@runtime_checkable
class Provable(HasMembers, Protocol):
    """A torch module that `unpad.prove` accepts without being a `Model`."""

    def __call__(self, batch: RaggedBatch) -> Tensor:
        """Hidden states, (total_tokens, width)."""
        ...

    def losses(self, batch: RaggedBatch) -> Terms: ...

    def count_targets(self, batch: RaggedBatch) -> dict[str, int]: ...


@runtime_checkable
class _Embeds(HasMembers, Protocol):
    embed: nn.Module


@runtime_checkable
class _Weighs(HasMembers, Protocol):
    weights: Mapping[str, Weight]


@runtime_checkable
class _Configured(HasMembers, Protocol):
    config: object


@runtime_checkable
class _Ordered(HasMembers, Protocol):
    causal: bool


@runtime_checkable
class _Attends(HasMembers, Protocol):
    head_dim: int


class PlainModel(ReadsTokens):
    """Model around a module with the members of `Provable`, and optionally `embed`, `weights`, `config.causal` and
    `config.head_dim`."""

    def __init__(self, module: Provable) -> None:
        super().__init__()
        self.module = module
        self.weights = module.weights if isinstance(module, _Weighs) else WEIGHTS
        config = module.config if isinstance(module, _Configured) else None
        self.causal = config.causal if isinstance(config, _Ordered) else True
        self.head_dim = config.head_dim if isinstance(config, _Attends) else None

    def forward(self, batch: RaggedBatch) -> Tensor:
        return self.module(batch)

    def losses(self, batch: RaggedBatch) -> Terms:
        return self.module.losses(batch)

    def count_targets(self, batch: RaggedBatch) -> dict[str, int]:
        return self.module.count_targets(batch)

    def embed_tokens(self, ids: Tensor) -> Tensor:
        assert isinstance(self.module, _Embeds), "a module of tokens has `embed`"
        embedded: Tensor = self.module.embed(ids)
        return embedded


def as_model(model: Model | Provable) -> Model:
    """Return the model itself, or a user's module as one."""
    return model if isinstance(model, Model) else PlainModel(model)
