"""Pairs of replies as a batch, and a model that learns from them."""

import torch

from tests.conftest import random_sequences, tiny_model
from unpad.batching.batch import RaggedBatch, from_sequences
from unpad.models.decoder import Decoder
from unpad.nn.preference import Pairs

BETA = 0.3


def replies(lengths: list[int], reference: list[float], numbers: list[int] | None = None) -> RaggedBatch:
    """Replies of pairs, chosen and rejected in turns, with loss on their second half."""
    sequences = random_sequences(lengths)
    masks = [[place >= len(one) // 2 for place in range(len(one))] for one in sequences]
    batch = from_sequences(sequences, masks)
    pair = numbers or [index // 2 for index in range(len(lengths))]
    chosen = torch.arange(len(lengths)) % 2 == 0
    return batch.with_part(Pairs(torch.tensor(pair), chosen, torch.tensor(reference, dtype=torch.float64)))


def example() -> RaggedBatch:
    return replies([9, 14, 30, 5, 21, 21, 3, 40], [-9.0, -30.0, -51.0, -7.5, -40.0, -44.0, -2.0, -70.0])


def learner(**fields: object) -> Decoder:
    model = tiny_model(**fields).eval()
    model.learn(BETA)
    return model
