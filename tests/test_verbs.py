"""What a verb asks of its function, and where it prints what comes back."""

import ast
import json
import re
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from rich.console import Console

from unpad.data.tokens.lost import LostCharacters
from unpad.errors import NOT_PROVED, PLEASE_REPORT, UNFORESEEN
from unpad.evaluation.rows import Evaluation
from unpad.inference.prompts import Prompt, Reply

ROOT = Path(__file__).parents[1]


@dataclass
class Calls:
    """Replaces functions by ones that note how they were called."""

    patch: pytest.MonkeyPatch
    made: list[Any] = field(default_factory=list)

    def replace(self, place: str, result: Any = None) -> None:
        module, _, name = place.rpartition(".")

        def call(*args: Any, **options: Any) -> Any:
            shown = tuple("console" if isinstance(one, Console) else one for one in args)
            named = {key: "console" if isinstance(one, Console) else one for key, one in options.items()}
            self.made.append((name, shown, named) if named else (name, shown))
            return result

        self.patch.setattr(import_module(module), name, call)


# Modules that bind functions of others, and must not bind a replaced one when a verb imports them first.
BINDING = (
    "unpad.api", "unpad.evaluation.run", "unpad.evaluation.vqa_cost",
    "unpad.inference.onnx_file",
    "unpad.serving.served",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _no_early_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of recipes and runs in these tests lead to nothing."""
    for module in ("training", "trials", "models", "runs", "options"):  # the names of these tests lead to nothing
        for check in ("check_recipe", "check_run", "check_run_or_recipe", "check_names"):
            monkeypatch.setattr(f"unpad.cli.{module}.{check}", lambda *_, **__: None, raising=False)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    for module in BINDING:
        import_module(module)
    return Calls(monkeypatch)


def test_no_module_keeps_a_replaced_function():
    replaced = set(re.findall(r'(?:replace|setattr)\(\s*"([\w.]+)"', Path(__file__).read_text(encoding="utf-8")))
    binding = set()
    for path in sorted((ROOT / "unpad").rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom) and any(
                f"{node.module}.{name.name}" in replaced for name in node.names
            ):
                binding.add(".".join(path.relative_to(ROOT).with_suffix("").parts))
    assert binding == set(BINDING)


def shown(**json_values: Any) -> SimpleNamespace:
    """A result with lines and JSON values, as verbs print them."""
    lines = ["first [b]", "second"]
    return SimpleNamespace(lines=lambda: lines, text=lambda: lines, to_json=lambda: json_values)


LINES = "first [b]\nsecond\n"


@pytest.mark.parametrize(("options", "said"), [([], ""), (["--data", "new.jsonl"], "5 rows read\n")])
def test_the_json_of_an_evaluation_is_json_alone_and_rows_of_new_data_are_told_beside_it(
    unpad, monkeypatch, options, said
):
    new = Evaluation({}, ["5 rows read"], facts={"near_duplicates": {"near": 2}})
    monkeypatch.setattr("unpad.evaluation.run.evaluate_own", lambda *_: Evaluation({}, ["5 rows read"]))
    monkeypatch.setattr("unpad.evaluation.run.evaluate_new", lambda *_: new)
    told = unpad("eval", "any", "--json", *options)
    assert (told.code, json.loads(told.out), told.err) == (0, new.facts if options else {}, said)


@pytest.mark.parametrize("passed", [True, False])
def test_prove_and_check_end_with_the_code_of_what_they_found(unpad, calls, passed):
    found = shown(passed=passed)
    found.passed = passed
    calls.replace("unpad.proof.recipe.prove_recipe", found)
    calls.replace("unpad.data.check.check", found)
    for verb, code in ((("prove", "mine"), NOT_PROVED), (("data", "check", "a", "b"), 3)):
        told = unpad(*verb)
        assert (told.code, told.out) == (0 if passed else code, LINES)
        told = unpad(*verb, *(["optim.lr=1"] if verb[0] == "prove" else ["--kind", "text"]), "--json")
        assert (told.code, json.loads(told.out)) == (0 if passed else code, {"passed": passed})
    assert calls.made == [
        ("prove_recipe", ("mine", [])),
        ("prove_recipe", ("mine", ["optim.lr=1"])),
        ("check", ([Path("a"), Path("b")], None, None, [])),
        ("check", ([Path("a"), Path("b")], "text", None, [])),
    ]


class Writes:
    """A run that continues a prompt with its seed."""

    num_system = 0
    recipe = SimpleNamespace(generate=SimpleNamespace(seed=5), data=SimpleNamespace(vqa=[]))

    def prompt(self, text: str, system: str) -> Prompt:
        return Prompt(text, system, [1, 2, 3], LostCharacters(len(text) if text == "?" else 0, len(text)))

    def stream(self, text: str, *, system: str) -> list[str]:
        return [text, "+", system]

    def replies(self, prompts: list[Prompt], seeds: list[int]) -> list[Reply]:
        return [Reply(one, f"{seed}", 1, "eos", seed) for one, seed in zip(prompts, seeds, strict=True)]


def test_generate_draws_each_prompt_with_the_next_seed_unless_one_is_given(unpad, calls):
    calls.replace("unpad.inference.loaded.load", Writes())
    calls.replace("unpad.evaluation.text.heldout_openings", ["one", "two"])
    assert unpad("generate", "mine", "--prompt", "a", "--prompt", "b").out == "a -> 5\n\nb -> 6\n\n"
    assert unpad("generate", "mine", "seed=5", stdin="a\n\n b\n").out == "a -> 5\n\n b -> 5\n\n"
    assert unpad("generate", "mine", "--heldout", 2).out == "one -> 5\n\ntwo -> 6\n\n"
    told = unpad("generate", "mine", "--prompt", "a", "--system", "s")
    assert (told.out, told.err.startswith("note: no conversation")) == ("a+s\n", True)
    told = unpad("generate", "mine", "--prompt", "?", "--system", "s", "--json")
    assert "warning: the prompt is mostly unknown" in told.err
    assert json.loads(told.out) == [
        {
            "prompt": "?", "system": "s", "reply": "5", "prompt_tokens": 3, "tokens": 1, "finished": "eos", "seed": 5,
            "unknown_characters": 1, "mostly_unknown": True,
        }
    ]  # fmt: skip
    asked = [made for made in calls.made if made[0] == "load"]
    assert asked[:2] == [("load", ("mine", [])), ("load", ("mine", ["generate.seed=5"]))]
    assert next(made for made in calls.made if made[0] == "heldout_openings")[1][1:] == (2,)


def test_a_recipe_is_not_copied_over_a_file(unpad, tmp_path):
    told = unpad("recipes", "copy", "zh_chat", "mine.yaml")
    assert told.out == "mine.yaml written; run it with: unpad train mine.yaml\n"
    before = (tmp_path / "mine.yaml").read_bytes()
    assert unpad("recipes", "copy", "llm", "mine.yaml").code == 2
    assert (tmp_path / "mine.yaml").read_bytes() == before


@pytest.mark.promise("cli.exit-codes")
def test_the_traceback_of_an_error_is_printed_only_if_asked(unpad, monkeypatch):
    def full(*_: Any) -> None:
        raise MemoryError("\n")

    monkeypatch.setattr("unpad.trials.preview.preview", full)
    for verb, debug in (("train", ()), ("train", ("--debug",))):  # of an error with a code of its own
        told = unpad(verb, "absent", *debug)
        assert (told.code, "Traceback" in told.err) == (2, bool(debug))
    told = unpad("plan", "mine")
    assert (told.code, told.err.splitlines()[0]) == (8, "OutOfMemoryError: the work does not fit")
    assert "Traceback" not in told.err
    assert "Traceback" in unpad("plan", "mine", "--debug").err

    def ends(*_: Any) -> None:
        raise typer.Exit(4)

    monkeypatch.setattr("unpad.trials.preview.preview", ends)
    assert unpad("plan", "mine").code == 4

    def lost(*_: Any) -> None:
        raise OSError(5, "Input/output error", "a/b.txt")

    monkeypatch.setattr("unpad.trials.preview.preview", lost)
    told = unpad("plan", "mine")
    assert (told.code, told.err.splitlines()[:2]) == (6, ["DiskError: Input/output error", "  at: a/b.txt"])

    def wrong(*_: Any) -> None:
        raise RuntimeError("of another kind")

    monkeypatch.setattr("unpad.trials.preview.preview", wrong)
    told = unpad("plan", "mine")
    assert (told.code, told.out) == (UNFORESEEN, "")
    assert "RuntimeError: of another kind" in told.err
    assert told.err.endswith(f"\n{PLEASE_REPORT}\n")
