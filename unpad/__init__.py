"""Train transformers on ragged data without padding, with proof that batching changed nothing."""

__version__ = "0.1.0"
