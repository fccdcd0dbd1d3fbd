"""One architecture per file; `model.kind` in a recipe names the file, so there is no registry to edit.

A model file has `DATA`, the file of `data/` that it reads; `Config`, a pydantic section; and an `nn.Module` named after
the file, built from (config, num_outputs), the vocabulary or the number of classes. Training needs its `losses`,
`count_targets` and `label_smoothing` and the config's `longest`; the proof also `embed` where there are tokens, and
batches with `inputs_embeds`. What else it needs its data says: evaluation of texts `token_nll`, of images `classify`;
generation a cache in `forward`, and `logits`.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch import nn

from unpad.errors import RecipeError, nearest


def model_config(section: dict[str, Any]) -> Any:
    """Validate a recipe's model section against its own file.

    Raises:
        RecipeError: unknown kind or key, or sizes that do not fit together.
    """
    kind = str(section.get("kind", "decoder"))
    known = sorted(p.stem for p in Path(__file__).parent.glob("[a-z]*.py"))
    if kind not in known:
        raise RecipeError(f'there is no model kind "{kind}"', where="model.kind", fix=nearest(kind, known))
    module = import_module(f"unpad.models.{kind}")
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
    module = import_module(f"unpad.models.{config.kind}")
    name = "".join(part.capitalize() for part in config.kind.split("_"))
    model: nn.Module = getattr(module, name)(config, num_outputs)
    return model


def recipe_schema() -> dict[str, Any]:
    """JSON schema of a recipe, with the model section of the decoder in place."""
    from unpad.models.decoder import Config
    from unpad.recipe import Recipe

    schema = Recipe.model_json_schema()
    model = Config.model_json_schema()
    schema.setdefault("$defs", {}).update(model.pop("$defs", {}))
    schema["properties"]["model"] = model
    return schema
