"""A decoder of 350 M parameters on a GPU: ours against Transformers padded, flattened, and TRL packing.

    python benchmarks/gpu.py                            about eight minutes; the card should have nothing else to do
    python benchmarks/gpu.py --sides ours,padded        on a card that cannot hold every side's weights at once
    python benchmarks/gpu.py --toy --rounds 2           on a processor, every side at toy size: to see that it runs

All sides train the same Llama (bf16 products, fp32 weights, fused AdamW, clipping at 1) on the same sequences, with
about the same real tokens per update, and take turns in one process. The peers are driven through their trainer's own
data loader and `training_step`. Their size of a pass is theirs to choose: a row each.
Lengths are log-normal with mean 400, clipped to 16 to 4,096 tokens. Needs `pip install unpad[bench]` for the peers.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import measure
import torch
from gpu_sides import SIDES, Make, Side, Sizes, attention_name, missing_packages, ours_config
from measure import Work, spread

from unpad.errors import OutOfMemoryError
from unpad.models.cost import reading_operations, sizes_of
from unpad.nn.native import library
from unpad.storage import make_folder, write_atomic

TOY = Sizes(
    width=32, blocks=2, heads=2, hidden=64, vocabulary=200, mean=20, sigma=0.6, shortest=4, longest=64, sequences=16,
    batch=4, tokens_per_update=320, rate=3e-3,
)  # fmt: skip
# Dense bf16 with fp32 sums, TFLOP/s, from the vendors' data sheets; figures "with sparsity" are halved.
# A longer name comes before a shorter one that it begins with.
PEAKS = {
    "B200": (2250.0, "NVIDIA Blackwell architecture brief, HGX B200"),
    "H200 NVL": (835.5, "NVIDIA H200 data sheet"),
    "H200": (989.5, "NVIDIA H200 data sheet"),
    "GH200": (989.5, "NVIDIA GH200 data sheet"),
    "H100 PCIe": (756.5, "NVIDIA H100 data sheet"),
    "H100 NVL": (835.5, "NVIDIA H100 data sheet"),
    "H100": (989.5, "NVIDIA H100 data sheet"),
    "A100": (312.0, "NVIDIA A100 data sheet"),
    "A40": (149.7, "NVIDIA A40 data sheet"),
    "A30": (165.0, "NVIDIA A30 data sheet"),
    "L40S": (362.0, "NVIDIA L40S data sheet"),
    "L4": (121.0, "NVIDIA L4 data sheet"),
    "RTX 4090": (165.2, "NVIDIA Ada GPU architecture white paper"),
    "RTX 3090": (71.0, "NVIDIA Ampere GA102 GPU architecture white paper"),
}
WARM_UPDATES = 5  # compiling included


def measured_side(side: Side, sizes: Sizes) -> measure.Contender:
    counted = sizes_of(ours_config(sizes), sizes.vocabulary)

    def step() -> Work:
        lengths = side.update().tolist()
        return Work(sum(lengths), 3 * reading_operations(counted, [lengths] * counted.blocks, sum(lengths)))

    return measure.Contender(step)


@dataclass(frozen=True)
class Result:
    """All that was measured.

    Args:
        peak, source: operations per second of the card by its data sheet, None where it is not known.
        memory: per side, bytes of weights and optimizer and the most that an update added to them; None on a processor.
        not_run: name of a side -> why.
    """

    sizes: Sizes
    parameters: int
    machine: dict[str, Any]
    attention: str
    rounds: measure.Rounds
    peak: float | None
    source: str
    memory: dict[str, int | None]
    not_run: dict[str, str]

    def lines(self) -> list[str]:
        """The table as Markdown."""
        measured = max(self.rounds.ceilings)
        sheet = f"{self.peak / 1e12:,.1f} TFLOP/s ({self.source})" if self.peak else "not in the table of this script"
        packages = ", ".join(f"{name} {version}" for name, version in self.machine["packages"].items() if version)
        lines = [
            f"# {self.parameters / 1e6:,.0f} M parameters on {self.machine['gpu'] or self.machine['processor']}",
            "",
            f"Mean length {self.sizes.lengths().mean():.0f} of at most {self.sizes.longest:,}, about "
            f"{self.sizes.tokens_per_update:,} real tokens per update; torch {self.machine['torch']}, "
            f"{packages}; Transformers' attention: {self.attention}.",
            f"Peak by data sheet: {sheet}. Peak measured here: {measured / 1e12:,.1f} TFLOP/s, a bf16 product.",
            f"Medians and quartiles of {len(next(iter(self.rounds.turns.values())))} rounds in which all take turns.",
            "",
            "| side | real tokens/s | quartiles | times the padded | of data sheet | of measured peak | memory |",
            "|---|---|---|---|---|---|---|",
            *map(self._row, self.rounds.turns),
        ]
        names = [SIDES[side][0] for side in ("ours", "compiled")]
        if all(name in self.rounds.turns for name in names):
            gain = spread(self.rounds.ratios(names[1], names[0]))
            kept = "kept" if gain.low > 1 else "not kept"
            lines += [
                "",
                f"Compiled blocks against ours as it is: {gain.median:.2f} ({gain.low:.2f} to {gain.high:.2f}),",
            ]
            lines[-1] += f" {kept}: the lower quartile must win."
        lines += ["", *(f"Not run: {side}: {why}" for side, why in self.not_run.items())]
        return lines

    def _row(self, name: str) -> str:
        rate, base = spread(self.rounds.rates(name)), SIDES["padded"][0]
        times = f"{spread(self.rounds.ratios(name, base)).median:.2f}" if base in self.rounds.turns else "-"
        share = spread(self.rounds.shares(name)).median
        of_sheet = f"{share * max(self.rounds.ceilings) / self.peak:.1%}" if self.peak else "-"
        used = self.memory[name]
        memory = f"{used / 2**30:,.1f} GiB" if used is not None else "-"
        quartiles = f"{rate.low:,.0f} to {rate.high:,.0f}"
        return f"| {name} | {rate.median:,.0f} | {quartiles} | {times} | {of_sheet} | {share:.1%} | {memory} |"


def peak_of(name: str) -> tuple[float | None, str]:
    """Operations per second by data sheet, and which; (None, "") for a card that is not in the table."""
    for card, (tera, source) in PEAKS.items():
        if re.search(rf"\b{card}\b(?! (Laptop|D\b))", name):  # whole words: an RTX A4000 is no A40
            return tera * 1e12, source
    return None, ""


def memory_of(side: Side, device: torch.device) -> int | None:
    """Bytes of a side's weights and optimizer, and what an update adds at its peak."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    for _ in range(8):  # with long batches among them
        side.update()
    state = [value for values in side.optimizer.state.values() for value in values.values() if torch.is_tensor(value)]
    kept = sum(tensor.numel() * tensor.element_size() for tensor in [*side.model.parameters(), *state])
    return int(kept) + torch.cuda.max_memory_allocated(device) - before


def run(
    sizes: Sizes,
    device: torch.device,
    asked: Mapping[str, tuple[str, Make]],
    rounds: int,
    seconds: float,
) -> Result:
    """Build the sides that can be built, warm them, and measure them; `asked` has some of `SIDES`."""
    sides: dict[str, Side] = {}
    not_run, memory = {}, {}
    for key, (name, make) in asked.items():
        if missing := missing_packages(key):
            not_run[name] = f"{' and '.join(missing)} not installed: pip install unpad[bench]"
            continue
        try:
            side = make(sizes, device)
            for _ in range(WARM_UPDATES):
                side.update()
            memory[name] = memory_of(side, device)
        except (OutOfMemoryError, torch.OutOfMemoryError) as error:
            not_run[name] = f"out of memory: {str(error).splitlines()[0]}"
            continue
        sides[name] = side
    if not sides:
        raise SystemExit("no side could run:\n" + "\n".join(f"  {side}: {why}" for side, why in not_run.items()))
    ceiling_size = 8192 if device.type == "cuda" else 512
    measured = measure.measure_rounds(
        {name: measured_side(side, sizes) for name, side in sides.items()},
        rounds,
        seconds,
        ceiling=lambda: measure.matrix_ceiling(torch.bfloat16, device, ceiling_size),
        report=print,
    )
    machine = measure.describe_machine(("transformers", "trl", "flash_attn"))
    peak, source = peak_of(machine["gpu"] or "") if device.type == "cuda" else (None, "")
    parameters = sum(parameter.numel() for parameter in next(iter(sides.values())).model.parameters())
    return Result(sizes, parameters, machine, attention_name(), measured, peak, source, memory, not_run)


def write(result: Result, folder: Path) -> None:
    """Write gpu.md, the table, and gpu.json, every figure behind it."""
    make_folder(folder)
    write_atomic(folder / "gpu.md", "\n".join(result.lines()) + "\n")
    write_atomic(folder / "gpu.json", json.dumps(asdict(result), ensure_ascii=False, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true", help="tiny sides on a processor, to see that they run")
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
    if not (chosen.toy or torch.cuda.is_available()):
        print("no GPU here, nothing was run; --toy runs tiny sides on a processor", file=sys.stderr)
        sys.exit(2)
    if chosen.toy:
        with library.switched_off():  # a GPU has no native kernels
            result = run(TOY, torch.device("cpu"), sides, chosen.rounds, min(chosen.seconds, 0.1))
    else:
        result = run(Sizes(), torch.device("cuda"), sides, chosen.rounds, chosen.seconds)
    if chosen.out:
        write(result, chosen.out)
    print("\n".join(result.lines()))


if __name__ == "__main__":
    main()
