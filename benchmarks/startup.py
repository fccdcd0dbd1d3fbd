"""Processor time of importing the package, of verbs without a model and of a run of one step, in fresh interpreters.

    python benchmarks/startup.py [CHECKOUT ...] > benchmarks/startup.md

Each checkout is measured with its own .venv where it has one, else with the Python that runs this script. All commands
of all checkouts take turns; "best" is the least user + system time of the rounds.
"""

import argparse
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from measure import describe_machine

ROUNDS = 7
COMMANDS = {
    "`python -c pass`": ["-c", "pass"],
    "`import unpad`": ["-c", "import unpad"],
    "`unpad --help`": ["-m", "unpad", "--help"],
    "`unpad recipes`": ["-m", "unpad", "recipes"],
    "`unpad runs`": ["-m", "unpad", "runs"],
    "`unpad data check` of a text": ["-m", "unpad", "data", "check", "good.jsonl"],
    "`unpad train`, one small step": [
        *(
            "-m",
            "unpad",
            "train",
            "small",
            "data.text=good.jsonl",
            "--out",
            "run",
            "train.max_steps=1",
            "train.threads=1",
        ),
        *("precision=fp32", "model.width=16", "model.blocks=1", "model.heads=2", "model.kv_heads=2", "model.hidden=16"),
    ],
}


def interpreter(checkout: Path) -> str:
    own = checkout / ".venv" / "bin" / "python"
    return str(own) if own.exists() else sys.executable


def seconds(checkout: Path, arguments: list[str], folder: Path) -> float:
    """User and system time of one command, its children included."""
    shutil.rmtree(folder / "run", ignore_errors=True)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [interpreter(checkout), *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(checkout), "UNPAD_CACHE": str(folder / "cache")},
        check=True,
        stdout=subprocess.DEVNULL,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", type=Path, nargs="*", default=[Path()])
    checkouts = [path.resolve() for path in parser.parse_args().checkouts]
    times: dict[tuple[int, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "good.jsonl").write_text("".join(f'{{"text": "row {row} of forty"}}\n' for row in range(40)))
        for turn in range(ROUNDS + 1):
            for side, checkout in enumerate(checkouts):
                for command, arguments in COMMANDS.items():
                    taken = seconds(checkout, arguments, folder)
                    if turn:  # the first round compiles and fills the page cache
                        times.setdefault((side, command), []).append(taken)
    machine = describe_machine()
    print("# Starting\n")
    print("`python benchmarks/startup.py BEFORE AFTER`: seconds of processor time (user + system), best and median of")
    print(f"{ROUNDS} rounds, every command in a fresh interpreter, commands and sides in turn.\n")
    print(f"{machine['cores']} cores of {machine['processor']}, Python {platform.python_version()}.\n")
    sides = ["before", "after"] if len(checkouts) == 2 else [str(checkout) for checkout in checkouts]
    print("| command |" + "".join(f" {side}, best | median |" for side in sides))
    print("|---|" + "---|---|" * len(sides))
    for command in COMMANDS:
        row = [times[side, command] for side in range(len(checkouts))]
        print(f"| {command} |" + "".join(f" {min(each):.3f} | {statistics.median(each):.3f} |" for each in row))


if __name__ == "__main__":
    main()
