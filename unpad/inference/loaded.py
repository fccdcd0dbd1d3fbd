"""A trained run, opened for use."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unpad.data.family import Data, family_of, open_data
from unpad.data.sources.split import PARTS, Wanted
from unpad.data.tokens.tokenizer import Tokenizer, kept_tokenizer
from unpad.errors import CheckpointError, RecipeError, SourceError
from unpad.inference.generate import complete, stream
from unpad.inference.prompts import Prompt, Reply, count_system_turns, encode
from unpad.models import build_model, model_config
from unpad.models.contract import Generates, Model, ModelConfig
from unpad.models.objective import set_objective
from unpad.nn.precision import CPU, Precision, computing_device
from unpad.nn.product_speed import choose_precision
from unpad.recipes.recipe import Recipe, stages_of
from unpad.recipes.section import checked
from unpad.recipes.training import GenerateSettings
from unpad.run.base import Quantized, hold_quantized, read_quantized, stored_weights
from unpad.run.checkpoint import put_weights
from unpad.run.folder import find_run, read_command, run_recipe
from unpad.run.kept import open_files
from unpad.run.report.history import read_log, run_state
from unpad.storage.paths import user_path
from unpad.terminal.table import number_of


@dataclass(frozen=True)
class LoadedRun:
    """A trained model with everything needed to use it.

    Args:
        files: kept of the run's data, by name, such as its tokenizer.
        fingerprint: of the data it was trained on.
        quantized: record of quantized weights; None for others.
    """

    folder: Path
    recipe: Recipe
    model: Model
    files: dict[str, bytes]
    step: int
    fingerprint: str
    quantized: Quantized | None = None

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The run's own tokenizer.

        Raises:
            RecipeError: the run is not one of texts.
        """
        self._refuse_without_text()
        return kept_tokenizer(self.files)

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

    def generate(
        self, prompts: Sequence[str], *, system: str = "", seeds: Sequence[int] | None = None, **settings: Any
    ) -> list[str]:
        """Continue plain texts, or answer questions when the run was trained on conversations.

        Args:
            prompts: texts of any lengths; a prompt gets what it would get alone.
            system: system text before every question.
            seeds: seed of each prompt's draws; default `seed` of the settings for all.
            settings: fields of the recipe's `generate` section, such as temperature=0.8.

        Raises:
            RecipeError: a setting is unknown or out of range, `prompts` is one string, `seeds` has another length, the
                run reads no system text, or the context has no room for a prompt and `max_new_tokens`.
        """
        if isinstance(prompts, str):
            raise RecipeError("prompts is one string", fix="give a list of prompts")
        encoded = [self.prompt(text, system) for text in prompts]
        return [reply.text for reply in self.replies(encoded, seeds, **settings)]

    def replies(self, prompts: Sequence[Prompt], seeds: Sequence[int] | None = None, **settings: Any) -> list[Reply]:
        """Continue prompts as `generate` does, and say how each continuation ended."""
        chosen = checked(GenerateSettings, {**self.recipe.generate.model_dump(), **settings})
        seeds = [chosen.seed] * len(prompts) if seeds is None else seeds
        if len(seeds) != len(prompts):
            what = f"{number_of(len(prompts), 'prompts')} and {number_of(len(seeds), 'seeds')} are given"
            raise RecipeError(what, fix="give one per prompt")
        ids, precision = [prompt.ids for prompt in prompts], generation_precision(chosen, self.model.device)
        self._check_room(ids, settings)
        made = complete(self.generator, self.tokenizer, ids, chosen, precision, seeds)
        return [
            Reply(prompt, one.text, len(one.ids), one.finished, seed)
            for prompt, one, seed in zip(prompts, made, seeds, strict=True)
        ]

    def classify(self, images: Any) -> list[dict[str, Any]]:
        """Classify images, each as alone.

        Args:
            images: paths, bytes of files, or pictures of Pillow; several, or one.

        Returns:
            A row for each: `image`, `class`, `probability`, `fault` (why it has none, or ""), `notes`, `mark` (what
            training did not have, or ""), and `top`, the probability of every class, likeliest first.

        Raises:
            RecipeError: the run classifies no images.
        """
        return self._rows("classify_images", images)

    def ask(self, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Answer questions about images, each as alone.

        Args:
            rows: with `question`, and `image`, a path, a list of them, or None.

        Returns:
            The rows with `answer`, `fault`, `notes` and `mark`.

        Raises:
            RecipeError: the run answers no questions about images.
        """
        return self._rows("ask_rows", rows)

    def predict(self, data: str | Path | None = None) -> list[dict[str, Any]]:
        """The rows of `unpad predict RUN DATA`, for any run.

        Raises:
            UnpadError: as `inference.predict.predict`.
        """
        return self._rows("predict_rows", data)

    def _rows(self, name: str, given: Any) -> list[dict[str, Any]]:
        return getattr(import_module("unpad.inference.predict"), name)(self, given)

    def prompt(self, text: str, system: str = "") -> Prompt:
        """Encode one prompt exactly as training encoded its kind.

        Raises:
            RecipeError: there is a system text, and the run reads none.
        """
        return encode(self.recipe, self.tokenizer, text, system)

    def prompt_ids(self, prompt: str) -> list[int]:
        """Token ids of one prompt, encoded exactly as training encoded its kind."""
        return self.prompt(prompt).ids

    @property
    def num_system(self) -> int | None:
        """System turns of the conversations that the run was trained on; None if its log does not say."""
        try:
            return count_system_turns(read_log(self.folder))
        except SourceError:
            return None

    @property
    def notes(self) -> list[str]:
        """Lines on a run that did not finish, and on another device than the processor."""
        notes = [] if self.model.device == CPU else [f"note: computes on {self.model.device}"]
        try:
            state = run_state(self.folder, read_log(self.folder))
        except SourceError:
            return notes
        unfinished = f"note: training did not finish: {state} at step {self.step:,}"
        return notes if state == "finished" else [*notes, unfinished]

    def data(self) -> Data:
        """The data of the run, read as it was for training: without the test part, which `test_data` reads.

        Raises:
            SourceError: a file changed since, so held-out data may have been trained on.
        """
        data = open_data(self.recipe, self.files, compare=False)
        if data.fingerprint() != self.fingerprint:
            what = "the data changed since this run was trained, so what it held out is not known any more"
            raise SourceError(what, where=str(self.folder), fix="put the files back, or train again")
        return data

    def test_data(self) -> Data:
        """The rows of the test part of the run's data, which training never read.

        Raises:
            SourceError: a file is missing or unusable.
        """
        return open_data(self.recipe, self.files, Wanted.TEST, compare=False)

    def ids_by_part(self) -> dict[str, set[str]]:
        """Identities of the rows of every part of the run's data, such as ids of patients.

        Raises:
            SourceError: a file is missing, unusable, or changed since.
        """
        data = self.data()
        found: dict[str, set[str]] = {name: set() for name in PARTS.values()}
        for one in [data, self.test_data()] if data.table.num_test else [data]:
            ids = one.identities()
            assert ids is not None, "rows have identities"
            for split, name in PARTS.items():
                found[name].update(ids[i] for i in np.flatnonzero(one.table.split == split).tolist())
        return found

    def stream(self, prompt: str, *, system: str = "", **settings: Any) -> Iterator[str]:
        """Yield the continuation of one prompt as it is generated, whole characters only."""
        chosen = checked(GenerateSettings, {**self.recipe.generate.model_dump(), **settings})
        ids = self.prompt(prompt, system).ids
        self._check_room([ids], settings)
        return stream(self.generator, self.tokenizer, ids, chosen, generation_precision(chosen, self.model.device))

    def _check_room(self, prompts: Sequence[Sequence[int]], settings: Mapping[str, Any]) -> None:
        """Refuse a `max_new_tokens` that was asked for and has no room; a default ends where the context does."""
        most, longest = settings.get("max_new_tokens", 0), self.model.config.longest
        for ids in prompts:
            if len(ids) <= longest < len(ids) + most - 1:
                what = f"max_new_tokens={most} after a prompt of {number_of(len(ids), 'tokens')} is beyond the context"
                fix = f"ask for at most {longest - len(ids) + 1}; this model's context is {longest}"
                raise RecipeError(what, where="generate.max_new_tokens", fix=fix)


def _check_overrides(config: ModelConfig, recipe: Recipe, folder: Path, overrides: Sequence[str]) -> None:
    """Refuse a context beyond the trained one without a method for it, and replies that fit into none."""
    trained = model_config(run_recipe(folder).model)
    for now, then in ((config, trained), (getattr(config, "language", None), getattr(trained, "language", None))):
        if getattr(now, "positions", "") == "rotary" and getattr(now, "context", 0) > getattr(then, "context", 0):
            what = f"the model was trained on contexts of {getattr(then, 'context', 0)} tokens"
            fix = "leave it, and set model.context_method=ntk and model.context_factor"
            raise RecipeError(what, where="model.context", fix=fix)
    asked = any(text.partition("=")[0].strip() == "generate.max_new_tokens" for text in overrides)
    if asked and recipe.generate.max_new_tokens > config.longest:
        what = f"a reply of {recipe.generate.max_new_tokens} tokens does not fit into the context of {config.longest}"
        raise RecipeError(what, where="generate.max_new_tokens", fix="ask for fewer")


def generation_precision(settings: GenerateSettings, device: torch.device = CPU) -> Precision:
    """Precision of products in generation; auto: the faster for one prompt, so that no prompt depends on others."""
    return choose_precision(settings.precision, device, decoding=True)[0]


def _where_trained(recipe: Recipe, folder: Path, overrides: Sequence[str]) -> Recipe:
    """The recipe with its relative paths below the folder that the run was trained in, if that is still there and no
    override names other data."""
    began = Path(read_command(folder).get("folder", ""))
    if not began.is_absolute() or not began.is_dir() or any(one.startswith("data.") for one in overrides):
        return recipe
    root = began if recipe.data.root is None else began / user_path(recipe.data.root)
    if root == Path.cwd():
        return recipe
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"root": str(root)})})


def load(name: str | Path, overrides: Sequence[str] = (), *, device: torch.device | None = None) -> LoadedRun:
    """Open a run's best model, ready to use; adapters are merged into it.

    Args:
        name: run directory, or its name under runs/.
        overrides: recipe fields to change, such as model.context_method=ntk model.context_factor=4.
        device: that computes; by default the GPU where there is one. Quantized weights stay on the processor.
    """
    folder = find_run(name)
    recipe = _where_trained(run_recipe(folder, overrides), folder, overrides)
    config, files = model_config(recipe.model), open_files(recipe, folder)
    if overrides:
        _check_overrides(config, recipe, folder, overrides)
    model = build_model(config, family_of(recipe).num_outputs(files))
    last = stages_of(recipe)[-1]
    model.trained = set_objective(model, last.recipe, of_pairs=last.of_pairs).weights
    weights, state = stored_weights(folder)
    put_weights(model, weights, str(folder))
    hold_quantized(model, weights)
    if (quantized := read_quantized(state, folder)) is not None and recipe.generate.precision == "auto":
        # Their products are no faster in bf16, and what is between them is rounded less in fp32.
        recipe = recipe.model_copy(update={"generate": recipe.generate.model_copy(update={"precision": "fp32"})})
    model = model.to(CPU if quantized is not None else device or computing_device())
    data = state.values.get("data")
    if not isinstance(data, str):
        what = "the checkpoint does not say which data it was trained on"
        raise CheckpointError(what, where=str(folder), fix="use another copy of the run")
    return LoadedRun(folder, recipe, model.eval(), files, state.step, data, quantized)
