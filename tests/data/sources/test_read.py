import json
from pathlib import Path

import pytest

from tests.helpers.shell import Shell
from unpad.data.check import check
from unpad.data.sources.bad_rows import apply_policy, refuse_empty
from unpad.data.sources.example import BadRow
from unpad.data.sources.files import SourceFile, expand, unreadable
from unpad.data.sources.reader import read_file
from unpad.errors import SourceError
from unpad.recipes.data import DataSettings, Source

SHARED = Path(__file__).parents[4] / "shared" / "data" / "zh"


def bad_rows(count: int) -> list[BadRow]:
    return [BadRow(f"a.jsonl:{n}", "E_JSON", f"fault {n}", "mend it") for n in range(1, count + 1)]


def test_rows_read_are_rows_used_and_bad_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\nnull\n\n{"text": 3}\n{"text": "b"}\n\xff\n')
    (file,) = expand([Source(path=str(path))], Path)
    used, bad = read_file("text", file, DataSettings())
    assert [example.where for example in used] == [f"{path}:1", f"{path}:5"]
    assert [row.where for row in bad] == [f"{path}:2", f"{path}:4", f"{path}:6"]


def test_stop_lists_the_bad_rows_before_it_refuses() -> None:
    with pytest.raises(SourceError) as caught:
        apply_policy(bad_rows(25), 1000, DataSettings())
    text = str(caught.value)
    assert "25 of 1,000" in text
    assert "a.jsonl:1: E_JSON fault 1\n" in text
    assert "a.jsonl:3: E_JSON fault 3\n" in text
    assert "fault 4" not in text
    assert "  ... and 22 more E_JSON\n" in text
    assert "unpad data check a.jsonl" in text
    assert "data.on_bad_row=quarantine" in text
    assert caught.value.exit_code == 3
    apply_policy([], 1000, DataSettings())


def test_quarantine_goes_on_up_to_its_limit() -> None:
    data = DataSettings(on_bad_row="quarantine", max_bad=0.02)
    apply_policy(bad_rows(20), 1000, data)
    with pytest.raises(SourceError, match="max_bad"):
        apply_policy(bad_rows(21), 1000, data)


def test_an_empty_corpus_is_refused(tmp_path: Path) -> None:
    files = [SourceFile(tmp_path / "a.txt", "text", None, 1.0, 0)]
    with pytest.raises(SourceError, match="no usable text"):
        refuse_empty(0, "text", files)
    refuse_empty(1, "text", files)


@pytest.mark.parametrize(
    ("error", "what", "fix"),
    [
        (FileNotFoundError(2, "No such file or directory"), "there is no such file", "check the path"),
        (NotADirectoryError(20, "Not a directory"), "there is no such file", "check the path"),
        (IsADirectoryError(21, "Is a directory"), "it is a folder", "name a file"),
        (PermissionError(13, "Permission denied"), "cannot be read: Permission denied", "permissions"),
        (OSError(5, "Input/output error"), "cannot be read: Input/output error", "check the disk"),
    ],
)
def test_what_the_system_refuses_gets_the_advice_for_it(error: OSError, what: str, fix: str) -> None:
    found = unreadable(error, "a.txt")
    assert (found.what.startswith(what), found.where) == (True, "a.txt")
    assert fix in found.fix


def test_check_reports_every_file_by_its_kind(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "问"}, {"role": "assistant", "content": "答"}]
    (tmp_path / "b2.jsonl").write_text(json.dumps({"messages": turns}) + "\n\n" + json.dumps({"messages": turns[:1]}))
    (tmp_path / "b10.json").write_text('["用户：问助手：答", "用户：问"]', encoding="utf-8")
    (tmp_path / "a.txt").write_text("一\n\n二", encoding="utf-8")
    report = check(tmp_path)
    assert [(f.path.name, f.kind, f.num_rows, f.num_used) for f in report.files] == [
        ("a.txt", "text", 2, 2),
        ("b2.jsonl", "chat", 2, 1),
        ("b10.json", "chat", 2, 1),
    ]
    assert [row.code for row in report.bad] == ["E_NO_TARGET", "E_NO_TARGET"]
    assert not report.passed
    lines = report.lines()
    assert any(line.startswith(f"{tmp_path}/b2.jsonl:3: E_NO_TARGET") for line in lines)
    assert "rows read 6 = rows used 4 + bad rows 2" in lines


def test_check_does_not_pass_a_file_without_rows(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n\n")
    report = check(tmp_path / "a.jsonl")
    assert not report.passed
    assert "E_EMPTY" in report.lines()[-1]


@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared Chinese data is absent")
@pytest.mark.parametrize(
    ("name", "kind", "rows"), [("pretraining", "text", 1426), ("chat", "chat", 1051), ("sayings.jsonl", "text", 5265)]
)
def test_real_corpora_are_read_whole(name: str, kind: str, rows: int) -> None:
    report = check(SHARED / name)
    assert report.passed
    assert report.num_used == rows
    assert {file.kind for file in report.files} == {kind}


def test_check_reads_all_sources_of_a_recipe_with_its_settings(unpad: Shell, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a\nb\nc\n")
    (tmp_path / "b.jsonl").write_text('{"body": "用户：问助手：答"}\n', encoding="utf-8")
    recipe = tmp_path / "mine.yaml"
    recipe.write_text('data: {text: a.txt, chat: {path: b.jsonl, field: body}, root: ROOT, separator: "\\n"}\n'
                      .replace("ROOT", str(tmp_path)))  # fmt: skip
    outcome = unpad("data", "check", recipe, code=0)
    told = " ".join(outcome.out.split())  # counts stand below a long path
    assert "a.txt: text, 3 of 3 rows usable" in told
    assert "b.jsonl: chat, 1 of 1 row usable" in told
