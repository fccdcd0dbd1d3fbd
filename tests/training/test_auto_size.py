"""`plan.tokens_per_micro: auto` becomes the largest number that memory holds, and is kept in the run."""

from collections.abc import Callable
from functools import partial
from io import StringIO
from pathlib import Path

import pytest
import torch
import yaml
from rich.console import Console

from tests.conftest import random_batch, tiny_model
from tests.helpers.image_models import random_images, tiny_vit
from tests.helpers.patients import random_patients, tiny_patients_model
from tests.helpers.toy import rows, run, same_tensors, weights, write_toy
from tests.helpers.vision import GRIDS, prepare, tiny
from unpad.batching.batch import RaggedBatch, concatenate
from unpad.models.contract import Model
from unpad.run.report.history import read_log
from unpad.training import auto_size
from unpad.training.auto_size import measured
from unpad.training.memory import TensorMemory, cells_of, fit, peak_of
from unpad.training.step import accumulate
from unpad.trials.preview import preview

CPU = torch.device("cpu")
LENGTHS = [40, 9, 33, 20]
FAMILIES: dict[str, tuple[Callable[[], Model], Callable[[], RaggedBatch]]] = {
    "text": (lambda: tiny_model(torch.float32, dropout=0.1), lambda: random_batch(LENGTHS)),
    "images": (lambda: tiny_vit(torch.float32), lambda: random_images([(5, 7), (2, 2), (6, 6), (3, 4)])),
    "questions": (lambda: tiny(dtype=torch.float32), lambda: prepare(GRIDS).batch),
    "patients": (lambda: tiny_patients_model(torch.float32), lambda: random_patients(LENGTHS)),
}


def test_tensors_are_counted_while_they_live_and_views_never():
    with TensorMemory() as counted:
        kept = torch.zeros(1000)
        made = kept.view(10, 100) + 1
        assert counted.live == 8000
        del made
        assert (counted.live, counted.peak) == (4000, 8000)
        kept.add_(1)
    assert counted.peak == 8000


def test_coefficients_are_found_and_none_is_negative():
    sizes = [(100, 900), (100, 4000), (400, 5000), (300, 20000)]
    found = fit(sizes, [1000 + 50 * tokens + 2 * cells for tokens, cells in sizes])
    assert (found.fixed, found.per_token, found.per_cell) == pytest.approx((1000, 50, 2))
    shrinking = fit(sizes, [90_000 + 50 * tokens - cells for tokens, cells in sizes])
    assert min(shrinking.fixed, shrinking.per_token, shrinking.per_cell) >= 0


@pytest.mark.promise("memory.auto")
@pytest.mark.parametrize("family", FAMILIES)
def test_small_passes_tell_the_peak_of_a_large_one(family):
    """Within 20 % of the counted bytes at eight times the size; of processes see benchmarks/memory.md."""
    model, batch = (make() for make in FAMILIES[family])
    loss_weights = {name: 1.0 for name in model.weights}
    model.begin_step(0, 10, loss_weights)
    state = torch.get_rng_state()
    footprint = measured(model, [batch, concatenate([batch, batch])], loss_weights, "fp32")
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
    large = concatenate([batch] * 8)
    peak = peak_of(partial(accumulate, model.train(), [large], loss_weights, "fp32"), CPU)
    assert footprint.of(large.total_tokens, cells_of(large)) == pytest.approx(peak, rel=0.2)


def sizes_of(folder: Path) -> int:
    saved = yaml.safe_load((folder / "recipe.yaml").read_text(encoding="utf-8"))
    return int(saved["plan"]["tokens_per_micro"])


@pytest.mark.promise("memory.auto")
def test_auto_is_found_once_kept_as_a_number_and_changes_no_update(tmp_path, monkeypatch):
    recipe = write_toy(tmp_path, plan={"tokens_per_step": 400, "tokens_per_micro": "auto"}, stages=[])
    ends = ("train.max_epochs=2",)
    monkeypatch.setattr(auto_size, "free_memory", lambda device: 1 << 40)
    run(recipe, tmp_path / "ample", *ends)
    assert sizes_of(tmp_path / "ample") == 400, "no more than an update has"
    monkeypatch.setattr(auto_size, "process_bytes", lambda peak: peak)
    monkeypatch.setattr(auto_size, "free_memory", lambda device: 950_000)
    run(recipe, tmp_path / "scarce", *ends, "train.max_steps=3")
    found = sizes_of(tmp_path / "scarce")
    assert 64 < found < 400
    assert any(
        f"plan.tokens_per_micro={found} (auto: the most that fits" in str(row) for row in read_log(tmp_path / "scarce")
    )
    (line,) = (told for row in read_log(tmp_path / "scarce") for told in str(row).split("'") if "(auto: " in told)
    console = Console(file=StringIO(), width=300)
    foreseen = preview(str(recipe), ends, console=console)
    assert line in console.file.getvalue(), "as `unpad plan` says before"
    auto = foreseen.to_json()["auto"]
    assert (auto["tokens"], auto["is_whole"], auto["free_bytes"]) == (found, False, 950_000)
    assert 0.5 * 950_000 < auto["peak_bytes"] <= 0.8 * 950_000
    monkeypatch.setattr(auto_size, "free_memory", lambda device: 1 << 40)
    run(recipe, tmp_path / "scarce", *ends, "train.max_steps=6", resume=True)
    assert sizes_of(tmp_path / "scarce") == found, "a run that goes on keeps its number"
    run(recipe, tmp_path / "given", *ends, "train.max_steps=3", f"plan.tokens_per_micro={found}")
    run(recipe, tmp_path / "given", *ends, "train.max_steps=6", resume=True)
    assert same_tensors(weights(tmp_path / "scarce"), weights(tmp_path / "given"))
    tokens = [[row["tokens"] for row in rows(tmp_path / name, "step")][:6] for name in ("ample", "scarce")]
    assert tokens[0] == tokens[1]
