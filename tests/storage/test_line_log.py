"""A log of JSON lines survives a kill and a full disk."""

import resource
import signal

import pytest

from tests.helpers.faults import at_operation, kill, names_in, operations
from tests.helpers.processes import in_child
from unpad.errors import CheckpointError, DiskError
from unpad.storage import LineLog, disk


def test_a_record_is_one_line_of_strict_json_written_at_once(tmp_path, monkeypatch):
    log = LineLog(tmp_path / "metrics.jsonl")
    record = {"step": 1, "loss": 0.1 + 0.2, "word": "你好\u2028", "bad": [float("nan"), float("-inf")], "a": None}
    assert operations(lambda: log.append(record), monkeypatch) == ["write"]
    log.sync()
    text = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8")
    assert text == (
        '{"step": 1, "loss": 0.30000000000000004, "word": "你好\u2028", "bad": ["nan", "-inf"], "a": null}\n'
    )
    log.close()


def test_truncating_keeps_chosen_records_to_the_byte_and_goes_on(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = LineLog(path)
    for step in range(10):
        log.append({"step": step, "loss": 1 / (step + 1)})
    before = path.read_bytes()
    log.truncate(lambda record: record["step"] < 5)
    assert path.read_bytes() == b"".join(before.splitlines(keepends=True)[:5])
    for step in range(5, 10):
        log.append({"step": step, "loss": 1 / (step + 1)})
    log.close()
    assert path.read_bytes() == before
    assert names_in(tmp_path) == ["metrics.jsonl"]


def test_a_log_of_which_all_is_kept_is_not_written_again(tmp_path, monkeypatch):
    log = LineLog(tmp_path / "metrics.jsonl")
    log.append({"step": 0})
    assert operations(lambda: log.truncate(lambda record: True), monkeypatch) == []
    assert operations(lambda: log.truncate(lambda record: False), monkeypatch) != []
    log.append({"step": 1})
    log.close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == b'{"step": 1}\n'


@pytest.mark.parametrize(
    "tail",
    [
        *(b'{"step": 2, "lo', b"\0" * 100, b'{"step": 2, "\0\0\0": 1}\n', b"\0\0\n\0\0\n"),
        *(b'{"step": 2}', b'{"st\n', b"\0\0\n\xff\xfe\n[1]\n3"),
    ],
)
def test_a_torn_tail_is_dropped(tmp_path, tail):
    path = tmp_path / "metrics.jsonl"
    good = b'{"step": 0}\n{"step": 1}\n'
    path.write_bytes(good + tail)
    log = LineLog(path)
    log.truncate(lambda record: True)
    assert path.read_bytes() == good
    log.append({"step": 2})
    log.close()
    assert path.read_bytes() == good + b'{"step": 2}\n'


def test_a_damaged_line_before_a_kept_record_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    data = b'{"step": 0}\n{"st\n{"step": 2}\n'
    path.write_bytes(data)
    log = LineLog(path)
    with pytest.raises(CheckpointError) as caught:
        log.truncate(lambda record: True)
    assert caught.value.where == f"{path}:2"
    assert path.read_bytes() == data
    log.truncate(lambda record: record["step"] < 1)
    assert path.read_bytes() == b'{"step": 0}\n'
    log.close()


def test_a_killed_truncation_leaves_the_old_log_or_the_new_one(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    old = b"".join(b'{"step": %d}\n' % step for step in range(4))
    new = old[: len(old) // 2]
    path.write_bytes(old)

    def truncate() -> None:
        log = LineLog(path)
        log.truncate(lambda record: record["step"] < 2)
        log.close()

    for number in range(len(operations(truncate, monkeypatch))):
        path.write_bytes(old)

        def killed(number: int = number) -> None:
            disk.operation = at_operation(number, kill)
            truncate()

        assert in_child(killed) == -signal.SIGKILL
        assert path.read_bytes() in (old, new)


def test_a_record_that_does_not_fit_leaves_no_part(tmp_path):
    path = tmp_path / "metrics.jsonl"

    def limited() -> None:
        log = LineLog(path)
        log.append({"step": 0})
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50, resource.RLIM_INFINITY))
        with pytest.raises(DiskError, match="File too large"):
            log.append({"step": 1, "text": "x" * 100})
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        log.append({"step": 2})

    assert in_child(limited) == 0
    assert path.read_bytes() == b'{"step": 0}\n{"step": 2}\n'


@pytest.mark.parametrize("torn", [b'{"step": 2', b"\0\0\0\0\n", b"\0\n\0\0\n", b'\0\0"step": 2}\n', b"\0\0\n\0\0"])
def test_a_record_never_joins_a_torn_line_or_the_zeros_that_a_power_cut_left_at_the_end(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + torn)
    log = LineLog(path)
    log.append({"step": 2})
    log.close()
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'


def test_a_log_that_was_deleted_takes_no_more_records(tmp_path):
    log = LineLog(tmp_path / "log.jsonl")
    log.append({"step": 1})
    log.path.unlink()
    with pytest.raises(DiskError, match="was deleted while it was being written"):
        log.append({"step": 2})
