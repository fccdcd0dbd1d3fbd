"""V and EV: tables of patients' events in CSV, and what they mean; every case is a recipe with its tables."""

from collections.abc import Mapping

import yaml

from tests.data.bad_inputs.case import UNKNOWN, Bad

HEAD = "id,time,code,value"
ROWS = "".join(f"{patient},{time},{'ab'[time % 2]},{time}.5\n" for patient in range(1, 9) for time in range(4))
GERMAN = {"unit": "auto", "format": "%d.%m.%Y %H:%M"}
NUM, NEXT = 32, 34  # good rows, and the line after them


def table(
    kind: str,
    more: str | bytes = "",
    code: str = "",
    *,
    line: int | str = NEXT,
    used: int = NUM,
    bad: int = 1,
    rows: str = ROWS,
    head: str = HEAD,
    source: Mapping[str, object] | None = None,
    settings: Mapping[str, object] | None = None,
    tables: Mapping[str, str] | None = None,
    place: str | None = None,
) -> Bad:
    """A table whose last rows are `more`; bytes are the whole file."""
    events = {"path": "e.csv", "unit": "days", **(source or {})}
    recipe = {
        "data": {"events": [events], "holdout": 0.25},
        "events": dict(settings or {}),
        "model": {"kind": "set_sequence"},
    }
    files = {"r.yaml": yaml.safe_dump(recipe).encode()}
    files["e.csv"] = more if isinstance(more, bytes) else f"{head}\n{rows}{more}".encode("utf-8", "surrogateescape")
    files |= {name: content.encode() for name, content in (tables or {}).items()}
    where = (f"e.csv:{line}" if line else "e.csv") if place is None else place
    return Bad(kind, files, "recipe", code, where if code else "", used, bad if code else 0, 3 if code else 0)


def labels(
    kind: str, content: str, code: str, place: str, used: int = NUM + 3, bad: int = 1, **settings: object
) -> Bad:
    """The good table with a table of labels."""
    told = {"path": "l.csv", "label": "label", "missing": "keep"} | settings.pop("labels", {})
    return table(
        kind, code=code, place=place, used=used, bad=bad, settings={"labels": told, **settings},
        tables={"l.csv": content},
    )  # fmt: skip


def divided(kind: str, code: str, first: str, second: str) -> Bad:
    """Two files of one patient, in folders that are named after parts of the split."""
    recipe = yaml.safe_dump({"data": {"events": [{"path": "set", "unit": "days"}]}, "model": {"kind": "set_sequence"}})
    one = f"{HEAD}\n1,1,a,1\n1,2,b,2\n".encode()
    return Bad(kind, {"r.yaml": recipe.encode(), first: one, second: one}, "recipe", code, second, UNKNOWN, UNKNOWN)


refused = {"used": UNKNOWN, "bad": UNKNOWN}  # the whole data, before its rows are counted
HISTORIES = [
    table("V-01", '9,1,"a,1\n', "E_CSV", **refused),
    table("V-02", "9,1\n", "E_CSV"),
    table("V-02 many", "9,1,a,1,5\n", "E_CSV"),
    table("V-03", code="E_DUPKEY", head="id,time,code,code", place="e.csv", **refused),
    table("V-04", code="E_MISSING", head="7,8,9,10", place="e.csv", **refused),
    table("V-05", rows=ROWS.replace(",", ";"), head=HEAD.replace(",", ";")),
    table("V-05 tab", rows=ROWS.replace(",", "\t"), head=HEAD.replace(",", "\t")),
    table("V-06", '9,1,a,"1,5"\n', "E_TYPE"),
    table("V-07", "9,1,a,NA\n9,2,a,null\n9,4,a,None\n9,5,a,\n9,3,a,-\n", "E_TYPE", line=38, used=36),
    table("V-08", '9,1,"a\nb",1\n9,x,a,1\n', "E_TYPE", line=36, used=33),
    table("V-09", "9,1," + "a" * 200_000 + ",1\n", used=33),
    table("V-10", "9,1,=cmd|' /C calc'!A0,1\n9,2024-01-31,a,1\n", "E_UNIT", line=35, used=33),
    table(
        "V-11", rows="".join(f"{line}{',' * 5_000}\n" for line in ROWS.split()),
        head=HEAD + "".join(f",c{i}" for i in range(5_000)),
    ),
    table("V-12", "9,x,a,1\n", "E_TYPE", rows=ROWS.replace("\n", "\r\n", 3)),
    table("V-12 CR", rows=ROWS.replace("\n", "\r")),
    table("V-13", "9,1,a,1,,\n", "E_CSV"),
    table("V-14 UTF-16", f"{HEAD}\n{ROWS}".encode("utf-16"), "E_ENCODING", place="e.csv:1", **refused),
    table("V-14 byte", "9,1,\udcff,1\n", "E_UTF8", **refused),
    table("V-14 empty", b"", "E_EMPTY", place="e.csv:1", **refused),
    table("V-14 header", rows="", code="no patient is left", place="data.events", **refused),
    table(
        "V-14 separators", head="id,time,code,value,a\x0b,b\x0c,c\u2028d\u0085",
        rows="".join(f"{line},1,2,3\n" for line in ROWS.split()),
    ),
    table("EV-01", "9,-1,a,1\n", "E_NEGATIVE", source={"negative": "error"}),
    table("EV-02", "9,nan,a,1\n", "E_NONFINITE"),
    table("EV-02 value", "9,1,a,inf\n", "E_NONFINITE"),
    table("EV-02 large", "9,1,a,1e300\n", "E_RANGE"),
    table("EV-03", "9,5,a,1\n9,1,a,1\n", used=34),
    table("EV-03 refused", "9,5,a,1\n9,1,a,1\n", "E_ORDER", line=35, used=33, settings={"unsorted": "error"}),
    divided("EV-04", "E_DUPLICATE", "set/train/e.csv", "set/train/f.csv"),
    divided("EV-05", "E_LEAK", "set/train/e.csv", "set/tuning/e.csv"),
    table("EV-07", "9,5,a,1\n9,5,a,1\n", used=34),
    table("EV-08", "9,1,strange,1\n", "E_CODE", settings={"unknown_codes": "error", "min_count": 2}, **refused),
    table("EV-10", "".join(f"9,{i / 100},c{i % 7},1\n" for i in range(20_000)), used=20_032),
    table("EV-11", "9,12:30,a,1\n", "E_UNIT"),
    table("EV-11 date", "9,2024-01-01,a,1\n", "E_UNIT"),
    table("EV-11 epoch", "9,1700000000,a,1\n", "E_UNIT"),
    labels("EV-12", "id,label\n1,0\n2,7\n3,1\n", "E_LABEL", "l.csv:3", used=NUM + 2),
    labels("EV-12 twice", "id,label\n1,0\n2,1\n2,0\n", "E_LABEL", "l.csv:3", used=NUM + 1, bad=2),
    labels("J-35", "id,label\n001,0\n002,1\n003,0\n", "E_LABEL", "", **refused),
    labels(
        "EV-06", "id,label,known\n1,0,3\n2,1,-5\n3,1,3\n", "E_LEAK", "l.csv:3", used=NUM + 2, labels={"time": "known"},
        landmark=2.0,
    ),
    table(
        "EV-13", code="E_SET", head=f"{HEAD},set_index",
        rows="".join(f"{line},{-number}\n" for number, line in enumerate(ROWS.split())), line=3, used=8, bad=24,
    ),
    table(
        "EV-14", code="E_WIDTH", settings={"code_embeddings": "v.csv"}, tables={"v.csv": "Key,x,y\na,1,2\nb,1\n"},
        place="v.csv:3", **refused,
    ),
    table("EV-15", "9,1,a,<0.01\n", "E_TYPE"),
    table("EV-15 comma", '9,1,a,"1,2"\n', "E_TYPE"),
    table("EV-16", "９,1,a,1\n", "E_ID"),
    table("EV-16 blank", " 9,1,a,1\n", "E_ID"),
    table("EV-16 digits", "9,１,a,1\n", "E_TYPE"),
    table("EV-17", code="E_MISSING", source={"id": "patient"}, place="e.csv", **refused),
    table(
        "EV-17 not named", code="E_MISSING", head="mrn,time,variable,value", source={"code": "variable"}, place="e.csv",
        **refused,
    ),
    table("EV-17 capitals", head="ID,Time,CODE, value "),
    table("EV-18", code="E_UNIT", rows="1,31.12.2023 14:05,a,1\n", source={"unit": "auto"}, place="e.csv", **refused),
    table("EV-18 no such format", code="E_UNIT", rows="1,31.12.2023,a,1\n", source=GERMAN, line=2, used=0),
    table(
        "EV-18 format", rows="1,31.12.2023 14:05,a,1\n2,01.01.2024 00:05,b,1\n" * 2, used=4, source=GERMAN,
        settings={"duplicates": "keep"},
    ),
    labels("EV-19", "id,label\n1,alive\n2,dead\n", "E_TYPE", "l.csv:2", NUM, 2),
    labels(
        "EV-19 map", "id,label\n1,alive\n2,lost\n3,dead\n", "E_LABEL", "l.csv:3", NUM + 2,
        labels={"map": {"Alive": 0, "dead": 1}},
    ),
    labels("EV-20", "id,label\n1,0\n2,1\n1,1\n", "E_LABEL", "l.csv:2", NUM + 1, 2),
]  # fmt: skip
