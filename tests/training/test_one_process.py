"""One process uses nothing of torch.distributed; older runs are told what changes in updates of many micro-batches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from tests.helpers.toy import quiet, rows, write_toy
from unpad.processes.group import joined
from unpad.training.loop import train

pytestmark = pytest.mark.slow

USED = ("init_process_group", "new_group", "all_reduce", "all_gather", "broadcast", "barrier", "TCPStore")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNPAD_CACHE", str(tmp_path / "cache"))


@pytest.mark.promise("processes.one")
def test_one_process_uses_nothing_of_torch_distributed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*given: object, **options: object) -> None:
        raise AssertionError("torch.distributed was used")

    for name in USED:
        assert callable(getattr(dist, name))
        monkeypatch.setattr(dist, name, refused)
    with joined() as group:
        train(str(write_toy(tmp_path)), tmp_path / "run", ["train.max_steps=4"], console=quiet(), group=group)
    assert rows(tmp_path / "run", "train")[-1]["step"] == 4
    assert not dist.is_initialized()
