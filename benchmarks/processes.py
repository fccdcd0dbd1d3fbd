"""Training by several processes: balance of their shares, cost of exact sums, speed.

    python benchmarks/processes.py --simulate    a minute, on any machine
    python benchmarks/processes.py --sums        some five minutes on one quiet core; --quick takes three
    python benchmarks/processes.py --speed       some ten minutes on two quiet cores; --quick takes six

Every part that runs replaces its results in processes.json, and processes.md is written anew from all that are there.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import process_balance
import process_speed
import process_sums

from unpad.storage import write_atomic

HERE = Path(__file__).parent
NAME = "processes"


@dataclass(frozen=True)
class Part:
    """One part of the benchmark: its option on the command line, and the functions that run it and show its results.

    Args:
        run: takes whether to be quick, what to say progress with, and what to save results with as they grow.
    """

    option: str
    help: str
    run: Callable[[bool, Callable[[str], None], Callable[[dict[str, Any]], None]], None]
    markdown: Callable[[dict[str, Any]], list[str]]


PARTS = {
    "simulation": Part(
        "--simulate",
        "balance for 8 to 1,024 processes, by simulation",
        lambda quick, say, save: save(process_balance.simulate()),
        process_balance.markdown,
    ),
    "sums": Part("--sums", "cost of exact sums on one process", process_sums.run, process_sums.markdown),
    "speed": Part("--speed", "speed of 1, 2 and 4 processes", process_speed.run, process_speed.markdown),
}


def page(results: Mapping[str, dict[str, Any]]) -> str:
    """The Markdown of all parts with results."""
    lines = ["# Several processes", "", f"    python benchmarks/{NAME}.py", ""]
    for name, part in PARTS.items():
        if name in results:
            lines += [*part.markdown(results[name]), ""]
    return "\n".join(lines).rstrip() + "\n"


def write(folder: Path, new: Mapping[str, dict[str, Any]]) -> None:
    """Add results of parts to those in the folder, and write its page."""
    path = folder / f"{NAME}.json"
    results = {**(json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}), **new}
    write_atomic(path, json.dumps(results, indent=1).encode() + b"\n")
    write_atomic(folder / f"{NAME}.md", page(results).encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, part in PARTS.items():
        parser.add_argument(part.option, dest=name, action="store_true", help=part.help)
    parser.add_argument("--out", type=Path, default=HERE, help="folder of processes.json and processes.md")
    parser.add_argument("--quick", action="store_true", help="fewer turns")
    arguments = parser.parse_args()
    chosen = [name for name in PARTS if vars(arguments)[name]]
    if not chosen:
        parser.error(f"name a part: {' '.join(part.option for part in PARTS.values())}")
    for name in chosen:
        save = partial(_save, arguments.out, name)
        PARTS[name].run(arguments.quick, partial(print, flush=True), save)


def _save(folder: Path, name: str, results: dict[str, Any]) -> None:
    write(folder, {name: results})


if __name__ == "__main__":
    main()
