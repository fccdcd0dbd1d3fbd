"""Adapter from a user's torch module to a model of tokens (apart: it is what such a module has to look like)."""

from typing import Protocol

from torch import Tensor

from unpad.batching.batch import RaggedBatch
from unpad.models.contract import WEIGHTS, Model, ReadsTokens
from unpad.nn.losses import Terms


class Provable(Protocol):
    """A torch module that `unpad.prove` accepts without being a `Model`."""

    def __call__(self, batch: RaggedBatch) -> Tensor:
        """Hidden states, (total_tokens, width)."""
        ...

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
        embedded: Tensor = self.module.embed(ids)  # type: ignore[attr-defined]  # a module of tokens has it
        return embedded


def as_model(model: Model | Provable) -> Model:
    """Return the model itself, or a user's module as one."""
    return model if isinstance(model, Model) else PlainModel(model)
