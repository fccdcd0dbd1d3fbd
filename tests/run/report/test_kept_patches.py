"""Pictures of what a pruned model kept: kept patches are untouched, and no caption becomes boxes."""

import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from fontTools.ttLib.tables._g_l_y_f import Glyph
from PIL import Image
from rich.cells import cell_len

from tests.helpers.kept_patches import GRID, PATCH, QUESTION, kept
from unpad.errors import RecipeError
from unpad.run.report import vqa
from unpad.run.report import vqa as show
from unpad.terminal.table import wrapped


@pytest.mark.promise("vqa.hard-pruning")
def test_patches_that_stay_are_untouched_and_the_others_fade():
    one = kept()
    stays = one.stays[0].reshape(GRID)
    found = vqa.dimmed(one.pixels, stays, PATCH)
    for row in range(GRID[0]):
        for column in range(GRID[1]):
            place = np.s_[row * PATCH : (row + 1) * PATCH, column * PATCH : (column + 1) * PATCH]
            before, after = one.pixels[place].astype(float), found[place].astype(float)
            assert np.array_equal(before, after) == stays[row, column]
            if not stays[row, column]:
                assert after.std() < 0.25 * before.std()


def test_a_png_has_a_panel_per_layer_and_says_what_was_asked(tmp_path):
    one = kept()
    assert [title for title, _ in one.panels] == ["12 patches", "after block 0: 3", "after block 2: 1"]
    early = replace(one, stays={-1: one.stays[0]})
    assert [title for title, _ in early.panels] == ["12 patches", "before the first block: 3"]
    assert vqa.write_pictures([one], tmp_path / "out.png") == [f"{tmp_path / 'out.png'} written"]
    assert not (tmp_path / "out.svg").exists()
    with Image.open(tmp_path / "out.png") as picture:
        assert picture.info["Description"] == "Which <shape>?\ncircle"
        page = np.array(picture)
    for (x, _, panel), (_, wanted) in zip(show.placed(one), one.panels, strict=True):
        assert np.array_equal(panel, wanted)
        height, width = (one.scale * side for side in panel.shape[:2])
        part = page[vqa.GAP + vqa.LINE : vqa.GAP + vqa.LINE + height, x : x + width]
        assert np.array_equal(part[:: one.scale, :: one.scale], panel)
    assert (page[vqa.GAP + one.size[1] :] < 128).any(), "question and answer stand under the panels"


def test_no_letter_is_drawn_that_the_font_does_not_have(tmp_path, monkeypatch):
    assert vqa.find_font("plain?").getname() == show.builtin_font().getname()
    monkeypatch.setattr(show, "_system_fonts", list)
    assert vqa.find_font(QUESTION) is None, "the font that is always there has no Chinese"
    assert vqa.find_font("é") is None
    lines = vqa.write_pictures([kept(QUESTION, "圆形")], tmp_path / "out.png")
    assert [line.partition(" ")[0] for line in lines] == [str(tmp_path / "out.png"), str(tmp_path / "out.svg")]
    assert "no font" in lines[0]
    with Image.open(tmp_path / "out.png") as picture:
        assert picture.info["Description"] == f"{QUESTION}\n圆形"
        assert picture.height == kept().size[1] + 2 * vqa.GAP
    text = (tmp_path / "out.svg").read_text(encoding="utf-8")
    assert QUESTION in text
    assert "圆形" in text


@pytest.fixture
def fonts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of fonts, the only one of this machine."""
    for name, value in (("HOME", "home"), ("XDG_DATA_HOME", "home/data"), ("XDG_DATA_DIRS", "share")):
        monkeypatch.setenv(name, str(tmp_path / value))
    folder = tmp_path / "share/fonts/some/deeper"
    folder.mkdir(parents=True)
    show._system_fonts.cache_clear()
    yield folder
    show._system_fonts.cache_clear()


def test_a_font_of_the_machine_is_used_where_it_has_all_letters(fonts):
    make_font(fonts / "Sans-latin.ttf", "abcé")
    make_font(fonts / "chinese.TTF", QUESTION + "abc")
    (fonts / "broken.ttf").write_bytes(b"\x00\x01\x00\x00 damaged")
    (fonts / "fonts.dir").write_text("0")
    assert font_of(f"abc {QUESTION}") == "chinese.TTF"
    assert font_of("abé") == "Sans-latin.ttf"
    assert font_of(f"é {QUESTION}") is None


def font_of(text: str) -> str | None:
    """Name of the font file that a text is drawn with."""
    font = vqa.find_font(text)
    return None if font is None else Path(str(font.path)).name


def make_font(path: Path, letters: str) -> None:
    """A font file in which every letter is a box of its own width, and all others are a narrow one."""
    builder = FontBuilder(1000)
    glyphs = {".notdef": 100} | {f"u{ord(letter):04x}": 300 + 20 * n for n, letter in enumerate(dict.fromkeys(letters))}
    builder.setupGlyphOrder(list(glyphs))
    builder.setupCharacterMap({ord(letter): f"u{ord(letter):04x}" for letter in letters})
    builder.setupGlyf({name: box(width) for name, width in glyphs.items()})
    builder.setupHorizontalMetrics({name: (width + 50, 0) for name, width in glyphs.items()})
    builder.setupHorizontalHeader(ascent=800, descent=-200)
    builder.setupNameTable({"familyName": path.stem, "styleName": "Regular"})
    builder.setupOS2()
    builder.setupPost()
    builder.save(path)


def box(width: int) -> Glyph:
    pen = TTGlyphPen(None)
    for place, corner in enumerate(((0, 0), (0, 700), (width, 700), (width, 0))):
        (pen.lineTo if place else pen.moveTo)(corner)
    pen.closePath()
    return pen.glyph()


def test_svg_shows_the_same_with_text_as_text():
    text = vqa.to_svg(kept())
    assert text.count("<image") == 3
    assert "Which &lt;shape&gt;?" in text
    assert "after block 2: 1" in text


def test_several_pictures_have_numbers(tmp_path):
    vqa.write_pictures([kept(), kept()], tmp_path / "out.svg")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out-1.svg", "out-2.svg"]


@pytest.mark.parametrize(
    "text", ["", "one", "several words that do not fit in a line", "a" * 50, "图里是什么形状？" * 5, "a 图 " * 20]
)
def test_lines_fit_and_nothing_is_lost(text):
    lines = wrapped(text, 12, breaks_words=True)
    assert lines
    assert all(cell_len(line) <= 12 for line in lines)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")


def test_images_of_every_size_can_be_drawn():
    for rows, columns in ((1, 1), (60, 80), (1, 90)):
        pixels = np.zeros((rows * PATCH, columns * PATCH, 3), np.uint8)
        one = vqa.Kept(pixels, PATCH, {1: np.ones(rows * columns, np.bool_)}, "?", "")
        with Image.open(io.BytesIO(show.to_png(one, show.builtin_font()))) as picture:
            assert picture.width >= 2 * pixels.shape[1]


def test_what_cannot_be_shown_is_refused():
    with pytest.raises(RecipeError, match="PNG and SVG"):
        vqa.check_request(Path("out.jpg"), "?")
    with pytest.raises(RecipeError, match="nothing is asked"):
        vqa.check_request(Path("out.png"), None)
    with pytest.raises(RecipeError, match="merges patches"):
        vqa.refuse_unshowable(("origin", "merge_only", "hard"), True, "run")
    with pytest.raises(RecipeError, match="removes no patches"):
        vqa.refuse_unshowable(("origin",), False, "run")
    vqa.refuse_unshowable(("origin", "hard"), False, "run")
