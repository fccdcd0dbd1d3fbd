"""`unpad generate --file`: the prompts of a file, answered as rows become free and written in the order of the file.

The file of answers is continued where it stops, so a command that was ended is run again. Each line says by which run
and settings it was made; lines of others are not continued.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from unpad.data.sources.chat import messages_of, refuse_order
from unpad.data.sources.jsonlines import RowFault, missing, read_lines
from unpad.data.sources.rows import reading, require_text
from unpad.data.tokens.encode import encode_prompt
from unpad.errors import RecipeError, RunInUseError, SourceError
from unpad.inference.engine import Engine, Request
from unpad.inference.generate import PIECE, ROWS
from unpad.inference.heard import Heard
from unpad.inference.loaded import LoadedRun, generation_precision
from unpad.inference.prompts import Prompt, Reply, check_system, lost_of, reads_chat
from unpad.inference.steps import banned_ids, check
from unpad.recipes.training import GenerateSettings
from unpad.run.folder import run_id
from unpad.storage import LineLog
from unpad.storage.disk import disk_errors
from unpad.storage.strict_json import json_object
from unpad.terminal.progress import ProgressBar, progress
from unpad.terminal.table import number_of

BEGIN = b'{"line": '  # of every line of answers
FIELDS = ("prompt", "system", "messages", "id")
AHEAD = 2 * ROWS  # prompts in the engine, so that a row that becomes free is taken at once


@dataclass(frozen=True)
class _Row:
    """A prompt of the file, with its place, its line and its `id`."""

    where: str
    line: int
    prompt: Prompt
    id: Any


def answer_file(run: LoadedRun, path: Path, out: Path, *, same_seed: bool = False) -> list[str]:
    """Answer all prompts of a file of JSON lines, each with `prompt`, or `messages` up to a user's.

    Every prompt draws with the next seed, as with `unpad generate`.

    Args:
        out: gets a JSON line for each prompt; one that such a command began is continued.
        same_seed: whether all draw with the seed of the settings.

    Returns:
        What was done, for the terminal.

    Raises:
        SourceError: a row is no prompt; nothing was written.
        RecipeError: the file of answers is of another run, of other settings or prompts, or no such file.
        DiskError: it cannot be written.
    """
    settings = run.recipe.generate
    if settings.beams > 1:
        what = "a file is answered without beams"
        raise RecipeError(what, where="generate.beams", fix="leave out beams")
    with progress(f"checking {path.name}"):
        num_rows = sum(1 for _ in _rows(run, path, settings))
    if not num_rows:
        raise SourceError("there are no prompts in it", where=str(path), fix='write rows such as {"prompt": "..."}')
    made_by = _made_by(run, settings, same_seed)
    with _alone(out):
        done = _answered(out, made_by, _rows(run, path, settings))
        log = LineLog(out)
        try:
            with progress(f"answering {path.name}", num_rows, "prompts") as bar:
                bar.begin_at(done)
                for answer in _answers(run, path, settings, done, same_seed, bar):
                    log.append(answer | {"made_by": made_by})
            log.sync()
        finally:
            log.close()
    before = f", {done:,} of them before" if done else ""
    return [f"{number_of(num_rows, 'prompts')} answered{before}: {out}"]


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


def _made_by(run: LoadedRun, settings: GenerateSettings, same_seed: bool) -> str:
    """Digest of all that an answer depends on besides its prompt."""
    precision = generation_precision(settings)
    parts = [run_id(run.folder), run.step, precision, settings.model_dump(mode="json"), same_seed]
    return blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=8).hexdigest()


def _rows(run: LoadedRun, path: Path, settings: GenerateSettings) -> Iterator[_Row]:
    with reading(path):
        for item in read_lines(path):
            if not isinstance(item, tuple):
                raise SourceError(f"{item.code}: {item.what}", where=item.where, fix=item.fix)
            line, row = item
            where = f"{path}:{line}"
            try:
                prompt = _prompt(run, row)
                check(run.generator, [prompt.ids], settings)
            except RowFault as fault:
                bad = fault.at(where, row)
                raise SourceError(f"{bad.code}: {bad.what}", where=where, fix=bad.fix) from None
            except RecipeError as error:
                raise SourceError(error.what, where=where, fix=error.fix) from None
            yield _Row(where, line, prompt, row.get("id"))


def _prompt(run: LoadedRun, row: dict[str, Any]) -> Prompt:
    """The prompt of a row.

    Raises:
        RowFault: the row has none.
        RecipeError: the run has no place for a system text.
    """
    if unknown := [name for name in row if name not in FIELDS]:
        fix = f"leave it out; a row has {', '.join(FIELDS)}, and settings are of the command"
        raise RowFault("E_TYPE", f"unknown field {json.dumps(unknown[0], ensure_ascii=False)}", fix)
    if "messages" in row and ("prompt" in row or "system" in row):
        raise RowFault("E_TYPE", '"messages" stand beside "prompt" or "system"', "give one of them")
    if "messages" not in row:
        if "prompt" not in row:
            raise missing(("prompt", "messages"), list(row))
        system = require_text(row["system"], '"system"') if row.get("system") else ""
        return run.prompt(require_text(row["prompt"], '"prompt"'), system)
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


def _answered(out: Path, made_by: str, rows: Iterator[_Row]) -> int:
    """Number of prompts that a file has answers to.

    Raises:
        RecipeError: it has something else.
    """
    done = 0
    with reading(out), out.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n") and line.startswith(BEGIN[: len(line)]):
                break  # cut by the end of the earlier command
            answer, row = json_object(line), next(rows, None)
            found = None if answer is None else (answer.get("line"), answer.get("prompt"), answer.get("made_by"))
            if row is None or found != (row.line, row.prompt.text, made_by):
                what = "the file has lines that this run with these settings did not make of these prompts"
                raise RecipeError(what, where=f"{out}:{number}", fix="name another file with --out")
            done = number
    return done


def _answers(
    run: LoadedRun, path: Path, settings: GenerateSettings, done: int, same_seed: bool, bar: ProgressBar
) -> Iterator[dict[str, Any]]:
    """Yield answers in the order of the file; at most AHEAD are in the engine or wait for an earlier one."""
    model, tokenizer = run.generator, run.tokenizer
    stops, banned = sorted(tokenizer.stop_ids), banned_ids(model, tokenizer)
    engine = Engine(model, precision=generation_precision(settings), piece=PIECE, rows=ROWS)
    rows = enumerate(_rows(run, path, settings))
    open_rows: list[tuple[_Row, GenerateSettings, Heard]] = []
    left = True
    while left or open_rows:
        while left and len(open_rows) < AHEAD:
            if left := (item := next(rows, None)) is not None:
                index, row = item
                if index >= done:
                    seed = settings.seed + (0 if same_seed else index)
                    own = settings.model_copy(update={"seed": seed})
                    open_rows.append((row, own, Heard()))
                    engine.submit(Request(row.prompt.ids, own, stops, banned), open_rows[-1][2])
        engine.turn()
        while open_rows and open_rows[0][2].reasons:
            row, own, heard = open_rows.pop(0)
            ids = heard.tokens()
            reply = Reply(row.prompt, tokenizer.decode(ids), len(ids), heard.finished(), own.seed)
            bar.advance()
            yield {"line": row.line, **({} if row.id is None else {"id": row.id}), **reply.to_json()}
