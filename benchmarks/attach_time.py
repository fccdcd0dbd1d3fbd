"""Seconds that `unpad.hf.attach` and `unpad.prove_trainer` take beyond a trainer's own first update.

    python benchmarks/attach_time.py

The model is a random Llama of two layers of 64, the data 64 rows of up to 200 tokens; the best of three, one thread.
"""

from __future__ import annotations

import os
import tempfile
import time
import warnings
from collections.abc import Callable

os.environ.update(HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="")

import torch
from datasets import Dataset
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from unpad import prove_trainer
from unpad.hf import attach

VOCAB, ROUNDS = 99, 3


def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Rows padded on the right."""
    ids = [torch.tensor(row["input_ids"]) for row in rows]
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(one) for one in ids], batch_first=True),
        "labels": pad_sequence(ids, batch_first=True, padding_value=-100),
    }


def make_trainer(folder: str) -> Trainer:
    """A trainer of one update of 8 micro-batches of 4 rows."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(20, 200, (64,), generator=generator).tolist()
    rows = [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in lengths]
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, max_position_embeddings=256, **sizes))
    args = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=8,
        max_steps=1,
        **{"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no"},
    )
    data = Dataset.from_dict({"input_ids": rows, "labels": rows})
    return Trainer(model, args, collate, data)


def seconds(work: Callable[[Trainer], object]) -> float:
    """Least of a few rounds, each of a trainer newly built."""
    found = []
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = make_trainer(folder)
            start = time.perf_counter()
            work(trainer)
            found.append(time.perf_counter() - start)
    return min(found)


def main() -> None:
    """Print a line for each."""
    torch.set_num_threads(1)
    print(f"the trainer's own first update  {seconds(lambda one: one.train()):5.2f} s")
    print(f"unpad.hf.attach                 {seconds(attach):5.2f} s")
    print(f"unpad.prove_trainer             {seconds(prove_trainer):5.2f} s")


if __name__ == "__main__":
    main()
