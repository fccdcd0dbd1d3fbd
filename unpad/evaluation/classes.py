"""Predictions for rows with a class each, and their evaluation in training (apart: families of users import it)."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from unpad.batching.batch import RaggedBatch
from unpad.data.measuring import Measuring
from unpad.data.rows import ClassData
from unpad.evaluation.metrics import HeldOut
from unpad.evaluation.rows import ExampleRows, Ratio, objects, placed
from unpad.inference.patients import Likeliest
from unpad.models.contract import Classifies


@dataclass(frozen=True)
class ClassPredictions(Likeliest):
    """Predictions of a model for rows with a class each.

    Args:
        log_p: (num_rows, num_classes) float64, log probabilities.
        labels: (num_rows,) int64.
    """

    log_p: np.ndarray
    labels: np.ndarray

    @property
    def nll(self) -> np.ndarray:
        """(num_rows,) nats."""
        return np.asarray(-self.log_p[np.arange(len(self.labels)), self.labels])


@torch.no_grad()
def predict(over: Measuring[ClassData[Any]]) -> ClassPredictions:
    """Classify rows, in the model's own precision; no result depends on the batching."""
    model = over.model
    assert isinstance(model, Classifies), "a model of rows with a class each"

    def classify(batch: RaggedBatch) -> dict[str, np.ndarray]:
        return {"log_p": model.classify(batch).double().log_softmax(-1).cpu().numpy()}

    return ClassPredictions(over.collect(classify)["log_p"], over.data.labels[over.seq_ids])


def held_out(over: Measuring[ClassData[Any]]) -> HeldOut:
    """Loss per row and accuracy."""
    predictions = predict(over)
    loss = float(predictions.nll.mean())
    return HeldOut(loss, {"loss": loss, "accuracy": float(predictions.right.mean())}, len(over.seq_ids))


def rows(over: Measuring[ClassData[Any]], predictions: ClassPredictions) -> ExampleRows:
    """The rows that were measured: `label`, `prediction`, `right`, `loss`, and `probability_CLASS` of every class."""
    classes, probabilities = over.data.classes, np.exp(predictions.log_p)
    columns = placed(over.data, over.seq_ids) | {
        "label": objects([classes[i] for i in predictions.labels]),
        "prediction": objects([classes[i] for i in predictions.chosen]),
        "right": predictions.right,
        "loss": predictions.nll,
        "num_targets": np.ones(len(predictions.labels), np.int64),
    }
    columns |= {f"probability_{name}": probabilities[:, index] for index, name in enumerate(classes)}
    return ExampleRows(columns, {"loss": Ratio("loss", "num_targets"), "accuracy": Ratio("right", share=True)})
