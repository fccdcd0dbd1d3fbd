"""A decoder of 350 M parameters on a GPU: ours against Transformers padded, flattened, and TRL packing.

    python benchmarks/gpu.py                            about eight minutes; the card should have nothing else to do
    python benchmarks/gpu.py --sides ours,padded        on a card that cannot hold every side's weights at once
    python benchmarks/gpu.py --check                    on a processor, at toy size: everything of this that it can run

All sides train the same Llama (bf16 products, fp32 weights, fused AdamW, clipping at 1) on the same sequences, with
about the same real tokens per update, and take turns in one process. The peers are driven through their trainer's own
data loader and `training_step`. Their size of a pass is theirs to choose: a row each.
Lengths are log-normal with mean 400, clipped to 16 to 4,096 tokens. Needs `pip install unpad[bench]` for the peers.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
from gpu_check import check
from gpu_measure import run, write
from gpu_sides import SIDES, Sizes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="run on a processor what it can, and measure nothing")
    parser.add_argument("--sides", default=",".join(SIDES), help="some of " + ", ".join(SIDES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=4.0, help="of a side's turn")
    parser.add_argument("--out", type=Path, help="folder for gpu.md and gpu.json; nothing is written without")
    chosen = parser.parse_args()
    asked = chosen.sides.split(",")
    if unknown := [side for side in asked if side not in SIDES]:
        parser.error(f"unknown side {unknown[0]}; there are {', '.join(SIDES)}")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is fetched
    sides = {side: SIDES[side] for side in asked}
    if chosen.check:
        lines, good = check(sides)
        print("\n".join(lines))
        sys.exit(0 if good else 1)
    if not torch.cuda.is_available():
        print("no GPU here, nothing was run; --check runs on a processor what it can", file=sys.stderr)
        sys.exit(2)
    result = run(Sizes(), torch.device("cuda"), sides, chosen.rounds, chosen.seconds)
    if chosen.out:
        write(result, chosen.out)
    print("\n".join(result.lines()))


if __name__ == "__main__":
    main()
