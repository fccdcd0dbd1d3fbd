"""Speed against data and model: curves of tokens per second, and of time against corpus size.

    python benchmarks/scaling.py                        says first how long it will take; best with nothing else running
    python benchmarks/scaling.py --quick --out /tmp/try

Writes scaling.md, scaling.json and scaling.png. Of the first four curves each changes one thing about one workload and
keeps the rest: lengths are log-normal, tokens random, and the model a decoder with rotary positions and SwiGLU. Three
sides take turns at every point, round after round: flat runs with the native kernels, the same without them, and our
own model on batches padded to their longest, 8 sequences a pass, with as many passes as make the same real tokens per
update. The last panel times the first tokenisation of N documents, the plan of N sequences, and training on N tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from measure import (
    CEILING_SIZE,
    Contender,
    Spread,
    Work,
    ceiling_size,
    describe_machine,
    matrix_ceiling,
    measure_rounds,
    spread,
)

from unpad.api import batches
from unpad.batching.batch import RaggedBatch
from unpad.batching.plan import plan
from unpad.data.family import open_data
from unpad.models.cost import reading_operations, sizes_of
from unpad.models.decoder import Config, Decoder
from unpad.nn.native import library as native
from unpad.nn.precision import DTYPES
from unpad.nn.product_speed import choose_precision
from unpad.recipes.file import load_recipe
from unpad.recipes.training import OptimSettings, PlanSettings
from unpad.storage import write_atomic
from unpad.training.optim import make_optimizer
from unpad.training.step import train_step

WEIGHTS = {"cross_entropy": 1.0}
VOCABULARY = 8000
PADDED_BATCH = 8
# name -> (strategy, native kernels, colour, marker, line). Colours of Okabe and Ito (2008), which colour-blind readers
# tell apart; markers and line styles tell them apart on paper.
SIDES = {
    "ragged, native kernels": ("pack", True, "#0072B2", "o", "-"),
    "ragged, torch kernels": ("pack", False, "#E69F00", "s", "--"),
    "padded batches of 8": ("dynamic", False, "#CC79A7", "^", ":"),
}
JOBS = {"tokenise": ("#009E73", "o", "-"), "plan": ("#0072B2", "s", "--"), "train": ("#D55E00", "^", ":")}


@dataclass(frozen=True)
class Workload:
    """Lengths and model of one point; the values here are those that a curve keeps.

    Args:
        mean_length: tokens, before lengths are clipped to 2 to 2,048.
        sigma: standard deviation of the logarithm of lengths; 0 makes all equal.
        tokens_per_step: real tokens of an update, at least.
    """

    mean_length: int = 64
    sigma: float = 0.8
    tokens_per_step: int = 2048
    width: int = 256
    blocks: int = 2

    def lengths(self, num_tokens: int) -> np.ndarray:
        """Lengths of sequences that have about this many tokens together, (num_seqs,) int64."""
        num = max(num_tokens // self.mean_length, 2 * PADDED_BATCH)
        center = np.log(self.mean_length) - self.sigma**2 / 2
        drawn = np.random.default_rng(0).lognormal(center, self.sigma, num)
        return np.clip(drawn.round().astype(np.int64), 2, 2048)

    def config(self) -> Config:
        return Config(
            width=self.width,
            blocks=self.blocks,
            heads=max(self.width // 64, 1),
            hidden=4 * self.width,
            context=2048,
            activation="swiglu",
            norm="rmsnorm",
            positions="rotary",
            tied=True,
        )


# curve -> values of its field; the axis it is drawn on says "log2" or "linear".
CURVES: dict[str, Sequence[float]] = {
    "mean_length": (8, 16, 32, 64, 128, 256, 512, 1024),
    "sigma": (0.0, 0.25, 0.5, 0.75, 1.0, 1.25),
    "tokens_per_step": (256, 512, 1024, 2048, 4096, 8192, 16384),
    "width": (64, 128, 256, 512, 1024),
}
AXES = {
    "mean_length": "mean length (tokens)",
    "sigma": "spread of lengths (σ of log length)",
    "tokens_per_step": "tokens per update",
    "width": "model width (channels)",
}


@dataclass(frozen=True)
class Effort:
    """Extent of the measurement: rounds and seconds of every point and side, and the sizes of the corpora."""

    rounds: int = 3
    seconds: float = 0.8
    curves: dict[str, Sequence[float]] = field(default_factory=lambda: CURVES)
    documents: Sequence[int] = (100, 1_000, 10_000, 100_000)
    planned: Sequence[int] = (1_000, 10_000, 100_000, 1_000_000)
    trained: Sequence[int] = (1_000, 4_000, 16_000, 64_000)  # tokens
    ceiling_size: int = CEILING_SIZE

    def seconds_expected(self) -> float:
        """Rough time of the whole: a turn takes half as long again, for warming up and updates begun;
        the ceiling is thought to be 600 GFLOP/s."""
        turns = self.rounds * len(SIDES) * sum(map(len, self.curves.values()))
        corpora = sum(self.documents) / 5_000 + sum(self.planned) / 1_000_000 + sum(self.trained) / 5_000
        ceilings = (self.rounds + 1) * sum(map(len, self.curves.values())) * 3 * 2 * self.ceiling_size**3 / 6e11
        return 1.6 * self.seconds * turns + corpora + ceilings


QUICK = Effort(
    rounds=2,
    seconds=0.05,
    curves={name: (values[1], values[-3]) for name, values in CURVES.items()},
    documents=(50, 200),
    planned=(1_000, 10_000),
    trained=(500, 2_000),
    ceiling_size=512,
)


# --------------------------------------------------------------------------- tokens per second


class Way:
    """One way to train the model of a workload."""

    def __init__(self, workload: Workload, name: str) -> None:
        self.strategy, self.native = SIDES[name][:2]
        self.workload = workload
        torch.manual_seed(0)
        self.model = Decoder(workload.config(), VOCABULARY).train()
        self.optimizer = make_optimizer(self.model, OptimSettings(lr=1e-4))
        self.precision = choose_precision("auto", torch.device("cpu"))[0]
        self._updates = self._feed()

    def _feed(self) -> Iterator[list[RaggedBatch]]:
        draw = np.random.default_rng(1)
        lengths = self.workload.lengths(max(8 * self.workload.tokens_per_step, 32_768))
        corpus = [draw.integers(0, VOCABULARY, length + 1) for length in lengths]
        counted = [[True] * len(sequence) for sequence in corpus]
        settings: dict[str, Any] = {"tokens_per_step": self.workload.tokens_per_step, "tokens_per_micro": 4096}
        for epoch in count():
            yield from batches(
                corpus, counted, epoch=epoch, strategy=self.strategy, batch_size=PADDED_BATCH, **settings
            )

    def update(self) -> Work:
        with nullcontext() if self.native else native.switched_off():
            micros = next(self._updates)
            train_step(self.model, micros, self.optimizer, weights=WEIGHTS, precision=self.precision, clip=1.0)
        lengths = [length for batch in micros for length in batch.layout.lengths().tolist()]
        sizes = sizes_of(self.model.config, VOCABULARY)
        num_targets = sum(batch.num_targets for batch in micros)
        return Work(sum(lengths), 3 * reading_operations(sizes, [lengths] * sizes.blocks, num_targets))


@dataclass(frozen=True)
class Point:
    """One value of a curve: per side its tokens per second, and its share of the ceiling."""

    value: float
    rates: dict[str, Spread]
    shares: dict[str, Spread]


def measure_curve(curve: str, effort: Effort) -> list[Point]:
    points = []
    names = [name for name, (_, wants_native, *_) in SIDES.items() if native.enabled() or not wants_native]

    dtype = DTYPES[choose_precision("auto", torch.device("cpu"))[0]]
    size = ceiling_size(dtype, largest=effort.ceiling_size)

    def ceiling() -> float:
        return matrix_ceiling(dtype, size=size)

    for value in effort.curves[curve]:
        workload = replace(Workload(), **{curve: value})  # type: ignore[arg-type]
        sides = {name: Contender(Way(workload, name).update) for name in names}
        measured = measure_rounds(sides, effort.rounds, effort.seconds, warm_steps=1, ceiling=ceiling)
        rates = {name: spread(measured.rates(name)) for name in names}
        points.append(Point(value, rates, {name: spread(measured.shares(name)) for name in names}))
        print(f"{curve} {value:g}: " + ", ".join(f"{name} {rate.median:,.0f}" for name, rate in rates.items()))
    return points


# --------------------------------------------------------------------------- time against corpus size


def texts(num_documents: int) -> Iterator[str]:
    """Chinese-looking texts of 20 to 60 characters; nothing repeats as a whole."""
    draw = random.Random(0)
    characters = [chr(0x4E00 + i) for i in range(2_000)]
    for number in range(num_documents):
        yield "".join(draw.choices(characters, k=draw.randint(20, 60))) + f"。{number}"


def tokenise_seconds(num_documents: int) -> float:
    """First opening of a file: read, hash, train the tokenizer, encode and write the cache."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "texts.jsonl"
        with path.open("w", encoding="utf-8") as file:
            for text in texts(num_documents):
                file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
        os.environ["UNPAD_CACHE"] = str(Path(folder) / "cache")
        recipe = load_recipe("llm", [f"data.text={path}"])
        began = time.perf_counter()
        open_data(recipe, None)
        return time.perf_counter() - began


def plan_seconds(num_sequences: int) -> float:
    workload = Workload()
    lengths = workload.lengths(num_sequences * workload.mean_length)
    settings = PlanSettings(strategy="pack", tokens_per_step=workload.tokens_per_step)
    began = time.perf_counter()
    plan(lengths, settings, seed=0, epoch=0)
    return time.perf_counter() - began


def train_seconds(tokens_asked: Sequence[int]) -> list[tuple[int, float]]:
    """(real tokens, seconds of training) when so many tokens have been seen, with the model built and warm before."""
    side = Way(Workload(), next(iter(SIDES)))
    for _ in range(2):
        side.update()
    tokens, began, seen = 0, time.perf_counter(), []
    for asked in tokens_asked:
        while tokens < asked:
            tokens += side.update().tokens
        seen.append((tokens, time.perf_counter() - began))
    return seen


def corpus_times(effort: Effort) -> dict[str, list[tuple[int, float]]]:
    """Job -> (size, seconds): documents tokenised, sequences planned, tokens trained on."""
    return {
        "tokenise": [(size, tokenise_seconds(size)) for size in effort.documents],
        "plan": [(size, plan_seconds(size)) for size in effort.planned],
        "train": train_seconds(effort.trained),
    }


# --------------------------------------------------------------------------- picture and tables


def draw(curves: dict[str, list[Point]], corpus: dict[str, list[tuple[int, float]]], path: Path) -> None:
    """Five panels and a legend."""
    figure, panels = plt.subplots(2, 3, figsize=(13, 7.5), layout="constrained")
    for panel, (curve, points) in zip(panels.flat, curves.items(), strict=False):
        for name in points[0].rates:
            _, _, colour, marker, style = SIDES[name]
            values = [point.value for point in points]
            rates = [point.rates[name] for point in points]
            panel.plot(values, [rate.median for rate in rates], style, color=colour, marker=marker, label=name)
            panel.fill_between(
                values, [rate.low for rate in rates], [rate.high for rate in rates], color=colour, alpha=0.15, lw=0
            )
        if curve != "sigma":
            panel.set_xscale("log", base=2)
            panel.set_xticks([point.value for point in points], [f"{point.value:,g}" for point in points])
        panel.set_yscale("log")
        panel.yaxis.set_major_formatter("{x:,.0f}")
        panel.yaxis.set_minor_formatter("{x:,.0f}")
        panel.set_xlabel(AXES[curve])
        panel.set_ylabel("real tokens per second")
    _draw_corpus(panels.flat[4], corpus)
    handles, labels = panels.flat[0].get_legend_handles_labels()
    panels.flat[5].axis("off")
    base = Workload()
    kept = (
        f"Kept where not varied: mean length {base.mean_length}, σ {base.sigma},\n{base.tokens_per_step:,} tokens per "
        f"update, width {base.width}, {base.blocks} blocks,\nvocabulary {VOCABULARY:,}. Bands: quartiles of the rounds."
    )
    panels.flat[5].legend(handles, labels, loc="upper left", frameon=False, title=kept, alignment="left", fontsize=11)
    for panel in list(panels.flat)[:5]:
        panel.grid(True, which="major", alpha=0.3)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_corpus(panel: Any, corpus: dict[str, list[tuple[int, float]]]) -> None:
    units = {"tokenise": "documents", "plan": "sequences", "train": "tokens"}
    for job, timed in corpus.items():
        colour, marker, style = JOBS[job]
        panel.plot(*zip(*timed, strict=True), style, color=colour, marker=marker, label=f"{job} ({units[job]})")
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xlabel("size of the corpus")
    panel.set_ylabel("seconds")
    panel.legend(frameon=False)


def markdown(report: dict[str, Any], curves: dict[str, list[Point]], command: str) -> str:
    machine = report["machine"]
    lines = [
        "# Speed against data and model",
        "",
        f"    {command}",
        "",
        "![curves](scaling.png)",
        "",
        f"Machine: {machine['cores']} cores of {machine['processor']}, {machine['threads']} threads, load "
        f"{machine['load']:.1f} before from other work; torch {machine['torch']}, {report['kernels']}.",
        f"Real tokens per second, medians of {report['rounds']} rounds of {report['seconds']:g} s, quartiles behind; "
        "then the share of the best matrix product of the same precision, measured between the rounds.",
    ]
    for curve, points in curves.items():
        names = list(points[0].rates)
        lines += ["", f"## {AXES[curve].capitalize()}", ""]
        lines += [f"| {AXES[curve]} | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
        for point in points:
            cells = [
                f"{rate.median:,.0f} ({rate.low:,.0f} to {rate.high:,.0f}), {point.shares[name].median:.1%}"
                for name, rate in point.rates.items()
            ]
            lines.append(f"| {point.value:,g} | {' | '.join(cells)} |")
    lines += ["", "## Size of the corpus", "", "| job | size | seconds |", "|---|---|---|"]
    lines += [f"| {job} | {size:,} | {took:.2f} |" for job, timed in report["corpus"].items() for size, took in timed]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few points, short turns: to see that it runs")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder of scaling.md, .json and .png")
    chosen = parser.parse_args()
    effort = QUICK if chosen.quick else Effort()
    print(f"about {effort.seconds_expected() / 60:.1f} minutes on a quiet machine of two cores", flush=True)
    machine, began = describe_machine(), time.perf_counter()
    curves = {curve: measure_curve(curve, effort) for curve in effort.curves}
    corpus = corpus_times(effort)
    report = {
        "machine": machine,
        "kernels": native.describe(),
        "rounds": effort.rounds,
        "seconds": effort.seconds,
        "curves": {curve: [asdict(point) for point in points] for curve, points in curves.items()},
        "corpus": corpus,
    }
    chosen.out.mkdir(parents=True, exist_ok=True)
    draw(curves, corpus, chosen.out / "scaling.png")
    write_atomic(chosen.out / "scaling.json", json.dumps(report, ensure_ascii=False, indent=1) + "\n")
    text = markdown(report, curves, " ".join(["python benchmarks/scaling.py", *sys.argv[1:]]))
    write_atomic(chosen.out / "scaling.md", text)
    print(f"{chosen.out / 'scaling.md'} and scaling.png written after {(time.perf_counter() - began) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
