"""Weights of loss terms: defaults, ramps, what a recipe may say, and a model with several terms in the real loop."""

import math
from typing import ClassVar

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from tests.conftest import random_batch, tiny_model
from tests.helpers.models import Stub
from unpad.errors import RecipeError
from unpad.models.objective import Objective
from unpad.recipes.file import load_recipe
from unpad.recipes.training import OptimSettings, ParameterGroup, Ramp, Weight
from unpad.training.optim import forget, make_optimizer, set_rate
from unpad.training.step import train_step


class TwoTerms(Stub):
    weights: ClassVar[dict[str, Weight]] = {"a": 1.0, "b": Ramp(start=0.0, end=0.1, steps=5000), "c": 0.0}

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, int, dict[str, float]]] = []
        self.fresh = nn.Parameter(torch.ones(2))

    def begin_step(self, step: int, total_steps: int, weights: dict[str, float]) -> list[nn.Parameter]:
        self.seen.append((step, total_steps, weights))
        return [self.fresh]


@pytest.mark.promise("patients.kl")
@pytest.mark.parametrize(("step", "weight"), [(0, 0.0), (2500, 0.05), (5000, 0.1), (9000, 0.1)])
def test_linear_ramp_over_steps(step, weight):
    assert Ramp(start=0.0, end=0.1, steps=5000).at(step, 10) == pytest.approx(weight, abs=1e-15)


@pytest.mark.promise("vqa.loss-ramps")
@pytest.mark.parametrize("progress", [0.0, 0.15, 0.3, 1.0])
def test_cosine_ramp_over_a_share_of_the_stage(progress):
    ramp = Ramp(start=100, end=70, share=0.3, shape="cosine")
    done = min(progress / 0.3, 1)
    assert ramp.at(round(progress * 1000), 1000) == pytest.approx(100 - 30 * (1 - math.cos(math.pi * done)) / 2)


@pytest.mark.parametrize("length", [{}, {"steps": 5, "share": 0.5}])
def test_a_ramp_has_one_length(length):
    with pytest.raises(ValidationError, match="either steps or share"):
        Ramp(end=1.0, **length)


def test_weights_of_a_step_leave_out_what_has_none():
    objective = Objective.of(TwoTerms())
    assert objective.at(0, 100) == {"a": 1.0}
    assert objective.at(2500, 100) == {"a": 1.0, "b": 0.05}


def test_the_recipe_overrides_and_unknown_terms_are_refused():
    assert Objective.of(TwoTerms(), {"c": 2.0, "b": 0.0}).at(0, 1) == {"a": 1.0, "c": 2.0}
    with pytest.raises(RecipeError, match='no loss "bb"'):
        Objective.of(TwoTerms(), {"bb": 1.0})
    with pytest.raises(RecipeError, match="every loss has weight 0"):
        Objective.of(TwoTerms(), {"a": 0.0, "b": 0.0})


def test_the_model_learns_of_every_update_and_says_what_it_drew_anew():
    model = TwoTerms()
    weights, fresh = Objective.of(model).begin(model, 2500, 4000)
    assert model.seen == [(2500, 4000, weights)]
    assert fresh == [model.fresh]
    assert Objective.of(model).final(model) == {"a": 1.0, "b": 0.1}


@pytest.mark.promise("patients.weights")
def test_a_recipe_may_hold_numbers_and_ramps(tmp_path):
    recipe = load_recipe("zh_chat", ["losses.cross_entropy=0.5", "losses.other={end: 2, steps: 10, shape: cosine}"])
    assert recipe.losses == {"cross_entropy": 0.5, "other": Ramp(end=2, steps=10, shape="cosine")}
    for wrong, message in (
        ("losses.other={end: 2}", "either steps or share"),
        ("losses.other=much", "losses.other"),
        ("losses.other={end: x, steps: 2}", "losses.other.end"),
        ("losses.other={end: 2, stepps: 3}", "stepps"),
    ):
        with pytest.raises(RecipeError, match=message) as error:
            load_recipe("zh_chat", [wrong])
        assert "(" not in str(error.value.where).replace("(command line)", "")


@pytest.mark.promise("patients.weights")
def test_every_parameter_is_in_the_first_group_that_names_it():
    model = tiny_model()
    settings = OptimSettings(
        lr=1e-2,
        weight_decay=0.5,
        groups=[
            ParameterGroup(parameters=["blocks.0.*"], lr_scale=0.1, clip=1e-3),
            ParameterGroup(parameters=["blocks.*"], lr_scale=0.0, weight_decay=0.0),
        ],
    )
    optimizer = make_optimizer(model, settings)
    set_rate(optimizer, 1e-2)
    of_parameter = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    assert len(of_parameter) == sum(len(group["params"]) for group in optimizer.param_groups)
    for name, parameter in model.named_parameters():
        group = of_parameter[id(parameter)]
        scale = 0.1 if name.startswith("blocks.0.") else 0.0 if name.startswith("blocks.") else 1.0
        assert group["lr"] == pytest.approx(1e-2 * scale)
    with pytest.raises(RecipeError, match="matches no parameter"):
        make_optimizer(model, OptimSettings(groups=[ParameterGroup(parameters=["nothing.*"])]))


@pytest.mark.promise("patients.weights")
def test_a_group_with_a_rate_of_0_stands_still_and_a_clip_of_its_own_holds():
    model = tiny_model()
    groups = [
        ParameterGroup(parameters=["blocks.0.*"], lr_scale=0.0),
        ParameterGroup(parameters=["embed.*"], clip=1e-6),
    ]
    optimizer = make_optimizer(model, OptimSettings(lr=1e-2, weight_decay=0.0, groups=groups))
    set_rate(optimizer, 1e-2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    train_step(
        model, [random_batch([5, 9])], optimizer, weights={"cross_entropy": 1.0}, precision="fp32", clip=1e3
    )  # fmt: skip
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) == name.startswith("blocks.0."), name
    assert model.embed.weight.grad.norm() <= 1e-6 * 1.001
    others = [p.grad for name, p in model.named_parameters() if not name.startswith("embed")]
    assert torch.nn.utils.get_total_norm(others) > 1e-3


@pytest.mark.promise("vqa.reinit")
def test_forgotten_parameters_start_anew():
    model = tiny_model()
    optimizer = make_optimizer(model, OptimSettings())
    train_step(model, [random_batch([5])], optimizer, weights={"cross_entropy": 1.0}, precision="fp32", clip=None)
    assert model.embed.weight in optimizer.state
    forget(optimizer, [model.embed.weight])
    assert model.embed.weight not in optimizer.state
    assert len(optimizer.state) > 0
