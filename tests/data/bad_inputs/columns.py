"""P: parquet files; EV-09, a file of a patient without events."""

import io
import struct
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tests.data.bad_inputs.case import UNKNOWN, Bad


def written(table: pa.Table, **options: object) -> bytes:
    content = io.BytesIO()
    pq.write_table(table, content, row_group_size=50, **options)
    return content.getvalue()


TEXTS = pa.table({"text": [f"row number {number} of the table" for number in range(100)]})
FILE = written(TEXTS, compression="none", use_dictionary=False, write_page_checksum=True)


def file(kind, content, code="", row=1, *, used=0, bad=1, reads="text"):
    """A parquet file; `row` 0 is the file as a whole."""
    content = content if isinstance(content, bytes) else written(content)
    place = f"a.parquet:{row}" if row else "a.parquet"
    return Bad(
        kind, {"a.parquet": content}, reads, code, place if code else "", used, bad if code else 0, 3 if code else 0
    )


def text(values: object, **more: object) -> pa.Table:
    return pa.table({"text": values, **more})


def write_a_long_text(root: Path) -> None:
    (root / "a.parquet").write_bytes(written(text(["a" * 70_000_000]), compression="zstd", write_statistics=False))


bad_string = pa.Array.from_buffers(
    pa.string(), 3, [None, pa.py_buffer(struct.pack("<4i", 0, 3, 6, 9)), pa.py_buffer(b"abc\xff\xfe\xfddef")]
)
talks = [[{"role": "user", "content": "a b"}, {"role": "assistant", "content": "b c"}], [], None]
spoilt = FILE.replace(b"row number 70", b"row number 71")  # of the second group, whose checksum then differs

COLUMNS = [
    file("P-01", b"", "E_PARQUET", bad=UNKNOWN),
    file("P-02", b"NOPE" + FILE[4:-4] + b"NOPE", "E_PARQUET", bad=UNKNOWN),
    file("P-03", FILE[:-50], "E_PARQUET", bad=UNKNOWN),
    file("P-04", spoilt, "E_PARQUET", 51, used=50, bad=50),
    file("P-06", text([1, 2, 3]), "E_TYPE", bad=3),
    file("P-07", text(bad_string), "E_UTF8", 2, used=2),
    file("P-08", pa.table({"messages": pa.array(talks)}), "E_EMPTY", 2, used=1, bad=2, reads="chat"),
    file("P-09", text(pa.array([1, 2], pa.timestamp("ns"))), "E_TYPE", bad=2),
    file("P-09 beyond", text(pa.array([2**62], pa.timestamp("us"))), "E_TYPE"),
    file("P-09 duration", text(pa.array([2**62], pa.duration("s"))), "E_TYPE"),
    file("P-09 group", text(["a b"], group=pa.array([123456789], pa.timestamp("ns"))), "E_TYPE"),
    file(
        "P-09 label", pa.table({"image": [b"x"], "label": pa.array([1], pa.timestamp("ns"))}), "E_LABEL", reads="images"
    ),
    file("P-10", text(pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"0" * 16], pa.binary(16)))), "E_TYPE"),
    file("P-09 no image", pa.table({"picture": [b"x"], "label": ["a"]}), "E_MISSING", 0, reads="images"),
    file("P-10 binary", text([b"a b"]), "E_TYPE"),
    file("P-11", TEXTS.slice(0, 0), "E_EMPTY", 0, bad=0),
    replace(file("P-12", b"", "E_PARQUET"), make=write_a_long_text),
    file("P-12 twice", pa.Table.from_arrays([TEXTS["text"]] * 2, names=["text", "text"]), "E_DUPKEY", 0, bad=100),
    file(
        "P-12 name", written(text(["a b"]), store_schema=False).replace(b"text", b"te\xfft"), "E_UTF8", 0, bad=UNKNOWN
    ),
    Bad(
        "P-05", {"a.parquet": written(TEXTS), "b.parquet": written(pa.table({"other": [1]}))}, "text", "E_MISSING",
        "b.parquet", 100, 1, folder=".",
    ),
    Bad(
        "EV-09", {"set/1.csv": b"minute,variable,value\n1,a,1\n", "set/2.csv": b"minute,variable,value\n"}, "events",
        "E_EMPTY", "set[1]", 1, 1, folder="set",
    ),
]  # fmt: skip
