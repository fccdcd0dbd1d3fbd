"""`unpad prove`: the certificate of a recipe on its own data, for every strategy of the planner."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from unpad.batching.batch import RaggedBatch
from unpad.batching.layout import build_layout
from unpad.batching.plan import Micro, plan
from unpad.errors import PlanError, needs_memory
from unpad.models import lower_sizes
from unpad.nn.kernel import choose_kernels
from unpad.nn.precision import DTYPES
from unpad.proof.certificate import certify
from unpad.proof.line import Certificate
from unpad.proof.measure import Variant
from unpad.recipes.file import load_recipe
from unpad.recipes.training import PlanSettings, strategy_names
from unpad.training.setup import Setup, prepare_setup

# fp64 runs some thirty passes over the sample; this much work keeps the whole proof under 20 seconds on two cores.
WORK = 2.5e9
MAX_SEQUENCES = 16


def prove_recipe(name: str, overrides: Sequence[str]) -> Certificate:
    """Prove a recipe on a sample of its own data that includes its longest and shortest sequence."""
    recipe = load_recipe(name, overrides)
    recipe = recipe.model_copy(update={"images": recipe.images.plain()})  # random augmentation has no truth to equal
    setup = prepare_setup(recipe, Path(), None)
    setup.model.label_smoothing = recipe.train.label_smoothing
    sample = _sample(setup)
    truth, index = _alone(setup, sample)
    names = ("pack", *(name for name in strategy_names() if name != "pack"))
    variants = [_variant(setup, strategy, sample, index) for strategy in names]
    with needs_memory("the proof, which computes in fp64 on copies of the model,", lower_sizes(setup.model.config)):
        return certify(
            setup.model, truth, variants,
            precision=setup.precision, device=setup.device, expected_kernels=_kernels_of_run(setup),
            losses=setup.stages[-1].recipe.losses,
        )  # fmt: skip


def _settings(setup: Setup, strategy: str) -> PlanSettings:
    """The last stage's plan with everything in one step, and micro-batches small enough that there are several."""
    recipe = _plan_of_run(setup)
    longest = _longest(setup)
    return recipe.model_copy(
        update={
            "strategy": strategy,
            "tokens_per_step": 1 << 30,
            "tokens_per_micro": min(recipe.tokens_per_micro, max(longest, 64)),
            "batch_size": min(recipe.batch_size, 4),
            "row_tokens": max(min(recipe.row_tokens, longest), longest),
            "drop_last": False,
        }
    )


def _plan_of_run(setup: Setup) -> PlanSettings:
    return setup.stages[-1].recipe.plan


def _longest(setup: Setup) -> int:
    limits = (setup.model.config.longest, _plan_of_run(setup).max_tokens or 1 << 30)
    return min(*limits, int(max(setup.data.table.positions.max(initial=1), 1)))


def _sample(setup: Setup) -> np.ndarray:
    """Sequence ids: the longest that the model takes whole, the shortest, and random ones while they fit the budget."""
    ids = np.unique(np.concatenate([stage.train_ids for stage in setup.stages]))
    lengths = setup.data.table.positions[ids]
    usable = setup.data.table.num_targets[ids] > 0
    if _plan_of_run(setup).overflow == "drop":
        usable &= lengths <= _longest(setup)
    if not usable.any():
        fix = "raise plan.max_tokens, or set plan.overflow=split"
        raise PlanError("the plan drops every token, so there is nothing to prove", where="plan", fix=fix)
    ids, lengths = ids[usable], np.minimum(lengths[usable], _longest(setup))
    parameters = sum(p.numel() for p in setup.model.parameters())
    budget = max(int(WORK / (6 * parameters)), 64)
    order = np.random.default_rng(setup.recipe.train.seed).permutation(len(ids))
    first = [int(np.argmax(lengths)), int(np.argmin(lengths))]
    chosen = list(dict.fromkeys([*first, *order[: 4 * MAX_SEQUENCES].tolist()]))
    taken = np.cumsum(lengths[chosen])
    num = max(int(np.searchsorted(taken, budget, side="right")), 3)
    return np.sort(ids[chosen[: min(num, MAX_SEQUENCES)]])


def _alone(setup: Setup, sample: np.ndarray) -> tuple[list[RaggedBatch], dict[tuple[int, int], int]]:
    """Every piece of the sample straight from the data, and the index in that list of each (sequence, start).

    The planner cuts the pieces; their contents are read one sequence at a time, without `Data.load` or a plan.
    """
    truth: list[RaggedBatch] = []
    index: dict[tuple[int, int], int] = {}
    for micro in _micros(setup, "pack", sample):
        for seq, start, stop, first_target in zip(
            micro.seq_ids, micro.starts, micro.stops, micro.first_target, strict=True
        ):
            index[int(seq), int(start)] = len(truth)
            truth.append(setup.data.alone(int(seq), int(start), int(stop), int(first_target)))
    return truth, index


def _micros(setup: Setup, strategy: str, sample: np.ndarray) -> list[Micro]:
    planned = plan(
        setup.data.table.positions, _settings(setup, strategy),
        seed=setup.recipe.train.seed, epoch=0, max_tokens=setup.model.config.longest,
        seq_ids=sample, targets=setup.data.count_targets,
    )  # fmt: skip
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


def _kernels_of_run(setup: Setup) -> set[str]:
    """Attention kernels that training will meet: the choice depends on length alone."""
    dtype = DTYPES[setup.precision]
    head_dim = setup.model.head_dim
    if head_dim is None:
        return set()
    attended = setup.data.table.attended
    lengths = np.unique(np.minimum(setup.data.table.positions, _longest(setup)) if attended is None else attended)
    layout = build_layout(lengths[lengths > 0])
    return {kernel.value for kernel in choose_kernels(dtype, setup.device, layout, head_dim)}
