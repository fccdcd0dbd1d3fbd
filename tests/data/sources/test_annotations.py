"""Questions and annotations in two files, as VQAv2 has them: what belongs together, and everything that does not."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from unpad.data.sources.files import SourceFile, expand
from unpad.data.sources.vqa import VqaExample, read_all
from unpad.evaluation.vqa import vqa_accuracy
from unpad.recipes.data import DataSettings, QuestionSource

TEN = ["net"] * 3 + ["nets"] * 7
INFO = {"info": {"version": "2.0", "year": 2017}, "data_subtype": "train2014", "license": {"url": "x"}}


def question(number: Any, image: int, **other: Any) -> dict[str, Any]:
    return {"image_id": image, "question": f"what is {number}?", "question_id": number} | other


def annotation(number: int, image: int, answers: Any = TEN, **other: Any) -> dict[str, Any]:
    said = [{"answer": one, "answer_confidence": "yes", "answer_id": n + 1} for n, one in enumerate(answers)]
    common = {"question_type": "what is", "multiple_choice_answer": "nets", "answer_type": "other"}
    return {"question_id": number, "image_id": image, "answers": said} | common | other


def write(folder: Path, questions: Any, annotations: Any, part: Any = None) -> SourceFile:
    """Both files, each a list or the text of the whole file, and images 9, 7 and 3 in the three ways of naming."""
    (folder / "train2014").mkdir(exist_ok=True)
    for width, name in enumerate(("COCO_train2014_000000000009.jpg", "7.png", "000000000003.JPG", "notes.txt"), 3):
        Image.new("RGB", (width, 2)).save(folder / "train2014" / name, "PNG")
    for name, content in (("questions", questions), ("annotations", annotations)):
        text = content if isinstance(content, str) else json.dumps(INFO | {name: content} | {"task_type": "Open-Ended"})
        (folder / f"{name}.json").write_text(text, encoding="utf-8")
    source = {"path": "questions.json", "annotations": "annotations.json", "images": "train2014"}
    (file,) = expand([QuestionSource(**source, part=part)], lambda path: folder / path)
    return file


@pytest.mark.promise("vqa.two-files")
def test_questions_have_their_ten_answers_and_their_image(tmp_path: Path) -> None:
    questions = [question(90, 9), question(70, 7), question(30, 3), question(91, 9)]
    file = write(tmp_path, questions, [annotation(n, n // 10) for n in (30, 91, 90, 70)], "valid")
    used, images, bad = read_all(file, DataSettings())
    assert (bad, file.unread.shares) == ([], {"answers[].answer_confidence": 1.0})
    assert used == [
        VqaExample(f"{tmp_path}/questions.json[{n}]", (image,), f"what is {number}?", tuple(TEN), "holdout", False)
        for n, (number, image) in enumerate([(90, 0), (70, 1), (30, 2), (91, 0)])
    ]
    assert [image.width for image in images] == [3, 4, 5]
    assert used[0].answer == "nets"
    assert vqa_accuracy("net", used[0].answers) == pytest.approx(0.9)  # 7 x 3/3 and 3 x 2/3, over ten


def test_what_does_not_belong_together_is_named_once(tmp_path: Path) -> None:
    questions = [
        question(1, 9), question(2, 9), question(1, 9), question(3, 7), question(4, 8), question(5, 9),
        question(6, 9, question=" "), question("7", 9), 5, question(9, -1),
    ]  # fmt: skip
    annotations = [
        annotation(1, 9), annotation(3, 9), annotation(4, 8), annotation(5, 9, []), annotation(6, 9),
        annotation(8, 9), annotation(1, 9), {"image_id": 9}, annotation(9, 9), annotation(10, 9, [None]),
    ]  # fmt: skip
    used, _, bad = read_all(write(tmp_path, questions, annotations), DataSettings())
    assert [(one.where[-3:], one.split) for one in used] == [("[0]", None)]
    asked, said = tmp_path / "questions.json", tmp_path / "annotations.json"
    assert [(row.where, row.code) for row in bad] == [
        (f"{said}[6]", "E_PAIR"),  # a second annotation
        (f"{said}[7]", "E_MISSING"),
        (f"{asked}[1]", "E_PAIR"),  # no annotation
        (f"{asked}[2]", "E_PAIR"),  # a second question
        (f"{asked}[3]", "E_PAIR"),  # another image
        (f"{asked}[4]", "E_MISSING"),  # no image
        (f"{said}[3]", "E_TYPE"),
        (f"{asked}[6]", "E_EMPTY"),
        (f"{asked}[7]", "E_TYPE"),
        (f"{asked}[8]", "E_NOT_OBJECT"),
        (f"{asked}[9]", "E_TYPE"),
        (f"{said}[5]", "E_PAIR"),  # no question
        (f"{said}[9]", "E_NULL"),
    ]
    assert all(row.what and row.fix and row.excerpt and row.num_rows == 1 for row in bad)
    assert "question_id 2" in bad[2].what
    assert "also that of question [0]" in bad[3].what
    assert str(tmp_path / "train2014") in bad[5].what


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ('[{"question_id": 1}]', "E_TYPE"),
        ("{}", "E_MISSING"),
        ('{"questions": {}}', "E_TYPE"),
        ('{"questions": [], "info": 1, "questions": []}', "E_DUPKEY"),
        ('{"info": NaN, "questions": []}', "E_NONFINITE"),
        ('{"info": ' + "[" * 100_000, "E_DEPTH"),
        ('{"questions": [] "info": 1}', "E_JSON"),
        ('{"questions": []} x', "E_JSON"),
    ],
)
def test_a_file_of_another_shape_is_one_fault_of_unknown_extent(tmp_path: Path, text: str, code: str) -> None:
    file = write(tmp_path, text, [annotation(1, 9)])
    used, _, bad = read_all(file, DataSettings())
    assert used == []
    assert [row.code for row in bad if row.num_rows is None] == [code]
    assert all(row.where.startswith(f"{tmp_path}/questions.json:") for row in bad)
    swapped = write(tmp_path, [question(1, 9)], text.replace("questions", "annotations"))
    assert [row.code for row in read_all(swapped, DataSettings())[2]] == [code]  # and no question lacks its own
