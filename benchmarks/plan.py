"""Time and peak memory of planning one epoch of 1,000,000 sequences, per strategy.

    python benchmarks/plan.py > benchmarks/plan.md
    python benchmarks/plan.py windows 100_000_000    # the same lengths, planned a million at once by pack

Each strategy runs in a process of its own, so that its peak is its own. "before" is the peak once the lengths exist:
Python, numpy and the package.
"""

import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from unpad.batching.layout import length_groups
from unpad.batching.plan import num_windows, plan, window_places
from unpad.machine import cores, full_processor_name
from unpad.recipes.training import PlanSettings, strategy_names

NUM_SEQUENCES = 1_000_000


def lengths_of(num: int, seed: int = 0) -> np.ndarray:
    """Log-normal lengths, (num,) int32."""
    sigma = 0.8
    drawn = np.random.default_rng(seed).lognormal(np.log(180) - sigma**2 / 2, sigma, num)
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


def in_windows(num: int) -> None:
    """Plan an epoch of a file of `num` lengths window by window, and up to ten million also at once; print what it
    takes, in seconds of a processor. A resume plans the first window and the one that it is in."""
    settings = PlanSettings(max_tokens=1024, tokens_per_step=2**19, tokens_per_micro=2**14, window=NUM_SEQUENCES)
    windows, steps, seconds = num_windows(num, settings), 0, []
    with tempfile.NamedTemporaryFile() as file:
        lengths = np.memmap(file.name, np.int32, "w+", shape=num)
        for first in range(0, num, NUM_SEQUENCES):
            lengths[first : first + NUM_SEQUENCES] = lengths_of(min(NUM_SEQUENCES, num - first), seed=first)
        for window in range(windows):
            start = time.process_time()
            seq_ids = window_places(num, windows, window, seed=0, epoch=0)
            steps += plan(lengths, settings, seed=0, epoch=0, window=window, seq_ids=seq_ids).num_steps
            seconds.append(time.process_time() - start)
        each, again = sum(seconds) / num * 1e6, seconds[0] + seconds[windows // 2]
        took = f"{each:.2f} s per million, {again:.1f} s to resume in the middle, peak {peak_mib():.0f} MiB"
        print(f"{windows} windows: {steps:,} steps, {took}")
        if num <= 10 * NUM_SEQUENCES:
            start = time.process_time()
            steps = plan(lengths, settings.model_copy(update={"window": None}), seed=0, epoch=0).num_steps
            print(f"at once: {steps:,} steps, {time.process_time() - start:.1f} s, peak {peak_mib():.0f} MiB")


def groups_microseconds(num: int, repeats: int = 200) -> float:
    """Median time of length_groups on `num` lengths of one micro-batch."""
    lengths = -np.sort(-lengths_of(num))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        length_groups(lengths)
        times.append(time.perf_counter() - start)
    return float(np.median(times)) * 1e6


def main() -> None:
    if sys.argv[1:2] == ["windows"]:
        in_windows(int(sys.argv[2]))
        return
    if len(sys.argv) > 1:
        print(json.dumps(measure(sys.argv[1])))
        return
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
        f"Machine: {cores()} cores of {full_processor_name()}, {int(memory) / 2**20:.0f} GiB,",
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
