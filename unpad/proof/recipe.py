"""`unpad prove`: the certificate of a recipe on its own data, for every strategy of the planner."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from unpad.batching.layout import Layout, PaddedLayout, build_layout
from unpad.batching.plan import Micro, Plan, plan
from unpad.data.text import TextData
from unpad.errors import PlanError, needs_memory
from unpad.evaluation.preferences import log_probabilities
from unpad.interchange.origin import open_recipe
from unpad.models import lower_sizes
from unpad.models.adapters import draw_adapters
from unpad.models.contract import LearnsPreferences
from unpad.models.objective import set_objective
from unpad.nn.block import Attention
from unpad.nn.kernel import choose_kernels
from unpad.nn.precision import DTYPES
from unpad.proof.certificate import certify
from unpad.proof.line import Certificate, Lines
from unpad.proof.measure import Variant
from unpad.recipes.training import PlanSettings, strategy_names
from unpad.terminal.progress import progress
from unpad.training.setup import Setup, prepare_setup

# fp64 runs some thirty passes over the sample; this much work keeps the whole proof under 20 seconds on two cores.
WORK = 2.5e9
MAX_SEQUENCES = 16


class Piece(NamedTuple):
    """A part of a sequence that a plan keeps together; the arguments of `Data.alone`."""

    seq_id: int
    start: int
    stop: int
    first_target: int


def prove_recipe(name: str, overrides: Sequence[str]) -> Certificate:
    """Prove a recipe on a sample of its own data that includes its longest and shortest sequence."""
    recipe = open_recipe(name, overrides)
    recipe = recipe.model_copy(update={"images": recipe.images.plain()})  # random augmentation has no truth to equal
    setup = prepare_setup(recipe, Path(), None)
    draw_adapters(setup.model)
    set_objective(setup.model, recipe, of_pairs=setup.stages[-1].of_pairs)
    sample = take_sample(setup)
    spread_margins(setup, sample)
    pieces, lines = _pieces(setup, sample), Lines()
    # Contents are read one sequence at a time, without `Data.load` or a plan.
    truth = lines.value("each sequence straight from the data", lambda: [setup.data.alone(*piece) for piece in pieces])
    if truth is None:
        return lines.certificate()
    index = {(piece.seq_id, piece.start): place for place, piece in enumerate(pieces)}
    names = ("pack", *(name for name in strategy_names() if name != "pack"))
    made = {
        strategy: lines.value(f"plan {strategy} = alone", partial(_variant, setup, strategy, sample, index))
        for strategy in names
    }
    variants = [variant for variant in made.values() if variant is not None]
    trained = made[_plan_of_run(setup).strategy]
    with (
        progress("proving"),
        needs_memory("the proof, which computes in fp64 on copies of the model,", lower_sizes(setup.model.config)),
    ):
        return certify(
            setup.model,
            truth,
            variants,
            precision=setup.precision,
            device=setup.device,
            expected_kernels=_kernels_of_run(setup, trained),
            losses=setup.stages[-1].recipe.losses,
            trained=trained,
            broken=lines.done,
        )


def _settings(setup: Setup, strategy: str) -> PlanSettings:
    """The last stage's plan with everything in one step, and micro-batches small enough that there are several."""
    recipe = _plan_of_run(setup)
    longest = _longest(setup) * (2 if setup.stages[-1].of_pairs else 1)  # of a bundle
    return recipe.model_copy(
        update={
            "strategy": strategy,
            "tokens_per_step": 1 << 30,
            "tokens_per_micro": min(recipe.tokens_per_micro, max(longest, 64)),
            "batch_size": min(recipe.batch_size, 4),
            "row_tokens": longest,
            "drop_last": False,
        }
    )


def _plan_of_run(setup: Setup) -> PlanSettings:
    return setup.stages[-1].recipe.plan


def _longest(setup: Setup) -> int:
    limits = (setup.model.config.longest, _plan_of_run(setup).max_tokens or 1 << 30)
    return min(*limits, int(max(setup.data.table.positions.max(initial=1), 1)))


def take_sample(setup: Setup, most: int = MAX_SEQUENCES, work: float = WORK) -> np.ndarray:
    """Sequence ids: the longest that the model takes whole, the shortest, and random ones while they fit the budget.

    Args:
        most: number of sequences.
        work: multiplications of one pass over them.
    """
    of_pairs = setup.stages[-1].of_pairs
    ids = np.unique(np.concatenate([stage.train_ids for stage in setup.stages if stage.of_pairs == of_pairs]))
    lengths = setup.data.table.positions[ids]
    usable = setup.data.table.num_targets[ids] > 0
    if _plan_of_run(setup).overflow == "drop":
        usable &= lengths <= _longest(setup)
    if not usable.any():
        config, max_tokens = setup.model.config, _plan_of_run(setup).max_tokens
        limits = {"plan.max_tokens": max_tokens or config.longest + 1, config.context_field: config.longest}
        raised = " and ".join(name for name, limit in limits.items() if limit == min(limits.values()))
        fix = f"raise {raised}, or set plan.overflow=split"
        raise PlanError("the plan drops every token, so there is nothing to prove", where="plan", fix=fix)
    ids, lengths = ids[usable], np.minimum(lengths[usable], _longest(setup))
    parameters = sum(p.numel() for p in setup.model.parameters())
    budget = max(int(work / (6 * parameters)), 64)
    order = np.random.default_rng(setup.recipe.train.seed).permutation(len(ids))
    first = [int(np.argmax(lengths)), int(np.argmin(lengths))]
    chosen = list(dict.fromkeys([*first, *order[: 4 * most].tolist()]))
    taken = np.cumsum(lengths[chosen])
    num = max(int(np.searchsorted(taken, budget, side="right")), 3)
    sample = np.sort(ids[chosen[: min(num, most)]])
    bundle = setup.data.table.bundle if of_pairs else None
    return sample if bundle is None else ids[np.isin(bundle[ids], bundle[sample])]


def spread_margins(setup: Setup, sample: np.ndarray) -> None:
    """Give the replies of the sampled pairs references from which the weights differ. At the reference all margins are
    0, and so all pairs have the same share in the gradient, whichever replies are compared."""
    data, model, bundle = setup.data, setup.model, setup.data.table.bundle
    if not setup.stages[-1].of_pairs or bundle is None:
        return
    assert isinstance(data, TextData), "pairs are texts"
    assert data.replies is not None, "pairs have replies"
    assert isinstance(model, LearnsPreferences), "set by set_objective"
    assert model.beta is not None, "set by set_objective"
    reference = log_probabilities(model, data, sample, _plan_of_run(setup), setup.device)
    chosen = data.replies.is_chosen(sample)
    rng, margins = np.random.default_rng(setup.recipe.train.seed), np.linspace(-1.5, 2.5, int(chosen.sum()))
    reference[chosen] -= rng.permutation(margins) / model.beta
    data.replies.reference[sample] = reference


def _pieces(setup: Setup, sample: np.ndarray) -> list[Piece]:
    """Every piece of the sample, as the planner cuts it."""
    return [
        Piece(*map(int, piece))
        for micro in _micros(setup, "pack", sample)
        for piece in zip(micro.seq_ids, micro.starts, micro.stops, micro.first_target, strict=True)
    ]


def plan_sample(setup: Setup, strategy: str, sample: np.ndarray) -> Plan:
    """The sample as one step, in micro-batches as small as its longest sequence allows."""
    return plan(
        setup.data.table.positions,
        _settings(setup, strategy),
        seed=setup.recipe.train.seed,
        epoch=0,
        max_tokens=setup.model.config.longest,
        context_field=setup.model.config.context_field,
        seq_ids=sample,
        targets=setup.data.count_targets,
        bundles=setup.data.table.bundle if setup.stages[-1].of_pairs else None,
    )


def _micros(setup: Setup, strategy: str, sample: np.ndarray) -> list[Micro]:
    planned = plan_sample(setup, strategy, sample)
    return [micro for step in range(planned.num_steps) for micro in planned.step(step)]


def _variant(setup: Setup, strategy: str, sample: np.ndarray, index: dict[tuple[int, int], int]) -> Variant:
    """The sample batched by one strategy, through the planner and loader that training uses."""
    micros = _micros(setup, strategy, sample)
    batches = [setup.data.load(micro) for micro in micros]
    rows = []
    for micro, batch in zip(micros, batches, strict=True):
        known = [index[int(seq), int(start)] for seq, start in zip(micro.seq_ids, micro.starts, strict=True)]
        rows.append(known + [-1] * (batch.num_seqs - len(known)))
    return Variant(f"plan {strategy}", batches, rows)


def _kernels_of_run(setup: Setup, trained: Variant | None) -> set[str]:
    """Attention kernels that training and evaluation will meet: the choice depends on length, padding and dropout."""
    head_dim = setup.model.head_dim
    if head_dim is None:
        return set()
    attended = setup.data.table.attended
    lengths = np.unique(np.minimum(setup.data.table.positions, _longest(setup)) if attended is None else attended)
    layouts: list[Layout | PaddedLayout] = [build_layout(lengths[lengths > 0])]
    rectangles = [batch.attended for batch in trained.micros] if trained else []
    layouts += [layout for layout in rectangles if isinstance(layout, PaddedLayout)]
    attentions = [part for part in setup.model.modules() if isinstance(part, Attention)]
    drops = any(part.dropout > 0 for part in attentions)
    return {
        kernel.value
        for layout in layouts
        for dropout in {False, drops}
        for kernel in choose_kernels(DTYPES[setup.precision], setup.device, layout, head_dim, dropout=dropout)
    }
