"""The JSON schema accepts what the program accepts, and refuses the wrong recipes that a schema can."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from unpad.errors import RecipeError
from unpad.models import config_schemas, model_config
from unpad.recipes.file import RECIPES, load_recipe, recipe_names
from unpad.recipes.recipe import STAGE_SECTIONS, Recipe, stage_fields
from unpad.recipes.schema import recipe_schema


@pytest.fixture(scope="module")
def schema() -> Draft202012Validator:
    whole = recipe_schema(config_schemas())
    Draft202012Validator.check_schema(whole)
    return Draft202012Validator(whole)


def faults(schema: Draft202012Validator, text: str) -> list[str]:
    return [error.message for error in schema.iter_errors(yaml.safe_load(text))]


def load(folder: Path, text: str) -> Recipe:
    """Load a recipe as a run does, its model section too."""
    path = folder / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    recipe = load_recipe(str(path))
    if "from" not in recipe.model:  # or the section is that of another run
        model_config(recipe.model)
    return recipe


@pytest.mark.promise("cli.overrides")
@pytest.mark.parametrize("name", recipe_names())
def test_every_packaged_recipe_its_copy_and_what_a_run_saves_are_accepted(schema, tmp_path, name):
    packaged = (RECIPES / f"{name}.yaml").read_text(encoding="utf-8")  # `recipes copy` writes the same bytes
    assert faults(schema, packaged) == []
    recipe = load(tmp_path, packaged)
    section = recipe.model if "from" in recipe.model else model_config(recipe.model).model_dump(mode="json")
    for saved in (recipe, recipe.model_copy(update={"model": section})):
        assert faults(schema, saved.to_yaml()) == []


ACCEPTED = [
    "{}",
    "data: {text: mine.txt}",
    "data: {text: [a.txt, {path: b.txt, weight: 0.5}], chat: {path: c.jsonl}, images: null}",
    "data: {events: {path: a.csv, time: days}}",
    "optim: {lr: 1e-3, eps: 1.5e-9}",
    "losses: {kl: {end: 0.1, steps: 3}, other: 2, third: 1e-2}",
    "stages: [{name: a, use: [text], plan: {strategy: rows}, optim: {lr: 2e-4}, train: {weights: last}}]",
    "plan: {grow: {3: 400, 6: 800}}",
    "model: {kind: vit, channels: 4}",
    "model: {kind: set_sequence, bins: [0, 90]}",
]

REFUSED = [
    "data: {txt: a}",
    "data: {text: [{paht: a}]}",
    "data: {holdout: 1.5}",
    "optim: {lr: fast}",
    "optim: {lr: -1}",
    "optim: {lrr: 3}",
    "optim: {betas: [0.9]}",
    "checkpoint: {keep: 1}",
    "plan: {drop_last: 7}",
    "model: {kind: vit, size_embed: 'yes'}",
    "plan: {grow: {3: 0}}",
    "stages: [{name: a b}]",
    "stages: [{name: a, use: [texts]}]",
    "stages: [{name: a, train: {max_steps: 3}}]",
    "stages: [{name: a, train: {seed: 3}}]",
    "stages: [{name: a, plan: {cross_documents: true}}]",
    "optim: {weight_decay: -1e-2}",  # text for YAML, and below 0
    "stages: {name: a}",
    "losses: {kl: {start: 1}}",
    "model: {widht: 8}",
    "model: {kind: vit, rope_theta: 3}",
    "model: {kind: decoder, positions: none}",
    "model: {kind: vision_language, language: {layers: 3}, vision: {}}",
    "model: [decoder]",
]


@pytest.mark.parametrize("text", ACCEPTED)
def test_what_the_program_accepts_is_accepted(schema, tmp_path, text):
    load(tmp_path, text)
    assert faults(schema, text) == []


@pytest.mark.promise("cli.overrides")
@pytest.mark.parametrize("text", REFUSED)
def test_what_both_refuse(schema, tmp_path, text):
    with pytest.raises(RecipeError):
        load(tmp_path, text)
    assert faults(schema, text)


def test_a_stage_may_set_exactly_what_the_program_lets_it_set(schema):
    sections = {"plan": "PlanSettings", "optim": "OptimSettings", "train": "TrainSettings"}
    definitions: dict[str, Any] = schema.schema["$defs"]
    assert {*sections, "losses"} == set(STAGE_SECTIONS)
    for section, name in sections.items():
        allowed = definitions["Stage"]["properties"][section]["properties"]
        assert set(allowed) == set(stage_fields(section)) <= set(definitions[name]["properties"])
