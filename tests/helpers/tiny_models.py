"""A small model of every kind, with a batch for it and what it can do."""

from __future__ import annotations

import copy
from collections.abc import Callable

from tests.conftest import random_batch, tiny_model
from tests.helpers.image_models import random_images, random_squares, small_cnn, tiny_vit
from tests.helpers.patients import random_patients, tiny_patients_model
from tests.helpers.vision import ROWS, prepare, tiny
from unpad.batching.batch import RaggedBatch
from unpad.models.adapters import adapt, draw_adapters
from unpad.models.contract import (
    Classifies,
    Generates,
    HasLatent,
    Model,
    PredictsSets,
    PrunesTokens,
    ReadsCodeVectors,
    ReadsTokens,
    ScoresTokens,
)
from unpad.recipes.adapters import LoraSettings

TEXT = {ReadsTokens, ScoresTokens, Generates}
Example = tuple[Callable[[], Model], Callable[[], RaggedBatch], set[type[Model]]]
EXAMPLES: dict[str, Example] = {
    "decoder": (tiny_model, lambda: random_batch([5, 1, 9]), TEXT),
    "vit": (tiny_vit, random_images, {Classifies}),
    "cnn": (small_cnn, random_squares, {Classifies}),
    "vision_language": (
        lambda: tiny(prune={"method": "random", "layers": [0], "keep": 0.5}),
        lambda: prepare(ROWS).batch,
        {*TEXT, PrunesTokens},
    ),
    "set_sequence": (
        lambda: tiny_patients_model(code_vectors=4),
        lambda: random_patients([7, 0, 30, 2]),
        {Classifies, HasLatent, PredictsSets, ReadsCodeVectors},
    ),
}


def adapted(model: Model, settings: LoraSettings) -> Model:
    """A copy with adapters that have an effect."""
    copied = copy.deepcopy(model)
    adapt(copied, settings)
    draw_adapters(copied)
    return copied
