"""The collator of flat batches, for any data loader of torch and any trainer that takes one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unpad.errors import SourceError
from unpad.hf.loader import NUM_ITEMS, collate, places_of, read, refuse_columns


@dataclass(frozen=True)
class Collator:
    """Rows end to end as one batch without padding, as `collate_fn` of a DataLoader or `data_collator` of a trainer.

    Rows are as in `unpad.hf.Examples`, each of one sequence or several. The batch is that of `unpad.hf.collate`; with
    rows that `Examples` and `unpad.BatchSampler` chose it also has `num_items_in_batch`, by which a model of
    transformers divides its loss: the mean of the losses of an update is so the mean over its targets. With rows of
    another dataset it has not, and each loss is the mean over the targets of its batch.

    Args:
        columns: further columns with a value for every token, which the batch has under their own names. What has no
            value a token is left out.

    Raises:
        SourceError: no rows; rows without `input_ids`; another column with a value for every token.
    """

    columns: Sequence[str] = ()

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        if not rows:
            raise SourceError("a batch of no rows", fix="let the dataset be unpad.hf.Examples(rows)")
        refuse_columns(rows, self.columns)
        parts = [read(row, place, self.columns) for number, row in enumerate(rows) for place in places_of(number, row)]
        items = {NUM_ITEMS: rows[0][NUM_ITEMS]} if NUM_ITEMS in rows[0] else {}
        return {**collate(parts, self.columns), **items}
