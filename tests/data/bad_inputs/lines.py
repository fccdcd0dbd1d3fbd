"""J: rows of JSON, and files that hold no rows."""

import gzip

from tests.data.bad_inputs.case import UNKNOWN, Bad, row

GOOD = row(text="a good row of text")


def between(kind: str, middle: bytes, code: str = "", *, used: int = 2, bad: int = 1) -> Bad:
    """A line between two good rows; without a code it is a third row, or no row where `used` is 2."""
    content = GOOD + middle + b"\n" + GOOD
    return Bad(
        kind, {"a.jsonl": content}, "text", code, "a.jsonl:2" if code else "", used, bad if code else 0,
        3 if code else 0,
    )  # fmt: skip


def whole(
    kind: str, content: bytes, code: str = "", *, name: str = "a.jsonl", used: int = 0, bad: int = 0, line: int = 1
) -> Bad:
    """A file on its own, with the line of its first fault."""
    place = f"{name}:{line}" if bad else ""
    return Bad(kind, {name: content}, "text", code, place, used, bad, 3 if code else 0)


LINES = [
    between("J-01", b'{"text": "a\xff b"}', "E_UTF8"),
    between("J-02", b'{"text": "a\\ud800 b"}', "E_SURROGATE"),
    between("J-03", b'{"text": "a\x00 b"}', "E_CTRL"),
    between("J-04", b'{"text": "a\\u0000 b"}', "E_NUL"),
    between("J-05", b'{"text": "a b', "E_JSON"),
    Bad("J-05 at the end", {"a.jsonl": GOOD + b'{"text": "a b'}, "text", "E_JSON", "a.jsonl:2", 1, 1),
    whole("J-05 of an array", b'["a b",\n"c d",\n"e', "E_JSON", name="a.json", used=2, bad=UNKNOWN, line=3),
    whole("J-05 inside an array", b'["a b", x"c d", "e f"]', "E_JSON", name="a.json", used=1, bad=UNKNOWN),
    between("J-06", b'{"text": "a"}{"text": "b"}', "E_EXTRA"),
    between("J-07", b""),
    between("J-08", "  \t \u3000".encode()),
    between("J-09", b'["a"]', "E_NOT_OBJECT"),
    between("J-10", b"5", "E_NOT_OBJECT"),
    between("J-11", b"null", "E_NOT_OBJECT"),
    between("J-12", b'{"txt": "a"}', "E_MISSING"),
    between("J-13", b'{"text": "abc", "other": 1}', used=3),
    between("J-14", b'{"text": "a", "text": "b"}', "E_DUPKEY"),
    between("J-15", b'{"text": "abc", "group": "seven", "keywords": "word"}', "E_TYPE"),
    between("J-16", b'{"text": {"a": 1}}', "E_TYPE"),
    between("J-17", b'{"text": "abc", "x": NaN}', "E_NONFINITE"),
    between("J-18", b'{"text": "abc", "x": -Infinity}', "E_NONFINITE"),
    between("J-19", b'{"text": "abc", "x": 1e999}', "E_RANGE"),
    between("J-20", b'{"text": "abc", "x": 12345678901234567890123}', "E_RANGE"),
    between("J-22", b'{"text": null}', "E_NULL"),
    between("J-23", b"{'text': 'a'}", "E_JSON"),
    between("J-24", b'{"text": "a",}', "E_JSON"),
    between("J-25", b"// a remark", "E_JSON"),
    between("J-26", b'{"text": "a\nb"}', "E_JSON", bad=2),
    whole("J-27", (GOOD * 3).replace(b"\n", b"\r"), used=3),
    between("J-28", '{"text": "a\u2028b\u0085c"}'.encode(), used=3),
    between("J-28 after the row", '{"text": "a"}\u00a0\u3000\u2028'.encode(), used=3),
    whole("J-28 after an array", '["a b c"]\u3000'.encode(), name="a.json", used=1),
    between("J-29", b'{"text": ' + b"[" * 5000 + b"]" * 5000 + b"}", "E_DEPTH"),
    between("J-30", b'{"text": "' + b"ab " * (4 << 20) + b'"}', used=3),
    whole("J-31", b"\xef\xbb\xbf" + GOOD * 3, used=3),
    between("J-31 in the middle", b"\xef\xbb\xbf" + GOOD.strip(), "E_JSON"),
    whole("J-32", (GOOD * 3).replace(b"\n", b"\r\n"), used=3),
    whole("J-33", b"", "E_EMPTY"),
    whole("J-33 blank", b"\n\n \n", "E_EMPTY"),
    whole("J-33 bad", b"{\n{\n", "E_JSON", bad=2),
    whole("J-34 UTF-16", (GOOD * 3).decode().encode("utf-16"), "E_ENCODING", bad=UNKNOWN),
    whole(
        "J-34 GB18030",
        row(text="中文的内容在这里，很多的汉字").decode().encode("gb18030") * 5,
        "E_ENCODING",
        bad=UNKNOWN,
    ),
    whole("J-34 gzip", gzip.compress(GOOD * 3), "E_ENCODING", bad=UNKNOWN),
    whole("J-34 array", b'[{"text": "abc"},\n{"text": "def"}]', "E_ENCODING", bad=UNKNOWN),
    whole("J-36", GOOD * 3, used=3),
    whole("J-37 Text", row(Text="a good row") * 3, used=3),
    whole("J-37 blanks", row(**{" te_xt ": "a good row"}) * 3, used=3),
    whole("J-37 two", GOOD + row(Text="a b", TEXT="c d"), "E_DUPKEY", used=1, bad=1, line=2),
    whole("J-38", b"Text,TEXT\na b,c d\n", "E_DUPKEY", name="a.csv", bad=1),
    whole("J-38 other names", b"id,comment\n1,a b c\n2,d e f\n", "E_MISSING", name="a.csv", bad=2),
    whole("J-38 no header", b"1,a b c\n2,d e f\n", "E_MISSING", name="a.csv", bad=1),
    whole("J-38 blanks", b"\xef\xbb\xbf Text ,stars\na b c,3\n", name="a.csv", used=1),
    whole("J-39", GOOD * 3, "E_ENCODING", name="a.txt", bad=UNKNOWN),
    whole("J-39 array", b'[{"text": "a b c"}]', "E_ENCODING", name="a.md", bad=UNKNOWN),
    whole("J-39 CSV", b"id,text\n1,a b c\n2,d e f\n", "E_ENCODING", name="a.txt", bad=UNKNOWN),
    whole("J-39 JSON lines as CSV", row(text="a, b") * 2, "E_ENCODING", name="a.csv", bad=UNKNOWN),
    whole("J-40", b"A sentence.\nAnother, and a third.\n", "E_ENCODING", bad=UNKNOWN),
    whole("J-40 CSV", b"id,text\n1,a b c\n2,d e f\n", "E_ENCODING", bad=UNKNOWN),
    whole("J-41 PDF", b"%PDF-1.4\nsome text\n", "E_ENCODING", name="a.txt", bad=UNKNOWN),
    whole("J-41 Word", b"PK\x03\x04" + b"\0" * 26 + b"word/document.xml", "E_ENCODING", name="a.docx", bad=UNKNOWN),
    whole("J-42", "le café\n\nla clé\n".encode("latin-1"), "E_UTF8", name="a.txt", bad=2),
    Bad("J-21", {"a.jsonl": row(image="a.png", label=1.5)}, "images", "E_LABEL", "a.jsonl:1", 0, 1),
]
