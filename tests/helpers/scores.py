"""Random scores of a vocabulary."""

import torch
from torch import Tensor


def random_scores(rows: int, vocab_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rows + vocab_size)
    return (torch.randn(rows, vocab_size) * 4).to(dtype), torch.randint(0, vocab_size, (rows,))
