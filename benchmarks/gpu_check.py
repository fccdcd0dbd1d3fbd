"""All of gpu.py that a processor can run, at toy size; it shows that the script runs, and nothing about speed."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from gpu_measure import PEAKS, Result, peak_of, run, write
from gpu_sides import Make, Side, Sizes, missing_packages, ours_config

from unpad.batching.layout import Layout
from unpad.models.decoder import Decoder
from unpad.nn import attention
from unpad.nn.native import library

UPDATES = 6
CPU = torch.device("cpu")
_TOY = Sizes(
    width=32, blocks=2, heads=2, hidden=64, vocabulary=200, mean=20, sigma=0.6, shortest=4, longest=64, sequences=16,
    batch=4, rate=3e-3,
)  # fmt: skip
# An update holds the whole corpus, so that every side sees the same tokens in each and its loss must fall.
SIZES = replace(_TOY, tokens_per_update=int(_TOY.lengths().sum()))
ONLY_ON_A_GPU = (
    "attention by torch's variable-length flash kernel: results and gradients (shapes are above)",
    "FlashAttention 2 of Transformers, and flattened batches through it",
    "blocks compiled by Inductor (above they are traced)",
    "bf16 products, fused AdamW and pinned memory on a card",
    "waiting for the card before and after a turn, and before and after the product that measures its peak",
    "memory of weights, optimizer and updates, by the card's allocator",
    "a side that does not fit the card's memory (above its error is raised by hand)",
    "the sizes of the measurement: 350 M parameters, 16,384 tokens per update",
)


@dataclass(frozen=True)
class Finding:
    """A line of the check; `good` is None for what could not be run here."""

    good: bool | None
    text: str

    def __str__(self) -> str:
        verdict = {True: "ok", False: "FAIL", None: "not run"}[self.good]
        return f"{verdict:8}{self.text}"


def check(sides: Mapping[str, tuple[str, Make]]) -> tuple[list[str], bool]:
    """Lines of all findings and of what only a GPU runs; False if a finding is bad."""
    with library.switched_off():  # a GPU has no native kernels
        built: dict[str, Side] = {}
        findings = [*_check_sides(sides, built)]
        findings += [*_check_tables({key: (sides[key][0], side) for key, side in built.items()})] if built else []
        findings += [*_check_cards(), *_check_flash_shapes()]
    lines = [str(finding) for finding in findings]
    lines += [str(Finding(None, f"without a GPU: {what}")) for what in ONLY_ON_A_GPU]
    return lines, all(finding.good is not False for finding in findings)


def _check_sides(sides: Mapping[str, tuple[str, Make]], built: dict[str, Side]) -> Iterator[Finding]:
    """Each side is the same model, starts at chance, learns, and agrees with the side that sees the same batches; those
    that can be built are put into `built`."""
    losses: dict[str, list[float]] = {}
    parameters = _num_parameters(Decoder(ours_config(SIZES), SIZES.vocabulary))
    chance, positions = math.log(SIZES.vocabulary), int(SIZES.lengths().sum()) - SIZES.sequences
    for key, (name, make) in sides.items():
        if missing := missing_packages(key):
            yield Finding(None, f"{name}: {' and '.join(missing)} not installed: pip install unpad[bench]")
            continue
        side, seen, losses[key] = make(SIZES, CPU), list[int](), list[float]()
        built[key] = side
        for _ in range(UPDATES):
            seen.append(int(side.update().sum()))
            losses[key].append(float(side.loss))
        first, last = losses[key][0], losses[key][-1]
        found = _num_parameters(side.model)
        yield Finding(found == parameters, f"{name}: {found:,} parameters, as ours has")
        yield Finding(abs(first - chance) < 0.1, f"{name}: loss {first:.4f} at first, chance is {chance:.4f}")
        fell = all(map(math.isfinite, losses[key])) and last < first - 0.05
        yield Finding(fell, f"{name}: loss {last:.4f} after {UPDATES} updates of the same tokens")
        if key != "trl":  # a row of it holds what fits, so an update holds about the corpus
            yield Finding(seen == [positions] * UPDATES, f"{name}: {positions} positions in each update")
    for one, other, same in (("ours", "compiled", UPDATES), ("padded", "flattened", 1)):
        if one in losses and other in losses:
            pairs = list(zip(losses[one], losses[other], strict=True))[:same]
            worst = max(abs(a - b) for a, b in pairs)
            yield Finding(worst < 2e-3, f"{one} and {other}: losses of the same batches differ by {worst:.1g} at most")


def _num_parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _check_tables(built: Mapping[str, tuple[str, Side]]) -> Iterator[Finding]:
    """A measurement of all sides, and one that does not fit, is written with a line for each; so is that of a card."""

    def too_large(sizes: Sizes, device: torch.device) -> Side:
        raise torch.OutOfMemoryError("CUDA out of memory.\nand more")

    asked = {key: (name, partial(_as_built, side)) for key, (name, side) in built.items()}
    result = run(SIZES, CPU, {**asked, "large": ("a side that is too large", too_large)}, rounds=2, seconds=0.0)
    lost = result.not_run == {"a side that is too large": "out of memory: CUDA out of memory."}
    yield Finding(lost, "a side that does not fit is named, and the others are measured")
    peak, source = peak_of("NVIDIA H100 80GB HBM3")
    card = replace(result, peak=peak, source=source, memory=dict.fromkeys(result.memory, 3 << 30))
    names = [name for name, _ in built.values()]
    with tempfile.TemporaryDirectory() as folder:
        for what, one in (("a processor", result), ("a card, made up", card)):
            write(one, Path(folder) / what)
            rows = [row.split(" | ") for row in (Path(folder) / what / "gpu.md").read_text().splitlines()]
            table = [row for row in rows if row[0].removeprefix("| ") in names]
            figures = json.loads((Path(folder) / what / "gpu.json").read_text())
            full = len(table) == len(names) == len(figures["rounds"]["turns"]) and all(len(row) == 7 for row in table)
            yield Finding(full and _fits(one, table), f"the table of {what}: {len(table)} sides, every column")


def _as_built(side: Side, sizes: Sizes, device: torch.device) -> Side:
    return side


def _fits(result: Result, table: list[list[str]]) -> bool:
    """Whether the columns that only a card has are filled where it is one."""
    return all((row[4] != "-") == (row[6] != "- |") == (result.peak is not None) for row in table)


def _check_cards() -> Iterator[Finding]:
    wrong = [card for card, peak in PEAKS.items() if peak_of(f"NVIDIA {card} 80GB") != (peak[0] * 1e12, peak[1])]
    unknown = peak_of("NVIDIA RTX A4000") == (None, "")
    yield Finding(not wrong and unknown, f"peaks of {len(PEAKS)} cards are found by their names")


def _check_flash_shapes() -> Iterator[Finding]:
    """The call of the flash kernel, forward and backward, on tensors that have shapes and no contents."""
    for heads, kv_heads, window, scale in ((4, 4, None, None), (4, 2, None, None), (4, 2, 8, 0.25)):
        q, k, v = (
            torch.empty(20, num, 32, dtype=torch.bfloat16, device="meta", requires_grad=True)
            for num in (heads, kv_heads, kv_heads)
        )
        bounds = torch.tensor([0, 5, 20], dtype=torch.int32, device="meta")
        out = attention._varlen(q, k, v, Layout(bounds, 15), True, window, scale)
        out.sum().backward()
        shapes = [x.grad is not None and x.grad.shape == x.shape for x in (q, k, v)]
        good = out.shape == q.shape and out.dtype == q.dtype and all(shapes)
        shown = f"{heads} heads over {kv_heads}" + (f", a window of {window}, a scale of its own" if window else "")
        yield Finding(good, f"the flash kernel's shapes, {shown}, with gradients")
