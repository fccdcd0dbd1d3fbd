"""The model that `attach` proved, which computes each micro-batch, and the parts of a trainer that must stay."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import Trainer

from unpad.errors import RecipeError
from unpad.hf.head import TargetHead
from unpad.hf.mixers import Boundaries
from unpad.hf.prepare import Prepared
from unpad.proof.foreign.undisturbed import DATA, attributes_kept

CHANGED = ("compute_loss_func", "model_accepts_loss_kwargs", "average_tokens_across_devices", "packing", "eval_packing")
PROMISED = ("data_collator", "compute_loss_func", "compute_loss")


@dataclass(frozen=True, eq=False)
class Settings:
    """Values of a trainer or its arguments by name; None for what neither of them has."""

    values: dict[str, Any]

    @classmethod
    def now(cls, trainer: Trainer, names: Iterable[str] = CHANGED) -> Settings:
        return cls({name: _owner(trainer, name).get(name) for name in names})

    @classmethod
    def before(cls, trainer: Trainer) -> Settings:
        """Those before any attachment; what the user has set since then is the user's."""
        now, attachment = cls.now(trainer), vars(trainer).get("attachment")
        if attachment is None:
            return now
        name, earlier = "compute_loss_func", attachment.before.values
        is_ours = now.values[name] is attachment.promised.values[name]
        return cls(earlier if is_ours else {**earlier, name: now.values[name]})

    @classmethod
    def promised(cls, trainer: Trainer, loss: str) -> Settings:
        """Those that the proof of an update covers: later changes ask for another."""
        # A loss may be right in one micro-batch and wrong in several.
        return cls.now(trainer, (*PROMISED, "gradient_accumulation_steps") if loss else PROMISED)

    def restore(self, trainer: Trainer) -> None:
        for name, value in self.values.items():
            if name in (owner := _owner(trainer, name)):
                owner[name] = value

    @contextmanager
    def restored(self, trainer: Trainer) -> Iterator[None]:
        """The trainer without attachment inside."""
        with attributes_kept(trainer, DATA), attributes_kept(trainer.args):
            self.restore(trainer)
            vars(trainer)["attachment"] = None
            yield

    def check(self, trainer: Trainer) -> None:
        """Refuse what was changed.

        Raises:
            RecipeError: the collator, the loss, or with a loss of one's own the accumulation.
        """
        for name, now in Settings.now(trainer, self.values).values.items():
            if now is not self.values[name] and not (isinstance(now, int) and now == self.values[name]):
                raise RecipeError(
                    f"{name} is another than when unpad.hf.attach proved the update",
                    fix="call unpad.hf.attach again after the change",
                )


def _owner(trainer: Trainer, name: str) -> dict[str, Any]:
    owner: object = trainer.args if hasattr(trainer.args, name) else trainer
    return vars(owner)


@dataclass(frozen=True, eq=False)
class ProvedModel:
    """A prepared model with all that its proof rests on. Weights and what learns may change.

    Args:
        parts: its modules by name, each with the `forward` that the object has of its own.
        attentions: configurations in it, each with the name of its attention.
        on_head: number of hooks of the head; a loss in chunks does not call it with all targets.
        loss_function: that of the model of transformers.
    """

    prepared: Prepared
    head: TargetHead
    parts: tuple[tuple[str, nn.Module, object], ...]
    attentions: tuple[tuple[Any, str], ...]
    on_head: int
    loss_function: object

    @classmethod
    def of(cls, prepared: Prepared, head: TargetHead) -> ProvedModel:
        attentions = tuple((config, config._attn_implementation) for config in _configs(prepared.model))
        parts = tuple(_parts(prepared))
        return cls(prepared, head, parts, attentions, _on_head(prepared), prepared.inner.loss_function)

    def check(self, trainer: Trainer, called: nn.Module | None = None) -> None:
        """Refuse to train or evaluate another model on flat batches.

        Args:
            called: the model that is handed the batch, by default the trainer's.

        Raises:
            RecipeError: it is another than was proved, or was changed since then; the message says how.
        """
        changed = self._other_model(trainer, called) or self._change()
        if changed:
            raise RecipeError(
                f"the model is another than when unpad.hf.attach proved it: {changed}",
                fix="make the change before unpad.hf.attach, or call unpad.hf.attach again after it",
            )

    def _other_model(self, trainer: Trainer, called: nn.Module | None) -> str:
        proved = _bare(trainer, self.prepared.model)
        for place, model in (("the trainer has", trainer.model), ("training calls", called)):
            if model is not None and (now := _bare(trainer, model)) is not proved:
                return f"{place} another {type(now).__name__}"
        return ""

    def _change(self) -> str:
        """Changes of the model since the proof, in words; empty for none."""
        for config, name in self.attentions:
            if config._attn_implementation != name:
                return f"its attention is {config._attn_implementation}, and was {name}"
        if not any(isinstance(hook, Boundaries) for hook in self.prepared.model._forward_pre_hooks.values()):
            return "its hook that finds the sequences of a flat batch is gone"
        if not self.head.is_there() or self.prepared.inner.loss_function is not self.loss_function:
            return "its loss function, or a hook of it, was exchanged"
        now = tuple(_parts(self.prepared))
        for (name, module, forward), (other_name, other, other_forward) in zip(self.parts, now, strict=False):
            if module is not other or name != other_name or forward is not other_forward:
                return f"its part {name} was exchanged, or has another forward"
        if len(now) != len(self.parts):
            return f"it has {len(now)} parts, and had {len(self.parts)}"
        return "its head has other hooks" if _on_head(self.prepared) != self.on_head else ""


def _bare(trainer: Trainer, model: nn.Module) -> nn.Module:
    """The model in what accelerate and torch.compile put around it."""
    bare: nn.Module = trainer.accelerator.unwrap_model(model, keep_torch_compile=False)
    return bare


def _configs(model: nn.Module) -> Iterator[Any]:
    """Configurations of a model and its layers that name an attention, each once."""
    found = {id(config): config for part in model.modules() if (config := vars(part).get("config")) is not None}
    yield from (config for config in found.values() if hasattr(config, "_attn_implementation"))


def _parts(prepared: Prepared) -> Iterator[tuple[str, nn.Module, object]]:
    """Modules below a model. Its own `forward` is left out: accelerate puts one around it for each precision."""
    roots = (prepared.model, prepared.inner)
    for name, part in prepared.model.named_modules():
        yield name, part, None if part in roots else vars(part).get("forward")


def _on_head(prepared: Prepared) -> int:
    head = prepared.inner.get_output_embeddings()
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return 0 if head is None else sum(len(getattr(head, kind)) for kind in kinds)
