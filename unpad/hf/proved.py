"""The model that `attach` proved, which computes each micro-batch, and the parts of a trainer that must stay."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import Trainer

from unpad.errors import RecipeError
from unpad.hf.head import TargetHead
from unpad.hf.mixers import Boundaries
from unpad.hf.prepare import Prepared

CHANGED = ("compute_loss_func", "model_accepts_loss_kwargs", "average_tokens_across_devices", "packing", "eval_packing")
PROMISED = ("data_collator", "compute_loss_func", "compute_loss")


@dataclass(frozen=True, eq=False)
class Settings:
    """Values of a trainer or its arguments by name; None for what neither of them has."""

    values: dict[str, Any]

    @classmethod
    def now(cls, trainer: Trainer, names: Iterable[str] = CHANGED) -> Settings:
        return cls({name: _owner(trainer, name).get(name) for name in names})

    def restore(self, trainer: Trainer) -> None:
        for name, value in self.values.items():
            if name in (owner := _owner(trainer, name)):
                owner[name] = value

    def check(self, trainer: Trainer) -> None:
        """Refuse what was changed.

        Raises:
            RecipeError: the collator, the loss, or with a loss of one's own the accumulation.
        """
        for name, now in Settings.now(trainer, self.values).values.items():
            if now is not self.values[name] and not (isinstance(now, int) and now == self.values[name]):
                raise RecipeError(
                    f"{name} is another than when unpad.hf.attach proved the update",
                    fix="make the change before unpad.hf.attach",
                )


def _owner(trainer: Trainer, name: str) -> dict[str, Any]:
    owner: object = trainer.args if hasattr(trainer.args, name) else trainer
    return vars(owner)


@dataclass(frozen=True, eq=False)
class ProvedModel:
    """A prepared model with all that its proof rests on. Weights and what learns may change.

    Args:
        state: of it when it was proved.
    """

    prepared: Prepared
    head: TargetHead
    state: dict[str, object]

    @classmethod
    def of(cls, prepared: Prepared, head: TargetHead) -> ProvedModel:
        return cls(prepared, head, _state(prepared, head))

    def check(self, trainer: Trainer, called: nn.Module | None = None) -> None:
        """Refuse to train or evaluate another model on flat batches.

        Args:
            called: the model that is handed the batch, by default the trainer's.

        Raises:
            RecipeError: it is another than was proved, or was changed since then; the message says how.
        """
        changed = self._other_model(trainer, called) or self._changed_part()
        if changed:
            raise RecipeError(
                f"the model is another than when unpad.hf.attach proved it: {changed}",
                fix="make the change before unpad.hf.attach",
            )

    def _other_model(self, trainer: Trainer, called: nn.Module | None) -> str:
        proved = _bare(trainer, self.prepared.model)
        for place, model in (("the trainer has", trainer.model), ("training calls", called)):
            if model is not None and (now := _bare(trainer, model)) is not proved:
                return f"{place} another {type(now).__name__}"
        return ""

    def _changed_part(self) -> str:
        now = _state(self.prepared, self.head)
        changed = [name for name in {**self.state, **now} if now.get(name, ()) != self.state.get(name, ())]
        return f"its {changed[0]} was exchanged, added or removed" if changed else ""


def _state(prepared: Prepared, head: TargetHead) -> dict[str, object]:
    """What a proof rests on, by the name of the part. The model's own `forward` is left out: accelerate puts one around
    it for each precision."""
    model, inner, linear = prepared.model, prepared.inner, prepared.inner.get_output_embeddings()
    configs = [config for part in model.modules() if (config := vars(part).get("config")) is not None]
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return {
        "attention": [name for config in configs if (name := getattr(config, "_attn_implementation", None))],
        "hook that finds sequences": any(isinstance(hook, Boundaries) for hook in model._forward_pre_hooks.values()),
        "loss function": (head.is_there(), inner.loss_function),
        "head's hooks": 0 if linear is None else sum(len(getattr(linear, kind)) for kind in kinds),
        **{
            f"part {name}": (part, None if part in (model, inner) else vars(part).get("forward"))
            for name, part in model.named_modules()
        },
    }


def _bare(trainer: Trainer, model: nn.Module) -> nn.Module:
    """The model in what accelerate and torch.compile put around it."""
    bare: nn.Module = trainer.accelerator.unwrap_model(model, keep_torch_compile=False)
    return bare
