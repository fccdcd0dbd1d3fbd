"""A small model of every kind, with a batch for it and what it can do."""

import copy
from collections.abc import Callable
from typing import Any

from tests.conftest import random_batch, tiny_model
from tests.helpers.image_models import random_images, random_squares, small_cnn, tiny_vit
from tests.helpers.patients import random_patients, tiny_patients_model
from tests.helpers.vision import ROWS, prepare, tiny
from unpad.batching.batch import RaggedBatch
from unpad.models import contract
from unpad.models.adapters import adapt, draw_adapters
from unpad.recipes.training import LoraSettings

DECODERS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt": {"norm": "layernorm", "activation": "relu", "positions": "sinusoidal", "bias": True, "tied": False},
    "learned": {"norm": "layernorm", "activation": "gelu", "positions": "learned"},
    "grouped": {"kv_heads": 2, "activation": "geglu"},
    "qwen": {"head_width": 6, "qk_norm": True, "qkv_bias": True, "kv_heads": 1},
    "gemma": {
        "head_width": 6, "qk_norm": True, "branch_norms": True, "activation": "geglu_tanh", "embed_scale": 4.0,
        "sliding_window": 3, "sliding_blocks": [0], "sliding_rope_theta": 100.0,
    },
    "smollm": {
        "no_rope_blocks": [0], "activation": "gelu_tanh",
        "rope_scaling": {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_context": 8},
    },
}  # fmt: skip
TEXT = {contract.ReadsTokens, contract.ScoresTokens, contract.Generates}
Example = tuple[Callable[[], contract.Model], Callable[[], RaggedBatch], set[type[contract.Model]]]
EXAMPLES: dict[str, Example] = {
    "decoder": (tiny_model, lambda: random_batch([5, 1, 9]), TEXT),
    "vit": (tiny_vit, random_images, {contract.Classifies}),
    "cnn": (small_cnn, random_squares, {contract.Classifies}),
    "vision_language": (
        lambda: tiny(prune={"method": "random", "layers": [0], "keep": 0.5}),
        lambda: prepare(ROWS).batch,
        {*TEXT, contract.PrunesTokens},
    ),
    "set_sequence": (
        lambda: tiny_patients_model(code_vectors=4),
        lambda: random_patients([7, 0, 30, 2]),
        {contract.Classifies, contract.HasLatent, contract.PredictsSets, contract.ReadsCodeVectors},
    ),
}


def adapted(model: contract.Model, settings: LoraSettings) -> contract.Model:
    """A copy with adapters that have an effect."""
    copied = copy.deepcopy(model)
    adapt(copied, settings)
    draw_adapters(copied)
    return copied
