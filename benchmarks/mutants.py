"""Small faults in ten critical files, and whether the tests near each file notice them.

    python benchmarks/mutants.py [--set quick] [--only NAME]

Each mutant of `mutants.json` is one replacement in one file; the file is put back after its tests, also after Ctrl-C.
Names that begin with a are of a report on what tests overlooked, those with b were written without reading a test.
`--set quick` asks the tests of `make test` alone. The rest of a line is the first test that failed, and why. Run it in
a copy of the checkout, on a machine that does nothing else: a test that is slowed down may fail by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
NEAR = {  # folder of a file below unpad/ -> tests to ask, the nearest first
    "batching": (["tests/batching"], ["tests/nn", "tests/training", "tests/receipts"]),
    "nn": (["tests/nn"], ["tests/models", "tests/training"]),
    "training": (["tests/training/test_step.py"], ["tests/training"]),
    "run": (["tests/run"], ["tests/training"]),
    "storage": (["tests/storage"], ["tests/run", "tests/training"]),
    "serving": (["tests/serving"],),
    "processes": (["tests/processes"], ["tests/training"]),
    "proof": (["tests/proof"],),
}
SECONDS = 1800  # of the tests of one mutant; one that goes on is noticed


def verdict(mutant: dict[str, str], chosen: str) -> str:
    """Why the tests fail with a mutant; "" where they pass."""
    path = ROOT / mutant["file"]
    text = path.read_text(encoding="utf-8")
    if mutant["old"] not in text:
        return "the code is gone"
    path.write_text(text.replace(mutant["old"], mutant["new"], 1), encoding="utf-8")
    try:
        for tests in NEAR[Path(mutant["file"]).parts[1]]:
            command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--set", chosen, *tests]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            done = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
            )
            if done.returncode:
                lines = done.stdout.splitlines()
                return " ".join(line.strip() for line in lines if line.startswith(("E  ", "FAILED", "ERROR")))[:200]
    except subprocess.TimeoutExpired:
        return f"no end within {SECONDS} s"
    finally:
        path.write_text(text, encoding="utf-8")
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=("quick", "all"), default="all", help="tests to ask")
    parser.add_argument("--only", default="", help="the beginning of a mutant's name")
    given = parser.parse_args()
    mutants = json.loads((ROOT / "benchmarks" / "mutants.json").read_text(encoding="utf-8"))
    mutants = [mutant for mutant in mutants if mutant["name"].startswith(given.only)]
    survivors = 0
    for mutant in mutants:
        why = verdict(mutant, given.set)
        survivors += not why
        print(f"{mutant['name']}: {why or 'survives'}", flush=True)
    print(f"{len(mutants) - survivors} of {len(mutants)} are noticed")


if __name__ == "__main__":
    main()
