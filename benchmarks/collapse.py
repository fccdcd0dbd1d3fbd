"""Cost of watching the latent: time of the collapse detector's readings beside the steps of the same run.

    python benchmarks/collapse.py [--recipe events] [--steps 400] [--rounds 3] [key=value ...]

Trains a recipe whose model has a latent, through the loop that `unpad train` runs, a process per round, with the
detector at its default interval and on one thread unless an override says otherwise. The time of readings and of
updates is what the run itself writes down ("Where the time went" of its report). The share is that of readings in the
time of both; evaluation, saving and reading the data are left out, as they would only make it smaller.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from io import StringIO
from pathlib import Path

from rich.console import Console

from unpad.run.report.history import load_metrics, read_log
from unpad.training.loop import train

LIMIT = 0.02  # of the time, at most


def measure(recipe: str, steps: int, overrides: list[str]) -> dict[str, float]:
    """Train once and return what the run wrote down of its time."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        fields = ["train.threads=1", f"train.max_steps={steps}", "train.patience=null", *overrides]
        train(recipe, folder, fields, console=Console(file=StringIO()))
        kinds = [row["kind"] for row in load_metrics(folder)]
        timers = next(entry["rows"] for entry in read_log(folder) if entry["kind"] == "timers")
    seconds = {row["name"]: row["seconds"] for row in timers}
    return {
        "updates": kinds.count("train"),
        "readings": kinds.count("latent"),
        "train": seconds["train"],
        "latent": seconds.get("latent", 0.0),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="events")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", help="fields of the recipe to change")
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.recipe, arguments.steps, arguments.overrides)))
        return
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} from other work before\n")
    print("| round | updates | ms per update | readings | ms per reading | share of both |")
    print("|---|---|---|---|---|---|")
    shares = []
    for number in range(arguments.rounds):
        command = [sys.executable, __file__, "--measure", "--recipe", arguments.recipe, "--steps", str(arguments.steps)]
        done = subprocess.run([*command, *arguments.overrides], check=True, stdout=subprocess.PIPE, text=True)
        row = json.loads(done.stdout)
        assert row["readings"], "nothing was read: a run of more updates than collapse.every, of a model with a latent"
        shares.append(row["latent"] / (row["latent"] + row["train"]))
        update, reading = 1e3 * row["train"] / row["updates"], 1e3 * row["latent"] / row["readings"]
        shown = f"{row['updates']} | {update:.1f} | {row['readings']} | {reading:.1f} | {shares[-1]:.2%}"
        print(f"| {number + 1} | {shown} |", flush=True)
    middle = statistics.median(shares)
    print(f"\nMedian share {middle:.2%}, {'at most' if middle <= LIMIT else 'MORE THAN'} {LIMIT:.0%}.")


if __name__ == "__main__":
    main()
