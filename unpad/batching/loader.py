"""Batches of a plan, loaded ahead of the steps that train on them."""

from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
import torch

from unpad.batching.batch import RaggedBatch, make_batch
from unpad.batching.layout import Layout
from unpad.batching.plan import Micro, Plan

AHEAD = 4  # steps, some tenths of a second: hides one slow read of the disk; a step is some 100 KB


class TokenSource(Protocol):
    """Source of tokens: `data/tokens/token_set.py`, or sequences in memory."""

    def gather(
        self, seq_ids: np.ndarray, starts: np.ndarray, stops: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens [start, stop] of each sequence: flat ids, flat loss mask, and (n + 1,) offsets into both."""


def load_micro(tokens: TokenSource, micro: Micro, pad_id: int) -> RaggedBatch:
    """Gather one micro-batch.

    A piece of n positions is n + 1 tokens: the input of position i is token i, its label token i + 1. Positions before
    `first_target`, which an earlier window has counted, serve as context only.
    """
    flat, counts_loss, offsets = tokens.gather(micro.seq_ids, micro.starts, micro.stops)
    lengths = (micro.stops - micro.starts).astype(np.int64)
    is_input = np.ones(flat.size, np.bool_)
    is_input[offsets[1:] - 1] = False  # the last token of a piece is only a label
    is_label = np.ones(flat.size, np.bool_)
    is_label[offsets[:-1]] = False  # the first only an input
    loss_mask = counts_loss[is_label]
    if np.any(micro.first_target > micro.starts):
        column = np.arange(loss_mask.size) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        loss_mask &= column >= np.repeat(micro.first_target - micro.starts, lengths)
    input_ids, labels, seq_ids = flat[is_input], flat[is_label], micro.seq_ids
    filler = micro.fill_to - input_ids.size
    if filler > 0:  # sequences of one token, which cost attention next to nothing
        input_ids = np.concatenate([input_ids, np.full(filler, pad_id)])
        labels = np.concatenate([labels, np.full(filler, pad_id)])
        loss_mask = np.concatenate([loss_mask, np.zeros(filler, np.bool_)])
        lengths, seq_ids = np.append(lengths, np.ones(filler, np.int64)), np.append(seq_ids, np.full(filler, -1))
    batch = make_batch(input_ids, labels, loss_mask, lengths, seq_ids)
    return batch.pad(pad_to=micro.pad_to, pad_id=pad_id) if micro.pad_to else batch


def load_steps(
    load_one: Callable[[Micro], RaggedBatch],
    plan: Plan,
    device: torch.device,
    first: int = 0,
    *,
    group_lengths: bool,
    own: Callable[[Sequence[Micro]], Sequence[int]] | None = None,
) -> Generator[list[RaggedBatch], None, None]:
    """Yield the micro-batches of every step of the plan, from step `first` on.

    Args:
        load_one: gathers one micro-batch, such as the `load` of a run's data.
        group_lengths: also compute the length groups of every layout, for attention without a kernel for ragged runs.
        own: places of the micro-batches of a step to load; None: all of them.

    A worker loads up to AHEAD steps in advance, in the plan's order. Its errors are raised here, at their own step. The
    worker ends with the generator, however that ends: exhausted, closed or garbage-collected.
    """

    def load(step: int) -> list[RaggedBatch]:
        planned = plan.step(step)
        micros = [load_one(planned[i]) for i in (range(len(planned)) if own is None else own(planned))]
        for batch in micros:
            _ = batch.num_real
            if group_lengths and isinstance(batch.layout, Layout):
                _ = batch.layout.grouped
        return [batch.to(device) for batch in micros]

    # A thread, not a process: most of a load is numpy copying out of mapped files, and a batch then needs no copy.
    worker = ThreadPoolExecutor(1, thread_name_prefix="unpad-loader")
    try:
        loading = deque(worker.submit(load, step) for step in range(first, min(first + AHEAD, plan.num_steps)))
        for step in range(first, plan.num_steps):
            micros = loading.popleft().result()
            if step + AHEAD < plan.num_steps:
                loading.append(worker.submit(load, step + AHEAD))
            yield micros
    finally:
        worker.shutdown(cancel_futures=True)
