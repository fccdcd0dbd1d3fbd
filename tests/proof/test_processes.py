"""`unpad prove --processes`: real processes take the same update; the certificate says whether its bits are equal."""

import json

import pytest
import torch

from tests.helpers.toy import write_toy
from unpad.errors import SourceError
from unpad.proof import processes
from unpad.proof.line import Line
from unpad.proof.processes import prove_processes


@pytest.mark.promise("processes.prove")
def test_an_update_by_several_processes_has_the_bits_of_one(unpad, tmp_path):
    done = unpad("prove", str(write_toy(tmp_path / "toy")), "--processes", "2", "--json", code=0)
    certificate = json.loads(done.out)
    assert certificate["passed"]
    names = [line["name"] for line in certificate["lines"]]
    assert names == ["an update by 2 processes = by one", "weights in all of 2 processes are equal"]
    assert all(line["bound"] == line["measured"] == 0 for line in certificate["lines"])
    num, _, shares = certificate["lines"][0]["note"].partition(" micro-batches, by process: ")
    assert int(num) == sum(map(int, shares.split(", "))) > 3


@pytest.mark.slow
def test_fast_sums_are_shown_with_their_error(tmp_path):
    lines = prove_processes(str(write_toy(tmp_path / "toy")), ["train.sums=fast"], [2]).lines
    assert [line.name for line in lines] == [
        "gradient by 2 processes against one",
        "weights in all of 2 processes are equal",
    ]
    assert 0 < lines[0].measured < 1e-6
    assert lines[1].measured == 0


def test_an_error_of_the_data_is_that_of_the_command(unpad, tmp_path):
    recipe = write_toy(tmp_path / "toy")
    (tmp_path / "toy" / "texts.jsonl").write_text("no JSON\n" * 5)
    (tmp_path / "toy" / "chats.jsonl").write_text("no JSON\n" * 5)
    done = unpad("prove", str(recipe), "--processes", "2", code=SourceError.exit_code)
    assert done.err.startswith("SourceError: ")
    assert "Traceback" not in done.err


def test_unequal_bits_fail(unpad, tmp_path, monkeypatch):
    one = torch.tensor([1.0, 2.0, float("nan")])
    assert processes._num_unlike(one, one.clone()) == 0
    assert processes._num_unlike(one, torch.tensor([1.0, 2.5, 3.0])) == 2
    line = Line("an update by 2 processes = by one", "", 2.0, 0.0, False, "")
    monkeypatch.setattr(processes, "_run", lambda job: [line])
    done = unpad("prove", str(write_toy(tmp_path / "toy")), "--processes", "2", code=12)
    assert "2, not exact" in done.out
