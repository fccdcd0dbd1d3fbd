"""Files of runs of earlier versions, made today's as they are read; `docs/versions.md` lists what they lack.

Each function takes what a file holds and returns what today's version would have written; what is today's already comes
back as it is. When the number of a format in `docs/versions.md` rises, it gets
a function here.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from unpad.recipes.file import field_schema
from unpad.recipes.lines import OCTAL, LineLoader, Lines
from unpad.recipes.recipe import STAGE_SECTIONS, Recipe

OLD_LOG = "events.jsonl"
_YAML_1_1 = yaml.resolver.Resolver()
_TRUTH = TypeAdapter(bool)
GONE = ("pipeline_stages",)  # fields of recipes that no result depends on

# --------------------------------------------------------------------------- recipe.yaml, and the overrides of run.json


class Yaml11Loader(LineLoader):
    """Loader with the numbers, truths and dates of YAML 1.1, and octal numbers of YAML 1.2 besides."""

    def scalar_tag(self, node: yaml.ScalarNode, is_plain: bool) -> str:
        if not is_plain or OCTAL.match(node.value):
            return str(node.tag)
        return str(_YAML_1_1.resolve(yaml.ScalarNode, node.value, (True, False)))


@lru_cache(maxsize=16)
def parse_recipe(content: bytes) -> tuple[Any, Lines]:
    """Values of a run's recipe and the line of every key: YAML 1.1 with 1 or "yes" for true.

    Today's recipes are written so that both versions of YAML read them alike.
    """
    loader = Yaml11Loader(content.decode())
    return with_truths(loader.load()), loader.lines


def with_truths(values: Any, path: tuple[str | int, ...] = ()) -> Any:
    """Values of a recipe in which true or false stands where 1, 0, "yes" or the like stood for them, without fields
    that are gone."""
    if isinstance(values, dict):
        return {key: with_truths(value, (*path, key)) for key, value in values.items() if key not in GONE}
    if isinstance(values, list):
        return [with_truths(value, (*path, index)) for index, value in enumerate(values)]
    if path[:1] == ("stages",) and path[2:3] and path[2] in STAGE_SECTIONS:
        path = path[2:]
    return _as_truth(values) if field_schema(path).get("type") == "boolean" else values


def _as_truth(value: Any) -> Any:
    try:
        return _TRUTH.validate_python(value)
    except ValidationError:
        return value  # the recipe's own check says what is wrong


def split_rule(recipe: Recipe) -> Recipe:
    """The recipe of a run, with the rule that its data was split by: 1 before there was `data.split_version`."""
    if "split_version" in recipe.data.model_fields_set:
        return recipe
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"split_version": 1})})


# --------------------------------------------------------------------------- run.json


def command(values: Mapping[str, Any]) -> dict[str, Any]:
    """`run.json`: without an id or a precision."""
    return {"precision": None, "id": "", **values}


def precision(log: Sequence[Mapping[str, Any]]) -> Any:
    """The precision that a run went on in last, by its log; None if that does not say."""
    environments = [entry for entry in log if entry["kind"] == "environment"]
    return environments[-1].get("precision") if environments else None


# --------------------------------------------------------------------------- logs and rows


def entry(values: dict[str, Any]) -> dict[str, Any]:
    """An entry of the log: a resume that does not say its step and what it changed, or times that do not say which."""
    defaults = _ENTRIES.get(str(values.get("kind")))
    return values if defaults is None else {**defaults(values), **values}


def _resumed(values: Mapping[str, Any]) -> dict[str, Any]:
    message = str(values.get("message", ""))
    undescribed = message if "changed" not in values and ";" in message else ""
    return {"step": 0, "changed": {}, "undescribed": undescribed}


_ENTRIES: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "resumed": _resumed,
    "timers": lambda values: {"after_step": None, "step": None},
}


def step_row(values: dict[str, Any]) -> dict[str, Any]:
    """A step's row of `metrics.jsonl`, without the digest of what it learnt from."""
    return {"rows": None, **values}


def time_row(values: dict[str, Any]) -> dict[str, Any]:
    """A row of `timing.jsonl`, with the memory in use where the peak was not kept."""
    return {"peak_bytes": values["memory_bytes"], **values} if "memory_bytes" in values else values


# --------------------------------------------------------------------------- state.json


def state(values: dict[str, Any]) -> dict[str, Any]:
    """Values of a training's state, without the rule of updates, an id, or a limit that memory taught."""
    if not isinstance(progress := values.get("progress"), dict):
        return values
    progress = {"most_tokens": None, **progress}
    return {"update_rule": 1, "run": "", **values, "progress": progress}


# --------------------------------------------------------------------------- what an evaluation leaves


def metrics(values: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Metrics of a line of `evaluations.jsonl`, without the part of the data that they are of."""
    return {name: {"part": None, "best_of": None, **metric} for name, metric in values.items()}


def evaluation(values: dict[str, Any]) -> dict[str, Any]:
    """`evaluation.json`, without the part of the data that it is of."""
    return {"part": None, "best_of": None, **values}
