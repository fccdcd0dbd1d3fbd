"""Set-up of a run before its first step: threads, precision, kernels, plans of its epochs."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import unpad
from tests.conftest import random_batch, tiny_model
from tests.helpers.toy import run, same_tensors, weights, write_toy
from unpad.batching.batch import RaggedBatch
from unpad.batching.plan import Plan
from unpad.errors import CheckpointError, RecipeError
from unpad.models.decoder import Decoder
from unpad.nn.precision import computing_device
from unpad.recipes.file import load_recipe
from unpad.training.setup import APPLE_GPU, Setup, describe, prepare_setup
from unpad.training.stage import epoch_plan
from unpad.training.step import accumulate

pytestmark = pytest.mark.slow

LOW_POWER_MIB = 768  # what docs/internals/features.md promises for `unpad train zh_chat profile=low_power`


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNPAD_CACHE", str(tmp_path / "cache"))


def setup_of(recipe: Path, *overrides: str) -> Setup:
    return prepare_setup(load_recipe(str(recipe), list(overrides)), Path(), None)


# --------------------------------------------------------------------------- threads, precision, kernels


@pytest.mark.nightly
@pytest.mark.promise("memory.low-power")
def test_low_power_keeps_to_the_memory_that_the_documentation_promises(tmp_path):
    program = (
        "import sys; from pathlib import Path; from unpad.training.loop import train\n"
        "from unpad.machine import peak_memory\n"
        "train('zh_chat', Path(sys.argv[1]), ['profile=low_power', 'train.max_steps=2', 'data.holdout=0.002'])\n"
        "print('peak', peak_memory())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "run")], capture_output=True, text=True, check=True
    )
    peak = int(done.stdout.split()[-1])
    assert peak < LOW_POWER_MIB * 2**20, f"{peak / 2**20:.0f} MiB"


@pytest.mark.promise("speed.kernels-named")
def test_a_run_says_what_it_computes_with_and_that_a_gpu_of_apple_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    setup = setup_of(write_toy(tmp_path / "toy"))
    assert setup.device.type == "cpu"
    assert APPLE_GPU in describe(setup)
    assert {"torch", "threads", "device", "precision", "precision_reason", "matmul", "blas"} <= set(setup.environment)
    text = "\n".join(describe(setup))
    assert "computing in fp32" in text
    threads = setup.environment["threads"]
    assert f"cpu, {threads} thread{'s' if threads > 1 else ''}, " in text
    assert setup.environment["matmul"] in text
    assert setup.environment["blas"] in text


def losses_and_gradients(model: Decoder, batch: RaggedBatch) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    sums, _ = accumulate(model, [batch], {"cross_entropy": 1.0}, "fp32")
    return float(sums["nll"]), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.promise("speed.kernels-named")
def test_plain_kernels_give_what_the_fast_ones_give():
    model, batch = tiny_model(torch.float32, width=64, heads=4, hidden=96).eval(), random_batch([40, 9, 60, 3, 25])
    loss, grads = losses_and_gradients(model, batch)
    before = torch.backends.mkldnn.set_flags(_enabled=False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            plain_loss, plain_grads = losses_and_gradients(model, batch)
    finally:
        torch.backends.mkldnn.set_flags(_enabled=before[0])
    assert plain_loss == pytest.approx(loss, rel=1e-5)
    for name, grad in grads.items():
        assert (plain_grads[name] - grad).norm() <= 1e-5 * grad.norm(), name


@pytest.mark.promise("data.parallel")
def test_more_threads_give_what_one_gives():
    model, batch = tiny_model(torch.float32, width=64, heads=4, hidden=96).eval(), random_batch([40, 9, 60, 3, 25])
    loss, grads = losses_and_gradients(model, batch)
    torch.set_num_threads(2)
    other_loss, other_grads = losses_and_gradients(model, batch)
    assert other_loss == pytest.approx(loss, rel=1e-5)
    assert all((other_grads[name] - grad).norm() <= 1e-5 * grad.norm() for name, grad in grads.items())


# --------------------------------------------------------------------------- stages and plans


def test_a_stage_without_an_end_is_refused_before_the_data_is_read(tmp_path):
    recipe = write_toy(tmp_path / "toy", stages=[{"name": "pretrain"}])
    with pytest.raises(RecipeError, match="stage pretrain has no end"):
        setup_of(recipe)
    assert not (tmp_path / "cache").exists()


def order_of(made: Plan) -> list[list[int]]:
    return [micro.seq_ids.tolist() for step in range(made.num_steps) for micro in made.step(step)]


def test_every_epoch_has_an_order_of_its_own_that_seed_and_number_decide(tmp_path):
    recipe = write_toy(tmp_path / "toy")
    setup, again = setup_of(recipe), setup_of(recipe)
    stage = setup.stages[0]
    orders = [order_of(epoch_plan(stage, epoch)) for epoch in range(3)]
    assert orders == [order_of(epoch_plan(again.stages[0], epoch)) for epoch in range(3)]
    assert orders[0] != orders[1] != orders[2]
    assert order_of(epoch_plan(setup_of(recipe, "train.seed=1").stages[0], 0)) != orders[0]
    wanted = stage.train_ids.tolist()
    assert all(sorted(i for micro in order for i in micro) == wanted for order in orders)


@pytest.mark.promise("data.near-duplicates")
def test_a_stage_sees_its_own_kinds_and_never_the_held_out_part(tmp_path):
    setup = setup_of(write_toy(tmp_path / "toy"))
    for stage, kind in zip(setup.stages, (0, 1), strict=True):
        trained, held = stage.train_ids, stage.held_out_ids
        assert trained.size
        assert held.size
        assert set(setup.data.table.kind[np.concatenate([trained, held])].tolist()) == {kind}
        planned = {i for micro in order_of(epoch_plan(stage, 0)) for i in micro}
        assert planned == set(trained.tolist())
        assert not planned & set(held.tolist())


@pytest.mark.promise("llm.windows")
def test_joined_documents_become_one_sequence_per_kind_and_side(tmp_path):
    recipe = write_toy(tmp_path / "toy")
    apart, joined = setup_of(recipe), setup_of(recipe, "plan.cross_documents=true")
    stage = joined.stages[0]
    assert stage.train_ids.size == 1
    assert joined.data.tokens.lengths.sum() == apart.data.tokens.lengths.sum()
    windows = epoch_plan(stage, 0)
    assert windows.pieces.lengths.max() <= joined.model.config.longest
    (joint,) = stage.train_ids
    assert windows.ledger.total == int(joined.data.tokens.lengths[joint]) - 1


# --------------------------------------------------------------------------- weights


def test_weights_of_an_earlier_run_begin_the_next(tmp_path):
    recipe = write_toy(tmp_path / "toy")
    run(recipe, tmp_path / "first", "train.max_steps=9")
    settings = [f"train.init_from={tmp_path / 'first'}", "train.seed=5"]
    run(recipe, tmp_path / "second", *settings, "train.max_steps=0")
    assert same_tensors(weights(tmp_path / "second"), weights(tmp_path / "first"))
    with pytest.raises(CheckpointError, match=r"parameter .* there, .* in the model"):
        run(recipe, tmp_path / "third", *settings, "model.width=32")


def test_fresh_weights_depend_on_the_seed_alone(tmp_path):
    recipe = write_toy(tmp_path / "toy")
    one, same, other = (setup_of(recipe, f"train.seed={seed}").model.state_dict() for seed in (1, 1, 2))
    assert same_tensors(dict(one), dict(same))
    assert not same_tensors(dict(one), dict(other))


def test_a_gpu_has_an_index_as_other_threads_would_take_the_first(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert computing_device() == torch.device("cuda", 1)
    bare = re.compile(r"""(device|\.to)\(["']cuda["']\)|\.cuda\(\)""")
    sources = {path.name: path.read_text() for path in Path(unpad.__file__).parent.rglob("*.py")}
    assert [name for name, text in sources.items() if bare.search(text)] == []
