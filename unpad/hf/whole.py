"""Whole rows for a loss that reads them: the collator's padded batches, of which the model computes no padding.

A flat batch has one row and no `attention_mask`. A loss may need both: it counts rows or what a mask shows, or has a
second model that takes token ids alone. It gets the batch that the trainer's collator makes of the rows of a
micro-batch, and logits of that shape; the model in between gets their tokens end to end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from torch.utils.hooks import RemovableHandle

from unpad.errors import RecipeError
from unpad.hf.loader import IGNORED, PLACE, Examples
from unpad.hf.rows import CollatedRows

ROW = "unpad_row"  # of an item: the row as the collator is given it


class WholeRows(Dataset[dict[str, Any]]):
    """The rows of examples, each with its place.

    Raises:
        RecipeError: a row holds several sequences.
    """

    def __init__(self, examples: Examples, rows: CollatedRows) -> None:
        if any(part for _, part, _ in examples.places):
            raise RecipeError(
                "rows are packed, and a loss that reads whole rows would get them once for each of their sequences",
                fix="do not pack",
            )
        self.examples, self.rows = examples, rows

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Raises ChangedRowError for a row of another length than before, as `Examples` does."""
        assert index >= 0, "only several ranks have rows without targets"
        place = self.examples[index][PLACE]
        return {PLACE: place, ROW: self.rows.data[int(place[0])]}


@dataclass(frozen=True)
class OfRows:
    """Collator of items of `WholeRows`: the trainer's own of their rows.

    Args:
        rows: no rows, with the trainer's collator.
    """

    rows: CollatedRows

    @classmethod
    def by(cls, rows: CollatedRows) -> OfRows:
        return cls(rows.like([]))

    def __call__(self, items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return dict(self.rows.batch([item[ROW] for item in items]))


class WithoutPadding:
    """Hooks of a model that learns: a batch with an attention_mask goes in as a flat one, and results come out as rows.

    Results have zeros where the batch has padding.
    """

    def __init__(self, model: nn.Module) -> None:
        self.cells: Tensor | None = None  # those of the rectangle that hold tokens, while a flat batch is computed
        self.shape = (0, 0)
        self.handles: tuple[RemovableHandle, ...] = (
            model.register_forward_pre_hook(self._flatten, with_kwargs=True, prepend=True),
            model.register_forward_hook(self._spread),
        )

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    def _flatten(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self.cells = None
        ids, mask = kwargs.get("input_ids"), kwargs.get("attention_mask")
        if args or not torch.is_grad_enabled() or kwargs.get("past_key_values") is not None:
            return None
        if not isinstance(ids, Tensor) or not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape != ids.shape:
            return None
        lengths = mask.bool().sum(1)
        lengths = lengths[lengths > 0]
        bounds = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()
        self.shape = (ids.shape[0], ids.shape[1])
        self.cells = cells = mask.flatten().nonzero().flatten()

        def flat(value: Any) -> Any:
            if not isinstance(value, Tensor) or value.shape[:2] != self.shape:
                return value
            return value.flatten(0, 1).index_select(0, cells)[None]

        made = {name: flat(value) for name, value in kwargs.items() if name != "attention_mask"}
        if isinstance(made.get("labels"), Tensor):
            made["labels"][:, bounds[:-1].long()] = IGNORED
        made["position_ids"] = torch.cat([torch.arange(length, device=ids.device) for length in lengths.tolist()])[None]
        longest = int(lengths.max())
        made |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}
        return args, made

    def _spread(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        cells, self.cells = self.cells, None
        if cells is None:
            return None
        batch, seq = self.shape

        def spread(value: Any) -> Any:
            if isinstance(value, tuple | list):
                return type(value)(map(spread, value))
            if not isinstance(value, Tensor) or value.shape[:2] != (1, len(cells)):
                return value
            rectangle = value.new_zeros(batch * seq, *value.shape[2:])
            return rectangle.index_copy(0, cells, value[0]).unflatten(0, (batch, seq))

        if not isinstance(output, Mapping):
            return spread(output)
        for name in list(output):
            output[name] = spread(output[name])  # type: ignore[index]
        return output
