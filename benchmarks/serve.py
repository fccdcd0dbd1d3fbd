"""What `unpad serve` keeps under load; each with its gate. `serving.py` has it beside llama.cpp.

    python benchmarks/serve.py                  # the table, about ten minutes of two idle cores

It writes its part of `benchmarks/serve.md` (`--out`), and ends with code 1 where a gate does not hold or was
not measured. Servers are processes of their own on free ports of 127.0.0.1, of a run that is made for it: the 512-wide
decoder of `benchmarks/generation.md` with a context of 2,048 and random weights.

Clients are processes' own asyncio streams, one connection a request. Prompts have 4 to 400 tokens and are read by no
request before; replies have 32 tokens, which is checked. Ratios are those within a round, and the table has their
medians and quartiles.

- Tokens a second are those of the clock. `--shared`, for a machine that others use, takes tokens a second of the
  servers' processor time instead (`/proc/PID/stat`). Gaps and first tokens are always of the clock.
- Equal to alone: half of the streams are drawn and half greedy; the later half joins one by one while others stream,
  every eighth leaves. Truth is each request alone, one after the other, in a server of its own.
- Processor time outside the model: the server's (all threads, `/proc/PID/stat`) without what its model's thread takes
  inside the model, by a clock around every call (`serve_clocked.py`). Tokens that are drawn, texts, events, HTTP and
  the rest of Python are outside.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from measure import load_average, spread
from serve_measures import (
    ALIKE,
    WITH_USAGE,
    Joined,
    Load,
    WrongAnswerError,
    differing,
    gone,
    greedy,
    join,
    joining,
    lengths,
    load,
    loads,
    one_by_one,
    outside,
    prompts,
    scored,
)
from serve_sides import CannotStartError, Side, make_run, ours

from unpad.inference.loaded import generation_precision
from unpad.machine import full_processor_name
from unpad.nn.linear import has_tiles
from unpad.nn.native import library
from unpad.recipes.training import GenerateSettings
from unpad.terminal.table import number_of

OUT = Path(__file__).with_suffix(".md")
CLIENTS = (1, 8, 32)
MANY, GONE = 256, 1000
AGAINST_ONE = {True: {8: 3.0, 32: 4.0}, False: {8: 2.5, 32: 3.0}}  # with AMX, and without
MOST_GAP, MOST_FIRST, MOST_JOINED = 0.4, 1.6, 2.0  # times
MOST_OUTSIDE, MOST_SECONDS = 0.2, 1.0
WHOLE = ("--piece", "2048")


@dataclass(frozen=True)
class Row:
    """A line of the table; `holds` is None where there is no gate, False also where it was not measured."""

    what: str
    measured: str
    gate: str = ""
    holds: bool | None = None

    @property
    def cells(self) -> str:
        verdict = {None: "", True: "yes", False: "**no**"}[self.holds]
        return f"| {self.what} | {self.measured} | {self.gate} | {verdict} |"


def at_least(what: str, values: Sequence[float], gate: float) -> Row:
    """A row whose median must reach a gate."""
    found = spread(values)
    return Row(what, shown(values), f"at least {gate:g}", found.median >= gate)


def at_most(what: str, values: Sequence[float], gate: float, show: str = "{:.2f}") -> Row:
    """A row whose median must not pass a gate."""
    found = spread(values)
    return Row(what, shown(values, show), f"at most {show.format(gate)}", found.median <= gate)


def shown(values: Sequence[float], show: str = "{:.2f}") -> str:
    found = spread(values)
    return f"{show.format(found.median)} ({show.format(found.low)} to {show.format(found.high)})"


def equal(what: str, wrong: int, num: int) -> Row:
    """The row of answers that must all be those of the same requests alone."""
    return Row(what, f"{num - wrong} of {num}", "all", wrong == 0)


# --------------------------------------------------------------------------- rows from what was measured


def speed_rows(found: dict[tuple[str, int], list[Load]], shared: bool, tiles: bool) -> list[Row]:
    """Rates of each number of clients, and against one client."""
    unit = "tokens a second of processor time" if shared else "tokens/s"
    rates = {key: [one.rate(shared) for one in many] for key, many in found.items()}
    rows = [Row(f"{unit}, {name}, {_clients(num)}", shown(many, "{:.0f}")) for (name, num), many in rates.items()]
    for num, gate in AGAINST_ONE[tiles].items():
        ratios = _ratios(rates["unpad", num], rates["unpad", 1])
        rows.append(at_least(f"{_clients(num)} against one, times", ratios, gate))
    return rows


def gap_rows(pieces: Sequence[Joined], whole: Sequence[Joined], short: Sequence[Joined]) -> list[Row]:
    """What a long prompt does to others, in pieces against whole, and to 63 short ones against none."""
    gaps, firsts = ([getattr(one, name) for one in pieces] for name in ("gap", "first"))
    whole_gaps, whole_firsts = ([getattr(one, name) for one in whole] for name in ("gap", "first"))
    long = "a prompt of 1,500 tokens beside 8 streams"
    own, none, steady = (
        f"{1e3 * median(getattr(one, name) for one in short):.0f}" for name in ("gap", "without", "steady")
    )
    return [
        Row(f"{long}: longest gap of these, ms", f"{1e3 * median(gaps):.0f}, whole {1e3 * median(whole_gaps):.0f}"),
        at_most(f"{long}: longest gap against whole prompts, times", _ratios(gaps, whole_gaps), MOST_GAP),
        Row(f"{long}: its first token, ms", f"{1e3 * median(firsts):.0f}, whole {1e3 * median(whole_firsts):.0f}"),
        at_most(f"{long}: its first token against whole prompts, times", _ratios(firsts, whole_firsts), MOST_FIRST),
        Row("it joins 63 short rows: longest gap, ms", f"{own}, without it {none}, steady {steady}"),
        at_most("it joins 63 short rows: against none, times", [one.gap / one.without for one in short], MOST_JOINED),
    ]


def _ratios(one: Sequence[float], other: Sequence[float]) -> list[float]:
    return [mine / theirs for mine, theirs in zip(one, other, strict=True)]


def _clients(num: int) -> str:
    return "1 client" if num == 1 else f"{num} clients"


# --------------------------------------------------------------------------- the table


class Bench:
    """Servers of one run, and what is measured of them."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.run = make_run(folder)
        self.precision = generation_precision(GenerateSettings())

    def serve(self, *options: str, log: str = "ours") -> AbstractContextManager[tuple[Side, subprocess.Popen[str]]]:
        return ours(self.run, self.folder / f"{log}.log", self.options.threads, *options)

    async def rows(self) -> list[Row]:
        rows: list[Row] = []

        def note(*found: Row) -> None:
            rows.extend(found)
            for row in found:
                print(row.cells, flush=True)

        bodies = scored(MANY, seed=11)
        with self.serve(log="alone") as (side, _):
            truth = await one_by_one(side, bodies)
        with self.serve("--waiting", str(GONE)) as (side, _):
            note(equal("32 streams equal to alone", differing(truth[:32], await joining(side, bodies[:32])), 32))
            with self.serve("--rows", str(MANY), log="many") as (many, _):
                note(equal("256 streams equal to alone", differing(truth, await joining(many, bodies)), MANY))
                texts = prompts(77, MANY, lengths(ALIKE))
                one = await load(many, [greedy(many, text, **WITH_USAGE) for text in texts], MANY)
            found = await loads({"unpad": side}, CLIENTS, self.options.rounds)
            speeds = speed_rows(found, self.options.shared, has_tiles())
            speeds.insert(len(CLIENTS), Row("the same, unpad, 256 clients", f"{one.rate(self.options.shared):.0f}"))
            note(*speeds)
            with self.serve(*WHOLE, log="whole") as (whole, _):
                pairs = [(side, whole)[:: 1 if number % 2 else -1] for number in range(self.options.rounds)]
                joined = {id(side): list[Joined](), id(whole): list[Joined]()}
                for number, pair in enumerate([pairs[0], *pairs]):  # the first warms up
                    for one_side in pair:
                        met = await join(one_side, 500 + 10 * number, 8)
                        joined[id(one_side)] += [met] if number else []
            short = [await join(side, 800 + 10 * number, 63) for number in range(self.options.rounds)]
            note(*gap_rows(joined[id(side)], joined[id(whole)], short))
            log, clock = self.folder / "clocked.log", self.folder / "clock"
            with ours(self.run, log, 1, clock=clock) as (clocked, _):  # its clock is one thread's
                await outside(clocked, 900, 32)  # warms up
                shares = [await outside(clocked, 901 + number, 32) for number in range(self.options.rounds)]
            note(at_most("processor time outside the model, 32 streams", shares, MOST_OUTSIDE, "{:.1%}"))
            times = [(await gone(side, GONE, 950 + number))[self.options.shared] for number in range(3)]
            what = "seconds of processor time" if self.options.shared else "seconds"
            note(at_most(f"1,000 clients gone at once: {what} until their rows are free", times, MOST_SECONDS))
        return rows


def table(options: argparse.Namespace, folder: Path) -> tuple[list[str], bool]:
    """The lines of the table, and whether every gate holds."""
    bench = Bench(options, folder)
    about = machine_lines(options, bench.precision)
    print("\n".join(about), flush=True)
    began, before = perf_counter(), load_average()
    rows = asyncio.run(bench.rows())
    clock = "of the servers' processor time, as others used the machine" if options.shared else "by the clock"
    lines = [
        *about,
        f"{options.rounds} rounds in {(perf_counter() - began) / 60:.0f} minutes; tokens a second are {clock}; load "
        f"{before:.1f} before. Medians, and quartiles in brackets.",
        "",
        "| what | measured | gate | holds |",
        "|---|---|---|---|",
        *(row.cells for row in rows),
    ]
    return lines, all(row.holds is not False for row in rows)


def machine_lines(options: argparse.Namespace, precision: str) -> list[str]:
    tiles, threads = "AMX" if has_tiles() else "no AMX", number_of(options.threads, "threads")
    return [
        f"{os.cpu_count()} cores of {full_processor_name()}, {tiles}; {precision}, {threads} a server; "
        f"{library.describe()}; torch {torch.__version__}.",
    ]


# --------------------------------------------------------------------------- the page


def write_section(path: Path, command: str, lines: Sequence[str]) -> None:
    """Put the table in its place on the page; what follows it stays."""
    _, mark, rest = path.read_text(encoding="utf-8").partition("\n## Clients") if path.exists() else ("", "", "")
    head = ["# A server under load", "", f"    {command}", "", *lines, ""]
    path.write_text("\n".join(head) + mark + rest, encoding="utf-8")


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder for the run and the logs, which goes with the context."""
    with tempfile.TemporaryDirectory(prefix="unpad-serve-") as name:
        yield Path(name)


def read_command_line(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of every server")
    parser.add_argument("--shared", action="store_true", help="others use this machine: rates by processor time")
    parser.add_argument("--out", type=Path, default=OUT, help="page that gets the section")
    return parser.parse_args(arguments)


def main() -> int:
    options = read_command_line()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # servers end with this process
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192) if soft < 8192 else soft, hard))
    try:
        with scratch() as folder:
            lines, good = table(options, folder)
    except (CannotStartError, WrongAnswerError) as error:
        print(f"cannot be measured: {error}", file=sys.stderr)
        return 1
    write_section(options.out, command_of(options), lines)
    print("every gate holds" if good else "a gate does not hold")
    return int(not good)


def command_of(options: argparse.Namespace) -> str:
    """The command of a section."""
    return " ".join(["python benchmarks/serve.py", f"--rounds {options.rounds}", *["--shared"] * options.shared])


if __name__ == "__main__":
    sys.exit(main())
