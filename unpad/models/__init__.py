"""Models, one architecture per file or folder; `model.kind` in a recipe names it, so there is no registry to edit.

A model file (`model.py` of a folder) has `DATA`, the file of `data/` that it reads; `Config`, a `ModelConfig`; and a
`Model` named after the kind, built from (config, num_outputs), the size of the vocabulary or the number of classes.
`contract.py` lists the members that training, evaluation, generation and the proof use.
"""

from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import ValidationError

from unpad.errors import RecipeError, nearest, needs_memory
from unpad.models.contract import Model, ModelConfig
from unpad.recipes.section import first_fault

SHARED = {"contract", "objective", "adapters", "cost"}  # files of this folder that hold no model


def model_kinds() -> list[str]:
    """Valid values of `model.kind`: the model files of this folder, and its folders with a `model.py`."""
    here = Path(__file__).parent
    return sorted({p.stem for p in here.glob("[a-z]*.py")} - SHARED | {p.parent.name for p in here.glob("*/model.py")})


def model_module(kind: str) -> ModuleType:
    """Import the module that holds a kind's `Config`, `DATA` and model class."""
    folder = (Path(__file__).parent / kind).is_dir()
    return import_module(f"unpad.models.{kind}.model" if folder else f"unpad.models.{kind}")


def config_schemas() -> dict[str, dict[str, Any]]:
    """JSON schema of the model section, by `model.kind`."""
    return {kind: model_module(kind).Config.model_json_schema() for kind in model_kinds()}


def model_config(section: dict[str, Any]) -> ModelConfig:
    """Validate a recipe's model section against its own file.

    Raises:
        RecipeError: unknown kind or key, or sizes that do not fit together.
    """
    kind = str(section.get("kind", "decoder"))
    known = model_kinds()
    if kind not in known:
        raise RecipeError(f'there is no model kind "{kind}"', where="model.kind", fix=nearest(kind, known))
    config_class: type[ModelConfig] = model_module(kind).Config
    try:
        return config_class(**section)
    except ValidationError as error:
        fault = first_fault(error)
        where = f"model.{fault.name}".removesuffix(".")
        if fault.is_unknown:
            fix = nearest(fault.name, list(config_class.model_fields))
            raise RecipeError(fault.message, where=where, fix=fix) from None
        fix = fault.fix or "correct this field of the model section"
        raise RecipeError(fault.message, where=where, fix=fix) from None


def build_model(config: ModelConfig, num_outputs: int) -> Model:
    """Build the model of a validated config, with weights from torch's generator.

    Raises:
        OutOfMemoryError: its weights do not fit.
    """
    name = "".join(part.capitalize() for part in config.kind.split("_"))
    with needs_memory(f"a model of kind {config.kind} with {num_outputs:,} outputs", lower_sizes(config)):
        model: Model = vars(model_module(config.kind))[name](config, num_outputs)
    return model


def lower_sizes(config: ModelConfig) -> str:
    """Advice for a model that is too large, with the fields of its config."""
    named = [f"model.{name}" for name in ("width", "blocks", "hidden", "channels") if name in type(config).model_fields]
    return "lower " + (" or ".join(named) or "the sizes of the model section")
