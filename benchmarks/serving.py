"""Milliseconds a token of `unpad serve` by its own engine and by llama.cpp, two sizes of a model, in one run.

    python benchmarks/serving.py --rounds 3

Models have random weights; prompts of 4 to 400 numbers are read by no request before, and replies have 32 tokens. The
servers of a model stand beside each other and take turns, one thread each. A token costs the time of all its clients
divided by the tokens of all: the clock's, and in brackets the server's processor time, which others do not change.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import torch
from measure import load_average
from serve_measures import loads
from serve_sides import SIZES, SPECIAL, make_run, ours
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from unpad.machine import full_processor_name

OUT = Path(__file__).with_suffix(".md")
CLIENTS = (1, 8, 32)
MODELS = {  # parameters, tokens of the vocabulary and sizes
    "2 M": (2_000, SIZES | {"width": 160, "blocks": 4, "heads": 4, "hidden": 480}),
    "100 M": (8_000, SIZES | {"width": 768, "blocks": 12, "heads": 12, "hidden": 2048}),
}
LLAMA = ("--engine", "llama.cpp", "--weights")


def spelled_numbers(size: int) -> Tokenizer:
    """A byte-level BPE of numbers between spaces, which llama.cpp reads."""
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=list(SPECIAL), initial_alphabet=alphabet)
    library.train_from_iterator([" ".join(map(str, range(16_000)))], trainer)
    return library


def measure(folder: Path, name: str, rounds: int) -> list[str]:
    """Lines of the table for one model."""
    vocab, sizes = MODELS[name]
    folder.mkdir()
    run = make_run(folder, spelled_numbers(vocab), sizes)
    small = folder / "int8"
    command = [sys.executable, "-m", "unpad", "export", str(run), str(small), "--int8"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    starts = {
        "ours, fp32": (run, []), "ours, int8": (small, []), "llama.cpp, f32": (run, [*LLAMA, "f32"]),
        "llama.cpp, q8_0": (run, [*LLAMA, "q8_0"]),
    }  # fmt: skip
    with ExitStack() as stack:
        sides = {}
        for number, (side, (one, options)) in enumerate(starts.items()):
            server = ours(one, folder / f"{number}.log", 1, "--rows", "32", *options)
            sides[side], _ = stack.enter_context(server)
        found = asyncio.run(loads(sides, CLIENTS, rounds))
    lines = []
    for side in sides:
        cells = [
            f"{median(1e3 / one.rate(False) for one in found[side, num]):.2f} "
            f"({median(1e3 / one.rate(True) for one in found[side, num]):.2f})"
            for num in CLIENTS
        ]
        lines.append(f"| {name} | {side} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    before = load_average()
    with tempfile.TemporaryDirectory(prefix="unpad-serving-") as scratch:
        rows = [line for name in MODELS for line in measure(Path(scratch, name.replace(" ", "")), name, rounds)]
    page = [
        "# Two engines", "", f"    python benchmarks/serving.py --rounds {rounds}", "",
        f"Milliseconds a token, in brackets of processor time; {full_processor_name()}, one thread a server, torch "
        f"{torch.__version__}; load {before:.1f} before. Medians of {rounds} rounds.", "",
        "| parameters | engine | 1 client | 8 clients | 32 clients |", "|---|---|---|---|---|", *rows,
    ]  # fmt: skip
    OUT.write_text("\n".join(page) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
