"""Ways to train in many families of transformers, sound and faulty, that the engine was made with."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.proof.foreign.hugging_face import IGNORE, flatten, pad, sequences

Batch = dict[str, Tensor]
Rows = Sequence[Sequence[int]]
ROWS = sequences(7)
MASKS = [[3 * at >= len(one) for at in range(len(one))] for one in ROWS]


def examples(rows: Rows) -> list[Mapping[str, list[int]]]:
    return [{"input_ids": list(one)} for one in rows]


def right(rows: Rows) -> Batch:
    return pad()(examples(rows))


def left(rows: Rows) -> Batch:
    return pad("left")(examples(rows))


def left_first_masked(rows: Rows) -> Batch:
    """Padded on the left; each row's first token is no target."""
    batch = left(rows)
    first = batch["attention_mask"].cumsum(1) == 1
    return {**batch, "labels": batch["labels"].masked_fill(first, IGNORE)}


def with_positions(batch: Batch) -> Batch:
    """Positions counted from the first real token."""
    return {**batch, "position_ids": (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)}


def packed(rows: Rows) -> Batch:
    """One row, no cache, positions that restart."""
    return {**flatten(examples(rows)), "use_cache": False}  # type: ignore[dict-item]


def without(batch: Batch, *names: str) -> Batch:
    return {name: value for name, value in batch.items() if name not in names}


def block_mask(batch: Batch) -> Batch:
    """A packed row with a 4-D mask of its documents."""
    documents = (batch["position_ids"] == 0).cumsum(1)
    seen = (documents[:, :, None] == documents[:, None]) & torch.ones(
        documents.shape[1], documents.shape[1]
    ).tril().bool()
    return {**batch, "attention_mask": torch.where(seen, 0.0, -1e9)[:, None]}


def padded_end(batch: Batch, multiple: int) -> Batch:
    """A packed row filled up with padding of its own."""
    gap = -batch["input_ids"].shape[1] % multiple
    fill = {"input_ids": 0, "labels": IGNORE, "position_ids": 0}
    return {**batch, **{name: F.pad(batch[name], (0, gap), value=value) for name, value in fill.items()}}


def wide(batch: Batch, width: int) -> Batch:
    """A rectangle padded further on the right."""
    fill = {"input_ids": 0, "labels": IGNORE, "attention_mask": 0}
    gap = width - batch["input_ids"].shape[1]
    return {**batch, **{name: F.pad(batch[name], (0, gap), value=value) for name, value in fill.items()}}


@dataclass(frozen=True)
class Pair:
    """A model and a collator."""

    family: str
    collate: Callable[..., Batch | list[Batch]]
    fields: Mapping[str, object] | None = None
    rows: Rows = tuple(map(tuple, ROWS))
    masks: list[list[bool]] | None = None
    change: Callable[[nn.Module], nn.Module] = lambda model: model


def frozen(model: nn.Module) -> nn.Module:
    """Only the last block and the head learn."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1." in name or "lm_head" in name)
    return model


def halved(model: nn.Module) -> nn.Module:
    return model.bfloat16()


def halves(rows: Rows) -> list[Batch]:
    return [right(rows[:2]), right(rows[2:])] if len(rows) > 2 else [right(rows)]


def shuffled(rows: Rows) -> Batch:
    """Rows in random order."""
    return right([rows[at] for at in torch.randperm(len(rows)).tolist()])


def masked(rows: Rows, masks: Sequence[Sequence[bool]]) -> Batch:
    batch = right(rows)
    width = batch["labels"].shape[1]
    keep = torch.tensor([[*mask, *[False] * (width - len(mask))] for mask in masks])
    return {**batch, "labels": batch["labels"].masked_fill(~keep, IGNORE)}


def ended(rows: Rows) -> Rows:
    """Sequences with a common first and last token."""
    return [[1, *one, 2] for one in rows]


SHORT_ROWS = ((5,), (6, 7), (5, 6, 7, 8), (6, 7), (8,), (5, 6, 7))

TUNED_SOUND: dict[str, Pair] = {
    "padded right": Pair("llama", right),
    "padded far to the right": Pair("qwen2", lambda rows: wide(right(rows), 48)),
    "no mask": Pair("gemma2", lambda rows: without(right(rows), "attention_mask")),
    "a window": Pair("mistral", packed),
    "packed": Pair("qwen3", packed),
    "packed, filled up": Pair("olmo2", lambda rows: padded_end(packed(rows), 16)),
    "a 4-D mask": Pair("llama", lambda rows: block_mask(packed(rows))),
    "padded left, first token no target": Pair("phi3", left_first_masked),
    "padded left, with positions": Pair("gpt2", lambda rows: with_positions(left_first_masked(rows))),
    "two micro-batches": Pair("smollm3", halves),
    "random order": Pair("granite", shuffled),
    "masked prompts": Pair("gpt_neox", masked, masks=MASKS),
    "repeated and short sequences": Pair("opt", right, rows=SHORT_ROWS),
    "short sequences, packed": Pair("qwen2", packed, {"tie_word_embeddings": True}, rows=SHORT_ROWS),
    "common ends": Pair("gemma", packed, rows=tuple(ended(ROWS))),
    "experts with a router loss": Pair("mixtral", right, {"output_router_logits": True}),
    "experts": Pair("qwen3_moe", packed),
    "frozen weights": Pair("qwen2", packed, change=frozen),
    "weights in bf16": Pair("qwen3", right, change=halved),
    "a state-space model": Pair("mamba2", right),
    "linear attention": Pair("qwen3_5", right),
    "ALiBi": Pair("bloom", right),
    "scores of its own": Pair("gpt_oss", right),
}


def crossing(rows: Rows) -> Batch:
    batch = packed(rows)
    return {**batch, "labels": batch["input_ids"].clone()}


def one_crossing(rows: Rows) -> Batch:
    """One label crosses."""
    batch = packed(rows)
    labels, at = batch["labels"].clone(), len(rows[0])
    labels[0, at] = batch["input_ids"][0, at] if len(rows) > 1 else IGNORE
    return {**batch, "labels": labels}


def next_rows_labels(rows: Rows) -> Batch:
    """Labels of rows of the other order."""
    batch = right(sorted(rows, key=len))
    return {**batch, "labels": batch["labels"].flip(0)}


def repeated(rows: Rows) -> Batch:
    """One sequence twice."""
    return packed([*rows, rows[0]]) if len(rows) > 1 else packed(rows)


def going_on(rows: Rows) -> Batch:
    """Positions of the whole row."""
    return {**packed(rows), "position_ids": torch.arange(sum(map(len, rows)))[None]}


def all_ones(rows: Rows) -> Batch:
    batch = packed(rows)
    return {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}


def all_scored(rows: Rows) -> Batch:
    batch = right(rows)
    return {**batch, "labels": batch["input_ids"].clone()}


TUNED_FAULTS: dict[str, tuple[Pair, str]] = {
    "padded left": (Pair("llama", left), "wrong loss"),
    "padded left without positions": (Pair("gpt2", left_first_masked), "wrong loss"),
    "labels cross": (Pair("qwen3", crossing), "leaking"),
    "one label crosses": (Pair("qwen3", one_crossing), "leaking"),
    "positions go on": (Pair("llama", going_on), "leaking"),
    "a mask of ones": (Pair("mistral", all_ones), "leaking"),
    "a cache": (Pair("gemma2", lambda rows: without(packed(rows), "use_cache")), "leaking"),
    "a convolution": (Pair("lfm2", packed), "leaking"),
    "scores without positions": (Pair("gpt_oss", packed), "leaking"),
    "one sequence lost": (Pair("phi3", lambda rows: right(rows[1:] if len(rows) > 1 else rows)), "cut"),
    "cut at the end": (Pair("llama", lambda rows: right([one[:10] for one in rows])), "cut"),
    "cut at the start": (Pair("llama", lambda rows: right([one[-10:] for one in rows])), "cut"),
    "labels of other rows": (Pair("gpt_neox", next_rows_labels), "wrong loss"),
    "one sequence twice": (Pair("qwen2", repeated), "wrong loss"),
    "padding scored": (Pair("smollm3", all_scored), "wrong loss"),
    "prompts scored": (Pair("olmo2", lambda rows, masks: right(rows), masks=MASKS), "wrong loss"),
}
