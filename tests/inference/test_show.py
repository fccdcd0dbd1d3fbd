"""What a trained run kept of an image: drawn by `unpad infer --show`, and on its page after `unpad eval`."""

import json
import time
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from tests.helpers.pictures import write_recipe
from tests.helpers.questions import SMALL, questions_of, recipe_of, write_questions
from tests.helpers.shell import Shell
from tests.helpers.tokenizers import dropping_bpe
from tests.helpers.toy import quiet
from unpad.batching.batch import RaggedBatch
from unpad.data.sources.split import Split
from unpad.errors import RecipeError
from unpad.evaluation import vqa_cost
from unpad.evaluation.metrics import EXTREMES
from unpad.evaluation.vqa_cost import Cost
from unpad.inference.images import answer, answer_shown, ask
from unpad.inference.loaded import load
from unpad.training.loop import train

pytestmark = pytest.mark.slow

UNIFORM = {
    "language": {**SMALL["language"], "blocks": 3},
    "prune": {"layers": [-1, 0, 1], "method": "uniform", "keep": 0.25},
}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_questions(tmp_path_factory.mktemp("show") / "pictures")


def trained(pictures: Path, folder: Path, settings: dict[str, Any]) -> Path:
    recipe = recipe_of(pictures, train={"max_epochs": 1, "threads": 1})
    name = write_recipe(folder / "r.yaml", recipe.model_copy(update={"model": {**SMALL, **settings}}))
    train(name, folder / "run", [], console=quiet())
    return folder / "run"


@pytest.fixture(scope="module")
def run(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pruned")
    return trained(pictures, root, UNIFORM)


def test_infer_draws_an_image_and_numbers_several(unpad: Shell, run: Path, pictures: Path, tmp_path: Path) -> None:
    image = pictures.parent / "dark" / "0.png"
    outcome = unpad("infer", run, "--image", image, "--question", "Which?", "--show", tmp_path / "out.svg", code=0)
    [drawn] = tmp_path.iterdir()
    assert outcome.out.endswith(f"{drawn} written\n")
    assert unpad("infer", run, "--image", image, "--question", "Which?").out == outcome.out.splitlines()[0] + "\n"
    other = min((pictures.parent / "light").glob("*.png"))
    both = ("--image", image, "--image", other, "--question", "?", "--show", tmp_path / "o.svg")
    assert len(json.loads(unpad("infer", run, *both, "--json").out)) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["o-1.svg", "o-2.svg", "out.svg"]
    assert "nothing is asked" in unpad("infer", run, "--image", image, "--show", tmp_path / "out.svg").err


def test_a_question_that_is_mostly_unknown_and_a_blank_image_are_named(unpad, pictures, tmp_path):
    letters = "".join(sorted(set(pictures.read_text(encoding="utf-8") + "Describe the picture.用户：助手0123456789")))
    (tmp_path / "tokenizer.json").write_bytes(dropping_bpe(letters))
    tokenizer = {"kind": "file", "path": str(tmp_path / "tokenizer.json")}
    recipe = recipe_of(pictures, train={"max_epochs": 1, "threads": 1}, tokenizer=tokenizer)
    screen = StringIO()
    train(write_recipe(tmp_path / "r.yaml", recipe), tmp_path / "run", [], console=Console(file=screen, soft_wrap=True))
    assert "tokenizer: 0 of " in screen.getvalue()
    image, blank = pictures.parent / "dark" / "0.png", tmp_path / "blank.png"
    Image.new("RGB", (16, 16), (9, 9, 9)).save(blank)
    told = unpad("infer", tmp_path / "run", "--image", image, "--image", blank, "--question", "哪个a", "--json", code=3)
    assert "warning: the prompt is mostly unknown: 2 of 3 characters" in told.err
    first, second = json.loads(told.out)
    assert (first["unknown_characters"], first["fault"]) == (2, "")
    assert second["fault"].startswith("E_BLANK")


@pytest.mark.promise("vqa.hard-pruning")
def test_every_image_keeps_what_it_keeps_alone(run: Path, pictures: Path) -> None:
    """A quarter of a grid, evenly: of every second row every second patch comes first."""
    loaded, paths = load(run), sorted((pictures.parent / "dark").glob("*.png"))[:4]
    together = ask(loaded, paths, "Which?", show=True)
    for path, found in zip(paths, together, strict=True):
        (alone,) = ask(loaded, [path], "Which?", show=True)
        assert np.array_equal(found.shown.stays[-1], alone.shown.stays[-1])
        assert np.array_equal(found.shown.pixels, alone.shown.pixels)
        rows, columns = found.shown.grid
        best = {row * columns + column for row in range(0, rows, 2) for column in range(0, columns, 2)}
        kept = set(np.flatnonzero(found.shown.stays[-1]).tolist())
        assert len(kept) == -(-rows * columns // 4)
        assert kept <= best
        for before, after in ((-1, 0), (0, 1)):
            left = found.shown.stays[after]
            assert left.sum() == -(-found.shown.stays[before].sum() // 4)
            assert (left <= found.shown.stays[before]).all(), "what was removed does not come back"


def test_answers_are_those_that_are_shown(run: Path) -> None:
    loaded = load(run)
    data = questions_of(loaded.recipe)
    rows = np.array([i for i, example in enumerate(data.examples) if len(example.images) == 1])[::7]
    assert [one.answer for one in answer_shown(loaded, data, rows)] == answer(loaded, data, rows)


@pytest.mark.promise("vqa.modes")
def test_eval_leaves_what_the_page_draws(unpad: Shell, run: Path) -> None:
    outcome = unpad("eval", run, code=0)
    assert ", most " in " ".join(outcome.out.partition("\nkept_final ")[2].split()[:6])
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "accuracy origin</td>" in page


def test_the_cost_of_every_mode_is_the_median_of_its_rounds_in_its_unit(run, monkeypatch):
    asked: list[tuple[Any, ...]] = []
    costs = [Cost(0.001 * n, 0.1 * n, 100 * n, 1000 * n) for n in (3, 1, 2)]

    def measured(model: Any, prompts: RaggedBatch, *rest: Any) -> dict[str, list[Cost]]:
        asked.append((prompts.num_seqs, *rest))
        return {"origin": costs, "hard": costs[:1]}

    monkeypatch.setattr(vqa_cost, "measure", measured)
    found = vqa_cost.evaluate_cost(str(run))
    data = questions_of(load(run).recipe)
    num = min(int(((data.table.split == Split.HOLDOUT) & (data.num_patches > 0)).sum()), 16)
    assert asked == [(num, 7, 16, time.perf_counter)]
    units = {"prefill_milliseconds": 1.0, "decode_milliseconds": 100.0, "cache_bytes": 100, "prefill_operations": 1000}
    for name, unit in units.items():
        for mode, (middle, least, most) in (("origin", (2, 1, 3)), ("hard", (3, 3, 3))):
            one = found.pop(f"{name}_{mode}")
            assert one.note == EXTREMES
            assert (one.value, one.low, one.high) == pytest.approx((middle * unit, least * unit, most * unit))
            assert (one.num, one.part) == (num, "valid")
    assert found == {}
    monkeypatch.setattr(vqa_cost, "load", lambda _, device: SimpleNamespace(model=None, folder=run))
    with pytest.raises(RecipeError, match="one mode, so there are no costs to compare"):
        vqa_cost.evaluate_cost(str(run))


@pytest.mark.parametrize(
    ("settings", "message"),
    [({}, "removes no patches"), ({"merge": {"variant": "similarity", "ratio": 0.5}, **UNIFORM}, "merges patches")],
)
def test_a_model_of_which_nothing_can_be_shown_says_so(unpad, pictures, tmp_path, settings, message):
    run, image = trained(pictures, tmp_path, settings), pictures.parent / "dark" / "0.png"
    outcome = unpad("infer", run, "--image", image, "--question", "?", "--show", tmp_path / "out.svg", code=2)
    assert message in outcome.err
    if settings:
        assert unpad("eval", run).code == 0
