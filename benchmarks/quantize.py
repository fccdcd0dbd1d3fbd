"""Size, loss and speed of quantized weights against those of 32 and 16 bits.

    python benchmarks/quantize.py [--run RUN ...] [--rounds 8]

Runs are quantized into a folder that is deleted, and measured on their held-out data as `unpad eval` does. Steps are
those of the 512-wide decoder of `benchmarks/generation.md` with random weights, 1 or 32 prompts of 100 tokens, one
thread, in processor time: sides take turns, and times are ratios within a round. Ends with code 1 where a median misses
its gate.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from measure import spread

from unpad.data.sources.split import PARTS, Split
from unpad.evaluation.run import evaluate_run
from unpad.inference.engine import advance, prefill, running
from unpad.machine import full_processor_name
from unpad.models import build_model, model_config
from unpad.models.contract import Generates
from unpad.models.decoder import Decoder
from unpad.nn.linear import has_tiles
from unpad.nn.native import library
from unpad.run.base import hold_quantized, packed_weights, quantize_run, quantized_names, quantized_tensors

SIZES = {"width": 512, "blocks": 6, "heads": 8, "hidden": 2048, "activation": "swiglu", "context": 512, "tied": False}
VOCAB, PROMPT, STEPS = 16_000, 100, 8
# At most: share of the bytes, rise of perplexity, divergence; at least: share of likeliest tokens that stay.
LOSSES = 0.27, 0.003, 0.001, 0.99
SPEEDS = {("int8", 1): (3, 1.8), ("int8", 32): (1.3, 1.3)}  # at least, times as fast as fp32 and bf16


def num_bytes(run: Path) -> int:
    """Size of a run's weights."""
    return (run / "checkpoints" / "best" / "model.safetensors").stat().st_size


def losses(name: str) -> bool:
    """Print what a run loses; returns whether all gates hold."""
    with TemporaryDirectory() as folder:
        small = Path(folder) / "int8"
        quantize_run(name, small)
        share = num_bytes(small) / num_bytes(Path(name))
        metrics = evaluate_run(str(small), part=PARTS[Split.HOLDOUT])[0]
    before, after = metrics["original_perplexity"].value, metrics["perplexity"].value
    moved, kept = metrics["divergence"].value, metrics["likeliest_kept"].value
    size, rise, most, least = LOSSES
    fits = share <= size and after / before - 1 <= rise and moved <= most and kept >= least
    cells = f"{share:.3f} | {before:.4f} | {after / before - 1:+.2%} | {moved:.5f} | {kept:.2%}"
    print(f"| {Path(name).name} | int8 | {cells} | {'yes' if fits else 'no'} |", flush=True)
    return fits


def models() -> dict[str, tuple[Decoder, str]]:
    """The same random model with each kind of weights, and the precision that it runs in."""
    torch.manual_seed(0)
    plain = build_model(model_config(SIZES), VOCAB)
    assert isinstance(plain, Decoder)
    sides = {"fp32": (plain, "fp32")} | ({"bf16": (plain, "bf16")} if library.computes(torch.bfloat16) else {})
    small = copy.deepcopy(plain)
    tensors = quantized_tensors(plain.state_dict(), quantized_names(plain))
    hold_quantized(small, packed_weights(tensors, Path("int8")))
    sides["int8"] = small, "fp32"
    return {name: (model.eval(), precision) for name, (model, precision) in sides.items()}


class Decoding:
    """Prompts that a model has read, and then continues token by token."""

    def __init__(self, model: Generates, precision: str, num: int) -> None:
        self.model, self.precision, self.tokens = model, precision, torch.arange(num) + 5
        with running(self.model, self.precision):
            draw = torch.Generator().manual_seed(1)
            prompts = torch.randint(VOCAB, (num, PROMPT), generator=draw).tolist()
            self.cache = prefill(model, prompts, PROMPT + 400)[0]

    def seconds(self) -> Iterator[float]:
        """Processor time of each of a few steps, scores included."""
        with running(self.model, self.precision):
            for _ in range(STEPS):
                began = time.thread_time()
                self.model.logits(advance(self.model, self.cache, self.tokens))
                yield time.thread_time() - began


def speeds(num: int, rounds: int) -> bool:
    """Print how fast a step of prompts is; returns whether all gates hold."""
    sides = {name: Decoding(model, precision, num) for name, (model, precision) in models().items()}
    milliseconds, ratios = defaultdict[str, list[float]](list), defaultdict[tuple[str, str], list[float]](list)
    for number in range(rounds + 1):  # the first warms up
        taken = {name: min(sides[name].seconds()) for name in list(sides)[:: 1 if number % 2 else -1]}
        for name, seconds in taken.items() if number else ():
            milliseconds[name].append(1e3 * seconds)
            for base in taken.keys() & {"fp32", "bf16"}:
                ratios[name, base].append(taken[base] / seconds)
    good = True
    for name in sides:
        cells = [f"{spread(milliseconds[name]).median:.2f}"]
        for base in ("fp32", "bf16"):
            found = spread(ratios[name, base]) if base in sides else None
            cells.append("-" if found is None else f"{found.median:.2f} ({found.low:.2f} to {found.high:.2f})")
        gates = dict(zip(("fp32", "bf16"), SPEEDS.get((name, num), ()), strict=False))
        fits = all(spread(ratios[name, base]).median >= gate for base, gate in gates.items() if base in sides)
        good &= fits
        print(f"| {num} | {name} | {' | '.join(cells)} | {('yes' if fits else 'no') if gates else ''} |", flush=True)
    return good


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", action="append", default=[])
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tiles = "AMX" if has_tiles() else "no AMX"
    print(f"{full_processor_name()}, {tiles}; {library.describe()}; torch {torch.__version__}; one thread\n")
    good = True
    if options.run:
        print("| run | weights | size | perplexity before | its rise | divergence, nats | likeliest kept | gates |")
        print("|---|---|---|---|---|---|---|---|")
        good = all([losses(name) for name in options.run])
        print()
    print("| prompts | weights | step, ms | times as fast as fp32 | as bf16 | gates |")
    print("|---|---|---|---|---|---|")
    good &= all([speeds(num, options.rounds) for num in (1, 32)])
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
