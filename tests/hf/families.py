"""Tiny random models of transformers, and the truth about them: one sequence at a time, without a mask."""

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from torch import Tensor, nn
from torch.nn import functional as F

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of modules that transformers imports
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB, WIDTH, CONTEXT = 99, 32, 64
IGNORED = -100
SHARED = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MIXED = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
MAMBA = {"mamba_n_heads": 4, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
# Fields by name of the test; the model type is `kind` or the name.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 1},  # of most trainers in tests: qwen3 and mistral have its layers, and two of them
    "mistral": {"sliding_window": 8},
    "qwen2": {},
    "smollm3": {"num_hidden_layers": 4},
    "gemma": {"head_dim": 16},
    "phi3": {},
    "olmo2": {},
    "gpt_neox": {"attention_dropout": 0.0, "hidden_dropout": 0.0},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "mamba2": {"state_size": 8, "num_heads": 4, "head_dim": 16, "expand": 2, "n_groups": 1, "chunk_size": 8},
    "qwen3": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16},
    "gemma3": {"kind": "gemma3_text", "head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16},
    "gpt2": {"n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT, "resid_pdrop": 0.0, "attn_pdrop": 0.0}
    | {"embd_pdrop": 0.0},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": WIDTH, "dropout": 0.0},
    "granite": {"attention_multiplier": 0.03, "logits_scaling": 8.0, "embedding_multiplier": 12.0},
    "gpt_oss": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}
    | {"router_aux_loss_coef": 0.0},
    "deepseek_v3": {"num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2}
    | {"moe_intermediate_size": 16}
    | {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16}
    | {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16},
    "llama4": {"kind": "llama4_text", "head_dim": 16, "attention_chunk_size": 8, "num_local_experts": 2}
    | {"num_experts_per_tok": 1, "intermediate_size_mlp": 48, "num_hidden_layers": 4},
    "lfm2": {"num_hidden_layers": 2, "full_attn_idxs": [1], "block_auto_adjust_ff_dim": False},
    "qwen3_5": {"kind": "qwen3_5_text", "head_dim": 16, "num_hidden_layers": 4} | MIXED,
    "mamba": {"state_size": 8},
    "falcon_h1": {"mamba_d_ssm": WIDTH, "mamba_d_head": 8} | MAMBA,
    "granite4h": {"kind": "granitemoehybrid", "layer_types": ["mamba", "attention"], "num_local_experts": 0}
    | {"num_experts_per_tok": 0, "mamba_d_head": 16, "mamba_expand": 2, "shared_intermediate_size": 48}
    | MAMBA,
    "gptj": {"n_head": 4, "n_layer": 2, "n_embd": WIDTH, "n_positions": CONTEXT, "rotary_dim": 4, "resid_pdrop": 0.0}
    | {"embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "mpt": {"n_heads": 4, "n_layers": 2, "d_model": WIDTH, "max_seq_len": CONTEXT},
    "bloom": {"n_head": 4, "n_layer": 2, "hidden_dropout": 0.0, "attention_dropout": 0.0},
}  # fmt: skip


def make_model(name: str, attention: str | None = None, **changes: Any) -> PreTrainedModel:
    """A model of a family in fp32 and train mode, its weights so large that every part matters."""
    fields = {**SHARED, **FAMILIES[name], **changes}
    config = AutoConfig.for_model(fields.pop("kind", name), **fields)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if weight.dim() >= 2 and "A_log" not in key:
                weight.mul_(3)
            elif weight.dim() == 1 and not key.endswith(("A_log", "dt_bias", ".D")):
                weight.add_(0.2 * torch.randn_like(weight))
    if attention is not None:
        model.set_attn_implementation(attention)
    return model.train()


def make_sequences(num: int = 9, seed: int = 1, low: int = 3, high: int = 40) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(low, high, (num,), generator=generator).tolist()
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def make_rows(sequences: Sequence[Sequence[int]], seed: int = 3) -> list[dict[str, list[int]]]:
    """Rows of a dataset whose prompts, of random lengths, have no loss."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for sequence in sequences:
        prompt = int(torch.randint(0, len(sequence), (), generator=generator))
        rows.append({"input_ids": list(sequence), "labels": [IGNORED] * prompt + list(sequence)[prompt:]})
    return rows


def targets_of(rows: Iterable[Mapping[str, Sequence[int]]]) -> int:
    return sum(sum(label != IGNORED for label in row["labels"][1:]) for row in rows)


def truth(model: nn.Module, rows: Sequence[Mapping[str, Sequence[int]]]) -> tuple[float, dict[str, Tensor]]:
    """Mean loss over targets, and its gradient, one sequence at a time."""
    model.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    count = targets_of(rows)
    for row in rows:
        ids, labels = torch.tensor([row["input_ids"]]), torch.tensor(row["labels"])[1:]
        if bool((labels != IGNORED).any()):
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
            loss = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum") / count
            loss.backward()
            total += loss.detach()
    return float(total), take_gradient(model)


def take_gradient(model: nn.Module) -> dict[str, Tensor]:
    """The gradient by name, which is cleared."""
    gradient = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return gradient


def distance(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """Norm of the difference over the norm of `wanted`."""
    assert got.keys() == wanted.keys(), got.keys() ^ wanted.keys()
    gap = sum(float((got[name] - wanted[name]).double().square().sum()) for name in wanted)
    return (gap / sum(float(x.double().square().sum()) for x in wanted.values())) ** 0.5
