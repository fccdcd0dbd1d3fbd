"""Processor time and speed of updates by 1, 2 and 4 processes: the part `speed` of `processes.py`.

The workers of all sides wait for their turns; of a side all workers compute together. Updates are cut into four
micro-batches or a little more, the same ones for any number of processes, and into as few as the recipe allows for the
side that is called whole. Sums are exact.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from gates import interval
from measure import describe_machine
from process_updates import Loaded, Trained, load, prepare

from unpad.nn.native import library
from unpad.nn.product_speed import choose_precision
from unpad.processes.group import joined

SIZES = (1024, 2048, 4096, 8192, 16384)  # tokens of an update
TURNS, QUICK_TURNS = 9, 5
TURN_TOKENS = 8192  # of a turn, one update at least
WHOLE = 4096  # most tokens of a micro-batch of the side that cuts no finer than the recipe
GOAL, GOAL_SIZE = 1.6, 8192  # two processes against one


@dataclass(frozen=True)
class Side:
    """Processes that train together.

    Args:
        threads: of each process.
        whole: whether updates are cut no finer than the recipe does it.
    """

    processes: int
    threads: int = 1
    whole: bool = False

    @property
    def name(self) -> str:
        threads = "" if self.threads == 1 else f", {self.threads} threads"
        return f"{self.processes} process{'es' if self.processes > 1 else ''}{threads}{', whole' if self.whole else ''}"

    def micro(self, update: int) -> int:
        """Tokens of a micro-batch at most."""
        return min(update, WHOLE) if self.whole else update // 4


ONE, TWO = Side(1), Side(2)
SIDES = (ONE, Side(1, whole=True), Side(1, threads=2), TWO, Side(4))


class Workers:
    """The processes of a side, which wait for turns."""

    def __init__(self, side: Side, precision: str) -> None:
        self.side = side
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        shared = {"WORLD_SIZE": side.processes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        shared |= {"OMP_NUM_THREADS": side.threads}
        command = [sys.executable, __file__, precision, str(side.threads)]
        self.all = list[subprocess.Popen[str]]()
        for rank in range(side.processes):
            variables = {name: str(value) for name, value in (shared | {"RANK": rank, "LOCAL_RANK": rank}).items()}
            worker = subprocess.Popen(
                command, env=os.environ | variables, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            self.all.append(worker)

    def turn(self, update: int) -> dict[str, float]:
        """Train for a turn; seconds of the slowest process, processor seconds of all per update, tokens per second."""
        num_updates = max(TURN_TOKENS // update, 1)
        for worker in self.all:
            assert worker.stdin is not None, "a pipe was asked for"
            worker.stdin.write(json.dumps([update, self.side.micro(update), num_updates]) + "\n")
            worker.stdin.flush()
        told = list[dict[str, float]]()
        for worker in self.all:
            assert worker.stdout is not None, "a pipe was asked for"
            line = worker.stdout.readline()
            if not line:
                raise SystemExit(f"a worker of {self.side.name} has ended with code {worker.wait()}")
            told.append(json.loads(line))
        wall = max(row["wall"] for row in told)
        return {
            "processor_ms": 1e3 * sum(row["processor"] for row in told) / told[0]["updates"],
            "tokens_per_second": told[0]["tokens"] / wall,
        }

    def end(self) -> None:
        """Kill the processes."""
        for worker in self.all:
            worker.kill()
            worker.communicate()


@contextmanager
def started(sides: Sequence[Side], precision: str) -> Iterator[list[Workers]]:
    """Workers of all sides; they end with the block."""
    workers = list[Workers]()
    try:
        for side in sides:
            workers.append(Workers(side, precision))
        yield workers
    finally:
        for one in workers:
            one.end()


def run(quick: bool, say: Callable[[str], None], save: Callable[[dict[str, Any]], None]) -> None:
    """Measure every size of update, and save after each."""
    precision = choose_precision("auto", torch.device("cpu"))[0]
    found: dict[str, Any] = {
        "machine": describe_machine() | {"kernels": library.describe()},
        "precision": precision,
        "wait_policy": os.environ.get("OMP_WAIT_POLICY", "default"),
        "sizes": {},
    }
    turns = QUICK_TURNS if quick else TURNS
    with started(SIDES, precision) as workers:
        for size in SIZES:
            rows: dict[str, list[dict[str, float]]] = {one.side.name: [] for one in workers}
            for one in workers:
                one.turn(size)
                say(f"{size:,} tokens, {one.side.name}: warm")
            for turn in range(turns):
                for one in workers if turn % 2 == 0 else workers[::-1]:
                    row = one.turn(size)
                    rows[one.side.name].append(row)
                    say(
                        f"{size:,} tokens, turn {turn + 1} of {turns}, {one.side.name}: "
                        f"{row['processor_ms']:,.0f} ms of processor time, {row['tokens_per_second']:,.0f} tokens/s"
                    )
            found["sizes"][str(size)] = rows
            save(found)


def markdown(results: dict[str, Any]) -> list[str]:
    """The section of `processes.md`."""
    machine, sizes = results["machine"], results["sizes"]
    names = [side.name for side in SIDES]
    load = "" if machine["load"] is None else f", load {machine['load']:.1f} at the start"
    processor = {size: [_median(rows[name], "processor_ms") for name in names] for size, rows in sizes.items()}
    speed = {size: [_median(rows[name], "tokens_per_second") for name in names] for size, rows in sizes.items()}
    others = [side.name for side in SIDES if side.processes == 1]
    ratios = {size: [interval(_ratios(rows[TWO.name], rows[one])) for one in others] for size, rows in sizes.items()}
    return [
        "## Speed of 1, 2 and 4 processes",
        "",
        f"`--speed`: zh_chat in {results['precision']} with exact sums, updates in four micro-batches or some more;",
        f"`whole`: in as few as {WHOLE:,} tokens in each allow. Medians, all sides in turn. {machine['processor']},",
        f"{machine['cores']} cores, torch {machine['torch']}, {machine['kernels']}, OMP_WAIT_POLICY",
        f"{results['wait_policy']}{load}.",
        "",
        "Processor time of an update, all processes together, in ms:",
        "",
        *_table(names, {size: [f"{value:,.0f}" for value in row] for size, row in processor.items()}),
        "",
        "Tokens per second:",
        "",
        *_table(names, {size: [f"{value:,.0f}" for value in row] for size, row in speed.items()}),
        "",
        f"Tokens per second of {TWO.name} over those of one, with a 95 % interval; the goal is {GOAL} over {ONE.name}",
        f"at {GOAL_SIZE:,} tokens:",
        "",
        *_table(
            others,
            {
                size: [f"{one.median:.2f}, {one.low:.2f} to {one.high:.2f}" for one in row]
                for size, row in ratios.items()
            },
        ),
    ]


def _table(names: Sequence[str], rows: dict[str, list[str]]) -> list[str]:
    lines = [f"| tokens of an update | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    return lines + [f"| {int(size):,} | {' | '.join(cells)} |" for size, cells in rows.items()]


def _median(rows: Sequence[dict[str, float]], key: str) -> float:
    return median(row[key] for row in rows)


def _ratios(mine: Sequence[dict[str, float]], theirs: Sequence[dict[str, float]]) -> list[float]:
    pairs = zip(mine, theirs, strict=True)
    return [one["tokens_per_second"] / other["tokens_per_second"] for one, other in pairs]


def work(precision: str, threads: int) -> None:
    """Train for the turns that standard input asks for, one JSON line each, and answer with another."""
    with joined() as group:
        setup = prepare(precision, threads)
        trained, loaded = Trained(setup, "exact", group), dict[tuple[int, int], list[Loaded]]()
        for line in sys.stdin:
            update, micro, num_updates = json.loads(line)
            if (update, micro) not in loaded:
                loaded[update, micro] = load(setup, group, update=update, micro=micro, num_updates=num_updates)
                trained.turn(loaded[update, micro])
            updates = loaded[update, micro]
            took = trained.turn(updates)
            tokens = sum(one.tokens for one in updates)
            print(json.dumps(asdict(took) | {"updates": len(updates), "tokens": tokens}), flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    work(sys.argv[1], int(sys.argv[2]))
