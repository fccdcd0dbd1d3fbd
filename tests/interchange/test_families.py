"""Folders of Hugging Face: equal logits on ragged batches both ways, for every family; what is not covered is named."""

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import tiny_model
from tests.helpers.grid import pairs
from tests.interchange.theirs import in_precision, largest_error, load, make_theirs, our_logits, their_logits
from unpad.errors import CheckpointError
from unpad.interchange import folder as folders
from unpad.interchange.families import DECODERS, FAMILIES, family_of
from unpad.interchange.folder import CONFIG, INDEX, WEIGHTS, save_model

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")
names_of_transformers = pytest.importorskip("transformers.models.auto.configuration_auto").CONFIG_MAPPING_NAMES

LLAMA3 = {
    "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
}  # fmt: skip
LINEAR = {"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0}}
PLAIN_HEADS = {"num_key_value_heads": 4, "head_dim": 4}
SHAPES: dict[str, list[dict[str, Any]]] = {
    "llama": [
        {**LLAMA3, "tie_word_embeddings": True}, {**PLAIN_HEADS, "attention_bias": True, "mlp_bias": True},
        {**LINEAR, "hidden_act": "gelu", "num_key_value_heads": 1},
    ],
    "mistral": [{}, {"sliding_window": 7, "head_dim": 8}, {**PLAIN_HEADS, "tie_word_embeddings": True}],
    "qwen2": [
        {"head_dim": 4, "tie_word_embeddings": True}, {**PLAIN_HEADS, **LLAMA3},
        {"head_dim": 4, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ],
    "qwen3": [{"tie_word_embeddings": True}, PLAIN_HEADS, {"head_dim": 16, "num_key_value_heads": 1, **LINEAR}],
    "gemma": [{}, {**PLAIN_HEADS, "tie_word_embeddings": False}, {"num_key_value_heads": 1, "head_dim": 16}],
    "gemma3_text": [
        {"sliding_window": 7, "num_hidden_layers": 7, "query_pre_attn_scalar": 20},
        {"sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"], "tie_word_embeddings": False},
        {
            **PLAIN_HEADS, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ],
    "gpt2": [{}, {"n_inner": 40, "activation_function": "relu", "tie_word_embeddings": False}, {"n_head": 2}],
    "opt": [{}, {"num_attention_heads": 2, "activation_function": "gelu"}, {"tie_word_embeddings": False}],
    "granite": [
        {
            "head_dim": 4, "embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.3,
            "attention_multiplier": 0.2,
        },
        {"head_dim": 4, "attention_bias": True, "mlp_bias": True, "attention_multiplier": 0.7},
        {**PLAIN_HEADS, "tie_word_embeddings": True, "residual_multiplier": 0.5},
    ],
    "smollm3": [
        {"num_hidden_layers": 5, "head_dim": 4}, {"no_rope_layers": [0, 1], **PLAIN_HEADS},
        {"no_rope_layers": [1, 0], "use_sliding_window": True, "sliding_window": 6, "head_dim": 4,
         "tie_word_embeddings": False},
    ],
}  # fmt: skip
TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-10}
CASES = pairs(list(SHAPES), [0, 1, 2], list(TOLERANCES))


@pytest.mark.promise("models.families")
@pytest.mark.parametrize(("kind", "index", "dtype"), CASES)
def test_folders_keep_their_logits_in_and_out(kind, index, dtype, tmp_path, monkeypatch):
    theirs = make_theirs(kind, dtype, **SHAPES[kind][index])
    expected = their_logits(theirs, dtype)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="10KB" if index else "5GB")
    assert (tmp_path / "theirs" / INDEX).exists() == bool(index)
    ours = load(tmp_path / "theirs", dtype)
    assert largest_error(our_logits(ours), expected) < TOLERANCES[dtype]

    monkeypatch.setattr(folders, "SHARD_BYTES", 10_000 if index == 1 else 1 << 30)
    given = json.loads((tmp_path / "theirs" / CONFIG).read_text())
    save_model(ours, tmp_path / "ours", FAMILIES[kind], {CONFIG: given})
    assert (tmp_path / "ours" / INDEX).exists() == (index == 1)
    with in_precision(dtype):
        back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=dtype).eval()
    assert type(back) is type(theirs)
    assert largest_error(their_logits(back, dtype), expected) < TOLERANCES[dtype]


OLDER: dict[str, dict[str, Any]] = {
    "llama": {"rope_theta": 500.0, "rope_scaling": {
        "type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }},
    "gemma3_text": {"rope_theta": 1000.0, "rope_local_base_freq": 100.0, "sliding_window_pattern": 2},
    "qwen2": {"rope_theta": 500.0, "rope_scaling": None, "use_sliding_window": True, "max_window_layers": 1,
              "sliding_window": 7},
    "smollm3": {"rope_theta": 500.0, "no_rope_layer_interval": 2},
}  # fmt: skip


@pytest.mark.promise("models.families")
@pytest.mark.parametrize("kind", OLDER)
def test_spellings_of_versions_before_5_are_read_as_transformers_reads_them(kind, tmp_path):
    shape = {**SHAPES[kind][0], "num_hidden_layers": 4, "sliding_window": 7}
    make_theirs(kind, **{key: value for key, value in shape.items() if key != "rope_parameters"}).save_pretrained(
        tmp_path
    )
    given = json.loads((tmp_path / CONFIG).read_text())
    newer = ("rope_parameters", "layer_types", "no_rope_layers", "_sliding_window_pattern")
    given = {key: value for key, value in given.items() if key not in newer}
    (tmp_path / CONFIG).write_text(json.dumps({**given, **OLDER[kind]}))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert largest_error(our_logits(load(tmp_path)), their_logits(theirs, torch.float32)) < 1e-5


# --------------------------------------------------------------------------- refusals

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"model_type": "bert"}, "model_type is 'bert', which is not covered"),
    ("llama", {"mlp_bias": True}, "mlp_bias is True and attention_bias False, which is not covered; expected equal"),
    ("granite", {"attention_bias": True}, "attention_bias is True and mlp_bias False, which is not covered"),
    ("llama", {"hidden_act": "relu"}, "hidden_act is 'relu', which is not covered; expected 'silu' or 'gelu'"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
    ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_parameters.rope_type is 'yarn'"),
    ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 1e4}}, "partial_rotary_factor is 0.5"),
    ("llama", {"hidden_size": "16"}, "hidden_size is '16', which is not covered; expected a positive integer"),
    ("granite", {"residual_multiplier": 0}, "residual_multiplier is 0, which is not covered"),
    ("llama", {"num_key_value_heads": 3}, "kv_heads 3 does not divide heads 4"),
    ("llama", {"vocab_size": None}, "there is no field vocab_size"),
    ("qwen3", {"attention_bias": True}, "attention_bias is True"),
    ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
    ("gemma3_text", {"layer_types": ["chunked_attention"] * 2}, "layer_types is"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
    ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before is False"),
    ("opt", {"word_embed_proj_dim": 8}, "word_embed_proj_dim is 8"),
]  # fmt: skip


def refusal(tmp_path: Path, kind: str, fields: dict[str, Any]) -> CheckpointError:
    """The error for a folder whose config.json has these fields besides."""
    if not (tmp_path / CONFIG).exists():
        make_theirs(kind).save_pretrained(tmp_path)
    (tmp_path / CONFIG).write_text(json.dumps({**json.loads((tmp_path / CONFIG).read_text()), **fields}))
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path)
    return caught.value


@pytest.mark.promise("models.families")
@pytest.mark.parametrize(("kind", "fields", "message"), REFUSED)
def test_what_is_not_covered_is_refused_by_the_name_of_its_field(kind, fields, message, tmp_path):
    error = refusal(tmp_path, kind, fields)
    assert message in error.what
    assert (error.where, bool(error.fix)) == (str(tmp_path / CONFIG), True)


@pytest.mark.promise("proof.unread")
@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}),
        ("llama", {"mlp_bias": True}),
        ("llama", {"hidden_act": "relu"}),
        ("gemma3_text", {"layer_types": ["chunked_attention"] * 2}),
        ("opt", {"word_embed_proj_dim": 8}),
    ],
)
def test_a_model_with_a_field_that_is_not_covered_is_whole_and_trains_under_transformers(kind, fields, tmp_path):
    error = refusal(tmp_path, kind, fields)
    assert "unpad.hf.attach" in error.fix
    assert f"unpad prove --hf {tmp_path}" in error.fix
    assert "copy" not in error.fix


@pytest.mark.promise("proof.unread")
def test_an_architecture_of_its_own_is_no_typing_error(tmp_path):
    for kind in ("mixtral", "mamba", "qwen3_moe", "gemma2", "mllama", "ministral", "qwen4", "bert"):
        error = refusal(tmp_path, "llama", {"model_type": kind})
        assert error.what == f"model_type is {kind!r}, which is not covered"
        assert all(known in error.fix for known in DECODERS)
        assert "unpad.hf.attach" in error.fix
    assert "unpad.hf.attach" in refusal(tmp_path, "llama", {"model_type": 7}).fix


@pytest.mark.promise("proof.unread")
@pytest.mark.parametrize("is_installed", [True, False])
def test_no_architecture_of_transformers_is_taken_for_a_typing_error(is_installed, tmp_path, monkeypatch):
    if not is_installed:
        monkeypatch.setitem(sys.modules, "transformers.models.auto.configuration_auto", None)
    for kind in names_of_transformers.keys() - FAMILIES.keys():
        with pytest.raises(CheckpointError) as caught:
            family_of({"model_type": kind}, tmp_path)
        assert "did you mean" not in caught.value.fix


@pytest.mark.promise("proof.unread")
def test_pickled_weights_become_safetensors_by_the_advice(tmp_path):
    theirs = make_theirs("llama")
    theirs.config.save_pretrained(tmp_path)
    torch.save(theirs.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pickled weights are not read") as caught:
        load(tmp_path)
    _, code = shlex.split(caught.value.fix.partition("python ")[2])
    exec(code)
    assert largest_error(our_logits(load(tmp_path)), their_logits(theirs, torch.float32)) < 1e-5


@pytest.mark.promise("models.families")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.norm.weight": None}, "model.norm.weight is missing"),
        ({"model.norm.weight": torch.ones(3)}, r"model.norm.weight has shape \(3,\), expected \(16,\)"),
        ({"model.norm.bias": torch.ones(16)}, "model.norm.bias is unknown"),
        ({"model.norm.weight": torch.ones(16, dtype=torch.int8)}, "model.norm.weight is of dtype I8"),
    ],
)
def test_tensors_that_do_not_fit_are_named(change, message, tmp_path):
    make_theirs("llama").save_pretrained(tmp_path)
    tensors = {**load_file(tmp_path / WEIGHTS), **change}
    save_file({name: value for name, value in tensors.items() if value is not None}, str(tmp_path / WEIGHTS))
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


# --------------------------------------------------------------------------- models of ours


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("llama", {"positions": "sinusoidal"}, "positions is 'sinusoidal', and a model of type llama has 'rotary'"),
        ("llama", {"norm": "layernorm"}, "norm is 'layernorm', and a model of type llama has 'rmsnorm'"),
        ("llama", {"qk_norm": True}, "attention is another one in some blocks"),
        ("mistral", {"activation": "relu"}, "activation is 'relu'; the family has 'geglu_tanh' or 'geglu' or 'swiglu'"),
        ("opt", {"norm": "layernorm", "positions": "learned", "bias": True, "activation": "relu"}, "eps is 1e-06"),
        ("llama", {"context_method": "ntk", "context_factor": 2.0}, "context_method is ('ntk', 2.0)"),
        ("gemma", {"activation": "geglu_tanh"}, "embed_scale is 1.0, and a model of type gemma has 4.0"),
    ],
)
def test_a_model_that_a_family_cannot_hold_is_refused_by_the_name_of_its_field(kind, fields, message, tmp_path):
    with pytest.raises(CheckpointError) as caught:
        save_model(tiny_model(torch.float32, **fields), tmp_path / "out", FAMILIES[kind])
    assert message in caught.value.what
    assert not (tmp_path / "out").exists()
