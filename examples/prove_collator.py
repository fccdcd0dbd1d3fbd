"""Proof of a stranger's collator: two ways to pack rows, of which one lets them see each other.

python examples/prove_collator.py

It needs unpad alone: the model and both collators are plain torch. Some seconds on one core.
"""

import torch
from torch.nn import functional as F

import unpad

VOCABULARY = 50


class Reader(torch.nn.Module):
    """A causal model of one layer, which reads rows of any width and, where it is given them, boundaries."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, width)
        self.mix = torch.nn.Linear(width, 3 * width)
        self.head = torch.nn.Linear(width, VOCABULARY)

    def forward(self, input_ids, document_ids=None):
        """Logits of a rectangle of ids, (rows, width, vocabulary); tokens see only those of their own document."""
        x = self.embed(input_ids)
        seen = torch.ones(input_ids.shape[1], input_ids.shape[1], dtype=torch.bool).tril()  # (width, width)
        if document_ids is not None:
            seen = seen & (document_ids[:, :, None] == document_ids[:, None])  # (rows, width, width)
        query, key, value = self.mix(x).chunk(3, -1)
        return self.head(x + F.scaled_dot_product_attention(query, key, value, seen))


def packed(sequences):
    """One row of all sequences, as many a packing collator makes it: nothing says where one ends."""
    ids = torch.tensor([[token for one in sequences for token in one]])
    labels = torch.tensor([[label for one in sequences for label in [-100, *one[1:]]]])
    return {"input_ids": ids, "labels": labels}


def packed_apart(sequences):
    """The same row with the number of its sequence beside every token."""
    documents = torch.tensor([[number for number, one in enumerate(sequences) for _ in one]])
    return {**packed(sequences), "document_ids": documents}


torch.manual_seed(0)
model = Reader()
sequences = [torch.randint(VOCABULARY, (length,)).tolist() for length in (5, 31, 12, 8, 20, 3)]
for collate in (packed, packed_apart):
    certificate = unpad.prove_callable(model, collate, sequences)
    print(f"{collate.__name__}: {certificate.verdict}")
    for finding in certificate.findings:
        if not finding.passed:  # those after the first follow from it
            print(f"  {finding.claim}\n  do: {finding.advice}")
            break
