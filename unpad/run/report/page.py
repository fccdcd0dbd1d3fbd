"""Report page of a run: one HTML file, drawn from the run's own files, that needs neither network nor scripts.

Everything on the page is read back from `metrics.jsonl`, `timing.jsonl`, `log.jsonl`, `recipe.yaml`, `evaluation.json`,
`evaluations.jsonl`, `samples.jsonl` and `shown.json`; nothing is made up for a missing file.
"""

import json
import math
from dataclasses import replace
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from unpad import storage
from unpad.data.family import family_name
from unpad.errors import UnpadError
from unpad.models import model_kinds
from unpad.recipes.recipe import Recipe
from unpad.run import upgrade
from unpad.run.report import samples, section, shown
from unpad.run.report.history import ENDINGS, Array, RunHistory, chance, read_history, run_state
from unpad.run.report.section import IN_USE, FamilySection, PageSection
from unpad.run.report.svg import WIDE, Axes, Curve, plot, running_mean
from unpad.run.timers import covered_steps
from unpad.storage.reading import read_shaped
from unpad.terminal.printing import resume_run
from unpad.terminal.table import number_of, short, span

Tile = tuple[str, str, str]  # name, value and note
MAX_ROWS = 200  # rows of a table; its title names the number left out
EVALUATION = "evaluation.json"  # written by `unpad eval` for the page


def _number(value: Any) -> str:
    if value is None:
        return ""
    return f"{float(value):#.4g}" if abs(float(value)) < 1e3 else f"{float(value):,.0f}"


def _performance(family: FamilySection, checked: dict[str, Any] | None, evaluated: dict[str, Any] | None) -> list[Tile]:
    """Tiles of the family's measures: of the newest evaluation with `unpad eval`, or else of the best check.

    Args:
        checked: row of the check; evaluated: the evaluation.
    """
    tiles = list[Tile]()
    measured = {} if evaluated is None else evaluated["metrics"]
    for one in family.performance:
        found = measured.get(one.name)
        guess = measured.get(one.guess, {}).get("value") if isinstance(one.guess, str) else one.guess
        notes = [] if guess is None else [f"{one.guessed} {one.shown(guess)}"]
        if evaluated is not None and found is not None and found["value"] is not None:
            value = found["value"]
            if found["low"] is not None and found["high"] is not None:
                notes.append(f"95 %: {one.shown(found['low'])} to {one.shown(found['high'])}")
            notes.append(f"of {found.get('part') or 'the evaluation'}, step {evaluated['step']:,}")
            if (simple := measured.get(f"simple_{one.name}", {}).get("value")) is not None:
                notes.insert(0, f"a simple method {one.shown(simple)}")
        elif checked is not None and checked["values"].get(one.name) is not None:  # of one class alone it has no value
            value = float(checked["values"][one.name])
            notes.append(f"of valid, step {checked['step']:,}")
        else:
            continue
        tiles.append((one.title, one.shown(value), "; ".join(notes)))
    return tiles


def _judgement(run: RunHistory, used: dict[str, Any] | None, more: str) -> str:
    """A sentence on what the held-out loss says of the run; "" while it says nothing.

    Args:
        used: the check of the weights in use; more: what gives the run more steps.
    """
    checks, best = run.checks, run.best_check
    if used is None or best is None or len(checks) < 3:
        return "" if run.evaluations else "No held-out row was checked: nothing here shows what the model is worth."
    first, last = checks[0], checks[-1]
    least = chance(int(best["targets"]))
    at, losses = run.steps["step"], run.steps["loss"]
    width, at, losses = max(len(at) // 20, 1), at[np.isfinite(losses)], losses[np.isfinite(losses)]
    recent = [losses[at <= row["step"]][-width:] for row in (best, last)]
    before, after = (float(values.mean()) if values.size else math.nan for values in recent)
    if first["loss"] - best["loss"] <= least:
        num_checks = number_of(len(checks), "checks")
        return f"The held-out loss did not fall in {num_checks}: unpad doctor looks for the cause."
    if last["loss"] - best["loss"] > least and before - after > least:
        others = f"those of step {used['step']:,}, of loss {_number(used['loss'])}"
        weights = "the best ones" if used is best else others
        return (
            f"The held-out loss stopped falling at step {best['step']:,} of {last['step']:,}, while the training loss "
            f"fell from {_number(before)} to {_number(after)}: from there on the model learnt by heart. "
            f"The weights in use are {weights}."
        )
    if checks[-1 - max(len(checks) // 5, 1)]["loss"] - last["loss"] > least:
        return f"The held-out loss was still falling at the end: more steps may help ({more})."
    reached = next(row for row in checks if row["loss"] - best["loss"] <= least)
    return f"The held-out loss has hardly changed since step {reached['step']:,}: the run learnt what it could."


def _tiles(
    run: RunHistory, family: FamilySection, used: dict[str, Any] | None, evaluated: dict[str, Any] | None
) -> str:
    """Key figures: what the model is worth, and then what its training took.

    Args:
        used: the check of the weights in use; evaluated: the newest evaluation.
    """
    train, timing, best = run.steps, run.timing, run.best_check
    tokens = train["tokens"].sum()
    note = f"of valid, step {used['step']:,}" if used else "not evaluated yet"
    if used and best and best["step"] != used["step"]:
        note += f", in use; best {_number(best['loss'])}, step {best['step']:,}"
    busy, skipped = timing["seconds"].sum(), int(train["skipped"].sum())
    epoch = f"epoch {run.last['epoch']:,}"
    speed = short(float(np.median(timing["tokens_per_second"]))) if busy else "–"
    exp = ("Held-out perplexity", _number(used["perplexity"]) if used else "–", "exp of this loss")
    tiles = [
        *_performance(family, used, evaluated),
        ("Held-out loss", _number(used["loss"]) if used else "–", note),
        *([exp] if family.perplexity else []),
        ("Steps", f"{run.last['step']:,}", epoch + (f", {skipped} skipped" if skipped else "")),
        (f"Real {family.length_unit} trained", short(tokens), f"{short(train['targets'].sum())} targets"),
        ("Speed", speed, f"real {family.length_unit} per second, median"),
        ("Padding", run.pad_share or "–", "share of computed cells"),
        ("Peak memory", f"{timing['peak_bytes'].max() / 1e9:.2f} GB" if busy else "–", "at any time of training"),
        ("Waiting for data", f"{timing['waited'].sum() / busy:.1%}" if busy else "–", f"of {span(busy)} in steps"),
    ]
    return "".join(
        f"<div class=tile><span>{escape(name)}</span><b>{escape(value)}</b><small>{escape(note)}</small></div>"
        for name, value, note in tiles
    )


def _plots(run: RunHistory, limit: float | None, family: FamilySection) -> str:
    train, timing, step = run.steps, run.timing, run.steps["step"]
    starts = [index for _, index in run.stage_starts]
    parts = [slice(a, b) for a, b in zip(starts, [*starts[1:], len(step)], strict=True)]
    bounds = [(name, float(step[index])) for name, index in run.stage_starts]
    width = max(1, len(step) // 50) | 1

    def smooth(at: Array, values: Array, weights: Array, pieces: list[slice]) -> list[Curve]:
        """Curves of every step, faint, and of the running mean; short runs need no mean."""
        if width == 1:
            return [Curve("main", [(at[p], values[p]) for p in pieces])]
        means = [(at[p], running_mean(values[p], weights[p], width)) for p in pieces]
        return [Curve("raw", [(at[p], values[p]) for p in pieces]), Curve("main", means)]

    measured = [row for row in run.evaluations if row["loss"] is not None]
    held = [[row for row in measured if row["stage"] == name] for name, _ in run.stage_starts]
    held_lines = [(np.array([r["step"] for r in h], float), np.array([float(r["loss"]) for r in h])) for h in held if h]
    loss = smooth(step, train["loss"], train["targets"], parts)
    names = ["every step", f"mean of {width} steps"] if width > 1 else ["training"]
    loss = [replace(line, label=label) for line, label in zip(loss, names, strict=True)]
    if held_lines:
        loss.append(Curve("held", held_lines, "held out", dots=sum(map(len, held)) <= 60))
    pad = 100 * np.where(train["padded_tokens"] > 0, 1 - train["tokens"] / np.maximum(train["padded_tokens"], 1), 0.0)

    def timed(name: str, scale: float = 1.0) -> list[Curve]:
        return smooth(timing["step"], scale * timing[name], np.ones(len(timing["step"])), [slice(None)])

    rate, memory, waited = timed("tokens_per_second"), timed("memory_bytes", 1e-9), timed("waited", 1e3)
    # The mean of logarithms: one spike does not lift its neighbours.
    logs = smooth(step, np.log(np.maximum(train["grad_norm"], 1e-12)), 1 - train["skipped"], parts)
    norm = [replace(line, segments=[(x, np.exp(y)) for x, y in line.segments]) for line in logs]
    padding = smooth(step, pad, train["padded_tokens"], parts)
    lr = [Curve("main", [(step[part], train["lr"][part]) for part in parts])]
    figures = [
        plot("Loss", loss, Axes("nats per target", WIDE), stages=bounds),
        plot("Learning rate", lr, Axes(zero=True), stages=bounds),
        plot("Gradient norm", norm, Axes("before clipping"), stages=bounds, limit=limit),
        plot("Speed", rate, Axes(f"real {family.length_unit} per second", zero=True), stages=bounds),
        plot("Memory", memory, Axes("GB", zero=True), stages=bounds),
        *([plot("Padding", padding, Axes("% of computed cells", zero=True), stages=bounds)] if pad.any() else []),
        plot("Waiting for data", waited, Axes("ms per step", zero=True), stages=bounds),
    ]
    return f"<div class=plots>{''.join(figures)}</div>"


def _table(
    title: str, heads: list[str], rows: list[list[str]], text: int, *, folded: bool = False
) -> list[PageSection]:
    """A table with text in the first `text` columns; with too many rows it keeps the newest and says so."""
    note = f"the newest {MAX_ROWS} of {len(rows):,}" if len(rows) > MAX_ROWS else ""
    shown = section.table(heads, rows[-MAX_ROWS:], range(text))
    return [PageSection(title, note, table=shown, folded=folded)] if rows else []


def _evaluations(run: RunHistory, used: dict[str, Any] | None, perplexity: bool) -> list[PageSection]:
    names = list(dict.fromkeys(name for row in run.evaluations for name in row["values"]))
    newest_best = {row["stage"]: index for index, row in enumerate(run.evaluations) if row["best"]}
    measures = ["loss", "perplexity"] if perplexity else ["loss"]
    heads = ["Stage", "Step", "Epoch", *map(_column, [*measures, *names]), "Targets", "Weights"]
    rows = [
        [
            row["stage"],
            f"{row['step']:,}",
            "" if row["epoch"] is None else str(row["epoch"]),
            *(_number(value) for value in (*map(row.get, measures), *map(row["values"].get, names))),
            f"{row['targets']:,}",
            ", ".join([IN_USE] * (row is used) + ["best of the stage"] * (newest_best.get(row["stage"]) == index)),
        ]
        for index, row in enumerate(run.evaluations)
    ]
    return _table("Held-out evaluations of the part valid", heads, rows, 1)


def _column(name: str) -> str:
    """Head of the column of a measure."""
    words = name.replace("_", " ")
    return words.upper() if words == "auroc" else words[:1].upper() + words[1:]


def _evaluation(folder: Path, family: FamilySection) -> list[PageSection]:
    """Draw the evaluation of a run, or describe what `unpad eval` would add."""
    try:
        evaluation = upgrade.evaluation(read_shaped(folder / EVALUATION, dict[str, Any]))
        *sections, last = family.draw(evaluation)
        return [*sections, replace(last, text=f"{last.text} {section.part_note(evaluation)}".strip())]
    except (UnpadError, OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError):
        # It is missing, damaged, or lacks what is drawn today, which the next evaluation writes.
        hint = f"unpad eval {folder.resolve().name} adds {family.adds}."
        return [PageSection(family.title, text=hint)] if family.adds else []


def _log(run: RunHistory) -> list[PageSection]:
    """Tables of time per activity, the environment, and all other events."""
    known = {entry["kind"]: entry for entry in run.log}
    timed = known.get("timers", {"rows": [], "after_step": None})
    timers = [[row["name"], f"{row['seconds']:,.1f}", f"{row['share']:.1%}"] for row in timed["rows"]]
    log = [entry for entry in run.log if entry["kind"] not in ("environment", "timers")]
    rows = [[_clock(entry["time"]), entry["kind"].replace("_", " "), _details(entry)] for entry in log]
    return [
        *_table("Where the time went" + _timed_part(timed, run), ["Part", "Seconds", "Share"], timers, 1, folded=True),
        *_table("Log", ["Time", "Entry", "Details"], rows, 3, folded=True),
        *_table("Environment", ["Name", "Value"], _pairs(known.get("environment", {})), 2, folded=True),
    ]


def _timed_part(timed: dict[str, Any], run: RunHistory) -> str:
    """The part of a resumed run that the times cover: its last process to finish, with its steps if known."""
    if not any(entry["kind"] == "resumed" for entry in run.log):
        return ""
    if timed["after_step"] is None:
        return " in its last process to finish"
    return f" in the process that {covered_steps(timed['after_step'], timed['step'])}"


def _clock(time: str) -> str:
    return datetime.fromisoformat(time).strftime("%Y-%m-%d %H:%M:%S")


def _pairs(entry: dict[str, Any]) -> list[list[str]]:
    def text(value: Any) -> str:
        if isinstance(value, float):
            return f"{value:.6g}"
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    return [[key, text(value)] for key, value in entry.items() if key not in ("time", "kind")]


def _details(entry: dict[str, Any]) -> str:
    """The entry's message, or its fields; nested ones, such as a ledger, are left to log.jsonl."""
    flat = {key: value for key, value in entry.items() if not isinstance(value, dict | list)}
    return entry.get("message") or " · ".join(f"{key.replace('_', ' ')} {value}" for key, value in _pairs(flat))


def _family(recipe: Recipe | None) -> FamilySection:
    """Section of the run's data family; none for a model of another version."""
    if recipe is None or recipe.model["kind"] not in model_kinds():
        return section.NO_SECTION
    return section.family_section(family_name(recipe))


def write_report(folder: Path) -> Path:
    """Write `report.html` from the run's files and return its path.

    Raises:
        SourceError: a file is missing or damaged, or no step has been taken yet.
        DiskError: the page cannot be written.
    """
    run = read_history(folder)
    family = _family(run.recipe)
    limit = None if run.recipe is None else run.recipe.train.grad_norm_warning
    used = run.check_of(samples.weights_step(folder))
    sections = [
        *(one for kind, rows in run.readings.items() for one in section.readings_section(kind, rows, run.recipe)),
        *_evaluations(run, used, family.perplexity),
        *_evaluation(folder, family),
        *samples.draw(folder),
        *shown.draw(folder),
        *_log(run),
    ]
    name, state = escape(folder.resolve().name), run_state(folder, run.log)
    stages = " → ".join(escape(stage) for stage, _ in run.stage_starts)
    written = f"written {datetime.now():%Y-%m-%d %H:%M:%S}"
    started = f"started {_clock(run.log[0]['time'])} · " if run.log else ""
    evaluated, old = samples.newest_evaluation(folder), samples.old_notes(folder)
    judged = [] if evaluated is None or old else [one.get("sentence") for one in evaluated["metrics"].values()]
    beside = [f"{one[0].upper()}{one[1:]}." for one in judged if one]
    more = "train.max_epochs" if state == "finished" else resume_run(folder)
    judgement = escape(" ".join([*beside, _judgement(run, used, more)])) if state in ENDINGS else ""
    recipe = escape(run.recipe_text) or "There is no recipe.yaml in this run directory."
    body = f"""<header>
<h1>{name}</h1><span class="state {state}">{state}</span><p>{stages} · {started}{written}</p></header>
{"".join(f"<p class=gap>{escape(gap)}</p>" for gap in (*run.gaps, *old))}
{f"<p class=judgement>{judgement}</p>" if judgement else ""}
<div class=tiles>{_tiles(run, family, used, evaluated)}</div>
{_plots(run, limit, family)}
{"".join(one.html() for one in sections)}
<details><summary>Recipe</summary><div class=box><pre>{recipe}</pre></div></details>
"""
    path = folder / "report.html"
    storage.write_atomic(path, section.document(name, shown.STYLE, body), private=family.private)
    return path
