"""Targets: recipes, fields on the command line, and the command line itself."""

import json
import os
import random
import shlex
import sys
import unicodedata
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import yaml

from tests.helpers.fuzz.mutate import damage_bytes, damage_value, damaged, damaged_json, either
from tests.helpers.fuzz.target import Target, WrongError, read_at
from tests.helpers.fuzz.targets.rows import CHATS, TEXTS, png_bytes
from tests.helpers.fuzz.targets.tables import EVENTS
from tests.helpers.toy import write_toy
from unpad.cli.main import main
from unpad.errors import CheckpointError, RecipeError, SourceError
from unpad.recipes.file import RECIPES, load_recipe
from unpad.training.setup import resolved

FIELDS = (
    *("optim.lr", "model.width", "model", "stages.0.name", "stages.pretrain.train", "stages.tune.optim.lr", "stages"),
    *("data.text", "data.text.0.path", "data", "data.holdout"),
    *("plan.grow", "plan.strategy", "train.max_steps", "losses.x"),
    *("losses.classification", "a.b.c", "", "..", "stages.99.x", "optim.groups", "images.mean", "lora", "precision"),
)  # fmt: skip
VALUES = (
    *("{a: 1}", "[1,2]", "!!int ''", "*a", "&a [*a]", "{? [a]: 1}", "1e-3"),
    *("'", '"', "|\n a", "a: b", "- a", "? x", ".nan"),
    *("!!python/name:os.system", "0o17", "1:30", "true", "null", ""),
    *("~", "2024-01-01", "!!binary x", "!!set {a}", "=", "<<: 1"),
    *("[[[[[[[[1]]]]]]]]", "1..2", "1..", "..", "a,b", "0.1..1:log"),
    *("9" * 30, "-0", "1e999", "\u3000", "\x1b[31m", "x" * 3000),
)  # fmt: skip


def recipe_yaml(folder: Path) -> Target:
    """A recipe file; what loads comes back from its own YAML."""
    toy = write_toy(folder / "toy")
    seeds = [toy.read_bytes(), *(path.read_bytes() for path in sorted(RECIPES.glob("*.yaml")))]
    values = [yaml.safe_load(seed) for seed in seeds]  # whose JSON is YAML

    def read(path: Path) -> None:
        loaded = resolved(load_recipe(str(path)))
        path.write_text(loaded.to_yaml(), encoding="utf-8")
        if resolved(load_recipe(str(path))) != loaded:
            raise WrongError("a recipe does not come back from its own YAML")

    make = either(0.5, damaged_json(values, 0.04), damaged(seeds[:3], seeds))
    return Target(make, read_at(folder / "recipe.yaml", read), (RecipeError, CheckpointError, SourceError))


def recipe_fields(folder: Path) -> Target:
    """Fields on the command line, `key=value`."""
    toy = str(write_toy(folder / "toy"))

    def make(rng: random.Random) -> bytes:
        value = rng.choice(VALUES) if rng.random() < 0.6 else json.dumps(damage_value([1], rng, 0.7))
        given = f"{rng.choice(FIELDS)}={value}".encode("utf-8", "surrogatepass")
        return damage_bytes(given, [b"stages.tune.", b"model."], rng) if rng.random() < 0.4 else given

    def run(data: bytes) -> None:
        resolved(load_recipe(toy, [data.decode("utf-8", "surrogateescape")]))

    return Target(make, run, (RecipeError, CheckpointError, SourceError))


# --------------------------------------------------------------------------- the command line

_WORDS: tuple[str, ...] = (
    *("plan", "recipes", "runs", "data", "check", "compare", "infer", "eval", "export", "import"),
    *("copy", "generate", "embed", "--help", "--out", "--json"),
    *("--lang", "--kind", "--", "-", "--x", "zh_chat", "nowhere"),
    *("a.jsonl", "a.csv", "img", "~nobody/x", "/dev/null", "/", "."),
    *("..", "", " ", "x" * 300, "x" * 5000, "a\nb", "a\x1bb"),
    *("\udcff.jsonl", "*.jsonl", "[", "**", "a.jsonl/", "a.jsonl/b"),
    *("中文", "toy.yaml", "data.text=a.jsonl", "1", "-1", "nan"),
)  # fmt: skip
_QUICK = (
    ["data", "check"], ["runs"], ["recipes", "copy"], ["compare"], ["import"], ["export"], [],
)  # fmt: skip
_NEVER = ("train", "prove", "serve", "chat", "plan")  # verbs that work for long when all is right


def command_line(folder: Path) -> Target:
    """Words after `unpad`: an exit code that is documented, and never a traceback."""
    (folder / "a.jsonl").write_text('{"text": "a"}\n')
    (folder / "a.csv").write_text("text\na\n")
    (folder / "img").mkdir()
    write_toy(folder)

    def make(rng: random.Random) -> bytes:
        words = [*rng.choice(_QUICK), *(rng.choice(_WORDS) for _ in range(rng.choice((0, 1, 1, 2, 3))))]
        if rng.random() < 0.3 and words:
            at = rng.randrange(len(words))
            damaged = damage_bytes(words[at].encode("utf-8", "surrogateescape"), [b"../", b"--out"], rng)
            words[at] = damaged.replace(b"\0", b"").decode("utf-8", "surrogateescape")
        return json.dumps(words).encode()

    def run(data: bytes) -> None:
        words = json.loads(data)
        if not isinstance(words, list) or any(not isinstance(word, str) or "\0" in word for word in words):
            return
        if any(word in _NEVER for word in words) or _leads_out(words):
            return
        os.chdir(folder)
        check_call(words)

    return Target(make, run, ())


def check_call(words: list[str]) -> int:
    """Run the command, which must not print a traceback or a control character; its exit code."""
    code, out, err = called(words)
    name = " ".join(words[:2])
    if "Traceback" in err:
        raise WrongError("a traceback of the command line", shlex.join(words), err[-600:])
    if code not in range(32):
        raise WrongError(f"exit code {code} of the command line", shlex.join(words))
    strange = [one for one in out + err if unicodedata.category(one) == "Cc" and one not in "\n\t"]
    if strange:
        raise WrongError(f"control character in what `unpad {name}` prints", f"U+{ord(strange[0]):04X}", err[:300])
    return code


def data_check(folder: Path) -> Target:
    """`unpad data check` of a file of any format: what is wrong is told, in characters that a terminal can show."""
    text = b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in (*TEXTS, *CHATS))
    table = BytesIO()
    pq.write_table(EVENTS, table, compression="none")
    seeds = {
        ".jsonl": text, ".json": json.dumps([*TEXTS]).encode(), ".txt": b"a b\n\nc d\n",
        ".csv": b"text,split\na,train\nb,test\n",
        ".tsv": b"subject_id\ttime\tcode\n1\t2\ta\n", ".parquet": table.getvalue(), ".png": png_bytes(),
    }  # fmt: skip

    def make(rng: random.Random) -> bytes:
        suffix = rng.choice(sorted(seeds))
        return suffix.encode() + b"\0" + damage_bytes(seeds[suffix], [*seeds.values()], rng)

    def run(data: bytes) -> None:
        suffix, _, body = data.partition(b"\0")
        if suffix.decode("latin-1") not in seeds:
            return
        (folder / f"rows{suffix.decode()}").write_bytes(body)
        code = check_call(["data", "check", str(folder / f"rows{suffix.decode()}")])
        if code not in (0, RecipeError.exit_code, SourceError.exit_code):
            raise WrongError(f"exit code {code} of a check of data")

    return Target(make, run, ())


def _leads_out(words: list[Any]) -> bool:
    """True for words that name a place outside of the folder in which files may be written or much is read."""
    return any("/" in word[:1] or "=/" in word or ".." in word or word in (".", "/", "~") for word in words)


def called(words: list[str]) -> tuple[int, str, str]:
    """Run the command in this process: exit code, output and messages."""
    given, out, err = sys.argv, StringIO(), StringIO()
    sys.argv = ["unpad", *words]
    try:
        with redirect_stdout(out), redirect_stderr(err):
            try:
                main()
                code = 0
            except SystemExit as ended:
                code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    finally:
        sys.argv = given
    return code, out.getvalue(), err.getvalue()


BUILDERS: dict[str, Callable[[Path], Target]] = {
    "recipe_yaml": recipe_yaml, "recipe_fields": recipe_fields, "command_line": command_line, "data_check": data_check,
}  # fmt: skip
