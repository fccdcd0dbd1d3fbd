"""Trainers of transformers and TRL on small random models."""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import datasets
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import DataCollatorWithFlattening, PreTrainedTokenizerFast, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

from tests.hf.families import CONTEXT, VOCAB, make_model, make_sequences

IGNORE = -100


def build(family: str, **changes: object) -> nn.Module:
    """A model of a family; `changes` are of its fields."""
    return make_model(family, **changes)


def sequences(num: int = 8, seed: int = 5, longest: int = 24) -> list[list[int]]:
    return make_sequences(num, seed, high=longest)


def tokenizer(side: str = "right") -> PreTrainedTokenizerFast:
    """Words t0 to t98; t0 is padding, t2 the end."""
    made = Tokenizer(models.WordLevel({f"t{index}": index for index in range(VOCAB)}, unk_token="t1"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="t2", pad_token="t0", unk_token="t1", padding_side=side
    )


def dataset(given: Sequence[Sequence[int]], *, prompts: bool = True) -> datasets.Dataset:
    """Rows of token ids whose first third is a prompt."""
    labels = [[IGNORE if prompts and 3 * at < len(one) else token for at, token in enumerate(one)] for one in given]
    return datasets.Dataset.from_dict({"input_ids": [list(one) for one in given], "labels": labels})


Collate = Callable[[Sequence[Mapping[str, list[int]]]], dict[str, Tensor]]


def pad(side: str = "right") -> Collate:
    """Pads with token 0, labels with -100, as DataCollatorForSeq2Seq does."""

    def collate(examples: Sequence[Mapping[str, list[int]]]) -> dict[str, Tensor]:
        width = max(len(one["input_ids"]) for one in examples)

        def rows(parts: Sequence[Sequence[int]], fill: int) -> Tensor:
            gaps = [[fill] * (width - len(part)) for part in parts]
            pairs = zip(parts, gaps, strict=True)
            return torch.tensor([[*part, *gap] if side == "right" else [*gap, *part] for part, gap in pairs])

        ids = [one["input_ids"] for one in examples]
        labels = [one.get("labels", one["input_ids"]) for one in examples]
        masks = [[1] * len(one) for one in ids]
        return {"input_ids": rows(ids, 0), "labels": rows(labels, IGNORE), "attention_mask": rows(masks, 0)}

    return collate


def flatten(examples: Sequence[Mapping[str, list[int]]]) -> dict[str, Tensor]:
    made: dict[str, Tensor] = DataCollatorWithFlattening()(list(examples))
    return made


COMMON: dict[str, object] = {
    "report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "optim": "adamw_torch",
    "dataloader_pin_memory": False, "num_train_epochs": 1, "seed": 0, "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2, "learning_rate": 1e-2, "logging_strategy": "no",
}  # fmt: skip


def trainer(model, folder, data=None, *, collator=None, kind=Trainer, **changes):
    """A Trainer with a collator."""
    args = TrainingArguments(output_dir=str(folder), **{**COMMON, **changes})
    rows = dataset(sequences()) if data is None else data
    return kind(
        model=model, args=args, train_dataset=rows, data_collator=collator or pad(), processing_class=tokenizer()
    )


def sft(model: nn.Module, folder: Path, data: datasets.Dataset | None = None, **changes: object) -> SFTTrainer:
    """An SFTTrainer of TRL in fp32."""
    fields = {**COMMON, "bf16": False, "max_length": CONTEXT, "gradient_checkpointing": False, **changes}
    args = SFTConfig(output_dir=str(folder), **fields)
    rows = dataset(sequences()) if data is None else data
    return SFTTrainer(model=model, args=args, train_dataset=rows, processing_class=tokenizer())


def quiet() -> None:
    """No progress bars and no advice in the output of tests."""
    datasets.disable_progress_bars()
    logging.disable(logging.WARNING)
