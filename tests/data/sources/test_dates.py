"""Layouts of dates that tables have, proposed where the rows tell them apart."""

import pytest

from unpad.data.sources.fields import is_date_like, layout_advice, layouts_of


@pytest.mark.parametrize(
    ("texts", "layouts"),
    [
        (["31.12.2023 14:05", "01.02.2024 00:05"], ["%d.%m.%Y %H:%M"]),
        (["12/31/2023 02:05 PM", "01/02/2024 11:00 AM"], ["%m/%d/%Y %I:%M %p"]),
        (["01/02/2023", "03/04/2023"], ["%d/%m/%Y", "%m/%d/%Y"]),
        (["01/02/2023", "03/14/2023"], ["%m/%d/%Y"]),
        (["05/05/2023"], ["%d/%m/%Y"]),
        (["2023/01/05"], ["%Y/%m/%d"]),
        (["31DEC2023:14:05:00"], ["%d%b%Y:%H:%M:%S"]),
        (["1.2.23 4:05"], ["%d.%m.%y %H:%M"]),
        (["2023年1月5日"], ["%Y年%m月%d日"]),
        (["20230105", "20231231"], ["%Y%m%d"]),
        (["12345678"], []),
        (["yesterday"], []),
        ([], []),
    ],
)
def test_layouts_are_those_that_read_the_texts(texts: list[str], layouts: list[str]) -> None:
    assert layouts_of(texts) == layouts


def test_where_no_row_tells_the_day_from_the_month_none_is_guessed() -> None:
    assert layout_advice(["31.12.2023"]) == 'unit: timestamp, format: "%d.%m.%Y"'
    told = layout_advice(["01/02/2023"])
    assert '"%d/%m/%Y" or "%m/%d/%Y"' in told
    assert "no row tells the day from the month" in told


def test_only_what_is_written_like_a_date_may_be_shown() -> None:
    for text in ("31.12.2023 14:05", "12/31/2023 02:05 PM", "3023-01-05", "5. Jan 2023", "31/31/2023", "1.2.23T04:05Z"):
        assert is_date_like(text), text
    for text in ("90210001", "Smith", "P0001", "Anna, 1.2.1970", "", "12-34"):
        assert not is_date_like(text), text
