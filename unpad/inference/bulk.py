"""Files answered in bulk: rows are asked as others end, and their answers written in the order of the file.

The file of answers is continued where it stops, so a command that was ended is run again. Each line says by which run
and settings it was made; lines of others are not continued.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

from unpad.batching.batch import RaggedBatch
from unpad.data.sources.example import BadRow
from unpad.data.sources.faults import FIXES, RowFault
from unpad.data.sources.reader import reading
from unpad.errors import Interrupted, RecipeError, RunInUseError
from unpad.inference.engine import Engine, Request
from unpad.inference.generate import ROWS
from unpad.inference.heard import Heard
from unpad.inference.loaded import LoadedRun
from unpad.nn.precision import Precision
from unpad.recipes.training import GenerateSettings
from unpad.run.folder import run_id
from unpad.storage import LineLog
from unpad.storage.disk import disk_errors
from unpad.storage.strict_json import json_object
from unpad.terminal.progress import progress
from unpad.terminal.table import number_of

BEGIN = b'{"line": '  # of every line of answers
AHEAD = 2 * ROWS  # rows that are asked before the first of them is written, so that a free place is taken at once
FAULT = "fault"  # field of a line that has no answer


class BulkRow(Protocol):
    """A row of a file; `given` are fields of it that its answer repeats, by which the answer is known again."""

    @property
    def line(self) -> int: ...

    @property
    def given(self) -> Mapping[str, Any]: ...

    def ask(self) -> Request:
        """The request to the engine.

        Raises:
            RowFault: nothing can be asked; the fault is written in the place of an answer.
        """
        ...

    def told(self, heard: Heard) -> dict[str, Any]:
        """Fields of its answer."""
        ...


@dataclass(frozen=True)
class Bulk:
    """A file to be answered.

    Args:
        made_by: digest of all that an answer depends on besides its row.
        rows: the file's, in order; num_rows: how many; unit: what they are, plural.
        most_tokens: of prompts in the engine at once; None for as many as it has rows for.
    """

    path: Path
    made_by: str
    rows: Iterator[BulkRow]
    num_rows: int
    unit: str
    most_tokens: int | None = None


@dataclass(frozen=True)
class Written:
    """Lines of a file of answers: `before`, those that it had already; `faults`, those without an answer."""

    before: int
    faults: int


def fault_text(fault: RowFault) -> str:
    """A fault as a line of answers has it."""
    return f"{fault.code} {fault.what}; {fault.fix}"


def remedy(fault: RowFault | BadRow, example: str) -> str:
    """Remedy of a fault of a row; an example where it would be a setting of a recipe's sources."""
    is_setting = fault.fix == FIXES["E_MISSING"] or "set format:" in fault.fix
    return example if is_setting else fault.fix


def digest_of(run: LoadedRun, settings: GenerateSettings, precision: Precision, *more: Any) -> str:
    """Digest of a run and settings, for `made_by`."""
    parts = [run_id(run.folder), run.step, precision, settings.model_dump(mode="json"), *more]
    return blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=8).hexdigest()


def answer_rows(bulk: Bulk, engine: Engine, out: Path) -> Written:
    """Write a JSON line for each row, after those that such a command wrote before.

    Raises:
        RecipeError: the file has lines of another run, of other settings or rows, or it is no such file.
        RunInUseError: another command writes it.
        DiskError: it cannot be written.
        Interrupted: by Ctrl-C; what is written stays.
    """
    with _alone(out):
        done, faults = _answered(out, bulk)
        before, log = done, LineLog(out)
        try:
            with progress(f"answering {bulk.path.name}", bulk.num_rows, bulk.unit) as bar:
                bar.begin_at(done)
                for answer in _answers(bulk, engine):
                    log.append(answer | {"made_by": bulk.made_by})
                    done, faults = done + 1, faults + bool(answer.get(FAULT))
                    bar.advance()
            log.sync()
        except KeyboardInterrupt:
            what = f"stopped by Ctrl-C; {done:,} of {number_of(bulk.num_rows, bulk.unit)} are answered"
            fix = "give the same command again, which goes on behind them"
            raise Interrupted(what, where=str(out), fix=fix) from None
        finally:
            log.close()
    return Written(before, faults)


def summary(bulk: Bulk, written: Written, out: Path) -> str:
    """The line that says what was done."""
    faults = f", {written.faults:,} with a fault" if written.faults else ""
    before = f", {written.before:,} of them before" if written.before else ""
    return f"{number_of(bulk.num_rows - written.faults, bulk.unit)} answered{faults}{before}: {out}"


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Keep other commands from writing the same answers.

    Raises:
        RunInUseError: one does.
    """
    with disk_errors(out):
        file = out.open("ab")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fix = "wait until it has ended, or name another file with --out"
            raise RunInUseError("another command writes these answers", where=str(out), fix=fix) from None
        yield


def _answered(out: Path, bulk: Bulk) -> tuple[int, int]:
    """Take the rows that a file has lines of; the number of them, and of those without an answer.

    Raises:
        RecipeError: it has something else.
    """
    done = faults = 0
    with reading(out), out.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n") and line.startswith(BEGIN[: len(line)]):
                break  # cut by the end of the earlier command
            answer, row = json_object(line), next(bulk.rows, None)
            known = {} if row is None else {"line": row.line, **row.given, "made_by": bulk.made_by}
            if answer is None or not known or known != {name: answer.get(name) for name in known}:
                what = "the file has lines that this run with these settings did not make of these rows"
                raise RecipeError(what, where=f"{out}:{number}", fix="name another file with --out")
            done, faults = number, faults + bool(answer.get(FAULT))
    return done, faults


@dataclass
class _Open:
    """A row that was asked, or cannot be; `fault`: why."""

    row: BulkRow
    num_tokens: int = 0
    fault: str = ""
    heard: Heard = field(default_factory=Heard)

    @property
    def is_done(self) -> bool:
        return bool(self.fault or self.heard.reasons)

    def line(self) -> dict[str, Any]:
        said = {FAULT: self.fault} if self.fault else self.row.told(self.heard)
        return {"line": self.row.line, **self.row.given, **said}


def _answers(bulk: Bulk, engine: Engine) -> Iterator[dict[str, Any]]:
    """Yield answers in the order of the rows."""
    asked: list[_Open] = []
    row = next(bulk.rows, None)
    while row is not None or asked:
        while row is not None and len(asked) < AHEAD and _has_room(bulk, asked):
            asked.append(_ask(row, engine))
            row = next(bulk.rows, None)
        engine.turn()
        while asked and asked[0].is_done:
            yield asked.pop(0).line()


def _has_room(bulk: Bulk, asked: list[_Open]) -> bool:
    return bulk.most_tokens is None or sum(one.num_tokens for one in asked if not one.is_done) < bulk.most_tokens


def _ask(row: BulkRow, engine: Engine) -> _Open:
    made = _Open(row)
    try:
        request = row.ask()
    except RowFault as fault:
        made.fault = fault_text(fault)
        return made
    prompt = request.prompt
    made.num_tokens = prompt.total_tokens if isinstance(prompt, RaggedBatch) else len(prompt)
    engine.submit(request, made.heard)
    return made
