"""The sequences of a data row, as a collator returns them for that row alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from unpad.errors import ProofError
from unpad.proof.foreign.known import Collated, listed
from unpad.proof.foreign.update import IGNORE, Known, read_batch


def sequences_alone(collated: Collated, lengths: Sequence[int] | None = None) -> list[Known]:
    """Read the batch of one row: its real tokens, and their labels.

    Args:
        lengths: of the sequences packed in the row; by default the row is split where positions restart. Trailing
            tokens without a label are fill.

    Raises:
        ProofError: the batch has several rows, or lengths are not those of its tokens.
    """
    batches = [read_batch(one) for one in listed(collated)]
    if len(batches) != 1 or len(batches[0].ids) != 1:
        raise ProofError("the collator makes no single row of a single example", fix="collate each example to one row")
    batch = batches[0]
    if not batch.ids.numel():
        return []
    labels = F.pad(batch.targets[:, :-1], (1, 0), value=IGNORE)  # of the token itself, and not of the one after it
    real = batch.real[0]
    ids, kept = batch.ids[0][real].tolist(), (labels[0][real] != IGNORE).tolist()
    if lengths is None:
        ends = [*batch.starts()[0][real].nonzero().flatten().tolist(), len(ids)]
        ends = ends if ends[0] == 0 else [0, *ends]
        while len(ends) > 2 and ends[-1] - ends[-2] == 1:  # fill, each token at position 0
            ends.pop()
    else:
        ends = [0]
        for length in lengths:
            ends.append(ends[-1] + int(length))
    if ends[-1] != len(ids) and (ends[-1] > len(ids) or any(kept[ends[-1] :])):
        raise ProofError(f"a row has {len(ids)} tokens and lengths of {ends[-1]}", fix="pack the rows again")
    return [
        Known(
            ids[start:stop],
            [ids[at] if kept[at] and at > start else IGNORE for at in range(start, stop)],
        )
        for start, stop in pairwise(ends)
    ]


def without_first_label(batch: Mapping[str, object]) -> dict[str, object]:
    """The batch of one row without the label of its first token, which no position predicts.

    Some trainers count it as a target of an update. Labels that differ from the tokens at their places stay.
    """
    ids, labels = batch.get("input_ids"), batch.get("labels")
    if not isinstance(ids, Tensor) or not isinstance(labels, Tensor) or ids.shape != labels.shape:
        return dict(batch)
    mask = batch.get("attention_mask")
    hides = isinstance(mask, Tensor) and mask.shape == ids.shape
    real = mask > 0 if isinstance(mask, Tensor) and hides else torch.ones_like(ids, dtype=torch.bool)
    learnt = real & (labels != IGNORE)
    if not bool(real.any()) or not torch.equal(labels[learnt], ids[learnt]):
        return dict(batch)
    made = labels.clone()
    made.view(-1)[int(real.flatten().nonzero()[0])] = IGNORE
    return {**batch, "labels": made}
