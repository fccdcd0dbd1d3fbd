"""Choice of the attention kernel: `self_attention` runs it, the run's log and the certificate name it."""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

import torch

from unpad.batching.layout import Layout, PaddedLayout
from unpad.nn.attend import Attend
from unpad.nn.native.attention import supports
from unpad.nn.scope import Scope

# Above this length the processor's fused kernel is faster than two matrix products and a softmax in bf16, below it up
# to six times slower; docs/internals/log.md has the figures.
MATMUL_MAX_LENGTH = 512
HALF = (torch.bfloat16, torch.float16)
FLASH_MOST, FLASH_MULTIPLE = 256, 8  # sizes of heads of the flash kernel; `attention` fills others up with zeros
_by_definition: Scope[bool] = Scope(False)
_as_weighted: Scope[bool] = Scope(False)
_noted: "Scope[set[Kernel] | None]" = Scope(None)


class Kernel(Enum):
    """Implementations of attention, by the names that logs and certificates print."""

    DEFINITION = "definition"
    NATIVE = "native"
    VARLEN_FLASH = "varlen flash"
    PADDED_SDPA = "padded sdpa"
    PADDED_MATMUL = "padded matmul"
    GROUP_SDPA = "group sdpa"
    GROUP_MATMUL = "group matmul"


def choose_kernels(
    dtype: torch.dtype,
    device: torch.device,
    layout: Layout | PaddedLayout,
    head_dim: int,
    how: Attend,
    *,
    fused: bool = True,
) -> tuple[Kernel, ...]:
    """Choose the kernel that attends within the sequences of a layout.

    Args:
        dtype, device: of queries, keys and values.
        fused: False if values have another head_dim, so that only torch's matrix products compute attention.

    Returns:
        One kernel for the whole run, or one for each of `layout.grouped.groups`.
    """
    fused = fused and not how.shaped
    weighted = how.weighted or how.shaped or _as_weighted.get()  # fused kernels support neither
    if isinstance(layout, PaddedLayout):
        is_long = layout.longest > MATMUL_MAX_LENGTH  # fused kernels take a mask of (seq, seq)
        return (Kernel.PADDED_MATMUL if weighted or is_long else Kernel.PADDED_SDPA,)
    if _by_definition.get():
        return (Kernel.DEFINITION,)
    if fused and runs_native(dtype, device, head_dim):
        return (Kernel.NATIVE,)
    if fused and not weighted and takes_flash(dtype, head_dim, card_version(device)):
        return (Kernel.VARLEN_FLASH,)
    slow_if_short = dtype in HALF and device.type == "cpu"

    def of_group(longest: int) -> Kernel:
        is_short = longest <= MATMUL_MAX_LENGTH
        is_masked = how.within(longest).window is not None
        return Kernel.GROUP_MATMUL if weighted or (slow_if_short if is_short else is_masked) else Kernel.GROUP_SDPA

    return tuple(of_group(group.longest) for group in layout.grouped.groups)


def takes_flash(dtype: torch.dtype, head_dim: int, version: int) -> bool:
    """True if torch's flash kernel for ragged runs attends in this dtype and with heads of this size.

    Args:
        version: as of `card_version`.
    """
    return dtype in HALF and head_dim <= FLASH_MOST and version >= 8


def card_version(device: torch.device) -> int:
    """Major compute capability of a card, 0 for another device; AMD's cards have numbers from 9 on in its place."""
    return int(torch.cuda.get_device_properties(device).major) if device.type == "cuda" else 0


def runs_native(dtype: torch.dtype, device: torch.device, head_dim: int) -> bool:
    """True if the native kernel attends within the sequences of a flat run."""
    return device.type == "cpu" and supports(dtype, head_dim)


@contextmanager
def by_definition() -> Iterator[None]:
    """Attend through `reference_attention` inside; the proof's truth shares no kernel with what it judges."""
    with _by_definition.of(True):
        yield


@contextmanager
def as_weighted() -> Iterator[None]:
    """Choose kernels inside as if attention had dropout or a key bias; a proof without dropout so runs what training
    with it runs."""
    with _as_weighted.of(True):
        yield


def note(kernels: tuple[Kernel, ...]) -> None:
    """Report the kernels that run to an enclosing `noted`."""
    if (inside := _noted.get()) is not None:
        inside.update(kernels)


@contextmanager
def noted() -> Iterator[set[Kernel]]:
    """Collect the kernels of all attention that runs inside, in this thread."""
    kernels: set[Kernel] = set()
    with _noted.of(kernels):
        yield kernels
