"""Our flat batches as one of the ways to make batches that `unpad prove --hf` compares."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from unpad.hf.loader import collate
from unpad.hf.prepare import prepare
from unpad.proof.foreign.collators import Batch, Collator


def _flat(sequences: Sequence[Sequence[int]]) -> Batch:
    return collate([{"input_ids": ids} for ids in sequences])


def _prepared(model: nn.Module) -> nn.Module:
    return prepare(model).model


UNPAD = Collator("unpad", True, _flat, prepare=_prepared, proves=True, instead="unpad.hf.attach(trainer)")
