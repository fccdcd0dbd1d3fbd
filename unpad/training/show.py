"""Sequences as training reads them, for `unpad data show` and the page of a run."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
from rich.text import Text

from unpad.batching.plan import Micro, plan
from unpad.data.family import Data, family_of, open_data
from unpad.data.find import find, no_such_row
from unpad.data.show import COLOUR, LEARNT, Shown
from unpad.data.sources.example import place_of
from unpad.data.sources.split import PARTS, Split, Wanted
from unpad.errors import RecipeError, SourceError
from unpad.interchange.origin import open_named, starting_files
from unpad.models import model_config
from unpad.recipes.recipe import Recipe, stages_of
from unpad.run.kept import open_files
from unpad.run.report.shown import keep_shown
from unpad.terminal.printing import escaped
from unpad.terminal.table import number_of
from unpad.training.setup import Setup, resolved
from unpad.training.stage import StageSetup, make_stage, plan_inputs

KEPT = 10  # sequences of each stage that a run keeps
SPARE = 20  # sequences that are cut for each that is shown, as a plan may leave some out
ONE_STEP = {"strategy": "pack", "tokens_per_micro": 1 << 30, "tokens_per_step": 1 << 30, "grow": {}, "drop_last": False}


@dataclass(frozen=True)
class Showing:
    """Sequences that are shown.

    Args:
        title: what they are; private: whether they are about people.
    """

    sequences: list[Shown]
    title: str
    private: bool

    def lines(self, *, coloured: bool, whole: bool) -> Iterator[tuple[int, Text]]:
        """Lines for a terminal, each with its indentation; arguments as of `Shown.lines`."""
        marks = f"; learnt tokens are {COLOUR if coloured else ' '.join(LEARNT)}"
        has_text, has_pictures = (any(getattr(one, name) for one in self.sequences) for name in ("spans", "pictures"))
        pictures = "; --html FILE shows the pictures" if has_pictures else ""
        yield 0, Text(escaped(f"{self.title}{marks if has_text else ''}{pictures}"))
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
    recipe, start = resolved(opened), opened.train.init_from
    kept = open_files(recipe, folder) if folder else starting_files(recipe, start) if start else None
    data = open_data(recipe, kept, compare=False)
    unit, total = data.unit or family_of(recipe).UNITS[0], int((data.table.split == Split.TRAIN).sum())
    if row is not None:
        sequences = list(_of_row(recipe, kept, data, _with_file(data, row)))
        return Showing(sequences, note + number_of(len(sequences), unit), data.private)
    sequences = first_sequences(_stages(recipe, data), num)
    first = f"all {total:,}" if len(sequences) == total else f"the first {len(sequences):,} of {total:,}"
    return Showing(sequences, f"{note}{first} {unit} to train on", data.private)


def keep_first(setup: Setup) -> None:
    """Write the first sequences of a new run into it; none where one cannot be read, as its step will say."""
    with suppress(SourceError):
        sequences = [one.to_json() for one in first_sequences(setup.stages, KEPT)]
        keep_shown(setup.folder, sequences, private=setup.data.private)


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


def first_sequences(stages: Sequence[StageSetup], num: int) -> list[Shown]:
    """The first `num` sequences of each stage in the order of the files, each once."""
    shown: dict[tuple[int, ...], Shown] = {}
    for stage in stages:
        ids, bundle = np.unique(plan_inputs(stage, 0)[2]["seq_ids"]), stage.data.table.bundle
        if stage.of_pairs and bundle is not None:
            ids = ids[np.argsort(bundle[ids], kind="stable")]
        for number, (piece, one) in enumerate(_pieces(stage, ids[: num * SPARE])):
            if number == num:
                break
            shown.setdefault(piece, _of_stage(one, stage, stages))
    return list(shown.values())


def _of_row(recipe: Recipe, kept: dict[str, bytes] | None, data: Data, given: str) -> Iterator[Shown]:
    """The pieces that hold a row, in the first stage that reads it; or all of it where a plan leaves it out."""
    row = find(data, given)
    if data.table.num_test and not (row and row.parts):
        tested = open_data(recipe, kept, Wanted.TEST, compare=False)
        if (of_test := find(tested, given)) is not None and of_test.parts:
            data, row = tested, of_test
    if row is None:
        raise no_such_row(data, given)
    if not row.parts:
        raise SourceError(row.remark, where=row.where, fix="`unpad data check` names every row that is left out")
    stages = _stages(recipe, data)
    for seq_id, begin, end in row.parts:
        kind = data.kinds[int(data.table.kind[seq_id])]
        stage = next(one for one in stages if kind in one.kinds or one is stages[-1])
        pieces = list(_pieces(stage, np.array([seq_id])))
        for (_, start, stop, _), one in pieces:
            if start == stop or (start < end and stop > begin):
                yield _of_stage(one, stage, stages)
        if not pieces:
            longer = "what is longer is dropped (plan.overflow=drop)"
            why = f"in no step: {longer if data.table.num_targets[seq_id] else 'none of it is learnt'}"
            one = _shown(stage, (seq_id, 0, int(data.table.positions[seq_id]), 0))
            yield replace(one, facts=(why, *one.facts))


def _of_stage(one: Shown, stage: StageSetup, stages: Sequence[StageSetup]) -> Shown:
    return replace(one, facts=(f"stage {stage.name}", *one.facts)) if len(stages) > 1 else one


Piece = tuple[int, int, int, int]  # sequence, start, stop, first target


def _pieces(stage: StageSetup, seq_ids: np.ndarray) -> Iterator[tuple[Piece, Shown]]:
    """Pieces of sequences, (n,) int64, as the plan of the first epoch cuts them."""
    lengths, settings, known = plan_inputs(stage, 0)
    whole, unit = settings.model_copy(update=ONE_STEP), family_of(stage.recipe).UNITS[1]
    pieces = plan(lengths, whole, epoch=0, **{**known, "seq_ids": seq_ids}).pieces
    columns = (pieces.seq_ids, pieces.starts, pieces.stops, pieces.first_target)
    each: list[Piece] = list(zip(*(column.tolist() for column in columns), strict=True))
    for piece in each:
        seq_id, start, stop, first_target = piece
        length, facts = int(lengths[seq_id]), list[str]()
        if stop - start < length and settings.overflow == "split":
            of = [one for one in each if one[0] == seq_id]
            facts.append(f"piece {of.index(piece) + 1} of {len(of)}: {unit} {start + 1:,} to {stop:,} of {length:,}")
        elif stop - start < length:
            at = f"after {stop:,}" if stop < length else f"before {start + 1:,}"
            facts.append(
                f"cut: {length - stop + start:,} of {length:,} {unit}, {at} (plan.overflow={settings.overflow})"
            )
        if first_target > start:
            facts.append(f"the first {first_target - start:,} {unit} are repeated, as context")
        one = _shown(stage, piece)
        yield piece, replace(one, facts=(*facts, *one.facts))


def _shown(stage: StageSetup, piece: Piece) -> Shown:
    """A piece as the model gets it in the first epoch."""
    data = stage.data
    seq_id, start, stop, first_target = (np.array([value]) for value in piece)
    one = data.show(Micro(seq_id, start, stop, first_target, 0, 0, (stage.recipe.train.seed, 0)))
    rows = data.row_spans(*piece)
    where = rows[0].where if len(rows) < 2 else f"{rows[0].where} to {rows[-1].where}"
    part = Split(int(data.table.split[piece[0]]))
    held = () if part is Split.TRAIN else (f"{PARTS[part]}: held out, never learnt",)
    return replace(one, where=where or one.where, facts=(*held, *one.facts))
