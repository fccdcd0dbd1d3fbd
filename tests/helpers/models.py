"""Stand-in models for tests that use a few members of the contract."""

from __future__ import annotations

from torch import Tensor, nn

from unpad.batching.batch import RaggedBatch
from unpad.models.contract import Model
from unpad.models.decoder import Decoder
from unpad.nn.losses import Terms


class Stub(Model):
    """A model whose members are what the test defines; the others may not be called."""

    def forward(self, batch: RaggedBatch) -> Tensor:
        raise NotImplementedError

    def losses(self, batch: RaggedBatch) -> Terms:
        raise NotImplementedError

    def count_targets(self, batch: RaggedBatch) -> dict[str, int]:
        raise NotImplementedError


class Own(nn.Module):
    """A user's module, with the members that `prove` documents and no base class of ours."""

    def __init__(self, inner: Decoder) -> None:
        super().__init__()
        self.inner, self.embed = inner, inner.embed

    def forward(self, batch: RaggedBatch) -> Tensor:
        return self.inner(batch)

    def losses(self, batch: RaggedBatch) -> Terms:
        return self.inner.losses(batch)

    def count_targets(self, batch: RaggedBatch) -> dict[str, int]:
        return self.inner.count_targets(batch)
