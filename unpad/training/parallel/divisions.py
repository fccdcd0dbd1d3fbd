"""The division of a model that a recipe asks for, decided only here.

A division is imported when a recipe asks for it, so that a run of one process loads none.
"""

from unpad.processes.group import Group
from unpad.recipes.recipe import Recipe
from unpad.training.parallel.parallelism import Parallelism, Replicas


def parallelism_class(recipe: Recipe) -> type[Parallelism]:
    """The division that a recipe asks for, for any number of processes."""
    if recipe.train.shard != "none":
        from unpad.training.parallel.sharding import Sharding

        return Sharding
    return Replicas


def parallelism_of(recipe: Recipe, group: Group) -> type[Parallelism]:
    """The division of a recipe's model among these processes; a single process always holds the whole model."""
    return parallelism_class(recipe) if group.size > 1 else Replicas


def alone(recipe: Recipe) -> Recipe:
    """The recipe for one process, without any division."""
    train = recipe.train.model_copy(update={"shard": "none"})
    return recipe.model_copy(update={"train": train})
