"""Memory of training: the heap, what a pass takes, and passes that fit into what is there.

A pass over n tokens with c attending pairs of positions takes fixed + n * per_token + c * per_cell bytes at its peak:
activations, gradients and temporary results, for any kernels and precision. Tensors are counted as they are allocated
and freed, in passes small enough to always fit, and the three coefficients are fitted. State between passes is computed
from the weights.
"""

import ctypes
import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from unpad.batching.batch import RaggedBatch, in_parts
from unpad.batching.layout import PaddedLayout
from unpad.errors import OutOfMemoryError
from unpad.machine import peak_memory, process_memory
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


# Of glibc's malloc.h: free memory above which the heap shrinks, and the number of separately mapped blocks.
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
_keeps_freed = False


def keep_freed_memory() -> bool:
    """Let the heap keep freed memory, so that the next large tensor reuses its pages; return whether that worked.

    By default glibc maps every tensor of more than 32 MB separately and unmaps it when freed, so that each use begins
    with a page fault per 4 KiB. This cannot be undone within the process: glibc forgets its moving threshold for good.
    `return_freed_memory` still returns free memory to the system.
    """
    global _keeps_freed
    if not _keeps_freed and sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "gnu_get_libc_version"):  # other C libraries ignore the settings
            # -1: no amount of free memory is too much.
            _keeps_freed = all([libc.mallopt(M_MMAP_MAX, 0), libc.mallopt(M_TRIM_THRESHOLD, -1)])
    return _keeps_freed


def choose_allocator(asked: str, *, may_keep: bool) -> tuple[str, str]:
    """Set how the process handles freed memory; return the state, "keep" or "system", and the reason.

    Args:
        asked: auto, system or keep; auto keeps if it may.
        may_keep: whether the model runs on the processor and memory is not short.
    """
    if _keeps_freed:
        return "keep", "as an earlier run of this process set it" if asked == "system" else "set already"
    if asked == "system" or (asked == "auto" and not may_keep):
        return "system", "as the recipe says" if asked == "system" else "memory is short here, or a GPU computes"
    if not keep_freed_memory():
        return "system", "only glibc can keep freed memory"
    return "keep", "as the recipe says" if asked == "keep" else "every step makes the same large tensors"


def return_freed_memory() -> None:
    """Return freed memory to the system, if the C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


class HeapKeeper:
    """Limit on the growth of the heap, in which batches of ever new sizes leave holes.

    When the process has grown by half since its first step, free memory is returned to the system. That takes a
    fraction of a second, and is rare.
    """

    GROWTH = 1.5

    def __init__(self) -> None:
        self._normal: int | None = None

    def after_step(self) -> int:
        """Return the memory in use, in bytes, and free the holes if it has grown too much."""
        used = process_memory()
        if self._normal is None:
            self._normal = used
        elif used > self.GROWTH * self._normal:
            return_freed_memory()
            self._normal = None
        return used


class DoesNotFitError(Exception):
    """A pass ran out of memory.

    Args:
        batch: the batch of the pass; reason: first line of the error.
    """

    def __init__(self, batch: RaggedBatch, reason: str) -> None:
        super().__init__(reason)
        self.batch, self.reason = batch, reason


@dataclass
class Room:
    """Bound on the passes of a run, learned from those that ran out of memory.

    A pass that runs out of memory is cut in two between sequences, and so is every larger one from then on.

    Args:
        most: most computed tokens of a pass; None before any has failed.

    Attributes:
        messages: bounds learned since they were last read.
    """

    most: int | None = None
    messages: list[str] = field(default_factory=list)

    def parts(self, batch: RaggedBatch) -> list[RaggedBatch]:
        """The parts that a micro-batch is computed in; itself if it has room."""
        return [batch] if self.most is None or batch.total_tokens <= self.most else in_parts(batch, self.most)

    def agree(self, learnt: Sequence[tuple[int | None, list[str]]]) -> None:
        """Adopt the smallest bound of all processes, so that all cut a micro-batch alike.

        Args:
            learnt: `most` and `messages` of all.
        """
        self.most = min((most for most, _ in learnt if most is not None), default=None)
        self.messages = [f"process {rank}: {text}" for rank, (_, texts) in enumerate(learnt) for text in texts]

    def learn(self, failure: DoesNotFitError) -> None:
        """Compute smaller passes from now on; free the memory of the failed one.

        Raises:
            OutOfMemoryError: a sequence does not fit by itself.
        """
        batch = failure.batch
        gc.collect()
        if batch.position_ids.device.type == "cuda":
            torch.cuda.empty_cache()
        else:
            return_freed_memory()
        parts = in_parts(batch, (batch.total_tokens + 1) // 2)
        if len(parts) == 1:
            raise _too_large(failure)
        self.most = max(part.total_tokens for part in parts)
        longest = int(batch.layout.lengths().max())
        self.messages.append(
            f"{batch.num_seqs} sequences of {batch.total_tokens:,} tokens, the longest {longest:,}, do not fit into "
            f"memory; the update is computed again, and micro-batches of more than {self.most:,} tokens from here on "
            "in parts, with the same draws; the last bits of gradients may differ"
        )


def _too_large(failure: DoesNotFitError) -> OutOfMemoryError:
    """Describe a batch that does not fit and cannot be cut."""
    batch = failure.batch
    what = "a sequence" if batch.num_seqs == 1 else f"{batch.num_seqs} sequences that belong together,"
    error = OutOfMemoryError(
        f"{what} of {batch.total_tokens:,} tokens does not fit by itself: {failure.reason}",
        where=f"peak memory {used_at_most() / 2**30:.2f} GiB",
        fix="lower plan.max_tokens, or the sizes of the model section",
    )
    error.seq_ids = () if batch.seq_ids is None else [seq_id for seq_id in batch.seq_ids.tolist() if seq_id >= 0]
    return error


def used_at_most() -> int:
    """Largest memory in use so far, in bytes, on the GPU if there is one, otherwise of this process."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else peak_memory()
