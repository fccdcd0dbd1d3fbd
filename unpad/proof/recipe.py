"""`unpad prove`: the certificate of a recipe on its own data, for every strategy of the planner."""

from collections.abc import Sequence
from functools import partial

import numpy as np

from unpad.batching.layout import Layout, PaddedLayout, build_layout
from unpad.errors import needs_memory
from unpad.models import lower_sizes
from unpad.models.adapters import draw_adapters
from unpad.models.objective import set_objective
from unpad.nn.attend import Attend
from unpad.nn.block import Attention
from unpad.nn.kernel import choose_kernels
from unpad.nn.precision import DTYPES
from unpad.proof import sample as samples
from unpad.proof.certificate import certify
from unpad.proof.line import SAME_IDS, Certificate, Lines, ids_line, meaning_line
from unpad.proof.measure import Variant
from unpad.recipes.training import strategy_names
from unpad.terminal.progress import progress
from unpad.training.setup import Setup

READ = "each sequence straight from the data"


def prove_recipe(name: str, overrides: Sequence[str]) -> Certificate:
    """Prove a recipe, or a run's, on a sample of its own data that includes its longest and shortest sequence."""
    setup = samples.open_setup(name, overrides)
    draw_adapters(setup.model)
    set_objective(setup.model, setup.recipe, of_pairs=setup.stages[-1].of_pairs)
    candidates, lines = samples.candidates_of(setup), Lines()
    # Contents are read one sequence at a time, without `Data.load` or a plan.
    sample = lines.value(READ, lambda: samples.choose(setup, candidates))
    if sample is None:
        return lines.certificate()
    samples.spread_margins(setup, sample)
    truth = lines.value(READ, lambda: [setup.data.alone(*piece) for piece in sample.pieces])
    if truth is None:
        return lines.certificate()
    if tokenizer := getattr(setup.data, "tokenizer", None):
        read = [one.input_ids.tolist() for one in truth if one.input_ids is not None]
        lines.add(SAME_IDS, lambda: ids_line(tokenizer, read))
    lines.add("rows and their sequences say the same", lambda: [meaning_line(claim) for claim in setup.data.claims()])
    many = lines.value(READ, lambda: samples.many_of(setup, sample, candidates)) or []
    names = ("pack", *(name for name in strategy_names() if name != "pack"))
    made = {
        strategy: lines.value(f"plan {strategy} = alone", partial(_variant, setup, strategy, sample))
        for strategy in names
    }
    variants = [variant for variant in made.values() if variant is not None]
    trained = made[samples.plan_of_run(setup).strategy]
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
            few=f"; {sample.copies} more have the same content" if sample.copies else "",
            many=many,
        )


def _variant(setup: Setup, strategy: str, sample: samples.ProofSample) -> Variant:
    """The sample batched by one strategy, through the planner and loader that training uses."""
    place = {piece: index for index, piece in enumerate(sample.pieces)}
    micros = samples.micros_of(setup, strategy, sample)
    batches = [setup.data.load(micro) for micro in micros]
    rows = []
    for micro, batch in zip(micros, batches, strict=True):
        known = [place[piece] for piece in samples.pieces_of(micro)]
        rows.append(known + [-1] * (batch.num_seqs - len(known)))
    return Variant(f"plan {strategy}", batches, rows, is_plan=True)


def _kernels_of_run(setup: Setup, trained: Variant | None) -> set[str]:
    """Attention kernels that training and evaluation will use: the choice depends on length, padding and dropout."""
    head_dim = setup.model.head_dim
    if head_dim is None:
        return set()
    attended = setup.data.table.attended
    positions = np.minimum(setup.data.table.positions, samples.longest_of(setup))
    lengths = np.unique(positions if attended is None else attended)
    layouts: list[Layout | PaddedLayout] = [build_layout(lengths[lengths > 0])]
    rectangles = [batch.attended for batch in trained.micros] if trained else []
    layouts += [layout for layout in rectangles if isinstance(layout, PaddedLayout)]
    attentions = [part for part in setup.model.modules() if isinstance(part, Attention)]
    kinds = {Attend(True, part.window, drops) for part in attentions for drops in (0.0, part.dropout)} or {Attend()}
    return {
        kernel.value
        for layout in layouts
        for how in kinds
        for kernel in choose_kernels(
            DTYPES[setup.precision], setup.device, layout, head_dim, how.within(layout.longest)
        )
    }
