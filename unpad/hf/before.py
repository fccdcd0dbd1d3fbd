"""Parts of a trainer that `attach` replaces, and those that must stay as it was when its update was proved."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from transformers import Trainer

from unpad.errors import RecipeError

OF_TRAINER = ("compute_loss_func", "model_accepts_loss_kwargs")
OF_ARGUMENTS = ("average_tokens_across_devices", "packing", "eval_packing")


@dataclass(frozen=True, eq=False)
class Before:
    """Values of a trainer and of its arguments."""

    trainer: dict[str, Any]
    arguments: dict[str, Any]

    @classmethod
    def now(cls, trainer: Trainer) -> Before:
        arguments = {name: vars(trainer.args)[name] for name in OF_ARGUMENTS if name in vars(trainer.args)}
        return cls({name: getattr(trainer, name) for name in OF_TRAINER}, arguments)

    @classmethod
    def of(cls, trainer: Trainer) -> Before:
        """Those before any attachment; what the user has set since then is the user's."""
        now, attachment = cls.now(trainer), vars(trainer).get("attachment")
        if attachment is None:
            return now
        earlier: Before = attachment.before
        if trainer.compute_loss_func is attachment.promised.values["compute_loss_func"]:
            return earlier
        return cls({**earlier.trainer, "compute_loss_func": trainer.compute_loss_func}, earlier.arguments)

    def restore(self, trainer: Trainer) -> None:
        vars(trainer).update(self.trainer)
        vars(trainer.args).update(self.arguments)

    @contextmanager
    def restored(self, trainer: Trainer) -> Iterator[None]:
        """The trainer without attachment inside."""
        now, attachment = Before.now(trainer), vars(trainer).get("attachment")
        self.restore(trainer)
        if attachment is not None:
            vars(trainer)["attachment"] = None
        try:
            yield
        finally:
            now.restore(trainer)
            if attachment is not None:
                vars(trainer)["attachment"] = attachment


@dataclass(frozen=True, eq=False)
class Promised:
    """Parts of a trainer that the proof of an update covers: later changes ask for another."""

    values: dict[str, Any]

    @classmethod
    def of(cls, trainer: Trainer, is_standard: bool) -> Promised:
        values = {name: vars(trainer).get(name) for name in ("data_collator", "compute_loss_func", "compute_loss")}
        if not is_standard:  # a loss may be right in one micro-batch and wrong in several
            values["gradient_accumulation_steps"] = trainer.args.gradient_accumulation_steps
        return cls(values)

    def check(self, trainer: Trainer) -> None:
        """Refuse what was changed.

        Raises:
            RecipeError: the collator, the loss, or with a loss of one's own the accumulation.
        """
        for name, value in self.values.items():
            owner = trainer.args if name == "gradient_accumulation_steps" else trainer
            now = vars(owner).get(name)
            if now is not value and not (isinstance(value, int) and now == value):
                raise RecipeError(
                    f"{name} is another than when unpad.hf.attach proved the update",
                    fix="call unpad.hf.attach again after the change",
                )
