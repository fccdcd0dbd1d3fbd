"""A decoder of 341 M and of 1 B parameters on a GPU: ours, and Transformers and TRL at their best.

    python benchmarks/gpu.py first --out FOLDER      tests and ours: speed, memory, shares of the time; at most 590 s
    python benchmarks/gpu.py second --out FOLDER     peers, ours against the best, proofs, a killed run; at most 590 s
    python benchmarks/gpu.py --check                 both on a processor, with tiny models: some minutes
    python benchmarks/gpu.py "ours, 1 B" --out FOLDER     one case alone

All train the same Llama (bf16 products, fp32 weights, fused AdamW, clipping at 1) on the same sequences, whose lengths
are log-normal with mean 400, clipped to 16 to 4,096 tokens. Each side is in memory alone, and its size of a pass is the
fastest of some. Peers are driven through their trainer's own data loader and `training_step`, with torch's own flash
kernel through Transformers' path for flash-attn, and with Liger where it is installed: `pip install unpad[bench]`.
A part is a list of commands, each with a limit, whose output is FOLDER/log.txt; gpu.json and gpu.md are written after
every turn, so that a part that is ended leaves what it has measured. The card should have nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import measure  # noqa: E402
import torch  # noqa: E402
from gpu_rows import TIMES, TINY_TIMES, TOY, Row, Times, all_cases, build, contender, measure_case  # noqa: E402
from gpu_sides import Sizes, install_flash, make_trainer, pad  # noqa: E402
from measure import TimedTurn, spread  # noqa: E402
from torch.utils.benchmark import Timer  # noqa: E402

from tests.helpers.attention_cases import as_on_a_card  # noqa: E402
from tests.helpers.toy import write_toy  # noqa: E402
from unpad.storage import make_folder, write_atomic  # noqa: E402

# Dense bf16 with fp32 sums, TFLOP/s, from the vendors' data sheets; figures "with sparsity" are halved.
# A longer name comes before a shorter one that it begins with.
PEAKS = {
    "B200": 2250.0, "H200 NVL": 835.5, "H200": 989.5, "GH200": 989.5, "H100 PCIe": 756.5, "H100 NVL": 835.5,
    "H100": 989.5, "A100": 312.0, "A40": 149.7, "A30": 165.0, "L40S": 362.0, "L4": 121.0, "RTX 4090": 165.2,
    "RTX 3090": 71.0,
}  # fmt: skip
LIMIT_S = 590.0  # of a part
LEAST_S, KILL_S = 15.0, 5  # left for a step to begin, and to end when it is told to
MOST_GRAPHS = 4  # of blocks whose every token has a target: the first and all others, for one sequence or several


def peak_of(name: str) -> float | None:
    """Operations per second by data sheet; None for a card that is not in the table."""
    # Whole words: an RTX A4000 is no A40.
    found = (tera * 1e12 for card, tera in PEAKS.items() if re.search(rf"\b{card}\b(?! (Laptop|D\b))", name))
    return next(found, None)


# --------------------------------------------------------------------------- what is kept


@dataclass
class Results:
    """All that was measured, in gpu.json of a folder.

    Args:
        ceilings: operations per second of a bf16 product, and bytes per second that a copy reads and writes.
        rows: of every case and size of update, by name.
        turns: of ours and the best peer in turn.
        steps: commands that have ended -> exit code and seconds; 124 and 137 ran past their limit, -1 had no time left.
    """

    machine: dict[str, Any]
    ceilings: dict[str, float] = field(default_factory=dict)
    rows: dict[str, Row] = field(default_factory=dict)
    turns: dict[str, list[TimedTurn]] = field(default_factory=dict)
    steps: dict[str, tuple[int, float]] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Write gpu.json, and gpu.md for people."""
        write_atomic(folder / "gpu.json", json.dumps(asdict(self), ensure_ascii=False, indent=1) + "\n")
        write_atomic(folder / "gpu.md", "\n".join(self.lines()) + "\n")

    def lines(self) -> list[str]:
        peak = peak_of(self.machine["gpu"] or "")
        packages = (f"{name} {version}" for name, version in self.machine["packages"].items() if version)
        limits = (f"{value / 1e12:,.2f} T {name}/s" for name, value in self.ceilings.items())
        lines = [
            f"# {self.machine['gpu'] or self.machine['processor']}",
            "",
            f"torch {self.machine['torch']}, {', '.join(packages)}; measured at most: {', '.join(limits)}.",
            "Peers have torch's FlashAttention 2, through Transformers' path for flash-attn. GiB: weights and moments,",
            "and all at the most. Graphs of the blocks: all, breaks, and those made late.",
            "",
            "| side | M weights | pass | tokens/s, quartiles | of data sheet | GiB | graphs |",
            "|---|---|---|---|---|---|---|",
            *(_line(row, peak) for row in self.rows.values()),
        ]
        if self.turns:
            (ours, mine), (peer, theirs) = self.turns.items()
            ratios = [TimedTurn(*a).rate / TimedTurn(*b).rate for a, b in zip(mine, theirs, strict=True)]
            lines += ["", f"In turn: {ours}, is {_spread(ratios, 2)} times {peer}, in {len(ratios)} rounds."]
        for row in self.rows.values():
            found = {"time": [f"{part} {share:.1%}" for part, share in row.shares.items()]}
            found["waits"] = [f"{place} x{times}" for place, times in row.waits.items()]
            lines += (f"- {row.name}: {title}: {', '.join(values)}" for title, values in found.items() if values)
        return [*lines, "", f"Exit codes and seconds of the commands: {self.steps}"]


def load(folder: Path) -> Results:
    """What a folder has, which may be nothing."""
    results = Results(measure.describe_machine(("transformers", "trl", "flash_attn", "liger_kernel")))
    if (folder / "gpu.json").exists():
        kept = json.loads((folder / "gpu.json").read_text(encoding="utf-8"))
        results = Results(**kept | {"rows": {name: Row(**row) for name, row in kept["rows"].items()}})
    return results


def _spread(values: list[float], digits: int = 0) -> str:
    """Median and quartiles."""
    found = spread(values)
    return f"{found.median:,.{digits}f} ({found.low:,.{digits}f} to {found.high:,.{digits}f})"


def _line(row: Row, peak: float | None) -> str:
    work = [TimedTurn(*turn) for turn in row.turns]
    share = spread([turn.operations / turn.seconds for turn in work]).median / peak if work and peak else None
    cells = [
        row.name,
        f"{row.parameters / 1e6:,.0f}",
        f"{row.size:,}",
        " ".join([*([_spread(row.rates)] if work else []), row.error]),
        "" if share is None else f"{share:.1%}",
        ", ".join(f"{size / 2**30:,.1f}" for size in (row.state, row.most) if size),
        f"{row.graphs}, {row.breaks}, {row.late}" if row.side == "ours" else "",
    ]
    return "| " + " | ".join(cells) + " |"


# --------------------------------------------------------------------------- steps that are no case


def ceilings(results: Results, device: torch.device, size: int) -> None:
    """Measure the rates of a product of matrices, and of a copy of 64 times their cells."""
    results.ceilings["operations"] = measure.matrix_ceiling(torch.bfloat16, device, size)
    source = torch.empty(64 * size * size, dtype=torch.uint8, device=device)
    timer = Timer("target.copy_(source)", globals={"source": source, "target": torch.empty_like(source)})
    results.ceilings["bytes"] = 2 * source.numel() / timer.timeit(5).median


def in_turn(results: Results, device: torch.device, times: Times, keep: Callable[[], None]) -> None:
    """Measure ours and the best peer in large updates, A B, B A, both in memory, at their best sizes of a pass."""
    cases = all_cases(device.type == "cpu")
    update = max(cases["ours"].updates)
    rows = [row for row in results.rows.values() if row.update == update and row.turns]
    mine = next(row for row in rows if row.case == "ours")
    best = max((row for row in rows if row.side != "ours"), key=lambda row: spread(row.rates).median)
    runners = {}
    for row in (mine, best):
        side = build(cases[row.case], device)
        side.feed(row.size, update)
        runners[row.name] = contender(side, cases[row.case].sizes)
        runners[row.name].turn(times.warm, min_steps=2)
    results.turns = {name: [] for name in runners}
    for number in range(times.turns + 2):
        for name in list(runners)[:: 1 if number % 2 == 0 else -1]:
            results.turns[name].append(runners[name].turn(times.turn, 1, times.turn * measure.COMING_BACK))
        keep()


def attached(device: torch.device) -> None:
    """Prove a trainer of a small Llama in bf16, with heads of 64, that computes with our attention and batches."""
    install_flash()
    import unpad.hf

    sizes = Sizes(TOY.model_copy(update={"width": 128}), 200, 20, 4, 60)
    trainer = make_trainer(sizes, device, pad)
    unpad.hf.attach(trainer)
    certificate = unpad.prove_trainer(trainer)
    print(certificate)
    sys.exit(0 if certificate.passed else 12)


# --------------------------------------------------------------------------- parts


def steps_of(part: str, folder: Path, tiny: bool) -> dict[str, tuple[float, list[str]]]:
    """Commands of a part, for Python, by name, with their limits in seconds."""
    names = list(all_cases(tiny))
    ours, peers = names[:6], names[6:]

    def job(seconds: float, *names: str) -> tuple[float, list[str]]:
        return seconds, [__file__, *names, "--out", str(folder), *(["--tiny"] if tiny else [])]

    if part == "first":
        tests = ["-m", "pytest", "-m", "gpu", "tests/nn/test_gpu.py", "-rA", "-W", "default"]
        return {
            "tests": (60, [*tests, f"--junitxml={folder}/junit.xml"]),
            "ours": job(190, "ceilings", ours[0]),
            "1 B": job(130, ours[4]),
            "variants": job(200, *ours[1:4], ours[5]),
        }
    recipes = [str(write_toy(folder / "toy"))] * 2 if tiny else ["zh_chat", "llm"]
    prove = ["-m", "unpad", "prove", "--allow-not-proven"]
    kill = ["benchmarks/reliability/kill.py", "--kills", "1", "--kinds", "text", "--dry-run"]
    return {
        "peers": job(330, *peers),
        "in turn": job(90, "in turn"),
        "proof": (60, [*prove, recipes[0]]),
        "proof in bf16": (60, [*prove, recipes[1], "precision=bf16"]),
        "trainer with ours": job(40, "attached"),
        "killed and resumed": (120, kill),
    }


def run_part(part: str, folder: Path, tiny: bool) -> None:
    """Run the steps of a part, each within its limit and the part's; a step that fails ends no other."""
    slow = 10 if tiny else 1  # a processor that others use too
    latest = time.monotonic() + slow * LIMIT_S
    environment = os.environ | {"UNPAD_NATIVE": "0", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    for name, (seconds, command) in steps_of(part, folder, tiny).items():
        began, code = time.monotonic(), -1
        limit = min(slow * seconds, latest - began - KILL_S)
        with (folder / "log.txt").open("a", encoding="utf-8") as log:
            print(f"\n=== {part}: {name}", file=log, flush=True)
            if limit > LEAST_S:
                limited = ["timeout", "-k", f"{KILL_S}", f"{limit:.0f}", sys.executable, *command]
                code = subprocess.run(limited, cwd=ROOT, env=environment, stdout=log, stderr=log).returncode
        results = load(folder)
        results.steps[name] = code, round(time.monotonic() - began, 1)
        results.save(folder)
        print(f"{name}: exit code {code}, {time.monotonic() - began:.1f} s", flush=True)


def faults(results: Results) -> list[str]:
    """What is wrong with the results of a check."""
    found = [f"step {name}: exit code {code}" for name, (code, _) in results.steps.items() if code]
    for row in results.rows.values():
        if row.error.startswith("ModuleNotFoundError"):
            print(f"not run here: {row.name}: {row.error}")
        elif row.error or not row.turns:
            found.append(f"{row.name}: {row.error or 'no turn'}")
        elif row.side == "ours" and not (0 < row.graphs <= MOST_GRAPHS and row.breaks == row.late == 0):
            found.append(f"{row.name}: {row.graphs} graphs, {row.breaks} breaks, {row.late} of them made late")
    return found if results.rows and results.turns else [*found, "rows or turns are missing"]


def check() -> None:
    """Run both parts with tiny models on a processor that stands in for a card; exit code 1 where anything fails."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("first", "second"):
            run_part(part, folder, tiny=True)
        if found := faults(load(folder)):
            print((folder / "log.txt").read_text(encoding="utf-8"))
        print((folder / "gpu.md").read_text(encoding="utf-8"))
    print("Not run: the compiler, as blocks are traced alone; torch's flash kernel; a card's memory, waits and shares,")
    print("in whose place operations that would wait and a processor's shares stand.")
    sys.exit("\n".join(found) or 0)


def run_job(name: str, folder: Path, tiny: bool) -> None:
    """A case or another step, on the card or, tiny, on a processor as on a card."""
    device, times = (torch.device("cpu"), TINY_TIMES) if tiny else (torch.device("cuda"), TIMES)
    results = load(folder)

    def keep(*rows: Row) -> None:
        results.rows |= {row.name: row for row in rows}
        results.save(folder)

    if name == "ceilings":
        ceilings(results, device, 128 if tiny else 8192)
        keep()
    elif name == "in turn":
        in_turn(results, device, times, keep)
    elif name == "attached":
        attached(device)
    else:
        measure_case(name, all_cases(tiny)[name], device, times, keep, folder / "profile.txt")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ["first", "second", "ceilings", *all_cases(tiny=False), "in turn", "attached"]
    parser.add_argument("names", nargs="*", metavar="NAME", help="; ".join(names))
    parser.add_argument("--out", type=Path, help="folder for gpu.md, gpu.json, profile.txt, junit.xml and log.txt")
    parser.add_argument("--tiny", action="store_true", help="tiny models, on a processor as on a card")
    parser.add_argument("--check", action="store_true", help="both parts, tiny; exit code 1 where one fails")
    chosen = parser.parse_args()
    if chosen.check:
        check()
    if not (chosen.names and chosen.out and set(chosen.names) <= set(names)):
        parser.error("give names of the list in --help, and --out FOLDER; or --check")
    if not (chosen.tiny or torch.cuda.is_available()):
        sys.exit("no GPU here, nothing was run; --check runs tiny sides on a processor")
    make_folder(chosen.out)
    for name in chosen.names:
        if name in ("first", "second"):
            run_part(name, chosen.out.resolve(), chosen.tiny)
        else:
            with as_on_a_card() if chosen.tiny else nullcontext():
                run_job(name, chosen.out, chosen.tiny)


if __name__ == "__main__":
    main()
