"""An override reaches every stage or is refused; a given source takes the place of the package's own."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from unpad.errors import RecipeError
from unpad.recipes.file import field_schema, load_recipe, recipe_names
from unpad.recipes.overrides import apply_override
from unpad.recipes.recipe import STAGE_SECTIONS, Recipe, stage_fields

# A value for fields whose schema does not tell one.
VALUES: dict[str, Any] = {"plan.strategy": "pack", "optim.betas": [0.8, 0.9], "optim.groups": [], "plan.grow": {3: 400}}
# What else the recipe needs for a field to be allowed.
BESIDE: dict[str, dict[str, Any]] = {
    "optim.cycle_factor": {"optim": {"first_cycle": 5}},
    "plan.batches_per_step": {"plan": {"strategy": "dynamic"}},
}
FIELDS = [f"{section}.{field}" for section in STAGE_SECTIONS for field in stage_fields(section)]
FIELDS += ["losses.cross_entropy", "losses.anything"]


def some_value(field: str) -> Any:
    """A valid value of a field other than its default."""
    if field in VALUES:
        return VALUES[field]
    schema = field_schema(field.split("."))
    kinds = [schema, *schema.get("anyOf", [])]
    for kind in kinds:
        if "enum" in kind:
            return kind["enum"][-1]
    kind = next((kind for kind in kinds if kind.get("type") not in (None, "null")), {"type": "number"})
    lowest = kind.get("exclusiveMinimum", kind.get("minimum", 0))
    return {"boolean": True, "integer": lowest + 3, "number": lowest + 0.5, "array": ["embed.*"]}[kind["type"]]


def in_stages(field: str, value: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """A recipe of three stages, of which those in `names` set a field."""
    section, key = field.split(".")
    return {
        **BESIDE.get(field, {}),
        "stages": [
            {"name": name, **({section: {key: value}} if name in names else {})} for name in ("one", "two", "three")
        ],
    }


def written(folder: Path, values: dict[str, Any]) -> str:
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return str(path)


def refusal(recipe: str, *overrides: str) -> RecipeError:
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe, overrides)
    assert caught.value.exit_code == 2
    return caught.value


def value_in(recipe: Recipe, stage: int, field: str) -> Any:
    section, key = field.split(".")
    values = recipe.for_stage(recipe.stages[stage]).model_dump(mode="json")[section]
    return values.get(key)


@pytest.mark.promise("cli.overrides")
@pytest.mark.parametrize("field", FIELDS)
def test_a_field_that_stages_set_is_refused_and_named_in_each_of_them(tmp_path, field):
    value = some_value(field)
    text = json.dumps(value)
    recipe = written(tmp_path, in_stages(field, value, ("one", "three")))
    section, key = field.split(".")
    whole = json.dumps({**BESIDE.get(field, {}).get(section, {}), key: value})
    for override in (f"{field}={text}", f"{section}={whole}"):
        error = refusal(recipe, override)
        assert f"{field} is set by stages one and three" in error.what
        assert all(f"stages.{name}.{field}={text}" in error.fix for name in ("one", "two", "three"))
    everywhere = [f"stages.{name}.{field}={text}" for name in ("one", "two", "three")]
    changed = load_recipe(recipe, everywhere)
    assert len({json.dumps(value_in(changed, stage, field)) for stage in range(3)}) == 1


@pytest.mark.promise("cli.overrides")
@pytest.mark.parametrize("field", FIELDS)
def test_a_field_that_no_stage_sets_reaches_all_of_them(tmp_path, field):
    value = some_value(field)
    other = "optim.lr" if field != "optim.lr" else "plan.stride"
    recipe = written(tmp_path, BESIDE.get(field, {}) | in_stages(other, 5, ("one", "two", "three")))
    changed = load_recipe(recipe, [f"{field}={json.dumps(value)}"])
    wanted = json.loads(json.dumps(value))  # keys of plan.grow are text in JSON
    assert [json.loads(json.dumps(value_in(changed, stage, field))) for stage in range(3)] == [wanted] * 3


@pytest.mark.parametrize(
    ("values", "override", "fix"),
    [
        ({"plan": {"grow": {3: 400}}}, "plan.grow.5=800", "stages.a.plan.grow.5=800"),
        ({"losses": {"kl": {"end": 1, "steps": 5}}}, "losses.kl.end=2", "stages.a.losses.kl.end=2"),
        ({"losses": {"kl": 1}}, "losses.kl={end: 2, steps: 3}", "'stages.a.losses.kl={end: 2, steps: 3}'"),
        ({"optim": {"betas": [0.8, 0.9]}}, "optim.betas.0=0.7", "stages.a.optim.betas.0=0.7"),
    ],
)
def test_parts_of_a_field_are_refused_with_it(tmp_path, values, override, fix):
    recipe = written(tmp_path, {**values, "stages": [{"name": "a", **values}]})
    assert fix in refusal(recipe, override).fix
    load_recipe(recipe, [f"stages.a.{override}"] if "betas" not in override else [])


def test_stages_that_the_command_line_takes_away_shadow_nothing():
    assert load_recipe("zh_chat", ["train.max_epochs=2", "stages=[]"]).train.max_epochs == 2
    error = refusal("zh_chat", "train.max_epochs=2")
    assert error.what == "train.max_epochs is set by stages pretrain and tune, where this would change nothing"
    assert error.fix == "name the stage: stages.pretrain.train.max_epochs=2 stages.tune.train.max_epochs=2"


def test_a_stage_that_the_command_line_sets_too_keeps_its_own_value():
    recipe = load_recipe("zh_chat", ["optim.lr_scale=0.5", "stages.tune.optim.lr_scale=0.6"])
    assert [recipe.for_stage(stage).optim.lr_scale for stage in recipe.stages] == [0.5, 0.6]
    everywhere = [f"stages.{name}.train.max_epochs=4" for name in ("pretrain", "tune")]
    assert "pretrain and tune" in refusal("zh_chat", "train.max_epochs=2", *everywhere).what  # nobody is left


@pytest.mark.parametrize(
    ("override", "what", "fix"),
    [
        ("stages.tnue.train.max_epochs=3", 'there is no stage "tnue"', "did you mean tune?"),
        ("stages.tune.train.max_epoch=3", 'unknown key "max_epoch"', "did you mean max_epochs?"),
        ("stages.tune.max_epochs=3", 'unknown key "max_epochs"', "did you mean stages.tune.train.max_epochs?"),
        ("stages.tune.train.seed=3", "train.seed belongs to the whole run", "set it outside of stages"),
        ("stages.tune.plan.cross_documents=true", "plan.cross_documents belongs to the whole run", "outside"),
        ("stages.max_epochs=3", 'there is no stage "max_epochs"', "pretrain, tune"),
        ("lr=3", 'unknown key "lr"', "did you mean optim.lr?"),
    ],
)
def test_a_mistyped_stage_or_field_of_a_stage_gets_the_nearest(override, what, fix):
    error = refusal("zh_chat", override)
    assert what in error.what
    assert fix in error.fix


@pytest.mark.parametrize("key", ["data.text.2.weight", "stages.2.train.max_epochs"])
def test_the_number_after_the_last_source_or_stage_is_refused(key, tmp_path):
    two = {"data": {"text": ["a.txt", "b.txt"]}, "stages": [{"name": "one"}, {"name": "two"}]}
    assert load_recipe(written(tmp_path, two), [f"{key}=3".replace(".2.", ".1.")])
    assert refusal(written(tmp_path, two), f"{key}=3").where == f"command line: {key}"


# --------------------------------------------------------------------------- sources


def paths(recipe: Recipe) -> dict[str, list[str]]:
    kinds = ("text", "chat", "images", "vqa", "events")
    return {kind: [source.path for source in recipe.data.sources(kind)] for kind in kinds if recipe.data.sources(kind)}


@pytest.mark.promise("cli.overrides")
def test_a_given_source_takes_the_place_of_all_packaged_ones():
    facts, chats = "unpad:examples/zh/facts.jsonl", "unpad:examples/zh/chat.jsonl"
    assert paths(load_recipe("zh_chat")) == {"text": [facts], "chat": [chats]}
    assert paths(load_recipe("zh_chat", ["data.text=mine"])) == {"text": ["mine"]}
    assert paths(load_recipe("zh_chat", ["data.chat=[a, b]"])) == {"chat": ["a", "b"]}
    assert paths(load_recipe("zh_chat", ["data.text.0.path=mine"])) == {"text": ["mine"]}
    for named in (f"data.chat={chats}", "data.chat.0.weight=0.5"):
        assert paths(load_recipe("zh_chat", ["data.text=mine", named])) == {"text": ["mine"], "chat": [chats]}


def test_sources_of_the_user_s_own_recipe_stay_unless_they_are_overridden(tmp_path):
    own = {"data": {"text": ["unpad:examples/zh/facts.jsonl", "old.txt"], "chat": "old.jsonl"}}
    recipe = written(tmp_path, own)
    assert paths(load_recipe(recipe, ["data.chat=new.jsonl"])) == {"text": ["old.txt"], "chat": ["new.jsonl"]}
    assert paths(load_recipe(recipe, ["data.images=new"])) == {
        "text": ["old.txt"],
        "chat": ["old.jsonl"],
        "images": ["new"],
    }
    assert paths(load_recipe(recipe, ["data={chat: new}"])) == {"chat": ["new"]}


def test_labels_of_the_packaged_patients_are_never_joined_to_given_ones():
    error = refusal("events", "data.events=mine.parquet")
    assert "events.labels.path is the package's own" in error.what
    assert "events.labels=null" in error.fix
    for labels in ("events.labels.path=mine.parquet", "events.labels=null"):
        assert paths(load_recipe("events", ["data.events=mine.parquet", labels])) == {"events": ["mine.parquet"]}


@pytest.mark.parametrize("name", recipe_names())
def test_no_packaged_source_is_left_beside_a_given_one(name):
    for kind in paths(load_recipe(name)):
        labels = ["events.labels.path=mine"] if kind == "events" else []
        assert paths(load_recipe(name, [f"data.{kind}=mine", *labels])) == {kind: ["mine"]}


@pytest.mark.promise("data.field-names")
@pytest.mark.parametrize(
    "given",
    [
        ["data.text=path:my.csv", "data.text=field:comment"],  # as bash takes braces without blanks apart
        ["data.text={path:", "my.csv,", "field:", "comment}", "train.seed=3"],
        ["data.text={path:my.csv,field:comment}"],
    ],
)
def test_braces_that_a_shell_took_apart_lead_to_the_quoted_form(given):
    error = refusal("small", *given)
    assert error.fix == "write 'data.text={path: my.csv, field: comment}'"
    word = error.fix.removeprefix("write '").rstrip("'")
    assert apply_override({}, word).value == {"path": "my.csv", "field": "comment"}
