"""Training objective: the loss terms of a model, and the weight of each at this point of training.

A model's `weights` are the default weight of every term that can train; the recipe's `losses` override them. A weight
is a number, or a `Ramp` that depends on the step alone, so a resumed run continues with the same one.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from unpad.errors import RecipeError, nearest
from unpad.models.contract import LearnsPreferences, Model
from unpad.recipes.recipe import Recipe
from unpad.recipes.training import Ramp, Weight

LAST = 10**9  # a step after every ramp


def set_objective(model: Model, recipe: Recipe, *, of_pairs: bool) -> "Objective":
    """Prepare a model for what a stage trains.

    Args:
        recipe: of the stage.
        of_pairs: whether it learns preferences, from pairs of replies.

    Raises:
        RecipeError: as `Objective.of`.
    """
    model.label_smoothing = recipe.train.label_smoothing
    if isinstance(model, LearnsPreferences):
        model.learn(recipe.train.beta if of_pairs else None)
    return Objective.of(model, recipe.losses)


@dataclass(frozen=True)
class Objective:
    """The weight of every loss term that can train."""

    weights: Mapping[str, Weight]

    @classmethod
    def of(cls, model: Model, losses: Mapping[str, Weight] | None = None) -> "Objective":
        """The objective of a model; a recipe's `losses` replace its defaults.

        Raises:
            RecipeError: the model has no such term, or none has a weight at any time.
        """
        for name in losses or {}:
            if name not in model.weights:
                fix = nearest(name, list(model.weights))
                raise RecipeError(f'the model has no loss "{name}" to train', where=f"losses.{name}", fix=fix)
        weights: dict[str, Weight] = {**model.weights, **(losses or {})}
        if not any(isinstance(weight, Ramp) or weight for weight in weights.values()):
            raise RecipeError("every loss has weight 0", where="losses", fix="give one of them a weight")
        return cls(weights)

    def at(self, step: int, total_steps: int) -> dict[str, float]:
        """The weights of one step of a stage, counted from 0; terms of weight 0 are left out."""
        weights = {
            name: weight.at(step, total_steps) if isinstance(weight, Ramp) else weight
            for name, weight in self.weights.items()
        }
        return {name: weight for name, weight in weights.items() if weight}

    def begin(self, model: Model, step: int, total_steps: int) -> tuple[dict[str, float], list[nn.Parameter]]:
        """Prepare a model for a step.

        Returns:
            The weights of the step, and the parameters that the model reinitialized for it.
        """
        weights = self.at(step, total_steps)
        return weights, model.begin_step(step, total_steps, weights)

    def final(self, model: Model) -> dict[str, float]:
        """Prepare a model for the weights after all ramps, and return them; evaluation and proof use them."""
        return self.begin(model, LAST, LAST)[0]
