"""Training speed beside what people use today, side by side, with the gates and goals of the project.

    python benchmarks/speed.py                                   all workloads; about an hour on 2 quiet cores
    python benchmarks/speed.py W1 chat --rounds 9 --seconds 3 --out /tmp/speed
    python benchmarks/speed.py W2 --sides ours "peer, best"
    python benchmarks/speed.py W1 --quick                        the sides of the gates within five minutes
    python benchmarks/speed.py W1 --quick --force avx2           as on a processor with AVX2 alone, all in fp32
    python benchmarks/speed.py --time-to-loss                    about ten minutes

Every side trains a model of its own in a process of its own and keeps both; all sides take turns, round after round,
each for some seconds and some steps at least. Sides that do not fit into memory together run in groups, with ours in
all of them. What is compared are the ratios of the rounds. In our processes freed memory stays, as `unpad train` has
it, in the others it goes as it does by default; a second measurement keeps it in all of them. After the rounds a turn
with the longest batch measures memory. "Our products alone" are the matrix products of our updates and nothing in
between.
What the workloads are stands in `workloads.py`, what the peers do in `peers.py`, what must be reached in `gates.py`.
Peers need `pip install 'unpad[bench]'`; a side whose package is missing is left out and said so.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import forced

if __name__ == "__main__":  # processes of sides load this file too, under another name, and inherit the variables
    forced.force(sys.argv[1:])
# The matrix library keeps 1,024 prepared products, enough for one model but not for nine that take turns in a process:
# without more every turn begins by preparing again what the others pushed out. A product can hold megabytes, so the
# number is bounded. Read when torch is loaded.
if "--time-to-loss" in sys.argv:
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "3000")

import gates
import peers
import time_to_loss
from apart import Apart
from batches import STRATA
from gates import ALONE, OURS, PRODUCTS, TORCH_KERNELS
from groups import Builder, Groups, measure_groups
from measure import (
    Contender,
    Rounds,
    ceiling_size,
    describe_machine,
    load_average,
    matrix_ceiling,
    measure_rounds,
)
from products import ProductsAlone
from tables import markdown
from tuning import Tuning, fitting_strata
from workloads import NAMES, Workload, our_sides, workload

from unpad.machine import available_memory, process_memory
from unpad.nn.native import library
from unpad.nn.precision import DTYPES
from unpad.nn.product_speed import choose_precision
from unpad.storage import write_atomic
from unpad.training.memory import keep_freed_memory, return_freed_memory

HERE = Path(__file__).parent
PACKAGES = ["transformers", "accelerate", "trl", "datasets", "numpy"]
JUDGED = (OURS, PRODUCTS, TORCH_KERNELS, peers.DEFAULTS, peers.BEST, ALONE)  # sides of --quick
FIRST = (*JUDGED, peers.EQUAL)  # sides that gates compare: in one group if they fit
# Of --quick, in seconds: what it takes for a workload, the tuning of a peer, and a turn of a padded side.
QUICK_SECONDS, QUICK_TUNING, QUICK_TURN = 255.0, 25.0, 5.0


# --------------------------------------------------------------------------- sides


def all_sides(made: Workload, tuning: Tuning) -> tuple[dict[str, Callable[[], Any]], peers.Peers]:
    """Makers of every side by name, those that are compared most in front, and the peers among them."""
    theirs = peers.Peers(made, tuning)
    sides: dict[str, Callable[[], Any]] = {
        **{name: partial(make, made) for name, make in our_sides(tuning.precision).items()},
        PRODUCTS: lambda: ProductsAlone(made, precision=tuning.precision),
        **theirs.sides(),
    }
    return {name: sides[name] for name in sorted(sides, key=lambda name: name not in FIRST)}, theirs


class Made:
    """A side as its process makes it.

    Args:
        name: of the workload.
        key: of the side.
        keeps: whether freed memory stays with the process.
    """

    def __init__(self, name: str, key: str, keeps: bool, options: argparse.Namespace) -> None:
        made = workload(name, options.data)
        sides, self.peers = all_sides(made, options.tuning)
        self.turn_seconds = options.turn_seconds
        if key in self.peers.sides():
            peers.quiet()
        gc.collect()
        return_freed_memory()
        if keeps:
            keep_freed_memory()
        self.base_bytes = process_memory()
        self.made = sides[key]()
        self.padded = hasattr(self.made, "batches")

    @property
    def side(self) -> Contender:
        return Contender(self.made.step, self.made.batches.cycle if self.padded else 1)

    def warm(self, seconds: float) -> None:
        """Work untimed; where turns of whole cycles would take too long, shorten the cycles.

        The first step needs the most memory, from which it is known how many sides fit; --quick has few, and no time.
        """
        if not self.turn_seconds:
            self.longest_next()
        step_seconds = Contender(self.made.step).warm(seconds)
        if self.padded and self.turn_seconds and self.made.batches.cycle > 1:
            strata = fitting_strata(step_seconds, self.turn_seconds)
            if strata < STRATA:
                self.made.set_batches(self.made.batches.size, self.made.batches.grouped, strata)
        if self.padded:
            self.made.batches.begin_cycle()

    def longest_next(self) -> None:
        if self.padded:
            self.made.batches.longest_next()

    def describe(self) -> dict[str, Any]:
        """How it computes, and whether it really learned."""
        made, losses = self.made, self.made.losses
        few = max(min(len(losses) // 2, 10), 1)
        learned = (sum(losses[:few]) / few, sum(losses[-few:]) / few) if losses else (None, None)
        return {
            "precision": made.precision if hasattr(made, "precision") else "bf16" if made.bf16 else "fp32",
            "batch_size": made.batches.size if self.padded else None,
            "cycle": self.side.cycle,
            "tuned": self.peers.tuned,
            "of_needed": made.operations_per_needed if isinstance(made, ProductsAlone) else None,
            "base_bytes": self.base_bytes,
            "loss_first": learned[0],
            "loss_last": learned[1],
        }


def keeps_freed(key: str) -> bool:
    """True for sides that keep freed memory without being told: ours."""
    return key.startswith(OURS)


# --------------------------------------------------------------------------- one workload


def measure(name: str, allocator: str, options: argparse.Namespace, until: float | None) -> dict[str, Any]:
    """All sides of one workload; returns what the JSON holds.

    Args:
        until: time of `time.perf_counter` at which no further round should begin.
    """
    names = chosen_sides(list(all_sides(workload(name, options.data), options.tuning)[0]), options)
    precision = choose_precision(options.tuning.precision, peers.CPU)[0]
    dtype = DTYPES[precision]
    size = ceiling_size(dtype)
    described: dict[str, dict[str, Any]] = {}

    def start(key: str) -> Apart:
        say(f"{name}: {key} is built")
        return Apart(Made, name, key, allocator == "kept" or keeps_freed(key), options)

    def rounds(sides: Mapping[str, Apart], share: float) -> Rounds:
        say(f"{name}: together: {', '.join(sides)}")
        return measure_rounds(
            sides,
            options.rounds,
            options.seconds,
            min_steps=options.min_steps,
            warm_steps=0,
            ceiling=partial(matrix_ceiling, dtype, None, size),
            limit_seconds=None if until is None else share * (until - time.perf_counter()),
            report=lambda line: say(f"{name}: {line}"),
        )

    def finish(key: str, side: Apart) -> None:
        described[key] = side.describe()
        if options.memory and allocator == "default" and key in FIRST and key not in (PRODUCTS, ALONE):
            described[key]["peak_bytes"] = side.peak(options.seconds, 2 * options.min_steps)

    machine_bytes = int(describe_machine()["memory_gib"] * 2**30)
    builder = Builder(start, options.warm_seconds, machine_bytes, available_memory, peers.MissingPackageError)
    groups = measure_groups(names, builder, rounds, finish)
    kind = gates.kind_of(library.target(), precision, describe_machine()["processor"])
    asked = gates.GATES.get(kind or "", {}).get(name, [])
    verdicts = {gate.what: gates.judge(gate, groups, options.quick) for gate in asked}
    return {
        "sides": {key: {**described[key], **rates_of(groups, key)} for key in names if key in described},
        "ceiling": {"precision": precision, "size": size},
        "ceilings": groups.ceilings,
        "groups": [{"sides": list(one.turns), "anchor_rates": one.rates(groups.anchor)} for one in groups.rounds],
        "left_out": groups.left_out,
        "quick": options.quick,
        "kind": kind,
        "gates": [row for row in verdicts.values() if row is not None],
        "not_judged": [what for what, row in verdicts.items() if row is None],
    }


def chosen_sides(names: list[str], options: argparse.Namespace) -> list[str]:
    """The sides that were asked for; all if none was, or with --quick those of the gates. Ours is always the first."""
    asked = options.sides or (JUDGED if options.quick else names)
    if unknown := [name for name in asked if name not in names]:
        raise SystemExit(f"there is no side {unknown[0]!r}; there are {', '.join(names)}")
    return [OURS, *(name for name in names if name in asked and name != OURS)]


def rates_of(groups: Groups, name: str) -> dict[str, Any]:
    """Rates, ratios and shares of every round."""
    group = groups.group(name)
    assert group is not None
    turns = groups.rounds[group].turns[name]
    return {
        "group": group + 1,
        "rates": groups.rates(name),
        "shares": groups.shares(name),
        "times": {other: groups.ratios(name, other) for other in (OURS, peers.DEFAULTS)},
        "steps": sum(turn.steps for turn in turns),
        "tokens_per_step": sum(turn.tokens for turn in turns) / sum(turn.steps for turn in turns),
    }


# --------------------------------------------------------------------------- command line


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def read_command_line(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("names", nargs="*", help=f"workloads: {', '.join(NAMES)}; default all of them")
    parser.add_argument("--rounds", type=int, help="default 7; with --quick at most 9, as the time allows")
    parser.add_argument("--seconds", type=float, help="of every side in every round, at least; default 2, or 1")
    parser.add_argument("--min-steps", type=int, help="of every side in every round; default 2, or 1")
    parser.add_argument("--sides", nargs="+", default=[], help="names as the table has them; default all")
    parser.add_argument("--precision", choices=["auto", "fp32", "bf16"], default="auto", help="of every side")
    parser.add_argument("--force", choices=list(forced.VARIABLES), help="a lower set of instructions for every side")
    parser.add_argument("--tune-seconds", type=float, help="limit on finding the peer's best; default 90, or 25")
    parser.add_argument("--allocator", choices=["both", "default", "kept"], help="default both, with --quick default")
    parser.add_argument(
        "--no-memory", dest="memory", action="store_false", help="leave out the peaks of memory, as --quick does"
    )
    parser.add_argument(
        "--time-to-loss", action="store_true", help="measure this, and named workloads if there are any"
    )
    parser.add_argument("--slices", type=int, help="of every run of --time-to-loss; default 8, or 2")
    parser.add_argument(
        "--data",
        type=Path,
        default=HERE / "../../shared/data",
        help="folder with zh/, the corpora of pretraining, chat and sayings, which do not come with the package",
    )
    parser.add_argument("--out", type=Path, help="folder for tables and numbers; default benchmarks/speed")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="the sides of the gates alone, five minutes for a workload; prints, and writes only with --out",
    )
    options = parser.parse_args(arguments)
    options.data = options.data.resolve()
    unknown = [name for name in options.names if name not in NAMES]
    if unknown:
        parser.error(f"there is no workload {unknown[0]}; there are {', '.join(NAMES)}")
    if not options.names and not options.time_to_loss:
        options.names = NAMES
    if options.force and options.precision == "bf16":
        parser.error(f"{options.force} has no products in bf16")
    usual: dict[str, Any] = {"rounds": 7, "seconds": 2.0, "min_steps": 2, "slices": 8, "tune_seconds": 90.0}
    usual |= {"allocator": "both", "out": HERE / "speed"}
    if options.quick:
        usual = {"rounds": 9, "seconds": 1.0, "min_steps": 1, "slices": 2, "tune_seconds": QUICK_TUNING}
        usual |= {"allocator": "default", "out": None}
    for field, value in usual.items():
        if getattr(options, field) is None:
            setattr(options, field, value)
    options.memory = options.memory and not options.quick
    options.warm_seconds = options.seconds * (1 if options.quick else 3)
    options.turn_seconds = QUICK_TURN if options.quick else None
    options.tuning = Tuning("fp32" if options.force else options.precision, options.tune_seconds)
    return options


def typed_command() -> str:
    """Command line, without the paths of this machine."""
    words, kept = sys.argv[1:], []
    for i, word in enumerate(words):
        if word not in ("--data", "--out") and (i == 0 or words[i - 1] not in ("--data", "--out")):
            kept.append(f'"{word}"' if " " in word else word)
    return " ".join(["python benchmarks/speed.py", *kept])


def measure_all(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One workload with every allocator that was asked for."""
    if not options.data.is_dir() and name not in ("W1", "W2", "W3"):
        say(f"{name} is left out: there is no folder {options.data} with zh/, its corpora; name it with --data")
        return {}
    until = time.perf_counter() + QUICK_SECONDS if options.quick else None
    wanted = ("default", "kept") if options.allocator == "both" else (options.allocator,)
    parts: dict[str, Any] = {allocator: measure(name, allocator, options, until) for allocator in wanted}
    if "default" in parts:
        parts["memory_gate"] = gates.judge_memory(parts["default"]["sides"])
    return parts


def main() -> None:
    options = read_command_line(sys.argv[1:])
    seen = None
    if options.force:
        seen = forced.check(options.force)
        say(f"forced to {options.force.upper()}: {seen}")
    if options.time_to_loss:
        peers.quiet()
        result = {**about(options, seen), "time_to_loss": {}}
        for name in time_to_loss.NAMES:
            found = time_to_loss.time_to_loss(name, options.data, options.slices, options.seconds, options.tuning, say)
            result["time_to_loss"][name] = found
        write_result("time_to_loss", result, options)
    for name in options.names:
        began = about(options, seen)
        try:
            parts = measure_all(name, options)
        except MemoryError as gone:
            raise SystemExit(f"{name}: {gone} (--sides)") from None
        if parts:
            write_result(name, {**began, "workloads": {name: parts}}, options)


def about(options: argparse.Namespace, seen: str | None) -> dict[str, Any]:
    """Conditions and machine of the measurement that begins now."""
    return {
        "began": time.perf_counter(),
        "command": typed_command(),
        "machine": describe_machine(PACKAGES),
        "kernels": library.describe(),
        "forced": {"to": options.force, "seen": seen} if options.force else None,
        "quick": options.quick,
        "rounds": options.rounds,
        "seconds": options.seconds,
        "min_steps": options.min_steps,
        "tune_seconds": options.tune_seconds,
        "workloads": {},
        "time_to_loss": {},
    }


def write_result(name: str, result: dict[str, Any], options: argparse.Namespace) -> None:
    """Every number as JSON and the table as Markdown, in a file each."""
    result["load_after"], result["minutes"] = load_average(), (time.perf_counter() - result.pop("began")) / 60
    numbers = json.dumps(result, ensure_ascii=False, indent=1) + "\n"
    text = markdown(result)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        stem = f"{name}-{options.force}" if options.force else name
        write_atomic(options.out / f"{stem}.md", text)
        write_atomic(options.out / f"{stem}.json", numbers)
    print(text, end="", flush=True)


if __name__ == "__main__":
    main()
