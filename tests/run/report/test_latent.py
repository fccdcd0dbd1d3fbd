import math
import re
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from tests.helpers.run_folders import record
from unpad.errors import SourceError
from unpad.recipes.file import parse_recipe
from unpad.run.monitor import Monitor
from unpad.run.report import latent as report
from unpad.run.report.history import load_metrics
from unpad.run.report.page import write_report

FIGURES = (
    "KL of the median dimension", "Active units", "Variance of the median mean", "Probe gap",
    "Reconstruction",
)  # fmt: skip


def values(step: int, latent: int = 32, fades: bool = True) -> dict[str, Any]:
    """A reading of a latent that fades from step 300 on."""
    rng = np.random.default_rng(step)
    left = math.exp(-max(step - 300, 0) / 40) if fades else 1.0
    kl = left * rng.uniform(0.5, 1, latent) * np.geomspace(2, 1e-3, latent)
    return {
        "light": "red" if left < 0.05 else "green", "streak": 0, "num_sets": 256, "kl": kl.tolist(),
        "variance": (kl / 2).tolist(), "active_share": float((kl / 2 > 0.01).mean()),
        "dead_share": float((kl < 0.01).mean()), "reconstruction": 2.0, "shuffled": 2.0 + left, "probe_gap": left / 2,
    }  # fmt: skip


def monitor(folder: Path) -> Monitor:
    return Monitor(folder, log_every=10, grad_norm_warning=9.0, console=Console(quiet=True), total_steps=600)


def train(run: Monitor, first: int, last: int, latent: bool = True) -> None:
    for step in range(first, last + 1, 10):
        row = record(step, stage="train", epoch=1, targets=900, loss=5 / step)
        run.step(row, seconds=0.1, waited=0.0, processor=0.1, memory_bytes=10**9)
        if latent and step % 50 == 0:
            run.row("latent", step, "train", values(step))


def run_directory(folder: Path, latent: bool = True) -> Path:
    folder.mkdir()
    (folder / "recipe.yaml").write_text(parse_recipe({}).to_yaml())
    run = monitor(folder)
    train(run, 10, 600, latent)
    run.log("collapse", step=500, light="red", message="latent red at step 500: 2 signs")
    run.close()
    return folder


def section(page: str) -> str:
    return page.split("<h2>Latent")[1].split("<h2>")[0]


def test_a_run_with_a_latent_has_its_plots_with_their_thresholds(tmp_path):
    page = write_report(run_directory(tmp_path / "run")).read_text()
    shown = section(page)
    assert tuple(unescape(name) for name in re.findall(r"<figcaption><b>(.*?)</b>", shown)) == FIGURES
    assert "red at step 600, read on 256 sets" in shown
    for name in FIGURES[:4]:
        assert '<path class="limit"' in shown.split(f"<b>{name}</b>")[1].split("</figure>")[0], name
    assert "latent red at step 500" in page
    assert "nan" not in shown.lower()


@pytest.mark.promise("patients.report")
def test_what_is_drawn_is_what_the_log_holds(tmp_path):
    folder = run_directory(tmp_path / "run")
    logged = [row["values"] for row in load_metrics(folder) if row["kind"] == "latent"]
    assert logged == [values(step) for step in range(50, 601, 50)]
    shown = section(write_report(folder).read_text())
    gaps = re.findall(r"step ([\d,]+): ([-\d.e+]+)<", shown.split("<b>Probe gap</b>")[1].split("</figure>")[0])
    assert [(int(step), float(gap)) for step, gap in gaps] == [
        (step, pytest.approx(100 * row["probe_gap"], rel=1e-3))
        for step, row in zip(range(50, 601, 50), logged, strict=True)
    ]


@pytest.mark.promise("patients.report")
def test_a_run_without_readings_shows_none_and_one_without_a_log_is_an_error(tmp_path):
    folder = run_directory(tmp_path / "run", latent=False)
    assert "Latent" not in write_report(folder).read_text()
    (folder / "metrics.jsonl").unlink()
    with pytest.raises(SourceError, match=r"there is no metrics\.jsonl"):
        write_report(folder)


def test_a_latent_of_zeros_or_not_numbers_is_drawn():
    dead = values(10) | {"kl": [0.0] * 4, "variance": [0.0] * 4, "probe_gap": 0.0, "active_share": 0.0}
    broken = values(20) | {"kl": ["nan"] * 4, "variance": ["nan"] * 4, "probe_gap": "nan", "reconstruction": "inf"}
    for rows in ([dead], [broken], [dead, broken], [broken, dead]):
        shown = report.section([{"step": 10 * (i + 1), "values": row} for i, row in enumerate(rows)], None).html()
        assert "nan" not in shown.lower()
