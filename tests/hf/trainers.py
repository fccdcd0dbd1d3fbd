"""Trainers of small models and random sequences, and what they computed."""

import warnings
from pathlib import Path
from typing import Any

import datasets
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.hf.families import IGNORED, VOCAB, make_rows, make_sequences, targets_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import (
        DataCollatorForSeq2Seq,
        PreTrainedTokenizerFast,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )
    from trl import SFTConfig, SFTTrainer

from unpad.proof.foreign.model import base_of

datasets.disable_progress_bars()

ROWS = make_rows(make_sequences(16, seed=5, high=30))
HELD_OUT = make_rows(make_sequences(13, seed=6, low=2, high=40), seed=4)
DATA, EVALUATED = datasets.Dataset.from_list(ROWS), datasets.Dataset.from_list(HELD_OUT)
GIVEN = (  # to a trainer, and not to its arguments
    *("tokens_per_micro", "compute_loss_func", "data_collator", "train_dataset", "eval_dataset", "compute_metrics"),
    "preprocess_logits_for_metrics",
)
WHOLE = 100  # accumulated micro-batches: an epoch is one step


class Recorder(TrainerCallback):
    """Gradients of every step, added up, and what was logged."""

    def __init__(self) -> None:
        self.gradient: dict[str, Tensor] = {}
        self.num_steps = 0
        self.logs: list[dict[str, float]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        self.num_steps += 1
        inner = base_of(model)
        for name, parameter in inner.named_parameters():
            if parameter.grad is not None:
                self.gradient[name] = self.gradient.get(name, 0) + parameter.grad

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        self.logs.append(dict(logs))


class Stop(TrainerCallback):
    """Ends training behind an update; 0 goes on."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= state.global_step == self.step


class Backwards(Trainer):
    """An order of rows of one's own."""

    def _get_train_sampler(self, *args: Any) -> Any:
        return list(reversed(range(len(self.train_dataset))))


def weights_of(model: nn.Module) -> Tensor:
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


def trained(trainer: Trainer) -> Recorder:
    """What a training computed."""
    recorder = Recorder()
    trainer.add_callback(recorder)
    trainer.train()
    return recorder


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({f"t{index}": index for index in range(VOCAB)}, unk_token="t0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="t2", pad_token="t0", unk_token="t0")


def make_trainer(
    kind: str, model: nn.Module, folder: Path, base: type[Trainer] | None = None, **changes: Any
) -> Trainer:
    options: dict[str, Any] = {
        "output_dir": str(folder), "report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no",
        "logging_steps": 1, "max_grad_norm": 0.0, "learning_rate": 0.0, "optim": "sgd", "num_train_epochs": 1,
        "dataloader_pin_memory": False, "gradient_accumulation_steps": WHOLE, "logging_nan_inf_filter": False,
    }  # fmt: skip
    rest = {name: changes.pop(name) for name in GIVEN if name in changes}
    options |= changes
    given = {"model": model, "train_dataset": DATA, "eval_dataset": EVALUATED, "processing_class": tokenizer(), **rest}
    if kind == "plain":
        given.setdefault("data_collator", DataCollatorForSeq2Seq(tokenizer()))
    if kind == "sft":
        own = {"bf16": False, "max_length": None, "gradient_checkpointing": False}
        return (base or SFTTrainer)(args=SFTConfig(**{**own, **options}), **given)
    return (base or Trainer)(args=TrainingArguments(**options), **given)


@torch.no_grad()
def held_out_loss(model: nn.Module) -> float:
    """Mean over the targets of the evaluation set, one sequence at a time."""
    total = 0.0
    for row in HELD_OUT:
        logits = model(input_ids=torch.tensor([row["input_ids"]]), use_cache=False).logits[0, :-1]
        labels = torch.tensor(row["labels"][1:])
        total += float(F.cross_entropy(logits.double(), labels, ignore_index=IGNORED, reduction="sum"))
    return total / targets_of(HELD_OUT)
