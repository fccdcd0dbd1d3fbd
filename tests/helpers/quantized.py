"""Models with quantized weights, made in memory."""

from pathlib import Path
from typing import TypeVar

from unpad.models.contract import Model
from unpad.run.base import hold_quantized, packed_weights, quantized_names, quantized_tensors

ModelType = TypeVar("ModelType", bound=Model)


def quantized(model: ModelType) -> ModelType:
    """The model, with quantized weights as `unpad export --int8` gives them to a run."""
    tensors = quantized_tensors(model.state_dict(), quantized_names(model))
    hold_quantized(model, packed_weights(tensors, Path("in memory")))
    return model
