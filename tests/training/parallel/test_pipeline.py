"""A decoder over pipeline stages gives the bits of one process: hidden states, gradients, updates, files of a run."""

from __future__ import annotations

import hashlib
import json
from contextlib import nullcontext
from functools import partial
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.helpers.ranks import run_ranks
from tests.helpers.toy import events, quiet, run, write_toy
from unpad.batching.batch import RaggedBatch, from_sequences
from unpad.batching.plan import plan
from unpad.errors import RecipeError, UnpadError
from unpad.interchange.origin import open_recipe
from unpad.models.decoder import Config, Decoder
from unpad.nn.native import library
from unpad.processes.group import ALONE, Group
from unpad.recipes.training import OptimSettings, PlanSettings
from unpad.training.loop import train
from unpad.training.optim import make_optimizer
from unpad.training.parallel.divisions import asked
from unpad.training.parallel.parallelism import ONE_PROCESS
from unpad.training.parallel.pipeline import PipelinedDecoder, divide, share_at_work, stage_blocks
from unpad.training.parallel.pipeline_stages import PipelineStages
from unpad.training.parallel.share import Share, count_micro, step_seed
from unpad.training.setup import resolved
from unpad.training.step import train_step

Told = tuple[Path, list[dict[str, Any]]]  # a folder with runs, and what every process found
VOCAB, SEED, STAGES = 60, (3, 5), 2
SIZES = {"width": 16, "blocks": 3, "heads": 2, "hidden": 24, "context": 64}
DROPOUT = {"dropout": 0.1, "attention_dropout": 0.1, "embed_dropout": 0.1}
GPT = {"norm": "layernorm", "activation": "relu", "positions": "learned", "bias": True, "tied": False}
WINDOWS = {"sliding_window": 3, "sliding_blocks": [0, 2], "sliding_rope_theta": 100.0, "branch_norms": True}
# Name -> fields of the model, micro-batches, dtype, precision, sums, native kernels.
CASES: dict[str, tuple[dict[str, Any], int, torch.dtype, str, str, bool]] = {
    "tied": (DROPOUT, 6, torch.float32, "fp32", "exact", True),
    "tied, kernels of torch": (DROPOUT, 6, torch.float32, "fp32", "exact", False),
    "tied, bf16": (DROPOUT, 6, torch.float32, "bf16", "exact", True),
    "tied, one micro-batch": (DROPOUT, 1, torch.float32, "fp32", "exact", True),
    "own head": (DROPOUT | GPT, 6, torch.float32, "fp32", "exact", True),
    "windows": (WINDOWS, 6, torch.float32, "fp32", "exact", True),
    "own head, fast sums": (GPT, 6, torch.float32, "fp32", "fast", True),
    "tied, fast sums": ({}, 6, torch.float64, "fp32", "fast", True),
}


def micro_batches(num: int) -> list[RaggedBatch]:
    """Micro-batches of unlike sizes, among them an empty one and one without targets."""
    draw = np.random.default_rng(0)
    sizes = [[9, 30, 4], [20] * 9, [], [7], [12, 3], [40, 2, 2]]
    batches = [from_sequences([draw.integers(0, VOCAB, length) for length in lengths]) for lengths in sizes]
    batches[3] = from_sequences([draw.integers(0, VOCAB, 7)], [np.zeros(7, bool)])
    return batches[:num]


def build(fields: dict[str, Any], dtype: torch.dtype) -> Decoder:
    torch.manual_seed(0)
    return Decoder(Config(**SIZES, **fields), VOCAB).to(dtype)


# --------------------------------------------------------------------------- in the processes


def compare(group: Group, case: str) -> dict[str, Any]:
    """An update and its evaluation over stages and in one process: what is equal to the bit, and the largest relative
    difference of a gradient that is not."""
    fields, num, dtype, precision, kind, native = CASES[case]
    micros, one = micro_batches(num), build(fields, dtype)
    counts = [count_micro(one, batch) for batch in micros]
    over: dict[Group, Any] = {ALONE: one, group: PipelinedDecoder(build(fields, dtype), group, torch.device("cpu"))}
    results, found = [], []
    for where, model in over.items():
        torch.manual_seed(step_seed(*SEED))
        model.train()
        with nullcontext() if native else library.switched_off():
            parallelism = ONE_PROCESS if where is ALONE else PipelineStages(model)
            sums = parallelism.gradient_sum(kind, model) if num > 1 or where is group else None
            share = Share(range(num), counts, SEED, parallelism, sums)
            optimizer = make_optimizer(model, OptimSettings(lr=1e-2))
            options: Any = {
                "weights": {"cross_entropy": 1.0},
                "precision": precision,
                "clip": 0.01 if kind == "exact" else None,
            }
            results.append(train_step(model, micros, optimizer, **options, share=share))
            model.eval()
            terms = model.losses(micros[0])["cross_entropy"][0].detach()
            hidden = model(micros[0]).detach()
            found.append([hidden, model.token_nll(micros[0]), terms, model.embed_tokens(torch.arange(4)).detach()])
    wanted, stage = dict(one.named_parameters()), over[group]
    gradients = {name: p.grad for name, p in stage.named_parameters() if p.grad is not None}
    weights = stage.gathered(stage.state_dict())
    differ = [name for name, gradient in gradients.items() if not torch.equal(gradient, gradient_of(wanted[name]))]
    return {
        "gradients": sorted(gradients),
        "differ": differ,
        "worst": max([distance(gradients[name], gradient_of(wanted[name])) for name in differ], default=0.0),
        "result": results[0] == results[1],
        "outputs": [torch.equal(a, b) for a, b in zip(*found, strict=True)],
        "weights": [name for name, value in one.state_dict().items() if group.leads and not value.equal(weights[name])],
        "meta": sorted(name for name, p in stage.named_parameters() if p.is_meta),
    }


def gradient_of(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def train_over(group: Group, recipe: Path, folder: Path, *overrides: str, resume: bool = False) -> None:
    train(str(recipe), folder, overrides, resume=resume, console=quiet(), group=group)


def fail(group: Group) -> str:
    """Name of the error of this process after the last stage has run out of memory."""
    model = PipelinedDecoder(build({}, torch.float32), group, torch.device("cpu"))
    micros = micro_batches(6)
    if not group.leads:
        model.part.decoder.norm.forward = full  # type: ignore[method-assign]
    stages = PipelineStages(model)
    sums = stages.gradient_sum("exact", model)
    share = Share(range(6), [count_micro(model, batch) for batch in micros], None, stages, sums)
    optimizer = make_optimizer(model, OptimSettings())
    try:
        train_step(model, micros, optimizer, weights={"cross_entropy": 1.0}, precision="fp32", clip=1.0, share=share)
    except UnpadError as error:
        return f"{type(error).__name__} {error.exit_code}"
    return "no error"


def full(*_: object) -> tuple[Tensor, Tensor]:
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory")


def everything(group: Group, folder: Path) -> dict[str, Any]:
    """All work of the two processes, so that they start once."""
    told: dict[str, Any] = {name: compare(group, name) for name in CASES}
    recipe = folder / "data" / "toy.yaml"
    stages = f"train.pipeline_stages={STAGES}"
    train_over(group, recipe, folder / "two", *CHANGES, stages)
    train_over(group, recipe, folder / "more stages", "train.max_steps=8", stages, resume=True)
    train_over(group, recipe, folder / "fewer stages", *CHANGES, stages, "train.max_steps=5")
    told["failure"] = fail(group)
    return told


# --------------------------------------------------------------------------- tests of them

CHANGES = ("model.blocks=3", "optim.schedule=constant", "train.max_steps=8", "checkpoint.every=4", "train.eval_every=4")


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """A folder with runs, and what the two processes found."""
    folder = tmp_path_factory.mktemp("pipeline")
    recipe = write_toy(folder / "data")
    run(recipe, folder / "one", *CHANGES)
    run(recipe, folder / "more stages", *CHANGES, "train.max_steps=5")
    found = run_ranks(folder / "ranks", STAGES, partial(everything, folder=folder))
    run(recipe, folder / "fewer stages", "train.max_steps=8", "train.pipeline_stages=1", resume=True)
    return folder, found


@pytest.mark.slow
@pytest.mark.promise("processes.pipeline")
@pytest.mark.parametrize("case", [name for name in CASES if name != "tied, fast sums"])
def test_two_stages_give_every_bit_of_one_process(case: str, told: Told) -> None:
    first, last = (found[case] for found in told[1])
    for stage in (first, last):
        assert (stage["differ"], stage["weights"], stage["result"], stage["outputs"]) == ([], [], True, [True] * 4)
    names = sorted(name for name, _ in build(CASES[case][0], torch.float32).named_parameters())
    assert sorted(first["gradients"] + last["gradients"]) == names
    assert sorted(first["meta"] + last["meta"]) == names, "every weight is in the memory of one stage"


def test_of_fast_sums_a_tied_head_alone_depends_on_the_order(told: Told) -> None:
    first, last = (found["tied, fast sums"] for found in told[1])
    assert set(first["differ"]) <= {"embed.weight"}
    assert first["worst"] < 1e-12
    assert last["differ"] == []


def read_samples(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()]


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.promise("processes.pipeline")
def test_a_run_over_two_stages_writes_the_bytes_of_one_process(told: Told) -> None:
    one, two = told[0] / "one", told[0] / "two"
    names = [str(path.relative_to(one)) for path in sorted(one.glob("checkpoints/*/*.safetensors"))]
    assert len(names) == 8
    for name in [*names, "metrics.jsonl", "metrics.csv", "attention.json"]:
        assert sha256(one / name) == sha256(two / name), name
    samples = [[row["reply"] for row in read_samples(folder)] for folder in (one, two)]
    assert samples[0] == samples[1] != []


@pytest.mark.parametrize("name", ["more stages", "fewer stages"])
def test_a_run_goes_on_over_another_number_of_stages(name: str, told: Told) -> None:
    one, resumed = (told[0] / run / "checkpoints" / "step-00000008" for run in ("one", name))
    for file in ("model.safetensors", "optim.safetensors"):
        assert sha256(one / file) == sha256(resumed / file)
    (entry,) = events(told[0] / name, "resumed")
    assert "train.pipeline_stages is" in entry["message"]


def test_a_run_names_updates_that_leave_stages_idle(told: Told) -> None:
    (entry,) = events(told[0] / "two", "warning")
    assert entry["message"].startswith("pretrain: updates of 2.7 micro-batches keep a pipeline stage at work 73%")
    assert events(told[0] / "one", "warning") == []


def test_the_error_of_a_stage_ends_the_others(told: Told) -> None:
    assert [found["failure"] for found in told[1]] == ["LostProcessError 10", "OutOfMemoryError 8"]


# --------------------------------------------------------------------------- the division


@settings(deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=7), st.integers(0, 40), st.data())
def test_the_most_expensive_stage_is_as_cheap_as_can_be(costs: list[int], head: int, data: st.DataObject) -> None:
    num = data.draw(st.integers(1, len(costs)))

    def largest_cost(spans: list[range]) -> int:
        return max(sum(costs[i] for i in span) + head * (span.stop == len(costs)) for span in spans)

    found = divide(costs, head, num)
    every = [
        [range(a, b) for a, b in pairwise([0, *cuts, len(costs)])]
        for cuts in combinations(range(1, len(costs)), num - 1)
    ]
    assert found in every
    assert largest_cost(found) == min(map(largest_cost, every))


def test_a_large_vocabulary_moves_blocks_to_the_first_stage() -> None:
    config = Config(width=16, blocks=6, heads=2, hidden=32, context=32)
    assert stage_blocks(config, 10, 2) == [range(0, 3), range(3, 6)]
    assert stage_blocks(config, 600, 2) == [range(0, 5), range(5, 6)]


def test_a_stage_is_at_work_in_as_many_turns_as_an_update_has_micro_batches() -> None:
    plan_settings = PlanSettings(strategy="fixed", batch_size=1, batches_per_step=3)
    made = plan(np.full(7, 5), plan_settings, seed=0, epoch=0)  # 3, 3 and 1 micro-batches
    assert share_at_work(made, 2) == 7 / (4 + 4 + 2)
    assert share_at_work(made, 1) == 1


# --------------------------------------------------------------------------- refusals

LORA = "lora={r: 2, targets: [to_qkv]}"
GROUP = "optim.groups=[{parameters: ['norm*'], clip: 0.5}]"


@pytest.mark.parametrize(
    ("changes", "size", "where", "what"),
    [
        ([], 1, "train.pipeline_stages", "there are 2 pipeline stages and 1 process"),
        ([], 3, "train.pipeline_stages", "there are 2 pipeline stages and 3 processes"),
        (["model.blocks=1"], 2, "train.pipeline_stages", "2 pipeline stages need as many blocks, and the model has 1"),
        ([LORA], 2, "lora", "adapters"),
        (["train.freeze=[embed*]"], 2, "train.freeze", "every weight"),
        (["stages.tune.train.freeze=[embed*]"], 2, "train.freeze", "every weight"),
        ([GROUP], 2, "optim.groups", "clip of its own"),
        (["train.shard=full"], 2, "train.shard", "whole weights"),
    ],
)
def test_a_recipe_that_does_not_fit_is_refused(
    changes: list[str], size: int, where: str, what: str, tmp_path: Path
) -> None:
    overrides = ["model.blocks=3", "train.pipeline_stages=2", *changes]
    recipe = resolved(open_recipe(str(write_toy(tmp_path)), overrides))
    with pytest.raises(RecipeError, match=what) as raised:
        asked(recipe).check_recipe(recipe, Group(0, size))
    assert raised.value.where == where
    assert raised.value.fix


@pytest.mark.parametrize(("name", "what"), [("images", "model.kind is vit"), ("dpo", "preferences")])
def test_a_packaged_recipe_of_another_kind_is_refused(name: str, what: str) -> None:
    recipe = resolved(open_recipe(name, ["train.pipeline_stages=2"]))
    with pytest.raises(RecipeError, match=what):
        asked(recipe).check_recipe(recipe, Group(0, 2))


def test_a_run_in_one_process_refuses_stages(tmp_path: Path) -> None:
    recipe = write_toy(tmp_path / "data")
    with pytest.raises(RecipeError, match="2 pipeline stages and 1 process"):
        run(recipe, tmp_path / "run", "model.blocks=3", "train.pipeline_stages=2")
    assert not (tmp_path / "run").exists()
