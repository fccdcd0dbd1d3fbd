"""Processor time of training in two checkouts of this project, in alternating turns.

    python benchmarks/versions.py OLD NEW [W1 chat demo ...] [--turns 7] [--steps 40]

Every turn is a process of its own with the Python that runs this script. A workload of workloads.py is measured over
`--steps` steps after as many untimed ones; `demo` is the whole of `unpad train zh_chat`. A checkout needs its compiled
kernels (`python setup.py build_ext --inplace`). Figures and machine: versions.md.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from unpad.nn.native import library
from unpad.trials.bench.measure import describe_machine, spread

MEASURE = """
import json, sys, time
from pathlib import Path
from workloads import Ours, workload
side, steps = Ours(workload(sys.argv[1], Path(sys.argv[2]))), int(sys.argv[3])
for _ in range(steps):
    side.step()
began = time.process_time()
for _ in range(steps):
    side.step()
print(json.dumps(time.process_time() - began))
"""


def turn(checkout: Path, name: str, options: argparse.Namespace) -> float:
    """Seconds of processor time, user and system, of one turn."""
    checkout = checkout.resolve()
    environment = {**os.environ, "PYTHONPATH": f"{checkout}{os.pathsep}{checkout / 'benchmarks'}"}
    if name != "demo":
        command = [sys.executable, "-c", MEASURE, name, str(options.data.resolve()), str(options.steps)]
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment, cwd=checkout)
        return float(json.loads(done.stdout))
    with tempfile.TemporaryDirectory() as folder:
        before = os.times()
        ends = [] if options.demo_steps is None else [f"train.max_steps={options.demo_steps}"]
        command = [sys.executable, "-m", "unpad", "train", "zh_chat", *ends, "--out", "run"]
        subprocess.run(command, check=True, capture_output=True, env=environment, cwd=folder)
        after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("names", nargs="*", default=["W1", "chat", "demo"])
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--demo-steps", type=int, help="of the demo; default all")
    parser.add_argument("--data", type=Path, default=Path(__file__).parent / "../../shared/data")
    options = parser.parse_args()
    machine = describe_machine()
    print(
        f"{machine['cores']} cores of {machine['processor']}, load {machine['load']:.1f} before; {library.describe()}\n"
    )
    print("| training | seconds old | seconds new | new / old, median (quartiles) | every turn |")
    print("|---|---|---|---|---|")
    for name in options.names:
        pairs = []
        for number in range(options.turns):
            order = [options.old, options.new][:: 1 if number % 2 == 0 else -1]
            seconds = {checkout: turn(checkout, name, options) for checkout in order}
            pairs.append((seconds[options.old], seconds[options.new]))
            print(f"{name}: {pairs[-1][0]:.1f} s old, {pairs[-1][1]:.1f} s new", file=sys.stderr, flush=True)
        ratios = [new / old for old, new in pairs]
        old, new = (spread(list(column)).median for column in zip(*pairs, strict=True))
        middle = spread(ratios)
        shown = f"{middle.median:.3f} ({middle.low:.3f} to {middle.high:.3f})"
        print(f"| {name} | {old:.1f} | {new:.1f} | {shown} | {' '.join(f'{r:.3f}' for r in ratios)} |", flush=True)


if __name__ == "__main__":
    main()
