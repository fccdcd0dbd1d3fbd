"""Images from files to batches: counted, split by content, never cut, and the same in any batch."""

import json
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from rich.console import Console

from tests.helpers.pictures import SMALL, images_of, micro_of, recipe_of, scene, write_folder, write_recipe
from tests.helpers.toy import quiet, rows
from unpad.batching.batch import RaggedBatch
from unpad.batching.plan import Micro, plan
from unpad.data.family import open_data
from unpad.data.images import ImageData
from unpad.data.sources.split import Split
from unpad.errors import SourceError
from unpad.inference.loaded import load
from unpad.proof import sample as samples
from unpad.proof.recipe import prove_recipe
from unpad.run.base import trainable_weights
from unpad.training.loop import train


@pytest.fixture(autouse=True)
def _few_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "choose", partial(samples.choose, most=6))  # of fewer sequences than users prove


@pytest.mark.promise("images.classes")
def test_every_image_is_used_split_or_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "my pictures")
    data = images_of(recipe_of(folder))
    assert data.classes == ("dark", "light")
    assert len(data.examples) == 24
    assert data.lines()[0] == "24 images read = 24 used + 0 quarantined"
    assert 0 < int((data.table.split == Split.HOLDOUT).sum()) < 12
    assert data.table.positions.tolist() == [int(rows * columns) for rows, columns in data.album.grids]
    (folder / "dark" / "broken.png").write_bytes(b"")
    with pytest.raises(SourceError, match="E_EMPTY") as caught:
        open_data(recipe_of(folder), None)
    assert "broken.png" in str(caught.value)
    assert f"`unpad data check '{folder}'`" in caught.value.fix
    kept = images_of(recipe_of(folder, data={"images": str(folder), "on_bad_row": "quarantine", "max_bad": 0.1}))
    assert (len(kept.examples), len(kept.bad_rows)) == (24, 1)
    assert any("broken.png" in line for line in kept.lines())


@pytest.mark.promise("images.own-size")
def test_a_batch_holds_what_each_image_has_alone(tmp_path: Path) -> None:
    data = images_of(recipe_of(write_folder(tmp_path / "pictures")))
    ids = [5, 0, 17, 8]
    batch = data.load(micro_of(data, ids))
    assert batch.num_targets == 4
    for place, seq in enumerate(ids):
        one, alone = batch.select([place]), data.alone(seq, 0, int(data.table.positions[seq]), 0)
        for name in ("inputs_embeds", "position_ids", "grid", "image_sizes", "seq_labels", "seq_ids"):
            assert torch.equal(getattr(one, name), getattr(alone, name)), name
    again = data.load(micro_of(data, ids))
    assert torch.equal(batch.inputs_embeds, again.inputs_embeds), "from memory as from the file"
    nothing = data.load(micro_of(data, []))
    assert (nothing.total_tokens, nothing.num_targets) == (0, 0)


@pytest.mark.promise("images.classes")
def test_equal_pictures_share_a_side_whatever_their_names(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "pictures")
    for path in sorted(folder.rglob("*.png")):
        path.with_name("copy-" + path.name).write_bytes(path.read_bytes())
    data = images_of(recipe_of(folder))
    sides: dict[str, set[int]] = {}
    for example, side in zip(data.examples, data.table.split.tolist(), strict=True):
        sides.setdefault(example.sha256, set()).add(side)
    assert len(sides) == 24
    assert all(len(side) == 1 for side in sides.values())


def test_a_manifest_declares_its_split_and_a_changed_file_changes_the_fingerprint(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "pictures")
    rows = [
        {"image": str(path.relative_to(folder)), "label": path.parent.name, "split": ("train", "val", "test")[n % 3]}
        for n, path in enumerate(sorted(folder.rglob("*.png")))
    ]
    manifest = folder / "images.jsonl"
    manifest.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    data = images_of(recipe_of(manifest))
    assert [int((data.table.split == side).sum()) for side in (Split.TRAIN, Split.HOLDOUT)] == [8, 8]
    assert data.table.num_test == data.chosen.num_test == 8
    assert data.lines()[0].endswith("read = 16 used + 0 quarantined + 8 of the test part, for `unpad eval` alone")
    before = data.fingerprint()
    assert images_of(recipe_of(manifest)).fingerprint() == before
    Image.new("RGB", (16, 16)).save(folder / rows[0]["image"])
    assert images_of(recipe_of(manifest)).fingerprint() != before


@pytest.mark.promise("images.own-size")
def test_photos_are_trained_at_128_pixels_in_colours_and_the_log_says_so(tmp_path):
    for number in range(8):
        path = tmp_path / "my photos" / ("cats", "dogs")[number % 2] / f"IMG_{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        scene(number, (800, 600)).save(path)
    sizes = [f"model.{field}" for field in ("width=12", "heads=2", "hidden=16", "blocks=1", "stem=[4, 4, 4, 12]")]
    settings = [f"data.images={tmp_path / 'my photos'}", *sizes, "train.max_steps=2", "precision=fp32"]
    out = StringIO()
    train("photos", tmp_path / "run", settings, console=Console(file=out, width=200))
    assert "8 pictures, median 800 x 600, shrunk to about 128 x 128 by images.max_tokens=64" in out.getvalue()
    data = load(tmp_path / "run").data()
    assert (data.album.channels, data.album.picture(0).shape) == (3, (112, 144, 3))


def test_plans_keep_every_image_whole(tmp_path: Path) -> None:
    recipe = recipe_of(write_folder(tmp_path / "pictures"))
    data = images_of(recipe)
    made = plan(data.table.positions, recipe.plan, seed=0, epoch=0, targets=data.count_targets)
    assert sorted(made.pieces.seq_ids.tolist()) == list(range(24))
    assert made.pieces.lengths.tolist() == data.table.positions[made.pieces.seq_ids].tolist()
    assert made.ledger.tokens("dropped") == 0


@pytest.mark.promise("images.own-size", "images.classes")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "images"),
    [
        (SMALL, {}),
        ({**SMALL, "pool": "attention", "token_drop": 0.5}, {"size": "adaptive", "max_tokens": 12}),
        (SMALL, {"size": "letterbox", "square": 32}),
        (
            {**SMALL, "stem": [8, 8], "stem_residual": 1},
            {"min_tokens": 2, "max_tokens": 20, "scale": 0.5, "zoom": 0.2, "flip": 0.5},
        ),
        ({"kind": "cnn", "patch": 32}, {"size": "square", "square": 32}),
    ],
)
def test_runs_train_resume_and_answer(tmp_path: Path, model: dict[str, Any], images: dict[str, Any]) -> None:
    from unpad.evaluation.run import evaluate_run
    from unpad.inference.images import classify, list_images
    from unpad.inference.loaded import load

    folder = write_folder(tmp_path / "pictures")
    recipe = recipe_of(folder, images=images, optim={"lr": 3e-3, "schedule": "constant"}).model_copy(
        update={"model": model}
    )
    name = write_recipe(tmp_path / "r.yaml", recipe)
    whole = train(name, tmp_path / "whole", [], console=quiet())
    train(name, tmp_path / "parts", ["train.max_steps=5"], console=quiet())
    train(name, tmp_path / "parts", ["train.max_steps=null"], resume=True, console=quiet())
    assert rows(tmp_path / "whole", "train") == rows(tmp_path / "parts", "train")
    assert whole.heldout_loss is not None
    metrics, _ = evaluate_run(str(tmp_path / "whole"))
    assert metrics["accuracy"].value >= 0.8
    assert {"loss", "balanced_accuracy", "calibration_error", "accuracy_dark", "accuracy_light"} <= set(metrics)
    answers = classify(load(tmp_path / "whole"), list_images([folder / "dark"]))
    assert len(answers) == 12
    assert sum(answer.top[0][0] == "dark" for answer in answers) >= 9
    assert "Confusion" in (tmp_path / "whole" / "report.html").read_text(encoding="utf-8")


def test_a_run_of_other_classes_starts_from_all_weights_but_those_of_the_head(finished: Any, tmp_path: Path) -> None:
    base = finished("images").run
    start = [f"data.images={labelled(tmp_path / 'set', ['x', 'y', 'z'] * 4)}", f"train.init_from={base}"]
    recipe, steps = str(finished("images").recipe), "train.max_steps=0"
    with pytest.raises(SourceError, match='the class "x" is none of the run') as caught:
        train(recipe, tmp_path / "refused", [*start, steps], console=quiet())
    assert "train.new_head=true" in caught.value.fix
    train(recipe, tmp_path / "run", [*start, steps, "train.new_head=true"], console=quiet())
    new, old = trainable_weights(tmp_path / "run"), trainable_weights(base)
    assert {name for name in old if not torch.equal(new[name], old[name])} == {"head.weight"}
    assert len(new["head.weight"]) == 3
    assert "initialized, as that run lacks them: head" in (tmp_path / "run" / "log.jsonl").read_text("utf-8")


@pytest.mark.promise("images.own-size")
@pytest.mark.nightly
@pytest.mark.parametrize(
    "model",
    [
        {**SMALL, "stem": [8]},
        {**SMALL, "pool": "attention", "channels": 4, "size_embed": True},
        {"kind": "cnn", "patch": 32},
        {"kind": "cnn", "patch": 32, "channels": 4},
    ],
)
def test_the_certificate_covers_images(tmp_path: Path, model: dict[str, Any]) -> None:
    images = {"size": "square", "square": 32} if model["kind"] == "cnn" else {}
    recipe = recipe_of(write_folder(tmp_path / "pictures"), images=images).model_copy(update={"model": model})
    certificate = prove_recipe(write_recipe(tmp_path / "r.yaml", recipe), [])
    assert certificate.passed, "\n".join(certificate.text())
    assert any(line.name == "plan pack = alone" for line in certificate.lines)


@pytest.mark.promise("images.own-size")
@pytest.mark.slow
@pytest.mark.parametrize("what", ["inputs_embeds", "image_sizes"])
def test_patches_and_sizes_of_another_image_are_caught(tmp_path, monkeypatch, what):
    right = ImageData.load

    def shifted(self: ImageData, micro: Micro) -> RaggedBatch:
        batch = right(self, micro)
        return replace(batch, **{what: getattr(batch, what).roll(1, 0)})

    monkeypatch.setattr(ImageData, "load", shifted)
    recipe = recipe_of(write_folder(tmp_path / "pictures"))
    recipe = recipe.model_copy(update={"model": {**recipe.model, "size_embed": True}})
    certificate = prove_recipe(write_recipe(tmp_path / "r.yaml", recipe), [])
    assert "plan pack = alone" in [line.name for line in certificate.lines if line.passed is False]


def labelled(folder: Path, labels: list[str]) -> Path:
    """A manifest of one small picture per label, all different."""
    folder.mkdir()
    for number in range(len(labels)):
        Image.new("RGB", (8, 8), (number, 9 * number, 90)).save(folder / f"{number}.png")
    rows = [{"image": f"{number}.png", "label": label} for number, label in enumerate(labels)]
    path = folder / "images.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize(("num", "more"), [(12, ""), (13, " and 1 more"), (20, " and 8 more")])
def test_classes_are_in_the_order_of_their_names_and_the_commonest_are_shown(tmp_path, num, more):
    names = [f"{chr(97 + n)}x" for n in range(num)]
    data = images_of(recipe_of(labelled(tmp_path / "set", [*reversed(names), *names[:1]])))
    assert data.classes == tuple(names)
    assert [data.classes[label] for label in data.labels.tolist()] == [*reversed(names), names[0]]
    shown = ", ".join(["ax 2", *(f"{name} 1" for name in names[:0:-1])][:12])
    assert any(line.endswith(f"; {num} classes: {shown}{more}") for line in data.lines())
