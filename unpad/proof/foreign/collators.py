"""Common collators: from sequences to batches of transformers.

Each gets all sequences of an update and returns its batch. Packed rows have `row_tokens` tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor, nn

IGNORED = -100  # label of a token that is no target
Batch = dict[str, object]
Collate = Callable[[Sequence[Sequence[int]]], Batch]


@dataclass(frozen=True)
class Batching:
    """A way to make batches.

    Args:
        name: shown in tables.
        promises: whether its documentation promises isolated sequences. Without a promise, a failure is shown but does
            not fail the proof.
        needs: modules that it imports.
        prepare: changes a copy of the model, which replaces it; None for the model itself.
        proves: whether training in this way first proves the model, and refuses it if the proof fails.
        instead: how to train in this way, as advice if another way fails; empty for none.
    """

    name: str
    promises: bool
    collate: Collate
    needs: tuple[str, ...] = ()
    prepare: Callable[[nn.Module], nn.Module] | None = None
    proves: bool = False
    instead: str = ""

    @property
    def is_installed(self) -> bool:
        return all(find_spec(module) is not None for module in self.needs)


def collators(row_tokens: int) -> list[Batching]:
    """Every way of transformers and TRL to make batches, whether or not its modules are installed.

    Args:
        row_tokens: length of a packed row; no shorter than the longest sequence, or packing cuts.
    """
    return [
        Batching("padded right", True, padded("right"), instead="pad on the right"),
        Batching("padded left", False, padded("left")),
        Batching("flattening", True, flattened(), ("transformers",), instead="DataCollatorWithFlattening"),
        Batching("flattening + seq_idx", True, flattened(return_seq_idx=True), ("transformers",)),
        Batching("flattening + cache", False, flattened(use_cache=True), ("transformers",)),
        Batching("TRL padding_free", True, trl_rows(None, row_tokens), TRL, instead="SFTConfig(padding_free=True)"),
        Batching("TRL packing bfd", True, trl_rows("bfd", row_tokens), TRL, instead="SFTConfig(packing=True)"),
        Batching("TRL packing bfd_split", True, trl_rows("bfd_split", row_tokens), TRL),
        Batching("TRL packing wrapped", False, trl_rows("wrapped", row_tokens), TRL),
    ]


TRL = ("trl", "datasets")


def padded(side: Literal["left", "right"]) -> Collate:
    """Rectangles with a mask of real tokens, as tokenizers and DataCollatorForLanguageModeling make them."""

    def collate(sequences: Sequence[Sequence[int]]) -> Batch:
        longest = max(map(len, sequences))

        def rows(value: int, contents: Sequence[Sequence[int]]) -> Tensor:
            blanks = [[value] * (longest - len(one)) for one in contents]
            pairs = zip(blanks, contents, strict=True)
            return torch.tensor([[*gap, *one] if side == "left" else [*one, *gap] for gap, one in pairs])

        return {
            "input_ids": rows(0, sequences),
            "attention_mask": rows(0, [[1] * len(one) for one in sequences]),
            "labels": rows(IGNORED, sequences),
        }

    return collate


def flattened(*, use_cache: bool = False, return_seq_idx: bool = False) -> Collate:
    """One row without padding by transformers' DataCollatorWithFlattening.

    Args:
        use_cache: on in training loops that keep the models' default; Trainer turns it off.
    """

    def collate(sequences: Sequence[Sequence[int]]) -> Batch:
        from transformers import DataCollatorWithFlattening

        made = DataCollatorWithFlattening(return_seq_idx=return_seq_idx)([{"input_ids": list(s)} for s in sequences])
        return {**made, **({"use_cache": True} if use_cache else {})}

    return collate


def trl_rows(strategy: Literal["bfd", "bfd_split", "wrapped"] | None, row_tokens: int) -> Collate:
    """Rows that TRL packs, or does not, collated as its SFTTrainer does: without padding, except "wrapped" ones."""

    def collate(sequences: Sequence[Sequence[int]]) -> Batch:
        from datasets import Dataset, disable_progress_bars
        from trl import pack_dataset
        from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

        rows = [{"input_ids": list(s)} for s in sequences]
        if strategy is not None:
            disable_progress_bars()
            rows = list(pack_dataset(Dataset.from_list(rows), row_tokens, strategy))
        return dict(DataCollatorForLanguageModeling(pad_token_id=0, padding_free=strategy != "wrapped")(rows))

    return collate
