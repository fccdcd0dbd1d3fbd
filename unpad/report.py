"""A run's report page: one HTML file, drawn from the run's own files, that needs neither network nor scripts.

Everything on the page is read back from `metrics.jsonl`, `timing.jsonl`, `events.jsonl` and `recipe.yaml`. Plots are SVG
written by hand: importing a plotting library inside the training loop would cost more than the whole page.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from unpad import storage, svg
from unpad.errors import SourceError
from unpad.svg import Array, Line, plot, running_mean, short

MAX_ROWS = 200  # of a table; the page says how many it leaves out
ENDINGS = ("finished", "interrupted", "failed")

# --------------------------------------------------------------------------- reading


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON lines file. A last line without its newline is still being written, and left out.

    Raises:
        SourceError: the file is missing, or a line is not a JSON object; names file:line.
    """
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.endswith("\n"):
                    return
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise ValueError("not an object")
                yield row
    except FileNotFoundError:
        raise SourceError(
            f"there is no {path.name}",
            where=str(path.parent),
            fix="name a run directory that has trained; see `unpad runs`",
        ) from None
    except ValueError:
        raise SourceError(
            "this line is damaged",
            where=f"{path}:{number}",
            fix="resume the run, which rewrites its files, or delete the line",
        ) from None


def load_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of `metrics.jsonl`, with "inf" and "nan", which JSON cannot hold as numbers, turned into floats.

    Raises:
        SourceError: the file is missing or damaged.
    """
    return [
        {
            key: float(value) if value in ("inf", "-inf", "nan") and key != "stage" else value
            for key, value in row.items()
        }
        for row in read_rows(folder / "metrics.jsonl")
    ]


@dataclass(frozen=True)
class Run:
    """What the page is drawn from: one array entry per step, in the order of the files."""

    train: dict[str, Array]
    stage_starts: list[tuple[str, int]]  # name, index of the stage's first step in `train`
    last: dict[str, Any]
    evals: list[dict[str, Any]]
    timing: dict[str, Array]
    events: list[dict[str, Any]]
    recipe: str


def read_run(folder: Path) -> Run:
    """Read a run directory.

    Raises:
        SourceError: a file is missing or damaged, or no step has been taken yet.
    """
    columns = ("step", "loss", "lr", "grad_norm", "tokens", "targets", "padded_tokens", "skipped")
    train: dict[str, list[float]] = {name: [] for name in columns}
    evals: list[dict[str, Any]] = []
    stage_starts: list[tuple[str, int]] = []
    last: dict[str, Any] = {}
    for row in read_rows(folder / "metrics.jsonl"):
        if row["kind"] == "train":
            if row["stage"] != last.get("stage"):
                stage_starts.append((row["stage"], len(train["step"])))
            for name in columns:
                train[name].append(float(row[name]))
            last = row
        elif row["kind"] == "eval":
            evals.append(row)
    if not last:
        raise SourceError(
            "this run has not taken a step yet", where=str(folder), fix="train first, then look at the report"
        )
    timing: dict[str, list[float]] = {
        "step": [],
        "seconds": [],
        "waited": [],
        "tokens_per_second": [],
        "memory_bytes": [],
    }
    for row in read_rows(folder / "timing.jsonl"):
        for name, values in timing.items():
            values.append(float(row[name]))
    recipe = folder / "recipe.yaml"
    return Run(
        {name: np.array(values) for name, values in train.items()},
        stage_starts,
        last,
        evals,
        {name: np.array(values) for name, values in timing.items()},
        list(read_rows(folder / "events.jsonl")),
        recipe.read_text(encoding="utf-8") if recipe.is_file() else "",
    )


# --------------------------------------------------------------------------- the page

STYLE = """
:root{color-scheme:light dark;--page:#f6f6f3;--card:#fff;--ink:#1b1c1e;--soft:#696d74;--line:#e6e5e0;--main:#2563eb;--held:#c2570c;
--good:#15803d;--bad:#b42318}
@media(prefers-color-scheme:dark){:root{--page:#111214;--card:#1a1c1f;--ink:#ececea;--soft:#9ba0a8;--line:#2d3035;--main:#78acff;
--held:#f0a05a;--good:#5fc985;--bad:#ff8a7a}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI","Noto Sans","Liberation Sans",
"Noto Sans CJK SC",sans-serif;font-variant-numeric:tabular-nums}
main{max-width:1120px;margin:0 auto;padding:40px 24px 64px}
header{display:flex;flex-wrap:wrap;align-items:baseline;gap:4px 14px;margin-bottom:24px}
h1{font-size:28px;line-height:1.2;margin:0;letter-spacing:-.02em}h2{font-size:16px;margin:36px 0 10px}
header p{margin:0;color:var(--soft);flex-basis:100%}
.state{border:1px solid;border-radius:99px;padding:1px 12px;font-size:13px;color:var(--main)}
.state.finished{color:var(--good)}.state.failed,.state.killed,.state.interrupted{color:var(--bad)}
.tiles,.plots{display:grid;gap:14px}.tiles{grid-template-columns:repeat(auto-fit,minmax(230px,1fr));margin-bottom:14px}
.plots{grid-template-columns:repeat(2,minmax(0,1fr))}.plots figure:first-child{grid-column:1/-1}
@media(max-width:760px){.plots{grid-template-columns:1fr}}
.tile,figure,.box{background:var(--card);border:1px solid var(--line);border-radius:10px;margin:0}
.tile{padding:14px 18px}.tile span,.tile small{display:block;color:var(--soft);font-size:13px}
.tile b{display:block;font-size:26px;line-height:1.3;font-weight:600;letter-spacing:-.01em}
.box{overflow:auto;max-height:440px}table{border-collapse:collapse;width:100%;font-size:14px}
th,td{padding:6px 18px;text-align:right;border-top:1px solid var(--line);white-space:nowrap}
th{position:sticky;top:0;background:var(--card);border:0;font-weight:500;color:var(--soft)}
th.l,td.l{text-align:left}td.wrap{white-space:normal;width:100%}tr.best td{font-weight:600}
pre{margin:0;padding:14px 18px;font:13px/1.5 ui-monospace,"DejaVu Sans Mono",monospace}
summary{cursor:pointer;font-weight:600;margin:36px 0 10px}
"""


def span(seconds: float) -> str:
    """Write a duration: 8.1s, 1m12s, 3h05m."""
    if seconds < 60:
        return f"{seconds:.0f}s" if seconds >= 10 else f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


def _number(value: Any) -> str:
    return "" if value is None else f"{float(value):,.4g}" if abs(float(value)) < 1e4 else f"{float(value):,.0f}"


def _tiles(run: Run) -> str:
    train, timing = run.train, run.timing
    tokens, cells = train["tokens"].sum(), train["padded_tokens"].sum()
    held = [row for row in run.evals if row["stage"] == run.last["stage"] and row["loss"] is not None]
    best = min(held, key=lambda row: float(row["loss"]), default=None)
    note = f"best of {len(held)}, step {best['step']:,}" if best else "not evaluated yet"
    busy, skipped = timing["seconds"].sum(), int(train["skipped"].sum())
    tiles = [
        ("Steps", f"{run.last['step']:,}", f"epoch {run.last['epoch']}" + (f", {skipped} skipped" if skipped else "")),
        ("Real tokens trained", short(tokens), f"{short(train['targets'].sum())} of them targets"),
        ("Held-out loss", _number(best["loss"]) if best else "–", note),
        ("Held-out perplexity", _number(best["perplexity"]) if best else "–", "exp of the loss per target"),
        (
            "Speed",
            f"{short(float(np.median(timing['tokens_per_second'])))}" if busy else "–",
            "real tokens per second, median",
        ),
        ("Padding", f"{1 - tokens / cells:.1%}" if cells else "–", "share of computed cells"),
        ("Peak memory", f"{timing['memory_bytes'].max() / 1e9:.2f} GB" if busy else "–", "largest after a step"),
        ("Waiting for data", f"{timing['waited'].sum() / busy:.1%}" if busy else "–", f"of {span(busy)} in steps"),
    ]
    return "".join(
        f"<div class=tile><span>{name}</span><b>{value}</b><small>{note}</small></div>" for name, value, note in tiles
    )


def _plots(run: Run, limit: float | None) -> str:
    train, timing, step = run.train, run.timing, run.train["step"]
    starts = [index for _, index in run.stage_starts]
    parts = [slice(a, b) for a, b in zip(starts, [*starts[1:], len(step)], strict=True)]
    bounds = [(name, float(step[index])) for name, index in run.stage_starts]
    width = max(1, len(step) // 50) | 1

    def staged(values: Array) -> list[tuple[Array, Array]]:
        return [(step[part], values[part]) for part in parts]

    smooth = [(step[p], running_mean(train["loss"][p], train["targets"][p], width)) for p in parts]
    held = [[r for r in run.evals if r["stage"] == name and r["loss"] is not None] for name, _ in run.stage_starts]
    held_lines = [(np.array([r["step"] for r in h], float), np.array([float(r["loss"]) for r in h])) for h in held if h]
    loss = [
        Line("raw", staged(train["loss"]), "every step" if width > 1 else "training"),
        Line("main", smooth if width > 1 else [], f"mean of {width} steps" if width > 1 else ""),
        Line("held", held_lines, "held out" if held_lines else "", dots=sum(map(len, held)) <= 60),
    ]
    pad = np.where(train["padded_tokens"] > 0, 1 - train["tokens"] / np.maximum(train["padded_tokens"], 1), 0.0)
    timed = timing["step"]
    figures = [
        plot("Loss", loss, size=(1060, 340), unit="nats per target", bounds=bounds),
        plot("Learning rate", [Line("main", staged(train["lr"]))], zero=True, bounds=bounds),
        plot(
            "Gradient norm",
            [Line("main", staged(train["grad_norm"]))],
            unit="before clipping",
            bounds=bounds,
            limit=limit,
        ),
        plot(
            "Speed",
            [Line("main", [(timed, timing["tokens_per_second"])])],
            zero=True,
            unit="real tokens per second",
            bounds=bounds,
        ),
        plot("Memory", [Line("main", [(timed, timing["memory_bytes"] / 1e9)])], zero=True, unit="GB", bounds=bounds),
        plot("Padding", [Line("main", staged(100 * pad))], zero=True, unit="% of computed cells", bounds=bounds),
        plot(
            "Waiting for data",
            [Line("main", [(timed, 1e3 * timing["waited"])])],
            zero=True,
            unit="ms per step",
            bounds=bounds,
        ),
    ]
    return f"<div class=plots>{''.join(figures)}</div>"


def _table(title: str, heads: list[str], rows: list[list[str]], text: int, marked: frozenset[int] = frozenset()) -> str:
    """Lay out a table whose first `text` columns are words; only the newest rows when there are too many."""
    if not rows:
        return ""
    first = max(0, len(rows) - MAX_ROWS)
    note = f" <small>the newest {MAX_ROWS} of {len(rows):,}</small>" if first else ""
    css = [" class=l" if column < text else "" for column in range(len(heads))]
    head = "".join(f"<th{c}>{escape(name)}</th>" for c, name in zip(css, heads, strict=True))
    body = "".join(
        f"<tr{' class=best' if number in marked else ''}>"
        + "".join(f"<td{c}>{escape(cell)}</td>" for c, cell in zip(css, row, strict=True))
        + "</tr>"
        for number, row in enumerate(rows[first:], first)
    )
    return f"<h2>{escape(title)}{note}</h2><div class=box><table><tr>{head}</tr>{body}</table></div>"


def _evaluations(run: Run) -> str:
    names = list(dict.fromkeys(name for row in run.evals for name in row["values"]))
    rows = [
        [
            row["stage"],
            f"{row['step']:,}",
            "" if row["epoch"] is None else str(row["epoch"]),
            _number(row["loss"]),
            _number(row["perplexity"]),
        ]
        + [_number(row["values"].get(name)) for name in names]
        + [f"{row['targets']:,}", "★" if row["best"] else ""]
        for row in run.evals
    ]
    heads = ["Stage", "Step", "Epoch", "Loss", "Perplexity", *names, "Targets", "Best so far"]
    best = frozenset(index for index, row in enumerate(run.evals) if row["best"])
    return _table("Held-out evaluations", heads, rows, 1, best)


def _events(run: Run) -> str:
    """Tables of the environment, of where the time went, and of everything else that happened."""
    known = {event["kind"]: event for event in run.events}
    html = ""
    if "timers" in known:
        rows = [[row["name"], f"{row['seconds']:,.1f}", f"{row['share']:.1%}"] for row in known["timers"]["rows"]]
        html += _table("Where the time went", ["Part", "Seconds", "Share"], rows, 1)
    log = [event for event in run.events if event["kind"] not in ("environment", "timers")]
    rows = [[_clock(event["time"]), event["kind"].replace("_", " "), _details(event)] for event in log]
    html += _table("Events", ["Time", "Event", "Details"], rows, 3)
    return html + _table("Environment", ["Name", "Value"], _pairs(known.get("environment", {})), 2)


def _clock(time: str) -> str:
    return datetime.fromisoformat(time).strftime("%Y-%m-%d %H:%M:%S")


def _pairs(event: dict[str, Any]) -> list[list[str]]:
    def text(value: Any) -> str:
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    return [[key, text(value)] for key, value in event.items() if key not in ("time", "kind")]


def _details(event: dict[str, Any]) -> str:
    return " · ".join(f"{key} {value}" for key, value in _pairs(event))


def _state(folder: Path, events: list[dict[str, Any]]) -> str:
    """running, killed, or how the run said it ended; a run holds run.lock for as long as its process lives."""
    last = next((e["kind"] for e in reversed(events) if e["kind"] in (*ENDINGS, "started", "resumed")), "")
    if last in ENDINGS:
        return last
    try:
        with (folder / storage.LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return "running"
    except FileNotFoundError:
        pass
    return "killed"


def _warning_level(recipe: str) -> float | None:
    try:
        return float(yaml.safe_load(recipe)["train"]["grad_norm_warning"])
    except (yaml.YAMLError, KeyError, TypeError, ValueError):
        return None  # a run of someone else's loop has another recipe, or none


def write_report(folder: Path) -> Path:
    """Write `report.html` from the run's files and return its path.

    Raises:
        SourceError: a file is missing or damaged, or no step has been taken yet.
        DiskError: the page cannot be written.
    """
    run = read_run(folder)
    name, state = escape(folder.resolve().name), _state(folder, run.events)
    stages = " → ".join(escape(stage) for stage, _ in run.stage_starts)
    written = f"written {datetime.now():%Y-%m-%d %H:%M:%S}"
    started = f"started {_clock(run.events[0]['time'])} · " if run.events else ""
    recipe = escape(run.recipe) or "There is no recipe.yaml in this run directory."
    page = f"""<!doctype html>
<html lang=en><meta charset=utf-8><meta name=viewport content="width=device-width,initial-scale=1"><title>{name} · unpad</title>
<style>{STYLE}{svg.STYLE}</style>
<main><header><h1>{name}</h1><span class="state {state}">{state}</span><p>{stages} · {started}{written}</p></header>
<div class=tiles>{_tiles(run)}</div>
{_plots(run, _warning_level(run.recipe))}
{_evaluations(run)}
{_events(run)}
<details><summary>Recipe</summary><div class=box><pre>{recipe}</pre></div></details>
</main></html>
"""
    path = folder / "report.html"
    storage.write_atomic(path, page)
    return path
