"""A trained run, opened for use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from unpad.data.family import Data, family_of, open_data
from unpad.data.sources.example import Turn
from unpad.data.text import TOKENIZER
from unpad.data.tokens.encode import encode_prompt
from unpad.data.tokens.tokenizer import Tokenizer, load_tokenizer
from unpad.errors import RecipeError, SourceError
from unpad.inference.generate import complete, stream
from unpad.models import build_model, model_config
from unpad.models.contract import Generates, Model
from unpad.models.objective import Objective
from unpad.nn.precision import Precision, choose_precision
from unpad.recipes.file import load_recipe
from unpad.recipes.recipe import Recipe, stages_of
from unpad.recipes.section import checked
from unpad.recipes.training import GenerateSettings
from unpad.run.checkpoint import newest_weights, put_weights
from unpad.run.folder import RECIPE, find_run
from unpad.run.kept import open_files


@dataclass(frozen=True)
class LoadedRun:
    """A trained model with everything needed to use it.

    Args:
        files: kept of the run's data, by name, such as its tokenizer.
        fingerprint: of the data it was trained on.
    """

    folder: Path
    recipe: Recipe
    model: Model
    files: dict[str, bytes]
    step: int
    fingerprint: str

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The run's own tokenizer.

        Raises:
            RecipeError: the run is not one of texts.
        """
        self._refuse_without_text()
        return load_tokenizer(self.files[TOKENIZER])

    @property
    def generator(self) -> Generates:
        """The model, as one that continues texts.

        Raises:
            RecipeError: the run is not one of texts, or its model does not continue them.
        """
        self._refuse_without_text()
        if not isinstance(self.model, Generates):
            what = f"a model of kind {self.model.config.kind} does not continue texts"
            raise RecipeError(what, where=str(self.folder), fix="use a run of a model that generates")
        return self.model

    def _refuse_without_text(self) -> None:
        no_text = family_of(self.recipe).NO_TEXT
        if no_text is not None:
            what, fix = no_text
            raise RecipeError(what, where=str(self.folder), fix=fix.format(run=self.folder))

    def generate(self, prompts: Sequence[str], **settings: Any) -> list[str]:
        """Continue plain texts, or answer questions when the run was trained on conversations.

        Args:
            prompts: texts of any lengths; no continuation depends on the others.
            settings: fields of the recipe's `generate` section, such as temperature=0.8.

        Raises:
            RecipeError: a setting is unknown or out of range, or `prompts` is one string.
        """
        if isinstance(prompts, str):
            raise RecipeError("prompts is one string", fix="give a list of prompts")
        chosen = checked(GenerateSettings, {**self.recipe.generate.model_dump(), **settings})
        ids = [self.prompt_ids(prompt) for prompt in prompts]
        precision = generation_precision(chosen)
        return [completion.text for completion in complete(self.generator, self.tokenizer, ids, chosen, precision)]

    def prompt_ids(self, prompt: str) -> list[int]:
        """Encode one prompt exactly as training encoded its kind."""
        if self.recipe.data.chat:
            return encode_prompt([Turn("user", prompt)], self.tokenizer, self.recipe.data.template)
        return [self.tokenizer.bos_id, *self.tokenizer.encode_batch([prompt])[0]]

    def data(self) -> Data:
        """The data of the run, read as it was for training.

        Raises:
            SourceError: a file changed since, so held-out data may have been trained on.
        """
        data = open_data(self.recipe, self.files)
        if data.fingerprint() != self.fingerprint:
            raise SourceError(
                "the data changed since this run was trained, so what it held out is not known any more",
                where=str(self.folder),
                fix="put the files back, or train again",
            )
        return data

    def stream(self, prompt: str, **settings: Any) -> Iterator[str]:
        """Yield the continuation of one prompt as it is generated, whole characters only."""
        chosen = checked(GenerateSettings, {**self.recipe.generate.model_dump(), **settings})
        return stream(self.generator, self.tokenizer, self.prompt_ids(prompt), chosen, generation_precision(chosen))


def generation_precision(settings: GenerateSettings) -> Precision:
    """Precision of products in generation: bf16 decodes three times as fast on a processor that multiplies it."""
    return choose_precision(settings.precision, torch.device("cpu"))[0]


def load(name: str | Path, overrides: Sequence[str] = ()) -> LoadedRun:
    """Open a run's best model, ready to use.

    Args:
        name: run directory, or its name under runs/.
        overrides: recipe fields to change, such as model.context_method=ntk model.context_factor=4.
    """
    folder = find_run(name)
    recipe = load_recipe(str(folder / RECIPE), overrides)
    config, files = model_config(recipe.model), open_files(recipe, folder)
    model = build_model(config, family_of(recipe).num_outputs(files))
    model.trained = Objective.of(model, stages_of(recipe)[-1].recipe.losses).weights
    weights, state = newest_weights(folder)
    put_weights(model, weights, str(folder))
    return LoadedRun(folder, recipe, model.eval(), files, state.step, state.values["data"])
