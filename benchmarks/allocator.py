"""What keeping freed memory does to training on torch's kernels: speed, page faults, peak memory.

    python benchmarks/allocator.py [--steps 12]

Trains W2 (Llama-style, 512 wide, 6 blocks; see data_paths.py for the lengths) without native kernels, a process per
setting, system and keep in turn: once set, it stays for a process's life. Figures and machine: allocator.md.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from functools import partial

import torch
from data_paths import SHAPES, InMemory, lengths_of

from unpad.loader import load_micro, load_steps
from unpad.memory import HeapKeeper, choose_allocator, peak_memory
from unpad.models import build_model, model_config
from unpad.objective import WEIGHTS
from unpad.optim import make_optimizer
from unpad.plan.plan import plan
from unpad.recipe_training import Optim, PlanSettings
from unpad.step import choose_precision, train_step

ROUNDS, WARM = 3, 2
W2 = {"kind": "decoder", "width": 512, "blocks": 6, "heads": 8, "hidden": 2048, "context": 1024}


def measure(asked: str, steps: int) -> dict[str, float]:
    assert choose_allocator(asked, makes_large_tensors=True)[0] == asked
    device = torch.device("cpu")
    lengths = lengths_of(SHAPES["W2"], 4096 * steps)
    made = plan(lengths, PlanSettings(tokens_per_step=4096, tokens_per_micro=4096), seed=0, epoch=0)
    model = build_model(model_config(W2), 16000)
    optimizer, heap = make_optimizer(model, Optim()), HeapKeeper()
    precision = choose_precision("auto", device)[0]
    seconds, before = [], resource.getrusage(resource.RUSAGE_SELF)
    for number, micros in enumerate(load_steps(partial(load_micro, InMemory(lengths), pad_id=0), made, device)):
        if number == WARM:
            before = resource.getrusage(resource.RUSAGE_SELF)
        began = time.perf_counter()
        train_step(model, micros, optimizer, weights=WEIGHTS, precision=precision, clip=1.0)
        heap.after_step()
        seconds.append(time.perf_counter() - began)
    after, counted = resource.getrusage(resource.RUSAGE_SELF), len(seconds) - WARM
    return {
        "seconds": statistics.median(seconds[WARM:]),
        "user": (after.ru_utime - before.ru_utime) / counted,
        "system": (after.ru_stime - before.ru_stime) / counted,
        "faults": (after.ru_minflt - before.ru_minflt) / counted,
        "peak": peak_memory() / 2**20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--measure", choices=["system", "keep"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure, arguments.steps)))
        return
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} from other work before\n")
    print("| round | allocator | seconds per step | processor s, user | system | page faults per step | peak MiB |")
    print("|---|---|---|---|---|---|---|")
    for number in range(ROUNDS):
        for asked in ("system", "keep"):
            command = [sys.executable, __file__, "--measure", asked, "--steps", str(arguments.steps)]
            environment = {**os.environ, "UNPAD_NATIVE": "0"}
            done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
            row = json.loads(done.stdout)
            shown = f"{row['seconds']:.2f} | {row['user']:.2f} | {row['system']:.2f} | {row['faults']:,.0f}"
            print(f"| {number + 1} | {asked} | {shown} | {row['peak']:,.0f} |", flush=True)


if __name__ == "__main__":
    main()
