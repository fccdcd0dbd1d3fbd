"""Attention maps: the weights that the blocks compute with, and their drawing on the page of a run."""

import json

import pytest
import torch
from torch import Tensor

from tests.conftest import random_batch, tiny_model
from tests.helpers.families import images
from tests.helpers.run_folders import html_of
from tests.helpers.toy import run, write_toy
from unpad.evaluation.attention_maps import attention_weights
from unpad.nn.block import Attention
from unpad.run.report.attention import ATTENTION, LEVELS, draw


@pytest.mark.promise("run.compare")
@pytest.mark.parametrize("fields", [{}, {"kv_heads": 2}, {"positions": "sinusoidal"}])
def test_weights_times_values_are_what_attention_returns(fields):
    model, batch = tiny_model(**fields).eval(), random_batch([9])
    seen: list[tuple[Attention, Tensor, Tensor]] = []
    for module in model.modules():
        if isinstance(module, Attention):
            module.register_forward_hook(lambda one, given, out: seen.append((one, given[0], out)))
    with torch.no_grad():
        model(batch)
    calls = list(seen)
    maps = attention_weights(model, batch)
    assert len(maps) == len(calls) == 2
    for weights, (attention, x, out) in zip(maps, calls, strict=True):
        assert weights.shape == (4, batch.total_tokens, batch.total_tokens)
        qkv = attention.to_qkv(x).unflatten(-1, (-1, attention.head_dim))
        v = qkv[:, attention.heads + attention.kv_heads :].repeat_interleave(attention.heads // attention.kv_heads, 1)
        made = attention.to_out(torch.einsum("hqk,khd->qhd", weights, v).flatten(1))
        assert torch.allclose(made, out, atol=1e-9)


def test_a_model_without_attention_has_no_maps_and_hooks_are_gone():
    model, batch = tiny_model(), random_batch([5])
    attention_weights(model, batch)
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert model.training


# --------------------------------------------------------------------------- runs


@pytest.mark.slow
def test_a_run_of_texts_shows_the_maps_of_one_held_out_text(tmp_path):
    run(write_toy(tmp_path / "toy"), tmp_path / "run", "train.max_steps=14")
    found = json.loads((tmp_path / "run" / ATTENTION).read_text(encoding="utf-8"))
    num = len(found["tokens"])
    assert 4 <= num <= 20
    [block] = found["blocks"]
    assert len(block["heads"]) == 2
    for digits in block["heads"]:
        rows = [digits[num * row : num * (row + 1)] for row in range(num)]
        assert len(digits) == num * num
        assert rows[0] == str(len(LEVELS["text"])) + "0" * (num - 1)  # the first token has only itself to look at
        assert all(set(row[at + 1 :]) <= {"0"} for at, row in enumerate(rows))
    page = (tmp_path / "run/report.html").read_text(encoding="utf-8")
    assert page.count("attention of a head") == 2
    assert "block 1, head 2" in page


@pytest.mark.slow
def test_maps_keep_to_the_context_of_the_model(tmp_path):
    run(write_toy(tmp_path / "toy"), tmp_path / "run", "model.context=8", "train.max_steps=2")
    assert len(json.loads((tmp_path / "run" / ATTENTION).read_text(encoding="utf-8"))["tokens"]) == 8


@pytest.mark.promise("run.compare")
@pytest.mark.slow
def test_a_run_of_images_shows_the_image_and_what_patches_receive(tmp_path):
    recipe = images(tmp_path, 24, model={"blocks": 3, "patch": 4}, train={"max_steps": 2, "threads": 1})
    run(recipe, tmp_path / "run")
    found = json.loads((tmp_path / "run" / ATTENTION).read_text(encoding="utf-8"))
    rows, columns = found["grid"]
    assert [block["block"] for block in found["blocks"]] == [0, 2]
    assert {len(digits) for block in found["blocks"] for digits in block["heads"]} == {rows * columns}
    page = (tmp_path / "run/report.html").read_text(encoding="utf-8")
    assert page.count("attention of a head") == 4
    assert "data:image/png;base64," in page


@pytest.mark.parametrize(
    "text", ["", "{}", "5", '{"where": "x", "tokens": ["a"], "blocks": [{"block": 0, "heads": ["11"]}]}']
)
def test_a_damaged_file_draws_nothing(tmp_path, text):
    (tmp_path / ATTENTION).write_text(text)
    assert draw(tmp_path) == []


def test_tokens_are_text_and_no_page(tmp_path):
    found = {"where": "<i>", "tokens": ["<b>", "\n"], "blocks": [{"block": 0, "heads": ["5012"]}]}
    (tmp_path / ATTENTION).write_text(json.dumps(found))
    page = html_of(draw, tmp_path)
    assert "<b>&lt;" not in page
    assert "&lt;b&gt;" in page
    assert "<i>" not in page
    assert page.count("<path") == 3
