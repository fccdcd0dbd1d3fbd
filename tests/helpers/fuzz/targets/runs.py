"""Targets: every file of a run directory, as a report, a list of runs, a comparison and a resume read it."""

import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from tests.helpers.fuzz.mutate import damage_rows, damaged, damaged_json, either
from tests.helpers.fuzz.target import Builder, Target, WrongError, read_at
from tests.helpers.fuzz.targets.stored import manifest_of
from tests.helpers.toy import write_toy
from unpad import storage
from unpad.data.histories.assemble import QUANTILES, UNKNOWN, Codes, load_codes
from unpad.data.pictures.album import SeenPictures, compare_pictures, seen_pictures
from unpad.data.rows import read_classes
from unpad.errors import CheckpointError, RecipeError, ResumeError, SourceError, UnpadError
from unpad.inference.prompts import count_system_turns
from unpad.interchange.origin import open_recipe
from unpad.run.compare import compare, summarize
from unpad.run.folder import read_command, run_recipe
from unpad.run.monitor import Monitor, StepRecord, silent_monitor
from unpad.run.report.history import load_metrics, read_log
from unpad.run.report.page import write_report
from unpad.run.report.samples import keep_evaluation, keep_samples
from unpad.run.timers import Timers
from unpad.training.optim import make_optimizer
from unpad.training.progress import recorded_precision, restore, resumed_recipe, save_checkpoint, write_run_files
from unpad.training.setup import prepare_setup, resolved

ERRORS: tuple[type[UnpadError], ...] = (SourceError, CheckpointError, RecipeError, ResumeError)
PATIENTS = {
    "family": "patients", "counts": {"patients": 5, "with_outcome": 2, "without_outcome": 3, "of_unknown_outcome": 0},
    "calibration": [{"predicted": 0.1, "observed": 0.2, "low": 0.0, "high": 0.3, "patients": 4}] * 3,
    "roc": [[0, 0], [0.5, 0.7], [1, 1]], "precision_recall": [[0, 1], [1, 0.5]],
}  # fmt: skip
IMAGES = {
    "family": "images", "classes": ["a", "b"], "confusion": [[1, 2], [3, 4]],
    "calibration": [{"confidence": 0.5, "accuracy": 0.6, "images": 3}],
}  # fmt: skip
VQA = {
    "family": "vqa", "patches": 9.0,
    "kept": [[9, 8, 10], [4, 3, 5]],
}  # fmt: skip
CLASSES = {"classes": ["cat", "狗"]}
NUMBERS = np.array([0.0, 140.0, 2.0])
# Written by what reads them, so that they stay what a run of today keeps.
CODES = json.loads(
    Codes((UNKNOWN, "fever", "sodium"), np.array([0, 3, 2]), NUMBERS, NUMBERS, np.zeros((3, len(QUANTILES)))).to_bytes()
)
SEEN = json.loads(SeenPictures({"RGB": 3, "L": 1}, (7, 90), (9, 80)).to_bytes())


def make_run(folder: Path, steps: int = 12) -> Path:
    """A run directory of two stages with every file that a reader knows."""
    toy = write_toy(folder / "toy")
    run = folder / "run"
    run.mkdir()
    (run / "recipe.yaml").write_text(resolved(open_recipe(str(toy), [])).to_yaml(), encoding="utf-8")
    command = {"recipe": str(toy), "overrides": ["optim.lr=0.01", "train.max_steps=5"], "precision": "fp32"}
    (run / "run.json").write_text(json.dumps(command))
    monitor = Monitor(run, log_every=10, grad_norm_warning=2.0, console=Console(quiet=True), total_steps=steps)
    monitor.log("environment", torch="2.13.0", threads=2, kernel="native bf16", precision="fp32")
    monitor.log("started", recipe="toy", seed=1)
    for step in range(1, steps + 1):
        stage = "pretrain" if step <= steps // 2 else "tune"
        loss = 4.0 / step
        record = StepRecord(
            step, stage, step // 4, 1, 30, 900, 1000, 870, loss, 1e-3, 0.5 + step % 3, {"nll": loss}, {}
        )
        monitor.step(record, seconds=0.1, waited=0.02, processor=0.08, memory_bytes=600_000_000 + step)
        if step % 4 == 0:
            monitor.evaluation(step, stage, {"loss": loss + 0.2, "bits_per_char": 2.5}, 4212, best=step < steps)
    monitor.log("timers", rows=[{"name": "train", "seconds": 6.0, "share": 0.75}])
    monitor.log("checkpoint", step=steps, path="step-00000012", seconds=0.1)
    monitor.log("finished", step=steps)
    monitor.close()
    metric = {"value": 1.5, "low": 1, "high": "inf", "num": 3, "part": "holdout"}
    keep_evaluation(run, steps, {"loss": metric, "bits": {**metric, "value": None, "reason": "lossy"}}, ["a line"])
    keep_samples(run, steps, [("a prompt", "a reply <b>")])
    (run / "evaluation.json").write_text(json.dumps(PATIENTS))
    return run


def read_everything(run: Path) -> None:
    """What the verbs read of a run directory that has not trained here: each may refuse, by itself."""
    uses: list[Callable[[], object]] = [
        lambda: page_of(run),
        lambda: summarize(run).lines(),
        lambda: load_metrics(run),
        lambda: count_system_turns(read_log(run)),
        lambda: recorded_precision(run),
        lambda: compare([str(run), str(run)], run / "compare.html"),
    ]
    refusals = []
    for use in uses:
        try:
            use()
        except ERRORS as error:
            refusals.append(error)
    if refusals:
        raise refusals[0]


def page_of(run: Path) -> str:
    """The page of a run, in which no text of a file is HTML."""
    page = write_report(run).read_text(encoding="utf-8")
    if re.search(r"<script|<b>x</b>|<iframe|javascript:", page.partition("</style>")[2]):
        raise WrongError("text of a file is HTML in the page")
    return page


def _truncate(run: Path, name: str) -> None:
    """What a resume does to a log of rows."""
    log = storage.LineLog(run / name)
    try:
        log.truncate(lambda row: row["step"] <= 8 if isinstance(row.get("step"), int) else None)
    finally:
        log.close()


def _log_target(name: str, use: Callable[[Path], object], folder: Path) -> Target:
    """A file of JSON lines in a run directory."""
    path = make_run(folder) / name
    whole = path.read_bytes()
    rows = [json.loads(line) for line in whole.splitlines()]
    others = damaged([whole], [whole, b"\n", b"{}\n", b"[]\n", b"null\n"])
    make = either(0.6, lambda rng: damage_rows(rows, rng, 0.2), others)
    return Target(make, read_at(path, lambda path: use(path.parent)), ERRORS)


def _read_and_resume(run: Path) -> None:
    """What is read before a resume, and then what it does to the log of metrics."""
    try:
        read_everything(run)
    finally:
        _truncate(run, "metrics.jsonl")


def _json_target(name: str, values: Sequence[Any], use: Callable[[Path], object], share: float, folder: Path) -> Target:
    """A file of one JSON value in a run directory."""
    path = make_run(folder) / name
    whole = [json.dumps(value, ensure_ascii=False, indent=1).encode() for value in values]
    make = either(0.7, damaged_json(values, share), damaged(whole))
    return Target(make, read_at(path, lambda path: use(path.parent)), ERRORS)


def _resume(run: Path) -> None:
    """What a list of runs and a resume read of the command that started the run."""
    read_command(run)
    summarize(run).lines()
    recorded_precision(run)
    resumed_recipe(str(run.parent / "toy" / "toy.yaml"), [], run)


def run_recipe_yaml(folder: Path) -> Target:
    """The recipe that a run keeps, damaged: the page shows it as it is, everything else names it."""
    run = make_run(folder)

    def use(path: Path) -> None:
        page_of(run)
        summarize(run).lines()
        run_recipe(run)

    path = run / "recipe.yaml"
    return Target(damaged([path.read_bytes()]), read_at(path, use), ERRORS)


def _kept_file(name: str, value: Any, use: Callable[[dict[str, bytes]], object], folder: Path) -> Target:
    """A file of its data that a run keeps."""
    make = either(0.7, damaged_json([value], 0.12), damaged([json.dumps(value, ensure_ascii=False).encode()]))
    return Target(make, lambda data: use({name: data}), ERRORS)


def resume_state(folder: Path) -> Target:
    """The state of a checkpoint of somebody else, whose manifest agrees: a resume reads it all."""
    toy, run = write_toy(folder / "toy", stages=[], train={"threads": 1, "max_epochs": 2}), folder / "run"
    setup = prepare_setup(resolved(open_recipe(str(toy), [])), run, None, Timers())
    run.mkdir(exist_ok=True)
    write_run_files(setup, str(toy), [])
    silent_monitor().close()
    progress, _, _ = restore(setup)
    progress.step = progress.stage_step = 3
    save_checkpoint(setup, progress, make_optimizer(setup.model, setup.stages[0].recipe.optim), {}).finish()
    path = run / "checkpoints" / "step-00000003"
    files = {one.name: one.read_bytes() for one in path.iterdir() if one.name != "MANIFEST.json"}
    state = json.loads(files["state.json"])

    def use(data: bytes) -> None:
        (path / "state.json").write_bytes(data)
        (path / "MANIFEST.json").write_bytes(manifest_of({**files, "state.json": data}))
        restore(setup)

    return Target(damaged_json([state], 0.06), use, ERRORS)


_SIZES = [("RGB", (7, 9)), ("P", (900, 3))]

BUILDERS: dict[str, Builder] = {
    "run_metrics": partial(_log_target, "metrics.jsonl", _read_and_resume),
    "run_timing": partial(_log_target, "timing.jsonl", page_of),
    "run_log": partial(_log_target, "log.jsonl", read_everything),
    "run_evaluations": partial(_log_target, "evaluations.jsonl", page_of),
    "run_samples": partial(_log_target, "samples.jsonl", page_of),
    "run_json": partial(
        _json_target,
        "run.json",
        [{"recipe": "toy", "overrides": ["optim.lr=0.01"], "precision": "fp32"}],
        _resume,
        0.25,
    ),
    "run_evaluation": partial(_json_target, "evaluation.json", [PATIENTS, IMAGES, VQA], page_of, 0.08),
    "run_recipe": run_recipe_yaml,
    "run_classes": partial(_kept_file, "classes.json", CLASSES, read_classes),
    "run_codes": partial(_kept_file, "events.json", CODES, lambda files: load_codes(files["events.json"])),
    "run_pictures": partial(
        _kept_file, "pictures.json", SEEN, lambda files: compare_pictures(seen_pictures(files), _SIZES)
    ),
    "resume_state": resume_state,
}
