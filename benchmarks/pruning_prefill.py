"""Savings of hard pruning in reading prompts: images of 128 pixels in models of the packaged size, untrained.

    python benchmarks/pruning_prefill.py [--blocks 3 6 12] [--layers -1 0] [--keep 0.25] [--rounds 25]
    python benchmarks/pruning_prefill.py --side 32 64 96 128 --blocks 6    one prompt, a square image of such a side

Model, tower and heads are those of `recipes/vqa_prune.yaml`, the language model with as many blocks as asked for. A
prompt has an image of up to 256 patches of 8 and a question of 6 to 22 tokens, and in a batch of 8 all have unequal
numbers of both. Both sides read the same prompts in turn, on one thread. What is counted is the processor time of that
thread, so that other programs disturb little.
"""

from __future__ import annotations

import argparse
import time
from itertools import product
from typing import Any

import numpy as np
import torch

from unpad.batching.batch import RaggedBatch
from unpad.data.preprocess import Vocabulary, preprocess
from unpad.inference.loaded import generation_precision
from unpad.inference.steps import prefill
from unpad.models import build_model, model_config
from unpad.nn.block import BEFORE
from unpad.nn.linear import independent_rows, keep_copies
from unpad.nn.precision import autocast
from unpad.recipes.file import load_recipe
from unpad.trials.bench.measure import spread

VOCAB, IMAGE = 1000, 999
GRIDS = [(16, 16), (8, 16), (12, 12), (16, 10), (16, 16), (6, 9), (16, 14), (10, 10)]
METHODS = ("learned", "attention", "uniform")


def prompts(grids: list[tuple[int, int]], patch: int) -> RaggedBatch:
    """A prompt for an image of each of these rows and columns of patches; pixels are noise."""
    rng = np.random.default_rng(0)
    images = [
        [(rng.standard_normal((rows * columns, 3 * patch**2)).astype(np.float32), (rows, columns))]
        for rows, columns in grids
    ]
    texts = [
        "1 2 <image> " + " ".join(str(3 + 7 * i % 50) for i in range(4 + 5 * row % 17)) for row in range(len(grids))
    ]

    def encode(text: str) -> list[int]:
        return [IMAGE if word == "<image>" else int(word) for word in text.split()]

    return preprocess(Vocabulary(encode, VOCAB, IMAGE), images, texts).batch


def choices(sides: list[int] | None, patch: int) -> list[list[tuple[int, int]]]:
    """The images of every line: one alone and all eight, or one square of each size."""
    return [GRIDS[:1], GRIDS] if sides is None else [[(side // patch, side // patch)] for side in sides]


def pruned(blocks: int, layer: int, method: str, keep: float) -> Any:
    section = dict(load_recipe("vqa_prune", []).model)
    fields = {"layers": [layer], "method": method, "keep": keep}
    if method == "learned":
        fields = {**section["prune"], **fields}
    language = {**section["language"], "blocks": blocks}
    torch.manual_seed(0)
    return build_model(model_config({**section, "language": language, "prune": fields}), VOCAB).eval()


def measure(model: Any, batch: RaggedBatch, rounds: int, times: int = 3) -> dict[str, list[float]]:
    """Processor seconds of one reading in every round; the first round warms up."""
    most = batch.layout.max_seqlen + 16  # type: ignore[union-attr]
    found: dict[str, list[float]] = {"origin": [], "hard": []}
    for _ in range(rounds + 1):
        for mode, seconds in found.items():
            model.mode = mode
            began = time.thread_time()
            for _ in range(times):
                prefill(model, batch, most)
            seconds.append((time.thread_time() - began) / times)
    return {mode: seconds[1:] for mode, seconds in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, nargs="+", default=[3], help="of the language model; the recipe has 3")
    parser.add_argument(
        "--layers",
        type=int,
        nargs="+",
        default=[-1, 0],
        help="blocks after which tokens are removed; -1 before the first",
    )
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--keep", type=float, default=0.25)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--side", type=int, nargs="+", help="pixels; one prompt of each, in place of 1 and 8 prompts")
    options = parser.parse_args()
    torch.set_num_threads(1)
    precision = generation_precision(load_recipe("vqa_prune", []).generate)
    print(f"{precision}, {options.keep:g} kept. All tokens over pruned: above 1 pruning is faster.")
    head = f"{'blocks':<8}{'after':<7}{'method':<11}{'prompts':>7}{'patches':>9}{'all, ms':>9}{'pruned':>8}{'ratio':>7}"
    print(f"{head}  quartiles")
    for blocks, layer, method in product(options.blocks, options.layers, options.methods):
        if method == "attention" and layer == BEFORE:
            continue  # nothing has attended yet
        model = pruned(blocks, layer, method, options.keep)
        with torch.inference_mode(), autocast(precision, torch.device("cpu")), keep_copies(), independent_rows():
            for grids in choices(options.side, model.config.patch):
                found = measure(model, prompts(grids, model.config.patch), options.rounds)
                whole, less = (spread([1e3 * one for one in seconds]).median for seconds in found.values())
                ratio = spread([a / b for a, b in zip(found["origin"], found["hard"], strict=True)])
                patches = sum(rows * columns for rows, columns in grids)
                print(
                    f"{blocks:<8}{layer:<7}{method:<11}{len(grids):>7}{patches:>9}"
                    f"{whole:>9.2f}{less:>8.2f}{ratio.median:>7.2f}  {ratio.low:.2f} to {ratio.high:.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
