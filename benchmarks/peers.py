"""Peers that `speed.py` compares with: the Hugging Face Trainer, TRL's packing, fixed blocks, torch's own encoder.

The Trainer's sides run its own step: its count of targets, `training_step`, clipping by accelerate, its optimizer.
Their batches are those that its samplers make, only in an order fit for measuring, and collating costs less here than
with its own collators. The models have our sizes, activation and dropout, and no bias in the head. `use_cache` is off:
with it packed documents see each other.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from itertools import count
from typing import Any

import numpy as np
import torch
from batches import STRATA, Batches
from measure import Work
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from tuning import Tuning, tune
from workloads import FEATURE_WIDTH, NO_LABEL, NUM_CLASSES, SEED, Workload

from unpad.models.decoder import Config

CPU = torch.device("cpu")
DEFAULT_BATCH = 8  # per_device_train_batch_size of TrainingArguments
Example = tuple[Tensor, Tensor]


class MissingPackageError(Exception):
    """A side needs a package that is not installed."""


def require(*packages: str) -> None:
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise MissingPackageError(f"needs {', '.join(missing)}: pip install 'unpad[bench]'")


# --------------------------------------------------------------------------- models of transformers


def language_model(workload: Workload) -> Any:
    """A Llama or a GPT-2 of our model's sizes, with random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    config = workload.config
    assert isinstance(config, Config)
    common: dict[str, Any] = {
        "vocab_size": workload.outputs,
        "tie_word_embeddings": config.tied,
        "use_cache": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    torch.manual_seed(SEED)
    positions = config.context + 1  # a piece is one token longer than its positions, and peers compute that one too
    if config.positions == "rotary":
        return LlamaForCausalLM(
            LlamaConfig(
                hidden_size=config.width,
                intermediate_size=config.hidden,
                num_hidden_layers=config.blocks,
                num_attention_heads=config.heads,
                num_key_value_heads=config.num_kv_heads,
                max_position_embeddings=positions,
                rms_norm_eps=config.eps,
                **common,
            )
        )
    return GPT2LMHeadModel(
        GPT2Config(
            n_embd=config.width,
            n_inner=config.hidden,
            n_layer=config.blocks,
            n_head=config.heads,
            n_positions=positions,
            activation_function=config.activation,
            layer_norm_epsilon=config.eps,
            resid_pdrop=config.dropout,
            embd_pdrop=config.embed_dropout,
            attn_pdrop=0.0,
            **common,
        )
    )


def training_fields(workload: Workload, folder: str, batch_size: int, bf16: bool) -> dict[str, Any]:
    """Fields of TrainingArguments that all sides share: our optimizer's settings, and nothing written or logged."""
    optim = workload.optim
    return {
        "output_dir": folder,
        "per_device_train_batch_size": batch_size,
        "bf16": bf16,
        "use_cpu": True,
        "learning_rate": optim.lr,
        "adam_beta1": optim.betas[0],
        "adam_beta2": optim.betas[1],
        "adam_epsilon": optim.eps,
        "weight_decay": optim.weight_decay,
        "max_grad_norm": optim.clip or 0.0,
        "lr_scheduler_type": "constant",
        "report_to": [],
        "disable_tqdm": True,
        "logging_strategy": "no",
        "save_strategy": "no",
        "dataloader_pin_memory": False,
        "remove_unused_columns": False,
    }


def check_precision(model: nn.Module, forward: Callable[[], object], bf16: bool) -> None:
    """Look whether the products inside a model really run in the precision that was asked for."""
    seen: set[torch.dtype] = set()
    layers = [m for m in model.modules() if type(m).__name__ in ("Linear", "Conv1D", "NonDynamicallyQuantizableLinear")]
    handles = [m.register_forward_hook(lambda _m, _x, y: seen.add(y.dtype)) for m in layers]
    forward()
    for handle in handles:
        handle.remove()
    wanted = torch.bfloat16 if bf16 else torch.float32
    if seen != {wanted}:
        raise RuntimeError(f"a side that should compute in {wanted} computes in {seen}")


# --------------------------------------------------------------------------- the Trainer


class TrainerSide:
    """The Hugging Face Trainer's step over prepared batches.

    Args:
        examples: ids and labels, each (tokens,) int64; the workload's own, or blocks.
        grouped: batches as of `train_sampling_strategy="group_by_length"`; else in random order.
    """

    def __init__(
        self,
        workload: Workload,
        *,
        batch_size: int = DEFAULT_BATCH,
        bf16: bool = False,
        grouped: bool = False,
        examples: list[Example] | None = None,
    ) -> None:
        require("transformers", "accelerate")
        from transformers import Trainer, TrainingArguments

        self.workload, self.bf16 = workload, bf16
        self.data = workload.examples() if examples is None else examples
        self.folder = tempfile.TemporaryDirectory()
        fields = training_fields(workload, self.folder.name, batch_size, bf16)
        strategy = "group_by_length" if grouped else "random"
        self.trainer = Trainer(
            model=language_model(workload), args=TrainingArguments(**fields, train_sampling_strategy=strategy)
        )
        self.set_batches(batch_size, grouped)
        self._begin()

    def _begin(self) -> None:
        """Prepare as `Trainer.train` does before its first step; autocast is put on the model here."""
        trainer = self.trainer
        self.optimizer = trainer.create_optimizer()
        trainer.current_gradient_accumulation_steps = 1
        self.model = trainer.accelerator.prepare_model(trainer.model)
        self.model.train()
        self.losses: list[float] = []  # of every step
        sample = {name: values[:1, :8] for name, values in self._collate([0]).items()}
        with torch.no_grad():
            check_precision(self.model, lambda: self.model(**sample), self.bf16)

    def set_batches(self, size: int, grouped: bool, strata: int = STRATA) -> None:
        self.batches = Batches([len(ids) for ids, _ in self.data], size, grouped, strata)
        self._stream = (self._collate(indices) for indices in self.batches)

    def _collate(self, indices: list[int]) -> dict[str, Tensor]:
        """(batch, longest) ids, labels and mask, padded on the right."""
        ids, labels = [self.data[i][0] for i in indices], [self.data[i][1] for i in indices]
        input_ids = pad_sequence(ids, batch_first=True)
        lengths = torch.tensor([len(row) for row in ids])
        mask = (torch.arange(input_ids.shape[1]) < lengths[:, None]).long()
        return {
            "input_ids": input_ids,
            "labels": pad_sequence(labels, batch_first=True, padding_value=NO_LABEL),
            "attention_mask": mask,
        }

    def _lengths(self, batch: dict[str, Tensor]) -> list[int]:
        """Tokens of every document of a batch."""
        return batch["attention_mask"].sum(1).tolist()

    def step(self) -> Work:
        """One update, as the loop of `Trainer.train` makes it."""
        trainer = self.trainer
        samples, items = trainer.get_batch_samples(self._stream, 1, CPU)
        lengths = [length - 1 for length in self._lengths(samples[0])]  # positions with a label, as ours are counted
        num_targets = int((samples[0]["labels"][:, 1:] != NO_LABEL).sum())
        loss = trainer.training_step(self.model, samples[0], items)
        trainer.accelerator.clip_grad_norm_(self.model.parameters(), trainer.args.max_grad_norm)
        self.optimizer.step()
        self.model.zero_grad()
        self.losses.append(float(loss))
        return Work(sum(lengths), self.workload.operations(lengths, num_targets))

    def set_lr(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Mean negative log-likelihood per held-out target, in nats."""
        data = sorted(self.workload.examples(self.workload.held_out), key=lambda example: len(example[0]))
        self.model.eval()
        total, targets, training = 0.0, 0, self.data
        self.data = data
        for start in range(0, len(data), 32):
            batch = self._collate(list(range(start, min(start + 32, len(data)))))
            labels = batch.pop("labels")[:, 1:]
            logits = self.model(**batch).logits[:, :-1].float()
            total += float(F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"))
            targets += int((labels != NO_LABEL).sum())
        self.data = training
        self.model.train()
        return total / targets


def step_batch(workload: Workload) -> int:
    """Sequences that hold our tokens per step, on average."""
    mean = float(workload.lengths[workload.training].mean())
    return max(round(workload.settings.tokens_per_step / mean), 1)


def blocks(workload: Workload) -> list[Example]:
    """All documents as one stream, cut into rows of the context: nothing keeps documents apart. The rest is dropped."""
    ids, labels = (torch.cat(parts) for parts in zip(*workload.examples(), strict=True))
    size = workload.context
    whole = len(ids) // size * size
    return list(zip(ids[:whole].split(size), labels[:whole].split(size), strict=True))


# --------------------------------------------------------------------------- TRL


class PackingSide(TrainerSide):
    """TRL's SFTTrainer with packing="bfd": whole documents, best fit first, kept apart by their positions."""

    def __init__(self, workload: Workload, *, bf16: bool) -> None:
        require("transformers", "trl", "datasets", "tokenizers")
        from datasets import Dataset
        from tokenizers import Tokenizer, models
        from transformers import PreTrainedTokenizerFast
        from trl import SFTConfig, SFTTrainer

        self.workload, self.bf16 = workload, bf16
        self.folder = tempfile.TemporaryDirectory()
        words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(workload.outputs)}, unk_token="t0"))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="t0", pad_token="t0", unk_token="t0")
        rows = max(workload.settings.tokens_per_step // workload.context, 1)
        fields = training_fields(workload, self.folder.name, rows, self.bf16)
        self.trainer = SFTTrainer(
            model=language_model(workload),
            args=SFTConfig(
                **fields,
                packing=True,
                packing_strategy="bfd",
                max_length=workload.context,
                activation_checkpointing=False,
            ),
            train_dataset=Dataset.from_dict({"input_ids": [ids.tolist() for ids, _ in workload.examples()]}),
            processing_class=tokenizer,
        )
        self.batches = Batches([1], 1, grouped=False)  # TRL makes the batches; rows of one length have no cycle
        self._stream = (batch for _ in count() for batch in self.trainer.get_train_dataloader())
        self._begin()

    def _collate(self, indices: list[int]) -> dict[str, Tensor]:
        return {"input_ids": torch.zeros(1, 8, dtype=torch.int64)}

    def _lengths(self, batch: dict[str, Tensor]) -> list[int]:
        starts = (batch["position_ids"][0] == 0).nonzero().flatten().tolist()
        lengths: list[int] = np.diff([*starts, batch["position_ids"].shape[1]]).tolist()
        return lengths


# --------------------------------------------------------------------------- torch's encoder


class EncoderSide:
    """W3 with torch.nn.TransformerEncoder over padded batches, in a plain loop."""

    def __init__(
        self, workload: Workload, *, batch_size: int = DEFAULT_BATCH, bf16: bool = False, grouped: bool = False
    ):
        self.workload, self.bf16 = workload, bf16
        self.data = [ids[:-1] for ids, _ in workload.examples()]
        config = workload.config
        torch.manual_seed(SEED)
        layer = nn.TransformerEncoderLayer(
            config.width,
            config.heads,
            config.hidden,
            config.dropout,
            config.activation,
            config.eps,
            batch_first=True,
            norm_first=True,
        )
        self.model = nn.ModuleDict(
            {
                "front": nn.Linear(FEATURE_WIDTH, config.width),
                "encoder": nn.TransformerEncoder(
                    layer, config.blocks, nn.LayerNorm(config.width), enable_nested_tensor=False
                ),
                "head": nn.Linear(config.width, NUM_CLASSES),
            }
        )
        optim = workload.optim
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), optim.lr, optim.betas, optim.eps, optim.weight_decay, fused=True
        )
        self.losses: list[float] = []  # of every step
        self.set_batches(batch_size, grouped)
        with torch.no_grad():
            check_precision(self.model, lambda: self._loss(self._collate([0])), bf16)

    def set_batches(self, size: int, grouped: bool, strata: int = STRATA) -> None:
        self.batches = Batches([len(ids) for ids in self.data], size, grouped, strata)

    def _collate(self, indices: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs (batch, longest, FEATURE_WIDTH), classes and mask (batch, longest), True = padding as torch wants."""
        assert self.workload.features is not None
        table, classes = self.workload.features
        ids = pad_sequence([self.data[i] for i in indices], batch_first=True)
        lengths = torch.tensor([len(self.data[i]) for i in indices])
        padding = torch.arange(ids.shape[1]) >= lengths[:, None]
        return table[ids], classes[ids].masked_fill(padding, NO_LABEL), padding

    def _loss(self, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        inputs, labels, padding = batch
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
            hidden = self.model["encoder"](self.model["front"](inputs), src_key_padding_mask=padding)
            logits = self.model["head"](hidden)
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=NO_LABEL)

    def step(self) -> Work:
        """One update."""
        indices = next(self.batches)
        loss = self._loss(self._collate(indices))
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.workload.optim.clip or float("inf"))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(float(loss.detach()))
        lengths = [len(self.data[i]) for i in indices]
        return Work(sum(lengths), self.workload.operations(lengths, sum(lengths)))


# --------------------------------------------------------------------------- all of them

Peer = TrainerSide | EncoderSide
DEFAULTS, BEST, EQUAL = "peer, defaults", "peer, best", "peer, our tokens per step"


class Peers:
    """The peers of a workload, each in the precision in which it is measured. The peer is the Trainer, or in W3 torch's
    encoder.

    Args:
        tuning: precision of all of them, and the effort of finding the best setting. With precision auto the defaults
            compute in fp32, as they do, and others in what multiplies faster.
    """

    def __init__(self, workload: Workload, tuning: Tuning) -> None:
        self.workload, self.tuning = workload, tuning
        self.tuned: dict[str, float | None] = {}  # tokens per second of what `best` tried

    def make(self, **fields: Any) -> Peer:
        """A peer with these fields of `TrainerSide` or `EncoderSide`."""
        return EncoderSide(self.workload, **fields) if self.workload.features else TrainerSide(self.workload, **fields)

    def defaults(self) -> Peer:
        return self.make(bf16=self.tuning.precision == "bf16")

    def best(self) -> Peer:
        """Batches of like lengths, and the precision and batch size that are fastest here."""
        side, self.tuned = tune(lambda bf16: self.make(bf16=bf16, grouped=True), self.tuning)
        return side

    def equal(self) -> Peer:
        """Batches of like lengths that hold our tokens per step."""
        return self.make(batch_size=step_batch(self.workload), bf16=self._faster(), grouped=True)

    def fixed_blocks(self) -> Peer:
        size = max(self.workload.settings.tokens_per_step // self.workload.context, 1)
        return self.make(batch_size=size, bf16=self._faster(), examples=blocks(self.workload))

    def packing(self) -> Peer:
        return PackingSide(self.workload, bf16=self._faster())

    def _faster(self) -> bool:
        return self.tuning.settings()[0]

    def sides(self) -> dict[str, Callable[[], Peer]]:
        """Makers by name."""
        sides: dict[str, Callable[[], Peer]] = {DEFAULTS: self.defaults, BEST: self.best, EQUAL: self.equal}
        if not self.workload.features:
            sides["fixed blocks, not isolated"] = self.fixed_blocks
        if self.workload.name in ("W1", "W2"):  # every token of theirs is a target, as TRL's packing of text takes it
            sides["TRL packing"] = self.packing
        return sides


def quiet() -> None:
    """Keep transformers from the network and from talking; before it is imported."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if find_spec("transformers") is not None:
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
    if find_spec("datasets") is not None:
        import datasets

        datasets.disable_progress_bars()
