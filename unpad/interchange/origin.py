"""The model that training starts from: a run, or a folder of Hugging Face.

Training imports this file, and it imports the readers of folders only for a folder.
"""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch import Tensor

from unpad import storage
from unpad.data.family import NAMES_KEY, family_name, folder_files
from unpad.errors import CheckpointError, RecipeError
from unpad.interchange.hub import download_model, is_hub_name, kept_folder
from unpad.recipes.data import ImageSettings, TokenizerSettings
from unpad.recipes.file import load_recipe
from unpad.recipes.recipe import Recipe
from unpad.recipes.section import first_fault
from unpad.run.base import trainable_weights
from unpad.run.folder import KEPT, RECIPE, RUNS, as_run, find_run, run_recipe
from unpad.run.kept import open_files, refuse_without_data
from unpad.storage.paths import user_path

FROM = "from"  # field of a recipe's model section
TOKENIZER = "tokenizer.json"
CONFIG = "config.json"
PROCESSOR = "preprocessor_config.json"


def open_recipe(
    recipe: str,
    overrides: Sequence[str] = (),
    *,
    began: Sequence[str] = (),
    keep_packaged: bool = False,
    known: Recipe | None = None,
) -> Recipe:
    """Load a recipe as `load_recipe` does, with its settings for the size of its text, and complete it as `with_origin`
    does; arguments and errors as theirs.

    Of `by_size`, the recipe keeps the settings that hold and no override replaced, so that it loads as it is.
    """
    load = partial(load_recipe, recipe, overrides, keep_packaged=keep_packaged)
    loaded = load(began=began)
    goes_on = loaded.train.init_from is not None or FROM in loaded.model  # from a model that has its size
    fitting = {} if goes_on else dict(sorted(loaded.by_size.items(), reverse=True))
    if fitting:
        size = text_bytes(loaded)
        fitting = {most: settings for most, settings in fitting.items() if size < 1000 * most}
    if fitting:
        given = [f"{key}={json.dumps(value)}" for settings in fitting.values() for key, value in settings.items()]
        loaded = load(began=[*given, *began])
        fitted = loaded.model_copy(update={"by_size": fitting}).fitted()
        fitting = {min(fitting): fitted} if fitted else {}
    return with_origin(loaded.model_copy(update={"by_size": fitting}), known)


def text_bytes(recipe: Recipe) -> int:
    """Bytes of the files of a recipe's texts and conversations.

    Raises:
        SourceError: a source has no file.
    """
    from unpad.data.sources.files import expand, resolve_path

    files = expand([*recipe.data.text, *recipe.data.chat], partial(resolve_path, recipe.data))
    return sum(file.path.stat().st_size for file in files)


def open_named(name: str, overrides: Sequence[str], data_fix: str) -> tuple[Recipe, Path | None]:
    """The recipe with a name, and the run's directory if it names a run.

    Args:
        data_fix: what to do about an imported run, which names no data.

    Raises:
        RecipeError, CheckpointError, SourceError: as `open_recipe`; or the run names no data.
    """
    folder = as_run(name)
    if folder is None:
        return open_recipe(name, overrides), None
    recipe = run_recipe(folder, overrides)
    refuse_without_data(recipe, folder, data_fix)
    return recipe, folder


def with_origin(recipe: Recipe, known: Recipe | None = None) -> Recipe:
    """Complete a recipe with a `model.from` that names a run, a folder or a model of a hub. Adds its model section,
    overridden by fields of the recipe, its tokenizer, its section on images if the recipe has none, and
    `train.init_from`, which may itself name a model of a hub.

    Args:
        known: recipe of a run that began from there; it continues even if the origin is gone.

    Raises:
        RecipeError: `model.from` names nothing, or `train.init_from` names another place.
        CheckpointError, SourceError: the folder cannot be used.
    """
    given = dict(recipe.model)
    has_origin = FROM in given  # null: that of train.init_from
    name = given.pop(FROM, None)
    name = recipe.train.init_from if name is None else name
    if name is None:
        _refuse_nameless(has_origin)
        return recipe
    where = "model.from" if has_origin else "train.init_from"
    if not isinstance(name, str):
        raise RecipeError(f"model.from is {name!r}", where=where, fix="name a run or a folder")
    on_hub = is_hub_name(name) and not is_run(name)
    if recipe.lora is not None and (on_hub or is_folder(name)):
        what = "adapters are trained on the weights of a run, and this is a model of Hugging Face"
        raise RecipeError(what, where=where, fix=f"import it first: unpad import {name} --out RUN")
    if on_hub:
        name = kept_folder(name, known.train.init_from if known else None) or str(download_model(name).folder)
    if not has_origin:
        return recipe.model_copy(update={"train": recipe.train.model_copy(update={"init_from": name})})
    if recipe.train.init_from not in (None, name):
        what = f"model.from is {name}, and train.init_from {recipe.train.init_from}"
        raise RecipeError(what, where="train.init_from", fix="give one of them")
    if is_folder(name):
        start, path = folder_recipe(user_path(name)), str((user_path(name) / TOKENIZER).resolve())
    elif known is not None and known.train.init_from == name and not (user_path(name) / RECIPE).is_file():
        start, path = known, known.tokenizer.path or ""
    else:
        folder = find_run(name)
        start, path = run_recipe(folder), str((folder / TOKENIZER).resolve())
    section = start.model
    if given.get("kind", section["kind"]) != section["kind"]:
        what = f"model.kind is {given['kind']}, and the model of {name} is of kind {section['kind']}"
        raise RecipeError(what, where="model.kind", fix="leave model.kind out")
    return recipe.model_copy(
        update={
            "model": _overridden(section, {key: value for key, value in given.items() if key != "preset"}),
            "tokenizer": TokenizerSettings(kind="file", path=path) if path else recipe.tokenizer,
            "images": start.images if recipe.images == ImageSettings() else recipe.images,
            "train": recipe.train.model_copy(update={"init_from": name}),
        }
    )


def _refuse_nameless(has_origin: bool) -> None:
    if has_origin:
        what = "the recipe goes on from a model, and names none"
        fix = "name a run: train.init_from=RUN (unpad import FOLDER --out RUN makes one of a Hugging Face folder)"
        raise RecipeError(what, where="train.init_from", fix=fix)


def _overridden(section: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """A section with some of its fields replaced, also inside its sections."""
    both = {**section, **given}
    for key, value in given.items():
        if isinstance(value, dict) and isinstance(section.get(key), dict):
            both[key] = _overridden(section[key], value)
    return both


def is_run(name: str) -> bool:
    """True if a name is that of a run under runs/."""
    return (RUNS / user_path(name) / RECIPE).is_file()


def is_folder(name: str) -> bool:
    """True if a name leads to a folder of Hugging Face rather than to a run."""
    return (user_path(name) / CONFIG).is_file() and not (user_path(name) / RECIPE).is_file()


def folder_recipe(folder: Path) -> Recipe:
    """The model of a folder as sections of a recipe: `model`, and `images` where it reads them.

    Raises:
        CheckpointError: the folder holds no model, or one that is not covered.
    """
    from unpad.interchange.families import family_of
    from unpad.interchange.folder import read_config, read_json_files
    from unpad.models.vision_language import model as vision_language

    files = read_json_files(folder)
    given = files[CONFIG]
    config = read_config(folder, family_of(given, folder / CONFIG), given)[0]
    images = ImageSettings()
    if isinstance(config, vision_language.Config):
        side = config.vision.side * config.vision.patch
        colours = files.get(PROCESSOR, {})
        if not isinstance(colours, dict):
            raise CheckpointError("not a JSON object", where=str(folder / PROCESSOR), fix="use another copy")
        given_colours = {name: colours[f"image_{name}"] for name in ("mean", "std") if f"image_{name}" in colours}
        try:
            images = ImageSettings(size="square", square=side, **given_colours)
        except ValidationError as error:
            fault = first_fault(error)
            what = f"{fault.name}: {fault.message}"
            raise CheckpointError(what, where=str(folder / PROCESSOR), fix="correct this field") from None
    return Recipe(model=config.model_dump(mode="json"), images=images)


def starting_files(recipe: Recipe, name: str) -> dict[str, bytes]:
    """The data files that a run keeps, taken from the model that it starts from.

    Raises:
        RecipeError, CheckpointError, SourceError: there is no such model, or its files cannot be used.
    """
    if not is_folder(name):
        files = open_files(recipe, find_run(name))
        files.pop(NAMES_KEY, None)  # names in one run's messages say nothing about another's
        if recipe.train.new_head:
            from unpad.data.rows import CLASSES

            files.pop(CLASSES, None)
        return files
    read_folder = folder_files(recipe)
    if read_folder is None:
        kind = recipe.model["kind"]
        what = f"{name} is a folder of a model of texts, and a model of kind {kind} reads {family_name(recipe)}"
        raise RecipeError(what, where="train.init_from", fix="set model.from instead")
    return read_folder(user_path(name))


def starting_weights(name: str, new_head: bool = False) -> tuple[dict[str, Tensor], str]:
    """Weights of the model that a run starts from, and their place.

    Args:
        new_head: leave out those of its head.

    Raises:
        RecipeError, CheckpointError: there is no such model, or its weights cannot be used.
    """
    if not is_folder(name):
        folder = find_run(name)
        weights = trainable_weights(folder)
        return {key: weights[key] for key in weights if not (new_head and key.startswith("head."))}, str(folder)
    from unpad.interchange.families import family_of
    from unpad.interchange.folder import load_model, read_json_files

    given = read_json_files(user_path(name))[CONFIG]
    model = load_model(user_path(name), family_of(given, user_path(name) / CONFIG), given)
    return dict(model.state_dict()), name


def origin_files(name: str) -> dict[str, bytes]:
    """Small files of a model's original folder, for its export; {} for a model without one."""
    from unpad.interchange.folder import JSON_FILES, OTHERS, read_bytes

    folder = user_path(name) if is_folder(name) else find_run(name) / KEPT
    return {file: read_bytes(folder / file) for file in (*JSON_FILES, *OTHERS) if (folder / file).is_file()}


def keep_origin(name: str | None, run: Path) -> None:
    """Copy these files into a new run that starts from the model; remove them from a run that starts from none.

    Raises:
        DiskError: they cannot be written.
    """
    if files := origin_files(name) if name else {}:
        storage.replace_folder(run / KEPT, files)
    elif (run / KEPT).exists():  # left by a run that ended before it was complete
        storage.remove_folder(run / KEPT)


def folder_of(name: str) -> Path:
    """The Hugging Face folder of this name.

    Raises:
        CheckpointError: it is none.
    """
    if not is_folder(name):
        fix = "name the folder that holds config.json and safetensors, or OWNER/MODEL of a hub; a run is exported"
        raise CheckpointError(f"{name} is no folder of Hugging Face", where=name, fix=fix)
    return user_path(name)
