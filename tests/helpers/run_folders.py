"""What a run logs, without a training."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from unpad.run.monitor import Monitor, StepRecord
from unpad.run.report.section import PageSection

STEPS_PER_EPOCH = 5


def record(step: int, **changes: object) -> StepRecord:
    rng = np.random.default_rng(step)
    loss = 3 * math.exp(-step / 10) + float(rng.uniform(0, 0.1)) + 1
    terms = {"terms": {"nll": loss}, "weights": {}}
    rest = {"loss": loss, "lr": 1e-3 / step, "grad_norm": float(rng.uniform(0.5, 1)), **terms}
    values = {
        "step": step, "stage": "pretrain" if step <= 10 else "tune", "epoch": (step - 1) // STEPS_PER_EPOCH,
        "micros": 1,
        "sequences": 20, "tokens": 2000 + step, "padded_tokens": 2100, "targets": int(rng.integers(1500, 2000)),
    }  # fmt: skip
    return StepRecord(**(values | rest | changes))


def run_directory(folder: Path, steps: int = 60, stage: str = "tune", ending: str = "finished") -> Path:
    """A run of two stages with a held-out evaluation every ten steps."""
    folder.mkdir()
    (folder / "recipe.yaml").write_text("train:\n  grad_norm_warning: 2.0\ndata:\n  text: a<secret> & 语料\n")
    run = Monitor(folder, log_every=10, grad_norm_warning=2.0, console=Console(quiet=True), total_steps=steps)
    run.log("environment", torch="2.13.0", threads=2, kernel="native bf16")
    run.log("started", recipe="zh_chat")
    rng = np.random.default_rng(0)
    for step in range(1, steps + 1):
        name = "pretrain" if step <= steps // 2 else stage
        loss = 4 * math.exp(-step / 20) + 1 + float(rng.normal()) / 20
        tokens = int(rng.integers(900, 1000))
        record = StepRecord(
            step, name, step // 10, 1, 30, tokens, 1000, tokens - 30, loss, 1e-3 / step, float(rng.uniform(0.5, 3)),
            {"nll": loss}, {},
        )  # fmt: skip
        run.step(record, seconds=0.1, waited=0.02, processor=0.1, memory_bytes=600_000_000 + step)
        if step % 10 == 0:
            run.evaluation(step, name, {"loss": loss + 0.2, "bits_per_char": 2.5}, 4212, best=step < steps)
    run.log("timers", rows=[{"name": "train", "seconds": 6.0, "share": 0.75}])
    if ending:
        run.log(ending)
    run.close()
    return folder


def html_of(draw: Callable[[Any], list[PageSection]], given: Any) -> str:
    """Sections of a page as it shows them."""
    return "".join(section.html() for section in draw(given))
