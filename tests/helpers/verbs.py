"""Every verb of the command line: calls that must end before a model is loaded, and what it prints for programs.

Calls are made in a folder with a run `mine-1` that has not taken a step, and with the files of `write_files`.
"""

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer.main

from unpad.cli import app

LIGHT = ("torch", "pyarrow", "matplotlib", "transformers")  # not loaded by a call that is refused
NUMBERS = (
    "step", "epoch", "loss", "perplexity", "heldout_loss", "lr", "grad_norm", "sequences", "tokens", "padded_tokens",
    "targets", "pad_share", "skipped", "best",
)  # fmt: skip


@dataclass(frozen=True)
class Verb:
    """What tests of all verbs ask of one.

    Args:
        refused: exit code and arguments of calls that end before a heavy module is loaded.
        light: arguments of calls that succeed and load no heavy module.
        json: whether `--json` prints its numbers for programs.
    """

    refused: tuple[tuple[int, str], ...] = ()
    light: tuple[str, ...] = ()
    json: bool = False


VERBS: dict[str, Verb] = {
    "train": Verb((
        (2, "zh_caht"), (2, "zh_chat data.chats=a"), (2, "zh_chat optim.lr=abc"),
        (3, "zh_chat data.text=nofile.txt"), (2, "zh_chat --optim.lr=1"),
        (2, "zh_chat --out runs/mine-1"), (2, "zh_chat model.from=nothere"), (2, "--resume nothere"),
        (2, "--resume train.max_steps=9"), (2, "--resume mine-1 train.max_steps=010"),
        (3, "events data.events=a events.labels.path=b"), (2, "dpo --processes 2 a=1"),
    )),
    "plan": Verb(((2, "nofile.yaml"), (3, "small data.text=no*")), json=True),
    "prove": Verb((
        (2, "zh_caht"), (2, "zh_chat plan.stride=x"),
        (2, "--serve"), (2, "mine-1 --prompts a.txt"), (2, "nothere --serve"),
    ), json=True),
    "doctor": Verb(((2, "zh_caht"), (2, "zh_chat --lang fr"), (2, "zh_chat --at x"), (2, "")), json=True),
    "import": Verb(((2, "x --out runs/mine-1"),)),
    "export": Verb(((2, "nothere x"), (2, "mine-1 runs/mine-1 --merge"), (2, "mine-1 x --int8 --merge"))),
    "eval": Verb(((2, "nothere"), (3, "mine-1 --data nofile")), json=True),
    "infer": Verb(((3, "mine-1 --image nofile.png"),), json=True),
    "embed": Verb(((2, "no --out x"),)),
    "generate": Verb((
        (2, "nothere"), (2, "mine-1 temperture=1"),
        (2, "mine-1 --file a.jsonl"), (3, "mine-1 --file no.jsonl --out o.jsonl"),
    ), json=True),
    "serve": Verb(((2, "nothere"), (2, "mine-1 --host 0.0.0.0"), (3, "mine-1 --token-file nofile"))),
    "chat": Verb(((2, ""), (2, "nothere"))),
    "runs": Verb(light=("",)),
    "compare": Verb(((2, "mine-1 nothere"),), json=True),
    "replay": Verb(((2, "nothere"),), json=True),
    "trace": Verb(((2, "nothere a:1"),), json=True),
    "data check": Verb(((3, "nofile"),), light=("good.jsonl", "good.txt", "chat.jsonl"), json=True),
    "data show": Verb(((3, "nofile.txt"), (2, "nothere"), (2, "chat a.b=c"), (3, "dpo data.text=no*")), json=True),
    "recipes": Verb(light=("",)),
    "recipes copy": Verb(light=("llm mine.yaml",)),
    "recipes schema": Verb(),
}  # fmt: skip
USAGE = [["trian"], ["train"], ["train", "zh_chat", "--oops"], ["eval"], ["data"], ["recipes", "copy"]]  # wrong, code 2


def commands() -> dict[str, Any]:
    """Commands of the program by their verb, with the group it is in."""
    root: Any = typer.main.get_command(app)
    found: dict[str, Any] = {}
    for name, command in root.commands.items():
        inner = getattr(command, "commands", {})
        found |= {f"{name} {sub}": one for sub, one in inner.items()}
        if not inner or getattr(command, "invoke_without_command", False):
            found[name] = command
    return found


def refused_calls() -> list[tuple[int, list[str]]]:
    """(exit code, words) of every call that is refused."""
    calls = [(code, f"{name} {words}") for name, verb in VERBS.items() for code, words in verb.refused]
    return [*((code, shlex.split(words)) for code, words in calls), *((2, words) for words in USAGE)]


def light_calls() -> list[list[str]]:
    """Words of every call that loads no heavy module."""
    return [shlex.split(f"{name} {words}") for name, verb in VERBS.items() for words in verb.light]


def write_files(folder: Path) -> Path:
    """The files that the calls name, and the folder of the run `mine-1`."""
    (folder / "good.jsonl").write_text('{"text": "好"}\n', encoding="utf-8")
    (folder / "good.txt").write_text("一句话。\n", encoding="utf-8")
    chat = [{"role": "user", "content": "你好"}, {"role": "assistant", "content": "你好！"}]
    (folder / "chat.jsonl").write_text(json.dumps({"messages": chat}) + "\n", encoding="utf-8")
    run = folder / "runs" / "mine-1"
    run.mkdir(parents=True)
    (run / "recipe.yaml").write_text("{}\n", encoding="utf-8")
    (run / "run.json").write_text('{"recipe": "llm", "overrides": []}', encoding="utf-8")
    row = {"kind": "train", "stage": "train", "values": {}} | dict.fromkeys(NUMBERS, 1)
    (run / "metrics.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    for name in ("timing.jsonl", "log.jsonl"):
        (run / name).write_text("", encoding="utf-8")
    return run
