"""Held-out bits per character at 1, 2 and 4 times the trained context, by position and way of extension.

    python benchmarks/long_context.py [--steps 400] [--context 64] [--width 128] [--data FILE] [--out FOLDER]

Trains one small rotary model, on the packaged Chinese texts and conversations by default, whose documents are joined
end to end, so that every position up to the context is trained. Then every window of held-out text of 1, 2 and 4 times
that context is read as one sequence, and the bits of its targets are added up by the range of their positions:

    as trained  windows of the trained context, the baseline
    none        positions go on past those of training, unscaled
    linear      positions are divided by the factor (Chen et al. 2023, arXiv 2306.15595)
    ntk         the base of the rotary frequencies is raised (Peng et al. 2023, arXiv 2309.00071, section 3.1)

Intervals are 95 % bootstraps over windows. A way of extension is worth using where its last range is not worse than
the same text in windows of the trained context.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from unpad.batching.batch import from_sequences
from unpad.data.sources.split import Split
from unpad.data.text import TextData
from unpad.data.tokens.tokenizer import Tokenizer
from unpad.evaluation.metrics import interval, resample
from unpad.inference.loaded import LoadedRun, load
from unpad.models.contract import ScoresTokens
from unpad.training.loop import train

FACTORS = (1, 2, 4)
METHODS = ("none", "linear", "ntk")


@dataclass(frozen=True)
class Range:
    """Positions of a way of extension: per window nats and characters of their targets, each (num_windows,)."""

    way: str
    factor: int
    first: int
    last: int
    nats: np.ndarray
    chars: np.ndarray

    def bits(self) -> tuple[float, float, float]:
        """Bits per character, and their 95 % interval over windows."""
        nats, chars = resample([self.nats, self.chars], seed=0)
        scale = 1 / math.log(2)
        value = scale * self.nats.sum() / max(self.chars.sum(), 1)
        metric = interval(value, scale * nats / np.maximum(chars, 1), len(self.nats))
        return metric.value, metric.low, metric.high


def ranges(context: int, factor: int) -> list[tuple[int, int]]:
    """Positions by how many times the trained context they are away: [0, c), [c, 2c), [2c, 4c) up to the factor."""
    bounds = [0, *(context * one for one in FACTORS if one <= factor)]
    return list(pairwise(bounds))


def windows(data: TextData, length: int) -> Iterator[tuple[list[int], list[bool]]]:
    """Windows of `length` positions of every held-out sequence, and where they carry loss; the rest is left out."""
    for seq in np.flatnonzero(data.tokens.split == Split.HOLDOUT).tolist():
        ids, mask = data.tokens.tokens(seq).tolist(), data.tokens.loss_mask(seq).tolist()
        for start in range(0, len(ids) - length, length):
            yield ids[start : start + length + 1], mask[start : start + length + 1]


def characters(tokenizer: Tokenizer) -> np.ndarray:
    """Characters that each id ends, (vocab_size,) int64: a character of several byte tokens counts at its first."""
    assert tokenizer.pieces is not None, "words and bpe know their bytes"
    return np.array([sum(byte & 0xC0 != 0x80 for byte in piece) for piece in tokenizer.pieces], np.int64)


@torch.no_grad()
def measure(run: LoadedRun, data: TextData, way: str, factor: int, context: int) -> list[Range]:
    """Nats and characters of every range of positions, over windows of `factor` times the trained context."""
    assert isinstance(run.model, ScoresTokens), "a model of text"
    spans, num_chars = ranges(context, factor), characters(run.tokenizer)
    rows: list[list[tuple[float, int]]] = []
    for ids, mask in windows(data, context * factor):
        batch = from_sequences([ids], [mask])
        nll, at = run.model.token_nll(batch).double().numpy(), batch.target_index.numpy()
        chars = num_chars[np.array(ids)[at + 1]]
        rows.append(
            [(float(nll[(at >= a) & (at < b)].sum()), int(chars[(at >= a) & (at < b)].sum())) for a, b in spans]
        )
    table = np.array(rows, np.float64).reshape(-1, len(spans), 2)
    return [Range(way, factor, a, b, table[:, index, 0], table[:, index, 1]) for index, (a, b) in enumerate(spans)]


def overrides_of(method: str, factor: int, context: int) -> list[str]:
    """Recipe fields with which a run reads `factor` times its context."""
    if method == "none":
        return [f"model.context={context * factor}"]
    return [f"model.context_method={method}", f"model.context_factor={factor}"]


def compare(folder: Path, context: int) -> list[Range]:
    """Measure a run in every way, at every factor."""
    run = load(folder)
    data = run.data()
    assert isinstance(data, TextData), "a run of texts"
    found = measure(run, data, "as trained", 1, context)
    for factor in FACTORS[1:]:
        for method in METHODS:
            found += measure(load(folder, overrides_of(method, factor, context)), data, method, factor, context)
    return found


def lines(found: Sequence[Range]) -> list[str]:
    """The measurements as a table in Markdown."""
    out = ["| way | context | positions | bits per character | 95 % | characters |", "|---|---|---|---|---|---|"]
    for one in found:
        value, low, high = one.bits()
        where, num = f"{one.first} to {one.last - 1}", int(one.chars.sum())
        out.append(f"| {one.way} | x{one.factor} | {where} | {value:.3f} | {low:.3f} to {high:.3f} | {num:,} |")
    return out


def recipe_fields(arguments: argparse.Namespace) -> list[str]:
    """Recipe fields of the model that is trained."""
    source = [f"data.text={arguments.data}"] if arguments.data else ["data.chat=unpad:examples/zh/chat.jsonl"]
    sizes = [f"model.width={arguments.width}", "model.blocks=2", "model.heads=4", f"model.hidden={2 * arguments.width}"]
    return [
        *source, *sizes, f"model.context={arguments.context}", "model.dropout=0.1", "tokenizer.vocab_size=2000",
        "data.holdout=0.2", "plan.cross_documents=true", "plan.tokens_per_step=2048", "plan.tokens_per_micro=2048",
        "optim.lr=3e-3", f"train.max_steps={arguments.steps}", "train.max_epochs=null", "train.patience=null",
        "train.weights=best", "train.eval_every=50", "precision=fp32",
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--data", help="texts to train on and to hold out; default: the packaged ones")
    parser.add_argument("--out", type=Path, help="run directory; default: one that is removed")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.out or Path(temporary) / "run"
        result = train("llm", folder, recipe_fields(arguments), console=Console(stderr=True))
        print(f"{result.step} steps, held-out loss {result.heldout_loss:.4f}\n")
        print("\n".join(lines(compare(folder, arguments.context))))


if __name__ == "__main__":
    main()
