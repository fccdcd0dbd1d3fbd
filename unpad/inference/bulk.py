"""`unpad generate --file` and `unpad infer --file`: all rows of a file answered, in its order.

Rows are asked as others end. The file of answers is continued where it stops, so a command that was ended is run
again. Each line says by which run and settings it was made; lines of others are not continued.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

from unpad.batching.batch import RaggedBatch
from unpad.data.pictures.album import seen_pictures
from unpad.data.sources.chat import messages_of, refuse_order
from unpad.data.sources.example import BadRow, place_of
from unpad.data.sources.faults import FIXES, RowFault, missing
from unpad.data.sources.files import FORMATS, SourceFile
from unpad.data.sources.images import ImageExample
from unpad.data.sources.json_rows import read_lines
from unpad.data.sources.reader import read, reading
from unpad.data.sources.row import Row
from unpad.data.sources.vqa import asked
from unpad.data.tokens.encode import encode_prompt
from unpad.data.vqa import question_about_all
from unpad.errors import Interrupted, RecipeError, RunInUseError, SourceError
from unpad.inference.engine import Collected, Engine, Request, check, token_lists
from unpad.inference.generate import PIECE, ROWS, Continuing
from unpad.inference.images import check_asks, examine_image, greedy
from unpad.inference.loaded import LoadedRun, generation_precision
from unpad.inference.prompts import Prompt, Reply, check_system, lost_of, reads_chat
from unpad.nn.precision import Precision
from unpad.recipes.training import GenerateSettings
from unpad.run.folder import run_id
from unpad.storage import LineLog
from unpad.storage.disk import disk_errors
from unpad.storage.reading import json_object
from unpad.terminal.progress import held, progress
from unpad.terminal.table import number_of

BEGIN = b'{"line": '  # of every line of answers
AHEAD = 2 * ROWS  # rows that are asked before the first of them is written, so that a free place is taken at once
FAULT = "fault"  # field of a line that has no answer
PROMPT_FIELDS = ("prompt", "system", "messages", "id")

Report = Callable[[Collected], dict[str, Any]]  # fields of an answer
Ask = Callable[[], tuple[Request, Report]]


@dataclass(frozen=True)
class BulkRow:
    """A row of a file.

    Args:
        given: fields that its answer repeats, by which the answer is known again.
        ask: the request to the engine, and what reports its answer; or RowFault, written in the place of an answer.
        fault: what is wrong with a row that cannot be asked.
    """

    line: int
    given: dict[str, Any]
    ask: Ask
    fault: RowFault | None = None

    @staticmethod
    def bad(line: int, given: dict[str, Any], fault: RowFault, example: str) -> BulkRow:
        """A row that cannot be asked; its remedy is an example where it would be a setting of a recipe's sources."""
        is_setting = fault.fix == FIXES["E_MISSING"] or "set format:" in fault.fix
        fault = RowFault(fault.code, fault.what, example if is_setting else fault.fix)

        def ask() -> tuple[Request, Report]:
            raise fault

        return BulkRow(line, given | {FAULT: _text(fault)}, ask, fault)

    def error(self, path: Path) -> SourceError:
        """The fault as the error of a file."""
        assert self.fault is not None, "a row that cannot be asked"
        return SourceError(f"{self.fault.code}: {self.fault.what}", where=f"{path}:{self.line}", fix=self.fault.fix)


def _text(fault: RowFault) -> str:
    """A fault as a line of answers has it."""
    return f"{fault.code} {fault.what}; {fault.fix}"


@dataclass(frozen=True)
class Bulk:
    """A file to be answered.

    Args:
        unit: what its rows are, plural; example: advice on a file without any.
        rows: reads the rows, in order.
        made_by: digest of all that an answer depends on besides its row.
        most_tokens: of prompts in the engine at once; None for as many as it has rows for.
    """

    path: Path
    unit: str
    example: str
    rows: Callable[[], Iterator[BulkRow]]
    engine: Engine
    made_by: str
    most_tokens: int | None = None


@dataclass(frozen=True)
class Written:
    """Lines of a file of answers.

    Args:
        summary: what was done, for the terminal.
        before: lines that it had already; faults: those without an answer.
    """

    summary: str
    before: int
    faults: int


def answer_prompts(run: LoadedRun, path: Path, out: Path, *, same_seed: bool = False) -> Written:
    """Answer all prompts of a file of JSON lines, each with `prompt`, or `messages` up to a user's.

    Every prompt draws with the next seed, as with `unpad generate`.

    Args:
        out: gets a JSON line for each prompt; one that such a command began is continued.
        same_seed: whether all draw with the seed of the settings.

    Raises:
        SourceError: a row is no prompt; nothing was written.
        UnpadError: as `answer_rows`.
    """
    settings, where = run.recipe.generate, "generate.beams"
    if settings.beams > 1:
        raise RecipeError("a file is answered without beams", where=where, fix="give beams=1")
    example, precision = 'write JSON lines such as {"prompt": "..."}', generation_precision(settings)

    def ask(number: int, row: Row) -> tuple[dict[str, Any], Ask]:
        try:
            prompt = _prompt(run, row)
            check(run.generator, [prompt.ids], settings)
        except RecipeError as error:
            raise SourceError(error.what, where=row.where, fix=error.fix) from None
        seed = settings.seed + (0 if same_seed else number)
        return {"prompt": prompt.text}, partial(_ask_prompt, run, prompt, settings.model_copy(update={"seed": seed}))

    def prompts() -> Iterator[BulkRow]:
        for row in _rows(path, read_lines(path), example, ("id",), ask):
            if row.fault is not None:
                raise row.error(path)
            yield row

    engine = Engine(run.generator, precision=precision, piece=PIECE, rows=ROWS)
    made_by = digest_of(run, settings, precision, same_seed)
    return answer_rows(Bulk(path, "prompts", example, prompts, engine, made_by), out)


def _prompt(run: LoadedRun, row: Row) -> Prompt:
    """The prompt of a row.

    Raises:
        RowFault: the row has none.
        RecipeError: the run has no place for a system text.
    """
    if unknown := [name for name in row.names if name not in PROMPT_FIELDS]:
        fix = f"leave it out; a row has {', '.join(PROMPT_FIELDS)}, and settings are of the command"
        raise RowFault("E_TYPE", f"unknown field {json.dumps(unknown[0], ensure_ascii=False)}", fix)
    if "messages" in row and ("prompt" in row or "system" in row):
        raise RowFault("E_TYPE", '"messages" stand beside "prompt" or "system"', "give one of them")
    if "messages" not in row:
        if "prompt" not in row:
            raise missing(("prompt", "messages"), row.names)
        system = row.text("system") if row.get("system") else ""
        return run.prompt(row.text("prompt"), system)
    turns = messages_of(row["messages"], '"messages"')
    if not reads_chat(run.recipe, run.tokenizer):
        raise RowFault("E_TYPE", "the run was trained on no conversations", 'give it rows with "prompt"')
    refuse_order([turn.role for turn in turns])
    if not turns or turns[-1].role != "user":
        raise RowFault("E_ROLE", "the last message is not of the user", "end with the user's message")
    system = turns[0].content if turns[0].role == "system" else ""
    check_system(run.recipe, run.tokenizer, system)
    ids = encode_prompt(turns, run.tokenizer, run.recipe.data.template)
    return Prompt(turns[-1].content, system, ids, lost_of(run.tokenizer, [turn.content for turn in turns]))


def _ask_prompt(run: LoadedRun, prompt: Prompt, settings: GenerateSettings) -> tuple[Request, Report]:
    def report(answer: Collected) -> dict[str, Any]:
        ids = answer.tokens()
        return Reply(prompt, run.tokenizer.decode(ids), len(ids), answer.finished(), settings.seed).to_json()

    return Continuing.of(run.generator, run.tokenizer, settings).request(prompt.ids), report


def answer_questions(run: LoadedRun, path: Path, out: Path) -> Written:
    """Answer all questions of a table, JSON lines or CSV, as `ask` does each: greedily and in fp32.

    A row has `image`, `question` and perhaps `id`, as `data.vqa` reads them; other fields are left alone. One that
    cannot be answered is written with its fault, and the others go on.

    Args:
        out: gets a JSON line for each row; one that such a command began is continued.

    Raises:
        RecipeError: the run answers no questions about images.
        SourceError: no row of the table has a question; nothing was written.
        UnpadError: as `answer_rows`.
    """
    check_asks(run)
    example = 'write rows such as {"image": "cat.png", "question": "Which animal?"}, or a CSV with these columns'
    is_csv = FORMATS.get(path.suffix.lower()) == "csv"
    table = SourceFile(path, "csv" if is_csv else "jsonl", None, 1.0, 0)

    def ask(number: int, row: Row) -> tuple[dict[str, Any], Ask]:
        paths, question = asked(path.parent, row)
        return {"question": question}, partial(_ask_question, run, path.parent, paths, question)

    def questions() -> Iterator[BulkRow]:
        rows = read(table, run.recipe.data, ("image",), ("question", "caption", "id"))
        return _rows(path, rows, example, ("id", "image"), ask)

    engine = Engine(run.generator, piece=PIECE, rows=ROWS, keeps=False)
    made_by, most_tokens = digest_of(run, greedy(run), "fp32"), run.recipe.plan.tokens_per_micro
    return answer_rows(Bulk(path, "questions", example, questions, engine, made_by, most_tokens), out)


def _ask_question(run: LoadedRun, folder: Path, paths: Sequence[Path], question: str) -> tuple[Request, Report]:
    """Look at the images of a question in a folder, which must contain them."""
    images: list[ImageExample] = []
    for image in (examine_image(run, path, root=os.path.realpath(folder)) for path in paths):
        if isinstance(image, BadRow):
            raise RowFault(image.code, image.what, image.fix)
        images.append(image)
    with held():  # the work on one row is no progress of its own
        batch = question_about_all(run.recipe, run.tokenizer, images, question).prompts([0])
    try:
        check(run.generator, token_lists(batch), greedy(run))
    except RecipeError as error:
        raise RowFault("E_CONTEXT", error.what, "shorten the question, or use smaller images") from None

    def report(answer: Collected) -> dict[str, Any]:
        """The fields of `unpad infer --json`, and the number of tokens and the reason of the end."""
        ids, seen = answer.tokens(), seen_pictures(run.files)
        marks = [seen.mark(one.mode, (one.width, one.height)) for one in images] if seen is not None else []
        return {
            "answer": run.tokenizer.decode(ids),
            "tokens": len(ids),
            "finished": answer.finished(),
            "unknown_characters": lost_of(run.tokenizer, [question]).lost,
            FAULT: "",
            "notes": list(dict.fromkeys(note for one in images for note in one.notes)),
            "mark": "; ".join(filter(None, dict.fromkeys(marks))),
        }

    return Continuing.of(run.generator, run.tokenizer, greedy(run)).request(batch), report


# --------------------------------------------------------------------------- rows of files


def _rows(
    path: Path,
    rows: Iterable[Row | BadRow],
    example: str,
    repeated: Sequence[str],
    ask: Callable[[int, Row], tuple[dict[str, Any], Ask]],
) -> Iterator[BulkRow]:
    """Yield the rows of a file.

    Args:
        repeated: fields that answers repeat as they are.
        ask: from the number of the row and the row: further fields that its answer repeats, and its request; or
            RowFault.
    """
    with reading(path):
        for number, row in enumerate(rows):
            line = _line(row.where)
            if isinstance(row, BadRow):
                yield BulkRow.bad(line, {}, RowFault(row.code, row.what, row.fix), example)
                continue
            given = {name: row[name] for name in repeated if row.get(name) is not None}
            try:
                more, request = ask(number, row)
            except RowFault as fault:
                yield BulkRow.bad(line, given, fault, example)
            else:
                yield BulkRow(line, given | more, request)


def _line(where: str) -> int:
    line = place_of(where).line
    assert line is not None, "rows of lines"
    return line


# --------------------------------------------------------------------------- answers


def digest_of(run: LoadedRun, settings: GenerateSettings, precision: Precision, *more: Any) -> str:
    """Digest of a run and settings, for `made_by`."""
    parts = [run_id(run.folder), run.step, precision, settings.model_dump(mode="json"), *more]
    return blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=8).hexdigest()


def answer_rows(bulk: Bulk, out: Path) -> Written:
    """Write a JSON line for each row, after those that such a command wrote before.

    Raises:
        SourceError: no row of the file can be asked; nothing was written.
        RecipeError: the file has lines of another run, of other settings or rows, or it is no such file.
        RunInUseError: another command writes it.
        DiskError: it cannot be written.
        Interrupted: by Ctrl-C; what is written stays.
    """
    num_rows = _checked(bulk)
    with _alone(out):
        left = bulk.rows()
        done, faults = _answered(out, bulk, left)
        before, log = done, LineLog(out)
        try:
            with progress(f"answering {bulk.path.name}", num_rows, bulk.unit) as bar:
                bar.begin_at(done)
                for answer in _answers(bulk, left):
                    log.append(answer | {"made_by": bulk.made_by})
                    done, faults = done + 1, faults + bool(answer.get(FAULT))
                    bar.advance()
            log.sync()
        except KeyboardInterrupt:
            what = f"stopped by Ctrl-C; {done:,} of {number_of(num_rows, bulk.unit)} are answered"
            fix = "give the same command again, which goes on behind them"
            raise Interrupted(what, where=str(out), fix=fix) from None
        finally:
            log.close()
    with_fault = f", {faults:,} with a fault" if faults else ""
    earlier = f", {before:,} of them before" if before else ""
    return Written(f"{number_of(num_rows - faults, bulk.unit)} answered{with_fault}{earlier}: {out}", before, faults)


def _checked(bulk: Bulk) -> int:
    """The number of rows. Raises SourceError if none of them can be asked."""
    num_rows, first, usable = 0, None, False
    with progress(f"checking {bulk.path.name}"):
        for row in bulk.rows():
            num_rows, first, usable = num_rows + 1, first or row, usable or row.fault is None
    if first is None:
        raise SourceError(f"there are no {bulk.unit} in it", where=str(bulk.path), fix=bulk.example)
    if not usable and first.fault is not None:
        raise first.error(bulk.path)
    return num_rows


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


def _answered(out: Path, bulk: Bulk, left: Iterator[BulkRow]) -> tuple[int, int]:
    """Take the rows that a file has lines of; the number of them, and of those without an answer.

    Raises:
        RecipeError: it has something else.
    """
    done = faults = 0
    with reading(out), out.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n") and line.startswith(BEGIN[: len(line)]):
                break  # cut by the end of the earlier command
            answer, row = json_object(line), next(left, None)
            expected = {} if row is None else {"line": row.line, **row.given, "made_by": bulk.made_by}
            if answer is None or not expected or expected != {name: answer.get(name) for name in expected}:
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
    answer: Collected = field(default_factory=Collected)
    report: Report = lambda answer: {}

    @property
    def is_done(self) -> bool:
        return bool(self.fault or self.answer.reasons)

    def line(self) -> dict[str, Any]:
        reported = {FAULT: self.fault} if self.fault else self.report(self.answer)
        return {"line": self.row.line, **self.row.given, **reported}


def _answers(bulk: Bulk, left: Iterator[BulkRow]) -> Iterator[dict[str, Any]]:
    """Yield answers in the order of the rows."""
    asked: deque[_Open] = deque()
    row = next(left, None)
    while row is not None or asked:
        while row is not None and len(asked) < AHEAD and _has_room(bulk, asked):
            asked.append(_asked(row, bulk.engine))
            row = next(left, None)
        bulk.engine.turn()
        while asked and asked[0].is_done:
            yield asked.popleft().line()


def _has_room(bulk: Bulk, asked: Iterable[_Open]) -> bool:
    return bulk.most_tokens is None or sum(one.num_tokens for one in asked if not one.is_done) < bulk.most_tokens


def _asked(row: BulkRow, engine: Engine) -> _Open:
    try:
        request, report = row.ask()
    except RowFault as fault:
        return _Open(row, fault=_text(fault))
    prompt = request.prompt
    num_tokens = prompt.total_tokens if isinstance(prompt, RaggedBatch) else len(prompt)
    opened = _Open(row, num_tokens, report=report)
    engine.submit(request, opened.answer)
    return opened
