"""`unpad generate --file` and `unpad infer --file`: all rows of a file answered, in its order.

Rows are asked as others end. The file of answers is continued where it stops, so a command that was ended is run
again. Each line says by which run and settings it was made; lines of others are not continued.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, Generic, TypeVar

from unpad.batching.batch import RaggedBatch
from unpad.data.pictures.album import seen_pictures
from unpad.data.sources import chat
from unpad.data.sources.bad_rows import MAX_SHOWN
from unpad.data.sources.chat import CONTEXTS, FIELDS, messages_of, refuse_order, with_system
from unpad.data.sources.example import BadRow, Unread, place_of
from unpad.data.sources.faults import FIXES, FieldFault, RowFault, missing
from unpad.data.sources.fields import MESSAGES, REQUESTS
from unpad.data.sources.files import FORMATS, SourceFile
from unpad.data.sources.images import ImageExample
from unpad.data.sources.reader import OPTIONAL, read, reading
from unpad.data.sources.row import Row, are_messages, is_blank
from unpad.data.sources.unread import count_unread
from unpad.data.sources.vqa import FIELDS as QUESTION_FIELDS
from unpad.data.sources.vqa import asked
from unpad.data.tokens.encode import encode_prompt
from unpad.data.vqa import questions_about
from unpad.errors import Interrupted, RecipeError, RunInUseError, SourceError
from unpad.inference.engine import Collected, Engine, Request, check, token_lists
from unpad.inference.generate import PIECE, ROWS, Continuing
from unpad.inference.images import check_asks, examine_image, fault_text, greedy
from unpad.inference.loaded import LoadedRun, generation_precision
from unpad.inference.prompts import Prompt, Reply, check_system, lost_of, reads_chat
from unpad.nn.precision import Precision
from unpad.recipes.training import GenerateSettings
from unpad.run.folder import run_id
from unpad.storage import LineLog
from unpad.storage.disk import disk_errors, take_lock
from unpad.storage.strict_json import json_object
from unpad.terminal.progress import held, progress
from unpad.terminal.table import number_of

BEGIN = b'{"line": '  # of every line of answers
AHEAD = 2 * ROWS  # rows that are asked before the first of them is written, so that a free place is taken at once
FAULT = "fault"  # field of a line that has no answer
PROMPT_FIELDS = (*FIELDS, *OPTIONAL, "id")

Report = Callable[[Collected], dict[str, Any]]  # fields of an answer
Ask = Callable[[], tuple[Request, Report]]
T = TypeVar("T")


@dataclass(frozen=True)
class BulkRow(Generic[T]):
    """A row of a file.

    Args:
        where: its place; given: fields that its answer repeats, by which the answer is known again.
        ask: what it asks, such as the request to the engine and what reports its answer; or RowFault, written in the
            place of an answer.
        fault: what is wrong with a row that cannot be asked, its code first and its remedy last; or "".
    """

    where: str
    given: dict[str, Any]
    ask: Callable[[], T]
    fault: str = ""

    @staticmethod
    def bad(where: str, given: dict[str, Any], fault: RowFault, example: str) -> BulkRow[T]:
        """A row that cannot be asked; its remedy is an example where it would be a setting of a recipe's sources."""
        is_setting = fault.fix == FIXES["E_MISSING"] or "set format:" in fault.fix
        fault = RowFault(fault.code, fault.what, example if is_setting else fault.fix)

        def ask() -> T:
            raise fault

        return BulkRow(where, given | {FAULT: fault_text(fault)}, ask, fault_text(fault))

    @property
    def line(self) -> int:
        """Its line in a table."""
        line = place_of(self.where).line
        assert line is not None, "rows of lines"
        return line

    def checked(self) -> BulkRow[T]:
        """The row, with the fault that asking it meets."""
        try:
            self.ask()
        except RowFault as fault:
            return replace(self, fault=fault_text(fault))
        return self


def refuse_faults(faults: Sequence[tuple[str, str]], num_rows: int, stops: bool) -> None:
    """Refuse data with rows that cannot be used, or without any other rows.

    Args:
        faults: place and fault of each; stops: whether one is enough.

    Raises:
        SourceError: names the first.
    """
    if not faults or (len(faults) < num_rows and not stops):
        return
    (where, fault), *others = faults
    what, _, fix = fault.rpartition("; ")
    details = [f"  {place}: {other}" for place, other in others[: MAX_SHOWN - 1]]
    if more := len(others) - len(details):
        details.append(f"  ... and {more:,} more of {num_rows:,}")
    fix += "; data.on_bad_row=quarantine goes on without it" if len(faults) < num_rows else ""
    raise SourceError(what, where=where, fix=fix, details=details)


AskedRow = BulkRow[tuple[Request, Report]]


@dataclass(frozen=True)
class Bulk:
    """A file to be answered.

    Args:
        unit: what its rows are, plural; example: advice on a file without any.
        rows: reads the rows, in order.
        made_by: digest of all that an answer depends on besides its row.
        stops: whether a row that cannot be asked refuses the file; else its fault stands in the place of an answer.
        most_tokens: of prompts in the engine at once; None for as many as it has rows for.
    """

    path: Path
    unit: str
    example: str
    rows: Callable[[], Iterator[AskedRow]]
    engine: Engine
    made_by: str
    stops: bool
    most_tokens: int | None = None


@dataclass(frozen=True)
class Written:
    """Lines of a file of answers.

    Args:
        summary: what was done, for the terminal; unread: a line on the fields that nobody read, if there are any.
        before: lines that it had already; faults: those without an answer.
    """

    summary: str
    before: int
    faults: int
    unread: Sequence[str] = ()


def answer_prompts(run: LoadedRun, path: Path, out: Path, *, same_seed: bool = False) -> Written:
    """Answer all prompts of a file: JSON lines or CSV, each row with `prompt`, or `messages` up to a user's, or in
    another form of conversations that train; or plain text, a prompt per line.

    Every prompt draws with the next seed, as with `unpad generate`.

    Args:
        out: gets a JSON line for each prompt; one that such a command began is continued.
        same_seed: whether all draw with the seed of the settings.

    Raises:
        SourceError: a row is no prompt, and the run's recipe does not quarantine it; nothing was written.
        UnpadError: as `answer_rows`.
    """
    settings, where = run.recipe.generate, "generate.beams"
    if settings.beams > 1:
        raise RecipeError("a file is answered without beams", where=where, fix="give beams=1")
    example, precision = 'write JSON lines such as {"prompt": "..."}', generation_precision(settings, run.model.device)
    table, unread = table_file(path), Unread()

    def ask(number: int, row: Row) -> tuple[dict[str, Any], Ask]:
        try:
            prompt = _prompt(run, row, strictly=table.format == "jsonl")
            if row.doubts:
                raise FieldFault(row.doubts)
            check(run.generator, [prompt.ids], settings)
        except RecipeError as error:
            raise RowFault("E_CONTEXT", error.what, error.fix) from None
        seed = settings.seed + (0 if same_seed else number)
        return {"prompt": prompt.text}, partial(_ask_prompt, run, prompt, settings.model_copy(update={"seed": seed}))

    def prompts() -> Iterator[AskedRow]:
        rows = read(table, run.recipe.data.model_copy(update={"separator": "\n"}), _requests(run), (*FIELDS, "id"))
        return rows_of(path, rows, example, ("id",), ask, unread, _known(run))

    engine = Engine(run.generator, precision=precision, piece=PIECE, rows=ROWS)
    made_by = digest_of(run, settings, precision, same_seed)
    written = answer_rows(Bulk(path, "prompts", example, prompts, engine, made_by, stops(run)), out)
    return replace(written, unread=tuple(unread.lines()))


def _requests(run: LoadedRun) -> tuple[str, ...]:
    """Fields that may hold the request of a row, those that the sources of the run name first."""
    return (*(source.prompt for source in run.recipe.data.chat if source.prompt), *REQUESTS, *MESSAGES)


def _known(run: LoadedRun) -> set[str]:
    """Fields that rows of prompts may have, those that they train with included."""
    return {*PROMPT_FIELDS, *_requests(run), *(source.reply or "" for source in run.recipe.data.chat)}


def stops(run: LoadedRun) -> bool:
    """True if a row that cannot be used refuses its file."""
    return run.recipe.data.on_bad_row == "stop"


def table_file(path: Path) -> SourceFile:
    """A file of rows in the format of its name; JSON lines under the name of a text are such."""
    named = FORMATS.get(path.suffix.lower())
    with reading(path), path.open("rb") as file:
        is_text = named == "text" and not file.read(1024).lstrip().startswith(b"{")
    return SourceFile(path, "csv" if named == "csv" else "text" if is_text else "jsonl", None, 1.0, 0)


def _prompt(run: LoadedRun, row: Row, strictly: bool) -> Prompt:
    """The prompt of a row, in the forms of conversations that train, without its reply.

    Args:
        strictly: whether other fields are refused.

    Raises:
        RowFault: the row has none.
        RecipeError: the run has no place for a system text.
    """
    if type(row.value) is str:
        return run.prompt(row.value)
    if unknown := [name for name in row.names if strictly and name not in _known(run)]:
        fix = "leave it out; a row has prompt, system, messages, id, and settings are of the command"
        raise RowFault("E_TYPE", f"unknown field {json.dumps(unknown[0], ensure_ascii=False)}", fix)
    row.leave_out({name for source in run.recipe.data.chat for name in source.ignore})
    named = [name for name in _requests(run)[: -len(REQUESTS + MESSAGES)] if name in row]
    request = named[0] if named else row.one_of((*REQUESTS, *MESSAGES), "a request")
    if request is None:
        raise missing(("prompt", "messages"), row.value)
    if not reads_chat(run.recipe, run.tokenizer):
        if [name for name in (*CONTEXTS, "history") if not is_blank(row.get(name))] or are_messages(row[request]):
            raise RowFault("E_TYPE", "the run was trained on no conversations", 'give it rows with "prompt" alone')
        return run.prompt(row.text(request), row.text("system") if row.get("system") else "")
    is_talk = request in MESSAGES
    turns = with_system(row, messages_of(row, row[request], f'"{request}"') if is_talk else chat.asked(row, request))
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


def answer_questions(run: LoadedRun, path: Path, out: Path, *, stops: bool = False) -> Written:
    """Answer all questions of a table, JSON lines or CSV, as `ask` does each: greedily and in fp32.

    A row has `image`, `question` and perhaps `id`, as `data.vqa` reads them; other fields are left alone.

    Args:
        out: gets a JSON line for each row; one that such a command began is continued.
        stops: whether a row that cannot be answered refuses the table; else it is written with its fault.

    Raises:
        RecipeError: the run answers no questions about images.
        SourceError: no row of the table has a question; nothing was written.
        UnpadError: as `answer_rows`.
    """
    check_asks(run)
    example = 'write rows such as {"image": "cat.png", "question": "Which animal?"}, or a CSV with these columns'

    def ask(number: int, row: Row) -> tuple[dict[str, Any], Ask]:
        paths, question = asked(path.parent, row)
        return {"question": question}, partial(ask_question, run, paths, question, path.parent)

    def questions() -> Iterator[AskedRow]:
        rows = read(table_file(path), run.recipe.data, ("image",), ("question", "caption", "id"))
        return rows_of(path, rows, example, ("id", "image"), ask, unread, (*QUESTION_FIELDS, *OPTIONAL))

    unread = Unread()
    written = answer_rows(questions_to(run, path, example, questions, stops), out)
    return replace(written, unread=tuple(unread.lines()))


def questions_to(run: LoadedRun, path: Path, example: str, rows: Callable[[], Iterator[AskedRow]], stops: bool) -> Bulk:
    """Rows of questions about images, to be answered greedily and in fp32."""
    engine = Engine(run.generator, piece=PIECE, rows=ROWS, keeps=False)
    made_by, most_tokens = digest_of(run, greedy(run), "fp32"), run.recipe.plan.tokens_per_micro
    return Bulk(path, "questions", example, rows, engine, made_by, stops, most_tokens)


def ask_question(
    run: LoadedRun, paths: Sequence[Path], question: str, folder: Path | None = None
) -> tuple[Request, Report]:
    """Look at the images of a question; a folder must contain them.

    Raises:
        RowFault: an image cannot be used, or the question is too long.
    """
    images: list[ImageExample] = []
    root = None if folder is None else os.path.realpath(folder)
    for image in (examine_image(run, path, root=root) for path in paths):
        if isinstance(image, BadRow):
            raise RowFault(image.code, image.what, image.fix)
        images.append(image)
    with held():  # the work on one row is no progress of its own
        batch = questions_about(run.recipe, run.tokenizer, images, question, together=True).prompts([0])
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


def rows_of(
    path: Path,
    rows: Iterable[Row | BadRow],
    example: str,
    repeated: Sequence[str],
    ask: Callable[[int, Row], tuple[dict[str, Any], Callable[[], T]]],
    unread: Unread | None = None,
    known: Iterable[str] = (),
) -> Iterator[BulkRow[T]]:
    """Yield the rows of a file.

    Args:
        repeated: fields that answers repeat as they are.
        ask: from the number of the row and the row: further fields that its answer repeats, and its request; or
            RowFault.
        unread: counts the fields that nobody reads; known: those that may stand beside what is read.
    """
    if unread is not None:
        unread.clear()
    with reading(path):
        for number, row in enumerate(rows):
            if isinstance(row, BadRow):
                yield BulkRow.bad(row.where, {}, RowFault(row.code, row.what, row.fix), example)
                continue
            given = {name: row[name] for name in repeated if row.get(name) is not None}
            try:
                more, request = ask(number, row)
            except RowFault as fault:
                yield BulkRow.bad(row.where, given, fault, example)
            else:
                if unread is not None:
                    for name in known:
                        row.get(name)
                    count_unread(unread, row)
                yield BulkRow(row.where, given | more, request)


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
                for answer in answers_of(bulk, left):
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
    """The number of rows. Raises SourceError if none of them can be asked, or one cannot and stops the file."""
    num_rows, faults = 0, list[tuple[str, str]]()
    with progress(f"checking {bulk.path.name}"):
        for row in bulk.rows():
            fault = row.checked().fault if bulk.stops else row.fault
            num_rows, faults = num_rows + 1, [*faults, (row.where, fault)] if fault else faults
    if not num_rows:
        raise SourceError(f"there are no {bulk.unit} in it", where=str(bulk.path), fix=bulk.example)
    refuse_faults(faults, num_rows, bulk.stops)
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
            take_lock(file.fileno())
        except BlockingIOError:
            fix = "wait until it has ended, or name another file with --out"
            raise RunInUseError("another command writes these answers", where=str(out), fix=fix) from None
        yield


def _answered(out: Path, bulk: Bulk, left: Iterator[AskedRow]) -> tuple[int, int]:
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

    row: AskedRow
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


def answers_of(bulk: Bulk, left: Iterator[AskedRow]) -> Iterator[dict[str, Any]]:
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


def _asked(row: AskedRow, engine: Engine) -> _Open:
    try:
        request, report = row.ask()
    except RowFault as fault:
        return _Open(row, fault=fault_text(fault))
    prompt = request.prompt
    num_tokens = prompt.total_tokens if isinstance(prompt, RaggedBatch) else len(prompt)
    opened = _Open(row, num_tokens, report=report)
    engine.submit(request, opened.answer)
    return opened
