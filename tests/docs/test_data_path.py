"""docs/internals/data_path.md names what exists; calls of all sections but the last are those of a run on texts."""

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise, product
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "internals" / "data_path.md").read_text(encoding="utf-8")

RECIPE = """
data: {text: text.jsonl, chat: [{path: chat.jsonl, weight: 0.5}], holdout: 0.1}
tokenizer: {vocab_size: 300}
augment: {multiplier: 2}
model: {blocks: 1, width: 16, heads: 2, context: 32}
plan: {tokens_per_step: 256, tokens_per_micro: 128}
train: {max_steps: 2, eval_every: 1}
"""
# Trains, and then plans; writes the functions of the package that were called, in the order of their first calls, each
# with the functions on the stack of that call and with all that called it directly.
PROGRAM = """
import json, sys, threading
from itertools import islice
from pathlib import Path
import torch.utils.tensorboard, typer  # before calls are watched
import unpad

package, stacks, callers = str(Path(unpad.__file__).parent) + "/", {}, {}


def named(frame):
    return frame.f_code.co_filename[len(package):].removesuffix(".py") + "." + frame.f_code.co_qualname


def above(frame):
    while (frame := frame.f_back) is not None:
        if frame.f_code.co_filename.startswith(package):
            yield frame


def watch(frame, event, argument):
    if event != "call" or not frame.f_code.co_filename.startswith(package) or frame.f_code.co_name[0] == "<":
        return
    name = named(frame)
    # A call in a lambda is one of the function that has the lambda.
    callers.setdefault(name, set()).update(named(one).partition(".<locals>")[0] for one in islice(above(frame), 1))
    if name not in stacks:
        stacks[name] = [named(one) for one in above(frame) if one.f_code.co_name[0] != "<"][::-1] + [name]


threading.setprofile(watch)
sys.setprofile(watch)
from unpad.cli import app

for words in ("train recipe.yaml --out run", "plan recipe.yaml"):
    app(words.split(), standalone_mode=False)
sys.setprofile(None)
Path("calls.json").write_text(json.dumps([stacks, {name: sorted(by) for name, by in callers.items()}]))
"""
Stacks = dict[str, list[str]]
Callers = dict[str, list[str]]
NAME = r"(?:\w+/)+\w+\.(?!py\b)\w+(?:\.\w+)?"
CALLS = rf"`({NAME})`(?:,\s+which)?\s+calls\s+`({NAME})`"


def defined(path: Path) -> set[str]:
    """Names of functions, classes and methods of a file."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return names


def test_every_file_of_the_path_exists():
    files = set(re.findall(r"`((?:\w+/)+\w+\.py)`", TEXT))
    assert len(files) > 10
    assert [file for file in files if not (ROOT / "unpad" / file).is_file()] == []


def test_every_function_of_the_path_exists():
    names = set(re.findall(r"(?:`|^\d+ +)((?:\w+/)*\w+)\.((?!py\b)\w+(?:\.\w+)?)(?:`| )", TEXT, re.MULTILINE))
    files = {file for file, _ in names if "/" in file}
    assert len(files) > 20
    assert [file for file in files if not (ROOT / "unpad" / f"{file}.py").is_file()] == []
    known = {file: defined(ROOT / "unpad" / f"{file}.py") for file in files}
    assert [f"{file}.{name}" for file, name in names if file in files and name not in known[file]] == []


# --------------------------------------------------------------------------- what a run calls


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Stacks, Callers]:
    folder = tmp_path_factory.mktemp("path")
    (folder / "recipe.yaml").write_text(RECIPE, "utf-8")
    sums = list(product(range(8), range(8)))
    texts = [{"text": f"the sum of {a} and {b} is {a + b}, as everybody knows"} for a, b in sums]
    chats = [[("user", f"what is {a} and {b}"), ("assistant", f"it is {a + b}")] for a, b in sums]
    rows = [{"messages": [{"role": role, "content": content} for role, content in chat]} for chat in chats]
    for name, lines in (("text", texts), ("chat", rows)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    # Without kernels the computation is torch's, which the page describes.
    environment = {**os.environ, "UNPAD_CACHE": str(folder / "cache"), "UNPAD_NATIVE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    stacks, callers = json.loads((folder / "calls.json").read_text("utf-8"))
    return stacks, callers


def sections(text: str) -> list[str]:
    """All but the head and the last section, on other families."""
    return re.split(r"^## ", text, flags=re.MULTILINE)[1:-1]


def ways(text: str) -> Iterator[list[str]]:
    """The ways down to the optimizer and to the model's `losses`, from the numbered lines."""
    lines = re.findall(rf"^(\d+) +({NAME}) ", text, re.MULTILINE)
    names = [name for _, name in lines]
    fork = [number for number, _ in lines].index("7")
    yield names[: fork + 1]
    yield [*names[:fork], *names[fork + 1 :], "models/decoder.Decoder.losses"]


def run_as(name: str) -> str:
    """The function that runs where a page has a layer: its `forward`."""
    return f"{name}.forward" if re.match(r"nn/\w+\.[A-Z]\w+$", name) else name


def faults(text: str, stacks: Stacks, callers: Callers) -> list[str]:
    """Claims of a page that a run contradicts."""
    found = []
    for way in ways(text):
        stack = stacks[way[-1]]
        if stack[stack.index("cli/training.train") :] != way:
            found.append(f"the way to {way[-1]} is {' '.join(stack)}")
    for section in sections(text):
        names = {run_as(name) for name in re.findall(rf"`({NAME})`", section)}
        types = {name for name in names if name.rpartition(".")[2][0].isupper()}
        found += [f"{name} is not called" for name in sorted(names - types) if name not in stacks]
        for caller, called in re.findall(CALLS, section):
            if caller not in callers.get(called, ()):
                found.append(f"{caller} does not call {called}")
        for table in re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE):
            rows = [re.match(rf"\| `({NAME})`", row) for row in table.splitlines()]
            first = [run_as(row[1]) for row in rows if row and run_as(row[1]) in stacks]
            order = list(stacks)
            found += [f"{b} runs before {a}" for a, b in pairwise(first) if order.index(a) > order.index(b)]
    return found


@pytest.mark.nightly
def test_the_calls_of_the_path_are_those_of_a_run(run):
    claims = "\n".join(sections(TEXT))
    assert len(re.findall(rf"`{NAME}`", claims)) > 30
    assert len(re.findall(CALLS, claims)) >= 5
    assert faults(TEXT, *run) == []
