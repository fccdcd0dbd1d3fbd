"""Runs killed at random instants and resumed, until they end with the bytes of a run that nothing disturbed.

    make kill KILLS=1000   # of all runs of it together, whose totals are in kill.json beside this file
    python benchmarks/reliability/kill.py --kills 20 --kinds text --dry-run

Four kinds of runs in turn, half of them with an empty cache of their own. Four of five kills are SIGKILL, the others
signals that a run answers by saving, alone or two right after each other. Exit code 1 if a run has other bytes, leaves
temporary files, prints a traceback, or ends with a code of none of its signals; its directory is then kept.
"""

from __future__ import annotations

import argparse
import random
import resource
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.reliability import totals, victim
from benchmarks.reliability.kinds import KINDS, command

TRAINED = ("text", "images", "patients", "vqa")
TITLES = {"text": "text", "images": "images", "patients": "patients", "vqa": "questions about images"}
MOST_KILLS = 15  # of one run, which then ends undisturbed
POLITE = [
    (signal.SIGTERM,),
    (signal.SIGINT,),
    (signal.SIGHUP,),
    (signal.SIGTERM, signal.SIGKILL),
    (signal.SIGINT, signal.SIGINT),
    (signal.SIGHUP, signal.SIGTERM),
]


class Kind:
    """One kind of runs: its data, and the digests of the run that nothing disturbs."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.recipe = KINDS[name](folder / "data")
        began = _processor_s()
        self._check(self.begin("calm", "cache", resume=False))
        self.seconds = _processor_s() - began
        self.expected = victim.digests(folder / "calm")
        assert self.expected

    def begin(self, run: str, cache: str, *, resume: bool, **killed: Any) -> victim.Ended:
        """Begin or go on with a run, and wait until it has ended."""
        errors = self.folder / "errors"
        arguments = command(self.recipe, self.folder / run, resume=resume)
        return victim.ended(victim.start(arguments, self.folder / cache, errors), errors, **killed)

    def _check(self, end: victim.Ended) -> None:
        if end.code:
            sys.exit(f"{self.name}: the undisturbed run ended with {end.code}\n{end.error}")


def main() -> None:
    """Kill until the totals hold as many kills as the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000, help="of all runs of it together")
    parser.add_argument("--kinds", default=",".join(TRAINED))
    parser.add_argument("--dry-run", action="store_true", help="begin at 0, and leave totals and page as they are")
    options = parser.parse_args()
    found = {"kinds": {}} if options.dry_run else totals.load("kill")
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else None) as folder:
        kinds = [Kind(name, Path(folder) / name) for name in options.kinds.split(",")]
        while _num_kills(found) < options.kills:
            for kind in kinds:
                total = found["kinds"].setdefault(kind.name, dict(NOTHING) | {"signals": {}, "failures": []})
                one_run(kind, total, options.kills - _num_kills(found))
                if not options.dry_run:
                    totals.save("kill", found)
            print(f"{_num_kills(found):,} kills", flush=True)
    if not options.dry_run:
        totals.put_table("kill", table(found))
    print("\n".join(table(found)))
    sys.exit(any(one["failures"] for one in found["kinds"].values()))


NOTHING = {"kills": 0, "runs": 0, "cold": 0, "in_a_row": 0}


def one_run(kind: Kind, total: dict[str, Any], most: int) -> None:
    """Train one run to its end, with at most so many kills at random instants, and compare it."""
    draw = random.Random(f"{kind.name} {total['runs']}")
    number = total["runs"]
    cold = bool(number % 2)
    run, cache = f"run-{number}", f"cache-{number}" if cold else "cache"
    kills, asked = 0, False
    while True:
        signals = (signal.SIGKILL,) if draw.random() < 0.8 else draw.choice(POLITE)
        if kills >= min(most, MOST_KILLS):
            signals = ()
        after = draw.random() ** 1.5 * kind.seconds * 0.9
        end = kind.begin(run, cache, resume=True, signals=signals, after_s=after)
        if end.code == 0:
            break
        if end.is_unforeseen or end.code not in {code for number in signals for code in (-number, 128 + number)}:
            _fail(kind, run, total, f"code {end.code} after {signals}: {end.error[-800:]}")
            return
        kills, asked = kills + 1, asked or signals != (signal.SIGKILL,)
        names = "+".join(signal.Signals(number).name for number in signals)
        total["signals"][names] = total["signals"].get(names, 0) + 1
        total["kills"] += 1
    found = victim.digests(kind.folder / run)
    differing = victim.unlike(found, kind.expected, saved_elsewhere=asked)
    if differing:
        _fail(kind, run, total, f"differs in {', '.join(differing)}")
        return
    total["runs"], total["cold"] = total["runs"] + 1, total["cold"] + cold
    total["in_a_row"] = max(total["in_a_row"], kills)
    shutil.rmtree(kind.folder / run)
    if cold:
        shutil.rmtree(kind.folder / cache, ignore_errors=True)


def _fail(kind: Kind, run: str, total: dict[str, Any], what: str) -> None:
    kept = Path(tempfile.mkdtemp(prefix="unpad-killed-"))
    shutil.copytree(kind.folder, kept, dirs_exist_ok=True)
    print(f"FAILED: {kind.name} {run}, kept in {kept}: {what}", flush=True)
    total["failures"].append(f"{run}: {what[:300]}")
    total["runs"] += 1


def table(found: dict[str, Any]) -> list[str]:
    """The totals as lines of a page."""
    heads = ("runs of", "kills", "SIGKILL", "other signals", "runs", "empty cache", "most of one run", "lost or unlike")
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for name in TRAINED:
        if one := found["kinds"].get(name):
            kills, hard = one["kills"], one["signals"].get("SIGKILL", 0)
            cells = (kills, hard, kills - hard, one["runs"], one["cold"], one["in_a_row"], len(one["failures"]))
            lines.append(f"| {TITLES[name]} | " + " | ".join(f"{cell:,}" for cell in cells) + " |")
    where = f"{found['processor']}, {found['date']}, commit {found['commit']}" if "commit" in found else "not kept"
    return [*lines, "", f"`make kill`, all runs of it so far: {_num_kills(found):,} kills. {where}."]


def _num_kills(found: dict[str, Any]) -> int:
    return sum(one["kills"] for one in found["kinds"].values())


def _processor_s() -> float:
    """Processor seconds of the children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
