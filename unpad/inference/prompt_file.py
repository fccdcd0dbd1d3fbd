"""`unpad generate --file`: the prompts of a file of JSON lines, answered in bulk."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unpad.data.sources.chat import messages_of, refuse_order
from unpad.data.sources.example import BadRow, place_of
from unpad.data.sources.faults import RowFault, missing
from unpad.data.sources.json_rows import read_lines
from unpad.data.sources.reader import reading
from unpad.data.sources.row import Row
from unpad.data.tokens.encode import encode_prompt
from unpad.errors import RecipeError, SourceError
from unpad.inference.bulk import Bulk, answer_rows, digest_of, remedy, summary
from unpad.inference.engine import Engine, Request
from unpad.inference.generate import PIECE, ROWS
from unpad.inference.heard import Heard
from unpad.inference.loaded import LoadedRun, generation_precision
from unpad.inference.prompts import Prompt, Reply, check_system, lost_of, reads_chat
from unpad.inference.steps import banned_ids, check
from unpad.recipes.training import GenerateSettings
from unpad.terminal.progress import progress

FIELDS = ("prompt", "system", "messages", "id")
EXAMPLE = 'write JSON lines such as {"prompt": "..."}'


@dataclass(frozen=True)
class PromptRow:
    """A prompt of the file, and how its answer is drawn."""

    run: LoadedRun
    line: int
    prompt: Prompt
    id: Any
    settings: GenerateSettings

    @property
    def given(self) -> dict[str, Any]:
        return {**({} if self.id is None else {"id": self.id}), "prompt": self.prompt.text}

    def ask(self) -> Request:
        model, tokenizer = self.run.generator, self.run.tokenizer
        return Request(self.prompt.ids, self.settings, sorted(tokenizer.stop_ids), banned_ids(model, tokenizer))

    def told(self, heard: Heard) -> dict[str, Any]:
        ids = heard.tokens()
        text = self.run.tokenizer.decode(ids)
        return Reply(self.prompt, text, len(ids), heard.finished(), self.settings.seed).to_json()


def answer_prompts(run: LoadedRun, path: Path, out: Path, *, same_seed: bool = False) -> list[str]:
    """Answer all prompts of a file of JSON lines, each with `prompt`, or `messages` up to a user's.

    Every prompt draws with the next seed, as with `unpad generate`.

    Args:
        out: gets a JSON line for each prompt; one that such a command began is continued.
        same_seed: whether all draw with the seed of the settings.

    Returns:
        What was done, for the terminal.

    Raises:
        SourceError: a row is no prompt; nothing was written.
        UnpadError: as `answer_rows`.
    """
    settings = run.recipe.generate
    if settings.beams > 1:
        what = "a file is answered without beams"
        raise RecipeError(what, where="generate.beams", fix="give beams=1")
    with progress(f"checking {path.name}"):
        num_rows = sum(1 for _ in _rows(run, path, same_seed))
    if not num_rows:
        raise SourceError("there are no prompts in it", where=str(path), fix=EXAMPLE)
    precision = generation_precision(settings)
    made_by = digest_of(run, settings, precision, same_seed)
    engine = Engine(run.generator, precision=precision, piece=PIECE, rows=ROWS)
    bulk = Bulk(path, made_by, _rows(run, path, same_seed), num_rows, "prompts")
    return [summary(bulk, answer_rows(bulk, engine, out), out)]


def _rows(run: LoadedRun, path: Path, same_seed: bool) -> Iterator[PromptRow]:
    settings = run.recipe.generate
    with reading(path):
        for index, row in enumerate(read_lines(path)):
            if isinstance(row, BadRow):
                raise SourceError(f"{row.code}: {row.what}", where=row.where, fix=remedy(row, EXAMPLE))
            line = place_of(row.where).line
            assert line is not None, "rows of lines"
            try:
                prompt = _prompt(run, row)
                check(run.generator, [prompt.ids], settings)
            except RowFault as fault:
                raise SourceError(f"{fault.code}: {fault.what}", where=row.where, fix=remedy(fault, EXAMPLE)) from None
            except RecipeError as error:
                raise SourceError(error.what, where=row.where, fix=error.fix) from None
            seed = settings.seed + (0 if same_seed else index)
            yield PromptRow(run, line, prompt, row.get("id"), settings.model_copy(update={"seed": seed}))


def _prompt(run: LoadedRun, row: Row) -> Prompt:
    """The prompt of a row.

    Raises:
        RowFault: the row has none.
        RecipeError: the run has no place for a system text.
    """
    if unknown := [name for name in row.names if name not in FIELDS]:
        fix = f"leave it out; a row has {', '.join(FIELDS)}, and settings are of the command"
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
