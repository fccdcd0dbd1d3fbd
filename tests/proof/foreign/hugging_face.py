"""Small random models of many families of transformers, and trainers for them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import datasets
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)
from trl import SFTConfig, SFTTrainer

VOCABULARY, WIDTH, HIDDEN, LAYERS, HEADS, CONTEXT = 99, 32, 48, 2, 4, 64
IGNORE = -100
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
USUAL = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    **ENDS,
}
SIZES = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, **ENDS}
SMALL = {**SIZES, "num_attention_heads": HEADS}
SHORT = {"vocab_size": VOCABULARY, "n_layer": LAYERS, "n_head": HEADS, **ENDS}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
LINEAR = {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
SSM = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}

FAMILIES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", USUAL),
    "mistral, window": ("mistral", {**USUAL, "sliding_window": 8}),
    "qwen2": ("qwen2", USUAL),
    "qwen2, tied": ("qwen2", {**USUAL, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {**USUAL, "head_dim": 16}),
    "smollm3": ("smollm3", {**USUAL, "num_hidden_layers": 4}),
    "gemma": ("gemma", {**USUAL, "head_dim": 16}),
    "gemma2": ("gemma2", {**USUAL, "head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16}),
    "gemma3": ("gemma3_text", {**USUAL, "head_dim": 16, "sliding_window": 8, "num_hidden_layers": 6}),
    "phi": ("phi", {**USUAL, "num_key_value_heads": HEADS, "partial_rotary_factor": 0.5}),
    "phi3": ("phi3", USUAL),
    "gpt2": ("gpt2", {**SHORT, "n_embd": WIDTH, "n_positions": CONTEXT}),
    "gpt_neox": ("gpt_neox", {**SMALL, "intermediate_size": HIDDEN, "max_position_embeddings": CONTEXT}),
    "opt": ("opt", {**SMALL, "ffn_dim": HIDDEN, "word_embed_proj_dim": WIDTH, "max_position_embeddings": CONTEXT}),
    "bloom": ("bloom", {**SHORT, "hidden_size": WIDTH}),
    "falcon": ("falcon", {**SMALL, "max_position_embeddings": CONTEXT, "alibi": False}),
    "olmo2": ("olmo2", USUAL),
    "olmo3": ("olmo3", {**USUAL, "sliding_window": 8, "num_hidden_layers": 4}),
    "granite": ("granite", {**USUAL, "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0}),
    "gpt_oss": (
        "gpt_oss", {**USUAL, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    ),
    "qwen3_moe": ("qwen3_moe", {**USUAL, **EXPERTS, "head_dim": 16, "num_experts": 4}),
    "mixtral": ("mixtral", {**USUAL, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "lfm2": ("lfm2", {**USUAL, "num_hidden_layers": 4, "full_attn_idxs": [1, 3], "block_auto_adjust_ff_dim": False}),
    "qwen3_next": (
        "qwen3_next", {**USUAL, **EXPERTS, **LINEAR, "num_experts": 4, "shared_expert_intermediate_size": 24},
    ),
    "qwen3_5": ("qwen3_5_text", {**USUAL, **LINEAR}),
    "mamba": ("mamba", {**SIZES, "state_size": 8}),
    "mamba2": ("mamba2", {
        **SIZES, "state_size": 8, "num_heads": 4, "head_dim": 16, "expand": 2, "n_groups": 1, "chunk_size": 8,
    }),
    "granitemoehybrid": ("granitemoehybrid", {
        **USUAL, **SSM, "layer_types": ["mamba", "attention"], "num_local_experts": 0, "num_experts_per_tok": 0,
        "mamba_expand": 2, "shared_intermediate_size": HIDDEN,
    }),
    "falcon_h1": ("falcon_h1", {**USUAL, **SSM, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8}),
}  # fmt: skip


def build(family: str, **changes: object) -> nn.Module:
    """A model with weights so large that every part shows in its logits."""
    kind, fields = FAMILIES[family]
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**fields, **changes})
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2 and "A_log" not in name:
                parameter.mul_(3)
            elif "A_log" not in name and "dt_bias" not in name and not name.endswith(".D"):
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def sequences(num: int = 8, seed: int = 5, longest: int = 24) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, longest, (num,), generator=generator).tolist()
    return [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def tokenizer(side: str = "right") -> PreTrainedTokenizerFast:
    """Words t0 to t98; t0 is padding, t2 the end."""
    made = Tokenizer(models.WordLevel({f"t{index}": index for index in range(VOCABULARY)}, unk_token="t1"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="t2", pad_token="t0", unk_token="t1", padding_side=side
    )


def dataset(given: Sequence[Sequence[int]], *, prompts: bool = True) -> datasets.Dataset:
    """Rows of token ids whose first third is a prompt."""
    labels = [[IGNORE if prompts and 3 * at < len(one) else token for at, token in enumerate(one)] for one in given]
    return datasets.Dataset.from_dict({"input_ids": [list(one) for one in given], "labels": labels})


Collate = Callable[[Sequence[Mapping[str, list[int]]]], dict[str, Tensor]]


def pad(side: str = "right") -> Collate:
    """Pads with token 0, labels with -100, as DataCollatorForSeq2Seq does."""

    def collate(examples: Sequence[Mapping[str, list[int]]]) -> dict[str, Tensor]:
        width = max(len(one["input_ids"]) for one in examples)

        def rows(parts: Sequence[Sequence[int]], fill: int) -> Tensor:
            gaps = [[fill] * (width - len(part)) for part in parts]
            pairs = zip(parts, gaps, strict=True)
            return torch.tensor([[*part, *gap] if side == "right" else [*gap, *part] for part, gap in pairs])

        ids = [one["input_ids"] for one in examples]
        labels = [one.get("labels", one["input_ids"]) for one in examples]
        masks = [[1] * len(one) for one in ids]
        return {"input_ids": rows(ids, 0), "labels": rows(labels, IGNORE), "attention_mask": rows(masks, 0)}

    return collate


def flatten(examples: Sequence[Mapping[str, list[int]]]) -> dict[str, Tensor]:
    made: dict[str, Tensor] = DataCollatorWithFlattening()(list(examples))
    return made


COMMON: dict[str, object] = {
    "report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "optim": "adamw_torch",
    "dataloader_pin_memory": False, "num_train_epochs": 1, "seed": 0, "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2, "learning_rate": 1e-2, "logging_strategy": "no",
}  # fmt: skip


def trainer(
    model: nn.Module,
    folder: Path,
    data: datasets.Dataset | None = None,
    *,
    collator: Collate | None = None,
    kind: type[Trainer] = Trainer,
    **changes: object,
) -> Trainer:
    """A Trainer with a collator."""
    args = TrainingArguments(output_dir=str(folder), **{**COMMON, **changes})
    rows = dataset(sequences()) if data is None else data
    return kind(
        model=model, args=args, train_dataset=rows, data_collator=collator or pad(), processing_class=tokenizer()
    )


def sft(model: nn.Module, folder: Path, data: datasets.Dataset | None = None, **changes: object) -> SFTTrainer:
    """An SFTTrainer of TRL in fp32."""
    fields = {**COMMON, "bf16": False, "max_length": CONTEXT, "gradient_checkpointing": False, **changes}
    args = SFTConfig(output_dir=str(folder), **fields)
    rows = dataset(sequences()) if data is None else data
    return SFTTrainer(model=model, args=args, train_dataset=rows, processing_class=tokenizer())


def quiet() -> None:
    """No progress bars and no advice in the output of tests."""
    datasets.disable_progress_bars()
    logging.disable(logging.WARNING)
