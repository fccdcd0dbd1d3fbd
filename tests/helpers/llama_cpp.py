"""What llama.cpp computes from a GGUF file, by the published definition of each architecture; written for tests alone.

Like llama.cpp it refuses a file with a tensor that the architecture does not read, or without one that it needs, and
takes fields that are missing to have llama.cpp's defaults.
"""

import math
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor
from torch.nn import functional as F

# Architectures that turn channels 2i and 2i + 1 by one angle; the others turn i and i + head_dim / 2.
NEIGHBOURS = ("llama", "smollm3")
GELU = ("gemma", "gemma3", "gpt2")


class File:
    """A GGUF file: metadata, and tensors in fp64 that are counted as they are read."""

    def __init__(self, path: Path) -> None:
        reader = gguf.GGUFReader(path)
        self.fields: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
        self.architecture: str = self.fields["general.architecture"]
        self.types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
        self.tensors = {
            tensor.name: torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy()).double()
            for tensor in reader.tensors
        }
        self.read: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        return self.fields.get(f"{self.architecture}.{name}", default)

    def need(self, name: str) -> Any:
        return self.fields[f"{self.architecture}.{name}"]

    def maybe(self, name: str) -> Tensor | None:
        self.read.add(name)
        return self.tensors.get(name)

    def tensor(self, name: str) -> Tensor:
        found = self.maybe(name)
        assert found is not None, f"{self.architecture} needs {name}"
        return found

    def linear(self, x: Tensor, name: str, bias: bool = False) -> Tensor:
        """A product with its bias, which must be there if `bias`, and may not in architectures that read none."""
        reads = bias or self.architecture == "llama" or name.split(".")[-1] in ("attn_q", "attn_k", "attn_v")
        shift = self.tensor(f"{name}.bias") if bias else self.maybe(f"{name}.bias") if reads else None
        return F.linear(x, self.tensor(f"{name}.weight"), shift)


@torch.no_grad()
def logits(path: Path, ids: list[int]) -> Tensor:
    """Logits of one sequence, (len(ids), vocabulary) fp64."""
    file = File(path)
    name = file.architecture
    x = F.embedding(torch.tensor(ids), file.tensor("token_embd.weight"))
    if name in ("gemma", "gemma3"):
        x = x * math.sqrt(file.need("embedding_length"))
    if name == "gpt2":
        table = file.tensor("position_embd.weight")
        assert len(table) == file.need("context_length")
        x = x + table[: len(ids)]
    for index in range(file.need("block_count")):
        part = f"blk.{index}."
        y = _attention(file, index, _norm(file, x, f"{part}attn_norm"))
        x = x + (_norm(file, y, f"{part}post_attention_norm") if name == "gemma3" else y)
        y = _feed_forward(file, part, _norm(file, x, f"{part}ffn_norm"))
        x = x + (_norm(file, y, f"{part}post_ffw_norm") if name == "gemma3" else y)
    x = _norm(file, x, "output_norm")
    head = None if name == "gemma" else file.maybe("output.weight")
    assert file.read >= set(file.tensors), f"{name} does not read {set(file.tensors) - file.read}"
    return F.linear(x, file.tensor("token_embd.weight") if head is None else head)


def _norm(file: File, x: Tensor, name: str) -> Tensor:
    weight = file.tensor(f"{name}.weight")
    if file.architecture == "gpt2":
        return F.layer_norm(
            x, weight.shape, weight, file.tensor(f"{name}.bias"), file.need("attention.layer_norm_epsilon")
        )
    return F.rms_norm(x, weight.shape, weight, file.need("attention.layer_norm_rms_epsilon"))


def _feed_forward(file: File, part: str, x: Tensor) -> Tensor:
    biased = file.architecture == "gpt2"
    up = file.linear(x, f"{part}ffn_up", biased)
    if biased:
        return file.linear(F.gelu(up, approximate="tanh"), f"{part}ffn_down", biased)
    gate = file.linear(x, f"{part}ffn_gate")
    gate = F.gelu(gate, approximate="tanh") if file.architecture in GELU else F.silu(gate)
    return file.linear(gate * up, f"{part}ffn_down")


def _attention(file: File, index: int, x: Tensor) -> Tensor:
    name, part = file.architecture, f"blk.{index}."
    width, heads = file.need("embedding_length"), file.need("attention.head_count")
    kv_heads = file.get("attention.head_count_kv", heads)
    head_dim = file.get("attention.key_length", width // heads)
    if name == "gpt2":
        sizes = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
        q, k, v = file.linear(x, f"{part}attn_qkv", True).split(sizes, -1)
    else:
        q, k, v = (file.linear(x, f"{part}attn_{which}") for which in "qkv")
    q, k, v = (some.unflatten(-1, (-1, head_dim)).transpose(0, 1) for some in (q, k, v))  # (heads, tokens, head_dim)
    if name in ("qwen3", "gemma3"):
        q, k = _norm(file, q, f"{part}attn_q_norm"), _norm(file, k, f"{part}attn_k_norm")
    window = file.get("attention.sliding_window", 0) if name == "gemma3" else 0
    slides = bool(window) and file.get("attention.sliding_window_pattern")[index]
    if name != "gpt2" and not (name == "smollm3" and index % 4 == 3):
        q, k = _turned(file, q, slides), _turned(file, k, slides)
    scale = head_dim**-0.5
    if name == "gemma3" and file.need("block_count") == 62:
        scale = (width // heads) ** -0.5
    tokens = torch.arange(x.shape[0])
    seen = tokens[:, None] >= tokens[None, :]
    if slides:
        seen &= tokens[:, None] - tokens[None, :] < window
    groups = heads // kv_heads
    k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
    scores = (q @ k.transpose(1, 2) * scale).masked_fill(~seen, -math.inf)
    y = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
    return file.linear(y, f"{part}attn_output", name == "gpt2")


def _turned(file: File, x: Tensor, slides: bool) -> Tensor:
    head_dim = x.shape[-1]
    assert file.need("rope.dimension_count") == head_dim
    base = file.get("rope.freq_base_swa", 10000.0) if slides else file.get("rope.freq_base", 10000.0)
    frequencies = base ** (-torch.arange(0, head_dim, 2).double() / head_dim)
    if file.get("rope.scaling.type") == "linear" and not slides:
        frequencies = frequencies / file.need("rope.scaling.factor")
    if file.architecture == "llama" and (divisors := file.maybe("rope_freqs.weight")) is not None:
        frequencies = frequencies / divisors
    angles = torch.arange(x.shape[1]).double()[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    if file.architecture in NEIGHBOURS:
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)
