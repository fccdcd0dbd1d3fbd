"""The sides of gpu.py: the same Llama, trained by us and by the trainers of Transformers and TRL."""

from __future__ import annotations

import atexit
import importlib.util
import shutil
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from hf import word_tokenizer
from llama import as_llama
from torch import Tensor, nn

from unpad.api import batches
from unpad.batching.batch import RaggedBatch
from unpad.models.decoder import Config, Decoder
from unpad.nn.block import compile_blocks
from unpad.recipes.training import OptimSettings
from unpad.training.optim import make_optimizer
from unpad.training.step import train_step


@dataclass(frozen=True)
class Sizes:
    """Model and corpus.

    Args:
        model: a Llama; its dropout is of ours alone, and its context the longest sequence.
        mean, shortest: of the log-normal lengths, in tokens.
    """

    model: Config
    vocabulary: int = 32_000
    mean: int = 400
    shortest: int = 16
    sequences: int = 4000

    @cached_property
    def lengths(self) -> np.ndarray:
        """(sequences,) int64."""
        drawn = np.random.default_rng(0).lognormal(np.log(self.mean) - 0.5, 1.0, self.sequences)
        return np.clip(drawn.round().astype(np.int64), self.shortest, self.model.context)

    @cached_property
    def corpus(self) -> list[np.ndarray]:
        """Random tokens; 0 to 2 are kept for padding, begin and end."""
        draw = np.random.default_rng(1)
        return [draw.integers(3, self.vocabulary, length) for length in self.lengths]

    @cached_property
    def dataset(self) -> Any:
        """The corpus for a trainer."""
        from datasets import Dataset

        return Dataset.from_dict({"input_ids": [one.tolist() for one in self.corpus], "length": self.lengths})


# --------------------------------------------------------------------------- ours


class Ours:
    """Flat runs through `train_step`, with compiled blocks; attention is torch's variable-length flash kernel."""

    unit = 1.0

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        torch.manual_seed(0)
        self.sizes, self.device = sizes, device
        self.model = Decoder(sizes.model, sizes.vocabulary).to(device).train()
        self.optimizer = make_optimizer(self.model, OptimSettings())
        # On a processor, for `--check`, the blocks are only traced: to compile them would take longer than all else.
        compile_blocks(self.model, "inductor" if device.type == "cuda" else "eager")
        self._updates: Iterator[list[RaggedBatch]] = iter(())

    def feed(self, size: int, tokens_per_update: int) -> None:
        """Begin with the corpus anew, in passes of `size` tokens."""
        self._updates = self._feed(size, tokens_per_update)

    def _feed(self, size: int, tokens_per_update: int) -> Iterator[list[RaggedBatch]]:
        settings: dict[str, Any] = {"tokens_per_step": tokens_per_update, "tokens_per_micro": size}
        corpus: list[Any] = self.sizes.corpus
        for epoch in count():
            for micros in batches(corpus, epoch=epoch, strategy="pack", **settings):
                yield [batch.to(self.device) for batch in micros]

    def update(self) -> np.ndarray:
        """Run one optimizer update; returns the positions of its sequences, (num_seqs,): n - 1 of n tokens."""
        micros = next(self._updates)
        train_step(self.model, micros, self.optimizer, weights={"cross_entropy": 1.0}, precision="bf16", clip=1.0)
        return np.concatenate([batch.layout.lengths().cpu().numpy() for batch in micros])


# --------------------------------------------------------------------------- peers


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    softmax_scale: float | None = None, causal: bool = False,
) -> Any:  # fmt: skip
    """flash-attn's function of this name, by torch's kernel."""
    from torch.nn.attention.varlen import varlen_attn

    bounds = cu_seqlens_q, cu_seqlens_k, int(max_seqlen_q), int(max_seqlen_k)
    return varlen_attn(q, k, v, *bounds, scale=softmax_scale, window_size=(-1, 0 if causal else -1))


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """The same for a rectangle, (rows, row, heads, head_dim)."""
    rows, row = q.shape[:2]
    bounds = torch.arange(0, rows * row + 1, row, dtype=torch.int32, device=q.device)
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    return flash_attn_varlen_func(q, k, v, bounds, bounds, row, row, **options).unflatten(0, (rows, row))


# A package that Transformers takes for flash-attn, and imports these functions from.
PACKAGE = {
    "flash_attn/__init__.py": "from gpu_sides import flash_attn_func, flash_attn_varlen_func\n"
    "flash_attn_with_kvcache = None\n",
    "flash_attn/bert_padding.py": "from transformers.modeling_flash_attention_utils import _pad_input as pad_input\n"
    "from transformers.modeling_flash_attention_utils import _unpad_input as unpad_input\n",
    "flash_attn-2.8.3.dist-info/METADATA": "Metadata-Version: 2.1\nName: flash-attn\nVersion: 2.8.3\n",
    "flash_attn-2.8.3.dist-info/top_level.txt": "flash_attn\n",
}


@cache
def install_flash() -> None:
    """Write the package where flash-attn is absent, for as long as this process runs; call it before an import of
    Transformers, which looks for packages once."""
    if importlib.util.find_spec("flash_attn") is None:
        folder = Path(tempfile.mkdtemp())
        atexit.register(shutil.rmtree, folder)
        for name, text in PACKAGE.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
        sys.path.insert(0, str(folder))
    from transformers.utils import import_utils

    # A processor that stands in for a card has the kernel too; the answer is kept.
    import_utils.is_flash_attn_2_available.cache_clear()
    with mock.patch.object(import_utils, "is_torch_cuda_available", return_value=True):
        assert import_utils.is_flash_attn_2_available()


class Peer:
    """A Hugging Face trainer, driven update by update through its own loader and `training_step`.

    Args:
        trainer: a `transformers.Trainer` or one of its kind.
        unit: real tokens of what `feed` counts, sequences or rows, on average.
    """

    def __init__(self, trainer: Any, unit: float) -> None:
        self.trainer, self.unit, self.passes = trainer, unit, 1
        self._lengths: deque[list[int]] = deque()  # of batches that the loader has made and that are not used yet
        trainer.data_collator = self._recording(trainer.data_collator)
        trainer.create_optimizer()
        self.optimizer = trainer.optimizer
        # What `train` does before its loop: autocast and the device are installed here and nowhere else.
        self.model = trainer.accelerator.prepare_model(trainer.model).train()
        self._batches: Iterator[Any] = iter(())

    def _recording(self, collate: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(examples: Sequence[dict[str, Any]]) -> Any:
            packed = (example.get("seq_lengths") or [len(example["input_ids"])] for example in examples)
            self._lengths.append([int(length) for lengths in packed for length in lengths])
            return collate(examples)

        return recorded

    def feed(self, size: int, tokens_per_update: int) -> None:
        """Begin with the corpus anew, in passes of `size` sequences or rows, as many as make about such an update."""
        self.passes = max(round(tokens_per_update / (size * self.unit)), 1)
        self.trainer.current_gradient_accumulation_steps = self.passes
        self.trainer.args.per_device_train_batch_size = self.trainer._train_batch_size = size
        self._batches = self._feed()

    def _feed(self) -> Iterator[Any]:
        while True:
            self._lengths.clear()
            yield from self.trainer.get_train_dataloader()

    def update(self) -> np.ndarray:
        lengths: list[int] = []
        for _ in range(self.passes):
            inputs = next(self._batches)
            lengths += self._lengths.popleft()
            self.trainer.training_step(self.model, inputs)
        self.trainer.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.model.zero_grad()
        return np.array(lengths, np.int64) - 1


def llama(sizes: Sizes) -> Any:
    """Our model in Transformers, with flash attention, which `install_flash` provides."""
    torch.manual_seed(0)
    # With a cache, sequences of a flattened run would see each other.
    more = {"attn_implementation": "flash_attention_2", "use_cache": False}
    return as_llama(Decoder(sizes.model, sizes.vocabulary), max_position_embeddings=sizes.model.context, **more)


def _arguments(device: torch.device) -> dict[str, Any]:
    return {
        "output_dir": tempfile.mkdtemp(),
        "bf16": True,
        "use_cpu": device.type == "cpu",
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": device.type == "cuda",
        "optim": "adamw_torch_fused",
        "use_liger_kernel": importlib.util.find_spec("liger_kernel") is not None,
    }


def pad(examples: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pad to the batch's longest, as `DataCollatorForSeq2Seq` does, without a tokenizer."""
    tokens = [torch.tensor(example["input_ids"]) for example in examples]
    ids = nn.utils.rnn.pad_sequence(tokens, batch_first=True, padding_value=0)
    labels = nn.utils.rnn.pad_sequence(tokens, batch_first=True, padding_value=-100)
    return {"input_ids": ids, "labels": labels, "attention_mask": (labels != -100).long()}


def make_trainer(sizes: Sizes, device: torch.device, collate: Callable[..., Any], **options: Any) -> Any:
    """A `transformers.Trainer` of the model on the corpus."""
    install_flash()
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(**_arguments(device), remove_unused_columns=False, **options)
    return Trainer(model=llama(sizes), args=arguments, train_dataset=sizes.dataset, data_collator=collate)


def grouped(sizes: Sizes, device: torch.device) -> Peer:
    trainer = make_trainer(sizes, device, pad, train_sampling_strategy="group_by_length")
    return Peer(trainer, float(sizes.lengths.mean()))


def flattened(sizes: Sizes, device: torch.device) -> Peer:
    install_flash()
    from transformers import DataCollatorWithFlattening

    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True)

    def flat(examples: Sequence[dict[str, Any]]) -> Any:
        return collate([{"input_ids": example["input_ids"]} for example in examples])

    return Peer(make_trainer(sizes, device, flat), float(sizes.lengths.mean()))


def trl(sizes: Sizes, device: torch.device, packing: bool) -> Peer:
    install_flash()
    from trl import SFTConfig, SFTTrainer

    arguments = SFTConfig(
        **_arguments(device),
        packing=packing,
        packing_strategy="bfd",
        padding_free=True,
        max_length=sizes.model.context if packing else None,
        gradient_checkpointing=False,
    )
    corpus = sizes.dataset.select_columns(["input_ids"])
    tokenizer = word_tokenizer()  # the corpus is tokens already
    trainer = SFTTrainer(model=llama(sizes), args=arguments, train_dataset=corpus, processing_class=tokenizer)
    return Peer(trainer, sizes.model.context if packing else float(sizes.lengths.mean()))


# --------------------------------------------------------------------------- all sides

Side = Ours | Peer
SIDES: dict[str, Callable[[Sizes, torch.device], Side]] = {
    "ours": Ours,
    "flattened": flattened,
    "trl packing": lambda sizes, device: trl(sizes, device, packing=True),
    "trl padding_free": lambda sizes, device: trl(sizes, device, packing=False),
    "grouped": grouped,
}
