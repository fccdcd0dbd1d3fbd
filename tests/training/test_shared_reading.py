"""Processes of a run share its data: one of each host fills the cache, the others find it, and one writes the files."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.pairs import write_pairs
from tests.helpers.ranks import run_ranks
from tests.helpers.toy import write_toy
from tests.helpers.turns import outcomes_in_turns
from unpad.data.pictures import alike
from unpad.data.text import TextData
from unpad.errors import DiskError, LostProcessError, SourceError
from unpad.examples import drawn
from unpad.processes import group as groups
from unpad.processes.group import Group
from unpad.recipes.file import load_recipe
from unpad.training import reference
from unpad.training.reference import put_reference
from unpad.training.setup import Setup, prepare_setup


def counted(patch: pytest.MonkeyPatch, place: Any, name: str, calls: list[Any]) -> None:
    """Note every call of a function."""
    original = getattr(place, name)

    def call(*args: Any, **fields: Any) -> Any:
        calls.append(name)
        return original(*args, **fields)

    patch.setattr(place, name, call)


def read(recipe: Path, folder: Path, group: Group, *changes: str) -> Setup:
    return prepare_setup(load_recipe(str(recipe), list(changes)), folder, None, group=group)


def corpus_of(setup: Setup) -> TextData:
    return setup.data


@pytest.mark.promise("processes.eval")
def test_one_process_reads_for_all_and_one_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(drawn, "NUM_IMAGES", 40)
    texts, pairs, no_folder = write_toy(tmp_path / "texts"), write_pairs(tmp_path / "pairs"), tmp_path / "a_file"
    no_folder.write_text("where the cache should be")

    def work(group: Group) -> dict[str, Any]:
        """What this process did; every value is JSON."""
        calls: list[str] = []
        for place, name in (
            (drawn, "_draw_all"),
            (alike, "_look"),
            (reference, "log_probabilities"),
            (reference, "write_reference"),
        ):
            counted(monkeypatch, place, name, calls)
        # Texts: encoded once.
        data = corpus_of(read(texts, tmp_path / "run", group))
        found: dict[str, Any] = {
            "encoded": data.report.work.encoded, "misses": data.report.work.misses,
            "hits": data.report.work.hits, "compared": data.report.leaks is not None, "same": data.fingerprint(),
        }  # fmt: skip
        # Pictures: drawn, decoded and compared once.
        calls.clear()
        refused = "data.near_duplicates=refuse"
        pictures = prepare_setup(load_recipe("images", [refused]), tmp_path / "pictures", None, group=group)
        found |= {"drawn": calls.count("_draw_all"), "decoded": calls.count("_look") > 0}
        found["same"] += pictures.data.fingerprint()
        # Pairs: the log-probabilities of the start are shared, and those that the leader has kept are taken by all.
        setup = read(pairs, tmp_path, group)
        for turn in ("computed", "kept"):
            calls.clear()
            how = put_reference(setup, setup.stages[0], begins=True).rpartition(", ")[2]
            replies = corpus_of(setup).replies
            found[turn] = [how, calls.count("log_probabilities"), calls.count("write_reference")]
            found["same"] += replies.reference.tobytes().hex()
            assert np.any(replies.reference)
            replies.reference[:] = 0
            if group.rank:
                os.environ["UNPAD_CACHE"] = str(tmp_path / "cache of another host")
        put_reference(setup, setup.stages[0], begins=False)
        found["same"] += replies.reference.tobytes().hex()
        # Long messages.
        told = group.exchange_arrays({f"{group.rank}": np.arange(3000.0) / (group.rank + 3)})
        found["told"] = [np.array_equal(one[f"{r}"], np.arange(3000.0) / (r + 3)) for r, one in enumerate(told)]
        # A cache that cannot be written.
        os.environ["UNPAD_CACHE"] = str(no_folder)
        with pytest.raises(DiskError, match="UNPAD_CACHE" if group.leads else r"\(process 0\)"):
            read(texts, tmp_path / "run", group, "train.seed=5")
        return found

    first, second = run_ranks(tmp_path / "ranks", 2, work)
    assert first["encoded"] == 100
    assert (first["misses"], second["misses"], second["hits"], second["encoded"]) == (2, 0, 2, 0)
    assert (first["compared"], second["compared"]) == (True, False)
    assert (first["drawn"], second["drawn"]) == (1, 0)
    assert (first["decoded"], second["decoded"]) == (True, False)
    assert first["computed"] == ["computed once", 2, 2], "of training and other pairs; into the cache and the run"
    assert second["computed"] == ["computed once", 2, 0]
    assert (first["kept"], second["kept"]) == (["from the cache", 0, 1], ["from the cache", 0, 0])
    assert first["told"] == second["told"] == [True, True]
    assert first["same"] == second["same"]


def test_a_process_that_reads_for_long_is_waited_for_and_one_that_is_gone_is_missed(tmp_path, monkeypatch):
    monkeypatch.setattr(groups, "BEAT_S", 0.02)

    def is_at_work() -> bool:
        return any(thread.name == "unpad-at-work" for thread in threading.enumerate())

    def wait_for(condition: Callable[[], bool]) -> str:
        deadline = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.005)
        return "done"

    def work(group: Group) -> list[str]:
        told: list[Any] = []
        counted(monkeypatch, Group, "exchange", told)
        found = group.first_of_host_first(lambda: wait_for(lambda: group.rank > 0 or len(told) > 5))
        assert not is_at_work()
        told.clear()
        found += group.of_leader(lambda: wait_for(lambda: len(told) > 5))
        if group.rank == 0:  # the other process has ended, and the thread that tells it of long work finds out
            with pytest.raises(LostProcessError):
                group.first_of_host_first(lambda: wait_for(lambda: not is_at_work()))
        return [found]

    assert run_ranks(tmp_path / "ranks", 2, work) == [["donedone"]] * 2


def test_messages_of_many_processes_arrive(tmp_path):
    """Also long ones beside short ones, and an error; a process that is silent is missed."""

    def fail(group: Group) -> None:
        with group.together():
            if group.rank == 3:
                raise SourceError("no such file", where="texts.jsonl")

    def work(group: Group) -> list[Any]:
        lengths = [len(text) for text in group.exchange("x" * (3000 * group.rank))]
        with pytest.raises(SourceError, match="no such file"):
            fail(group)
        group.limit(0.5)
        if group.rank == 4:
            while not (tmp_path / "missed").exists():
                time.sleep(0.01)
            return lengths
        with pytest.raises(LostProcessError):
            group.exchange(1)
        (tmp_path / "missed").touch()
        return lengths

    assert run_ranks(tmp_path / "ranks", 5, work) == [[0, 3000, 6000, 9000, 12000]] * 5


def test_what_fails_in_the_first_process_of_a_host_fails_in_all():
    made: list[int] = []

    def work(group: Group) -> None:
        def make() -> None:
            made.append(group.rank)
            raise SourceError("no such file", where="texts.jsonl")

        group.first_of_host_first(make)

    found = outcomes_in_turns(3, work)
    assert [type(one) for one in found] == [SourceError] * 3
    assert made == [0]
