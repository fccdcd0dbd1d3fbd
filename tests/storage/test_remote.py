"""Data by address, against a server on this machine and a store in memory."""

import gzip
import json
from concurrent.futures import ThreadPoolExecutor

import fsspec
import pytest

from tests.helpers.hub_server import hub_server
from tests.helpers.toy import write_toy
from unpad.storage import remote
from unpad.terminal.printing import masked

pytestmark = pytest.mark.promise("data.address")
ROWS = b"".join(json.dumps({"text": f"row {n}"}).encode() + b"\n" for n in range(99)) + b'{"text": 3}\n'


@pytest.fixture
def hub(unpad, monkeypatch):
    """A server of two files, and the address of its folder; pauses take no time."""
    monkeypatch.setattr(remote, "PAUSES_S", (0, 0, 0))
    with hub_server() as served:
        served.repositories["o/d"] = {"a.jsonl": ROWS, "b.jsonl.gz": gzip.compress(ROWS)}
        yield served, f"{served.address}/o/d/resolve/main/"


@pytest.mark.parametrize(("file", "pack"), [("a.jsonl", bytes), ("b.jsonl.gz", gzip.compress)])
def test_a_file_is_fetched_once_and_faults_name_its_address(hub, unpad, file, pack):
    for _ in range(2):
        assert f"{hub[1]}{file}:100: E_TYPE" in unpad("data", "check", hub[1] + file, code=3).out
    assert hub[0].got() == [file]
    hub[0].repositories["o/d"][file] = pack(b'{"text": "new"}\n')
    assert "1 of 1 row usable" in unpad("data", "check", hub[1] + file, code=0).out


def test_a_broken_connection_is_retried_and_nothing_partial_is_read(hub, unpad):
    hub[0].breaks["a.jsonl"] = 50
    assert remote.data_path(hub[1] + "a.jsonl").read_bytes() == ROWS
    hub[0].breaks = type("Always", (dict,), {"pop": dict.get})({"b.jsonl.gz": 50})
    refused = unpad("data", "check", hub[1] + "b.jsonl.gz", code=3).err
    assert hub[0].got() == ["a.jsonl"] * 2 + ["b.jsonl.gz"] * 4
    assert "do: check network" in refused.partition(f"at: {hub[1]}b.jsonl.gz\n")[2]


@pytest.mark.parametrize(("name", "told"), [("none", "404, message="), ("gated", "403, message=")])
def test_what_a_server_refuses_is_asked_for_once(hub, unpad, name, told):
    hub[0].gated.add("o/gated")
    assert told in unpad("data", "check", f"{hub[0].address}/o/{name}/resolve/main/a.jsonl", code=3).err
    assert [method for method, _, _ in hub[0].asked] == ["HEAD", "GET"]


@pytest.mark.slow
def test_a_run_keeps_no_password_of_an_address_and_reads_the_kept_file_without_its_server(hub, unpad, tmp_path):
    recipe = write_toy(tmp_path / "toy")
    hub[0].repositories["o/d"]["c.jsonl"] = (tmp_path / "toy/texts.jsonl").read_bytes()
    given = f"data.text={hub[1].replace('://', '://me:secret@')}c.jsonl"
    told = unpad("train", recipe, given, "train.max_steps=1", "--out", tmp_path / "run", code=0)
    texts = [file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file()]
    assert not any(b"secret" in text for text in [told.out.encode(), told.err.encode(), *texts])
    hub[0].gated.add("o/d")
    again = unpad("eval", tmp_path / "run", code=0)
    assert f"warning: {hub[1].replace('://', '://***@')}c.jsonl is read as it was fetched before: " in again.err


def test_of_processes_at_once_one_fetches(hub, tmp_path):
    with ThreadPoolExecutor(4) as pool:
        places = list(pool.map(lambda _: remote._fetch(hub[1] + "a.jsonl", tmp_path / "c"), range(4)))
    assert (places, hub[0].got()) == (places[:1] * 4, ["a.jsonl"])


def test_a_pattern_matches_files_of_any_store_in_natural_order(hub, unpad):
    fsspec.filesystem("memory").pipe({f"/d/{name}.jsonl": ROWS[:200] for name in ("p10", "p2")})
    told = unpad("data", "check", "memory://d/p*.jsonl").out
    assert told.index("memory://d/p2.jsonl") < told.index("memory://d/p10.jsonl")
    assert masked("'s3://b/x?X-Amz-Signature=abc&part=5'") == "'s3://b/x?X-Amz-Signature=***&part=5'"
