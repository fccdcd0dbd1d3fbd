"""Ends of runs of 1, 2 and 3 processes: exit codes, seconds until no process is left, and the bytes after a resume.

    make processes          # some minutes of two cores; writes the table of docs/internals/several_processes.md
    python benchmarks/endings.py --processes 2 --kills 3

A run goes through every ending, one after the other, and is resumed after each by another number of processes. At its
end it must have the bytes of a run of one process that nothing disturbed. Exit code 1 if it has not, or if an ending
has another code or takes longer than 20 seconds.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from equal_processes import digests, write_table

from tests.helpers.endings import ENDINGS, SILENT, UNLIKE, Ended, killed_at, run_command
from tests.helpers.toy import write_toy

SECONDS = 20.0


class FaultError(Exception):
    """An ending that is not as it must be."""


def main() -> None:
    """Measure what the command line names, and write the table if that is all of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", default="1,2,3")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--write", action="store_true", help="write the table into docs/internals/several_processes.md")
    options = parser.parse_args()
    sizes = [int(size) for size in options.processes.split(",")]
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        os.environ["UNPAD_CACHE"] = str(Path(folder) / "cache")
        try:
            lines = list(measure(Path(folder), sizes, options.kills))
        except FaultError as fault:
            sys.exit(f"FAILED: {fault}")
    if options.write:
        write_table("endings", lines)


def measure(folder: Path, sizes: list[int], num_kills: int) -> Iterator[str]:
    """Yield the lines of the table, each also printed."""
    write_toy(
        Path(),
        plan={"tokens_per_step": 80, "tokens_per_micro": 40},
        checkpoint={"every": 2},
        stages=[
            {"name": "pretrain", "use": ["text"], "train": {"max_epochs": 4, "eval_every": 7}},
            {"name": "tune", "use": ["chat"], "optim": {"per": "epoch"}, "train": {"max_epochs": 4}},
        ],
        train={"threads": 1},
    )
    Path("changed").mkdir()
    for name in ("texts.jsonl", "chats.jsonl"):
        Path("changed", name).write_bytes(Path(name).read_bytes() + b"\n" + Path(name).read_bytes().split(b"\n")[0])
    check(run(folder, "calm", 1, False), [0])
    yield said("| ending | exit code | " + " | ".join(f"s, {size} process{'es' * (size > 1)}" for size in sizes) + " |")
    yield said("|---|---|" + "---|" * len(sizes))
    for ending in [*ENDINGS, *UNLIKE]:
        cells = []
        for size in sizes:
            if size == 1 and (ending in UNLIKE or ending.overrides == SILENT):
                cells.append("")
                continue
            name = f"run-{size}" if ending in ENDINGS else f"unlike-{len(cells)}-{ending.name}"
            ended = run(folder, name, size, ending in ENDINGS, *ending.overrides, fault=ending.fault)
            check(ended, ending.codes(size))
            cells.append(f"{ended.seconds:.1f}")
        yield said(f"| {ending.name} | {ending.code} | " + " | ".join(cells) + " |")
    for size in sizes:
        check(run(folder, f"run-{size}", 4 - size, True), [0] * (4 - size))
        same(folder, f"run-{size}")
    yield said("")
    yield said(kills(folder, num_kills, sizes))


def kills(folder: Path, num: int, sizes: list[int]) -> str:
    """Kill a random rank at a random instant, `num` times; a run that has ended is compared, and another begins."""
    draw, seconds, num_runs, resumed = random.Random(0), list[float](), 0, list[tuple[int, int]]()
    size = sizes[0]
    while len(seconds) < num:
        rank, at = draw.randrange(size), draw.randint(1, 30)
        ended = run(folder, f"killed-{num_runs}", size, True, fault=killed_at(at, rank))
        if ended.codes == [0] * size:
            same(folder, f"killed-{num_runs}")
            num_runs += 1
            continue
        check(ended, [-9 if other == rank else 10 for other in range(size)])
        seconds.append(ended.seconds)
        before, size = size, draw.choice(sizes)
        resumed.append((before, size))
    check(run(folder, f"killed-{num_runs}", size, True), [0] * size)
    same(folder, f"killed-{num_runs}")
    changes = sum(before != after for before, after in resumed)
    return (
        f"{num} SIGKILLs of random ranks at random instants, in {num_runs + 1} runs: {median(seconds):.2f} s until no "
        f"process is left (median; {max(seconds):.2f} s at most), {changes} times resumed by another number of "
        "processes, equal bytes."
    )


def run(folder: Path, name: str, size: int, resume: bool, *overrides: str, fault: object = None) -> Ended:
    """Start or resume a run."""
    arguments = ["train", str(folder / "toy.yaml"), "--out", str(folder / name), *["--resume"] * resume, *overrides]
    faults: dict[str, Any] = {} if fault is None else {"fault": fault}
    return run_command(arguments, size, folder / "outputs", **faults)


def check(ended: Ended, codes: list[int]) -> None:
    """Raise FaultError if a run has ended otherwise."""
    if ended.codes != codes or ended.seconds > SECONDS:
        raise FaultError(f"codes {ended.codes}, expected {codes}; {ended.seconds:.1f} s\n{ended.error}")


def same(folder: Path, name: str) -> None:
    """Raise FaultError if a run has other bytes than the undisturbed one."""
    found, expected = digests(folder / name), digests(folder / "calm")
    if found != expected:
        raise FaultError(
            f"{name} differs in " + ", ".join(file for file in expected if found.get(file) != expected[file])
        )


def said(line: str) -> str:
    print(line, flush=True)
    return line


if __name__ == "__main__":
    main()
