"""Speed of matrix products in fp32 and bf16 on this processor, measured once and kept in the user's cache folder;
choice of a precision by it."""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch.nn import functional as F

from unpad.errors import DiskError
from unpad.machine import full_processor_name, processor_fields
from unpad.nn.linear import independent_rows, product
from unpad.nn.precision import Precision
from unpad.storage import cache_folder, make_folder, write_atomic

FILE = "precision.json"  # in the cache folder
MAX_ENTRIES = 32
Shape = tuple[int, int, int]  # rows, inputs and outputs of a linear layer
PROBE = (256, 256, 256)  # emulated, its products take milliseconds
TRAINING = ((1024, 512, 2048), (512, 256, 8192))  # of a block and of a head
DECODING = ((1, 512, 2048), (1, 512, 16384))  # the same for one prompt
HOPELESS = 4.0  # ratio of times at the probe from which larger products need no measurement
ROUNDS = 4
LIMIT_SECONDS = 0.5  # of a set of shapes; no round begins after it
# They limit the instructions of torch, MKL, oneDNN and the native kernels.
VARIABLES = (
    *("ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS"),
    *("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "UNPAD_NATIVE"),
)
_measured: "dict[Machine, Speeds]" = {}  # of this process


class Machine(BaseModel):
    """Everything that a measurement depends on."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    processor: str
    instructions: tuple[str, ...]
    torch: str
    threads: int
    variables: tuple[tuple[str, str], ...]


class Speed(BaseModel):
    """Seconds of the same products in either precision."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    fp32_seconds: float = Field(gt=0, allow_inf_nan=False)
    bf16_seconds: float = Field(gt=0, allow_inf_nan=False)

    @property
    def gain(self) -> float:
        """Times that bf16 is as fast as fp32."""
        return self.fp32_seconds / self.bf16_seconds


class Speeds(BaseModel):
    """Speed of the products of a training step, and of those that decode one prompt."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    training: Speed
    decoding: Speed


class _SpeedEntry(BaseModel):
    machine: Machine
    speeds: Speeds


class _File(BaseModel):
    entries: list[_SpeedEntry]


def this_machine() -> Machine:
    """This process's processor, libraries, threads and limits."""
    flags = processor_fields().get("flags", "").split()
    return Machine(
        processor=full_processor_name(),
        instructions=tuple(sorted(flag for flag in flags if flag.startswith(("avx", "amx")))),
        torch=torch.__version__,
        threads=torch.get_num_threads(),
        variables=tuple((name, os.environ[name]) for name in VARIABLES if name in os.environ),
    )


def product_speeds() -> Speeds:
    """Speeds of products on this machine: from this process, else from the cache, else measured in about a second.

    A cache that is damaged or cannot be written only costs the measurement in the next process.
    """
    machine = this_machine()
    if machine not in _measured:
        entries = _read()
        found = next((entry.speeds for entry in entries if entry.machine == machine), None)
        _measured[machine] = found or measure()
        if found is None:
            _write([*entries, _SpeedEntry(machine=machine, speeds=_measured[machine])])
    return _measured[machine]


# --------------------------------------------------------------------------- measurement


def measure() -> Speeds:
    """Time products in both precisions by turns, the best of each; for training only small ones where bf16 is emulated,
    because large emulated products take seconds."""
    decoding = _best(DECODING, decoding_seconds)
    probed = _best([PROBE], training_seconds)
    hopeless = probed.gain < 1 / HOPELESS
    return Speeds(training=probed if hopeless else _best(TRAINING, training_seconds), decoding=decoding)


def _best(shapes: Sequence[Shape], seconds: Callable[[Shape, torch.dtype], float]) -> Speed:
    """The best times of products of these shapes; rounds end early when time is up."""
    began, times = time.perf_counter(), dict[tuple[torch.dtype, Shape], list[float]]()
    for number in range(ROUNDS):  # the first warms up and counts only if it is the only one
        if number and time.perf_counter() - began > LIMIT_SECONDS:
            break
        for shape in shapes:
            for dtype in (torch.float32, torch.bfloat16):
                times.setdefault((dtype, shape), []).append(seconds(shape, dtype))
    fp32, bf16 = (sum(min(times[dtype, shape]) for shape in shapes) for dtype in (torch.float32, torch.bfloat16))
    return Speed(fp32_seconds=fp32, bf16_seconds=bf16)


def training_seconds(shape: Shape, dtype: torch.dtype) -> float:
    """Seconds of the three products that a linear layer takes in a training step: forward, and both gradients.

    Args:
        shape: rows, inputs, outputs.
        dtype: of all three; autocast is off.
    """
    rows, inputs, outputs = shape
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        x, weight, gradient = _ones(dtype, (rows, inputs), (outputs, inputs), (rows, outputs))
        start = time.perf_counter()
        _ = F.linear(x, weight), gradient @ weight, gradient.T @ x
        return time.perf_counter() - start


def decoding_seconds(shape: Shape, dtype: torch.dtype) -> float:
    """Seconds of the product that a linear layer takes in generation; as `training_seconds`."""
    rows, inputs, outputs = shape
    with torch.no_grad(), torch.autocast("cpu", enabled=False), independent_rows():
        x, weight = _ones(dtype, (rows, inputs), (outputs, inputs))
        start = time.perf_counter()
        product(x, weight)
        return time.perf_counter() - start


def _ones(dtype: torch.dtype, *sizes: tuple[int, int]) -> list[torch.Tensor]:
    """Operands without random numbers, so that no run depends on a measurement."""
    return [torch.ones(size, dtype=dtype, device="cpu") for size in sizes]


# --------------------------------------------------------------------------- cache


def cache_file() -> Path:
    """File of the measurements; deleting it makes the next run measure anew."""
    return cache_folder() / FILE


def _read() -> list[_SpeedEntry]:
    """Entries of the file; none if it is missing or damaged."""
    try:
        return _File.model_validate_json(cache_file().read_bytes()).entries
    except (OSError, ValueError, RuntimeError):  # RuntimeError: the user has no home
        return []


def _write(entries: list[_SpeedEntry]) -> None:
    with suppress(DiskError, RuntimeError):
        path = cache_file()
        make_folder(path.parent)
        write_atomic(path, _File(entries=entries[-MAX_ENTRIES:]).model_dump_json(indent=1) + "\n")


MIN_GAIN = 1.1  # of bf16's products over fp32's: conversions of weights and activations cost a few percent


def choose_precision(
    asked: str, device: torch.device, recorded: Precision | None = None, *, decoding: bool = False
) -> tuple[Precision, str]:
    """Return the precision to compute in, and the reason.

    auto takes the precision that a run was begun in; for a new run bf16 where a GPU has it, or where the processor's
    products in it are at least `MIN_GAIN` times as fast as in fp32, by measurement; fp32 elsewhere.

    Args:
        asked: of a recipe.
        recorded: by a run that goes on, which auto keeps; None for a new one.
        decoding: whether the products are those of generation, a row each, in which bf16 halves what is read.
    """
    if asked != "auto":
        return asked, "as the recipe says"
    own, reason = _fastest(device, decoding)
    if recorded in (None, own):
        return own, reason
    return recorded, f"as this run was begun; a new one here would take {own}: {reason}"


def _fastest(device: torch.device, decoding: bool) -> tuple[Precision, str]:
    """The precision of a new run under auto, and the reason."""
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        return ("bf16", "the GPU has it") if native else ("fp32", "this GPU has no bf16")
    if not multiplies_bf16():
        return "fp32", f"without AVX-512 BF16 and AMX bf16 is emulated ({torch.backends.cpu.get_cpu_capability()})"
    speeds = product_speeds()
    emulated = speeds.training.gain < 1 / HOPELESS  # the products of a prompt are like those of training
    gain = (speeds.decoding if decoding and not emulated else speeds.training).gain
    if gain >= MIN_GAIN:
        return "bf16", f"its products are {gain:.1f} times as fast as fp32's here, measured"
    if gain > 1:
        return "fp32", f"products in bf16 are only {gain:.2f} times as fast here, measured; {MIN_GAIN} are needed"
    return "fp32", f"its products are {1 / gain:.1f} times as fast as bf16's here, measured"


def multiplies_bf16() -> bool:
    """True if the processor has instructions for products in bf16; libraries may be told not to use them."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
