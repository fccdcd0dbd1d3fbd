"""Random models, models that know texts by heart, and stand-ins that have a few members of the contract."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unpad.batching.batch import RaggedBatch, from_sequences
from unpad.inference.engine import Prompts
from unpad.inference.generate import Continuing
from unpad.models import build_model, model_config
from unpad.models.contract import Generates, Model
from unpad.models.decoder import Decoder
from unpad.nn.losses import Terms
from unpad.nn.precision import Precision
from unpad.recipes.training import GenerateSettings


def random_model(section: dict[str, Any], num_outputs: int, spread: float = 0.1, seed: int = 0) -> Any:
    """A model of a recipe's `model`, fp32, in training mode.

    Args:
        section: of the recipe.
        num_outputs: size of the vocabulary, or number of classes or codes.
        spread: by which all parameters leave where they start, biases and norms too, so that their gradients show;
            0 leaves them there.
        seed: of its weights.
    """
    torch.manual_seed(seed)
    model = build_model(model_config(section), num_outputs)
    for parameter in model.parameters() if spread else ():
        parameter.data.add_(torch.randn_like(parameter) * spread)
    return model


def learn_by_heart(model: Model, sequences: Sequence[list[int]], num_steps: int, lr: float = 0.01) -> float:
    """Train on all sequences at once; the mean loss of a token in the last step."""
    optimizer, batch = torch.optim.Adam(model.parameters(), lr=lr), from_sequences(sequences)
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss, count = model.losses(batch)["cross_entropy"]
        (loss / count).backward()
        optimizer.step()
    return float(loss.detach()) / count


def generate(
    model: Generates,
    prompts: Prompts,
    settings: GenerateSettings,
    *,
    eos_id: int | Sequence[int],
    banned: Sequence[int] = (),
    precision: Precision = "fp32",
) -> list[list[int]]:
    """Tokens of continuations up to `eos_id`, one or several."""
    stops = [eos_id] if isinstance(eos_id, int) else eos_id
    return [ids for ids, _ in Continuing(model, settings, stops, banned, precision).all(prompts)]


class Stub(Model):
    """A model whose members are what the test defines; the others may not be called."""

    def forward(self, batch: RaggedBatch) -> Tensor:
        raise NotImplementedError

    def losses(self, batch: RaggedBatch) -> Terms:
        raise NotImplementedError

    def count_targets(self, batch: RaggedBatch) -> dict[str, int]:
        raise NotImplementedError


class Own(nn.Module):
    """A user's module, with the members that `prove` documents and no base class of ours."""

    def __init__(self, inner: Decoder) -> None:
        super().__init__()
        self.inner, self.embed = inner, inner.embed

    def forward(self, batch: RaggedBatch) -> Tensor:
        return self.inner(batch)

    def losses(self, batch: RaggedBatch) -> Terms:
        return self.inner.losses(batch)

    def count_targets(self, batch: RaggedBatch) -> dict[str, int]:
        return self.inner.count_targets(batch)
