"""Small models keep the architecture of large ones."""

import json

import pytest
import torch

from unpad.errors import RecipeError, SourceError
from unpad.proof.foreign.shrink import ORDINARY, Fields, shrink
from unpad.proof.foreign.small_model import TEXT_ALONE, build_config, build_small, read_config, sample

LLAMA: Fields = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "eos_token_id": [128001, 128009],
}


def test_sizes_are_lowered_and_not_raised():
    small = shrink(LLAMA)
    assert [small[name] for name in ("hidden_size", "num_hidden_layers", "vocab_size", "eos_token_id")] == [
        64,
        2,
        128,
        2,
    ]
    tiny = {**LLAMA, "hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 1}
    assert [shrink(tiny)[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")] == [32, 80, 1]


def test_the_sequences_of_the_proof_fit_any_model():
    small = shrink({**LLAMA, "vocab_size": 65, "max_position_embeddings": 16})
    assert (small["vocab_size"], small["max_position_embeddings"]) == (128, 512)


@pytest.mark.parametrize(
    ("heads", "key_heads", "expected"),
    [(32, 8, (4, 2)), (32, 32, (4, 4)), (71, 1, (4, 1)), (9, 3, (4, 2)), (3, 3, (2, 2))],
)
def test_groups_of_heads_stay_groups(heads, key_heads, expected):
    small = shrink({**LLAMA, "num_attention_heads": heads, "num_key_value_heads": key_heads})
    assert (small["num_attention_heads"], small["num_key_value_heads"]) == expected


@pytest.mark.parametrize(("size", "expected"), [(128, 16), (256, 32), (64, 8)])
def test_a_head_size_unlike_width_over_heads_stays_so(size, expected):
    assert shrink({**LLAMA, "head_dim": size})["head_dim"] == expected


@pytest.mark.promise("hf.small-model")
def test_one_block_of_each_type_stays_in_its_order():
    types = ["sliding"] * 5 + ["full"] + ["sliding"] * 5 + ["full"]
    small = shrink(
        {**LLAMA, "num_hidden_layers": 12, "layer_types": types, "first_k_dense_replace": 3, "moe_layers": [7]}
    )
    # Dense sliding, sparse sliding, sparse full, and the one that the list names.
    assert small["layer_types"] == ["sliding", "sliding", "full", "sliding"]
    assert (small["num_hidden_layers"], small["first_k_dense_replace"], small["moe_layers"]) == (4, 1, [3])


def test_blocks_are_counted_by_their_types_where_no_field_does():
    full = {name: value for name, value in LLAMA.items() if name != "num_hidden_layers"}
    types = ["mamba", "mlp"] * 3 + ["attention", "mlp"]
    assert shrink({**full, "layers_block_type": types})["layers_block_type"] == ["mamba", "mlp", "attention"]


def test_what_is_random_in_training_or_depends_on_batching_is_off():
    full: Fields = {**LLAMA, "attention_dropout": 0.1, "router_aux_loss_coef": 0.02, "output_router_logits": True}
    small = shrink({**full, "use_cache": True, "quantization_config": {"bits": 4}})
    assert [small[name] for name in full if name not in LLAMA] == [0, 0, False]
    assert not small["use_cache"]
    assert "quantization_config" not in small


def test_special_ids_are_apart_from_those_of_the_sequences():
    small = shrink({**LLAMA, "image_token_id": 151655, "video_token_id": 151656, "pad_token_id": None})
    assert small["pad_token_id"] == 0
    assert min(small["image_token_id"], small["video_token_id"]) >= small["vocab_size"]
    assert {token for one in sample() for token in one} <= set(ORDINARY)


# Fields of each class's defaults, and what its small configuration must keep of them.
FAMILIES: dict[str, tuple[Fields, Fields]] = {
    "llama": (LLAMA, {"num_key_value_heads": 2}),
    "gpt2": ({}, {"n_embd": 64, "n_layer": 2, "n_head": 4, "resid_pdrop": 0}),
    "gpt_oss": ({}, {"layer_types": ["sliding_attention", "full_attention"], "num_local_experts": 4, "head_dim": 32}),
    "gemma3_text": ({}, {"layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 256}),
    "gemma4_text": ({}, {"layer_types": ["sliding_attention", "full_attention"]}),
    "qwen3_5_text": ({}, {"layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 16}),
    "deepseek_v3": ({}, {"qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "kv_lora_rank": 16, "n_routed_experts": 4}),
    "jamba": ({}, {"attn_layer_period": 2, "num_experts": 4}),
    "nemotron_h": (
        {"hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-"},
        {"layers_block_type": ["linear_attention", "mlp", "full_attention"]},
    ),
    "gemma3": ({"text_config": {"num_hidden_layers": 34}, "vision_config": {"hidden_size": 1152}}, {}),
    "xlnet": ({"d_model": 48, "n_head": 6, "d_head": 8}, {"d_model": 32, "n_head": 4, "d_head": 8}),
    "phi3": (
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}},
        {"num_key_value_heads": 4},
    ),
}


@pytest.mark.promise("hf.small-model")
@pytest.mark.parametrize("kind", FAMILIES)
def test_small_models_of_many_architectures_compute(kind):
    fields, kept = FAMILIES[kind]
    made = build_small(build_config(kind, fields, kind))
    assert {name: made.model.config.to_dict()[name] for name in kept} == kept
    assert sum(parameter.numel() for parameter in made.model.parameters()) < 400_000
    ids = torch.tensor([sample()[1]])
    with torch.no_grad():
        logits = made.model(input_ids=ids).logits
        changed = made.model(input_ids=ids.index_fill(1, torch.tensor([0]), 5)).logits
    assert logits.shape == (1, ids.shape[1], 128)
    assert (changed - logits)[0, -1].abs().max() > 1e-4, "the first token must be felt at the last one"
    padding = made.model.get_input_embeddings().weight[0].detach()
    assert padding.abs().max() > 0.01


def test_configurations_that_cannot_be_used_are_refused(tmp_path):
    def refusal(text: str | None) -> str:
        file = tmp_path / "config.json"
        file.unlink(missing_ok=True)
        if text is not None:
            file.write_text(text)
        with pytest.raises((SourceError, RecipeError)) as caught:
            read_config(tmp_path)
        return str(caught.value)

    assert "there is no configuration here" in refusal(None)
    assert "not JSON" in refusal("{")
    assert "no model_type" in refusal("[]")
    assert "no model_type" in refusal('{"vocab_size": 3}')
    assert "did you mean llama" in refusal('{"model_type": "lama"}')
    assert "no causal language model" in refusal('{"model_type": "clip"}')
    assert "hidden_size" in refusal('{"model_type": "llama", "hidden_size": "wide"}')
    own = {"model_type": "mine", "auto_map": {"AutoModelForCausalLM": "modeling.Mine"}}
    (tmp_path / "modeling.py").write_text("raise SystemExit('the code of the folder ran')")
    assert "code of a folder is never run" in refusal(json.dumps(own))


@pytest.mark.parametrize("infinity", ['{"__float__": "Infinity"}', "Infinity"])
def test_infinity_is_read_as_transformers_writes_it(tmp_path, infinity):
    (tmp_path / "config.json").write_text(f'{{"model_type": "mamba2", "time_step_limit": [0.0, {infinity}]}}')
    config, _ = read_config(tmp_path)
    assert list(config.time_step_limit) == [0.0, float("inf")]


def test_a_model_of_pictures_is_said_to_be_judged_by_its_text_alone(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gemma3", "vision_config": {"hidden_size": 64}}')
    assert read_config(tmp_path)[1] == (TEXT_ALONE,)


@pytest.mark.promise("hf.small-model")
def test_a_known_type_with_code_of_its_own_is_built_without_it(tmp_path):
    own = {**LLAMA, "auto_map": {"AutoConfig": "configuration.Mine", "AutoModelForCausalLM": "modeling.Mine"}}
    (tmp_path / "config.json").write_text(json.dumps(own))
    for name in ("configuration.py", "modeling.py"):
        (tmp_path / name).write_text("raise SystemExit('the code of the folder ran')")
    config, notes = read_config(tmp_path)
    assert type(build_small(config).model).__name__ == "LlamaForCausalLM"
    assert "auto_map" in notes[0]
