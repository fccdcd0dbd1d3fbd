"""Files that hold patients' data: nobody but their owner reads them, and they name nobody."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.toy import write_toy
from unpad.data.family import NAMES_KEY

pytestmark = pytest.mark.slow

SMALL = ("train.max_steps=2", "model.width=16", "model.blocks=1", "model.heads=2", "model.latent=4")


@pytest.fixture(autouse=True)
def open_folder(tmp_path: Path) -> Iterator[None]:
    """A folder and a mask that let everybody read, as on a shared machine."""
    tmp_path.chmod(0o755)
    before = os.umask(0o022)
    yield
    os.umask(before)


def readable(folder: Path) -> list[str]:
    """Files and folders that others could reach and read."""
    found = []
    for path in [folder, *folder.rglob("*")]:
        ways = [path, *(up for up in path.parents if up.is_relative_to(folder))]
        if all(way.stat().st_mode & 0o077 for way in ways):
            found.append(str(path.relative_to(folder.parent)))
    return found


@pytest.mark.promise("patients.private")
def test_what_a_run_of_patients_writes_is_for_its_owner(unpad, tmp_path):
    assert unpad("train", "events", *SMALL, "--out", "runs/people").code == 0
    run = tmp_path / "runs/people"
    assert unpad("eval", "people").code == 0
    assert unpad("runs", "people").code == 0
    assert unpad("embed", "people", "--out", "vectors.parquet").code == 0
    assert unpad("data", "show", "people", "--html", "people.html").code == 0
    assert (tmp_path / "people.html").stat().st_mode & 0o777 == 0o600
    assert readable(run) == []
    for name in ("evaluation.json", "report.html", "metrics.jsonl", "shown.json", "events.json", NAMES_KEY):
        assert (run / name).stat().st_mode & 0o777 == 0o600, name
    assert (tmp_path / "vectors.parquet").stat().st_mode & 0o777 == 0o600
    assert readable(tmp_path / "cache") == []
    assert (tmp_path / "runs").stat().st_mode & 0o777 == 0o755


def test_runs_of_other_data_stay_as_the_mask_says(unpad, tmp_path):
    assert unpad("train", write_toy(tmp_path / "toy"), "train.max_steps=1", "--out", "runs/texts").code == 0
    assert (tmp_path / "runs/texts").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "runs/texts/metrics.jsonl").stat().st_mode & 0o777 == 0o644
