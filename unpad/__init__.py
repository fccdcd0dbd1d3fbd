"""Train transformers on ragged data without padding, with proof that batching changed nothing."""

__version__ = "0.1.0"

from unpad.api import batches, plan, train, train_monitored, train_monitored_batch, train_texts
from unpad.batching.batch import RaggedBatch
from unpad.inference.loaded import load
from unpad.proof.certificate import prove

__all__ = [
    "RaggedBatch",
    "batches",
    "load",
    "plan",
    "prove",
    "train",
    "train_monitored",
    "train_monitored_batch",
    "train_texts",
]
