"""Trainers with losses of their own."""

from collections.abc import Callable, Mapping

from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Trainer

from tests.proof.foreign.hugging_face import IGNORE

Loss = Callable[[nn.Module, Mapping[str, Tensor], Tensor], Tensor]  # of a model, a batch, and the targets of the update


def own(loss: Loss, scaled: bool = True) -> type[Trainer]:
    class OwnLoss(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            self.loss_is_scaled_for_ga = scaled
            return loss(model, inputs, num_items_in_batch)

    return OwnLoss


def logits_of(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    logits: Tensor = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
    return logits


def nll(logits: Tensor, targets: Tensor, **options: float) -> Tensor:
    """Loss of every position, (rows, width)."""
    flat = F.cross_entropy(
        logits.flatten(0, 1),
        targets.flatten(),
        ignore_index=IGNORE,
        reduction="none",
        **options,  # type: ignore[arg-type]
    )
    return flat.reshape(targets.shape)


def shifted(model: nn.Module, inputs: Mapping[str, Tensor], **options: float) -> tuple[Tensor, Tensor, Tensor]:
    logits, targets = logits_of(model, inputs)[:, :-1], inputs["labels"][:, 1:]
    return nll(logits, targets, **options), logits, targets
