"""Held-out loss after training fast, against training in fp32 one sequence at a time, with the same sequences per step.

    python benchmarks/same_loss.py                 about eight minutes on 2 quiet cores
    python benchmarks/same_loss.py sayings --steps 20 --out /tmp/same_loss.md

Both sides follow the same plan: every update has the same sequences. One computes it in bf16 through the native
kernels, the other in fp32 through torch, one sequence at a time, adding up gradients. Dropout is off, as its bits
depend on the batch. The difference must stay within 0.5 %.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from workloads import CORPORA, CPU, Ours, corpus

from unpad.nn.native import library
from unpad.nn.precision_choice import choose_precision
from unpad.storage import write_atomic

HERE = Path(__file__).parent
BOUND = 0.005


def compare(name: str, data: Path, steps: int) -> tuple[str, bool]:
    """Train both sides; a row of the table, and whether the bound holds."""
    made = corpus(name, data, ("model.dropout=0", "data.holdout=0.1"))
    fast = Ours(made)
    slow = Ours(made, precision="fp32", native=False, tokens_per_micro=1)  # a micro-batch holds one sequence at least
    for side in (fast, slow):
        for _ in range(steps):
            side.step()
    losses = fast.held_out_loss(), slow.held_out_loss()
    difference = losses[0] / losses[1] - 1
    first, last = fast.losses[0], fast.losses[-1]
    cells = [name, str(steps), f"{first:.3f} to {last:.3f}", f"{losses[0]:.5f}", f"{losses[1]:.5f}"]
    return f"| {' | '.join([*cells, f'{difference:+.3%}'])} |", abs(difference) <= BOUND


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(CORPORA))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--data", type=Path, default=HERE / "../../shared/data", help="folder with zh/")
    parser.add_argument("--out", type=Path, default=HERE / "same_loss.md")
    options = parser.parse_args()
    head = ["corpus", "updates", "training loss", "held out, fast", "held out, fp32 one at a time", "difference"]
    lines = [
        "# The same loss, faster",
        "",
        f"    python benchmarks/same_loss.py {' '.join(options.names)} --steps {options.steps}",
        "",
        f"Fast is {choose_precision('auto', CPU)[0]} with {library.describe()}; both sides take the same sequences in "
        "every update.",
        "",
        f"| {' | '.join(head)} |",
        "|---" * len(head) + "|",
    ]
    held = True
    for name in options.names:
        row, good = compare(name, options.data, options.steps)
        print(row, flush=True)
        lines, held = [*lines, row], held and good
    lines += ["", f"Bound {BOUND:.1%}: {'held by all' if held else 'NOT held'}."]
    write_atomic(options.out, "\n".join(lines) + "\n")
    raise SystemExit(0 if held else 1)


if __name__ == "__main__":
    main()
