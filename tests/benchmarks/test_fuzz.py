"""The fuzzer: every target with fixed cases, every finding that was ever kept, and faults that it must find."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fuzz import BEGIN, END, FOUND, PAGE, STATE, table
from tests.helpers.fuzz.crew import Totals
from tests.helpers.fuzz.target import Target, Verdict, judge, random_of
from tests.helpers.fuzz.targets import MODULES, builders, pictures
from unpad.data.pixels import decode
from unpad.data.sources import reader, row
from unpad.data.tokens import cache
from unpad.nn import product_speed
from unpad.recipes.lines import LineLoader
from unpad.storage import folders

ROOT = Path(__file__).parents[2]
NUM_CASES = 40
# Targets whose cases take longer: each decodes, parses or draws a whole file several times.
FEWER = {
    name: 8
    for name in (
        *("command_line", "data_check", "recipe_yaml", "tokenizer_folder", "run_log", "run_evaluations", "run_samples"),
        *("run_evaluation", "run_recipe", "run_metrics", "run_timing", "run_json", "hf_index"),
        *("hf_weights", "hf_files", "chat_budget", "synonyms", "events_meds", "labels_csv", "labels_parquet"),
    )
}  # fmt: skip
KEPT = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(FOUND.glob("*.json"))}


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Target]]:
    """Builds a target in an empty working directory with a cache of its own; libraries may warn."""
    monkeypatch.setenv("UNPAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield lambda name: builders()[name](tmp_path)


@pytest.mark.promise("input.fuzz")
@pytest.mark.parametrize("name", builders())
def test_a_reader_of_outside_bytes_keeps_its_promises(name, opened):
    target = opened(name)
    for seed in range(FEWER.get(name, NUM_CASES)):
        verdict = judge(target, target.make(random_of(name, seed)))
        again = f"python benchmarks/fuzz.py --case {name} {seed}"
        assert not verdict.signature, f"{verdict.signature}: {verdict.detail}; once more: {again}"


UNDAMAGED: dict[str, Callable[..., Any]] = {
    "damage_bytes": lambda data, others, rng: data,
    "damage_json": lambda value, rng, share=0.0: json.dumps(value, ensure_ascii=False).encode(),
    "damage_rows": lambda rows, rng, share=0.0: b"".join(json.dumps(row).encode() + b"\n" for row in rows),
    "damage_value": lambda value, rng, share=0.0: value,
}


@pytest.mark.promise("input.fuzz")
@pytest.mark.parametrize("name", sorted(builders().keys() - {"lock_file"}))  # whose holder is another host's
def test_a_reader_accepts_its_undamaged_reference(name, opened, monkeypatch):
    for module in ("mutate", *(f"targets.{module}" for module in MODULES)):
        for damage, identity in UNDAMAGED.items():
            monkeypatch.setattr(f"tests.helpers.fuzz.{module}.{damage}", identity, raising=False)
    target = opened(name)
    assert any(judge(target, target.make(random_of(name, seed))) == Verdict(False) for seed in range(20))


@pytest.mark.promise("input.fuzz")
@pytest.mark.parametrize("name", sorted({found["target"] for found in KEPT.values()}))
def test_what_was_found_once_stays_mended(name, opened):
    target = opened(name)
    for file, found in KEPT.items():
        if found["target"] == name:
            verdict = judge(target, found["data"].encode("latin-1"))
            again = f"python benchmarks/fuzz.py --found tests/helpers/fuzz/found/{file}.json"
            assert not verdict.signature, f"{verdict.signature}: {verdict.detail}; once more: {again}"


def test_there_are_more_targets_than_promised_and_all_are_known():
    assert len(builders()) >= 31
    assert FEWER.keys() <= builders().keys()
    assert {found["target"] for found in KEPT.values()} <= builders().keys()


def test_a_case_is_decided_by_its_target_and_number_alone(opened):
    for name in ("text_jsonl", "text_parquet", "png", "manifest"):
        first, second = opened(name), opened(name)
        assert [first.make(random_of(name, seed)) for seed in range(20)] == [
            second.make(random_of(name, seed)) for seed in range(20)
        ]


# --------------------------------------------------------------------------- planted faults

PLANTED: dict[str, tuple[str, Any, str, Callable[[Any], Any], str]] = {
    "an error that nobody catches": (
        "text_jsonl", row.Row, "split", lambda was: lambda row: {"train": "train"}[row["split"]], "KeyError",
    ),
    "a row that vanishes": (
        "chat_jsonl", reader, "read_rows",
        lambda was: lambda *given: (row for i, row in enumerate(was(*given)) if i != 1), "neither used nor bad",
    ),
    "a header that is misread": (
        "bmp", pictures, "probe",
        lambda was: lambda data: decode.ImageInfo(was(data).height, was(data).width, "BMP", was(data).notes), "",
    ),
    "a checksum that is not compared": (
        "checkpoint_damage", folders, "sha256", lambda was: lambda data: _Same(), "",
    ),
    "a token cache whose checksum is not compared": (
        "token_cache", cache.hashlib, "sha256", lambda was: lambda data=b"": _Same(), "damaged tokens are read",
    ),
    "a value of YAML that cannot be built": (
        "recipe_fields", LineLoader, "construct_object",
        lambda was: LineLoader.__mro__[1].construct_object, "Error",
    ),
    "a file of another shape": (
        "speeds_file", product_speed._File, "model_validate_json",
        lambda was: lambda data: json.loads(data)["entries"], "",
    ),
}  # fmt: skip


class _Same(str):
    """A checksum that agrees with all others."""

    def hexdigest(self) -> _Same:
        return self

    def __ne__(self, other: object) -> bool:
        return False


@pytest.mark.promise("input.fuzz")
@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found(fault, opened, monkeypatch):
    name, module, function, planted, signature = PLANTED[fault]
    target = opened(name)
    monkeypatch.setattr(module, function, planted(getattr(module, function, None)), raising=False)
    for seed in range(400):
        data = target.make(random_of(name, seed))
        found = judge(target, data).signature
        if found:
            break
    assert found
    assert signature in found


# --------------------------------------------------------------------------- processes


def fuzz_toys(folder: Path, cases: int, *names: str) -> subprocess.Popen[str]:
    """Run the fuzzer on readers with planted faults, in a process without threads, which may fork."""
    given = [str(folder / "state.json"), str(folder / "found"), str(cases), *names]
    command = [sys.executable, "-m", "tests.helpers.fuzz.toys", *given]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def kept(folder: Path) -> dict[str, str]:
    """Signatures of the findings of a folder, and their bytes."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in (folder / "found").glob("*.json")]
    return {one["signature"]: one["data"] for one in found}


ENDINGS = {
    "key_error": "KeyError in the target itself",
    "lost_row": "broken promise: rows are neither used nor bad",
    "exit": "SystemExit in the target itself",
    "hang": "hang: too much processor time in the target hang",
    "wait": "hang: a wait without an end in the target wait",
    "death": "death by SIGSEGV in the target death",
    "memory": "too much memory in the target memory",
}


@pytest.mark.promise("input.fuzz")
@pytest.mark.parametrize("name", ENDINGS)
def test_a_reader_that_fails_hangs_dies_or_takes_too_much_memory_is_found_and_kept(name, tmp_path):
    run = fuzz_toys(tmp_path, 100, name)
    run.communicate(timeout=300)
    assert run.returncode == 0
    assert "x" in kept(tmp_path)[ENDINGS[name]]
    total = Totals.read(tmp_path / "state.json").targets[name]
    assert total.cases == total.next >= 100
    assert total.failed > 0


@pytest.mark.promise("input.fuzz")
def test_runs_add_up_and_a_killed_one_loses_only_its_last_seconds(tmp_path):
    fuzz_toys(tmp_path, 300, "sound", "key_error").communicate(timeout=300)
    before = Totals.read(tmp_path / "state.json")
    assert before.num_cases >= 300
    second = fuzz_toys(tmp_path, 10**9, "sound", "key_error")
    state = tmp_path / "state.json"
    while Totals.read(state).num_cases == before.num_cases:  # it writes the file every few seconds
        assert second.poll() is None
        signal.sigtimedwait([], 0.1)
    third = fuzz_toys(tmp_path, 10**9, "sound")
    third.communicate(timeout=300)
    assert third.returncode == 1, "two at a time would overwrite each other's totals"
    os.kill(second.pid, signal.SIGKILL)
    second.communicate(timeout=300)
    folder = os.open(tmp_path / "found", os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)  # until its processes have noticed
    os.close(folder)
    killed = Totals.read(state)
    fuzz_toys(tmp_path, killed.num_cases + 100, "sound", "key_error").communicate(timeout=300)
    after = Totals.read(state)
    assert before.num_cases <= killed.num_cases < after.num_cases
    for total in after.targets.values():
        assert total.cases == total.next
    assert after.runs[0]["cases"] == after.num_cases
    assert list(kept(tmp_path)) == ["KeyError in the target itself"]


def test_the_table_names_every_target_and_what_was_done(tmp_path):
    fuzz_toys(tmp_path, 100, "sound", "key_error").communicate(timeout=300)
    totals = Totals.read(tmp_path / "state.json")
    text = table(totals, ["one"])
    assert "| `sound` | " in text
    assert "| `key_error` | " in text
    assert f"{totals.num_cases:,} cases of 2 targets" in text
    assert "Findings that are open: 1." in text


def test_the_page_has_the_figures_of_all_runs():
    assert PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0] == table(Totals.read(STATE), [])
