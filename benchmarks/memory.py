"""Model of memory against measured peaks: random models and batches of all families, in a process each.

python benchmarks/memory.py              40 shapes; benchmarks/memory.md has them by family
python benchmarks/memory.py --cards      largest plan.tokens_per_micro per family for 8, 16 and 32 GiB
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from unpad.batching.batch import RaggedBatch, from_sequences, from_vectors, in_parts, make_batch
from unpad.batching.layout import build_layout
from unpad.machine import peak_memory, process_memory, restart_peak
from unpad.models import build_model, model_config
from unpad.models.contract import Model
from unpad.models.set_sequence.event_sets import EventSets
from unpad.recipes.training import OptimSettings
from unpad.training.auto_size import SHARE, measured
from unpad.training.memory import (
    KEPT,
    OVERHEAD,
    cells_of,
    choose_allocator,
    process_bytes,
    return_freed_memory,
    state_bytes,
)
from unpad.training.optim import make_optimizer
from unpad.training.parallel.share import whole_share
from unpad.training.step import train_step

FAMILIES = ("text", "images", "vqa", "patients")
NUM_SHAPES = 10  # of each family
MIB = 2**20
CARDS = (8 << 30, 16 << 30, 32 << 30)
MEDIUM = {
    "width": 512, "blocks": 8, "hidden": 2048, "outputs": 8000, "dropout": 0.1, "tokens": 4096, "longest": 512,
    "seed": 0,
}  # fmt: skip
Shape = dict[str, Any]

# --------------------------------------------------------------------------- random shapes


def shapes(family: str, rng: np.random.Generator) -> Shape:
    """Sizes of a model and of a batch, drawn at random."""

    def pick(*values: Any) -> Any:
        return values[int(rng.integers(len(values)))]

    return {
        "family": family,
        "width": pick(64, 128, 192, 256, 384),
        "blocks": pick(1, 2, 3, 4),
        "hidden": pick(128, 256, 512, 1024),
        "outputs": pick(300, 1000, 4000, 8000) if family in ("text", "vqa") else pick(10, 200),
        "dropout": pick(0.0, 0.1),
        "tokens": pick(2048, 4096, 6144, 8192),
        "longest": pick(32, 128, 512),
        "precision": pick("fp32", "fp32", "bf16"),
        "native": pick(True, True, False),
        "seed": int(rng.integers(1 << 30)),
    }


def lengths_of(shape: Shape) -> list[int]:
    """Lengths of sequences of about so many tokens in all."""
    rng = np.random.default_rng(shape["seed"])
    found: list[int] = []
    while sum(found) < shape["tokens"]:
        found.append(int(rng.integers(4, shape["longest"] + 1)))
    return found


def text(shape: Shape) -> tuple[Model, RaggedBatch]:
    rng = np.random.default_rng(shape["seed"])
    config = {"kind": "decoder", "context": shape["longest"] + 1, "heads": shape["width"] // 32}
    sequences = [rng.integers(0, shape["outputs"], n + 1).tolist() for n in lengths_of(shape)]
    return _model(config, shape), from_sequences(sequences)


def images(shape: Shape) -> tuple[Model, RaggedBatch]:
    rng, patch = np.random.default_rng(shape["seed"]), 8
    grids = [(max(1, int(n**0.5)), max(1, n // max(1, int(n**0.5)))) for n in lengths_of(shape)]
    vectors = [rng.standard_normal((rows * columns, 3 * patch * patch)).astype(np.float32) for rows, columns in grids]
    labels = rng.integers(0, shape["outputs"], len(grids))
    batch = replace(from_vectors(vectors, 3 * patch * patch, labels), grid=torch.tensor(grids))
    return _model({"kind": "vit", "heads": shape["width"] // 32, "patch": patch}, shape), batch


def vqa(shape: Shape) -> tuple[Model, RaggedBatch]:
    from unpad.data.preprocess import Vocabulary, preprocess

    rng, patch, image = np.random.default_rng(shape["seed"]), 8, shape["outputs"] - 1
    ids = {"<image>": image}
    vocabulary = Vocabulary(lambda line: [ids.get(word) or int(word) for word in line.split()], shape["outputs"], image)
    pictures, questions, answers = [], [], []
    for n in lengths_of(shape):
        side = max(1, int((n / 2) ** 0.5))
        pictures.append([(rng.standard_normal((side * side, 3 * patch * patch)).astype(np.float32), (side, side))])
        questions.append("<image> " + " ".join(map(str, rng.integers(1, image, max(n // 4, 1)))))
        answers.append(" ".join(map(str, rng.integers(1, image, max(n // 4, 1)))))
    batch = preprocess(images=pictures, questions=questions, vocabulary=vocabulary, answers=answers).batch
    sizes = {name: shape[name] for name in ("width", "blocks", "hidden", "dropout")} | {"heads": shape["width"] // 32}
    section = {
        "kind": "vision_language", "image_id": image, "vision": {**sizes, "patch": patch},
        "language": {**sizes, "context": 2 * shape["longest"] + 8},
    }  # fmt: skip
    return build_model(model_config(section), shape["outputs"]), batch


def patients(shape: Shape) -> tuple[Model, RaggedBatch]:
    rng = np.random.default_rng(shape["seed"])
    sets = []
    for n in lengths_of(shape):
        sizes: list[int] = []
        while sum(sizes) < n:
            sizes.append(int(rng.integers(1, 9)))
        sets.append(sizes)
    lengths = np.array([sum(one) for one in sets])
    total, num_sets = int(lengths.sum()), sum(map(len, sets))
    batch = make_batch(
        rng.integers(0, 500, total), np.zeros(total, np.int64), np.zeros(total, np.bool_), lengths.astype(np.int64)
    )
    events = EventSets(
        history=build_layout(np.array([len(one) for one in sets])),
        members=build_layout(np.array([size for one in sets for size in one])),
        values=torch.randn(total),
        has_value=torch.rand(total) < 0.5,
        times=torch.from_numpy(np.concatenate([np.arange(len(one)) - len(one) for one in sets]).astype(np.float32)),
    )
    assert events.num_sets == num_sets
    batch = replace(batch, seq_labels=torch.from_numpy(rng.integers(0, 2, len(sets)))).with_part(events)
    model = {"kind": "set_sequence", "heads": shape["width"] // 32, "latent": 32, "inducing": 4}
    return _model(model, {**shape, "outputs": 500}), batch


def _model(section: dict[str, Any], shape: Shape) -> Model:
    sizes = {name: shape[name] for name in ("width", "blocks", "hidden", "dropout")}
    return build_model(model_config({**sizes, **section}), shape["outputs"])


MAKE: dict[str, Callable[[Shape], tuple[Model, RaggedBatch]]] = {
    "text": text, "images": images, "vqa": vqa, "patients": patients,
}  # fmt: skip

# --------------------------------------------------------------------------- one shape, in a process of its own


def measure(shape: Shape) -> dict[str, int]:
    """Predicted and measured bytes of a process that trains on two such micro-batches per update."""
    choose_allocator("auto", may_keep=True)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, batch = MAKE[shape["family"]](shape)
    weights = {name: 1.0 for name in model.weights}
    model.train()
    model.begin_step(0, 10, weights)
    small = [part for size in (256, 1024) for part in _extremes(in_parts(batch, size))]
    footprint = measured(model, small, weights, shape["precision"])
    return_freed_memory()
    base = process_memory()
    state = state_bytes(model.parameters(), micros=2)
    predicted = base + state + process_bytes(footprint.of(batch.total_tokens, cells_of(batch)))
    return_freed_memory()
    restart_peak()
    optimizer, micros = make_optimizer(model, OptimSettings()), [batch, batch]
    from unpad.processes.sums import ExactSum

    share = replace(whole_share(model, micros), sums=ExactSum(list(model.parameters())), seed=(0, 0))
    for _ in range(3):
        train_step(model, micros, optimizer, weights=weights, precision=shape["precision"], clip=1.0, share=share)
    return {"base": base, "predicted": int(predicted), "measured": peak_memory(), "tokens": batch.total_tokens}


def _extremes(parts: list[RaggedBatch]) -> list[RaggedBatch]:
    """Of full parts that with fewest and that with most pairs of positions that attend."""
    by_cells = sorted(parts[:-1] or parts, key=cells_of)
    return [by_cells[0], by_cells[-1]]


# --------------------------------------------------------------------------- all shapes


def table(families: Sequence[str], num: int, seed: int) -> None:
    """Measure shapes of families and print a row for each."""
    print("| family | width | blocks | hidden | outputs | longest | tokens | precision | kernels | predicted MiB | "
          "measured MiB | error | error beyond the base |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|---|---|---|---|")
    errors, beyond = [], []
    for family in families:
        rng = np.random.default_rng(seed)
        for _ in range(num):
            shape = shapes(family, rng)
            env = {**os.environ, **({} if shape["native"] else {"UNPAD_NATIVE": "0"}), "OMP_NUM_THREADS": "1"}
            command = [sys.executable, __file__, "--shape", json.dumps(shape)]
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
            if done.returncode:
                sys.exit(f"{shape}\n{done.stderr[-3000:]}")
            found = json.loads(done.stdout.splitlines()[-1])
            errors.append(found["predicted"] / found["measured"] - 1)
            beyond.append((found["predicted"] - found["base"]) / (found["measured"] - found["base"]) - 1)
            cells = [
                family, shape["width"], shape["blocks"], shape["hidden"], shape["outputs"], shape["longest"],
                found["tokens"], shape["precision"], "native" if shape["native"] else "torch",
                f"{found['predicted'] / MIB:,.0f}", f"{found['measured'] / MIB:,.0f}", f"{errors[-1]:+.1%}",
                f"{beyond[-1]:+.1%}",
            ]  # fmt: skip
            print(f"| {' | '.join(map(str, cells))} |", flush=True)
    for name, values in (("process", errors), ("beyond the base", beyond)):
        sizes = np.abs(values)
        print(f"\n{name}: within 20 %: {int((sizes <= 0.2).sum())} of {len(sizes)}; median {np.median(sizes):.1%}, "
              f"worst {sizes.max():.1%}")  # fmt: skip


def cards() -> None:
    """Print the tokens of the largest micro-batches that memory of three sizes holds, for a model of each family."""
    print("| family | parameters | KiB per token | 8 GiB | 16 GiB | 32 GiB |")
    print("|---|---|---|---|---|---|")
    for family in FAMILIES:
        model, batch = MAKE[family]({**MEDIUM, "family": family})
        weights = {name: 1.0 for name in model.weights}
        model.train()
        model.begin_step(0, 10, weights)
        small = [part for size in (256, 1024) for part in _extremes(in_parts(batch, size))]
        footprint = measured(model, small, weights, "fp32")
        state = process_memory() + state_bytes(model.parameters(), micros=4)
        per_token = footprint.per_token + footprint.per_cell * cells_of(batch) / batch.total_tokens
        cells = [family, f"{sum(p.numel() for p in model.parameters()):,}", f"{OVERHEAD * per_token / 1024:.0f}"]
        for size in CARDS:
            room = (SHARE * size - state - KEPT) / OVERHEAD - footprint.fixed
            cells.append(f"{int(room / per_token / 100) * 100:,}")
        print(f"| {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", help="measure one shape, in JSON")
    parser.add_argument("--families", nargs="*", default=FAMILIES, help="those to measure")
    parser.add_argument("--cards", action="store_true", help="the largest micro-batches of 8, 16 and 32 GiB")
    parser.add_argument("--num", type=int, default=NUM_SHAPES, help="shapes of every family")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if given.shape:
        print(json.dumps(measure(json.loads(given.shape))))
    elif given.cards:
        cards()
    else:
        table(given.families, given.num, given.seed)


if __name__ == "__main__":
    main()
