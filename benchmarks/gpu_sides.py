"""The sides of gpu.py: the same Llama, trained by us and by the trainers of Transformers and TRL."""

from __future__ import annotations

import importlib.util
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from unpad.api import batches
from unpad.batching.batch import RaggedBatch
from unpad.models.decoder import Config, Decoder
from unpad.nn.block import compile_blocks
from unpad.recipes.training import OptimSettings
from unpad.training.optim import make_optimizer
from unpad.training.step import train_step


@dataclass(frozen=True)
class Sizes:
    """Model, corpus and batches of a run.

    Args:
        mean, longest: of the log-normal lengths, in tokens; `sigma` is the spread of their logarithm.
        tokens_per_update: real tokens of an update, the same for every side as nearly as its batches allow.
        batch: sequences of a padded or flattened pass; the Trainer's default is 8.
        rate: learning rate.
    """

    width: int = 1024
    blocks: int = 24
    heads: int = 16
    hidden: int = 2816
    vocabulary: int = 32_000
    mean: int = 400
    sigma: float = 1.0
    shortest: int = 16
    longest: int = 4096
    sequences: int = 16_000
    tokens_per_update: int = 16_384
    batch: int = 8
    rate: float = 1e-4

    def lengths(self) -> np.ndarray:
        """(sequences,) int64."""
        drawn = np.random.default_rng(0).lognormal(np.log(self.mean) - self.sigma**2 / 2, self.sigma, self.sequences)
        return np.clip(drawn.round().astype(np.int64), self.shortest, self.longest)

    def corpus(self) -> list[np.ndarray]:
        """Random tokens; 0 to 2 are kept for padding, begin and end."""
        draw = np.random.default_rng(1)
        return [draw.integers(3, self.vocabulary, length) for length in self.lengths()]

    @property
    def passes(self) -> int:
        """Padded or flattened passes of an update."""
        return max(round(self.tokens_per_update / self.batch / float(self.lengths().mean())), 1)


class Side(Protocol):
    """One way to train the model.

    Args:
        loss: of the last update, the mean over its targets or over its passes.
    """

    model: Any
    optimizer: Any
    loss: float | torch.Tensor

    def update(self) -> np.ndarray:
        """Run one optimizer update; returns the positions of its sequences, (num_seqs,): n - 1 of n tokens."""
        ...


# --------------------------------------------------------------------------- ours


def ours_config(sizes: Sizes) -> Config:
    return Config(
        width=sizes.width,
        blocks=sizes.blocks,
        heads=sizes.heads,
        hidden=sizes.hidden,
        context=sizes.longest,
        activation="swiglu",
        norm="rmsnorm",
        positions="rotary",
        tied=True,
    )


class Ours:
    """Flat runs through `train_step`; on a GPU attention is torch's variable-length flash kernel."""

    def __init__(self, sizes: Sizes, device: torch.device, compiled: bool) -> None:
        torch.manual_seed(0)
        self.sizes, self.device = sizes, device
        self.model = Decoder(ours_config(sizes), sizes.vocabulary).to(device).train()
        self.optimizer = make_optimizer(self.model, OptimSettings(lr=sizes.rate))
        if compiled:
            # On a processor, for `--toy`, the blocks are only traced: to compile them would take longer than all else.
            compile_blocks(self.model, "inductor" if device.type == "cuda" else "eager")
        self.loss: float | torch.Tensor = float("nan")
        self._updates = self._feed()

    def _feed(self) -> Iterator[list[RaggedBatch]]:
        corpus = self.sizes.corpus()
        counted = [np.ones(len(sequence), np.bool_) for sequence in corpus]
        settings = dict.fromkeys(("tokens_per_step", "tokens_per_micro"), self.sizes.tokens_per_update)
        for epoch in count():
            for micros in batches(corpus, counted, epoch=epoch, strategy="pack", **settings):  # type: ignore[arg-type]
                yield [batch.to(self.device) for batch in micros]

    def update(self) -> np.ndarray:
        micros = next(self._updates)
        result = train_step(self.model, micros, self.optimizer, weights=WEIGHTS, precision="bf16", clip=1.0)
        self.loss = result.terms["nll"]
        return np.concatenate([batch.layout.lengths().cpu().numpy() for batch in micros])


# --------------------------------------------------------------------------- peers


class Peer:
    """A Hugging Face trainer, driven update by update through its own loader and `training_step`.

    Args:
        trainer: a `transformers.Trainer` or one of its kind.
        passes: forward and backward passes of an update.
    """

    def __init__(self, trainer: Any, passes: int) -> None:
        self.trainer, self.passes = trainer, passes
        self._lengths: deque[list[int]] = deque()  # of batches that the loader has made and that are not used yet
        trainer.data_collator = self._recording(trainer.data_collator)
        trainer.create_optimizer()
        self.optimizer = trainer.optimizer
        # What `train` does before its loop: autocast and the device are installed here and nowhere else.
        self.model = trainer.accelerator.prepare_model(trainer.model).train()
        trainer.current_gradient_accumulation_steps = passes
        self.loss: float | torch.Tensor = float("nan")
        self._batches = self._feed()

    def _recording(self, collate: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(examples: Sequence[dict[str, Any]]) -> Any:
            packed = (example.get("seq_lengths") or [len(example["input_ids"])] for example in examples)
            self._lengths.append([int(length) for lengths in packed for length in lengths])
            return collate(examples)

        return recorded

    def _feed(self) -> Iterator[Any]:
        while True:
            yield from self.trainer.get_train_dataloader()

    def update(self) -> np.ndarray:
        lengths: list[int] = []
        self.loss = 0.0
        for _ in range(self.passes):
            inputs = next(self._batches)
            lengths += self._lengths.popleft()
            self.loss = self.loss + self.trainer.training_step(self.model, inputs)
        self.trainer.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.model.zero_grad()
        return np.array(lengths, np.int64) - 1


def llama(sizes: Sizes) -> Any:
    """The same model in Transformers, with the fastest attention that is installed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.width,
        intermediate_size=sizes.hidden,
        num_hidden_layers=sizes.blocks,
        num_attention_heads=sizes.heads,
        max_position_embeddings=sizes.longest,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        attn_implementation=attention_name(),
        use_cache=False,  # with a cache, sequences of a flattened run would see each other
    )
    return LlamaForCausalLM(config)


def attention_name() -> str:
    has_flash = torch.cuda.is_available() and importlib.util.find_spec("flash_attn") is not None
    return "flash_attention_2" if has_flash else "sdpa"


def _arguments(sizes: Sizes, device: torch.device, batch: int) -> dict[str, Any]:
    return {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": batch,
        "bf16": True,
        "learning_rate": sizes.rate,
        "use_cpu": device.type == "cpu",
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": device.type == "cuda",
        "optim": "adamw_torch_fused",
    }


def _trainer(sizes: Sizes, device: torch.device, collate: Callable[..., Any], **options: Any) -> Peer:
    from datasets import Dataset
    from transformers import Trainer, TrainingArguments

    corpus = [sequence.tolist() for sequence in sizes.corpus()]
    columns = {"input_ids": corpus, "labels": corpus, "length": [len(sequence) for sequence in corpus]}
    arguments = TrainingArguments(**_arguments(sizes, device, sizes.batch), remove_unused_columns=False, **options)
    trainer = Trainer(
        model=llama(sizes), args=arguments, train_dataset=Dataset.from_dict(columns), data_collator=collate
    )
    return Peer(trainer, sizes.passes)


def _pad(examples: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pad to the batch's longest, as `DataCollatorForSeq2Seq` does, without a tokenizer."""
    tokens = [torch.tensor(example["input_ids"]) for example in examples]
    ids = nn.utils.rnn.pad_sequence(tokens, batch_first=True, padding_value=0)
    labels = nn.utils.rnn.pad_sequence(tokens, batch_first=True, padding_value=-100)
    return {"input_ids": ids, "labels": labels, "attention_mask": (labels != -100).long()}


def padded(sizes: Sizes, device: torch.device) -> Peer:
    return _trainer(sizes, device, _pad)


def grouped(sizes: Sizes, device: torch.device) -> Peer:
    return _trainer(sizes, device, _pad, train_sampling_strategy="group_by_length")


def flattened(sizes: Sizes, device: torch.device) -> Peer:
    from transformers import DataCollatorWithFlattening

    flash = attention_name() != "sdpa"
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=flash)

    def flat(examples: Sequence[dict[str, Any]]) -> Any:
        return collate([{"input_ids": example["input_ids"], "labels": example["labels"]} for example in examples])

    return _trainer(sizes, device, flat)


def trl_packing(sizes: Sizes, device: torch.device) -> Peer:
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = {f"t{i}": i for i in range(sizes.vocabulary)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="t0")), eos_token="t2", pad_token="t0"
    )
    arguments = SFTConfig(
        **_arguments(sizes, device, 1),
        packing=True,
        packing_strategy="bfd",
        max_length=sizes.longest,
        gradient_checkpointing=False,
    )
    corpus = Dataset.from_dict({"input_ids": [sequence.tolist() for sequence in sizes.corpus()]})
    trainer = SFTTrainer(model=llama(sizes), args=arguments, train_dataset=corpus, processing_class=tokenizer)
    return Peer(trainer, max(round(sizes.tokens_per_update / sizes.longest), 1))


# --------------------------------------------------------------------------- all sides

Make = Callable[[Sizes, torch.device], Side]
WEIGHTS = {"cross_entropy": 1.0}
SIDES: dict[str, tuple[str, Make]] = {
    "ours": ("ours, flat runs", lambda sizes, device: Ours(sizes, device, compiled=False)),
    "compiled": ("ours, blocks compiled", lambda sizes, device: Ours(sizes, device, compiled=True)),
    "padded": ("Transformers, padded", padded),
    "grouped": ("Transformers, padded, grouped by length", grouped),
    "flattened": ("Transformers, flattened", flattened),
    "trl": ("TRL, packed rows", trl_packing),
}
PACKAGES = {
    "padded": ("transformers", "datasets"),
    "grouped": ("transformers", "datasets"),
    "flattened": ("transformers", "datasets"),
    "trl": ("trl",),
}


def missing_packages(side: str) -> list[str]:
    return [name for name in PACKAGES.get(side, ()) if importlib.util.find_spec(name) is None]
