"""Loss terms against each other: an outcome whose gradient is lost among those of the others."""

from __future__ import annotations

import torch

from unpad.doctor.subject import Subject, Trial
from unpad.models.objective import LAST, Objective
from unpad.recipes.training import Ramp
from unpad.terminal.finding import Finding, Value

SEQUENCES, TOKENS = 32, 1024  # of the batch
OUTCOME = ("classification", "hazard")  # terms that learn it from labels and times
PENALTY = "kl"  # large at first and small soon, whatever its weight
STARVED = 0.01  # of the norms of the gradients of all terms but that


def check_terms(subject: Subject) -> list[Finding]:
    """A finding on an outcome that is trained, with next to no share in the gradient of the layers that it shares."""
    trial = Trial(subject, drops=False)
    if not set(OUTCOME) & set(trial.weights):
        return _untrained(subject, trial)
    trial.model.eval()
    terms = trial.terms(subject.small_batch(SEQUENCES, TOKENS))
    parameters = [one for one in trial.model.parameters() if one.requires_grad]
    gradients = {
        name: torch.autograd.grad(
            weight * terms[name][0] / terms[name][1], parameters, retain_graph=True, materialize_grads=True
        )
        for name, weight in trial.weights.items()
        if name != PENALTY and terms[name][1] and terms[name][0].requires_grad
    }
    own, others = [name for name in gradients if name in OUTCOME], [name for name in gradients if name not in OUTCOME]
    if not own or not others:
        return []
    shared = [
        place
        for place in range(len(parameters))
        if all(any(bool(gradients[name][place].any()) for name in names) for names in (own, others))
    ]
    norms = {
        name: sum(float(grads[place].double().square().sum()) for place in shared) ** 0.5
        for name, grads in gradients.items()
    }
    share = sum(norms[name] for name in own) / max(sum(norms.values()), 1e-300)
    if not shared or share >= STARVED:
        return []
    strongest = max(others, key=lambda name: norms[name])
    usual = subject.setup.model.weights[own[0]]
    field = subject.field(f"losses.{own[0]}")
    values: dict[str, Value] = {
        "strongest": strongest,
        "other": norms[strongest] / sum(norms.values()),
        "field": field,
        "usual": usual.end if isinstance(usual, Ramp) else usual,
    }
    return [Finding("starved", "warning", share, (field, f"losses.{strongest}"), values)]


def _untrained(subject: Subject, trial: Trial) -> list[Finding]:
    """An outcome that the recipe gives labels for, and that no stage trains."""
    usual = subject.setup.model.weights
    own = [name for name in OUTCOME if name in usual]
    if not own or subject.data.class_labels() is None or not trial.weights:
        return []
    if any(name in Objective.of(subject.setup.model, one.recipe.losses).at(LAST, LAST)
           for one in subject.setup.stages for name in own):  # fmt: skip
        return []
    field, strongest = subject.field(f"losses.{own[0]}"), max(trial.weights, key=lambda name: trial.weights[name])
    values: dict[str, Value] = {"strongest": strongest, "other": 1.0, "field": field, "usual": 1.0}
    return [Finding("starved", "warning", 0.0, (field,), values)]
