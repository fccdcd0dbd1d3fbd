"""Random damage to every file, name and argument that comes from outside, for as long as one likes.

    make fuzz                                          # another 20,000 cases, about a minute of two cores
    make fuzz CASES=5000000 SECONDS=7200               # until so many in all, or for so long
    python benchmarks/fuzz.py --case text_jsonl 17     # one case, with its traceback
    python benchmarks/fuzz.py --found FILE             # one kept finding, with its traceback

Every case is decided by its target and its number alone. A case is a finding where a reader does anything but return
a result or raise an error of the right kind; where rows are neither used nor bad, or a damaged checkpoint loads; and
where it takes 10 seconds of processor time, or the process 1 GB of memory. A finding is kept in
tests/helpers/fuzz/found, one file per signature, where `make test` tries it again from then on. Totals add up over
runs in benchmarks/fuzz.json and stand in docs/internals/reliability.md. Exit code 1 where a finding is open.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
os.environ |= {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}

from tests.helpers.fuzz.crew import Plan, Totals, fuzz, open_findings  # noqa: E402
from tests.helpers.fuzz.target import Builder, judge, random_of  # noqa: E402
from tests.helpers.fuzz.worker import open_target  # noqa: E402

STATE = ROOT / "benchmarks" / "fuzz.json"
FOUND = ROOT / "tests" / "helpers" / "fuzz" / "found"
PAGE = ROOT / "docs" / "internals" / "reliability.md"
BEGIN, END = "<!-- fuzz: begin -->\n", "<!-- fuzz: end -->\n"


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=0, help="end when all runs together have so many cases")
    parser.add_argument("--seconds", type=float, default=7 * 24 * 3600.0, help="end after so many seconds")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes at a time")
    parser.add_argument("--targets", nargs="+", metavar="NAME", help="only these targets")
    parser.add_argument("--state", type=Path, default=STATE, help="file of the totals")
    parser.add_argument("--keep", type=Path, default=FOUND, help="folder of findings")
    parser.add_argument("--case", nargs=2, metavar=("TARGET", "NUMBER"), help="run one case, with its traceback")
    parser.add_argument("--found", type=Path, metavar="FILE", help="run one kept finding, with its traceback")
    parser.add_argument("--table", action="store_true", help="only write the table of docs/internals/reliability.md")
    given = parser.parse_args()
    if given.table:
        write_table(Totals.read(given.state), [])
        return
    builders = _builders(given.targets)
    if given.case or given.found:
        _show(builders, given)
        return
    total = given.cases or Totals.read(given.state).num_cases + 20_000
    plan = Plan(total, given.seconds, given.workers, given.keep, given.state, origin())
    before = open_findings(given.keep, builders, plan.limits)
    totals, _ = fuzz(plan, builders, lambda line: print(line, flush=True), before)
    still = open_findings(given.keep, builders, plan.limits)
    print(summary(totals, still))
    if given.state == STATE:
        write_table(totals, still)
    sys.exit(1 if still else 0)


def _builders(names: list[str] | None) -> dict[str, Builder]:
    from tests.helpers.fuzz.targets import builders

    found = builders()
    unknown = [name for name in names or [] if name not in found]
    if unknown:
        sys.exit(f"there is no target {unknown[0]}; known: {', '.join(sorted(found))}")
    return {name: found[name] for name in names} if names else found


def origin() -> dict[str, Any]:
    """Commit, day and processor of this run."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short=9", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    return {"commit": commit.stdout.strip(), "date": f"{datetime.now(UTC):%Y-%m-%d}", "processor": model}


def _show(builders: Mapping[str, Builder], given: argparse.Namespace) -> None:
    """Run one case in this process, so that a debugger can be used, and print what becomes of it."""
    kept = json.loads(given.found.read_text(encoding="utf-8")) if given.found else {}
    name, number = given.case or (kept["target"], kept["seed"])
    target = open_target(builders[name])
    data = kept["data"].encode("latin-1") if kept else target.make(random_of(name, int(number)))
    print(f"{len(data)} bytes: {data[:2000]!r}")
    try:
        print("result:", target.run(data))
    except BaseException:
        traceback.print_exc()
    print(judge(target, data))


# --------------------------------------------------------------------------- figures


def summary(totals: Totals, still: list[str]) -> str:
    """Rates of the targets as lines, the slowest first, and the findings that are open."""
    rows = sorted(totals.targets.items(), key=lambda item: item[1].cases / max(item[1].seconds, 1e-9))
    lines = [
        f"{name:20} {one.cases:9,} cases {one.cases / max(one.seconds, 1e-9):8,.0f}/s  "
        f"{one.refused / max(one.cases, 1):4.0%} refused  {one.failed:6,} failed  slowest {one.slowest:6.3f} s  "
        f"{one.memory >> 20:4} MB"
        for name, one in rows
    ]
    return "\n".join([*lines, f"{totals.num_cases:,} cases in all", *(f"open: {one}" for one in still)])


def write_table(totals: Totals, still: list[str]) -> None:
    """Write the figures between their marks in docs/internals/reliability.md."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(before + BEGIN + table(totals, still) + END + after, encoding="utf-8")


def table(totals: Totals, still: list[str]) -> str:
    """The figures as Markdown."""
    runs = [run for run in totals.runs if run["cases"]]
    head = [
        "| target | cases | refused | uncaught | slowest case | most memory | cases/s |",
        "|---|---|---|---|---|---|---|",
    ]
    lines = [
        f"| `{name}` | {one.cases:,} | {one.refused / max(one.cases, 1):.0%} | {one.failed:,} | {one.slowest:.2f} s | "
        f"{one.memory / 1e6:,.0f} MB | {one.cases / max(one.seconds, 1e-9):,.0f} |"
        for name, one in sorted(totals.targets.items())
    ]
    hours = sum(run["seconds"] for run in runs) / 3600
    said = "" if not runs else (
        f"\n{totals.num_cases:,} cases of {len(totals.targets)} targets in {hours:.1f} hours of one core,\n"
        f"from {runs[0]['date']} (commit {runs[0]['commit']}) to {runs[-1]['date']} (commit {runs[-1]['commit']}), on\n"
        f"{', '.join(sorted({run['processor'] for run in runs}))}. Findings that are open: {len(still)}.\n"
    )  # fmt: skip
    return "\n".join([*head, *lines]) + "\n" + said


if __name__ == "__main__":
    main()
