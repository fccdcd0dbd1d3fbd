"""Trainers on two ranks: gradients of one sequence at a time, exact evaluation, resume equal to the bit."""

import os
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from transformers import TrainerCallback

from tests.helpers.ranks import run_processes
from tests.hf.families import distance, make_model, truth
from tests.hf.trainers import ROWS, WHOLE, Recorder, held_out_loss, make_trainer
from unpad.errors import UnlikeProcessesError, UnpadError
from unpad.hf import attach
from unpad.hf.loader import Examples, PlannedBatches, Ranks

pytestmark = pytest.mark.filterwarnings("default")  # trainers of other packages warn of their own affairs


def told(value: Any) -> list[Any]:
    """A value of every rank."""
    found: list[Any] = [None, None]
    torch.distributed.all_gather_object(found, value)
    return found


class Updates(Recorder):
    """Sequences and gradient of every update."""

    def __init__(self, trainer: Any) -> None:
        super().__init__()
        self.micros: list[int] = []
        self.own: list[dict[str, list[int]]] = []
        self.errors: list[float] = []
        self.sequences: list[dict[str, list[int]]] = []
        inner = trainer.training_step

        def noted(model: nn.Module, inputs: dict[str, Any], *args: Any) -> Tensor:
            for start, stop in pairwise(inputs["cu_seq_lens_q"].tolist()):
                self.own.append({name: inputs[name][0, start:stop].tolist() for name in ("input_ids", "labels")})
            self.micros[-1] += 1
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
    updates = Updates(trainer)
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
        "trained": sorted(trained) == sorted(row["input_ids"] for row in rows),
        "evaluation": max(abs(one / wanted - 1) for one in evaluated),
        "loss": [logs["loss"] for logs in updates.logs if "loss" in logs],
        "mode": attachment.head.mode,
    }


class Stop(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == 2


def resumed(folder: Path) -> bool:
    """Whether weights after a resume are those of a run that was not stopped, with clipping and dropout."""
    weights = []
    for out, callbacks, resume in (
        ("stopped", [Stop()], None),
        ("whole", [], None),
        ("stopped", [], str(folder / "stopped" / "checkpoint-2")),
    ):
        options = {"learning_rate": 1e-2, "optim": "adamw_torch", "max_grad_norm": 0.5, "max_steps": 5}
        options |= {"save_strategy": "steps", "save_steps": 1, "gradient_accumulation_steps": 2}
        model = make_model("llama", attention_dropout=0.1)
        trainer = make_trainer("plain", model, folder / out, **options)
        for callback in callbacks:
            trainer.add_callback(callback)
        attach(trainer, tokens_per_micro=32)
        trainer.train(resume_from_checkpoint=resume)
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    alike = told(weights[1].tolist())
    return (
        bool(torch.equal(weights[1], weights[2])) and alike[0] == alike[1] and not torch.equal(weights[0], weights[1])
    )


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
    fp64, fp32, two = torch.float64, torch.float32, {"gradient_accumulation_steps": 2}
    found: dict[str, Any] = {
        "plain": gradients("plain", "gpt2", folder, fp64, gradient_accumulation_steps=WHOLE),
        "accumulated": gradients("plain", "gpt2", folder, fp64, **two),
        "mixer": gradients("plain", "lfm2", folder, fp32, ddp_find_unused_parameters=None, **two),
        "sft": gradients("sft", "llama", folder, fp32, **two),
        "capped": gradients("sft", "gemma2", folder, fp32, gradient_accumulation_steps=3),
        # Three micro-batches of one sequence each: the second rank has none for the second place.
        "few": gradients("sft", "llama", folder, fp32, rows=ROWS[:3], tokens_per_micro=1),
    }
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
    assert len(first["plain"]["errors"]) == 1
    assert len(first["accumulated"]["errors"]) > 1
    assert sum(first["few"]["micros"]) == 2
    assert (first["sft"]["mode"], first["capped"]["mode"]) == ("chunks", "targets")
    assert first["resumed"]
    assert second["resumed"]
    assert first["unlike"] == second["unlike"]
    assert all(message.startswith(UnlikeProcessesError.__name__) for message in first["unlike"])
    assert all("no input_ids" in message for message in first["unread"])


@pytest.mark.parametrize(("size", "micros"), [(2, 1), (2, 3), (3, 2), (5, 4)])
def test_ranks_divide_every_update_into_equal_numbers_of_micro_batches(size, micros):
    examples = Examples(ROWS)
    samplers = [PlannedBatches(examples, 64, epochs=2, seed=0, ranks=Ranks(rank, size, micros)) for rank in range(size)]
    alone = PlannedBatches(examples, 64, epochs=2, seed=0, ranks=Ranks(0, 1))
    for epoch in range(2):
        batches = []
        for sampler in (*samplers, alone):
            sampler.set_epoch(epoch)
            batches.append(list(sampler))
            assert len(batches[-1]) == len(sampler)
        assert len({len(own) for own in batches[:-1]}) == 1
        everything = sorted(index for own in batches[:-1] for micro in own for index in micro if index >= 0)
        assert everything == sorted(index for micro in batches[-1] for index in micro if index >= 0)
        for start in range(0, len(batches[0]), micros):  # an update has the same sequences, whoever computes them
            costs = [
                sum(int(examples.lengths[micro].sum()) for micro in own[start : start + micros]) for own in batches
            ]
            assert max(costs[:-1]) - min(costs[:-1]) <= 64 * micros


def test_a_rank_without_work_computes_the_shortest_example_without_targets():
    examples = Examples(ROWS[:3])
    samplers = [PlannedBatches(examples, 1, epochs=1, seed=0, ranks=Ranks(rank, 4)) for rank in range(4)]
    (silent,) = [index for sampler in samplers for micro in sampler for index in micro if index < 0]
    row = examples[silent]
    assert len(row["input_ids"]) == examples.lengths.min()
    assert bool((row["labels"] == -100).all())
    assert np.array_equal(examples.targets, Examples(ROWS[:3]).targets)
