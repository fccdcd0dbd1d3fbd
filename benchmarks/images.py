"""Accuracy of an image classifier at its images' own sizes, beside unified squares, a forest and a plain CNN.

    python benchmarks/images.py MANIFEST [--epochs 16] [--seeds 0 1 2] [--out benchmarks/images.md] [key=value ...]

All sides see the same split. The transformer at squares is the same one, its training images go through the same
changes, and it is trained for the same number of real tokens as at native sizes; only native sizes can be drawn anew in
every epoch (images.scale). The forests (scikit-learn, extra `bench`) read 32 x 32 pixels, colours on white or opacity
alone. The plain CNN (eight convolutions with batch norm, 295,000 parameters) reads the colours, with flips, shifts and
zoom, for as much processor time as native sizes took. Weights are the last ones, as nothing is held out to choose
others by. Other words change the recipe of all transformers, such as images.flip=0.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from measure import describe_machine
from rich.console import Console
from torch import nn
from torch.nn import functional as F

from unpad.data.images import ImageData
from unpad.data.pixels.decode import decode
from unpad.data.pixels.patches import resize
from unpad.data.sources.images import read_bytes
from unpad.data.sources.split import Split
from unpad.evaluation.run import evaluate_run
from unpad.recipes.file import load_recipe
from unpad.storage import write_atomic
from unpad.training.loop import train
from unpad.training.setup import Setup, prepare_setup, resolved

SQUARES = (32, 64, 128)
FOREST_SIDE = 32  # pixels
FOREST_TREES = 500
CNN_CHANNELS = (3, 32, 48, 72, 104)
FORESTS = {"random forest on 32 x 32 colours": slice(3), "random forest on 32 x 32, opacity alone": slice(3, 4)}


def open_setup(overrides: list[str]) -> Setup:
    return prepare_setup(resolved(load_recipe("images", overrides)), Path(), None)


def tokens_of(setup: Setup) -> int:
    """Patches of one epoch."""
    return int(setup.data.table.positions[setup.data.table.split == Split.TRAIN].sum())


def transformer(overrides: list[str]) -> float:
    """Held-out accuracy of one training run."""
    with tempfile.TemporaryDirectory() as folder:
        train("images", Path(folder) / "run", overrides, console=Console(quiet=True))
        return evaluate_run(str(Path(folder) / "run"))[0]["accuracy"].value


def small_pictures(data: ImageData) -> np.ndarray:
    """Colours on white, and opacity, (num_images, 32, 32, 4) uint8."""
    pictures = (decode(read_bytes(example), opacity=True).pixels for example in data.examples)
    return np.stack([resize(picture, FOREST_SIDE, FOREST_SIDE) for picture in pictures])


def forest(data: ImageData, seed: int, channels: slice) -> float:
    """Held-out accuracy of a random forest on small squares, of which it reads some channels."""
    from sklearn.ensemble import RandomForestClassifier

    features = small_pictures(data)[..., channels].reshape(len(data.examples), -1)
    trained, held = data.table.split == Split.TRAIN, data.table.split == Split.HOLDOUT
    model = RandomForestClassifier(FOREST_TREES, n_jobs=-1, random_state=seed).fit(
        features[trained], data.labels[trained]
    )
    return float((model.predict(features[held]) == data.labels[held]).mean())


def plain_cnn(data: ImageData, seed: int, seconds: float) -> float:
    """Held-out accuracy of a plain CNN after some seconds of processor time, at rates along a cosine."""
    torch.manual_seed(seed)
    x, y = torch.from_numpy(small_pictures(data)[..., :3]).permute(0, 3, 1, 2) / 127.5 - 1, torch.tensor(data.labels)
    trained, held = (np.flatnonzero(data.table.split == part) for part in (Split.TRAIN, Split.HOLDOUT))
    layers = [
        layer
        for before, after in pairwise(CNN_CHANNELS)
        for count in (before, after)
        for layer in (nn.Conv2d(count, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU(),
                      nn.MaxPool2d(1 + (count == after)))
    ]  # fmt: skip
    head = nn.Linear(CNN_CHANNELS[-1], len(data.classes))
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), head)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
    start, flip = time.process_time(), data.album.settings.flip
    while (done := (time.process_time() - start) / seconds) < 1:
        ids = torch.from_numpy(trained)[torch.randint(len(trained), (64,))]
        moves = torch.zeros(64, 2, 3)
        moves[:, 1, 1] = 1.2 ** (2 * torch.rand(64) - 1)
        moves[:, 0, 0] = moves[:, 1, 1] * (1 - 2 * (torch.rand(64) < flip).float())
        moves[:, :, 2] = 0.4 * torch.rand(64, 2) - 0.2
        grid = F.affine_grid(moves, list(x[ids].shape), align_corners=False)
        changed = F.grid_sample(x[ids], grid, padding_mode="border", align_corners=False)
        optimizer.param_groups[0]["lr"] = 2e-3 * min(1, done / 0.05 + 1e-2) * (1 + math.cos(math.pi * done)) / 2
        optimizer.zero_grad()
        F.cross_entropy(model(changed), y[ids], label_smoothing=0.1).backward()
        optimizer.step()
    with torch.no_grad():
        return float((model.eval()(x[held]).argmax(1) == y[held]).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("manifest", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument(
        "--epochs", type=int, help="of the native side, default the recipe's; the others get as many tokens"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--squares", type=int, nargs="*", default=list(SQUARES))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "images.md")
    options = parser.parse_intermixed_args()
    shared = [f"data.images={options.manifest}", *options.overrides]
    native = open_setup(shared)
    assert isinstance(native.data, ImageData)
    options.epochs = options.epochs or native.recipe.train.max_epochs
    steps = -(-tokens_of(native) * options.epochs // native.recipe.plan.tokens_per_step)
    sides = {"native sizes": shared}
    sides |= {
        f"squares of {side}": [*shared, "images.size=square", f"images.square={side}"] for side in options.squares
    }
    rows: dict[str, list[float]] = {
        name: [forest(native.data, seed, channels) for seed in options.seeds] for name, channels in FORESTS.items()
    }
    for name, overrides in sides.items():
        fixed = [f"train.max_steps={steps}", "train.max_epochs=null", "train.weights=last"]
        start = time.process_time()
        rows[name] = [transformer([*overrides, *fixed, f"train.seed={seed}"]) for seed in options.seeds]
        if overrides is shared:
            seconds = (time.process_time() - start) / len(options.seeds)
            rows["plain CNN"] = [plain_cnn(native.data, seed, seconds) for seed in options.seeds]
        print(name, " ".join(f"{value:.3f}" for value in rows[name]), flush=True)
    write_atomic(options.out, markdown(options, native, steps, rows))


def markdown(options: argparse.Namespace, native: Setup, steps: int, rows: dict[str, list[float]]) -> str:
    machine = describe_machine()
    words = " ".join(["--epochs", str(options.epochs), *options.overrides])
    lines = [
        "# Images at their own sizes",
        "",
        f"    python benchmarks/images.py {options.manifest.name} {words}",
        "",
        f"{machine['cores']} cores of {machine['processor']}; every transformer takes {steps:,} updates of "
        f"{native.recipe.plan.tokens_per_step:,} real tokens.",
        *native.data.lines(),
        "",
        "| side | accuracy, mean | every seed |",
        "|---|---|---|",
        *(f"| {name} | {np.mean(found):.1%} | {' '.join(f'{v:.1%}' for v in found)} |" for name, found in rows.items()),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
