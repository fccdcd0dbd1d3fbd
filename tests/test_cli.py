"""The command line: every verb helps, errors are three lines and a code, and one run goes from data to answers."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.processes import in_child
from tests.helpers.shell import Outcome
from tests.helpers.toy import write_toy
from tests.helpers.verbs import USAGE, VERBS, commands
from unpad.cli.main import main
from unpad.errors import Interrupted
from unpad.inference.loaded import load
from unpad.recipes.file import RECIPES, load_recipe

pytestmark = pytest.mark.slow


# --------------------------------------------------------------------------- help and usage


@pytest.mark.promise("llm.your-data")
@pytest.mark.parametrize("name", VERBS)
def test_every_verb_helps_with_an_example(unpad, name):
    verb = name.split()
    shown = unpad(*verb, "--help")
    assert unpad(*verb, "-h") == shown
    assert shown.code == 0
    assert f" {' '.join(verb)} " in shown.out.splitlines()[0]
    examples = re.findall(r"Example: unpad (.+)", shown.out)
    assert examples, "no example"
    assert examples[0].split()[: len(verb)] == verb
    options = {option for parameter in commands()[name].params for option in parameter.opts}
    assert ("--json" in options) == VERBS[name].json


@pytest.mark.promise("llm.your-data")
@pytest.mark.parametrize("arguments", USAGE)
def test_wrong_usage_is_code_2(unpad, arguments):
    assert unpad(*arguments).code == 2


# --------------------------------------------------------------------------- errors


def assert_three_lines(outcome: Outcome, code: int, kind: str) -> None:
    assert outcome.code == code, outcome
    lines = outcome.err.strip().splitlines()
    assert lines[0].startswith(f"{kind}: ")
    assert len(lines) <= 3
    assert all(line.startswith(("  at: ", "  do: ")) for line in lines[1:])
    assert lines[-1].startswith("  do: ")
    assert "Traceback" not in outcome.out + outcome.err


@pytest.mark.promise("llm.your-data")
def test_a_directory_with_a_run_is_not_overwritten(unpad, tmp_path):
    arguments = ["train", write_toy(tmp_path / "toy"), "train.max_steps=1", "--out", tmp_path / "run"]
    assert unpad(*arguments).code == 0
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    outcome = unpad(*arguments)
    assert_three_lines(outcome, 2, "RecipeError")
    assert "--resume" in outcome.err
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.promise("cli.resume")
def test_the_printed_command_continues_the_run_when_it_is_pasted(unpad, tmp_path):
    recipe = write_toy(tmp_path / "toy", stages=[])
    arguments = ["train", recipe, "train.max_epochs=9", "train.max_steps=2", "--out"]
    for out in ("zh_chat", "it's my run"):  # the name of a recipe, and one that a shell would take apart
        assert unpad(*arguments, out).code == 0
        said = unpad(*arguments, out).err
        words = shlex.split(said.partition("continue it with ")[2].partition(", or choose")[0])
        assert words[:3] == ["unpad", "train", "--resume"]
        told = unpad(*words[1:], "train.max_steps=3")
        assert (told.code, "resumed" in told.out) == (0, True)
        assert "train.max_steps is 3, was 2" in told.out
    command = json.loads((tmp_path / out / "run.json").read_text())
    assert command["recipe"] == str(recipe), "the command of the run stays that of its recipe"
    assert command["overrides"] == ["train.max_epochs=9", "train.max_steps=3"]
    assert "nothing to do" in unpad(*words[1:]).out + unpad("train", recipe, "--out", out, "--resume").out
    (tmp_path / "runs").mkdir()
    (tmp_path / out).rename(tmp_path / "runs" / "mine")
    assert unpad("train", "--resume", "mine", "train.max_steps=4").code == 0
    assert unpad("train", "--resume", "train.max_steps=5", "--out", "runs/mine").code == 0
    assert load("mine").step == 5
    for wrong, words in (
        (["mine", "optim.lr=0.5"], "optim.lr"), (["mine", "--out", "zh_chat"], "two runs are named"),
        (["train.max_steps=9"], "unpad train --resume RUN train.max_steps=9; known: mine"),
        (["mnie"], "did you mean mine?"),
    ):  # fmt: skip
        assert words in unpad("train", "--resume", *wrong).err


@pytest.mark.promise("memory.sequence")
def test_out_of_memory_is_code_8_and_names_sequence_peak_and_setting(unpad, tmp_path, monkeypatch):
    from unpad.models.decoder import Decoder

    def full(*_: object) -> None:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: 99 bytes")

    recipe = write_toy(tmp_path / "toy")
    monkeypatch.setattr(Decoder, "losses", full)
    outcome = unpad("train", recipe, "--out", tmp_path / "run")
    assert_three_lines(outcome, 8, "OutOfMemoryError")
    assert re.search(r"a sequence of \d+ tokens does not fit", outcome.err)
    assert re.search(r"texts.jsonl:\d+", outcome.err)
    assert re.search(r"peak memory [\d.]+ GiB", outcome.err)
    assert "plan.max_tokens" in outcome.err


def test_ctrl_c_outside_of_training_is_code_130(unpad, monkeypatch):
    def interrupted(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("unpad.trials.preview.preview", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        outcome = unpad("plan", "zh_chat")
    finally:
        signal.signal(signal.SIGINT, before)
    assert outcome.code == Interrupted.exit_code
    assert "Traceback" not in outcome.out + outcome.err


# --------------------------------------------------------------------------- data and recipes


def test_recipes_are_listed_copied_once_and_described_by_a_schema(unpad, tmp_path):
    listed = unpad("recipes", code=0)
    assert [line.split()[0] for line in listed.out.splitlines() if line[0] != " "] == [
        "chat", "dpo", "events", "events_labels", "images", "images_cnn", "llava_prune", "llm", "photos", "small",
        "vqa", "vqa_prune", "zh_chat",
    ]  # fmt: skip
    copy = tmp_path / "mine.yaml"
    assert unpad("recipes", "copy", "zh_chat", copy).code == 0
    assert copy.read_bytes() == (RECIPES / "zh_chat.yaml").read_bytes()
    assert load_recipe(str(copy)) == load_recipe("zh_chat")
    assert_three_lines(unpad("recipes", "copy", "llm", copy), 2, "RecipeError")
    assert copy.read_bytes() == (RECIPES / "zh_chat.yaml").read_bytes()
    schema = json.loads(unpad("recipes", "schema").out)
    assert {"data", "tokenizer", "model", "plan", "optim", "stages", "train"} <= set(schema["properties"])
    assert "kv_heads" in schema["$defs"]["model_decoder"]["properties"]


# --------------------------------------------------------------------------- a whole run


def test_a_run_from_data_to_answers(unpad, tmp_path):
    recipe = write_toy(tmp_path / "toy")
    run = tmp_path / "runs" / "toy-1"
    assert unpad("runs").out.startswith("nothing has run here yet")

    trained = unpad("train", recipe, "stages.pretrain.train.max_epochs=1", "stages.tune.train.max_epochs=1", code=0)
    assert "next:  unpad chat toy-1" in trained.out
    assert "unpad eval toy-1" in trained.out
    assert len(trained.out.splitlines()) < 60
    assert {"recipe.yaml", "tokenizer.json", "metrics.jsonl", "metrics.csv", "report.html", "checkpoints"} <= {
        path.name for path in run.iterdir()
    }

    plain = unpad("eval", "toy-1")
    metrics = json.loads(unpad("eval", "toy-1", "--json").out)
    assert plain.code == 0
    assert {"loss", "perplexity", "bits_per_char", "bits_per_byte"} <= set(metrics)
    for name, metric in metrics.items():
        beside = {"method", "difference", "better", "sentence"} if name.startswith("simple_") else set()
        assert set(metric) == {"value", "low", "high", "num", "num_groups", "num_censored", "part", "best_of"} | beside
        assert metric["low"] <= metric["value"] <= metric["high"]
        assert f"{name} " in plain.out
        assert f"{metric['value']:.4f}" in plain.out

    one = unpad("generate", "toy-1", "--prompt", "小猫喜欢", "max_new_tokens=5", code=0)
    assert one.out.endswith("\n")
    several = unpad("generate", "toy-1", "max_new_tokens=5", stdin="小猫喜欢\n\n老师看见\n")
    assert [line.partition(" -> ")[0] for line in several.out.splitlines() if " -> " in line] == [
        "小猫喜欢",
        "老师看见",
    ]
    assert f"小猫喜欢 -> {one.out.strip()}" in several.out
    assert unpad("generate", "toy-1", "--prompt", "小猫", "temperature=-1").code == 2

    chatted = unpad("chat", "toy-1", "max_new_tokens=5", stdin="你好\n小猫喜欢什么？\n", code=0)
    assert len(chatted.out.splitlines()) == 2

    assert "toy-1" in unpad("runs").out
    assert Path(unpad("runs", "toy-1").out.strip()).read_text(encoding="utf-8").startswith("<!doctype html>")


@pytest.mark.promise("llm.tokenizer", "llm.your-data")
def test_the_language_model_takes_a_tokenizer_file_and_every_option_of_model_and_training(unpad, tmp_path):
    toy = write_toy(tmp_path / "toy", tokenizer={"kind": "bpe"})
    assert unpad("train", toy, "train.max_steps=1", "--out", tmp_path / "first").code == 0
    tokenizer = tmp_path / "first" / "tokenizer.json"  # any tokenizer.json does; here one trained on the text
    wanted = {
        "data.text": tmp_path / "toy" / "texts.jsonl", "tokenizer.kind": "file", "tokenizer.path": tokenizer,
        "model.width": 32, "model.blocks": 3, "model.heads": 4, "model.kv_heads": 2, "model.context": 24,
        "model.hidden": 40, "model.eps": 1e-5, "model.dropout": 0.0,
        "plan.strategy": "dynamic", "plan.batch_size": 4, "plan.tokens_per_step": 1, "plan.max_tokens": 16,
        "plan.stride": 8, "plan.cross_documents": "true",
        "optim.lr": 1e-4, "optim.schedule": "constant", "optim.clip": 0.5,
        "train.max_epochs": 2, "train.patience": "null", "train.seed": 42, "train.threads": 1, "precision": "fp32",
    }  # fmt: skip
    run = tmp_path / "llm"
    unpad("train", "llm", *(f"{key}={value}" for key, value in wanted.items()), "--out", run, code=0)
    resolved = load_recipe(str(run / "recipe.yaml")).model_dump(mode="json")
    for key, value in wanted.items():
        found: Any = resolved
        for part in key.split("."):
            found = found[part]
        found = found[0]["path"] if key == "data.text" else found
        assert json.dumps(found) == str(value) or str(found) == str(value), key
    tokens = {int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*")}
    assert len(tokens) == 2, "one checkpoint per epoch"
    assert (run / "checkpoints" / "best").is_dir()
    assert (run / "tokenizer.json").read_bytes() == tokenizer.read_bytes()
    vocabulary = json.loads(tokenizer.read_text(encoding="utf-8"))["model"]["vocab"]
    from unpad.inference.loaded import load

    model = load(run).model
    assert model.embed.weight.shape == (len(vocabulary), 32)
    assert len(model.blocks) == 3


@pytest.mark.promise("llm.epochs")
def test_losses_of_training_and_of_held_out_text_stand_beside_each_other_every_epoch(unpad, tmp_path):
    recipe = write_toy(tmp_path / "toy", stages=[], checkpoint={"every": None})
    assert unpad("train", recipe, "train.max_epochs=2", "--out", tmp_path / "run").code == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    epochs = [row for row in rows if row["kind"] == "epoch"]
    held_out = [row for row in rows if row["kind"] == "eval"]
    assert [row["epoch"] for row in epochs] == [1, 2]
    assert [row["step"] for row in held_out] == [row["step"] for row in epochs]
    steps = {int(path.name.removeprefix("step-")) for path in (tmp_path / "run" / "checkpoints").glob("step-*")}
    assert steps == {row["step"] for row in epochs}
    assert [row["heldout_loss"] for row in epochs] == [row["loss"] for row in held_out]
    assert all(row["loss"] != row["heldout_loss"] for row in epochs)
    last = json.loads(unpad("eval", tmp_path / "run", "--json").out)
    parts = [last[f"{name}_loss"]["value"] for name in ("text", "chat")]
    assert min(parts) < min(row["loss"] for row in held_out) < max(parts), "both kinds of text, weighted by targets"


def test_numbers_without_end_are_still_json(unpad, tmp_path, monkeypatch):
    from unpad.evaluation.metrics import Metric
    from unpad.evaluation.rows import Evaluation

    endless = {"perplexity": Metric(float("inf"), 1e300, float("inf"), 3)}
    monkeypatch.setattr("unpad.cli.options.check_run", lambda *_, **__: None)  # there is none
    monkeypatch.setattr("unpad.evaluation.run.evaluate_own", lambda *_: Evaluation(endless, []))
    shown = unpad("eval", "any", "--json").out
    values = json.loads(shown, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert values["perplexity"].items() >= {"value": "inf", "low": 1e300, "high": "inf", "num": 3}.items()


def _in_bash(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A line of a shell in which `unpad` is this package, wherever the interpreter stands."""
    script = f'unpad() {{ {shlex.quote(sys.executable)} -m unpad "$@"; }}; {command}'
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=folder, check=False)


def test_the_command_ends_quietly_when_its_reader_has_left(tmp_path):
    assert _in_bash("unpad recipes | true", tmp_path).stderr == ""


def _in_child(folder: Path, command: Sequence[object]) -> tuple[int, str]:
    """Exit code and standard error, as a program has it, of a command in a forked process."""

    def work() -> None:
        os.chdir(folder)
        os.dup2(written.fileno(), 2)
        sys.stderr = open(2, "w", errors="backslashreplace")  # noqa: SIM115
        sys.argv = ["unpad", *map(str, command)]
        try:
            main()
        except SystemExit as end:
            sys.stderr.flush()
            os._exit(int(end.code or 0))

    with tempfile.TemporaryFile() as written:
        code = in_child(work)
        written.seek(0)
        return code, written.read().decode()


@pytest.mark.slow
def test_names_that_are_not_utf8_are_refused_and_shown_escaped(tmp_path):
    recipe = write_toy(tmp_path / "toy")
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / os.fsdecode("中.txt".encode("gb18030"))).write_text("a\n\nb")
    odd = os.fsdecode(b"\xd6\xd0")
    for code, *command in (
        (3, "train", recipe, f"data.text={folder}", "--out", tmp_path / "run"),
        (3, "data", "check", folder),
        (2, "train", recipe, "--out", tmp_path / odd),
    ):
        ended, errors = _in_child(tmp_path, command)
        assert (ended, "E_NAME" in errors, r"\xd6\xd0" in errors) == (code, True, True), errors
        assert "Traceback" not in errors
    assert sorted(path.name for path in tmp_path.iterdir()) == ["texts", "toy"]


@pytest.mark.nightly
def test_output_that_cannot_be_written_or_shown_is_no_traceback(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"你": 1}\n{"text": "a"}\n', encoding="utf-8")
    check = "unpad data check a.jsonl"
    for code, command in ((3, f"PYTHONIOENCODING=ascii {check}"), (3, f"{check} >&-"), (6, f"{check} > /dev/full")):
        done = _in_bash(command, tmp_path)
        assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
