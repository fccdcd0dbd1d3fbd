"""Time and peak memory of planning one epoch of 1,000,000 sequences, per strategy.

    python benchmarks/plan.py > benchmarks/plan.md

Each strategy runs in a process of its own, so that its peak is its own. "before" is the peak once the lengths exist:
Python, numpy and the package.
"""

import json
import os
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from unpad.batching.layout import length_groups
from unpad.batching.plan import plan
from unpad.recipes.training import PlanSettings, strategy_names

NUM_SEQUENCES = 1_000_000


def lengths_of(num: int) -> np.ndarray:
    """Log-normal lengths, (num,) int32."""
    sigma = 0.8
    drawn = np.random.default_rng(0).lognormal(np.log(180) - sigma**2 / 2, sigma, num)
    return np.clip(drawn, 8, 1024).astype(np.int32)


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(strategy: str) -> dict[str, float]:
    lengths = lengths_of(NUM_SEQUENCES)
    settings = PlanSettings(strategy=strategy, max_tokens=1024, row_tokens=1024)
    before = peak_mib()
    start, start_cpu = time.perf_counter(), time.process_time()
    made = plan(lengths, settings, seed=0, epoch=0)
    seconds, cpu = time.perf_counter() - start, time.process_time() - start_cpu
    shape = {"steps": made.num_steps, "micros": made.num_micros, "pad_share": made.pad_share}
    return {**shape, "seconds": seconds, "cpu": cpu, "before": before, "peak": peak_mib()}


def groups_microseconds(num: int, repeats: int = 200) -> float:
    """Median time of length_groups on `num` lengths of one micro-batch."""
    lengths = -np.sort(-lengths_of(num))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        length_groups(lengths)
        times.append(time.perf_counter() - start)
    return float(np.median(times)) * 1e6


def processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    model, family = fields.get("model name", platform.processor()), fields.get("cpu family", "?")
    return f"{model} (family {family}, model {fields.get('model', '?')})"


def main() -> None:
    if len(sys.argv) > 1:
        print(json.dumps(measure(sys.argv[1])))
        return
    cores = sum(line.startswith("processor") for line in Path("/proc/cpuinfo").read_text().splitlines())
    memory = Path("/proc/meminfo").read_text().split()[1]
    print("# Planning 1,000,000 sequences\n")
    lengths = lengths_of(NUM_SEQUENCES)
    print(f"`python benchmarks/plan.py`: {NUM_SEQUENCES:,} lengths, log-normal with mean 180 clipped to 8..1024")
    print(f"(then {lengths.mean():.1f}); tokens_per_step 2048, tokens_per_micro 4096, batch_size 8, bucket_width 16,")
    print(
        "row_tokens 1024. Seconds are those of `plan`, the median of five processes; peak memory is that of the whole"
    )
    print("process, the highest of the five.\n")
    print(
        f"Machine: {cores} cores of {processor()}, {int(memory) / 2**20:.0f} GiB,",
        f"load {os.getloadavg()[0]:.1f} before from other work;",
    )
    print(f"Python {platform.python_version()}, numpy {np.__version__}.\n")
    print("| strategy | seconds | CPU seconds | peak MiB | before planning | steps | micro-batches | pad share |")
    print("|---|---|---|---|---|---|---|---|")
    for strategy in strategy_names():
        command = [sys.executable, __file__, strategy]
        runs = [json.loads(subprocess.run(command, check=True, capture_output=True).stdout) for _ in range(5)]
        median = sorted(runs, key=lambda run: run["seconds"])[2]
        peak = max(run["peak"] for run in runs)
        print(
            f"| {strategy} | {median['seconds']:.2f} | {median['cpu']:.2f} | {peak:.0f} | {median['before']:.0f} ",
            end="",
        )
        print(f"| {median['steps']:,} | {median['micros']:,} | {median['pad_share']:.4f} |")
    print("\n`length_groups` of one micro-batch, median of 200 calls:\n")
    print("| sequences | microseconds |\n|---|---|")
    for num in (20, 100, 500, 2000):
        print(f"| {num} | {groups_microseconds(num):.0f} |")


if __name__ == "__main__":
    main()
