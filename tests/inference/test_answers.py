"""Answers about images as a line, as JSON and as rows of a table."""

from pathlib import Path

import pytest

from unpad.inference.images import Answer, to_csv

CLASSED = Answer(Path("a.png"), (("cat", 0.7512345), ("dog", 0.2487655)))
ANSWERED = Answer(Path("b.png"), text="two, or three", unknown_characters=1)
SILENT = Answer(Path("c.png"), text="", notes=("N_FRAMES",), unknown_characters=0, mark="another mode")
FAULTY = Answer(Path("d.png"), fault="E_EMPTY no bytes; write it again")


@pytest.mark.parametrize(
    ("answer", "line", "values"),
    [
        (
            CLASSED,
            "a.png: cat 75.1%, dog 24.9%",
            {"top": [{"class": "cat", "probability": 0.7512345}, {"class": "dog", "probability": 0.2487655}]},
        ),
        (ANSWERED, "b.png: two, or three", {"answer": "two, or three", "unknown_characters": 1}),
        (SILENT, "c.png: (no answer)  (first frame only; another mode)", {"answer": "", "unknown_characters": 0}),
        (FAULTY, "d.png: E_EMPTY no bytes; write it again", {"top": []}),
    ],
)
def test_an_answer_says_all_of_itself(monkeypatch, answer, line, values):
    monkeypatch.setattr("unpad.inference.images.NOTES", {"N_FRAMES": "first frame only"})
    assert answer.line() == line
    assert answer.to_json() == {
        "image": str(answer.path), **values, "fault": answer.fault, "notes": list(answer.notes), "mark": answer.mark,
    }  # fmt: skip


def test_a_table_has_a_row_per_file_and_names_what_was_asked() -> None:
    assert to_csv([CLASSED, FAULTY]).splitlines() == [
        "image,class,probability,fault,mark",
        "a.png,cat,0.751235,,",
        "d.png,,,E_EMPTY no bytes; write it again,",
    ]
    assert to_csv([ANSWERED, SILENT, FAULTY]).splitlines() == [
        "image,answer,probability,fault,mark",
        'b.png,"two, or three",,,',
        "c.png,,,,another mode",
        "d.png,,,E_EMPTY no bytes; write it again,",
    ]
