"""A causal model and collators that know nothing of unpad and of transformers."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 40
IGNORE = -100


class Causal(nn.Module):
    """One layer of attention and one convolution; rows are packed by `document_ids`, or padded.

    Args:
        isolates: False if the model pays no heed to `document_ids`.
    """

    def __init__(self, width: int = 16, *, isolates: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(64, width)
        self.queries, self.keys, self.values = (nn.Linear(width, width) for _ in range(3))
        self.head, self.isolates = nn.Linear(width, VOCABULARY), isolates
        self.register_buffer("seen", None)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, input_ids, attention_mask=None, position_ids=None, document_ids=None):
        width = input_ids.shape[1]
        places = torch.arange(width).expand_as(input_ids) if position_ids is None else position_ids
        x = self.embed(input_ids) + self.places(places)  # (rows, width, dim)
        seen = torch.ones(width, width, dtype=torch.bool).tril().expand(len(input_ids), -1, -1)
        if attention_mask is not None:
            seen = seen & attention_mask.bool()[:, None] | torch.eye(width, dtype=torch.bool)
        if document_ids is not None and self.isolates:
            seen = seen & (document_ids[:, :, None] == document_ids[:, None])
        x = x + F.scaled_dot_product_attention(self.queries(x), self.keys(x), self.values(x), seen)
        logits: Tensor = self.head(F.gelu(x * self.scale))
        return logits


def padded(sequences: Sequence[Sequence[int]], side: str = "right") -> dict[str, Tensor]:
    """Rows padded with token 0 to the longest; labels of real tokens."""
    width = max(map(len, sequences))

    def rows(parts: Sequence[Sequence[int]], fill: int) -> Tensor:
        gaps = [[fill] * (width - len(part)) for part in parts]
        pairs = zip(parts, gaps, strict=True)
        return torch.tensor([[*part, *gap] if side == "right" else [*gap, *part] for part, gap in pairs])

    ids, labels = rows(sequences, 0), rows(sequences, IGNORE)
    return {"input_ids": ids, "labels": labels, "attention_mask": rows([[1] * len(one) for one in sequences], 0)}


def flat(sequences: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """All sequences in one row, with positions and documents; the first token of each has no label."""
    return {
        "input_ids": torch.tensor([[token for one in sequences for token in one]]),
        "labels": torch.tensor([[label for one in sequences for label in (IGNORE, *one[1:])]]),
        "position_ids": torch.tensor([[place for one in sequences for place in range(len(one))]]),
        "document_ids": torch.tensor([[index for index, one in enumerate(sequences) for _ in one]]),
    }


def sequences(num: int = 7, seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 16, (num,), generator=generator).tolist()
    return [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
