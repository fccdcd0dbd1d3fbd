"""Visual tokens in the log of every step: those of the samples, and those that entered each block."""

import numpy as np
import pytest
import torch

from tests.helpers.vision import GRIDS, ROWS, prepare, tiny
from unpad.batching.batch import RaggedBatch
from unpad.models.contract import Model
from unpad.recipes.training import OptimSettings
from unpad.training.optim import make_optimizer
from unpad.training.step import StepResult, train_step

LAYER = {"layers": [0], "inner": 8}


def step(model: Model, *batches: RaggedBatch) -> StepResult:
    optimizer = make_optimizer(model, OptimSettings(lr=1e-9))
    weights = {"cross_entropy": 1.0}
    model.begin_step(0, 1, weights)
    return train_step(model, batches, optimizer, weights=weights, precision="fp32", clip=None)


def patches_of(rows: list) -> list[int]:
    counts = [sum(height * width for height, width in row[1]) for row in rows]
    return [count for count in counts if count]


def three(name: str, values: list[float]) -> dict[str, float]:
    found = {"mean": np.mean(values), "min": min(values), "max": max(values)}
    return {f"{name}_{key}": pytest.approx(value) for key, value in found.items()}


@pytest.mark.promise("vqa.logged")
@pytest.mark.parametrize("method", ["random", "uniform"])
def test_ranked_tokens_are_counted_by_block_over_the_samples_of_all_micro_batches(method):
    model = tiny(prune={**LAYER, "method": method, "keep": 0.5}, dtype=torch.float32).train()
    both = [prepare(rows).batch for rows in (ROWS, GRIDS)]
    visual = step(model, *both).visual
    patches = patches_of(ROWS) + patches_of(GRIDS)
    assert visual.items() >= three("visual_tokens", patches).items()
    alone = []
    for batch in both:
        model(batch)
        alone.append([one[model.given > 0] for one in model.kept])
    for block, parts in enumerate(zip(*alone, strict=True)):
        assert visual.items() >= three(f"kept_block_{block}", torch.cat(parts).tolist()).items()
    assert visual["kept_block_1_mean"] < visual["visual_tokens_mean"]
    assert set(visual) == {f"{name}_{end}" for name in ("visual_tokens", "kept_block_0", "kept_block_1")
                           for end in ("mean", "min", "max")}  # fmt: skip


@pytest.mark.promise("vqa.logged")
def test_hidden_tokens_count_by_their_probability():
    model = tiny(prune={"layers": [0], "inner": 8, "method": "learned"}, dtype=torch.float32).train()
    assert model.mode == "soft"
    visual = step(model, prepare(ROWS).batch).visual
    patches = patches_of(ROWS)
    assert visual["kept_block_0_mean"] == pytest.approx(np.mean(patches))
    assert 0 < visual["kept_block_1_mean"] < np.mean(patches)
    assert [int(one.sum()) for one in model.kept] == [sum(patches)] * 2
