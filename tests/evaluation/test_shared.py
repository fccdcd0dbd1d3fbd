"""An evaluation in training gives the same bits with any number of processes, of which each computes a share."""

import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from tests.helpers.pairs import write_pairs
from tests.helpers.toy import write_toy
from tests.helpers.turns import in_turns, outcomes_in_turns
from unpad.batching.batch import RaggedBatch
from unpad.batching.plan import Micro
from unpad.data.measuring import Measuring
from unpad.data.sources.split import Split
from unpad.errors import LostProcessError, OutOfMemoryError, SourceError
from unpad.evaluation.family import held_out
from unpad.examples import drawn
from unpad.models.contract import LearnsPreferences
from unpad.processes.group import ALONE, Group
from unpad.recipes.file import load_recipe
from unpad.training.setup import Setup, prepare_setup

SMALL = {
    "events": ["model.width=16", "model.heads=2", "model.latent=8", "plan.tokens_per_micro=60"],
    "images": ["model.width=24", "model.heads=2", "model.hidden=24", "model.blocks=1", "plan.tokens_per_micro=20"],
    "vqa": [
        "model.vision={patch: 8, width: 16, blocks: 1, heads: 2, hidden: 24, feature_layer: -1, dropout: 0.1}",
        "model.language={width: 16, blocks: 1, heads: 2, hidden: 24, context: 512, dropout: 0.1}",
        "plan.tokens_per_micro=300",
    ],
}


@pytest.fixture(scope="module")
def setups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Setup]]:
    """A small model and data of every family, and of pairs."""
    folder = tmp_path_factory.mktemp("shared")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drawn, "NUM_IMAGES", 60)
        patch.setattr(drawn, "NUM_PATIENTS", 100)
        recipes = {
            "text": load_recipe(str(write_toy(folder / "text")), ["plan.tokens_per_micro=40", "model.context=12"]),
            "pairs": load_recipe(str(write_pairs(folder / "pairs")), ["plan.tokens_per_micro=90"]),
            **{name: load_recipe(name, fields) for name, fields in SMALL.items()},
        }
        made = {name: prepare_setup(recipe, folder / name, None) for name, recipe in recipes.items()}
        for setup in made.values():
            if isinstance(setup.model, LearnsPreferences):
                setup.model.beta = 0.1
        yield made


def ids_of(setup: Setup) -> np.ndarray:
    return np.flatnonzero(setup.data.table.split == Split.HOLDOUT)


def over(setup: Setup, **fields: Any) -> Measuring[Any]:
    """A copy of the model, on the held-out sequences."""
    return Measuring(copy.deepcopy(setup.model), setup.data, ids_of(setup), setup.recipe.plan, **fields)


def measure(setup: Setup, group: Group, seen: list[tuple[int, ...]]) -> str:
    """A held-out evaluation with every bit, of a copy of the model; `seen` gets the sequences of every micro-batch."""
    model, data = copy.deepcopy(setup.model).train(), copy.copy(setup.data)

    def load(micro: Micro) -> RaggedBatch:
        assert not model.training, "evaluated with dropout"
        seen.append(tuple(micro.seq_ids.tolist()))
        return setup.data.load(micro)

    object.__setattr__(data, "load", load)
    found = held_out(Measuring(model, data, ids_of(setup), setup.recipe.plan, group=group))
    assert model.training, "the model is given back as it was"
    return repr(asdict(found))


@pytest.mark.promise("processes.eval")
@pytest.mark.parametrize(
    ("family", "term"),
    [
        *(("text", ""), ("pairs", ""), ("images", ""), ("vqa", "")),
        *(("events", "classification"), ("events", "hazard"), ("events", "reconstruction")),
    ],
)
def test_every_family_measures_the_same_bits_with_any_number_of_processes(family, term, setups):
    setup = setups[family]
    setup.model.trained = {term: 1.0}
    alone: list[tuple[int, ...]] = []
    expected = measure(setup, ALONE, alone)
    assert len(alone) > 3, "several micro-batches"
    for size in (2, 3, len(alone) + 2):
        seen: list[list[tuple[int, ...]]] = [[] for _ in range(size)]
        found = in_turns(size, lambda group, seen=seen: measure(setup, group, seen[group.rank]))
        assert found == [expected] * size
        assert Counter(one for own in seen for one in own) == Counter(alone), "each micro-batch is computed once"
        assert sum(not own for own in seen) == max(size - len(alone), 0), "none is idle while there is work"


def test_results_travel_with_every_bit_and_come_in_the_order_of_the_plan(setups):
    setup = setups["text"]
    planned = list(over(setup, overflow="split").micros())

    def work(batch: RaggedBatch) -> dict[str, np.ndarray]:
        number = batch.total_tokens
        bits = np.array([0x7FF8_0000_0000_0001 + number, 1, 1 << 63], np.uint64).view(np.float64)  # a NaN, tiny, -0
        made = {"bits": bits, "a name": np.arange(number * 100, dtype=np.int64)[::2], "scalar": np.array(number > 9)}
        return made | ({} if number % 2 else {"nothing": np.zeros((0, 3), np.float32)})

    def visit(group: Group) -> list[Any]:
        found = over(setup, overflow="split", group=group).results(work)
        return [
            (m.seq_ids.tolist(), m.starts.tolist(), [(k, v.dtype, v.shape, v.tobytes()) for k, v in sorted(r.items())])
            for m, r in found
        ]

    expected = visit(ALONE)
    assert [(ids, starts) for ids, starts, _ in expected] == [(m.seq_ids.tolist(), m.starts.tolist()) for m in planned]
    assert in_turns(3, visit) == [expected] * 3


@pytest.mark.parametrize("error", [SourceError("a picture has changed", where="a.png"), MemoryError("no more")])
def test_an_error_of_one_process_is_raised_in_all(error, setups):
    setup = setups["images"]
    calls: list[RaggedBatch] = []

    def work(batch: RaggedBatch) -> dict[str, np.ndarray]:
        calls.append(batch)
        if len(calls) == 2:
            raise error
        return {}

    def visit(group: Group) -> None:
        for _ in over(setup, group=group).results(work):
            pytest.fail("a result is there although a micro-batch has none")

    found = outcomes_in_turns(3, visit)
    kind = OutOfMemoryError if isinstance(error, MemoryError) else SourceError
    assert [type(one) for one in found] == [kind] * 3
    assert sum("(process " in str(one) for one in found) == 2, "the others name the process"


def test_a_process_that_ends_is_missed(setups):
    setup = setups["images"]

    def visit(group: Group) -> None:
        if group.rank == 1:
            raise ZeroDivisionError
        held_out(over(setup, group=group))

    lost, fault = outcomes_in_turns(2, visit)
    assert isinstance(lost, LostProcessError)
    assert isinstance(fault, ZeroDivisionError)
