"""The folder of a drill is gone afterwards, however the drill ends."""

from __future__ import annotations

import os
import signal
import stat
from pathlib import Path

import pytest

from unpad.drill.drill import PREFIX, left_behind, working_folder
from unpad.errors import DiskError, HungUp, Terminated


@pytest.mark.promise("drill.check")
@pytest.mark.parametrize("number", [None, signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_folder_and_the_parents_made_for_it_are_removed(tmp_path: Path, number: int | None) -> None:
    before = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    ends = {None: ValueError, signal.SIGINT: KeyboardInterrupt, signal.SIGHUP: HungUp}.get(number, Terminated)
    seen: list[Path] = []

    def work() -> None:
        with working_folder(tmp_path / "new" / "runs" / "mine") as folder:
            seen.append(folder)
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            (folder / "deep").mkdir()
            (folder / "deep" / "file").touch()
            if number is None:
                raise ValueError
            os.kill(os.getpid(), number)

    with pytest.raises(ends):
        work()
    assert seen[0].parent == tmp_path / "new" / "runs"
    assert list(tmp_path.iterdir()) == []
    assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


def test_what_others_put_beside_it_stays(tmp_path: Path) -> None:
    with working_folder(tmp_path / "runs" / "mine") as folder:
        (folder.parent / "other").touch()
        assert left_behind(folder) == []
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["other"]


def test_a_folder_that_a_killed_drill_left_is_named_and_kept_and_one_that_is_at_work_is_not(tmp_path: Path) -> None:
    left = tmp_path / f"{PREFIX}left"
    left.mkdir()
    with working_folder(tmp_path / "mine") as other, working_folder(tmp_path / "mine") as folder:
        assert other.parent == folder.parent
        assert left_behind(folder) == [left]
    assert [path.name for path in tmp_path.iterdir()] == [left.name]


def test_a_place_where_no_folder_can_be_made_is_refused_in_three_lines(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DiskError, match="no folder can be made there"), working_folder(tmp_path / "file" / "mine"):
        pass
