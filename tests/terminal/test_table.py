"""Tables of text fit 80 columns, or become several that do."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unpad.terminal import table

cell = st.text("abc 1,.%长度", max_size=24).map(str.strip)


@given(st.integers(1, 12), st.data())
@settings(deadline=None, max_examples=60)
def test_every_line_fits_and_every_cell_is_there(num_columns, data):
    head = [f"h{column}" for column in range(num_columns)]
    rows = data.draw(st.lists(st.lists(cell, min_size=num_columns, max_size=num_columns), max_size=5))
    lines = table.text_table(head, rows)
    assert all(table.cells(line) <= table.WIDTH for line in lines)
    text = "\n".join(lines)
    for row in [head, *rows]:
        assert all(part in text for part in row)


def test_columns_that_do_not_fit_follow_below_with_the_same_names():
    head = ["name", *("number of things" for _ in range(5))]
    assert table.text_table(head, [["one", *"12345"], ["two", *"67890"]]) == [
        "name  number of things  number of things  number of things  number of things",
        "one                  1                 2                 3                 4",
        "two                  6                 7                 8                 9",
        "",
        "name  number of things",
        "one                  5",
        "two                  0",
    ]


def test_columns_may_fill_the_width_to_the_last_cell():
    assert table.text_table(["a", "b", "c"], [["x", "1", "2"]], width=7) == ["a  b  c", "x  1  2"]
    assert len(table.text_table(["a", "b", "c"], [["x", "1", "2"]], width=6)) == 5


def test_a_long_name_has_a_line_to_itself_and_a_short_row_blank_cells():
    long = "a-run-with-a-name-that-says-everything-about-it"
    assert len(long) > table.LONGEST_NAME
    assert table.text_table(["run", "loss"], [[long, "2.5"], ["b"]]) == ["run  loss", long, "      2.5", "b"]


def test_wide_letters_take_two_columns():
    assert table.text_table(["名", "数"], [["长度", "1"], ["ab", "22"]]) == ["名    数", "长度   1", "ab    22"]


def test_texts_continue_below_themselves():
    lines = table.described(["a", "b" * 30], ["word " * 30, "短 " * 60])
    assert all(table.cells(line) <= table.WIDTH for line in lines)
    assert lines[0].startswith("a  word")
    assert lines[1].startswith("   word")
    assert lines[2] == "b" * 30
    path = "/" + "x" * 99
    assert table.wrapped(f"see {path} there") == ["see", path, "there"]


def test_a_name_too_long_for_the_column_stands_above_its_text():
    fits, long = "n" * table.LONGEST_NAME, "m" * (table.LONGEST_NAME + 1)
    assert table.described([fits, long, "短名"], ["one", "two", "three"]) == [
        f"{fits}  one", long, " " * 30 + "two", f"短名{' ' * 26}three",
    ]  # fmt: skip
    assert table.described([long], ["one two three"], width=10) == [long, "  one two", "  three"]
    assert table.described(["a"], [""]) == ["a"]
    assert table.described([], []) == []


def test_words_fill_a_line_to_its_last_cell():
    assert table.wrapped("aa bb cc", 5) == ["aa bb", "cc"]
    assert table.wrapped("aa bb cc", 4) == ["aa", "bb", "cc"]
    assert table.wrapped("aa bb cc", 8) == ["aa bb cc"]
    assert table.wrapped("长度 长度", 9) == ["长度 长度"]
    assert table.wrapped("长度 长度", 8) == ["长度 长", "度"]
    assert table.wrapped("  aa   bb ") == ["aa bb"]
    assert table.wrapped("") == [""]


def test_lines_break_between_chinese_characters_but_not_before_a_closing_mark():
    chinese = "学习率是损失最低处学习率的很多倍，每一步都跨得太大。" * 4
    lines = table.wrapped(chinese, 41, indent=4)
    assert "".join(line.strip() for line in lines) == chinese
    assert all(table.cells(line) <= 41 and line.startswith("    ") for line in lines)
    assert not [line for line in lines if line.strip()[0] in "，。"]
    assert table.wrapped("损失（例如）", 6) == ["损失", "（例", "如）"]
    assert table.wrapped("把 optim.lr 设为3e-4。", 11) == ["把 optim.lr", "设为3e-4。"]


def test_paths_stay_whole_and_the_text_behind_them_does_not():
    assert table.wrapped("看 data/中文/很长.jsonl 再试", 10) == ["看", "data/中文/很长.jsonl", "再试"]
    assert table.wrapped("data/a.jsonl：第三行，第四行", 16) == ["data/a.jsonl：第", "三行，第四行"]


@given(st.text("abc /，。（é长度\u0301", max_size=60), st.integers(4, 30))
@settings(deadline=None, max_examples=60)
def test_a_line_that_is_too_wide_is_one_word_and_nothing_is_lost(text, width):
    lines = table.wrapped(text, width)
    assert all(table.cells(line) <= width or " " not in line for line in lines)
    assert "".join(lines).replace(" ", "") == "".join(text.split())


def test_columns_are_aligned_as_asked_and_gaps_are_as_wide_as_asked():
    rows = [["x", "1", "y"], ["xx", "22"]]
    assert table.text_table(["a", "bbb", "ccc"], rows, left=(0, 2), gap=3) == [
        "a    bbb   ccc", "x      1   y", "xx    22",
    ]  # fmt: skip
    assert table.text_table(["a", "bbb"], rows[1:], left=()) == [" a  bbb", "xx   22"]
    assert table.text_table(["a"], [["x"]]) == ["a", "x"]
    assert table.text_table(["a", "b"], []) == ["a  b"]


@pytest.mark.promise("cli.narrow")
def test_a_narrow_terminal_gets_narrow_tables_and_a_wide_one_80_columns(monkeypatch):
    for has, used in ((60, 60), (200, 80), (10, 40)):
        monkeypatch.setenv("COLUMNS", str(has))
        assert table.columns() == used
        lines = [
            *table.text_table(["a", "b", "c"], [["x" * 15] * 3]),
            *table.described(["n"], ["word " * 40]),
            *table.wrapped("word " * 40),
        ]
        assert used - 30 < max(map(table.cells, lines)) <= used


@pytest.mark.parametrize(
    ("number", "plural", "said"),
    [
        (1, "files", "1 file"), (0, "files", "0 files"), (2000, "rows", "2,000 rows"), (1, "queries", "1 query"),
        (1, "classes", "1 class"), (1, "patches", "1 patch"), (1, "micro-batches", "1 micro-batch"),
    ],
)  # fmt: skip
def test_one_of_a_thing_is_singular(number, plural, said):
    assert table.number_of(number, plural) == said


@pytest.mark.promise("cli.narrow")
def test_a_long_line_is_broken_at_words_and_keeps_its_gaps():
    assert table.folded("step 3/9  train epoch 1  loss 2.5  12 tok/s", 30) == [
        "step 3/9  train epoch 1  loss",
        "  2.5  12 tok/s",
    ]
    assert table.folded("  short  line", 30) == ["  short  line"]
    assert table.folded("reads " + "x" * 40, 30) == ["reads", "  " + "x" * 40]


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0, "0"), (0.123456, "0.123"), (1234, "1,234"), (16234.4, "16.2k"), (2.31e6, "2.31M"), (5e9, "5B")],
)
def test_numbers_are_short(value, expected):
    assert table.short(value) == expected


def test_durations_are_short():
    assert [table.span(s) for s in (0.04, 8.14, 59.9, 72, 11_100)] == ["0.0s", "8.1s", "60s", "1m12s", "3h05m"]
