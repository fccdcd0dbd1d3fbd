"""Training speed beside what people use today, side by side, with the gates and goals of the project.

    python benchmarks/speed.py                                   all workloads; about an hour on 2 quiet cores
    python benchmarks/speed.py W1 chat --rounds 9 --seconds 3 --out /tmp/speed
    python benchmarks/speed.py W2 --sides ours "peer, best"
    python benchmarks/speed.py --time-to-loss                    about ten minutes
    python benchmarks/speed.py --quick                           does it run at all?

Every side trains a model of its own in a process of its own and keeps both; all sides take turns, round after round,
each for some seconds and some steps at least. What is compared are the ratios of the rounds. In our processes freed
memory stays, as `unpad train` has it, in the others it goes as it does by default; a second measurement keeps it in all
of them, and one more process for every side measures its memory. "Our products alone" are the matrix products of our
updates and nothing in between.
What the workloads are stands in `workloads.py`, what the peers do in `peers.py`.
Peers need `pip install 'unpad[bench]'`; a side whose package is missing is left out and said so.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# The matrix library keeps 1,024 prepared products, enough for one model but not for nine that take turns in a process:
# without more every turn begins by preparing again what the others pushed out. A product can hold megabytes, so the
# number is bounded. Read when torch is loaded.
if "--time-to-loss" in sys.argv:
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "3000")

import peers
import time_to_loss
from apart import Apart
from workloads import NAMES, ProductsAlone, Workload, our_sides, workload

from unpad.nn.native import library
from unpad.storage import write_atomic
from unpad.training.memory import keep_freed_memory, peak_memory, process_memory, restart_peak, return_freed_memory
from unpad.trials.bench.measure import (
    Contender,
    Rounds,
    describe_machine,
    load_average,
    matrix_ceiling,
    measure_rounds,
    spread,
)

HERE = Path(__file__).parent
PACKAGES = ["transformers", "accelerate", "trl", "datasets", "numpy"]
OURS, TORCH_KERNELS, PRODUCTS = "ours", "ours, torch kernels", "our products alone"
ALONE = "one at a time, torch"  # what a loop over examples is without this package: torch's kernels, fp32
MEMORY_GATE = 0.7  # of the Trainer's peak at equal tokens per step
MIB = 2**20


@dataclass(frozen=True)
class Gate:
    """What must hold, and what is wanted.

    Args:
        side: measured side.
        others: what it is compared with, the fastest of them; none is the share of the ceiling.
        gate: the lower quartile of the rounds must reach it.
        goal: None where there is none.
    """

    what: str
    side: str
    others: tuple[str, ...]
    gate: float
    goal: float | None = None


def gates(defaults: Any, best: Any, alone: Any, share: Any = None, torch_kernels: float | None = None) -> list[Gate]:
    """The gates of one workload, each as (gate, goal)."""
    made = [
        Gate("against the peer's defaults", OURS, (peers.DEFAULTS,), *defaults),
        Gate("against the peer's best", OURS, (peers.BEST, peers.EQUAL), *best),
        Gate("against one at a time", OURS, (ALONE,), *alone),
    ]
    if share is not None:
        made.append(Gate("share of the ceiling", OURS, (), *share))
    if torch_kernels is not None:
        made.append(Gate("torch kernels against the peer's defaults", TORCH_KERNELS, (peers.DEFAULTS,), torch_kernels))
    return made


GATES: dict[str, list[Gate]] = {
    "W1": gates((9, 12), (3.5, 4.5), (18, 25), (0.60, 0.75), 5),
    "W2": gates((10, 15), (1.7, 2.3), (6, 8), (0.70, 0.85), 6),
    "W3": gates((12, 20), (1.9, 3), (3.5, 5), (0.52, 0.75)),
    "chat": gates((8, None), (3, None), (15, None)),
}


# --------------------------------------------------------------------------- sides

KEEP = {name for name in our_sides() if name != ALONE}  # sides that keep freed memory without being told


def all_sides(made: Workload) -> dict[str, Callable[[Workload], Any]]:
    return {**our_sides(), PRODUCTS: ProductsAlone, **peers.peer_sides(made)}


class Made:
    """A side as its process makes it.

    Args:
        name: of the workload.
        key: of the side.
        keeps: whether freed memory stays with the process.
    """

    def __init__(self, name: str, key: str, keeps: bool, options: argparse.Namespace) -> None:
        prepare_peers(options)
        if keeps:
            keep_freed_memory()
        made = workload(name, options.data)
        self.made = all_sides(made)[key](made)
        self.side = Contender(self.made.step, self.made.batches.cycle if hasattr(self.made, "batches") else 1)

    def describe(self) -> dict[str, Any]:
        """How it computes, and whether it really learned."""
        made, losses = self.made, self.made.losses
        few = max(min(len(losses) // 2, 10), 1)
        learned = (sum(losses[:few]) / few, sum(losses[-few:]) / few) if losses else (None, None)
        return {
            "precision": made.precision if hasattr(made, "precision") else "bf16" if made.bf16 else "fp32",
            "batch_size": made.batches.size if hasattr(made, "batches") else None,
            "loss_first": learned[0],
            "loss_last": learned[1],
        }


def build_sides(name: str, allocator: str, options: argparse.Namespace) -> dict[str, Apart]:
    """The sides that were asked for, all if none was, each in its process."""
    chosen = [key for key in all_sides(workload(name, options.data)) if not options.sides or key in options.sides]
    sides = {key: Apart(Made, name, key, allocator == "kept" or key in KEEP, options) for key in chosen}
    for key in chosen:  # one after the other: some measure which batch size is the fastest
        try:
            sides[key].build()
        except peers.MissingPackageError as missing:
            say(f"{name}: {key} is left out: it {missing}")
            sides.pop(key).close()
    return sides


def measure(name: str, allocator: str, options: argparse.Namespace) -> dict[str, Any]:
    """All sides of one workload; returns what the JSON holds."""
    sides = build_sides(name, allocator, options)
    result = measure_rounds(
        sides,
        options.rounds,
        options.seconds,
        min_steps=options.min_steps,
        warm_seconds=3 * options.seconds,
        ceiling=matrix_ceiling,
        report=lambda line: say(f"{name}: {line}"),
    )
    described = {key: {**side.describe(), **rates_of(result, key)} for key, side in sides.items()}
    judged = [judge(gate, result) for gate in GATES.get(name, [])]
    for side in sides.values():
        side.close()
    return {"sides": described, "ceilings": result.ceilings, "gates": [row for row in judged if row is not None]}


def rates_of(result: Rounds, name: str) -> dict[str, Any]:
    """Rates, ratios and shares of every round."""
    turns = result.turns[name]
    return {
        "rates": result.rates(name),
        "shares": result.shares(name),
        "times": {other: result.ratios(name, other) for other in (OURS, peers.DEFAULTS) if other in result.turns},
        "steps": sum(turn.steps for turn in turns),
        "tokens_per_step": sum(turn.tokens for turn in turns) / sum(turn.steps for turn in turns),
    }


def judge(gate: Gate, result: Rounds) -> dict[str, Any] | None:
    """Compare the rounds with a gate; None if a side was not measured."""
    if gate.side not in result.turns or any(other not in result.turns for other in gate.others):
        return None
    fastest = max(gate.others, key=lambda other: spread(result.rates(other)).median, default=None)
    values, bound = compare(result, gate.side, fastest), compare(result, PRODUCTS, fastest)
    found = spread(values)
    return {
        **asdict(gate),
        "other": fastest,
        "values": values,
        **asdict(found),
        "met": found.low >= gate.gate,
        "of_goal": None if gate.goal is None else found.median / gate.goal,
        "products_alone": spread(bound).median if bound and gate.side == OURS else None,
    }


def compare(result: Rounds, side: str, other: str | None) -> list[float]:
    """Ratios of the rounds to another side, or shares of the ceiling without one; none of a side not measured."""
    if side not in result.turns:
        return []
    return result.shares(side) if other is None else result.ratios(side, other)


def measure_peak(name: str, side_name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Memory of one side, alone in this process: the whole process at its peak, and before the side was made."""
    made = workload(name, options.data)
    gc.collect()
    return_freed_memory()
    if side_name in KEEP:
        keep_freed_memory()
    base = process_memory()
    side = all_sides(made)[side_name](made)
    restart_peak()
    if hasattr(side, "batches"):
        side.batches.longest_next()
    steps, began = 0, time.perf_counter()
    while steps < 2 * options.min_steps or time.perf_counter() - began < options.seconds:
        side.step()
        steps += 1
    return {"peak_bytes": peak_memory(), "base_bytes": base, "steps": steps}


# --------------------------------------------------------------------------- the other processes


def child(arguments: list[str]) -> dict[str, Any]:
    """Run this script in a process of its own and read its JSON."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, str(HERE / "speed.py"), *arguments, "--json", str(out)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return json.loads(out.read_text())


def common_arguments(options: argparse.Namespace) -> list[str]:
    return [
        "--rounds",
        str(options.rounds),
        "--seconds",
        str(options.seconds),
        "--min-steps",
        str(options.min_steps),
        "--data",
        str(options.data),
        *(["--quick"] if options.quick else []),
    ]


def peaks(name: str, sides: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Memory of the sides that are compared most, each in its own process."""
    result = {}
    for side in (OURS, TORCH_KERNELS, peers.DEFAULTS, peers.BEST, peers.EQUAL):
        if (described := sides.get(side)) is None:
            continue
        batch = ["--batch", str(described["batch_size"])] if described["batch_size"] else []
        say(f"{name}: memory of {side}")
        result[side] = child([name, "--peak-of", side, *batch, *common_arguments(options)])
    return result


def judge_memory(found: dict[str, Any]) -> dict[str, Any] | None:
    """Our peak against the peer's at our tokens per step: the whole process, and what training added to it."""
    if OURS not in found or peers.EQUAL not in found:
        return None
    mine, theirs = found[OURS], found[peers.EQUAL]
    added = (mine["peak_bytes"] - mine["base_bytes"]) / (theirs["peak_bytes"] - theirs["base_bytes"])
    whole = mine["peak_bytes"] / theirs["peak_bytes"]
    return {"whole": whole, "added": added, "gate": MEMORY_GATE, "met": whole <= MEMORY_GATE}


# --------------------------------------------------------------------------- tables


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def markdown(result: dict[str, Any]) -> str:
    machine, load = result["machine"], [result["machine"]["load"], result["load_after"]]
    versions = ", ".join(f"{key} {value}" for key, value in machine["packages"].items() if value)
    lines = [
        "# Training speed beside what people use today",
        "",
        f"    {result['command']}",
        "",
        f"Machine: {machine['cores']} cores of {machine['processor']}, {machine['memory_gib']} GiB, load "
        f"{' before and '.join(f'{value:.1f}' for value in load if value is not None)} after; "
        f"{machine['threads']} threads; {result['kernels']}.",
        f"Python {machine['python']}, torch {machine['torch']}, {versions}.",
        "",
    ]
    if result["workloads"]:
        lines += how_measured(result)
    for name, parts in result["workloads"].items():
        lines += workload_table(name, parts)
    if result["time_to_loss"]:
        lines += ["## Time to the same held-out loss", "", *time_to_loss.markdown(result["time_to_loss"])]
    return "\n".join(lines)


def how_measured(result: dict[str, Any]) -> list[str]:
    """Contents of the tables of workloads."""
    return [
        f"{result['rounds']} rounds of {result['seconds']:g} s and {result['min_steps']} steps for every side, in turn "
        "in processes of their own. Tokens are real",
        f"ones, counted alike for all. Every side first works {3 * result['seconds']:g} s untimed. Medians and "
        "quartiles of the rounds; ratios are those of the rounds too. The",
        "ceiling is the best bf16 product of 4,096 cubed between the rounds; the share counts operations that the real",
        "tokens need.",
        "Our products alone are the matrix products of our updates with nothing in between: what no way of doing the "
        "rest could pass.",
        "The peer is the Trainer of transformers, in W3 torch.nn.TransformerEncoder. Its best: bf16, batches of like",
        "lengths, the fastest batch size. Memory: of a process of its own, and in brackets what training added.",
        "",
    ]


def workload_table(name: str, parts: dict[str, Any]) -> list[str]:
    lines = [f"## {name}", ""]
    for allocator in ("default", "kept"):
        part = parts.get(allocator)
        if part is None:
            continue
        title = {"default": "As it is", "kept": "With an allocator that keeps memory in everybody's turns"}[allocator]
        low, high = min(part["ceilings"]) / 1e9, max(part["ceilings"]) / 1e9
        lines += [f"### {title}: ceiling {high:,.0f} GFLOP/s, lowest {low:,.0f}", ""]
        lines += side_table(part["sides"], parts.get("memory", {}) if allocator == "default" else {})
        lines += gate_table(part["gates"])
    memory = parts.get("memory_gate")
    if memory:
        lines += [
            f"Peak memory at equal tokens per step: {memory['whole']:.2f} of the peer's ({memory['added']:.2f} of what "
            f"training adds); gate {memory['gate']}: {'met' if memory['met'] else 'NOT met'}.",
            "",
        ]
    return lines


def side_table(sides: dict[str, Any], memory: dict[str, Any]) -> list[str]:
    head = ["side", "precision", "batch", "tokens per step", "tokens/s", "quartiles", "ours is times as fast"]
    head += ["share of ceiling", "steps", "loss, first to last", "peak memory"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name, side in sides.items():
        rate, share = spread(side["rates"]), spread(side["shares"])
        times = side["times"].get(OURS)
        ratio = "" if times is None else f"{spread([1 / value for value in times]).median:.2f}"
        peak = memory.get(name)
        cells = [
            name,
            side["precision"],
            str(side["batch_size"] or ""),
            f"{side['tokens_per_step']:,.0f}",
            f"{rate.median:,.0f}",
            f"{rate.low:,.0f} to {rate.high:,.0f}",
            ratio,
            f"{share.median:.1%}",
            f"{side['steps']:,}",
            learning(side),
            ""
            if peak is None
            else f"{peak['peak_bytes'] / MIB:,.0f} MiB ({(peak['peak_bytes'] - peak['base_bytes']) / MIB:,.0f})",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def learning(side: dict[str, Any]) -> str:
    first, last = side["loss_first"], side["loss_last"]
    if first is None:
        return ""
    return f"{first:.2f} to {last:.2f}" + (" DOES NOT LEARN" if len(side["rates"]) > 2 and last >= first else "")


def gate_table(judged: list[dict[str, Any]]) -> list[str]:
    if not judged:
        return []
    head = ["gate", "compared with", "lower quartile", "gate", "met", "median", "goal", "median of goal"]
    head += ["our products alone", "every round"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in judged:
        show = "{:.1%}" if row["other"] is None else "{:.2f}"
        cells = [
            row["what"],
            row["other"] or "",
            show.format(row["low"]),
            show.format(row["gate"]),
            "yes" if row["met"] else "NO",
            show.format(row["median"]),
            "" if row["goal"] is None else show.format(row["goal"]),
            "" if row["of_goal"] is None else f"{row['of_goal']:.0%}",
            "" if row["products_alone"] is None else show.format(row["products_alone"]),
            " ".join(show.format(value) for value in row["values"]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


# --------------------------------------------------------------------------- command line


def read_command_line() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"workloads: {', '.join(NAMES)}; default all of them")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0, help="of every side in every round, at least")
    parser.add_argument("--min-steps", type=int, default=2, help="of every side in every round")
    parser.add_argument("--sides", nargs="+", default=[], help="names as the table has them; default all")
    parser.add_argument("--allocator", choices=["both", "default", "kept"], default="both")
    parser.add_argument("--no-memory", action="store_true", help="leave out the peaks of memory")
    parser.add_argument(
        "--time-to-loss", action="store_true", help="measure this, and named workloads if there are any"
    )
    parser.add_argument("--slices", type=int, default=8, help="of every run of --time-to-loss")
    parser.add_argument("--data", type=Path, default=HERE / "../../shared/data", help="folder with zh/")
    parser.add_argument("--out", type=Path, default=HERE / "speed", help="folder for tables and numbers")
    parser.add_argument("--quick", action="store_true", help="a trial: few steps, no numbers to believe; prints only")
    for internal in ("--peak-of", "--batch"):
        parser.add_argument(internal, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.data = options.data.resolve()
    unknown = [name for name in options.names if name not in NAMES]
    if unknown:
        parser.error(f"there is no workload {unknown[0]}; there are {', '.join(NAMES)}")
    if not options.names and not options.time_to_loss:
        options.names = NAMES
    if options.quick:
        options.rounds, options.seconds, options.min_steps, options.slices = 2, 0.1, 1, 2
    return options


def prepare_peers(options: argparse.Namespace) -> None:
    """Tell the peers of this process what was asked for."""
    peers.quiet()
    if options.quick:
        peers.BATCH_CANDIDATES, peers.STRATA = (8, 16), 2
    if options.batch:
        peers.BATCH_CANDIDATES = (int(options.batch),)


def typed_command() -> str:
    """Command line, without the paths of this machine."""
    words, kept = sys.argv[1:], []
    for i, word in enumerate(words):
        if word not in ("--data", "--json", "--out") and (i == 0 or words[i - 1] not in ("--data", "--json", "--out")):
            kept.append(f'"{word}"' if " " in word else word)
    return " ".join(["python benchmarks/speed.py", *kept])


def measure_all(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One workload in every process it needs."""
    if not options.data.is_dir() and name not in ("W1", "W2", "W3"):
        say(f"{name} is left out: there is no folder {options.data.name} with the corpora; give --data")
        return {}
    wanted = ("default", "kept") if options.allocator == "both" else (options.allocator,)
    parts: dict[str, Any] = {allocator: measure(name, allocator, options) for allocator in wanted}
    if not options.no_memory and "default" in parts:
        parts["memory"] = peaks(name, parts["default"]["sides"], options)
        parts["memory_gate"] = judge_memory(parts["memory"])
    return parts


def main() -> None:
    options = read_command_line()
    prepare_peers(options)
    if options.peak_of:
        options.json.write_text(json.dumps(measure_peak(options.names[0], options.peak_of, options)))
        return
    if options.time_to_loss:
        result = {**about(options), "time_to_loss": {}}
        for name in time_to_loss.NAMES:
            found = time_to_loss.time_to_loss(name, options.data, options.slices, options.seconds, say)
            result["time_to_loss"][name] = found
        write_result("time_to_loss", result, options)
    for name in options.names:
        began = about(options)
        try:
            parts = measure_all(name, options)
        except MemoryError as gone:
            raise SystemExit(f"{name}: {gone} (--sides)") from None
        write_result(name, {**began, "workloads": {name: parts}}, options)


def about(options: argparse.Namespace) -> dict[str, Any]:
    """Conditions and machine of the measurement that begins now."""
    return {
        "command": typed_command(),
        "machine": describe_machine(PACKAGES),
        "kernels": library.describe(),
        "rounds": options.rounds,
        "seconds": options.seconds,
        "min_steps": options.min_steps,
        "workloads": {},
        "time_to_loss": {},
    }


def write_result(name: str, result: dict[str, Any], options: argparse.Namespace) -> None:
    """Every number as JSON and the table as Markdown, in a file each."""
    result["load_after"] = load_average()
    numbers = json.dumps(result, ensure_ascii=False, indent=1) + "\n"
    text = markdown(result)
    if not options.quick:
        options.out.mkdir(parents=True, exist_ok=True)
        write_atomic(options.out / f"{name}.md", text)
        write_atomic(options.out / f"{name}.json", numbers)
    print(text, end="", flush=True)


if __name__ == "__main__":
    main()
