"""A recipe says what is wrong with it, where, and what to do; nothing in it can crash or stall the program."""

from collections.abc import Iterator
from inspect import isabstract
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from tests.helpers.work import counted
from unpad.errors import RecipeError
from unpad.interchange.origin import open_recipe
from unpad.models import model_kinds, model_module
from unpad.recipes.file import load_recipe, parse_recipe, recipe_names
from unpad.recipes.lines import LineLoader, to_yaml
from unpad.recipes.recipe import Recipe, differences, may_change_on_resume
from unpad.recipes.section import Section, checked
from unpad.run.folder import run_recipe
from unpad.run.upgrade import Yaml11Loader

TWO_STAGES = "stages:\n  - name: pretrain\n    train: {max_epochs: 3}\n  - name: tune\n    optim: {lr_scale: 0.5}\n"


@pytest.fixture
def write(tmp_path: Path) -> object:
    def write(text: str) -> str:
        path = tmp_path / "my recipe.yaml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def refusal(name: str, *overrides: str) -> RecipeError:
    with pytest.raises(RecipeError) as caught:
        load_recipe(name, list(overrides))
    assert caught.value.exit_code == 2
    assert caught.value.fix
    return caught.value


@pytest.mark.parametrize(
    ("text", "what", "line"),
    [
        ("optim:\n  lrr: 3\n", 'unknown key "lrr"', "2: optim.lrr"),
        ("optim:\n  lr: fast\n", '"fast" is not a number', "2: optim.lr"),
        ("optim:\n  lr: -1\n", "greater than 0, got -1", "2: optim.lr"),
        ("optim:\n  clip: .nan\n", "NaN is not a finite number", "2: optim.clip"),
        ("tokenizer:\n  kind: file\n", "tokenizer.kind=file needs tokenizer.path", "1: tokenizer"),
        ("optim:\n  lr: 1\n  lr: 2\n", 'the key "lr" occurs twice', "3"),
        ("1: 2\n", 'unknown key "1"', "1: 1"),
        ("? [a, b]\n: c\n", "a key is not a name", "1"),
        ("data: !!python/name:os.system x\n", "could not determine a constructor", "1"),
        ("stages:\n  - name: a\n    optim: {lr: -3}\n", "greater than 0, got -3", "3: stages.a.optim.lr"),
        ("stages:\n  - name: a b\n", "match the pattern", "2: stages.0.name"),
        ("train:\n  seed: !!int ''\n", '"" is no int', "2"),
        ("train: {}\n? !!str [a]\n: 3\n", "a key is not a name", "2"),
        ("collapse:\n  preset: [fast]\n", "standard", "2: collapse.preset"),
        ("optim:\n  lr: true\n", "true is not a number", "2: optim.lr"),
        ("train:\n  seed: no\n", '"no" is not a whole number', "2: train.seed"),
        ("tokenizer:\n  path: a.json\n", "tokenizer.path needs tokenizer.kind=file", "1: tokenizer"),
        ("events:\n  landmark: 2021-06-01\n", "one date for all is no landmark", "2: events.landmark"),
        ("plan:\n  drop_last: 1\n", "1 is not true or false", "2: plan.drop_last"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_its_line(write, text, what, line):
    path = write(text)
    assert refusal(path).where == f"{path}:{line}"
    with pytest.raises(RecipeError, match=what):
        load_recipe(path)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("[1, 2]\n", "a recipe is a mapping"), ("just words\n", "a recipe is a mapping"),
        ("train: {seed: 2020-13-45}\n", "is not a whole number"), ("train: {seed: " + "9" * 5000 + "}\n", "digits"),
        ("\x00", "unacceptable character"), ("stages: [{name: a}, {name: a}]\n", "stages share a name"),
        ("stages: [{name: a, train: {max_steps: 3}}]\n", "max_steps belongs to the whole run"),
        ("[" * 2000, "recursion"), ("#" * (2 << 20), "larger than 1 MB"),
    ],
)  # fmt: skip
def test_what_has_no_line_names_the_file(write, text, what):
    path = write(text)
    error = refusal(path)
    assert path in error.where
    assert what in error.what


def test_a_bomb_of_aliases_is_refused_at_once(write):
    letters = "abcdefgh"
    lines = ["a: &a [x,x,x,x,x,x,x,x,x]"]
    lines += [f"{new}: &{new} [{','.join([f'*{old}'] * 9)}]" for old, new in pairwise(letters)]
    text = "\n".join(lines)
    assert len(text) < 306
    path = write(text)
    refused, calls = counted(lambda: refusal(path))
    assert "too large or too deeply nested" in refused.what
    assert calls < 1_000_000  # three million nodes are not walked


@pytest.mark.promise("cli.overrides")
def test_unknown_keys_and_recipes_list_the_nearest(write):
    assert "lr" in refusal(write("optim: {lrr: 3}")).fix
    assert "optim" in refusal(write("optm: {lr: 3}")).fix
    assert "lr_scale" in refusal(write("stages: [{name: a, optim: {lrscale: 3}}]")).fix
    assert "llm" in refusal("lllm").fix
    assert {"llm", "zh_chat"} <= set(recipe_names())
    assert "there is no file" in refusal("nowhere/at/all.yaml").what


def test_numbers_as_people_write_them(write):
    recipe = load_recipe(write("optim:\n  lr: 1e-3\n  betas: [0.9, 0.99]\ntrain: {seed: 7}\n"))
    assert (recipe.optim.lr, recipe.optim.betas, recipe.train.seed) == (1e-3, (0.9, 0.99), 7)
    assert load_recipe(write("")) == parse_recipe({})
    assert load_recipe(write("model: {width: 16}")).model == {"kind": "decoder", "width": 16}


# --------------------------------------------------------------------------- overrides


def test_an_override_changes_one_field_and_stages_go_by_name(write):
    path = write(TWO_STAGES)
    recipe = load_recipe(
        path,
        ["optim.lr=1e-4", "stages.tune.train.max_epochs=9", "stages.0.optim.schedule=constant", "data.chat=a.jsonl"],
    )
    first, second = (recipe.for_stage(stage) for stage in recipe.stages)
    assert (first.optim.lr, first.optim.schedule, first.train.max_epochs) == (1e-4, "constant", 3)
    assert (second.optim.lr_scale, second.optim.schedule, second.train.max_epochs) == (0.5, "cosine", 9)
    assert [source.path for source in recipe.data.chat] == ["a.jsonl"]
    assert load_recipe(path, ["data.text=[a.txt, b.txt]", "train.patience=null"]).data.text[1].path == "b.txt"


def test_the_run_s_epochs_bound_every_stage(write):
    recipe = load_recipe(write(TWO_STAGES + "train: {max_epochs: 2}\n"))
    assert [recipe.for_stage(stage).train.max_epochs for stage in recipe.stages] == [2, 2]


@pytest.mark.parametrize(
    ("override", "what", "where"),
    [
        ("optim.lr", "is not key=value", "command line"), ("=3", "is not key=value", "command line"),
        ("optim.lrr=3", 'unknown key "lrr"', "command line: optim.lrr"),
        ("optim.lr=[", "is not a YAML value", "command line: optim.lr"),
        ("optim.lr=" + "[" * 3000, "is not a YAML value", "command line: optim.lr"),
        ("stages.third.optim.lr=1", 'there is no stage "third"', "command line: stages.third.optim.lr"),
        ("stages.tune.optim.lr=-1", "greater than 0", "command line: stages.tune.optim.lr"),
        ("optim.lr=true", "true is not a number", "command line: optim.lr"),
        ("optim.lr=!!int ''", "is not a YAML value", "command line: optim.lr"),
        ("optim.lr={? !!str [a] : 3}", "is not a YAML value", "command line: optim.lr"),
    ],
)  # fmt: skip
def test_a_mistaken_override_is_named(write, override, what, where):
    error = refusal(write(TWO_STAGES), override)
    assert what in error.what
    assert error.where == where


REQUIRED = {"vision": {}, "language": {}, "layers": [1]}  # fields without a default, of sections with booleans


def boolean_fields() -> Iterator[tuple[type[Section], str]]:
    """Every boolean field of a recipe, the model sections of all kinds included."""
    for kind in model_kinds():
        model_module(kind)
    found = [Section]
    for section in found:
        found += section.__subclasses__()
        yield from [(section, name) for name, field in section.model_fields.items() if field.annotation is bool]


@pytest.mark.parametrize(("section", "name"), sorted(set(boolean_fields()), key=str), ids=str)
def test_a_boolean_field_takes_true_and_false_only_and_says_so(section, name):
    required = {name: value for name, value in REQUIRED.items() if name in section.model_fields}
    assert vars(checked(section, {**required, name: False}))[name] is False
    for wrong in (1, 0, 1.0, "yes", "true", 7, None):
        with pytest.raises(RecipeError) as caught:
            checked(section, {**required, name: wrong})
        assert "is not true or false" in caught.value.what
        assert caught.value.fix == "write true or false, without quotes"


WRONG = [
    "abc", "", "1:30", 1.5, -1, 10**12, float("inf"), None, True, [], [1], ["a", "b"], [[1]], {}, {"a": 1},
    {"path": 3}, [{"path": 3}], {"end": "x"}, [{"parameters": 3}],
]  # fmt: skip
PYDANTIC = (
    "Input should", "unable to parse", "valid dictionary", "valid list", "validation error", "type=", "Value error",
)  # fmt: skip


@pytest.mark.promise("cli.values")
def test_no_wrong_value_of_any_field_is_told_in_words_of_the_library_that_checks_them():
    for kind in model_kinds():
        model_module(kind)
    sections = [Section]
    for section in sections:
        sections += section.__subclasses__()
    told = set[str]()
    for section in sections[1:]:
        if isabstract(section):
            continue
        required = {name: value for name, value in REQUIRED.items() if name in section.model_fields}
        for name in section.model_fields:
            for wrong in WRONG:
                try:
                    checked(section, {**required, name: wrong})
                except RecipeError as error:
                    told.add(str(error))
    assert len(told) > 500
    assert [one for one in told if "do: " not in one or any(words in one for words in PYDANTIC)] == []


@pytest.mark.promise("cli.values")
def test_all_faults_of_a_recipe_are_told_at_once(write):
    path = write("train:\n  threads: two\n  max_epoch: 3\noptim: {lr: x}\n")
    error = refusal(path)
    assert (error.summary, error.where) == ('"x" is not a number', f"{path}:4: optim.lr")
    assert error.details == (
        f'also at {path}:2: train.threads: "two" is not a whole number; write a whole number',
        f'also at {path}:3: train.max_epoch: unknown key "max_epoch"; '
        "did you mean max_epochs or max_steps or max_skips?",
    )
    assert refusal(write("".join(f"a{n}: 1\n" for n in range(20)))).details[-1] == "and 12 more"


# --------------------------------------------------------------------------- YAML 1.2


@pytest.mark.promise("cli.numbers")
@pytest.mark.parametrize(
    ("written", "what", "fix"),
    [
        ("1:30", "1:30 can be read as the number 90 (by YAML 1.1) or as a text (by YAML 1.2)", 'write 90, or "1:30"'),
        ("1_000", "1_000 can be read as the number 1000 (by YAML 1.1) or as a text", 'write 1000, or "1_000"'),
        (
            "010",
            "010 can be read as the number 8 (octal, by YAML 1.1) or as 10 (by YAML 1.2)",
            "write 10, or 0o10 for 8, ",
        ),
        ("-010", "can be read as the number -8 (octal, by YAML 1.1) or as -10", "write -10, or -8, or "),
        ("0001", "0001 can be read as the number 1 or as a text with leading zeros", 'write 1, or "0001" in double'),
        ("00", "00 can be read as the number 0 or as a text with leading zeros", 'write 0, or "00" in double'),
        ("0b11", "0b11 can be read as the number 3 (by YAML 1.1)", "write 3, "),
        ("1_0.5", "1_0.5 can be read as the number 10.5 (by YAML 1.1)", "write 10.5, "),
    ],
)
def test_a_number_of_yaml_1_1_alone_is_refused_in_files_and_overrides(write, written, what, fix):
    for error in (refusal(write(f"train:\n  threads: {written}\n")), refusal("zh_chat", f"train.threads={written}")):
        assert what in error.what
        assert error.fix.startswith(fix)
    assert load_recipe("zh_chat", [f'data.text="{written}"']).data.text[0].path == written
    assert written in load_recipe("zh_chat", [f'data.text="{written}"']).to_yaml()


def test_numbers_of_yaml_1_2_are_numbers_and_words_and_dates_are_texts():
    given = "[1e3, 1.5e3, -.5, .5, 0x1F, 0o17, +7, 0, 012.5, 08, yes, No, on, OFF, y, 2021-06-01, 'true', ~, True, 1e]"
    assert LineLoader(given).load() == [
        1000.0, 1500.0, -0.5, 0.5, 31, 15, 7, 0, 12.5, "08", "yes", "No", "on", "OFF", "y", "2021-06-01", "true", None,
        True, "1e",
    ]  # fmt: skip
    assert load_recipe("zh_chat", ["train.max_steps=1e3", "optim.lr=1e-4"]).train.max_steps == 1000
    assert load_recipe("zh_chat", ["data.text=no"]).data.text[0].path == "no"


@pytest.mark.promise("cli.numbers")
@pytest.mark.parametrize(
    "text",
    ["1e3", "1:30", "010", "08", "yes", "off", "2021-06-01", "0o7", "~", "null", "1_0", "=", "<<", ".5", "true", ""],
)
def test_a_text_that_looks_like_something_else_is_quoted_on_writing(text):
    written = to_yaml({"path": text})
    for read in (LineLoader(written).load(), Yaml11Loader(written).load(), yaml.safe_load(written)):
        assert read == {"path": text}


@pytest.mark.promise("cli.numbers")
def test_a_run_of_an_earlier_version_keeps_the_meaning_of_its_recipe(tmp_path):
    old = "train: {threads: 010}\ndata: {split_version: 1, text: 1e3}\noptim: {lr: 1e-3}\nplan: {drop_last: yes}\n"
    (tmp_path / "recipe.yaml").write_text(old, encoding="utf-8")
    recipe = run_recipe(tmp_path)
    assert (recipe.train.threads, recipe.data.text[0].path, recipe.optim.lr) == (8, "1e3", 1e-3)
    assert recipe.plan.drop_last is True


@pytest.mark.promise("cli.numbers")
def test_a_recipe_of_very_many_keys_is_refused_before_it_is_read_to_its_end(write):
    path = write("\n".join(f"k{number}: 1" for number in range(20_000)))
    refused, calls = counted(lambda: refusal(path))
    assert "too large or too deeply nested" in refused.what
    assert calls < 1_000_000


# --------------------------------------------------------------------------- what a run saves and may change


@pytest.mark.promise("llm.by-size")
@pytest.mark.parametrize(
    ("num_kb", "given", "tokens", "width"),
    [(2, [], 512, 128), (299, ["model.width=160"], 512, 160), (300, [], 1024, 128), (1500, [], 2048, 320),
     (3000, [], 4096, 320), (2, ["by_size={}"], 4096, 320), (2, ["train.init_from=base"], 4096, 320)],
)  # fmt: skip
def test_less_text_has_more_updates_and_a_smaller_model(tmp_path, num_kb, given, tokens, width):
    (tmp_path / "text.txt").write_bytes(b"x" * (1000 * num_kb))
    chosen = open_recipe("small", [f"data.text={tmp_path / 'text.txt'}", *given])
    assert (chosen.plan.tokens_per_step, chosen.model["width"]) == (tokens, width)
    assert chosen.fitted().get("plan.tokens_per_step", tokens) == tokens
    assert ("model.width" in chosen.fitted()) == (width == 128)  # not what an override took the place of
    assert chosen.tokenizer.min_count == (2 if tokens <= 1024 else 1)
    again = tmp_path / "recipe.yaml"
    again.write_text(chosen.to_yaml(), encoding="utf-8")
    assert open_recipe(str(again)) == chosen, "a kept recipe loads as it is"


def test_a_saved_recipe_is_the_same_recipe(write):
    recipe = load_recipe(
        write(TWO_STAGES + "data: {text: 数据/*.txt}\n"), ["stages.tune.optim.lr=2e-3", "optim.lr=1e-300"]
    )
    assert load_recipe(write(recipe.to_yaml())) == recipe
    for name in recipe_names():
        packaged = load_recipe(name)
        assert load_recipe(write(packaged.to_yaml())) == packaged


def test_differences_are_listed_by_key(write):
    path = write(TWO_STAGES)
    changed = differences(
        load_recipe(path), load_recipe(path, ["optim.lr=0.5", "stages.tune.train.max_epochs=4", "model.width=8"])
    )
    assert changed == {"optim.lr": (1e-3, 0.5), "stages.1.train.max_epochs": (None, 4), "model.width": (None, 8)}
    assert differences(load_recipe(path), load_recipe(path)) == {}


def test_resume_accepts_ends_logging_evaluation_and_checkpoints_only():
    schema = Recipe.model_json_schema()
    sections = {name: schema["$defs"].get(one.get("$ref", "").rpartition("/")[2], {}) for name, one in
                schema["properties"].items()}  # fmt: skip
    keys = {f"{name}.{field}" for name, section in sections.items() for field in section.get("properties", {})}
    assert {"plan.tokens_per_step", "optim.lr", "train.seed", "data.holdout"} <= keys
    allowed = {key for key in keys if may_change_on_resume(key)}
    assert {key for key in allowed if not key.startswith("generate.")} == {
        "train.max_steps", "train.max_epochs", "train.max_minutes", "train.min_steps", "train.log_every",
        "train.eval_every", "train.grad_norm_warning", "train.allocator", "train.threads", "train.sums", "train.shard",
        "train.timeout", "images.cache_mib", "collapse.policy", "checkpoint.every",
        "checkpoint.every_seconds", "checkpoint.keep",
        "log.to", "log.project",
    }  # fmt: skip
    assert all(map(may_change_on_resume, ("stages.1.train.min_steps", "stages.0.train.eval_every")))
    for other in ("stages", "stages.1.name", "stages.1.optim.lr", "stages.0.train.freeze", "model.width", "profile"):
        assert not may_change_on_resume(other)
