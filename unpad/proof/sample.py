"""The sample of a recipe's data for the proof, and its plans.

Micro-batches of the proof hold several sequences of different content, regardless of the recipe's sizes and of the
lengths: a single sequence would be compared with itself, and a leak between copies may change nothing.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from unpad.batching.batch import RaggedBatch
from unpad.batching.pieces import Pieces, TargetCount
from unpad.batching.plan import Micro, Plan, plan
from unpad.data.measuring import Measuring
from unpad.errors import PlanError
from unpad.evaluation.preferences import log_probabilities
from unpad.interchange.origin import open_named
from unpad.models.contract import LearnsPreferences
from unpad.processes.group import ALONE, Group
from unpad.proof.content import content_of
from unpad.proof.measure import MOST_MANY
from unpad.recipes.training import PlanSettings
from unpad.run.kept import open_files
from unpad.training.setup import Setup, prepare_setup


def open_setup(name: str, overrides: Sequence[str], group: Group = ALONE) -> Setup:
    """The data and the model of a recipe, or of a run by its directory or name, with the weights that training would
    start from.

    Args:
        group: the processes of the proof.

    Raises:
        RecipeError, CheckpointError, SourceError: it cannot be trained, or the run names no data.
    """
    recipe, folder = open_named(name, overrides, on_own_data(name))
    recipe = recipe.model_copy(update={"images": recipe.images.plain()})  # random augmentation has no truth to equal
    if folder is None:
        return prepare_setup(recipe, Path(), None, group=group)
    return prepare_setup(recipe, folder, open_files(recipe, folder), compare=False, group=group)


def on_own_data(name: str) -> str:
    """Advice for an imported run, which names no data."""
    return f"prove it on yours: unpad prove {name} data.KIND=FILE"


# fp64 runs about thirty passes over the sample; this amount of work keeps the whole proof under 20 seconds on two
# cores.
WORK = 2.5e9
FULL = 4  # sequences of a micro-batch, where there are enough
MOST, LEAST = 4 * FULL, 4  # sequences of a sample; the least make two micro-batches of two
TRIED = 256  # sequences that are read in search of different ones
WIDER = (0, 1, 2, 3, 4, 6, 9, 24)  # powers of 2 by which buckets of lengths are widened, one after the other
MARGIN = 8  # cells of padding on the sample's longest sequence in a plan that pads to a fixed length


Content = tuple[bytes, ...]  # of the pieces of a bundle


class Piece(NamedTuple):
    """A part of a sequence that a plan keeps together; the arguments of `Data.alone`."""

    seq_id: int
    start: int
    stop: int
    first_target: int


@dataclass(frozen=True, eq=False)
class ProofSample:
    """Pieces of a recipe's sequences, of different content.

    Args:
        pieces: pieces that a plan keeps together, such as the replies of a pair, are adjacent.
        copies: number of pieces left out because a chosen one has the same content.
    """

    pieces: tuple[Piece, ...]
    copies: int = 0

    @property
    def seq_ids(self) -> np.ndarray:
        """The sequences that the pieces are of, (n,) int64, each once."""
        return np.unique(np.array([piece.seq_id for piece in self.pieces], np.int64))


def plan_of_run(setup: Setup) -> PlanSettings:
    """Settings of the last stage."""
    return setup.stages[-1].recipe.plan


def longest_of(setup: Setup) -> int:
    """Positions of the longest piece of the data."""
    limits = (setup.model.config.longest, plan_of_run(setup).max_tokens or 1 << 30)
    return min(*limits, int(max(setup.data.table.positions.max(initial=1), 1)))


# --------------------------------------------------------------------------- choice


def candidates_of(setup: Setup, most: int = TRIED) -> list[list[Piece]]:
    """Pieces to choose from, in order of preference; pieces of one bundle together.

    First the longest that the model takes whole, the shortest, and one that begins with context; then random ones,
    taking turns between groups of copies and between long documents.

    Raises:
        PlanError: the plan drops every token.
    """
    data, rng = setup.data, np.random.default_rng(setup.recipe.train.seed)
    of_pairs = setup.stages[-1].of_pairs
    ids = np.unique(np.concatenate([stage.train_ids for stage in setup.stages if stage.of_pairs == of_pairs]))
    lengths, longest = data.table.positions[ids], longest_of(setup)
    usable = data.table.num_targets[ids] > 0
    if plan_of_run(setup).overflow == "drop":
        usable &= lengths <= longest
    ids, lengths = ids[usable], np.minimum(lengths[usable], longest)
    if not len(ids):
        _refuse_empty(setup)
    order = ids[_groups_in_turn(data.table.group[ids], rng.permutation(len(ids)))]
    drawn = np.concatenate([ids[[int(np.argmax(lengths)), int(np.argmin(lengths))]], order[:most]])
    bundle = _bundle_of(setup)
    if bundle is not None:
        drawn = ids[np.isin(bundle[ids], bundle[drawn])]
    pieces = _plan(setup, np.unique(drawn), _settings(setup, "pack")).pieces
    if not len(pieces):
        _refuse_empty(setup)
    return _in_order(_bundles(pieces_of(pieces), bundle), data.table.group, rng)


def _bundles(pieces: Iterable[Piece], bundle: np.ndarray | None) -> list[list[Piece]]:
    """Pieces that a plan keeps together; most are by themselves."""
    units: dict[int, list[Piece]] = {}
    for place, piece in enumerate(pieces):
        number = -1 if bundle is None else int(bundle[piece.seq_id])
        units.setdefault(number if number >= 0 else -1 - place, []).append(piece)
    return list(units.values())


def _in_order(units: list[list[Piece]], groups: np.ndarray, rng: np.random.Generator) -> list[list[Piece]]:
    sizes = [_size(unit) for unit in units]
    late = [index for index, unit in enumerate(units) if unit[0].first_target > unit[0].start]
    own = np.array([groups[unit[0].seq_id] for unit in units])
    turns = _groups_in_turn(own, rng.permutation(len(units)))
    order = dict.fromkeys([int(np.argmax(sizes)), int(np.argmin(sizes)), *late[:1], *turns.tolist()])
    return [units[index] for index in order]


def _groups_in_turn(groups: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Reorder: the first of every group, then the second of every group, and so on.

    Args:
        groups: (n,) int64; order: a permutation, (n,) int64.
    """
    by_group = np.argsort(groups[order], kind="stable")
    counts = np.unique(groups[order], return_counts=True)[1]
    turn = np.empty(len(order), np.int64)
    turn[by_group] = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    return order[np.argsort(turn, kind="stable")]


def _size(unit: Sequence[Piece]) -> int:
    return sum(piece.stop - piece.start for piece in unit)


def _refuse_empty(setup: Setup) -> None:
    config, max_tokens = setup.model.config, plan_of_run(setup).max_tokens
    limits = {"plan.max_tokens": max_tokens or config.longest + 1, config.context_field: config.longest}
    raised = " and ".join(name for name, limit in limits.items() if limit == min(limits.values()))
    fix = f"raise {raised}, or set plan.overflow=split"
    raise PlanError("the plan drops every token, so there is nothing to prove", where="plan", fix=fix)


def choose(setup: Setup, candidates: Sequence[list[Piece]], most: int = MOST, work: float = WORK) -> ProofSample:
    """Read candidates one at a time and choose those of different content.

    As many as the budget allows. If these are fewer than two full micro-batches, the shortest are added up to this
    number or twice the budget, but at least LEAST in all.

    Args:
        candidates: of `candidates_of`.
        most: number of pieces, or of bundles.
        work: multiplications of one pass over them.
    """
    parameters = sum(p.numel() for p in setup.model.parameters())
    budget = max(int(work / (6 * parameters)), 64)
    left, chosen = list(candidates[:TRIED]), dict[Content, list[Piece]]()
    copies, is_over = 0, False
    while left and len(chosen) < most:
        unit, num = left.pop(0), len(chosen)
        size = sum(map(_size, [*chosen.values(), unit]))
        if size > budget and num >= 2 and not is_over:
            is_over, left = True, sorted([unit, *left], key=_size)
            continue
        if num >= LEAST and size > (2 * budget if num < 2 * FULL else budget):
            break
        content = _content_of(setup, unit)
        copies += content in chosen
        chosen.setdefault(content, unit)
    chosen = _with_equals(setup, chosen, candidates[:TRIED], most)
    return ProofSample(tuple(piece for unit in chosen.values() for piece in unit), copies)


def _with_equals(
    setup: Setup, chosen: dict[Content, list[Piece]], candidates: Sequence[list[Piece]], most: int
) -> dict[Content, list[Piece]]:
    """Units by content, with the two shortest candidates of equal length and different content.

    Some faults show only between neighbours of equal length. If there would be too many units, they replace the last
    ones.
    """
    sizes = [_size(unit) for unit in chosen.values()]
    if len(set(sizes)) < len(sizes) or most < LEAST:
        return chosen
    of_size: dict[int, tuple[Content, list[Piece]]] = {_size(unit): (content, unit) for content, unit in chosen.items()}
    for unit in sorted(candidates, key=_size):
        if _size(unit) > max(sizes):
            break
        content = _content_of(setup, unit)
        known = of_size.setdefault(_size(unit), (content, unit))
        if content != known[0]:
            pair = dict([known, (content, unit)])
            others = [one for one in chosen.items() if one[0] not in pair]
            return dict([*others[: most - 2], *pair.items()])
    return chosen


def many_of(setup: Setup, sample: ProofSample, candidates: Sequence[list[Piece]]) -> list[RaggedBatch]:
    """The shortest sequences of different content, at most MOST_MANY, each as a batch of its own.

    There are fewer if they would be much more work than the sample.
    """
    left, found = 4 * _size(sample.pieces), dict[bytes, RaggedBatch]()
    for piece in sorted((piece for unit in candidates for piece in unit), key=lambda piece: piece.stop - piece.start):
        left -= piece.stop - piece.start
        if left < 0 or len(found) == MOST_MANY:
            break
        alone = setup.data.alone(*piece)
        found.setdefault(content_of(alone), alone)
    return list(found.values())


def _content_of(setup: Setup, unit: Sequence[Piece]) -> Content:
    return tuple(content_of(setup.data.alone(*piece)) for piece in unit)


def spread_margins(setup: Setup, sample: ProofSample) -> None:
    """Give the sampled pairs reference log-probabilities that differ from the model's. With the model as reference all
    margins are 0, so all pairs would have equal shares in the gradient, whichever replies are compared."""
    data, model, bundle = setup.data, setup.model, setup.data.table.bundle
    if not setup.stages[-1].of_pairs or bundle is None:
        return
    assert data.replies is not None, "pairs have replies"
    assert isinstance(model, LearnsPreferences), "set by set_objective"
    assert model.beta is not None, "set by set_objective"
    ids = sample.seq_ids
    reference = log_probabilities(Measuring(model, data, ids, plan_of_run(setup)))
    chosen = data.replies.is_chosen(ids)
    rng, margins = np.random.default_rng(setup.recipe.train.seed), np.linspace(-1.5, 2.5, int(chosen.sum()))
    reference[chosen] -= rng.permutation(margins) / model.beta
    data.replies.reference[ids] = reference


# --------------------------------------------------------------------------- plans


def micros_of(setup: Setup, strategy: str, sample: ProofSample) -> list[Micro]:
    """Micro-batches of the sample by a strategy, with the sizes that test most.

    Sizes are tried until micro-batches hold FULL pieces (or bundles), and rectangles and rows have padding. Next
    preferred are micro-batches with different numbers of targets, for which a mean of means is not the mean, then more
    micro-batches.
    """
    best: tuple[tuple[float, ...], Plan] | None = None
    for settings in _sizes(setup, strategy, sample):
        planned = plan_of_sample(setup, sample, settings)
        score = _score(setup, planned)
        if best is None or score > best[0]:
            best = score, planned
        if score >= (True, FULL, True, True):
            break
    assert best is not None, "some sizes are tried"
    return [micro for step in range(best[1].num_steps) for micro in best[1].step(step)]


def plan_of_sample(setup: Setup, sample: ProofSample, settings: PlanSettings) -> Plan:
    """Plan the sample; other pieces of its sequences are left out, as if they had no target."""
    wanted = _keys(*np.array([(piece.seq_id, piece.stop) for piece in sample.pieces], np.int64).T)

    def targets(seq_ids: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        counts = setup.data.count_targets(seq_ids, starts, stops)
        return np.where(np.isin(_keys(seq_ids, stops), wanted), counts, 0)

    return _plan(setup, sample.seq_ids, settings, targets)


def small_settings(setup: Setup) -> PlanSettings:
    """Sizes of the run's strategy with many small micro-batches."""
    run, longest = plan_of_run(setup), longest_of(setup)
    together = longest * (2 if setup.stages[-1].of_pairs else 1)  # of a bundle
    sizes = {
        "tokens_per_micro": min(run.tokens_per_micro, max(together, 64)),
        "batch_size": min(run.batch_size, 4),
        "row_tokens": together,
    }
    return _settings(setup, run.strategy).model_copy(update=sizes)


def _keys(seq_ids: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """A unique number for every piece: no two pieces of a sequence end at the same position."""
    return (seq_ids.astype(np.int64) << 32) + stops


def _plan(setup: Setup, seq_ids: np.ndarray, settings: PlanSettings, targets: TargetCount | None = None) -> Plan:
    return plan(
        setup.data.table.positions,
        settings,
        seed=setup.recipe.train.seed,
        epoch=0,
        max_tokens=setup.model.config.longest,
        context_field=setup.model.config.context_field,
        seq_ids=seq_ids,
        targets=targets or setup.data.count_targets,
        bundles=_bundle_of(setup),
    )


def _settings(setup: Setup, strategy: str) -> PlanSettings:
    """The last stage's plan with everything in one step."""
    everything = {"strategy": strategy, "tokens_per_step": 1 << 30, "grow": {}, "drop_last": False, "window": None}
    return plan_of_run(setup).model_copy(update=everything)


def _sizes(setup: Setup, strategy: str, sample: ProofSample) -> Iterator[PlanSettings]:
    """Sizes to try, for micro-batches of about four sequences, five and so on, then of three and two.

    A strategy reads one or two of the sizes, so all change at once.
    """
    settings = _settings(setup, strategy)
    lengths = np.sort([_size(unit) for unit in _bundles(sample.pieces, _bundle_of(setup))])[::-1]
    longest = min(longest_of(setup), int(setup.data.table.positions[sample.seq_ids].max(initial=1)))
    limit = min(setup.model.config.longest, settings.max_tokens or 1 << 30)
    if longest + MARGIN < limit:  # no piece is cut otherwise, and a strategy that pads to the limit pads less
        settings = settings.model_copy(update={"max_tokens": longest + MARGIN, "stride": None})
    for per_micro in [*range(FULL, max(-(-len(lengths) // 2), FULL) + 1), 3, 2]:
        first, two = int(lengths[:per_micro].sum()), int(lengths[:2].sum())
        rectangle = per_micro * int(lengths.max())
        tokens = [first, rectangle, rectangle - 1, first + int(lengths.min()), per_micro * int(np.median(lengths))]
        for turn in range(len(WIDER)):
            row, rows = ((two + 1 + turn // 2, per_micro // 2), (first + 1 + turn // 2, 1))[turn % 2]
            yield settings.model_copy(
                update={
                    "tokens_per_micro": max(tokens[turn % len(tokens)] if turn < len(tokens) else row * rows, 1),
                    "batch_size": per_micro,
                    "row_tokens": row,
                    "bucket_width": settings.bucket_width << WIDER[turn],
                }
            )


def _score(setup: Setup, planned: Plan) -> tuple[float, ...]:
    """Rank of a plan by the order of `micros_of`; larger is better."""
    sizes, targets = [], set[int]()
    for micro in (micro for step in range(planned.num_steps) for micro in planned.step(step)):
        sizes.append(len(_bundles(pieces_of(micro), _bundle_of(setup))))
        targets.add(int(setup.data.count_targets(micro.seq_ids, micro.first_target, micro.stops).sum()))
    shows = len(sizes) > 1 and max(sizes) > 1
    return shows, min(*sizes, FULL), planned.pad_share > 0, len(targets) > 1, len(sizes)


def pieces_of(spans: Micro | Pieces) -> list[Piece]:
    """The pieces of a micro-batch, or of a plan, one by one."""
    arrays = (spans.seq_ids, spans.starts, spans.stops, spans.first_target)
    return [Piece(*map(int, span)) for span in zip(*arrays, strict=True)]


def _bundle_of(setup: Setup) -> np.ndarray | None:
    """Bundle of every sequence of the data, in a stage of pairs; else None."""
    return setup.data.table.bundle if setup.stages[-1].of_pairs else None
