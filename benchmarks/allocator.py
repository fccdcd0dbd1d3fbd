"""Effect of keeping freed memory on training: tokens per second, page faults, peak memory.

    python benchmarks/allocator.py [W1 W2 W3 ...] [--rounds 5] [--seconds 4] [--torch]

Workloads are those of workloads.py, on the native kernels or with `--torch` without them. A process per setting, system
and keep in turn: once set, it stays for a process's life. Figures and machine: allocator.md.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

from workloads import NAMES, Ours, workload

from unpad.machine.memory import peak_memory
from unpad.nn.native import library
from unpad.training.memory import choose_allocator
from unpad.trials.bench.measure import describe_machine, spread

SETTINGS = ("system", "keep")
WARM = 5  # seconds: products of every shape, state of the optimizer, and the heap finds its form


def measure(name: str, asked: str, seconds: float, data: Path) -> dict[str, float]:
    assert choose_allocator(asked, may_keep=True)[0] == asked
    side = Ours(workload(name, data))
    run(side, WARM)
    before = resource.getrusage(resource.RUSAGE_SELF)
    steps, tokens, took = run(side, seconds)
    after = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "rate": tokens / took,
        "system": (after.ru_stime - before.ru_stime) / took,
        "faults": (after.ru_minflt - before.ru_minflt) / steps,
        "peak": peak_memory() / 2**20,
    }


def run(side: Ours, seconds: float) -> tuple[int, int, float]:
    """Steps, tokens and seconds of training for at least so long."""
    steps, tokens, began = 0, 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        steps, tokens = steps + 1, tokens + side.step().tokens
    return steps, tokens, time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=["W1", "W2", "W3"], help=f"of {', '.join(NAMES)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--torch", action="store_true", help="torch's kernels")
    parser.add_argument("--data", type=Path, default=Path(__file__).parent / "../../shared/data")
    parser.add_argument("--measure", choices=SETTINGS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.names[0], options.measure, options.seconds, options.data)))
        return
    environment = {**os.environ, **({library.SWITCH: "0"} if options.torch else {})}
    machine = describe_machine()
    kernels = "torch kernels" if options.torch else library.describe()
    print(f"{machine['cores']} cores of {machine['processor']}, load {machine['load']:.1f} before; {kernels}\n")
    print("| workload | allocator | tokens/s | keep / system, every round | system time | faults per step | peak MiB |")
    print("|---|---|---|---|---|---|---|")
    for name in options.names:
        found: dict[str, list[dict[str, float]]] = {asked: [] for asked in SETTINGS}
        for _ in range(options.rounds):
            for asked, rows in found.items():
                command = [sys.executable, __file__, name, "--measure", asked, "--seconds", str(options.seconds)]
                command += ["--data", str(options.data)]
                done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
                rows.append(json.loads(done.stdout))
        pairs = zip(found["keep"], found["system"], strict=True)
        ratios = " ".join(f"{keep['rate'] / system['rate']:.2f}" for keep, system in pairs)
        for asked, rows in found.items():
            rate, share, faults, peak = (spread([row[key] for row in rows]).median for key in rows[0])
            shown = f"{rate:,.0f} | {ratios if asked == 'keep' else ''} | {share:.1%} | {faults:,.0f} | {peak:,.0f}"
            print(f"| {name} | {asked} | {shown} |", flush=True)


if __name__ == "__main__":
    main()
