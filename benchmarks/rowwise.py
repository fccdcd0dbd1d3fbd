"""Time of products whose rows depend on nothing else, relative to torch's own products, by the number of rows.

    python benchmarks/rowwise.py [--rounds 4] [--rows 1 4 16 32 64 128 256]

The products are those of a block 512 wide with SwiGLU 2,048 over six copies of the weights, so that none is in the
cache. Sides take turns at every copy, on one thread, in processor time, which other work on the machine disturbs least.
Ends with code 1 where the median of fp32 is above its gate.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from unpad.machine.load import full_processor_name
from unpad.nn.linear import independent_rows, product
from unpad.nn.native import library
from unpad.nn.native.rowwise_linear import rowwise_linear
from unpad.trials.bench.measure import Spread, spread

SHAPES = [(512, 1536), (512, 512), (512, 4096), (2048, 512)]  # inputs and outputs of a block's layers
COPIES = 6
GATE = 1.3  # of fp32, at any number of rows
Product = Callable[[Tensor, Tensor], Tensor]


def without_kernels(x: Tensor, weight: Tensor) -> Tensor:
    """What generation computes where there are no native kernels: torch's product of a fixed number of rows."""
    with library.switched_off(), independent_rows():
        return product(x, weight)


SIDES: dict[str, Product] = {"torch": F.linear, "native": rowwise_linear, "fixed rows": without_kernels}


def seconds(side: Product, inputs: dict[int, Tensor], block: Sequence[Tensor]) -> float:
    """Processor time of the products of one block."""
    began = time.thread_time()
    for weight in block:
        side(inputs[weight.shape[1]], weight)
    return time.thread_time() - began


def measure(dtype: torch.dtype, num_rows: int, rounds: int) -> dict[str, Spread]:
    """Milliseconds of torch's products, and the others' time relative to it."""
    blocks = [[torch.randn(out, width).to(dtype) for width, out in SHAPES] for _ in range(COPIES)]
    inputs = {width: torch.randn(num_rows, width).to(dtype) for width, _ in SHAPES}
    found = defaultdict[str, list[float]](list)
    for number in range(rounds + 1):  # the first warms up
        for index, block in enumerate(blocks):
            names = list(SIDES)[:: 1 if (number + index) % 2 else -1]
            times = {name: seconds(SIDES[name], inputs, block) for name in names}
            if number:
                found["milliseconds"].append(1e3 * times["torch"])
                for name in names:
                    found[name].append(times[name] / times["torch"])
    return {name: spread(values) for name, values in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 32, 64, 128, 256])
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"{full_processor_name()}; {library.describe()}; torch {torch.__version__}; one thread\n")
    print("| | rows | torch, ms | native against it | quartiles | fixed rows against it | quartiles |")
    print("|---|---|---|---|---|---|---|")
    worst = 0.0
    with torch.inference_mode():
        for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
            if not library.computes(dtype):
                continue
            for num_rows in options.rows:
                found = measure(dtype, num_rows, options.rounds)
                cells = [f"{found['milliseconds'].median:.2f}"]
                for side in ("native", "fixed rows"):
                    one = found[side]
                    cells += [f"{one.median:.2f}", f"{one.low:.2f} to {one.high:.2f}"]
                print(f"| {name} | {num_rows} | {' | '.join(cells)} |", flush=True)
                worst = max(worst, found["native"].median if name == "fp32" else 0.0)
    print(f"\nfp32 at most {worst:.2f} times torch's time, gate {GATE}")
    return int(worst > GATE)


if __name__ == "__main__":
    sys.exit(main())
