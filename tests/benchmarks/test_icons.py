"""The study of icons keeps names on one side, compares the same pictures, draws names, and says what it missed."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from PIL import Image

from unpad.errors import SourceError

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MACHINE = {"cores": 1, "processor": "one", "torch": "2"}
COLOURS = {16: "#ff0000", 32: "#00ff00", 128: "#0000ff"}


@pytest.fixture(scope="module", autouse=True)
def _path() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield
        for name in ("icons", "icons_report", "pruning", "pruning_report"):
            sys.modules.pop(name, None)


def module(name: str) -> ModuleType:
    return importlib.import_module(name)


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    """Twelve names of three sizes each; the first is in two categories."""
    rows = []
    for number, label in [*((number, "ab"[number % 2]) for number in range(12)), (0, "b")]:
        for size, colour in COLOURS.items():
            image = f"{label}/icon-{number}_{size}.png"
            (tmp_path / label).mkdir(exist_ok=True)
            Image.new("RGBA", (size, size), colour).save(tmp_path / image)
            rows.append({"image": image, "label": label})
    file = tmp_path / "images.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def study(one: np.ndarray, whole: np.ndarray, trees: np.ndarray, copies: int = 1) -> Any:
    """Icons of `copies` pictures each, which sides get right as they say, (num_icons,) each."""
    report = module("icons_report")
    sides = report.with_means({side: np.zeros((1, 1)) for side in (report.TREES, report.ONE, report.ALL_SIZES)}, [0])
    right = dict.fromkeys(sides, trees) | {report.ONE: one, report.ALL_SIZES: whole}
    icons = np.repeat(np.arange(len(trees)), copies)
    names = np.array([f"icon-{number}" for number in icons])
    repeated = {side: values.repeat(copies)[None] for side, values in right.items()}
    return report.Study(repeated, names, icons, icons % 5, icons % 3 == 0, [0], MACHINE)


def test_a_name_is_in_one_fold_whatever_its_category(manifest: Path) -> None:
    icons = module("icons").read_icons(manifest)
    fold = module("icons").fold_names(icons.names, 5, seed=0)
    assert all(len(set(fold[icons.names == name].tolist())) == 1 for name in np.unique(icons.names))
    assert np.bincount(fold[np.unique(icons.names, return_index=True)[1]]).tolist() == [3, 3, 2, 2, 2]
    assert len(np.unique(icons.icon)) == 13, "a name in two categories is two icons"


def test_settings_are_chosen_by_names_outside_of_the_first_fold(manifest: Path) -> None:
    script = module("icons")
    icons = script.read_icons(manifest)
    within, chosen = script.inner(icons)
    scored = icons.names[script.fold_names(icons.names, script.NUM_FOLDS, script.FOLD_SEED) == 0]
    assert not set(within.names) & set(scored)
    assert set(within.names[chosen]) == set(script.inner_names(icons))
    assert not set(within.names[chosen]) & set(within.names[~chosen])


def test_a_strip_has_every_size_once_and_the_nearest_for_a_missing_one(manifest: Path) -> None:
    script = module("icons")
    icons = script.read_icons(manifest)
    script.prepare(icons, manifest.parent / "work")
    with Image.open(manifest.parent / "work" / script.strip_name(0)) as picture:
        middles = [picture.getpixel((16, 32 * row + 16))[:3] for row in range(len(script.SIZES))]
    red, green, blue = (255, 0, 0), (0, 255, 0), (0, 0, 255)
    assert middles == [red, red, green, green, green, blue]  # 16 22 32 48 64 128, of which 16, 32 and 128 are there


def test_held_out_icons_have_one_strip_and_no_name_on_the_other_side(manifest: Path) -> None:
    script = module("icons")
    icons = script.read_icons(manifest)
    held = script.fold_names(icons.names, 5, seed=0) == 0
    script.write_strips(manifest.parent / "strips.jsonl", icons, held)
    rows = [json.loads(line) for line in (manifest.parent / "strips.jsonl").read_text("utf-8").splitlines()]
    scored, learnt = ([row for row in rows if row["split"] == split] for split in ("test", "train"))
    assert [row["image"] for row in scored] == [script.strip_name(icon) for icon in np.flatnonzero(held[icons.first])]
    assert {row["group"] for row in scored} == set(icons.names[held])
    assert not {row["group"] for row in scored} & {row["group"] for row in learnt}
    assert len(learnt) == len(icons.images) - held.sum() + (~held[icons.first]).sum(), "strips, and every picture"


def test_averages_are_of_the_sizes_of_one_icon() -> None:
    found = module("icons_report").averaged(np.array([[1.0, 0.0], [0.2, 0.8], [0.6, 0.4]]), np.array([7, 3, 7]))
    assert found == pytest.approx(np.array([[0.8, 0.2], [0.2, 0.8], [0.8, 0.2]]))


def test_a_difference_is_of_the_same_pictures_and_draws_names() -> None:
    report = module("icons_report")
    trees, one = np.arange(40) % 2 == 0, np.arange(40) % 4 != 1
    few, many = (study(one, one, trees, copies) for copies in (1, 6))
    gaps = [each.per_picture(each.gap(report.ONE, report.TREES)) for each in (few, many)]
    assert gaps[0].value == pytest.approx(0.25)
    assert (gaps[1].low, gaps[1].high) == pytest.approx((gaps[0].low, gaps[0].high)), "more sizes are no more evidence"


def test_an_icon_counts_once_whatever_its_pictures() -> None:
    right = {"side": np.array([[True, True, True, False]])}
    names, icons = np.array(["a", "a", "a", "b"]), np.array([0, 0, 0, 1])
    of_two = module("icons_report").Study(right, names, icons, icons, icons == 1, [0], MACHINE)
    assert of_two.per_picture(right["side"]).value == 0.75
    assert of_two.per_icon(right["side"]).value == 0.5


@pytest.mark.parametrize(("gain", "holds"), [(0.0, False), (0.2, True)])
def test_the_page_says_no_where_a_goal_is_missed(gain: float, holds: bool) -> None:
    trees = np.arange(300) % 2 == 0
    better = trees | (np.arange(300) % 10 < 10 * gain)
    worse = trees & (np.arange(300) % 10 > 1)
    found = study(better if holds else worse, better if holds else worse, trees)
    rows = [line for line in module("icons_report").markdown(found, "command").splitlines() if "interval above" in line]
    assert ["| yes | 0.0 |" in row for row in rows] == [holds, holds]
    assert ["| NO |" in row for row in rows] == [not holds, not holds]


def test_a_goal_whose_interval_reaches_too_low_is_missed() -> None:
    trees = np.arange(60) % 2 == 0
    noisy = np.where(np.arange(60) < 20, ~trees, trees)
    noisy[21:25] = True  # two points and more above, by chance
    found = module("icons_report").goals(study(noisy, noisy, trees))
    assert [goal.found.value > 0.02 for goal in found] == [True, True]
    assert [goal.holds for goal in found] == [False, False]
    assert [goal.missing for goal in found] == [-0.01 - found[0].found.low, -found[1].found.low]


def test_a_picture_without_a_size_in_its_name_is_refused(manifest: Path) -> None:
    manifest.write_text('{"image": "a/icon.png", "label": "a"}\n', encoding="utf-8")
    with pytest.raises(SourceError, match="no size in its name"):
        module("icons").read_icons(manifest)
