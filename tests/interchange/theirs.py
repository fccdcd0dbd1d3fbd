"""Small models of transformers, and their logits beside ours."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tests.conftest import random_sequences, tiny_model
from tests.helpers.chat_folder import CHATML, byte_level
from unpad.batching.batch import from_sequences
from unpad.interchange.families import FAMILIES, family_of
from unpad.interchange.folder import CONFIG, load_model, save_model
from unpad.models.decoder import Decoder

transformers = pytest.importorskip("transformers")

VOCAB = 50
LENGTHS = [5, 1, 23, 12]
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 6, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
OWN_SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "opt": {"ffn_dim": 24, "word_embed_proj_dim": 16},
}


def tiny_folder(folder: Path) -> Path:
    """A folder of a tiny Llama of ours, with its tokenizer and a chat template."""
    library = byte_level(["what is one", "it is two"])
    about = {"eos_token": "<|im_end|>", "chat_template": CHATML}
    files = {"tokenizer.json": json.loads(library.to_str()), "tokenizer_config.json": about}
    model = tiny_model(torch.float32, context=32, vocab_size=library.get_vocab_size())
    save_model(model, folder, FAMILIES["llama"], files)
    return folder


class InFp64(TorchFunctionMode):
    """Code that asks for fp32, as norms and angles of transformers do, gets fp64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def wide(value: object) -> object:
            return torch.float64 if value is torch.float32 else value

        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*map(wide, args), **{key: wide(value) for key, value in (kwargs or {}).items()})


def in_precision(dtype: torch.dtype) -> Any:
    return InFp64() if dtype == torch.float64 else nullcontext()


def make_theirs(kind: str, dtype: torch.dtype = torch.float32, **fields: Any) -> nn.Module:
    """A small random model of transformers."""
    torch.manual_seed(0)
    sizes = {**SIZES, **OWN_SIZES.get(kind, {}), **fields}
    with in_precision(dtype):
        config = transformers.AutoConfig.for_model(kind, **sizes)
        model = transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.2)
    return model


@torch.no_grad()
def their_logits(model: nn.Module, dtype: torch.dtype) -> list[Tensor]:
    with in_precision(dtype):
        return [model(input_ids=torch.tensor([ids])).logits[0] for ids in random_sequences(LENGTHS)]


@torch.no_grad()
def our_logits(model: Decoder) -> list[Tensor]:
    batch = from_sequences([[*ids, 0] for ids in random_sequences(LENGTHS)])
    return list(model.logits(model(batch)).split(LENGTHS))


def largest_error(found: list[Tensor], expected: list[Tensor]) -> float:
    pairs = zip(found, expected, strict=True)
    return max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs)


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    given = json.loads((folder / CONFIG).read_text())
    return load_model(folder, family_of(given, folder / CONFIG), given, dtype)


def their_reply(folder: Path, question: str, max_new_tokens: int = 12) -> list[int]:
    """Ids of a greedy reply by transformers, without those that stop."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]
    # Rows that are no token are never said here.
    banned = [[id] for id in range(len(tokenizer), model.config.vocab_size)]
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_new_tokens, bad_words_ids=banned
    )
    stops = set(model.generation_config.eos_token_id)
    return [id for id in out[0, ids.shape[1] :].tolist() if id not in stops]


def text_of(folder: Path, ids: list[int]) -> str:
    return str(transformers.AutoTokenizer.from_pretrained(folder).decode(ids, skip_special_tokens=True))
