"""The speed benchmark compares like with like: the same sequences and targets, and gates read as they are meant."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from unpad.models.decoder import Config
from unpad.recipes.training import PlanSettings
from unpad.trials.bench.measure import Contender, Work

pytestmark = pytest.mark.slow

LARGE = 200 << 20
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module", autouse=True)
def _path() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield
        for script in BENCHMARKS.glob("*.py"):
            sys.modules.pop(script.stem, None)


def _module(name: str) -> Any:
    module: ModuleType = importlib.import_module(name)
    return module


def _small(held_out: int = 0) -> Any:
    workloads = _module("workloads")
    config = Config(norm="layernorm", activation="gelu", positions="learned", width=16, heads=2, hidden=32, context=24)
    lengths = workloads.log_normal_lengths(300, 9, 0.8, 2, 40)
    settings = PlanSettings(tokens_per_step=128)
    return workloads.decoder_workload("small", config, 50, lengths, settings, held_out)


def test_peers_get_our_sequences_cut_as_ours_are_and_our_targets() -> None:
    small = _small()
    examples = small.examples()
    pieces = small.plan(small.settings, 0).pieces
    assert pieces.lengths.max() == 24 < small.lengths.max(), "long sequences are cut"
    assert [len(ids) - 1 for ids, _ in examples] == pieces.lengths.tolist()
    flat, _, _ = small.tokens.gather(pieces.seq_ids, pieces.starts, pieces.stops)
    assert torch.equal(torch.cat([ids for ids, _ in examples]), torch.from_numpy(flat))
    assert sum(len(labels) - 1 for _, labels in examples) == small.lengths.sum(), "every position has a label"


def test_our_sides_learn_and_count_their_work() -> None:
    small = _small(held_out=20)
    assert not set(small.training) & set(small.held_out)
    for make in _module("workloads").our_sides().values():
        side = make(small)
        side.set_lr(0.01)
        before = side.held_out_loss()
        work = [side.step() for _ in range(20)]
        assert all(isinstance(one, Work) and one.tokens > 0 and one.operations > 0 for one in work)
        assert side.held_out_loss() < before
        assert len(side.losses) == 20


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_products_alone_are_those_of_our_updates(precision: str) -> None:
    workloads, small = _module("workloads"), _small()
    ours = workloads.Ours(small, precision=precision)
    alone = _module("products").ProductsAlone(small, precision=precision)
    assert alone.precision == precision
    for work, products in alone._steps:
        assert ours.step() == work
        # Of two blocks four products each and of the head, forward and for the gradients of both operands.
        shapes = [(len(a), b.shape[1]) for a, b, _ in products]
        assert len(shapes) == 3 * (4 * small.config.blocks + 1)
        assert sum(one[1] == 50 and one[0] >= work.tokens for one in shapes) == 1, "logits"
        assert {a.dtype for a, _, _ in products} == {torch.float32 if precision == "fp32" else torch.bfloat16}
    assert 0.9 < alone.operations_per_needed < 1.2, "rows of zeros are multiplied too, attention's products are not"
    assert [alone.step() for _ in range(5)] == [work for work, _ in [*alone._steps, alone._steps[0]]]
    assert all(torch.equal(out, a @ b) for a, b, out in alone._steps[0][1][-1:]), "the last one, written last"


def test_a_product_that_cannot_be_repeated_is_not_passed_over() -> None:
    products = _module("products")
    with products.RecordProducts() as recorded:
        torch.nn.functional.linear(torch.ones(2, 3), torch.ones(4, 3), torch.ones(4))
        torch.matmul(torch.ones(2, 3), torch.ones(3, 4), out=torch.empty(2, 4))
    assert [tuple(map(tuple, (a.shape, b.shape))) for a, b in recorded.operands] == [((2, 3), (3, 4))] * 2
    with pytest.raises(NotImplementedError, match="addmm_activation"), products.RecordProducts():
        torch._addmm_activation(torch.ones(4), torch.ones(2, 3), torch.ones(3, 4))


def test_few_updates_are_noted_where_operands_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    products = _module("products")
    monkeypatch.setattr(products.ProductsAlone, "LIMIT_BYTES", 1)
    assert len(products.ProductsAlone(_small(), precision="fp32")._steps) == 1


class _Counts:
    """A side that counts its steps; made in another process. The longest step takes LARGE bytes."""

    def __init__(self, start: int) -> None:
        if start < 0:
            raise ValueError("a negative start")
        self.steps, self.longest = start, False
        self.side = Contender(self._step, cycle=2)

    def _step(self) -> Work:
        self.steps += 1
        if self.longest:
            torch.ones(LARGE, dtype=torch.uint8)
            self.longest = False
        return Work(10, 20)

    def warm(self, seconds: float) -> None:
        self.side.warm(seconds)

    def longest_next(self) -> None:
        self.longest = True

    def describe(self) -> dict[str, Any]:
        return {"steps": self.steps}


def test_a_side_works_in_a_process_of_its_own_and_says_what_went_wrong_there(
    capfd: pytest.CaptureFixture[str],
) -> None:
    apart = _module("apart")
    side, wrong = apart.Apart(_Counts, 5), apart.Apart(_Counts, -1)
    built = side.build()
    assert 0 < built.resting <= built.peak
    assert side.turn(0.0, 3)[:3] == (4, 40, 80)
    assert side.describe() == {"steps": 10}, "one step is the warm-up"
    assert side.peak(0.0, 1) > built.resting + 0.9 * LARGE, "memory of the longest step is that of the process"
    side.turn(0.0)
    assert side._ask("memory").peak < built.resting + 0.5 * LARGE, "each turn has a peak of its own"
    with pytest.raises(ValueError, match="a negative start"):
        wrong.build()
    for one in (side, wrong):
        one.close()
    gone = apart.Apart(_Counts, 5)
    gone._process.kill()
    with pytest.raises(MemoryError, match="fewer sides"):
        gone.build()
    assert "a negative start" in capfd.readouterr().err


@pytest.mark.parametrize("grouped", [True, False])
def test_batches_hold_every_sequence_and_mix_lengths_in_every_cycle(grouped: bool) -> None:
    batches = _module("batches")
    lengths = np.random.default_rng(0).integers(1, 500, 8 * 400).tolist()  # eight whole megabatches
    made = batches.epoch_batches(lengths, 8, grouped, torch.Generator().manual_seed(0))
    assert sorted(i for batch in made for i in batch) == list(range(len(lengths)))
    spans = np.array([max(lengths[i] for i in b) - min(lengths[i] for i in b) for b in made])
    longest = np.array([max(lengths[i] for i in b) for b in made]).reshape(-1, batches.STRATA)
    assert (longest[:, 0] != longest.min(1)).any(), "in no certain order"
    assert np.abs(longest.mean(1) / longest.mean() - 1).max() < 0.1, "each cycle costs as much as any other"
    if grouped:
        assert spans.max() < 60, "batches of like lengths"
        assert longest.std(1).min() > 100, "each cycle has short and long batches"
    else:
        assert np.median(spans) > 250


def test_grouped_batches_are_those_of_the_trainer() -> None:
    sampler = pytest.importorskip("transformers.trainer_pt_utils").get_length_grouped_indices
    batches = _module("batches")
    lengths = np.random.default_rng(1).permutation(5 * 8 * 50).tolist()  # no two alike: their order is then certain
    theirs = sampler(lengths, 8, generator=torch.Generator().manual_seed(3))
    ours = batches.epoch_batches(lengths, 8, True, torch.Generator().manual_seed(3))
    # Its sampler moves the longest sequence to the front, which touches two batches.
    same = {tuple(theirs[i : i + 8]) for i in range(0, len(theirs), 8)} & {tuple(batch) for batch in ours}
    assert len(same) >= len(ours) - 2


def test_the_moment_of_a_loss_lies_between_evaluations() -> None:
    time_to_loss = _module("time_to_loss")
    run = time_to_loss.Run("ours", 1e-3, None, [0.0, 2.0, 4.0], [0, 100, 300], [5.0, 4.0, 3.0])
    assert run.reaches(3.5) == (3.0, 200.0)
    assert run.reaches(2.9) is None
