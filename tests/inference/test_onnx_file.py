"""ONNX files: onnxruntime answers as the run does, at any size, before the file has its name; others are refused."""

import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests.helpers import families
from tests.helpers.toy import run
from unpad import api
from unpad.errors import CheckpointError, RecipeError
from unpad.inference import onnx_file
from unpad.inference.onnx_file import export_onnx

pytestmark = pytest.mark.promise("models.onnx")

pytest.importorskip("onnxruntime")
EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "onnx" / "predict.py"))["predict"]
RICH = {"norm": "rmsnorm", "activation": "geglu_tanh", "kv_heads": 1, "blocks": 2}
STEM = {"stem": [4, 8], "stem_residual": 1, "channels": 4, "size_embed": True, "pool": "attention", "causal": True}
BELIEF = {"levels": 2, "prior": "history", "update": "product", "bins": [0, 90, 400], "competing": 0}


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", [{**families.pictures.SMALL, **RICH, **STEM}, families.pictures.SMALL, {"kind": "cnn", "patch": 16}]
)
def test_a_picture_of_any_size_gets_the_class_that_the_run_gives_it(model, tmp_path):
    recipe = families.images(
        tmp_path, 48, model=None, images={"size": "native" if model["kind"] == "vit" else "square", "square": 16}
    )
    run(families.rewritten(recipe, {"model": model, "train": {"max_epochs": 1}}), tmp_path / "run")
    assert "on 48 rows, 19 of them held out" in export_onnx(str(tmp_path / "run"), tmp_path / "file.onnx")[1]
    rng = np.random.default_rng(0)
    for width, height in [(8, 8), (9, 30), (8, 64), (128, 96), (240, 200)]:
        Image.fromarray(rng.integers(0, 255, (height, width, 4)).astype(np.uint8)).save(tmp_path / "one.png")
        top = api.load(tmp_path / "run").classify(tmp_path / "one.png")[0]["top"]
        assert EXAMPLE(tmp_path / "file.onnx", tmp_path / "one.png") == pytest.approx(top, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "scale"), [({**RICH, **BELIEF}, "rank"), ({"last_values": False}, "log")])
def test_a_patient_gets_the_risks_that_the_run_predicts(model, scale, tmp_path):
    recipe = families.patients(tmp_path, 60, events={"scale": scale}, train={"max_epochs": 1})
    run(families.rewritten(recipe, {"model": model}), tmp_path / "run")
    export_onnx(str(tmp_path / "run"), tmp_path / "file.onnx")
    tests, people = (pq.read_table(tmp_path / "tables" / f"{name}.parquet").to_pylist() for name in ("tests", "people"))
    for person, answer in [*zip(people, api.load(tmp_path / "run").predict(), strict=True)][:9]:
        events = [("", "age", person["age"])]
        events += [(one["days"], one["test"], one["value"]) for one in tests if one["id"] == person["id"]]
        text = "days,code,value\n" + "".join(f"{day},{code},{value}\n" for day, code, value in events)
        (tmp_path / "one.csv").write_text(text, encoding="utf-8")
        found = EXAMPLE(tmp_path / "file.onnx", tmp_path / "one.csv")
        assert found["1"] == pytest.approx(answer["probability"], abs=1e-5)
        assert found.get("risk") == pytest.approx(answer.get("risk"), abs=1e-5)


def test_what_has_no_such_form_or_differs_is_refused_and_not_written(finished, tmp_path, monkeypatch):
    out, of_pictures = tmp_path / "file.onnx", str(finished("images").run)
    for family, fix in [("conversations", "FILE.gguf"), ("questions", "copy the run's folder")]:
        with pytest.raises(RecipeError, match=re.escape(fix)):
            export_onnx(str(finished(family).run), out)
    through = onnx_file._through
    monkeypatch.setattr(onnx_file, "_through", lambda *parts: 1.001 * through(*parts))
    with pytest.raises(CheckpointError, match="answers in onnxruntime differ by"):
        export_onnx(of_pictures, out)
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(RecipeError, match=re.escape("unpad[onnx]")):
        export_onnx(of_pictures, out)
    assert not list(tmp_path.iterdir())
