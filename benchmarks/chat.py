"""What the recipe `chat` remembers of conversations, in several languages.

    python benchmarks/chat.py                  # every set: some ten minutes of one core, most of it Chinese
    python benchmarks/chat.py english german

Each set is trained from nothing and asked every reply it was trained on, with the conversation before it as it was
written, greedily. A reply has its keywords if it holds them all, and is equal if it is the trained one to the
character. Held-out questions are other phrasings of trained ones, which rows declare; 500 questions at most of each
are asked. benchmarks/chat.md has the figures.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from time import process_time
from typing import Any

import unpad
from unpad.data.sources.example import Turn
from unpad.data.tokens.encode import encode_prompt
from unpad.inference.generate import complete
from unpad.inference.loaded import LoadedRun

ROOT = Path(__file__).parents[1]
ENGLISH = ROOT / "unpad/examples/en/chat.jsonl"
CHINESE = ROOT / "unpad/examples/zh/chat.jsonl"
GERMAN = ROOT / "benchmarks/chat_de.jsonl"
SYSTEM = "You work at the desk of a bicycle workshop."
MOST = 500  # questions of a part

Row = dict[str, Any]


def read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def all_trained(rows: list[Row]) -> list[Row]:
    """The same rows without a held-out phrasing."""
    return [{key: value for key, value in row.items() if key not in ("split", "group")} for row in rows]


def of_turns(rows: list[Row]) -> list[Row]:
    """Conversations of a system text and three exchanges on different facts, and long replies of five facts each.

    Every phrasing of the trained rows occurs; the second and third reply name no keywords of their own.
    """
    trained = [row for row in rows if row["split"] == "train"]
    made = []
    for index in range(len(trained)):
        parts = [trained[(index + 49 * turn) % len(trained)] for turn in range(3)]
        messages = [{"role": "system", "content": SYSTEM}, *(one for part in parts for one in part["messages"])]
        made.append({"messages": messages, "keywords": parts[0]["keywords"]})
    facts = [trained[index] for index in range(0, len(trained), 6)]
    for first in range(0, len(facts), 5):
        told = facts[first : first + 5]
        question = {"role": "user", "content": f"Tell me all about this: {', '.join(row['group'] for row in told)}."}
        reply = "\n\n".join(f"- {row['messages'][1]['content']}" for row in told)
        keywords = [word for row in told for word in row["keywords"]]
        made.append({"messages": [question, {"role": "assistant", "content": reply}], "keywords": keywords})
    return made


SETS: dict[str, Callable[[], list[Row]]] = {
    "english": lambda: read(ENGLISH),
    "english, all phrasings trained": lambda: all_trained(read(ENGLISH)),
    "english, three turns and long replies": lambda: of_turns(read(ENGLISH)),
    "german": lambda: read(GERMAN),
    "german, all phrasings trained": lambda: all_trained(read(GERMAN)),
    "chinese": lambda: read(CHINESE),
}


def questions(rows: list[Row]) -> Iterator[tuple[list[Turn], str, list[str]]]:
    """The turns before each reply, the reply, and its keywords; those of a row belong to its first reply."""
    for row in rows:
        turns = [Turn(message["role"], message["content"]) for message in row["messages"]]
        replies = [index for index, turn in enumerate(turns) if turn.role == "assistant"]
        for index in replies:
            yield turns[:index], turns[index].content, row.get("keywords", []) if index == replies[0] else []


def ask(run: LoadedRun, rows: list[Row]) -> tuple[int, int, int, int]:
    """Count questions with keywords, those answered with all of them, all questions, and equal replies."""
    asked = list(questions(rows))[:MOST]
    prompts = [encode_prompt(turns, run.tokenizer, run.recipe.data.template) for turns, _, _ in asked]
    told = [made.text for made in complete(run.generator, run.tokenizer, prompts, run.recipe.generate)]
    named = [(reply, words) for reply, (_, _, words) in zip(told, asked, strict=True) if words]
    right = sum(all(word in reply for word in words) for reply, words in named)
    equal = sum(reply == trained for reply, (_, trained, _) in zip(told, asked, strict=True))
    return len(named), right, len(asked), equal


def measure(name: str, rows: list[Row], folder: Path) -> str:
    """Train a set and ask it; return the line of the table."""
    path = folder / "chat.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    declared = any("split" in row for row in rows)
    began = process_time()
    holdout = [] if declared else ["data.holdout=0"]
    run = unpad.train("chat", f"data.chat={path}", "train.threads=1", *holdout, out=folder / "run")
    seconds = process_time() - began
    trained = [row for row in rows if row.get("split", "train") == "train"]
    named, right, asked, equal = ask(run, trained)
    others, found, _, _ = ask(run, [row for row in rows if row.get("split", "train") != "train"])
    held_out = f"{found} of {others}" if others else ""
    return (
        f"| {name} | {len(trained):,} | {run.step:,} | {seconds:.0f} s | {right} of {named} | {equal} of {asked} | "
        f"{held_out} |"
    )


def main(wanted: list[str]) -> None:
    print("| set | trained on | steps | processor time | keywords | equal replies | held-out keywords |")
    print("|---|---|---|---|---|---|---|")
    for name, rows in SETS.items():
        if not wanted or any(word in name for word in wanted):
            with tempfile.TemporaryDirectory() as folder:
                print(measure(name, rows(), Path(folder)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
