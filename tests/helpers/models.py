"""Stand-in models for tests that use a few members of the contract."""

from __future__ import annotations

from torch import Tensor

from unpad.batching.batch import RaggedBatch
from unpad.models.contract import Model
from unpad.nn.losses import Terms


class Stub(Model):
    """A model whose members are what the test defines; the others may not be called."""

    def forward(self, batch: RaggedBatch) -> Tensor:
        raise NotImplementedError

    def losses(self, batch: RaggedBatch) -> Terms:
        raise NotImplementedError

    def count_targets(self, batch: RaggedBatch) -> dict[str, int]:
        raise NotImplementedError
