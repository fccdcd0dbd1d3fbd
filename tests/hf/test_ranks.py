"""Trainers on two ranks: gradients of one sequence at a time, exact evaluation, resume equal to the bit."""

import os
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard, SeedableRandomSampler
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import BatchSampler
from transformers import TrainerCallback

from tests.helpers.ranks import run_processes
from tests.hf.families import distance, make_model, truth
from tests.hf.trainers import ROWS, WHOLE, Recorder, Stop, held_out_loss, make_trainer, weights_of
from unpad.errors import UnlikeProcessesError, UnpadError
from unpad.hf import attach
from unpad.hf.loader import MICRO, MICROS, Examples, Updates, micros_of
from unpad.processes.group import Group

pytestmark = pytest.mark.filterwarnings("default")  # trainers of other packages warn of their own affairs


def told(value: Any) -> list[Any]:
    """A value of every rank."""
    found: list[Any] = [None, None]
    torch.distributed.all_gather_object(found, value)
    return found


class EachUpdate(Recorder):
    """Sequences and gradient of every update."""

    def __init__(self, trainer: Any) -> None:
        super().__init__()
        self.micros: list[int] = []
        self.num_syncs = -1
        self.own: list[dict[str, list[int]]] = []
        self.errors: list[float] = []
        self.sequences: list[dict[str, list[int]]] = []
        inner = trainer.training_step

        def counted(state, bucket):
            self.num_syncs += bucket.is_last()
            return allreduce_hook(state, bucket)

        def noted(model: nn.Module, inputs: dict[str, Any], *args: Any) -> Tensor:
            if self.num_syncs < 0:
                self.num_syncs = 0
                model.register_comm_hook(None, counted)
            for start, stop in pairwise(inputs.get("cu_seq_lens_q", torch.tensor([0])).tolist()):
                self.own.append({name: inputs[name][0, start:stop].tolist() for name in ("input_ids", "labels")})
            self.micros[-1] += len(inputs[MICROS])
            return inner(model, inputs, *args)

        trainer.training_step = noted
        trainer.add_callback(self)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.micros.append(0)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        got = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        rows = [row for rank in told(self.own) for row in rank]
        self.own = []
        self.sequences += rows
        _, wanted = truth(model, rows)
        self.errors.append(distance(got, wanted))
        for name, p in model.named_parameters():
            p.grad = got.get(name)


def gradients(kind: str, family: str, folder: Path, dtype: torch.dtype, **options: Any) -> dict[str, Any]:
    """Errors of the gradients of all updates, what was trained on, and the evaluation."""
    model = make_model(family).to(dtype)
    wanted = held_out_loss(model)
    rows = options.pop("rows", ROWS)
    tokens = options.pop("tokens_per_micro", 64)
    trainer = make_trainer(kind, model, folder, **{"ddp_find_unused_parameters": False, **options})
    trainer.train_dataset = rows
    attachment = attach(trainer, tokens_per_micro=tokens)
    updates = EachUpdate(trainer)
    if dtype == torch.float64:  # the loss of transformers rounds logits to fp32
        attachment.head.mode = "chunks"
    trainer.train()
    evaluated = []
    for attachment.tokens_per_eval in (40, 10_000):
        evaluated.append(trainer.evaluate()["eval_loss"])
    trained = [row["input_ids"] for row in updates.sequences if any(label >= 0 for label in row["labels"])]
    return {
        "errors": updates.errors,
        "micros": updates.micros,
        "syncs": updates.num_syncs,
        "trained": sorted(trained) == sorted(row["input_ids"] for row in rows if max(row["labels"]) >= 0),
        "evaluation": max(abs(one / wanted - 1) for one in evaluated),
        "loss": [logs["loss"] for logs in updates.logs if "loss" in logs],
        "mode": attachment.head.mode,
    }


def weights(kind: str, folder: Path, tokens: int | None, *callbacks: TrainerCallback, **options: Any) -> Tensor:
    """Weights after three epochs of 16 rows in batches of 3, which ranks share by repeating some; None: no `attach`."""
    resume, dropout = options.pop("resume", None), options.pop("dropout", 0.0)
    shared = {"learning_rate": 1e-1, "max_grad_norm": 0.5, "num_train_epochs": 3, "per_device_train_batch_size": 3}
    model = make_model("llama", attention_dropout=dropout)
    trainer = make_trainer(kind, model, folder, **{**shared, "gradient_accumulation_steps": 2, **options})
    for callback in callbacks:
        trainer.add_callback(callback)
    if tokens is not None:
        attach(trainer, tokens_per_micro=tokens)
    trainer.train(resume_from_checkpoint=resume)
    found = weights_of(model)
    assert len({str(each) for each in told(found.tolist())}) == 1
    return found


def as_alone(folder: Path) -> list[float]:
    """Distances of weights from those of the trainer's own batches on two ranks."""
    gaps = []
    for kind, tokens, options in (
        ("plain", 40, {}), ("sft", 4096, {"gradient_accumulation_steps": 1}),
        ("plain", 64, {"dataloader_drop_last": True}),
        ("plain", 40, {"accelerator_config": {"split_batches": True}, "per_device_train_batch_size": 4}),
    ):  # fmt: skip
        wanted, found = (weights(kind, folder, each, **options) for each in (None, tokens))
        gaps.append(float((wanted - found).norm() / wanted.norm()))
    return gaps


def resumed(folder: Path) -> bool:
    """Whether weights after a resume are those of a run that was not stopped, with clipping and dropout."""
    options = {"optim": "adamw_torch", "save_strategy": "steps", "save_steps": 1, "learning_rate": 1e-2, "dropout": 0.1}
    stopped = weights("plain", folder, 32, Stop(2), **options)
    whole = weights("plain", folder / "whole", 32, **options)
    again = weights("plain", folder, 32, resume=str(folder / "checkpoint-2"), **options)
    return bool(torch.equal(whole, again)) and not torch.equal(stopped, whole)


def refusal(folder: Path, rank: int, fault: str) -> list[str]:
    """Errors of all ranks, of which one has other data or a model that cannot be prepared; nothing has changed."""
    model = make_model("llama")
    trainer = make_trainer("plain", model, folder)
    trainer.train_dataset = ROWS[rank:] if fault == "data" else [{"text": "not tokenized"}] if rank else ROWS
    name = ""
    try:
        attach(trainer, tokens_per_micro=64)
    except UnpadError as error:
        name = f"{type(error).__name__}: {error.what}"
    assert not model._forward_pre_hooks
    assert not model.base_model._forward_hooks
    assert model.config._attn_implementation != "unpad"
    return told(name)


def work(folder: Path) -> dict[str, Any]:
    AcceleratorState._reset_state(reset_partial_state=True)  # that of the process this one was forked from
    rank = int(os.environ["RANK"])
    fp64, fp32 = torch.float64, torch.float32
    two = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
    silent = {"input_ids": [5, 6, 7], "labels": [-100] * 3}
    found: dict[str, Any] = {
        "plain": gradients("plain", "gpt2", folder, fp64, gradient_accumulation_steps=WHOLE),
        "accumulated": gradients("plain", "gpt2", folder, fp64, **two),
        "mixer": gradients("plain", "lfm2", folder, fp32, ddp_find_unused_parameters=None, **two),
        "sft": gradients("sft", "llama", folder, fp32, **two),
        "capped": gradients("sft", "gemma2", folder, fp32, gradient_accumulation_steps=3),
        # Three micro-batches of one sequence each: the second rank has none for the second place.
        "few": gradients("sft", "llama", folder, fp32, rows=[*ROWS[:3], silent], tokens_per_micro=1, **two),
    }
    found["as alone"] = as_alone(folder)
    found["resumed"] = resumed(folder / "resumed")
    found["unlike"] = refusal(folder, rank, "data")
    found["unread"] = refusal(folder, rank, "columns")
    torch.distributed.destroy_process_group()
    return found


@pytest.mark.promise("processes.hf")
@pytest.mark.nightly
def test_two_ranks_have_the_gradient_of_one_sequence_at_a_time(tmp_path):
    first, second = run_processes(tmp_path / "ranks", 2, partial(work, tmp_path), limit_s=200)
    for name, bound in {
        "plain": 1e-10, "accumulated": 1e-10, "mixer": 1e-5, "sft": 1e-5, "capped": 1e-5, "few": 1e-5,
    }.items():  # fmt: skip
        one = first[name]
        assert max(one["errors"]) < bound, name
        assert one["trained"], name
        assert one["evaluation"] < 1e-6, name
        assert one["micros"] == second[name]["micros"], name
        assert one["loss"] == second[name]["loss"], name
        assert one["syncs"] == len(one["micros"]), name
    assert len(first["plain"]["errors"]) == 1
    assert len(first["accumulated"]["errors"]) > 1
    assert sum(first["few"]["micros"]) == 2
    assert max(first["as alone"]) < 2e-6
    assert (first["sft"]["mode"], first["capped"]["mode"]) == ("chunks", "targets")
    assert first["resumed"]
    assert second["resumed"]
    assert first["unlike"] == second["unlike"]
    assert all(message.startswith(UnlikeProcessesError.__name__) for message in first["unlike"])
    assert all("no input_ids" in message for message in first["unread"])


class Alike(Group):
    """Processes that have the same to tell."""

    leads = True

    def exchange(self, value: Any) -> list[Any]:
        return [value] * self.size


@pytest.mark.parametrize(
    ("size", "accumulation", "drop_last"), [(1, 2, False), (2, 3, False), (3, 2, True), (5, 4, False)]
)
@pytest.mark.parametrize("tokens", [1, 40, 4096])
def test_ranks_divide_every_update_into_equal_numbers_of_micro_batches(size, accumulation, drop_last, tokens):
    examples = Examples([{"input_ids": [1, 2], "labels": [-100] * 2}, *ROWS * 2])
    shared = SeedableRandomSampler(range(len(examples)), data_seed=0)
    batches = BatchSampler(shared, 2, drop_last)
    shards = [batches] if size == 1 else [BatchSamplerShard(batches, size, rank) for rank in range(size)]
    for epoch in range(2):
        found = []
        for rank, own in enumerate(shards):
            updates = Updates(examples, own, tokens, accumulation=accumulation, group=Alike(rank, size))
            updates.sampler.set_epoch(epoch)
            found.append(list(updates))
            assert len(found[-1]) == len(updates) == len(own)
        own_rows = []
        for own in shards:
            shared.set_epoch(epoch)
            own_rows.append(list(own))
        for start in range(0, len(shards[0]), accumulation):
            span = slice(start, start + accumulation)
            items = [one[span] for one in found]
            assert not any(place for item in items for early in item[:-1] for place in early)
            given = sorted(index for item in items for index, _ in item[-1] if index >= 0)
            assert given == sorted(row for rows in own_rows for batch in rows[span] for row in batch if row)
            assert len({max(micro for _, micro in item[-1]) for item in items}) == 1
            for item in items:
                for micro in micros_of([{MICRO: micro, "index": index} for index, micro in item[-1]]):
                    assert len(micro) == 1 or sum(examples.lengths[one["index"]] for one in micro) <= tokens


def test_a_rank_without_work_computes_the_shortest_example_without_targets():
    examples = Examples(ROWS[:3])
    batches = BatchSampler(range(3), 1, False)
    shards = [BatchSamplerShard(batches, 4, rank, even_batches=True) for rank in range(4)]
    examples.targets[1] = 0
    updates = [Updates(examples, own, 1, accumulation=1, group=Alike(rank, 4)) for rank, own in enumerate(shards)]
    (silent,) = {index for one in updates for ((index, _),) in one if index < 0}
    row = examples[silent]
    assert len(row["input_ids"]) == examples.lengths[[0, 2]].min()
    assert bool((row["labels"] == -100).all())
