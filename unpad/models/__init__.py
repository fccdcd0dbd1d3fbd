"""One architecture per file or folder; `model.kind` in a recipe names it, so there is no registry to edit.

A model file (`model.py` of a folder) has `DATA`, the file of `data/` that it reads; `Config`, a pydantic section; and
an `nn.Module` named after the kind, built from (config, num_outputs), the vocabulary or the number of classes.
Training needs its `losses`, `count_targets` and `label_smoothing` and the config's `longest`; the proof also `embed`
where there are tokens, and batches with `inputs_embeds`. What else it needs its data says: evaluation of texts
`token_nll`, of images `classify`; generation a cache in `forward`, and `logits`.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import ValidationError
from torch import nn

from unpad.errors import RecipeError, nearest


def model_kinds() -> list[str]:
    """Names that `model.kind` may have: the files of this folder, and its folders with a `model.py`."""
    here = Path(__file__).parent
    return sorted([p.stem for p in here.glob("[a-z]*.py")] + [p.parent.name for p in here.glob("*/model.py")])


def model_module(kind: str) -> ModuleType:
    """The module that holds a kind's `Config`, `DATA` and model class."""
    folder = (Path(__file__).parent / kind).is_dir()
    return import_module(f"unpad.models.{kind}.model" if folder else f"unpad.models.{kind}")


def model_config(section: dict[str, Any]) -> Any:
    """Validate a recipe's model section against its own file.

    Raises:
        RecipeError: unknown kind or key, or sizes that do not fit together.
    """
    kind = str(section.get("kind", "decoder"))
    known = model_kinds()
    if kind not in known:
        raise RecipeError(f'there is no model kind "{kind}"', where="model.kind", fix=nearest(kind, known))
    module = model_module(kind)
    try:
        return module.Config(**section)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        where = "model." + key if key else "model"
        if first["type"] == "extra_forbidden":
            fix = nearest(key, list(module.Config.model_fields))
            raise RecipeError(f'unknown key "{key}"', where=where, fix=fix) from None
        message = first["msg"].removeprefix("Value error, ")
        raise RecipeError(message, where=where, fix="correct this field of the model section") from None


def build_model(config: Any, num_outputs: int) -> nn.Module:
    """Build the model a validated config describes, with fresh weights from torch's generator."""
    module = model_module(config.kind)
    name = "".join(part.capitalize() for part in config.kind.split("_"))
    model: nn.Module = getattr(module, name)(config, num_outputs)
    return model
