"""What an update minimises: the loss terms of a model, and the weight of each at this point of training.

A model that trains more than cross-entropy has an attribute `weights`, the default weight of every term that can train;
the recipe's `losses` override them. A weight is a number, or a `Ramp` that depends on the step alone, so a resumed run
goes on with the same one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from unpad.errors import RecipeError, nearest
from unpad.recipes.training import Ramp, Weight

LAST = 10**9  # an update after every ramp
WEIGHTS = {"cross_entropy": 1.0}  # of models that say nothing


@dataclass(frozen=True)
class Objective:
    """The weight of every loss term that can train."""

    weights: dict[str, Weight]

    @classmethod
    def of(cls, model: nn.Module, losses: dict[str, Weight] | None = None) -> Objective:
        """The objective of a model, with what a recipe's `losses` say instead of its defaults.

        Raises:
            RecipeError: the model has no such term, or none has a weight at any time.
        """
        own = getattr(model, "weights", WEIGHTS)
        for name in losses or {}:
            if name not in own:
                fix = nearest(name, list(own))
                raise RecipeError(f'the model has no loss "{name}" to train', where=f"losses.{name}", fix=fix)
        weights: dict[str, Weight] = {**own, **(losses or {})}
        if not any(isinstance(weight, Ramp) or weight for weight in weights.values()):
            raise RecipeError("every loss has weight 0", where="losses", fix="give one of them a weight")
        return cls(weights)

    def tell(self, model: nn.Module) -> None:
        """Leave the weights with the model as `trained`, so that its evaluation knows what it was trained on."""
        if hasattr(model, "trained"):
            model.trained = self.weights  # type: ignore[assignment]

    def at(self, step: int, total_steps: int) -> dict[str, float]:
        """The weights of one update of a stage, counted from 0; terms of weight 0 are left out."""
        found = {
            name: weight.at(step, total_steps) if isinstance(weight, Ramp) else weight
            for name, weight in self.weights.items()
        }
        return {name: weight for name, weight in found.items() if weight}

    def begin(self, model: nn.Module, step: int, total_steps: int) -> tuple[dict[str, float], list[nn.Parameter]]:
        """Prepare a model for an update.

        Returns:
            The weights of the update, and the parameters that the model drew anew for it.
        """
        weights = self.at(step, total_steps)
        prepare: Any = getattr(model, "begin_step", None)
        return weights, [] if prepare is None else list(prepare(step, total_steps, weights))

    def final(self, model: nn.Module) -> dict[str, float]:
        """The weights after all ramps, which the model is prepared for; what to measure and to prove with."""
        return self.begin(model, LAST, LAST)[0]
