"""`unpad data check` of several files: none ends it, and many faults of a kind are counted rather than listed."""

import json
from pathlib import Path

import pytest
from PIL import Image

from tests.helpers.pictures import write_scenes
from tests.helpers.shell import Shell
from unpad.data.check import check


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


# --------------------------------------------------------------------------- several files


def test_a_file_of_unknown_kind_is_a_fault_among_several_and_the_others_are_read(unpad: Shell, tmp_path: Path) -> None:
    good, odd = write(tmp_path / "a.jsonl", {"text": "一"}), write(tmp_path / "b.jsonl", {"when": 1}, {"when": 2})
    last = write(tmp_path / "c.jsonl", {"text": "二"}, {"text": 3})
    outcome = unpad("data", "check", good, odd, last)
    assert (outcome.code, outcome.err) == (3, "")
    assert f'{odd}: E_KIND the rows or columns match no kind of data; there is "when"' in outcome.out
    assert "  do: write rows with prompt and completion" in outcome.out
    assert f"{last}:2: E_TYPE" in outcome.out
    shown = " ".join(outcome.out.split())
    for told in (f"{good}: text, 1 of 1 row usable", f"{odd}: not read", f"{last}: text, 1 of 2 rows"):
        assert told in shown
    assert "rows read 4 = rows used 2 + bad rows 2" in shown
    assert "an unknown number of rows beyond 1 of the faults" in shown
    found = json.loads(unpad("data", "check", good, odd, last, "--json").out)
    assert [file["kind"] for file in found["files"]] == ["text", None, "text"]
    assert [(fault["where"], fault["code"], fault["rows"]) for fault in found["faults"]] == [
        (str(odd), "E_KIND", None), (f"{last}:2", "E_TYPE", 1),
    ]  # fmt: skip


# --------------------------------------------------------------------------- JSON


def test_json_holds_the_whole_report(unpad: Shell, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "一二"}\n\n{"text": "一二"}\n \n{"text": 3}\n{"text": "三"}\n', encoding="utf-8")
    picture = tmp_path / "picture.png"
    picture.write_bytes(b"no image")
    report = check([path, picture])
    found = json.loads(unpad("data", "check", path, picture, "--json", code=3).out)
    assert [row.what for row in report.bad] == [fault.pop("what") for fault in found["faults"]]
    assert [row.fix for row in report.bad] == [fault.pop("fix") for fault in found["faults"]]
    lengths = found["files"][0].pop("characters")
    assert (lengths["min"], lengths["max"]) == (1, 2)
    assert found == {
        "passed": False,
        "rows": 5,
        "used": 3,
        "bad": 2,
        "files": [
            {
                "path": str(path), "kind": "text", "rows": 4, "used": 3, "repeated": 1, "note": None,
                "pictures": None, "not_read": {},
            },
            {
                "path": str(picture), "kind": "images", "rows": 1, "used": 0, "repeated": None,
                "characters": None, "note": None, "pictures": None, "not_read": {},
            },
        ],
        "notes": [],
        "skipped": [],
        "contradictions": {"questions": 0, "rows": 0, "places": []},
        "faults": [
            {"where": f"{path}:5", "code": "E_TYPE", "rows": 1},
            {"where": str(picture), "code": "E_FORMAT", "rows": 1},
        ],
    }  # fmt: skip
    assert "no file or recipe is named" in unpad("data", "check", "data.chat=a.jsonl", code=2).err


# --------------------------------------------------------------------------- near-duplicates of a recipe


LONG = "一段很长的话，说的是河水怎样从山上流到海里，再变成云。"


def recipe_with(path: Path, **data: object) -> Path:
    path.write_text(json.dumps({"data": data}), encoding="utf-8")
    return path


def test_near_duplicates_in_the_parts_of_a_recipe_are_told_and_refused_on_request(unpad: Shell, tmp_path: Path) -> None:
    rows = [{"text": LONG}, {"text": LONG + "完", "split": "valid"}, {"text": LONG, "split": "test"}]
    texts = write(tmp_path / "t.jsonl", {**rows[0], "split": "train"}, *rows[1:])
    told = unpad("data", "check", recipe_with(tmp_path / "r.yaml", text=str(texts), holdout=0), code=0)
    assert "held out 1 document: 0 equal to a trained one, 1 near-duplicate" in told.out
    assert "test part, 1 document: 1 equal to a trained one" in told.out
    assert f"{texts}:3: equal to {texts}:1\n  do: set data.near_duplicates=together" in told.out
    refusing = recipe_with(tmp_path / "refuse.yaml", text=str(texts), holdout=0, near_duplicates="refuse")
    told = unpad("data", "check", refusing, code=3)
    assert "E_LEAK 1 held-out documents" in told.out + told.err


@pytest.mark.parametrize("kind", ["images", "vqa"])
def test_near_duplicate_pictures_of_a_recipe_are_told(unpad: Shell, tmp_path: Path, kind: str) -> None:
    write_scenes(tmp_path / "set")
    name = {"images": "images.jsonl", "vqa": "questions.jsonl"}[kind]
    told = unpad("data", "check", recipe_with(tmp_path / "r.yaml", **{kind: str(tmp_path / "set" / name)}), code=0)
    assert "held out 6 pictures: 4 near-duplicates of training ones" in told.out


# --------------------------------------------------------------------------- what a folder or a file has


@pytest.mark.promise("data.check")
def test_files_of_a_folder_that_are_not_read_are_named(unpad: Shell, tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", {"text": "一"})
    for name in ("b.docx", "sub/c.html", ".hidden", "d.log", "e.log", "f.log", "g.log"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    told = unpad("data", "check", tmp_path, code=0)
    assert "note: 6 files are not read, by an ending that is not one of data: b.docx, d.log" in told.out
    found = json.loads(unpad("data", "check", tmp_path, "--json").out)["skipped"]
    assert {Path(one["path"]).name for one in found} == {"b.docx", "c.html", "d.log", "e.log", "f.log", "g.log"}
    assert check(recipe_with(tmp_path / "r.yaml", text=str(tmp_path), holdout=0)).skipped[0][0].name == "b.docx"
    assert "is read as plain text" in unpad("data", "check", tmp_path / "d.log").out
    assert "tags would be learnt" in check(tmp_path / "sub/c.html").files[0].note


@pytest.mark.promise("data.check")
def test_classes_sizes_and_modes_of_pictures_are_counted(unpad: Shell, tmp_path: Path) -> None:
    folder = tmp_path / "set"
    for name, mode, size in (("cat/1", "RGB", (9, 7)), ("cat/2", "RGB", (9, 7)), ("dog/1", "L", (5, 8))):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new(mode, size, len(name) if mode == "L" else (9, 9, int(name[-1]))).save(folder / f"{name}.png")
    told = unpad("data", "check", folder).out
    assert "2 classes: cat 2, dog 1" in told
    assert "5 to 9 wide, 7 to 8 high, most often 9 x 7 (2)" in told
    assert "modes: colour 2, grey 1" in told
    (file,) = json.loads(unpad("data", "check", folder, "--json").out)["files"]
    assert file["pictures"] == {
        "classes": {"cat": 2, "dog": 1},
        "sizes": {"least": [5, 7], "most": [9, 8], "common": [9, 7]},
        "modes": {"colour": 2, "grey": 1},
    }


@pytest.mark.promise("data.check")
def test_questions_with_different_answers_are_counted_with_their_places(unpad: Shell, tmp_path: Path) -> None:
    def turn(question: str, answer: str, **more: str) -> dict[str, str]:
        return {"prompt": question, "completion": answer, **more}

    same = [turn("q", "a"), turn("q", "a"), turn("other", "b"), turn("q", "c", system="be short")]
    first, second = write(tmp_path / "a.jsonl", *same), tmp_path / "b.json"
    assert check(first).asked.lines() == []
    second.write_text(json.dumps([turn("q", "c"), turn("q", "d"), turn("other", "x"), turn("q", "a"), turn("q", "e")]))
    told = unpad("data", "check", first, second, code=0)
    assert "note: 2 questions have different answers, in 4 rows beside the first of each; keep one, unless" in told.out
    assert f"  {first}:1, {second}[0], {second}[1]" in told.out
    found = json.loads(unpad("data", "check", first, second, "--json").out)["contradictions"]
    assert (found["questions"], found["rows"]) == (2, 4)
    assert found["places"][1] == [f"{first}:3", f"{second}[2]"]


@pytest.mark.promise("data.check")
@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("-", "standard input is not read"), ("/", "folder of the system"), ("/proc", "folder of the system"),
        ("odd://b/a.csv", "Protocol not known: odd"),
    ],
)  # fmt: skip
def test_what_is_no_file_of_data_is_said(unpad: Shell, given: str, told: str) -> None:
    assert told in unpad("data", "check", given, code=3).err
