"""Power cuts at every instant of recorded runs, and system calls that fail one by one.

    make crash     # goes on with the totals of crash.json beside this file
    python benchmarks/reliability/crash.py --kinds images --states 2000 --calls 0 --dry-run

A round of a kind records a run, undisturbed or killed before one of its operations and resumed, cuts the power after
every operation in 24 ways, and judges what is left; every so many states are also resumed to the end and compared.
Exit code 1 if something that was saved is lost, or something that is not whole is taken for whole.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from itertools import count
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.reliability import totals
from benchmarks.reliability.disk_model import MODES
from benchmarks.reliability.failing import ERRORS, failing
from benchmarks.reliability.oracle import LostError, Oracle
from benchmarks.reliability.recording import record
from benchmarks.reliability.states import Found, Place, examine

RECORDED = {"text": "text", "images": "images", "patients": "patients"}
RESUME_EVERY = 500  # states


def main() -> None:
    """Go on until every kind has its states, and every call has failed once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--states", type=int, default=10_000, help="distinct states of every kind, all runs of it together"
    )
    parser.add_argument("--calls", type=int, help="failing calls of every kind; default all")
    parser.add_argument("--kinds", default=",".join(RECORDED))
    parser.add_argument("--dry-run", action="store_true", help="begin at 0, and leave totals and page as they are")
    options = parser.parse_args()
    found = {"kinds": {}, "calls": {}} if options.dry_run else {"calls": {}} | totals.load("crash")
    shm, kinds = Path("/dev/shm"), options.kinds.split(",")
    with tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else None) as folder:
        for kind in kinds:
            total = found["kinds"].setdefault(kind, dict(NO_STATES) | {"faults": []})
            while total["distinct"] < options.states:
                one_round(kind, Path(folder) / f"{kind}-{total['rounds']}", total)
                print(f"{kind}: {total['distinct']:,} states, {total['resumed']} resumed", flush=True)
                if not options.dry_run:
                    totals.save("crash", found)
        for kind in kinds:
            total = found["calls"].setdefault(kind, {"calls": 0, "tried": 0, "codes": {}, "faults": []})
            for _ in fail_calls(kind, Path(folder) / f"{kind}-calls", total, options.calls):
                if not options.dry_run:
                    totals.save("crash", found)
            print(f"{kind}: {total['tried']:,} of {total['calls']:,} calls have failed", flush=True)
    if not options.dry_run:
        totals.put_table("crash", table(found))
    print("\n".join(table(found)))
    sys.exit(any(one["faults"] for part in ("kinds", "calls") for one in found[part].values()))


NO_STATES = {"rounds": 0, "operations": 0, "examined": 0, "distinct": 0, "resumed": 0}


def one_round(kind: str, folder: Path, total: dict[str, Any]) -> Found:
    """Record a run, and judge the states that it can leave; add to the total."""
    number = total["rounds"]
    draw = random.Random(f"{kind} {number}")
    # The second and later rounds follow a kill, before any of the operations of the first.
    recording = record(kind, folder, draw.randrange(total["operations"]) if number else None)
    (folder / "scratch").mkdir()
    seen = count(draw.randrange(RESUME_EVERY))

    def resume(place: Place) -> None:
        if next(seen) % RESUME_EVERY == 0:
            total["resumed"] += 1
            recording.resume(place.copy())

    passes = range(number * len(MODES), (number + 1) * len(MODES))
    oracle, place = Oracle(recording.end, folder / "scratch"), Place(folder / "place")
    found = examine(recording.operations, oracle, place, lambda done: passes, begin=recording.begin, resume=resume)
    if not number:
        total["operations"] = len(recording.operations)
    total["rounds"] += 1
    total["examined"] += found.examined
    total["distinct"] += found.distinct
    for fault in found.faults.values():
        print(f"FAULT: {kind}, round {number}: {fault}", flush=True)
        total["faults"].append(f"round {number}: {fault[:300]}")
    return found


def fail_calls(kind: str, folder: Path, total: dict[str, Any], limit: int | None) -> Any:
    """Let every call of a run fail once; yield after each."""
    runs = failing(kind, folder)
    total["calls"] = len(runs.names)
    order = sorted(range(len(runs.names)), key=lambda number: random.Random(number).random())
    for number in order[total["tried"] : limit]:
        try:
            code = str(runs.attempt(number, ERRORS[number % len(ERRORS)]).code)
            total["codes"][code] = total["codes"].get(code, 0) + 1
        except LostError as error:
            print(f"FAULT: {error}", flush=True)
            total["faults"].append(str(error)[:300])
        total["tried"] += 1
        yield


def table(found: dict[str, Any]) -> list[str]:
    """The totals as lines of a page."""
    heads = ["recorded", "operations", "states examined", "distinct", "resumed to the end", "lost or unlike"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for kind, one in found["kinds"].items():
        cells = [one["operations"], one["examined"], one["distinct"], one["resumed"], len(one["faults"])]
        lines.append(f"| {kind} | " + " | ".join(f"{cell:,}" for cell in cells) + " |")
    lines.append("")
    if found["calls"]:
        heads = ["run of", "calls", "failed once", "the run went on", "ended with 6", "another code", "lost or unlike"]
        lines += ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for kind, one in found["calls"].items():
        codes = one["codes"]
        others = sum(num for code, num in codes.items() if code not in ("0", "6"))
        cells = [one["calls"], one["tried"], codes.get("0", 0), codes.get("6", 0), others, len(one["faults"])]
        lines.append(f"| {kind} | " + " | ".join(f"{cell:,}" for cell in cells) + " |")
    where = f"{found['processor']}, {found['date']}, commit {found['commit']}" if "commit" in found else "not kept"
    return [*lines, *[""] * bool(found["calls"]), f"`make crash`, all runs of it so far. {where}."]


if __name__ == "__main__":
    main()
