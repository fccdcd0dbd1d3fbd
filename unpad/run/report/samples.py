"""Report section of a run's evaluations and sample replies: `evaluations.jsonl` and `samples.jsonl`."""

import json
import math
from contextlib import suppress
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any, NotRequired

from typing_extensions import TypedDict

from unpad.errors import SourceError, UnpadError
from unpad.run import upgrade
from unpad.run.folder import CHECKPOINTS
from unpad.run.report.history import read_rows
from unpad.run.report.section import PageSection, table
from unpad.storage import LineLog, write_atomic
from unpad.storage.reading import Count, Number, misfit, read_shaped
from unpad.storage.strict_json import json_object

EVALUATIONS, SAMPLES = "evaluations.jsonl", "samples.jsonl"
SHOWN_SAMPLES = 12


def keep_evaluation(folder: Path, step: int, metrics: dict[str, Any], lines: list[str]) -> None:
    """Add an evaluation to the run.

    Args:
        step: of the weights.
        metrics: {name: {"value", "low", "high", "num"}}.
        lines: examples that it showed.

    Raises:
        DiskError: it cannot be written.
    """
    log = LineLog(folder / EVALUATIONS)
    try:
        time = datetime.now().astimezone().isoformat(timespec="seconds")
        log.append({"time": time, "step": step, "metrics": metrics, "lines": lines})
    finally:
        log.close()


def keep_samples(folder: Path, step: int, pairs: list[tuple[str, str]]) -> None:
    """Add held-out prompts and the model's replies to those of earlier steps, atomically.

    Raises:
        DiskError: they cannot be written; the old file is untouched.
    """
    path = folder / SAMPLES
    before = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    earlier = [line for line in before if _step(line) < step]
    rows = [{"step": step, "prompt": prompt, "reply": reply} for prompt, reply in pairs]
    lines = [*earlier, *((json.dumps(row, ensure_ascii=False) + "\n").encode() for row in rows)]
    if lines != before:
        write_atomic(path, b"".join(lines))


def has_samples(folder: Path, step: int) -> bool:
    """True if a run has replies of this step."""
    return any(row["step"] == step for row in _read(folder / SAMPLES, _Sample))


def newest_prompts(folder: Path, most: int) -> list[str]:
    """Different prompts of the newest replies of a run, with the words of its template."""
    return list(dict.fromkeys(row["prompt"] for row in reversed(_read(folder / SAMPLES, _Sample))))[:most]


def _step(line: bytes) -> float:
    """Step of a sample; infinite for a damaged line, which is left out."""
    step = (json_object(line) or {}).get("step")
    return step if isinstance(step, int) else math.inf


def newest_evaluation(folder: Path) -> dict[str, Any] | None:
    """The newest evaluation of a run; None without one."""
    evaluations = _read(folder / EVALUATIONS, _Evaluation)
    return {**evaluations[-1], "metrics": upgrade.metrics(evaluations[-1]["metrics"])} if evaluations else None


def old_notes(folder: Path) -> list[str]:
    """A line if the newest evaluation of a run is of other weights than it has now, such as before it trained on."""
    evaluation, step = newest_evaluation(folder), weights_step(folder)
    if evaluation is None or step in (None, evaluation["step"]):
        return []
    return [f"the evaluation is of step {evaluation['step']:,}, the weights are of step {step:,}: evaluate them anew"]


class _Stepped(TypedDict):
    step: Count


def weights_step(folder: Path) -> int | None:
    """Step of the weights that verbs use, the best or else the newest; None if no checkpoint can be read."""
    checkpoints = folder / CHECKPOINTS
    best = [checkpoints / name / "state.json" for name in ("best", ".old-best")]
    numbered = {int(path.parent.name.rpartition("-")[2]): path for path in checkpoints.glob("*step-*[0-9]/state.json")}
    for path in (*best, *(numbered[step] for step in sorted(numbered, reverse=True))):
        with suppress(UnpadError, OSError):
            return int(read_shaped(path, _Stepped)["step"])
    return None


class _Metric(TypedDict):
    value: Number | None
    low: Number | None
    high: Number | None
    num: Count
    part: NotRequired[str | None]
    reason: NotRequired[str | None]
    best_of: NotRequired[Count | None]
    sentence: NotRequired[str]


class _Evaluation(TypedDict):
    time: str
    step: Count
    metrics: dict[str, _Metric]
    lines: NotRequired[list[str]]


class _Sample(TypedDict):
    step: Count
    prompt: str
    reply: str


def _read(path: Path, shape: type) -> list[dict[str, Any]]:
    """Rows of an optional file of evaluations; none if it is damaged."""
    with suppress(SourceError):
        return list(read_rows(path, lambda row: misfit(row, shape)))
    return []


def draw(folder: Path) -> list[PageSection]:
    """Tables of the newest evaluation and of the newest replies; nothing without them."""
    evaluation, samples, sections = newest_evaluation(folder), _read(folder / SAMPLES, _Sample), list[PageSection]()
    if evaluation is not None:
        rows = [
            (name.replace("_", " "), written(one["value"]), _interval(one), f"{one['num']:,}", _part(one))
            for name, one in evaluation["metrics"].items()
        ]
        heads = ("Metric", "Value", "95 % interval, or extremes", "Of", "Part")
        lines = escape("\n".join(evaluation.get("lines", [])))
        shown = table(heads, rows, text=(0, 4)) + (f"<div class=box><pre>{lines}</pre></div>" if lines else "")
        note = f"of step {evaluation['step']:,}, on {evaluation['time'][:16].replace('T', ' ')}"
        sections.append(PageSection("Evaluation", note, table=shown))
    if samples:
        replies = [(f"{row['step']:,}", row["prompt"], row["reply"]) for row in samples[-SHOWN_SAMPLES:]]
        shown = table(("Step", "Held-out prompt", "Reply"), replies, text=(1, 2), css="replies")
        sections.append(PageSection("Replies", table=shown))
    return sections


def _interval(metric: dict[str, Any]) -> str:
    """Bounds of a metric, and the reason if the metric or a bound is missing."""
    reason = metric.get("reason")
    bounds = f"{written(metric['low'])} to {written(metric['high'])}"
    if not reason:
        return bounds
    return str(reason) if metric["low"] is None and metric["high"] is None else f"{bounds}: {reason}"


def _part(metric: dict[str, Any]) -> str:
    """The part of the data that a metric covers, if known."""
    best_of = f", best of {metric['best_of']} evaluations" if metric["best_of"] else ""
    return f"{metric['part'] or ''}{best_of}"


def written(value: Any) -> str:
    """A number of an evaluation as tables have it; "-" for one that the data does not allow."""
    return "-" if value is None or math.isnan(float(value)) else f"{float(value):.4f}"
