"""The front door: what loading the package and each verb costs in modules, public names, and shell completion."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.helpers.verbs import LIGHT, light_calls, refused_calls, write_files
from unpad.recipes.file import complete_recipe, recipe_names
from unpad.recipes.schema import complete_field, complete_value

pytestmark = pytest.mark.slow

HEAVY = ("torch", "matplotlib", "pyarrow", "transformers", "tensorboard", "tokenizers", "safetensors", "rjieba")
PARSERS = ("numpy", "pydantic", "yaml", "rich", "PIL")  # what `--help` does without as well

SMALL = ("model.width=16", "model.blocks=1", "train.max_steps=2", "stages=[]", "--out", "runs/small")
# Runs verbs one after another, and prints the watched modules that each was the first to load.
VERBS = """
import json, sys
import unpad
from unpad.cli.main import main

def run(verb):
    if verb == ["completion"]:
        from unpad.recipes.schema import complete_field
        complete_field("vqa", "model.")
        return
    sys.argv = ["unpad", *verb]
    try:
        main()
    except SystemExit as end:
        assert end.code in (0, None), (verb, end.code)

watched, *verbs = json.loads(sys.argv[1])
first, before = {}, set()
for verb in verbs:
    run(verb)
    loaded = set(watched) & set(sys.modules)
    first[" ".join(verb)] = sorted(loaded - before)
    before |= loaded
print("\\n" + json.dumps(first))
"""


def shell(folder: Path, *command: str, **environment: str) -> str:
    """Standard output of a command that succeeds and prints no error."""
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=folder, env={**os.environ, **environment}, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def loaded_by(folder: Path, watched: tuple[str, ...], *verbs: list[str]) -> dict[str, list[str]]:
    """{verb: watched modules that it is the first to load}, of verbs that run one after another in one process."""
    out = shell(folder, sys.executable, "-c", VERBS, json.dumps([watched, *verbs]))
    first: dict[str, list[str]] = json.loads(out.splitlines()[-1])
    return first


# --------------------------------------------------------------------------- modules


@pytest.mark.promise("speed.imports")
def test_help_and_the_package_load_the_standard_library_and_typer_only(tmp_path):
    assert loaded_by(tmp_path, (*HEAVY, *PARSERS), ["--help"]) == {"--help": []}


@pytest.mark.promise("speed.imports")
def test_verbs_that_need_no_model_load_no_heavy_module(tmp_path):
    run = write_files(tmp_path)
    calls = light_calls()
    shown = loaded_by(tmp_path, HEAVY, *calls, ["completion"], ["runs", "mine-1"])
    assert shown.pop("runs mine-1") == ["torch"], "the family of a run is what its model says"
    assert {verb: loaded for verb, loaded in shown.items() if loaded} == {}
    assert len(shown) == len(calls) + 1 >= 7
    assert (run / "report.html").stat().st_size > 1000


DIVIDING = ("unpad.training.parallel.sharding",)  # a model among processes


@pytest.mark.nightly
@pytest.mark.promise("processes.one")
def test_training_in_one_process_loads_nothing_of_hugging_face_the_compiler_of_torch_or_what_divides_a_model(tmp_path):
    assert all(map(find_spec, DIVIDING)), "the rule is about today's names"
    chat = [{"role": "user", "content": "你好"}, {"role": "assistant", "content": "你好！"}]
    rows = [{"messages": [*chat, {"role": "user", "content": f"第{number}"}, chat[1]]} for number in range(40)]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    extras = ("transformers", "trl", "peft", "accelerate", "datasets", "jinja2", "gguf", "torch._dynamo")
    loaded = loaded_by(tmp_path, (*extras, *DIVIDING), ["train", "zh_chat", "data.chat=chat.jsonl", *SMALL])
    assert list(loaded.values()) == [[]]


# --------------------------------------------------------------------------- public names


# --------------------------------------------------------------------------- shell completion


FAILING = """
import json, sys
from unpad.cli.main import main

ended = []
heavy, *verbs = json.loads(sys.argv[1])
for verb in verbs:
    sys.argv = ["unpad", *verb]
    try:
        main()
    except SystemExit as end:
        ended.append([end.code, verb])
    assert not set(heavy) & set(sys.modules), verb
print("\\n" + json.dumps(ended))
"""


@pytest.mark.nightly
@pytest.mark.promise("cli.early")
def test_errors_of_names_fields_and_places_are_told_before_a_heavy_module_is_loaded(tmp_path):
    write_files(tmp_path)
    calls = refused_calls()
    command = [sys.executable, "-c", FAILING, json.dumps([LIGHT, *(words for _, words in calls)])]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [list(one) for one in calls]
    assert "Traceback" not in done.stderr


def test_recipes_complete_to_packaged_names_and_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("mine.yaml", "other.yml", "data.jsonl"):
        Path(name).write_text("{}\n")
    Path("sub").mkdir()
    Path("sub/deep.yaml").write_text("{}\n")
    assert complete_recipe("") == sorted([*recipe_names(), "mine.yaml", "other.yml"])
    assert complete_recipe("zh") == ["zh_chat"]
    assert complete_recipe("sub/") == ["sub/deep.yaml"]
    assert complete_recipe("nowhere/") == []


@pytest.mark.promise("cli.completion")
def test_fields_complete_section_by_section_and_then_their_values():
    def names(incomplete: str) -> list[str]:
        return [name for name, _ in complete_field("vqa", incomplete)]

    assert {"optim.", "data.", "model.", "losses=", "precision="} <= set(names(""))
    assert names("p") == ["plan.", "precision=", "profile="]
    assert names("op") == names("optim."), "with one section left, its fields"
    assert "optim.lr=" in names("optim.")
    assert names("optim.sch") == [
        f"optim.schedule={x}" for x in ("constant", "exponential", "warmup", "cosine", "restarts")
    ]
    assert names("optim.schedule=") == names("optim.sch")
    assert names("plan.strategy=")[-1].startswith("plan.strategy=")
    assert names("plan.drop") == ["plan.drop_last=true", "plan.drop_last=false"]
    assert names("train.max_e") == ["train.max_epochs=", "train.max_epochs=20"], "nothing, and the value in the recipe"
    assert "model.vision.width=" in names("model."), "the fields that the recipe sets"
    assert names("nothing") == names("nothing.at=") == []
    assert dict(complete_field(None, "optim."))["optim.clip="] == "Largest global gradient norm."
    assert "stages.tune.optim.lr_scale=" in dict(complete_field("zh_chat", "stages."))
    assert complete_value("zh_chat", "optim.schedule", "co") == ["constant", "cosine"]
    assert complete_value("absent", "optim.absent", "") == []


@pytest.mark.nightly
@pytest.mark.promise("cli.completion")
def test_the_shell_completes_recipes_runs_and_fields_once_installed(tmp_path):
    """As bash asks: it sources the installed script, whose function calls `unpad` with the words typed so far."""
    for name in ("runs/first-1", "runs/other-1"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "recipe.yaml").write_text("{}\n")
    command = tmp_path / "bin" / "unpad"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m unpad "$@"\n')
    command.chmod(0o755)
    script = """
    unpad --install-completion || exit 1
    source ~/.bash_completions/unpad.sh
    complete_words() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _unpad_completion unpad; echo "${COMPREPLY[@]}"; }
    complete_words unpad eval fi
    complete_words unpad train zh_chat optim.lr = 1e-3 optim.schedule = co
    """
    path = f"{command.parent}:{os.environ['PATH']}"
    out = shell(tmp_path, "bash", "--norc", "-c", script, HOME=str(tmp_path), PATH=path)
    assert out.splitlines()[-2:] == ["first-1", "constant cosine"]
    assert "unpad.sh" in (tmp_path / ".bashrc").read_text()
