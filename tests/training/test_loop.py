"""Whole runs: stages, early stopping, freezing, guards, strategies, timing, and the same bytes twice."""

import json
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.toy import LOOP, SMALL_MODEL, events, rows, run, same_tensors, scripted_heldout, weights, write_toy
from unpad.batching.batch import RaggedBatch
from unpad.errors import NonFiniteError, OutOfMemoryError, RecipeError
from unpad.models.decoder import Decoder
from unpad.nn.block import Block, BlockConfig
from unpad.nn.native import library
from unpad.nn.precision import DTYPES
from unpad.run import checkpoint
from unpad.run.monitor import Monitor
from unpad.training import updates
from unpad.training.context import Deadline
from unpad.training.step import StepResult


@pytest.fixture
def snapshots(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Weights before each step, learning rate and size of the optimizer's state, and sizes of its micro-batches."""
    taken: list[dict[str, Any]] = []
    step = LOOP.train_step

    def watched(model: Decoder, micros: list[RaggedBatch], optimizer: torch.optim.AdamW, **options: Any) -> StepResult:
        copies = {name: value.clone() for name, value in model.state_dict().items()}
        sizes = [batch.total_tokens for batch in micros]
        taken.append({"weights": copies, "num_states": len(optimizer.state), "sizes": sizes})
        return step(model, micros, optimizer, **options)

    monkeypatch.setattr(LOOP, "train_step", watched)
    return taken


# --------------------------------------------------------------------------- course of a run


@pytest.mark.promise("train.stages")
def test_the_second_stage_starts_from_the_best_weights_of_the_first(tmp_path, monkeypatch, snapshots):
    monkeypatch.setattr(LOOP, "held_out", scripted_heldout([3.0, 5.0, 2.0, 1.0, 4.0]))
    result = run(write_toy(tmp_path), tmp_path / "run")
    train_rows = rows(tmp_path / "run", "train")
    assert [(row["step"], row["stage"]) for row in train_rows] == [
        (step, "pretrain" if step <= 12 else "tune") for step in range(1, 25)
    ]
    best_first = weights(tmp_path / "run", "best-pretrain")
    assert checkpoint.load(tmp_path / "run/checkpoints/best-pretrain").step == 6
    assert same_tensors(snapshots[6]["weights"], best_first)
    assert same_tensors(snapshots[12]["weights"], best_first)
    assert not same_tensors(snapshots[11]["weights"], best_first)
    assert [shot["num_states"] > 0 for shot in snapshots[:2] + snapshots[12:14]] == [False, True, False, True]
    assert train_rows[12]["lr"] == pytest.approx(0.005)  # lr_scale 0.5, its own schedule
    assert checkpoint.load(tmp_path / "run/checkpoints/best").step == 20
    assert (result.heldout_loss, result.epochs, result.step) == (1.0, 3, 24)


@pytest.mark.promise("train.stages")
def test_a_stage_of_no_epochs_is_skipped_by_name(tmp_path):
    recipe = write_toy(tmp_path)
    run(recipe, tmp_path / "first", "stages.tune.train.max_epochs=0")
    assert {row["stage"] for row in rows(tmp_path / "first")} == {"pretrain"}
    assert same_tensors(weights(tmp_path / "first"), weights(tmp_path / "first", "best-pretrain"))
    run(recipe, tmp_path / "second", "stages.pretrain.train.max_epochs=0")
    assert {row["stage"] for row in rows(tmp_path / "second")} == {"tune"}
    assert not (tmp_path / "second/checkpoints/best-pretrain").exists()
    [skipped] = events(tmp_path / "second", "stage_skipped")
    assert skipped["message"] == "pretrain: max_epochs is 0"


@pytest.mark.promise("train.patience")
def test_patience_counts_checks_and_the_best_weights_come_back(tmp_path, monkeypatch, snapshots):
    monkeypatch.setattr(LOOP, "held_out", scripted_heldout([5.0, 4.95, 4.8, 4.75, 4.79]))
    settings = {"max_epochs": 50, "eval_every": 1, "patience": 2, "min_delta": 0.1}
    result = run(write_toy(tmp_path, stages=[], train=settings), tmp_path / "run")
    assert (result.step, result.epochs, result.heldout_loss) == (5, 1, 4.8)
    assert [row["best"] for row in rows(tmp_path / "run", "eval")] == [True, False, True, False, False]
    assert same_tensors(weights(tmp_path / "run"), snapshots[3]["weights"])
    [stop] = events(tmp_path / "run", "early_stop")
    assert "best by more than 0.1: 4.8000 at step 3, stopped at step 5, after epoch 0 of 50" in stop["message"]


def test_minutes_end_a_run_as_steps_do_and_a_resume_goes_on_to_the_same_weights(tmp_path, monkeypatch):
    recipe = write_toy(tmp_path, train={"max_epochs": 1, "max_steps": 8, "weights": "last"})
    whole = run(recipe, tmp_path / "whole")
    asked = iter([False, False, True, *[False] * 20])
    with monkeypatch.context() as patch:
        patch.setattr(Deadline, "due", lambda deadline: deadline.minutes is not None and next(asked))
        result = run(recipe, tmp_path / "run", "train.max_minutes=60")
    assert (result.step, whole.step) == (3, 8)
    [limit] = events(tmp_path / "run", "time_limit")
    assert limit["message"].startswith("pretrain: train.max_minutes=60 are over at step 3 of ")
    assert "unpad train --resume" in limit["message"]
    [skipped] = events(tmp_path / "run", "stage_skipped")
    assert skipped["message"] == "tune: the minutes of train.max_minutes=60 are over"
    assert run(recipe, tmp_path / "run", "train.max_minutes=null", resume=True).step == 8
    assert rows(tmp_path / "run", "step") == rows(tmp_path / "whole", "step")
    assert same_tensors(weights(tmp_path / "run"), weights(tmp_path / "whole"))


@pytest.mark.promise("train.frozen")
def test_frozen_parameters_stay_and_have_no_optimizer_state(tmp_path):
    recipe = write_toy(tmp_path, stages=[], train={"max_epochs": 1})
    run(recipe, tmp_path / "free")
    run(recipe, tmp_path / "run", "train.freeze=[embed.*, blocks.0.attention.*]", "train.max_steps=4")
    run(recipe, tmp_path / "start", "train.max_steps=0")
    start, end, free = (weights(tmp_path / name) for name in ("start", "run", "free"))
    frozen = {name for name in end if name.startswith(("embed.", "blocks.0.attention."))}
    assert 1 < len(frozen) < len(end)
    assert {name for name in end if torch.equal(start[name], end[name])} == frozen
    assert not any(torch.equal(start[name], free[name]) for name in free)
    state, _ = checkpoint.load_newest(tmp_path / "run/checkpoints")
    with_state = {name.removeprefix("optim.").rpartition(".")[0] for name in state.tensors if name.startswith("optim.")}
    assert with_state == end.keys() - frozen
    assert events(tmp_path / "run", "stage")[0]["frozen"] == sum(start[name].numel() for name in frozen)
    with pytest.raises(RecipeError, match='"nothing" matches no parameter'):
        run(recipe, tmp_path / "wrong", "train.freeze=[nothing]")


@pytest.mark.promise("train.smoothing")
def test_label_smoothing_trains_and_the_reported_loss_is_plain(tmp_path):
    recipe = write_toy(tmp_path, model={**SMALL_MODEL, "dropout": 0.0}, train={"max_steps": 3, "max_epochs": 1})
    run(recipe, tmp_path / "plain")
    run(recipe, tmp_path / "smooth", "train.label_smoothing=0.2")
    plain, smooth = rows(tmp_path / "plain", "train"), rows(tmp_path / "smooth", "train")
    assert smooth[0]["loss"] == plain[0]["loss"] == smooth[0]["values"]["nll"]
    assert smooth[0]["values"]["cross_entropy"] != smooth[0]["loss"]
    assert plain[0]["values"]["cross_entropy"] == plain[0]["loss"]
    assert smooth[2]["loss"] != plain[2]["loss"]


def test_a_rate_that_changes_by_epoch_is_constant_within_epochs_of_any_length(tmp_path):
    recipe = write_toy(
        tmp_path, stages=[], plan={"tokens_per_step": 100}, optim={"per": "epoch"}, train={"max_epochs": 3},
        data={"chat": None},
    )  # fmt: skip
    run(recipe, tmp_path / "run")
    train_rows = rows(tmp_path / "run", "train")
    epochs = [[row["lr"] for row in train_rows if row["epoch"] == epoch] for epoch in (1, 2, 3)]
    assert [len(set(rates)) for rates in epochs] == [1, 1, 1]
    assert len({len(rates) for rates in epochs}) == 2
    assert epochs[0][0] == pytest.approx(0.01)
    assert epochs[2][0] == pytest.approx(0.0001)


# --------------------------------------------------------------------------- guards


def spoiled(call: int, fault: Callable[[torch.Tensor], torch.Tensor], calls: int = 1) -> Callable[..., Any]:
    """`Decoder.losses` with `fault` applied to the trained term from the given call on."""
    losses, count = Decoder.losses, iter(range(10**6))

    def spoil(self: Decoder, batch: RaggedBatch) -> Any:
        terms = losses(self, batch)
        if call <= next(count) < call + calls:
            total, num = terms["cross_entropy"]
            terms["cross_entropy"] = fault(total), num
        return terms

    return spoil


FAULTS = {
    "loss": lambda total: total * float("nan"),
    "gradient": lambda total: total + (total - total.detach()).sqrt(),  # its value is fine, its slope infinite
}


@pytest.mark.promise("train.refusals")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_step_that_is_not_finite_stops_by_name_and_the_step_before_is_saved(tmp_path, monkeypatch, fault):
    recipe = write_toy(tmp_path, plan={"tokens_per_micro": 4096}, checkpoint={"every": 100})  # one micro-batch a step
    run(recipe, tmp_path / "calm")
    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "losses", spoiled(4, FAULTS[fault]))
        with pytest.raises(NonFiniteError, match="at step 5") as caught:
            run(recipe, tmp_path / "run")
    assert caught.value.exit_code == 7
    assert "texts.jsonl:" in caught.value.where
    state, warnings = checkpoint.load_newest(tmp_path / "run/checkpoints")
    assert (state.step, warnings) == (4, [])
    run(recipe, tmp_path / "run", resume=True)
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == (tmp_path / "calm/metrics.jsonl").read_bytes()


@pytest.mark.promise("train.clipping")
def test_skipping_leaves_the_weights_alone_and_is_counted(tmp_path, monkeypatch, snapshots):
    recipe = write_toy(tmp_path, plan={"tokens_per_micro": 4096}, train={"on_nonfinite": "skip", "max_skips": 3})
    monkeypatch.setattr(Decoder, "losses", spoiled(4, FAULTS["loss"], calls=2))
    run(recipe, tmp_path / "run", "train.max_steps=8")
    assert [row["step"] for row in rows(tmp_path / "run", "train") if row["skipped"]] == [5, 6]
    assert rows(tmp_path / "run", "train")[4]["loss"] > 0  # the plain loss of that step was fine
    assert same_tensors(snapshots[4]["weights"], snapshots[6]["weights"])
    assert not same_tensors(snapshots[6]["weights"], snapshots[7]["weights"])
    assert [event["step"] for event in events(tmp_path / "run", "skipped_step")] == [5, 6]
    assert "2 skipped so far" in events(tmp_path / "run", "skipped_step")[1]["message"]
    monkeypatch.setattr(Decoder, "losses", spoiled(0, FAULTS["loss"], calls=10))
    with pytest.raises(NonFiniteError, match="at step 4"):
        run(recipe, tmp_path / "worse")


def test_an_overflow_of_fp16_is_no_fault_halves_the_scale_and_is_not_counted(tmp_path, monkeypatch, snapshots):
    recipe = write_toy(tmp_path, plan={"tokens_per_micro": 4096}, precision="fp16", checkpoint={"every": 100})
    monkeypatch.setattr(Decoder, "losses", spoiled(2, FAULTS["loss"]))
    run(recipe, tmp_path / "run", "train.max_steps=5")  # train.on_nonfinite is stop
    assert [row["step"] for row in rows(tmp_path / "run", "train") if row["skipped"]] == [3]
    [event] = events(tmp_path / "run", "skipped_step")
    assert (event["step"], event["message"]) == (3, "fp16 overflow; loss scale now 32768")
    assert same_tensors(snapshots[2]["weights"], snapshots[3]["weights"])
    state, _ = checkpoint.load_newest(tmp_path / "run/checkpoints")
    saved = state.values["progress"]
    assert (saved["num_skipped"], saved["scaler"]["scale"], saved["scaler"]["good_steps"]) == (0, 2.0**15, 2)


@pytest.mark.promise("memory.sequence")
def test_a_sequence_without_memory_is_named_with_its_place_and_the_setting(tmp_path, monkeypatch):
    def forward(self: Decoder, batch: RaggedBatch, *arguments: object, **named: object) -> torch.Tensor:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: tried")

    recipe = write_toy(tmp_path)
    monkeypatch.setattr(Decoder, "forward", forward)
    with pytest.raises(OutOfMemoryError) as caught:
        run(recipe, tmp_path / "run")
    assert caught.value.exit_code == 8
    assert re.match(r"a sequence of \d+ tokens does not fit by itself", caught.value.what)
    assert re.match(r".*texts\.jsonl:\d+; step 1; peak memory", caught.value.where)
    assert "plan.max_tokens" in caught.value.fix
    monkeypatch.undo()


# --------------------------------------------------------------------------- batching, precision, time


@pytest.mark.nightly
@pytest.mark.promise("train.precisions")
def test_bf16_follows_fp32(tmp_path):
    recipe = write_toy(tmp_path, stages=[], train={"max_epochs": 2})
    losses = {
        precision: run(recipe, tmp_path / precision, f"precision={precision}").heldout_loss
        for precision in ("fp32", "bf16")
    }
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.01)
    assert losses["bf16"] != losses["fp32"]
    assert all(value.dtype == torch.float32 for value in weights(tmp_path / "bf16").values())


@pytest.mark.promise("memory.low-power")
def test_the_low_power_profile_bounds_threads_precision_and_micro_batches(tmp_path, snapshots):
    recipe = write_toy(tmp_path, plan={"tokens_per_step": 5000, "tokens_per_micro": 5000}, precision="auto")
    low = run(recipe, tmp_path / "low", "profile=low_power", "plan.tokens_per_micro=auto")
    assert max(max(shot["sizes"]) for shot in snapshots) <= 512
    [environment] = events(tmp_path / "low", "environment")
    assert (environment["threads"], environment["precision"]) == (1, "fp32")
    full = run(recipe, tmp_path / "full", "precision=fp32")
    assert max(max(shot["sizes"]) for shot in snapshots) > 512
    assert low.heldout_loss == pytest.approx(full.heldout_loss, rel=1e-4)
    for field in ("precision=bf16", "train.threads=2", "plan.strategy=fixed", "plan.strategy=bucket"):
        with pytest.raises(RecipeError, match=f"low_power .* not {field}"):
            run(recipe, tmp_path / "refused", "profile=low_power", field)
    for strategy in ("pack", "budget", "rows"):
        run(recipe, tmp_path / strategy, "profile=low_power", f"plan.strategy={strategy}", "train.max_steps=2")
        assert max(max(shot["sizes"]) for shot in snapshots[-2:]) <= 512


@pytest.mark.promise("run.timers")
def test_the_timed_parts_add_up_to_the_whole_run(tmp_path, monkeypatch):
    """By a clock that goes on where work is done: each part has its own, and nothing is left over."""
    clock = [100.0]

    def costs(owner: Any, name: str, seconds: float) -> None:
        right = getattr(owner, name)

        def slow(*args: Any, **options: Any) -> Any:
            clock[0] += seconds
            return right(*args, **options)

        monkeypatch.setattr(owner, name, slow)

    for place in ("unpad.run.timers.perf_counter", "time.perf_counter"):
        monkeypatch.setattr(place, lambda: clock[0])
    costs(LOOP, "train_step", 4.0)
    costs(LOOP, "held_out", 16.0)
    costs(Monitor, "step", 1.0)
    loads = updates.load_steps

    def slowly(*args: Any, **options: Any) -> Iterator[Any]:
        for step in loads(*args, **options):
            clock[0] += 2.0
            yield step

    monkeypatch.setattr(updates, "load_steps", slowly)
    result = run(write_toy(tmp_path), tmp_path / "run", "stages.pretrain.train.max_epochs=8")
    parts = {part["name"]: part["seconds"] for part in result.timings}
    num_evaluations = len(rows(tmp_path / "run", "eval"))
    wanted = {"train": 4.0 * result.step, "wait": 2.0 * result.step, "log": result.step, "other": 0.0}
    assert {name: parts[name] for name in wanted} == wanted
    assert parts["evaluate"] == 16.0 * num_evaluations > 0
    assert parts.keys() >= {"read", "save"}
    assert sum(parts.values()) == clock[0] - 100
    assert sum(part["share"] for part in result.timings) == pytest.approx(1)
    [written] = events(tmp_path / "run", "timers")
    assert written["rows"] == result.timings
    timing = [json.loads(line) for line in (tmp_path / "run" / "timing.jsonl").read_text().splitlines()]
    assert {(row["waited"], row["seconds"]) for row in timing} == {(2.0, 6.0)}
    assert result.waited_share == pytest.approx(1 / 3)


def test_batches_bring_length_groups_to_attention_that_takes_them(monkeypatch):
    def takes(device: str, precision: str, dropout: float = 0.0, heads: int = 2) -> bool:
        model = Block(BlockConfig(width=512, heads=heads, hidden=8, attention_dropout=dropout))
        setup = SimpleNamespace(device=torch.device(device), precision=precision, model=model)
        return updates.takes_groups(setup)

    monkeypatch.setattr(updates, "card_version", lambda device: 9)
    assert [takes("cpu", name) for name in DTYPES] == [not library.computes(dtype) for dtype in DTYPES.values()]
    assert [takes("cuda", name) for name in DTYPES] == [True, False, False]
    assert takes("cuda", "bf16", dropout=0.1)
    assert takes("cuda", "bf16", heads=1), "heads of 512"
