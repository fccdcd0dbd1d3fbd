"""Model of the memory that training needs, from small passes of the model itself.

A pass over n tokens with c attending pairs of positions takes fixed + n * per_token + c * per_cell bytes at its peak:
activations, gradients and temporary results, for any kernels and precision. Tensors are counted as they are allocated
and freed, in passes small enough to always fit, and the three coefficients are fitted. State between passes is computed
from the weights.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from unpad.batching.batch import RaggedBatch
from unpad.batching.layout import PaddedLayout
from unpad.processes.sums import held_bytes

# Bytes of a process per byte of its tensors, because the heap fragments with ever new sizes; and the constant overhead
# of libraries. Measured by benchmarks/memory.py.
OVERHEAD, KEPT = 1.35, 32 << 20


class TensorMemory(TorchDispatchMode):
    """Bytes of the tensors that operations inside have allocated and not freed, without views.

    Attributes:
        live: now; peak: at most.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        input_storages = {id(x.untyped_storage()) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        outputs = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(outputs):
            if (
                isinstance(tensor, Tensor)
                and id(storage := tensor.untyped_storage()) not in input_storages | self._known
            ):
                self._known.add(id(storage))
                self.live += storage.nbytes()
                weakref.finalize(storage, self._free, id(storage), storage.nbytes())
        self.peak = max(self.peak, self.live)
        return outputs

    def _free(self, number: int, num_bytes: int) -> None:
        self._known.discard(number)
        self.live -= num_bytes


def peak_of(compute: Callable[[], object], device: torch.device) -> int:
    """Peak bytes of tensors while `work` runs, beyond those in use before."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        compute()
        return int(torch.cuda.max_memory_allocated(device) - before)
    memory = TensorMemory()
    with memory:
        compute()
    return memory.peak


def cells_of(batch: RaggedBatch) -> int:
    """Pairs of positions that attend in a batch, as `batching.shares.micro_cost` counts them."""
    if isinstance(batch.attended, PaddedLayout):
        rows, columns = batch.attended.attention_mask.shape
        return rows * columns * columns
    return int(batch.attended.lengths().square().sum())


@dataclass(frozen=True)
class Footprint:
    """Bytes at the peak of a forward and backward pass, gradients included.

    Args:
        fixed: bytes of a pass without tokens; per_token, per_cell: see the module.
    """

    fixed: float
    per_token: float
    per_cell: float

    def of(self, tokens: float, cells: float) -> float:
        """Bytes of a pass."""
        return self.fixed + self.per_token * tokens + self.per_cell * cells


def process_bytes(tensor_bytes: float) -> float:
    """Peak bytes of a process, given the peak bytes of its tensors."""
    return OVERHEAD * tensor_bytes + KEPT


def fit(sizes: Sequence[tuple[int, int]], peaks: Sequence[int]) -> Footprint:
    """Fit the coefficients, none of them negative.

    Args:
        sizes: tokens and cells of small passes; peaks: their bytes, from `peak_of`.
    """
    columns = np.array([[1.0, tokens, cells] for tokens, cells in sizes])
    wanted, used = np.array(peaks, np.float64), [0, 1, 2]
    scales = columns.max(0).clip(1.0)
    while True:  # drop the most negative coefficient until none is left: a pass never shrinks
        solution = np.linalg.lstsq(columns[:, used] / scales[used], wanted, rcond=None)[0] / scales[used]
        if solution.min() >= 0 or len(used) == 1:
            break
        used.pop(int(np.argmin(solution * scales[used])))
    coefficients = np.zeros(3)
    coefficients[used] = solution.clip(0)
    return Footprint(*coefficients.tolist())


def state_bytes(parameters: Iterable[nn.Parameter], *, micros: int, processes: int = 1) -> int:
    """Bytes that training holds during passes, beside the weights: two moments per trained weight and, with several
    micro-batches per update, the exact sums; fast sums hold less.

    Args:
        micros: most micro-batches of an update; processes: number of processes that share them equally.
    """
    trained = [p for p in parameters if p.requires_grad]
    moments = sum(2 * p.numel() * p.element_size() for p in trained)
    return moments + sum(held_bytes(p, micros, processes) for p in trained)
