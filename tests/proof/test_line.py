"""A certificate says all of every line, and passes unless one fails."""

from collections.abc import Sequence

import pytest

from unpad.proof.line import MOST_NOTE, Certificate, Line, Lines, ids_line, not_applicable

HOLDS = Line("labels stay", "", 0.0, 0.0, True)
NEAR = Line("packed = alone", "group sdpa, padded sdpa", 1.234e-14, 1e-10, True)
FAR = Line("padded left = alone", "padded sdpa", 0.123, 1e-10, False)
INEXACT = Line("isolated", "", 3.0, 0.0, False)
OPEN = Line("attention of others", "varlen flash", None, None, None)
ELSEWHERE = not_applicable("an earlier output", "it reads both ways")
BROKEN = Line("further claims", "", None, None, False, "ValueError: no rows (plan.py:3)")


def test_the_text_of_a_certificate_has_every_line_and_a_verdict():
    assert Certificate((HOLDS, NEAR, FAR, INEXACT, OPEN, BROKEN, ELSEWHERE)).text() == [
        "PASS  labels stay               exact",
        "PASS  packed = alone            1.2e-14 <= 1e-10  group sdpa, padded sdpa",
        "FAIL  padded left = alone       0.12 > 1e-10      padded sdpa",
        "FAIL  isolated                  3, not exact",
        "NOT PROVEN attention of others                    varlen flash",
        "FAIL  further claims",
        "        ValueError: no rows (plan.py:3)",
        "N/A   an earlier output",
        "        it reads both ways",
        "3 of 6 lines FAILED; 1 NOT PROVEN; 1 N/A",
    ]
    assert Certificate((HOLDS, NEAR)).text()[-1] == "all 2 lines hold"
    assert Certificate((HOLDS, NEAR, OPEN)).text()[-1] == "2 of 3 lines hold; 1 NOT PROVEN"
    assert Certificate((FAR,)).text()[-1] == "1 of 1 line FAILED"


@pytest.mark.promise("certificate.not-proven")
def test_a_certificate_passes_if_every_line_was_shown_and_is_json():
    assert Certificate((HOLDS, NEAR, ELSEWHERE)).passed is True
    assert Certificate((HOLDS, OPEN)).passed is None
    assert Certificate((HOLDS, INEXACT, OPEN)).passed is False
    assert Certificate(()).passed is None
    assert Certificate((NEAR, BROKEN)).to_json() == {
        "passed": False,
        "lines": [
            {"name": "packed = alone", "kernel": "group sdpa, padded sdpa", "measured": 1.234e-14, "bound": 1e-10,
             "passed": True, "note": "", "applies": True},
            {"name": "further claims", "kernel": "", "measured": None, "bound": None, "passed": False,
             "note": "ValueError: no rows (plan.py:3)", "applies": True},
        ],
    }  # fmt: skip


def test_a_check_adds_its_lines_or_one_that_fails_with_the_exception_and_its_place():
    def broken() -> Line:
        raise ValueError("two\n  lines " + "x" * MOST_NOTE)

    lines = Lines([HOLDS])
    assert lines.add("one", lambda: NEAR) == [NEAR]
    assert lines.add("two", lambda: [FAR, OPEN]) == [FAR, OPEN]
    assert lines.add("none", list) == []
    assert lines.value("number", lambda: 5) == 5
    assert lines.add("broken", broken) == []
    *before, last = lines.certificate().lines
    assert before == [HOLDS, NEAR, FAR, OPEN]
    message, _, place = last.note.rpartition(" (")
    assert message == "ValueError: " + ("two lines " + "x" * MOST_NOTE)[:MOST_NOTE]
    assert place.startswith("test_line.py:")
    assert (last.name, last.kernel, last.measured, last.bound, last.passed) == ("broken", "", None, None, False)


def test_a_tokenizer_that_draws_fails_its_line():
    class Drawing:
        calls = 0

        def decode(self, ids: Sequence[int]) -> str:
            return "".join(map(chr, ids))

        def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
            self.calls += 1
            return [[self.calls * (text == "b")] for text in texts]

    assert ids_line(Drawing(), [[97], [99]]).passed
    line = ids_line(Drawing(), [[97], [98], []])
    assert (line.passed, line.note) == (False, "1 of 2 texts have other ids")
    assert ids_line(Drawing(), [[]]).passed is None
