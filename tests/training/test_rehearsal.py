"""Steps outside of training are steps of training: the same parameters learn, from the same terms of the loss."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.toy import TWO_STAGES, quiet, run, write_toy
from unpad.doctor.subject import TimeBudget, open_subject
from unpad.interchange.origin import open_recipe
from unpad.models.decoder import Decoder
from unpad.processes.group import ALONE
from unpad.proof.processes import Job, _Case
from unpad.training.rehearsal import Rehearsal
from unpad.training.setup import prepare_setup
from unpad.training.stage import epoch_plan
from unpad.trials.preview import preview

FROZEN = [{**TWO_STAGES[0], "use": ["text", "chat"], "train": {"max_epochs": 1, "freeze": ["blocks.0.attention.*"]}}]
Learning = tuple[frozenset[str], bool]


@pytest.fixture
def learning(monkeypatch: pytest.MonkeyPatch) -> set[Learning]:
    """Names of the parameters that learn, and whether dropout is on, in every pass that computes gradients."""
    seen: set[Learning] = set()
    inner = Decoder.losses

    def losses(self: Decoder, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            named = self.named_parameters()
            seen.add((frozenset(name for name, value in named if value.requires_grad), self.training))
        return inner(self, *args, **kwargs)

    monkeypatch.setattr(Decoder, "losses", losses)
    return seen


def plans(recipe: Path) -> None:
    preview(str(recipe), [], console=quiet())


def examines(recipe: Path) -> None:
    subject = open_subject(str(recipe), [], TimeBudget(60, lambda: 0.0))
    subject.rehearsal().step([subject.load(micro) for micro in subject.plan.step(0)])


def proves(recipe: Path) -> None:
    _Case.of(Job(str(recipe), (), {1: 0}, 1), ALONE).update(ALONE)


def sizes(recipe: Path) -> None:
    prepare_setup(open_recipe(str(recipe), ["stages.pretrain.plan.tokens_per_micro=auto"]), Path(), None)


@pytest.mark.parametrize("user", [plans, examines, proves, sizes])
def test_what_tries_a_step_trains_the_parameters_that_a_run_trains(tmp_path, learning, user):
    """The stage freezes a part, and the recipe does not."""
    recipe = write_toy(tmp_path, stages=FROZEN)
    run(recipe, tmp_path / "run", "train.max_steps=1", "train.eval_every=9")
    of_run = set(learning)
    ((trained, _),) = of_run
    assert trained
    assert not any(name.startswith("blocks.0.attention.") for name in trained)
    learning.clear()
    user(recipe)
    assert learning == of_run


def test_a_rehearsal_leaves_the_model_of_the_run_as_it_is(tmp_path):
    setup = prepare_setup(open_recipe(str(write_toy(tmp_path, stages=FROZEN))), Path(), None)
    before = {name: value.clone() for name, value in setup.model.state_dict().items()}
    rehearsal = Rehearsal(setup, setup.stages[0])
    rehearsal.step(rehearsal.load(epoch_plan(setup.stages[0], 0).step(0)))
    assert all(torch.equal(value, before[name]) for name, value in setup.model.state_dict().items())
    assert all(parameter.requires_grad for parameter in setup.model.parameters())
    changed = rehearsal.model.state_dict()
    assert any(not torch.equal(value, before[name]) for name, value in changed.items())
