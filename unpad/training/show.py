"""Sequences as training reads them, for `unpad data show` and the page of a run."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from rich.text import Text

from unpad.batching.plan import SPAN, Micro, plan
from unpad.data.family import Data, family_of, find_in_all, open_data
from unpad.data.show import COLOUR, LEARNT, Shown
from unpad.data.sources.example import NOT_READ, place_of
from unpad.data.sources.split import PARTS, Split, Wanted
from unpad.errors import RecipeError, SourceError
from unpad.interchange.origin import open_named, starting_files
from unpad.models import model_config
from unpad.recipes.recipe import Recipe, stages_of
from unpad.recipes.training import PlanSettings
from unpad.run.kept import open_files
from unpad.run.report.shown import keep_shown
from unpad.terminal.printing import escaped
from unpad.terminal.table import number_of
from unpad.training.setup import Setup, resolved
from unpad.training.stage import StageSetup, make_stage, plan_inputs

KEPT = 10  # sequences of each stage that a run keeps
SPARE = 20  # sequences that are cut for each that is shown, as a plan may leave some out
Piece = tuple[int, int, int, int]  # sequence, start, stop, first target
PlanInputs = tuple[np.ndarray, PlanSettings, dict[str, Any]]  # as of `plan_inputs`
ONE_STEP = {"strategy": "pack", "tokens_per_micro": 1 << 30, "tokens_per_step": 1 << 30, "grow": {}, "drop_last": False}


@dataclass(frozen=True)
class Showing:
    """Sequences that are shown.

    Args:
        title: what they are; private: whether they are about people; unread: a line on fields that nobody reads.
    """

    sequences: list[Shown]
    title: str
    private: bool
    unread: Sequence[str]

    def lines(self, *, coloured: bool, whole: bool) -> Iterator[tuple[int, Text]]:
        """Lines for a terminal, each with its indentation; arguments as of `Shown.lines`."""
        marks = f"; learnt tokens are {COLOUR if coloured else ' '.join(LEARNT)}"
        has_text, has_pictures = (any(getattr(one, name) for one in self.sequences) for name in ("spans", "pictures"))
        pictures = "; --html FILE shows the pictures" if has_pictures else ""
        title = f"{self.title}{marks if has_text else ''}{pictures}"
        yield from ((0, Text(escaped(line))) for line in (title, *self.unread))
        for one in self.sequences:
            yield from [(0, Text()), *one.lines(coloured=coloured, whole=whole)]


def show(name: str, overrides: Sequence[str], num: int, row: str | None = None, note: str = "") -> Showing:
    """The first sequences that a recipe or run trains on, or those of one row.

    Args:
        num: most of each stage.
        row: FILE:LINE, or LINE of the only file; the file of a picture; a patient. Any part of the data.
        note: above them.

    Raises:
        RecipeError, SourceError, CheckpointError: it cannot be opened, or there is no such row.
    """
    opened, folder = open_named(name, overrides, f"show yours: unpad data show {name} data.KIND=FILE")
    if row is not None:  # whatever is wrong with others
        lenient = opened.data.model_copy(update={"on_bad_row": "quarantine", "max_bad": 1.0})
        opened = opened.model_copy(update={"data": lenient})
    recipe, start = resolved(opened), opened.train.init_from
    kept = open_files(recipe, folder) if folder else starting_files(recipe, start) if start else None
    data = open_data(recipe, kept, compare=False)
    unit, total = data.unit or family_of(recipe).UNITS[0], int((data.table.split == Split.TRAIN).sum())
    unread = [line for line in data.lines() if line.startswith(NOT_READ)]
    if row is not None:
        sequences = list(_of_row(recipe, kept, data, _with_file(data, row)))
        return Showing(sequences, note + number_of(len(sequences), unit), data.private, unread)
    shown = first_sequences(_stages(recipe, data), num)
    pieces = "" if len({piece[0] for piece in shown}) == len(shown) else " pieces"
    of = "" if len(shown) == total and not pieces else f"the first {len(shown):,}{pieces} of "
    return Showing([*shown.values()], f"{note}{of}{number_of(total, unit)} to train on", data.private, unread)


def keep_first(setup: Setup) -> None:
    """Write the first sequences of a run into it; none where one cannot be read, as its step will say."""
    with suppress(SourceError, MemoryError):
        keep_shown(setup.folder, [one.to_json() for one in first_sequences(setup.stages, KEPT).values()])


def _stages(recipe: Recipe, data: Data) -> list[StageSetup]:
    return [make_stage(stage, data, model_config(recipe.model).longest) for stage in stages_of(recipe)]


def _with_file(data: Data, row: str) -> str:
    """A row with its file, which may be left out where there is one; the number of a patient is an id."""
    if not row.isdigit() or data.private:
        return row
    files = list(dict.fromkeys(place_of(where).file for where, _ in data.placed()))
    if len(files) != 1:
        what = f"the data has {len(files):,} files, and --row names none of them"
        raise RecipeError(what, where=f"--row {row}", fix=f"name it: --row {files[0]}:{row}")
    return f"{files[0]}:{row}"


def first_sequences(stages: Sequence[StageSetup], num: int) -> dict[Piece, Shown]:
    """The first `num` sequences of each stage, or pieces of them, in the order of the files, each once."""
    shown: dict[Piece, Shown] = {}
    for stage in stages:
        inputs = plan_inputs(stage, 0)
        ids, bundles = inputs[2]["seq_ids"], inputs[2]["bundles"]
        if bundles is not None:
            ids = ids[np.argsort(bundles[ids], kind="stable")]
        once = np.array(list(dict.fromkeys(ids[: num * SPARE].tolist())), np.int64)
        pieces = _pieces(stage, inputs, once)[:num]
        if pieces:
            stage.data.load(_micro(stage, [piece for piece, _ in pieces]))  # pictures are decoded at once, and cached
        shown |= {piece: _shown(stage, stages, piece, facts) for piece, facts in pieces if piece not in shown}
    return shown


def _of_row(recipe: Recipe, kept: dict[str, bytes] | None, data: Data, given: str) -> Iterator[Shown]:
    """The pieces that hold a row, in the first stage that reads it; or all of it where a plan leaves it out."""
    data, row = find_in_all(data, given, lambda: open_data(recipe, kept, Wanted.TEST, compare=False))
    if not row.parts:
        raise SourceError(row.remark, where=row.where, fix="`unpad data check` names every row that is left out")
    stages = _stages(recipe, data)
    for seq_id, begin, end in row.parts:
        kind = data.kinds[int(data.table.kind[seq_id])]
        stage = next(one for one in stages if kind in one.kinds or one is stages[-1])
        pieces = _pieces(stage, plan_inputs(stage, 0), np.array([seq_id]))
        for piece, facts in pieces:
            if piece[1] == piece[2] or (piece[1] < end and piece[2] > begin):
                yield _shown(stage, stages, piece, facts)
        if not pieces:
            longer = "what is longer is dropped (plan.overflow=drop)"
            why = f"in no step: {longer if data.table.num_targets[seq_id] else 'none of it is learnt'}"
            yield _shown(stage, stages, (seq_id, 0, int(data.table.positions[seq_id]), 0), [why])


def _pieces(stage: StageSetup, inputs: PlanInputs, seq_ids: np.ndarray) -> list[tuple[Piece, list[str]]]:
    """Pieces of sequences, (n,) int64, as the plan of the first epoch cuts them, and what is to be said of the cut."""
    lengths, settings, known = inputs
    planned = plan(lengths, settings.model_copy(update=ONE_STEP), epoch=0, **{**known, "seq_ids": seq_ids}).pieces
    pieces: list[Piece] = list(zip(*(getattr(planned, name).tolist() for name in SPAN), strict=True))
    unit, found = family_of(stage.recipe).UNITS[1], list[tuple[Piece, list[str]]]()
    for piece in pieces:
        (seq_id, start, stop, first_target), facts = piece, list[str]()
        length = int(lengths[seq_id])
        if stop - start < length and settings.overflow == "split":
            of = [one for one in pieces if one[0] == seq_id]
            facts.append(f"piece {of.index(piece) + 1} of {len(of)}: {unit} {start + 1:,} to {stop:,} of {length:,}")
        elif stop - start < length:
            at = f"after {stop:,}" if stop < length else f"before {start + 1:,}"
            why = f"plan.overflow={settings.overflow}"
            facts.append(f"cut: {length - stop + start:,} of {length:,} {unit}, {at} ({why})")
        if first_target > start:
            facts.append(f"the first {first_target - start:,} {unit} are repeated, as context")
        found.append((piece, facts))
    return found


def _micro(stage: StageSetup, pieces: Sequence[Piece]) -> Micro:
    """Pieces as a micro-batch of the first epoch."""
    seq_ids, starts, stops, first_target = np.array(pieces).T
    return Micro(seq_ids, starts, stops, first_target, 0, 0, (stage.recipe.train.seed, 0))


def _shown(stage: StageSetup, stages: Sequence[StageSetup], piece: Piece, facts: Sequence[str]) -> Shown:
    """A piece as the model gets it in the first epoch, with more facts."""
    data, named = stage.data, [f"stage {stage.name}"] if len(stages) > 1 else []
    one, rows, part = data.show(_micro(stage, [piece])), data.row_spans(*piece), Split(int(data.table.split[piece[0]]))
    where = rows[0].where if len(rows) < 2 else f"{rows[0].where} to {rows[-1].where}"
    held = [] if part is Split.TRAIN else [f"{PARTS[part]}: held out, never learnt"]
    return replace(one, where=where, facts=(*named, *facts, *held, *one.facts))
