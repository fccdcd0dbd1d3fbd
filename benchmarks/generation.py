"""Tokens per second of greedy generation, ours beside `transformers.generate`, for one prompt and for 32 ragged ones.

    pip install transformers
    python benchmarks/generation.py [--rounds 7] [--new-tokens 128] [--threads 2]

Both sides hold the same random weights (rmsnorm, swiglu, rotary, untied head; 512 wide, 6 blocks, 8 heads, 2,048
hidden, 16,000 tokens, context 1,024) and continue the same prompts by the same number of tokens; transformers gets
ragged prompts as it wants them, padded on the left with an attention mask. Everything counts from token ids to token
ids, prefill included.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from llama import as_llama
from measure import Contender, Work, describe_machine, measure_rounds, spread
from torch import Tensor

from unpad.batching.batch import from_sequences
from unpad.inference.generate import Continuing
from unpad.models import build_model, model_config
from unpad.models.decoder import Decoder
from unpad.nn.native import library
from unpad.recipes.training import GenerateSettings

VOCAB, CONTEXT, NUM_PROMPTS = 16_000, 1024, 32
SIZES = {
    "norm": "rmsnorm",
    "activation": "swiglu",
    "positions": "rotary",
    "tied": False,
    "width": 512,
    "blocks": 6,
    "heads": 8,
    "hidden": 2048,
    "context": CONTEXT,
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Prompts = Sequence[Sequence[int]]
Continue = Callable[[Prompts, int], list[list[int]]]


def make_prompts(seed: int = 0) -> list[list[int]]:
    """Random tokens; lengths log-normal, 4 to 400, half of them below 60."""
    draw = np.random.default_rng(seed)
    lengths = np.clip(draw.lognormal(np.log(60), 0.8, NUM_PROMPTS).astype(int), 4, 400)
    return [draw.integers(0, VOCAB, length).tolist() for length in lengths]


def make_ours() -> Decoder:
    torch.manual_seed(0)
    model = build_model(model_config(SIZES), VOCAB)
    assert isinstance(model, Decoder)
    return model.eval()


def make_peer(ours: Decoder, dtype: torch.dtype) -> Any:
    """A Llama of transformers with our weights, which never ends a text by itself."""
    model = as_llama(ours, max_position_embeddings=CONTEXT)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.to(dtype).eval()


def our_side(model: Decoder, precision: str) -> Continue:
    def run(prompts: Prompts, num_new: int) -> list[list[int]]:
        settings = GenerateSettings(max_new_tokens=num_new, temperature=0.0)
        return [ids for ids, _ in Continuing(model, settings, [-1], precision=precision).all(prompts)]

    return run


def peer_side(model: Any) -> Continue:
    def run(prompts: Prompts, num_new: int) -> list[list[int]]:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        out = model.generate(ids, attention_mask=mask, max_new_tokens=num_new, do_sample=False)
        rows: list[list[int]] = out[:, longest:].tolist()
        return rows

    return run


def side(run: Continue, prompts: Prompts, num_new: int) -> Contender:
    def step() -> Work:
        return Work(sum(map(len, run(prompts, num_new))), 0)

    return Contender(step)


# --------------------------------------------------------------------------- the same tokens


def regret(model: Decoder, prompts: Prompts, continued: list[list[int]]) -> Tensor:
    """Distance of each chosen token's score below the best one, per token, in standard deviations of its scores.

    Scores come from the forward pass without a cache, in fp32, through torch.
    """
    gaps = []
    with torch.inference_mode(), library.switched_off():
        for prompt, ids in zip(prompts, continued, strict=True):
            hidden = model(from_sequences([[*prompt, *ids]]))[len(prompt) - 1 :]
            logits = model.logits(hidden)  # (num_new, VOCAB)
            chosen = logits.gather(1, torch.tensor(ids)[:, None])[:, 0]
            gaps.append((logits.amax(1) - chosen) / logits.std(1))
    return torch.cat(gaps)


def check(model: Decoder, runs: dict[str, Continue], prompts: Prompts, num_new: int) -> dict[str, dict[str, float]]:
    """Per side: share of prompts continued as the other fp32 side does, and the largest regret of a token."""
    continued = {name: run(prompts, num_new) for name, run in runs.items()}
    report = {}
    for name, texts in continued.items():
        base = continued["transformers fp32" if name.startswith("unpad") else "unpad fp32"]
        same = sum(a == b for a, b in zip(texts, base, strict=True)) / len(prompts)
        report[name] = {"same": same, "regret": float(regret(model, prompts, texts).max())}
    with library.switched_off():
        slow = runs["unpad bf16"](prompts, num_new)
    report["unpad bf16, torch path"] = {
        "same": sum(a == b for a, b in zip(slow, continued["unpad bf16"], strict=True)) / len(prompts),
        "regret": float(regret(model, prompts, slow).max()),
    }
    return report


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    ours, prompts = make_ours(), make_prompts()
    runs = {f"unpad {precision}": our_side(ours, precision) for precision in DTYPES}
    runs |= {f"transformers {name}": peer_side(make_peer(ours, dtype)) for name, dtype in DTYPES.items()}
    print(json.dumps({**describe_machine(["transformers"]), "kernels": library.describe()}, indent=2))
    for name, found in check(ours, runs, prompts, options.new_tokens).items():
        print(f"{name}: {found['same']:.0%} of prompts as compared, largest regret {found['regret']:.4f}", flush=True)
    for num in (1, NUM_PROMPTS):
        sides = {name: side(run, prompts[:num], options.new_tokens) for name, run in runs.items()}
        rounds = measure_rounds(sides, options.rounds, seconds=0, warm_steps=1, report=lambda x: print(x, flush=True))
        print(f"\n| {num} prompts | tokens/s | ratio to transformers fp32 | ratio to transformers bf16 |")
        print("|---|---|---|---|")
        for name in sides:
            cells = [spread(rounds.rates(name))]
            cells += [spread(rounds.ratios(name, f"transformers {precision}")) for precision in DTYPES]
            texts = (f"{c.median:.4g} ({c.low:.4g} to {c.high:.4g})" for c in cells)
            print(f"| {name} | {' | '.join(texts)} |", flush=True)


if __name__ == "__main__":
    main()
