"""Models made ready for flat batches: layers of any kind keep sequences apart, and a model that cannot is refused."""

import copy
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.hf.families import distance, make_model, make_rows, make_sequences, take_gradient, targets_of, truth
from unpad.errors import RecipeError
from unpad.hf import collate, mixers, prepare
from unpad.nn.native import library

SEQUENCES = make_sequences(7)
ROWS = make_rows(SEQUENCES)
MIXERS = {
    "lfm2": ["model.layers.0.conv"],
    "qwen3_5": [f"model.layers.{index}.linear_attn" for index in range(3)],
    "mamba": ["backbone.layers.0.mixer", "backbone.layers.1.mixer"],
    "falcon_h1": ["model.layers.0.mamba", "model.layers.1.mamba"],
    "granite4h": ["model.layers.0.mamba"],
    "llama": [],
    "gpt_oss": [],
    "opt": [],
}


def flat(rows: list[dict[str, list[int]]], *, bounds: bool = True) -> dict[str, Any]:
    batch = collate(rows)
    return batch if bounds else {name: batch[name] for name in ("input_ids", "labels", "position_ids")}


def gradient(model: nn.Module, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    model(**batch, num_items_in_batch=torch.tensor(targets_of(ROWS))).loss.backward()
    return take_gradient(model)


@pytest.mark.parametrize("family", MIXERS)
def test_layers_of_every_kind_keep_sequences_apart(family):
    model = make_model(family)
    _, wanted = truth(model, ROWS)
    ready = prepare(model)
    assert list(ready.mixers) == MIXERS[family]
    assert ready.attention == "unpad"
    assert distance(gradient(model, flat(ROWS)), wanted) < 1e-5
    assert distance(gradient(model, flat(ROWS, bounds=False)), wanted) < 1e-5, "positions alone"


@pytest.mark.parametrize("family", ["bloom", "gptj", "mpt"])
def test_attention_by_code_of_its_own_is_refused(family):
    with pytest.raises(RecipeError, match="ForCausalLM computes no flat batch"):
        prepare(make_model(family))


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "qwen3_5"])
@pytest.mark.parametrize("native", [True, False])
def test_another_sequence_changes_no_bit(family, native):
    model = make_model(family).eval()
    prepare(model)
    batch = {name: value for name, value in flat(ROWS).items() if name != "labels"}
    first = len(SEQUENCES[0])
    changed = batch["input_ids"].clone()
    changed[0, :first] = 3 + (changed[0, :first] + 1) % 90
    with torch.no_grad(), nullcontext() if native else library.switched_off():
        one, other = model(**batch).logits[0], model(**{**batch, "input_ids": changed}).logits[0]
    assert not torch.equal(one[:first], other[:first])
    assert torch.equal(one[first:], other[first:])


def test_layers_are_computed_again_with_the_boundaries_of_their_batch():
    model = make_model("qwen3_5")
    prepare(model)
    wanted = gradient(model, flat(ROWS))
    model.activation_checkpointing_enable()
    assert distance(gradient(model, flat(ROWS)), wanted) < 1e-6


def test_a_row_without_boundaries_is_computed_as_before():
    model, other = make_model("lfm2").eval(), make_model("lfm2").eval()
    prepare(model)
    ids = torch.tensor([SEQUENCES[1]])
    with torch.no_grad():
        model(**{name: value for name, value in flat(ROWS).items() if name != "labels"})  # leaves nothing behind
        torch.testing.assert_close(model(input_ids=ids).logits, other(input_ids=ids).logits, rtol=0, atol=1e-5)
        batch = {"input_ids": torch.tensor([[0, 0, 5, 6, 7], [8, 9, 10, 11, 12]])}
        batch["attention_mask"] = (batch["input_ids"] != 0).long()
        padded, wanted = model(**batch).logits, other(**batch).logits
    torch.testing.assert_close(padded[0, 2:], wanted[0, 2:], rtol=0, atol=1e-5)


def test_preparing_again_changes_nothing_and_a_copy_has_boundaries_of_its_own():
    model = make_model("lfm2")
    ready = prepare(model)
    assert prepare(model) == replace(ready, before="")
    assert len(model._forward_pre_hooks) == 1
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        logits = other(**{name: value for name, value in flat(ROWS).items() if name != "labels"}).logits
    assert float(logits.abs().max()) > 0


def test_preparing_leaves_the_model_as_it_was():
    model = make_model("llama")
    model.model.layers[0].eval()
    model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)
    state, modes = torch.get_rng_state(), [module.training for module in model.modules()]
    prepare(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    assert model.lm_head.weight.grad is not None


def test_a_model_that_computes_no_flat_batch_is_refused_and_restored(monkeypatch):
    model = make_model("llama", "sdpa")

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise ValueError("no boundaries here")

    monkeypatch.setattr(mixers.Boundaries, "__call__", refuse)
    with pytest.raises(RecipeError, match="computes no flat batch: ValueError: no boundaries here"):
        prepare(model)
    assert model.config._attn_implementation == "sdpa"
    assert not model._forward_pre_hooks
