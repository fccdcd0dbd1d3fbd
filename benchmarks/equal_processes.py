"""Train the packaged recipes with 1, 2, 3 and 4 processes, and compare the bytes that the runs write.

    python benchmarks/equal_processes.py                      # every recipe, native kernels and torch's
    python benchmarks/equal_processes.py --processes 1,2 --kernels native zh_chat events

Every run takes 12 updates of several micro-batches, with dropout, evaluations between and all processes on one thread.
Metrics, weights and optimizer of a run must be equal to the byte with those of one process. Exit code 1 if any differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import socket
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from PIL import Image
from rich.console import Console

from unpad.examples.drawn import draw_patients
from unpad.nn.native import library
from unpad.processes.group import Group, joined
from unpad.training.loop import train

FILES = ("metrics.jsonl", "metrics.csv")
TENSORS = ("model.safetensors", "optim.safetensors")
SHORT = ["precision=fp32", "train.threads=1", "train.max_steps=12", "train.eval_every=5", "checkpoint.every=6"]
SHORTER = ["train.max_steps=8", "train.eval_every=3", "checkpoint.every=4"]
BLOCK = ["model.width=16", "model.blocks=1", "model.heads=2", "model.hidden=24"]
SIGHT = [f"model.{part}.{field}" for part in ("vision", "language") for field in
         ("width=16", "blocks=1", "heads=2", "hidden=24")]  # fmt: skip
DROPOUT = ["model.dropout=0.1", "model.attention_dropout=0.1"]
TWO_STAGES = ["stages.pretrain.train.max_epochs=1", "plan.tokens_per_step=1024", "plan.tokens_per_micro=300"]
SPLIT_SIGHT = ["plan.tokens_per_step=2048", "plan.tokens_per_micro=600"]
HARD = "stages=[{name: hard, train: {freeze: ['pruners.*']}}]"
ASKED = ["data.vqa={data}/questions.jsonl"]
# Every reading takes the latent for collapsed, and goes back.
RECOVERS = [
    "collapse.every=2", "collapse.warmup=0", "collapse.patience=1", "collapse.policy=recover",
    "collapse.active_variance=1e9", "collapse.probe_gap=1e9", "collapse.recoveries=9", "collapse.window=32",
]  # fmt: skip
SIGHT_DROPOUT = [f"model.{part}.{kind}=0.1" for part in ("vision", "language") for kind in
                 ("dropout", "attention_dropout")]  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A run of twelve updates, of several micro-batches each.

    Args:
        changes: overrides of the recipe that give it dropout and several micro-batches.
        small: overrides that make its model and its data small; `{data}` is the folder of `write_small`. Such a run
            takes 8 updates.
        starts: field of the recipe that names the run of the case `zh_chat` as its start.
    """

    name: str
    recipe: str
    changes: list[str]
    small: list[str]
    starts: str = ""

    def overrides(self, runs: Path, data: Path | None = None) -> list[str]:
        """All overrides.

        Args:
            runs: folder of the runs of all cases.
            data: folder of `write_small`; None for models and data as packaged.
        """
        start = [f"{self.starts}={runs / 'zh_chat'}"] if self.starts else []
        small = [] if data is None else [*SHORTER, *(change.replace("{data}", str(data)) for change in self.small)]
        return [*SHORT, *start, *self.changes, *small]


# Texts and conversations; then runs that start from another, events with latent noise, images, questions.
CASES = [
    Case("zh_chat", "zh_chat", [*DROPOUT, *TWO_STAGES], [*BLOCK, "tokenizer.vocab_size=600"]),
    Case("bpe", "llm", [*DROPOUT, "plan.tokens_per_step=1024", "plan.tokens_per_micro=300"],
         [*BLOCK, "model.kv_heads=1", "model.context=64", "tokenizer.vocab_size=400"]),
    Case("small", "small", [*DROPOUT, "plan.tokens_per_step=1024", "plan.tokens_per_micro=300"],
         [*BLOCK, "model.kv_heads=1", "model.context=64", "tokenizer.vocab_size=400"]),
    Case("lora", "zh_chat", [*DROPOUT, *TWO_STAGES, "lora.r=4", "lora.dropout=0.1"], BLOCK, "train.init_from"),
    Case("dpo", "dpo", [*DROPOUT, "plan.tokens_per_step=512", "plan.tokens_per_micro=150"], BLOCK, "model.from"),
    Case("events", "events", ["model.dropout=0.1", "plan.tokens_per_micro=250", *RECOVERS],
         [*BLOCK, "model.levels=1", "model.inducing=2", "model.latent=4", *(f"{field}={{data}}/{table}.parquet" for
          field, table in (("data.events.0.path", "events"), ("data.events.1.path", "patients"),
          ("events.labels.path", "patients")))]),
    Case("images", "images", [*DROPOUT, "plan.tokens_per_micro=100"],
         [*BLOCK, "model.stem=[4,4,4,4]", "data.images={data}/images.jsonl"]),
    Case("images_cnn", "images_cnn", ["plan.tokens_per_step=16", "plan.tokens_per_micro=5"],
         ["images.square=16", "model.patch=16", "data.images={data}/images.jsonl"]),
    Case("vqa", "vqa", [*SIGHT_DROPOUT, *SPLIT_SIGHT], [*SIGHT, *ASKED]),
    Case("vqa_soft", "vqa_prune", [*SIGHT_DROPOUT, *SPLIT_SIGHT], [*SIGHT, *ASKED, "model.prune.inner=8"]),
    Case("vqa_hard", "vqa_prune", [*SIGHT_DROPOUT, *SPLIT_SIGHT, HARD], [*SIGHT, *ASKED, "model.prune.inner=8"]),
]  # fmt: skip


def write_small(folder: Path, num: int = 60) -> None:
    """Write pictures, questions about them and patients, `num` of each, for the overrides `small` of the cases."""
    draw = np.random.default_rng(5)
    images, questions = [], []
    folder.mkdir(parents=True)
    for number in range(num):
        height, width = (int(side) for side in draw.integers(12, 48, 2))
        pixels, label = draw.integers(0, 128, (height, width, 3)), ("dark", "light")[number % 2]
        Image.fromarray((pixels + 127 * (number % 2)).astype(np.uint8)).save(folder / f"{number}.png")
        images.append({"image": f"{number}.png", "label": label})
        words = " ".join(["so"] * int(draw.integers(0, 9)))
        questions.append({"image": f"{number}.png", "question": f"Is it {words} dark?", "answer": label})
    for name, rows in (("images", images), ("questions", questions)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, table in zip(("events", "patients"), draw_patients(num, draw), strict=True):
        pq.write_table(table, folder / f"{name}.parquet")


def train_case(case: Case, runs: Path, group: Group, data: Path | None = None) -> None:
    """Train a case into `runs`/NAME; arguments as of `Case.overrides`."""
    train(case.recipe, runs / case.name, case.overrides(runs, data), console=Console(file=StringIO()), group=group)


def write_table(name: str, lines: list[str]) -> None:
    """Write the lines between the marks of a table in docs/internals/several_processes.md."""
    page = Path(__file__).parents[1] / "docs" / "internals" / "several_processes.md"
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    table = "".join(f"{line}\n" for line in lines)
    page.write_text(before + begin + table + end + rest.partition(end)[2], encoding="utf-8")


def digests(run: Path) -> dict[str, str]:
    """sha256 of what a run wrote, by file: metrics, and tensors of its newest checkpoint and the best weights."""
    newest = max((run / "checkpoints").glob("step-*"))
    paths = [*(run / name for name in FILES), *(newest / name for name in TENSORS)]
    paths.append(run / "checkpoints" / "best" / TENSORS[0])
    return {str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def start(size: int, names: list[str], kernels: str, runs: Path, data: Path | None, seconds: float) -> None:
    """Train cases one after another in `size` processes of one thread, as one group.

    Raises:
        RuntimeError: one failed, or took longer than `seconds`; none is left behind.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    # A fork is quick; processes that are started anew are like those of several hosts.
    context: Any = multiprocessing.get_context("spawn" if data is None else "fork")
    arguments = (names, kernels, runs, data, size, port)
    processes = [context.Process(target=_train_cases, args=(rank, *arguments)) for rank in range(size)]
    latest = time.monotonic() + seconds
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(max(latest - time.monotonic(), 0.1))
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()
    if any(code != 0 for code in codes):
        raise RuntimeError(f"{size} processes ended with the codes {codes}; None is one that took too long")


def _train_cases(
    rank: int, names: list[str], kernels: str, runs: Path, data: Path | None, size: int, port: int
) -> None:
    """Be one process of a group, and train."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    with joined(300) as group, library.switched_off() if kernels == "torch" else nullcontext():
        for case in CASES:
            if case.name in names:
                train_case(case, runs, group, data)


def compare(
    names: list[str], sizes: list[int], kernels: str, folder: Path, data: Path | None = None, seconds: float = 1800
) -> int:
    """Train the cases `names` with each number of processes, print a line for each, and return how many differ.

    Args:
        kernels: native or torch.
        folder: of the runs; data: as of `Case.overrides`.
        seconds: limit of all cases at one number of processes.
    """
    torch.optim.AdamW([torch.zeros(1)])  # loads a large part of torch, once for all forks
    num_different, expected = 0, dict[str, dict[str, str]]()
    for size in sizes:
        runs = folder / f"{kernels}-{size}"
        start(size, names, kernels, runs, data, seconds)
        for name in names:
            found = digests(runs / name)
            different = [file for file, digest in found.items() if digest != expected.setdefault(name, found)[file]]
            num_different += bool(different)
            print(
                f"{kernels:<6} {name:<10} {size} processes  {found['metrics.jsonl'][:8]} "
                f"{found['checkpoints/best/model.safetensors'][:8]}  "
                + ("DIFFERENT: " + ", ".join(different) if different else "equal" if size != sizes[0] else "first"),
                flush=True,
            )
    return num_different


def main() -> None:
    """Compare what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="cases; default all")
    parser.add_argument("--processes", default="1,2,3,4")
    parser.add_argument("--kernels", default="native,torch")
    parser.add_argument("--small", type=Path, help="small models and data, which are written into this folder")
    options = parser.parse_args()
    names = options.names or [case.name for case in CASES]
    sizes = [int(size) for size in options.processes.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        if options.small is not None:
            write_small(options.small)
        os.environ.setdefault("UNPAD_CACHE", str(Path(folder) / "cache"))
        found = [compare(names, sizes, kernels, Path(folder), options.small) for kernels in options.kernels.split(",")]
    sys.exit(1 if sum(found) else 0)


if __name__ == "__main__":
    main()
