"""Rows of gpu.py: a side is built alone, tuned, measured in turns, looked at, and freed."""

from __future__ import annotations

import gc
import re
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gpu_sides import SIDES, Side, Sizes
from measure import Contender, TimedTurn, Work
from torch.profiler import ProfilerActivity, profile

from unpad.errors import OutOfMemoryError
from unpad.models.cost import reading_operations, sizes_of
from unpad.models.decoder import Config


class Times(NamedTuple):
    """Seconds of each size that is tried, before it is measured and while it is, and of turns; and how many turns."""

    warm: float
    tuning: float
    turn: float
    turns: int


@dataclass(frozen=True)
class Case:
    """What rows are of.

    Args:
        updates: tokens of an update, a row each; all rows of a case have one model.
        tried: sizes of a pass, as of a side's `feed`; those that an update holds are tried, the fastest is measured.
        looks: whether three updates are divided into shares.
        flash: implementation of flash attention, as `torch.nn.attention.activate_flash_attention_impl` has them.
    """

    side: str
    sizes: Sizes
    updates: tuple[int, ...]
    tried: tuple[int, ...]
    looks: bool = False
    flash: str | None = None


@dataclass
class Row:
    """What was measured of one case and size of update.

    Args:
        size: of a pass, the fastest of `tuned`, which has tokens per second by size; those that are absent did not fit.
        state, most: bytes of weights and optimizer, and of all that was held at the most; None on a processor.
        graphs, late, breaks: graphs of the blocks, those of them that were made in turns, and places where one broke.
        waits: places that waited for the card in one update.
        shares: of three updates, by part of the work.
        error: why there is no figure.
    """

    case: str
    side: str
    update: int
    size: int = 0
    parameters: int = 0
    tuned: dict[int, float] = field(default_factory=dict)
    turns: list[TimedTurn] = field(default_factory=list)
    state: int | None = None
    most: int | None = None
    graphs: int = 0
    late: int = 0
    breaks: int = 0
    waits: dict[str, int] = field(default_factory=dict)
    shares: dict[str, float] = field(default_factory=dict)
    error: str = ""

    @property
    def name(self) -> str:
        return f"{self.case}, {self.update:,} tokens"

    @property
    def rates(self) -> list[float]:
        """Tokens per second of every turn."""
        return [TimedTurn(*turn).rate for turn in self.turns]


Keep = Callable[[Row], None]


def measure_case(name: str, case: Case, device: torch.device, times: Times, keep: Keep, profiles: Path) -> None:
    """Measure the rows of a case; `keep` is called after every turn. What fails is named in its row.

    Args:
        profiles: a file that the profiler's tables are added to.
    """
    left = [Row(name, case.side, update) for update in case.updates]
    try:
        _measure_rows(left, case, device, times, keep, profiles)
    except Exception as error:  # the other cases go on
        traceback.print_exc()
        for row in left:
            row.error = f"{type(error).__name__}: {error}".splitlines()[0]
            keep(row)
    free(device)


def _measure_rows(left: list[Row], case: Case, device: torch.device, times: Times, keep: Keep, profiles: Path) -> None:
    """Measure rows with one side, and take each that is complete from `left`."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    side, looks = build(case, device), case.looks
    while left:
        row = left[0]
        row.parameters = sum(parameter.numel() for parameter in side.model.parameters())
        _measure(row, side, case, device, times, keep)
        if looks:
            row.shares, looks = shares(side, device, profiles), False
        row.waits = waits(side, device)
        row.graphs, row.breaks = graphs()
        keep(left.pop(0))


def build(case: Case, device: torch.device) -> Side:
    """Make the side of a case, which must be fed before it is updated."""
    if case.flash:
        torch.nn.attention.activate_flash_attention_impl(case.flash)
    return SIDES[case.side](case.sizes, device)


def free(device: torch.device) -> None:
    """Release what a side held; call it when nothing refers to the side."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def graphs() -> tuple[int, int]:
    """Graphs that were made of the blocks, and places where one broke."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def contender(side: Side, sizes: Sizes) -> Contender:
    """A side that is measured in real tokens and in the operations that they need, padding not counted."""
    counted = sizes_of(sizes.model, sizes.vocabulary)

    def step() -> Work:
        lengths = side.update().tolist()
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # a peer's update returns before it is done
        return Work(sum(lengths), 3 * reading_operations(counted, [lengths] * counted.blocks, sum(lengths)))

    return Contender(step)


def _measure(row: Row, side: Side, case: Case, device: torch.device, times: Times, keep: Keep) -> None:
    """Tune the size of a pass, then measure the fastest."""
    runner = contender(side, case.sizes)
    fitting = [size for size in case.tried if size * side.unit <= 1.1 * row.update]
    for size in fitting or case.tried[:1]:
        with suppress(OutOfMemoryError, torch.OutOfMemoryError):
            side.feed(size, row.update)
            runner.turn(times.warm, min_steps=2)
            row.tuned[size] = runner.turn(times.tuning).rate
        if size not in row.tuned:  # nor does a larger one fit
            side.model.zero_grad()
            free(device)
            break
    if not row.tuned:
        raise MemoryError("no size of a pass fits")
    row.size = max(row.tuned, key=lambda size: row.tuned[size])
    side.feed(row.size, row.update)
    made, _ = graphs()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(times.turns):
        row.turns.append(runner.turn(times.turn, min_steps=1))
        keep(row)
    row.late = graphs()[0] - made
    if device.type == "cuda":
        row.state, row.most = state_bytes(side), torch.cuda.max_memory_allocated(device)


def state_bytes(side: Side) -> int:
    """Bytes of the weights and of the optimizer's moments."""
    moments = [x for state in side.optimizer.state.values() for x in state.values() if torch.is_tensor(x)]
    return sum(x.numel() * x.element_size() for x in [*side.model.parameters(), *moments])


# --------------------------------------------------------------------------- where the time goes

# The first whose expression is in the name of a kernel or of an operation around it; what is left are norms and other
# element-wise work.
PARTS = {
    "optimizer": r"Optimizer\.step|[Aa]dam|foreach|multi_tensor",
    "head": r"CrossEntropy",
    "attention": r"flash|fmha|varlen",
    "products": r"gemm|nvjet|cutlass|xmma|\bmm\b|addmm|matmul",
    "copies": r"Memcpy|Memset|copy_",
}
REST, IDLE, UPDATES = "norms, element-wise", "idle", 3


def part_of(path: str) -> str:
    """The part of an update's work that a kernel belongs to, by its name and those of the operations around it."""
    return next((part for part, pattern in PARTS.items() if re.search(pattern, path)), REST)


def shares(side: Side, device: torch.device, file: Path) -> dict[str, float]:
    """Shares of the time of three updates by part of the work; of a processor's operations where there is no card.

    Args:
        file: the profiler's own table is added to it.
    """
    on_card = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_card else [])]
    with profile(activities=activities) as recorded:
        began = time.perf_counter()
        for _ in range(UPDATES):
            side.update()
        if on_card:
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - began
    column = "self_device_time_total" if on_card else "self_cpu_time_total"
    with file.open("a", encoding="utf-8") as text:
        text.write(recorded.key_averages().table(sort_by=column, row_limit=60))
    return by_part(recorded.events(), seconds * 1e6, on_card)


def by_part(events: Sequence[Any], wall: float, on_card: bool) -> dict[str, float]:
    """Shares of `wall` by part of the work.

    Args:
        events: of a profile.
        wall: microseconds.
    """
    parts, unowned = Counter[str](), Counter[str]()
    for event in events:
        path, above = event.name, event.cpu_parent
        while above is not None:
            path, above = f"{above.name} / {path}", above.cpu_parent
        if not on_card:
            parts[part_of(path)] += event.self_cpu_time_total
        elif event.device_type.name == "CUDA" and not event.is_user_annotation:
            unowned[event.name] += event.time_range.elapsed_us()
        for kernel in event.kernels if on_card else ():
            parts[part_of(f"{path} / {kernel.name}")] += kernel.duration
            unowned[kernel.name] -= kernel.duration
    for name, duration in unowned.items():  # of compiled code, which no operation of torch has launched
        parts[part_of(name)] += duration
    found = {part: round(parts[part] / wall, 4) for part in (*PARTS, REST)}
    return found | {IDLE: round(max(1 - sum(found.values()), 0.0), 4)}


def waits(side: Side, device: torch.device) -> dict[str, int]:
    """Places that wait for the card in one update; on a processor, functions that would, by its operations."""
    if device.type == "cuda":
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                side.update()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        places = [f"{Path(one.filename).name}:{one.lineno}" for one in seen if "synchroniz" in str(one.message)]
        return dict(Counter(places))
    from tests.helpers.paths import Waits

    with Waits() as noted:
        side.update()
    return dict(Counter(noted.found))


# --------------------------------------------------------------------------- all cases


TIMES, TINY_TIMES = Times(1.0, 2.0, 4.0, 3), Times(0.0, 0.0, 0.0, 2)
LLAMA = Config(width=1024, blocks=24, heads=16, hidden=2816, context=4096)
LARGER = Config(width=2048, blocks=18, heads=16, hidden=5632, context=4096)
TOY = Config(width=32, blocks=3, heads=2, hidden=64, context=64)


@cache
def all_cases(tiny: bool) -> dict[str, Case]:
    """Every case by its name; `tiny` ones have the same shape."""
    corpus = Sizes(TOY, 200, 20, 4, 60) if tiny else Sizes(LLAMA)
    larger = TOY.model_copy(update={"width": 48}) if tiny else LARGER
    small, large = updates = (160, 320) if tiny else (16_384, 65_536)
    sequences, rows = ((4, 8), (1, 2)) if tiny else ((8, 16, 32, 64, 128), (1, 4, 8, 16))
    ours = Case("ours", corpus, (small,), (small, 2 * small, 4 * small))
    peer = Case("", corpus, (large, small), sequences)
    dropping = corpus.model.model_copy(update={"dropout": 0.1})
    return {
        "ours": replace(ours, updates=updates, looks=True),
        "ours, dropout 0.1": replace(ours, sizes=replace(corpus, model=dropping)),
        "ours, 151,936 ids": replace(ours, sizes=replace(corpus, vocabulary=300 if tiny else 151_936)),
        "ours, passes of 2,048": replace(ours, tried=(small // 8,)),
        "ours, 1 B": replace(ours, sizes=replace(corpus, model=larger), updates=(large,), looks=True),
        "ours, FlashAttention 3": replace(ours, flash="FA3"),
        "Transformers, flattened": replace(peer, side="flattened"),
        "TRL, packing": replace(peer, side="trl packing", tried=rows),
        "Transformers, padded, by length": replace(peer, side="grouped"),
        "TRL, padding_free": replace(peer, side="trl padding_free"),
    }
