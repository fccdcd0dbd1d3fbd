"""Time what brings data to a step: tokenising beside `datasets.map`, loading ahead of the step, a warm first step.

    python benchmarks/data_paths.py tokenise [--text FILE_OR_FOLDER] [--megabytes 40]
    python benchmarks/data_paths.py loader
    python benchmarks/data_paths.py first_step

tokenise needs the extra `bench`. Every comparison alternates its sides in one run; where the machine has other work,
its ratios mean more than its seconds. Figures and machine: data_paths.md. Planning and the warm cache have scripts of
their own, plan.py and cache.py.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch

from unpad.batching.batch import RaggedBatch
from unpad.batching.loader import load_micro, load_steps
from unpad.batching.plan import Micro, plan
from unpad.data.tokens.corpus import prepare
from unpad.data.tokens.tokenizer import train_tokenizer
from unpad.models import build_model, model_config
from unpad.models.contract import WEIGHTS
from unpad.nn.precision_choice import choose_precision
from unpad.recipes.file import parse_recipe
from unpad.recipes.training import OptimSettings, PlanSettings
from unpad.training.optim import make_optimizer
from unpad.training.step import train_step

ROUNDS = 5
SHAPES = {"W1": (20, 2, 128, 2048), "W2": (180, 8, 1024, 4096)}  # mean, shortest, longest, tokens per step
W1 = {"kind": "decoder", "width": 256, "blocks": 2, "heads": 8, "hidden": 512, "activation": "gelu", "context": 128}


# --------------------------------------------------------------------------- tokenise


def corpus(source: Path, size: int) -> list[str]:
    """Texts of JSON Lines files (every string of a row is one), repeated until they have `size` bytes."""
    files = sorted(source.rglob("*.jsonl")) if source.is_dir() else [source]
    texts = [text for file in files for line in file.read_text("utf-8").splitlines() for text in strings(line)]
    assert texts, f"no text in {source}"
    once = sum(len(text.encode()) for text in texts)
    return texts * max(1, round(size / once))


def strings(line: str) -> list[str]:
    found: list[str] = []

    def walk(value: object) -> None:
        if isinstance(value, str) and len(value) > 3:
            found.append(value)
        elif isinstance(value, dict | list):
            for item in value.values() if isinstance(value, dict) else value:
                walk(item)

    walk(json.loads(line))
    return found


def time_ours(data: Path, tokenizer: Path, cache: Path) -> dict[str, float]:
    recipe = parse_recipe(
        {"data": {"text": str(data), "holdout": 0}, "tokenizer": {"kind": "file", "path": str(tokenizer)}}
    )
    began = time.perf_counter()
    report = prepare(recipe, cache=cache)[2]
    return {"all": time.perf_counter() - began, "map": report.seconds["encode"], "tokens": report.tokens}


def time_theirs(data: Path, tokenizer: Path, cache: Path, processes: int) -> dict[str, float]:
    """`datasets.map` with the same tokenizer, adding nothing but ids; writes its Arrow file as it always does."""
    import datasets
    import tokenizers

    datasets.disable_progress_bars()
    library = tokenizers.Tokenizer.from_file(str(tokenizer))

    def encode(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return {"input_ids": [e.ids for e in library.encode_batch_fast(rows["text"], add_special_tokens=False)]}

    began = time.perf_counter()
    rows = datasets.load_dataset("json", data_files=str(data), split="train", cache_dir=str(cache))
    mapping = time.perf_counter()
    made = rows.map(encode, batched=True, num_proc=processes, remove_columns=["text"], load_from_cache_file=False)
    done = time.perf_counter()
    # datasets leaves this behind for its own children, and the library would then encode on one core here too.
    os.unsetenv("TOKENIZERS_PARALLELISM")
    return {"all": done - began, "map": done - mapping, "tokens": sum(map(len, made[:1000]["input_ids"]))}


def compare_tokenising(source: Path, megabytes: float) -> None:
    texts = corpus(source, int(megabytes * 1e6))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data, file = folder / "data.jsonl", folder / "tokenizer.json"
        data.write_text("".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts), "utf-8")
        settings = parse_recipe({"data": {"text": str(data)}, "tokenizer": {"kind": "bpe"}}).tokenizer
        file.write_bytes(train_tokenizer(settings, dict.fromkeys(texts), []).to_bytes())
        sides: dict[str, Callable[[Path], dict[str, float]]] = {
            "ours": lambda cache: time_ours(data, file, cache),
            **{
                f"datasets.map, num_proc={n}": lambda cache, n=n: time_theirs(data, file, cache, n)
                for n in (1, os.cpu_count() or 1)
            },
        }
        times: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
        for number in range(ROUNDS):
            for index, (side, run) in enumerate(sides.items()):
                times[side].append(run(folder / f"cache-{number}-{index}"))
        size = data.stat().st_size
    print(
        f"{len(texts):,} texts, {size / 1e6:.1f} MB, {times['ours'][0]['tokens']:,.0f} tokens, bpe; {ROUNDS} rounds\n"
    )
    print("| | encode and write, s | with reading the file, s | encode ours / theirs per round | all ours / theirs |")
    print("|---|---|---|---|---|")
    for side, runs in times.items():
        ratios = [
            " ".join(f"{ours[key] / run[key]:.2f}" for ours, run in zip(times["ours"], runs, strict=True))
            for key in ("map", "all")
        ]
        medians = [statistics.median(run[key] for run in runs) for key in ("map", "all")]
        print(f"| {side} | {medians[0]:.2f} | {medians[1]:.2f} | {ratios[0]} | {ratios[1]} |")


# --------------------------------------------------------------------------- loader


def lengths_of(shape: tuple[int, int, int, int], total: int, sigma: float = 0.8) -> np.ndarray:
    """Log-normal lengths that add up to about `total`."""
    mean, low, high, _ = shape
    drawn = np.random.default_rng(0).lognormal(np.log(mean) - sigma**2 / 2, sigma, 2 * total // mean)
    lengths = np.clip(drawn, low, high).astype(np.int64)
    return lengths[: int(np.searchsorted(np.cumsum(lengths), total)) + 1]


class InMemory:
    """Random tokens of sequences of the given positions."""

    def __init__(self, lengths: np.ndarray) -> None:
        self.offsets = np.concatenate([[0], np.cumsum(lengths + 1)])
        self.tokens = np.random.default_rng(1).integers(4, 8000, self.offsets[-1]).astype(np.uint16)

    def gather(
        self, seq_ids: np.ndarray, starts: np.ndarray, stops: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        begins = self.offsets[seq_ids] + starts
        spans = [self.tokens[a : a + n + 1] for a, n in zip(begins.tolist(), (stops - starts).tolist(), strict=True)]
        tokens = np.concatenate(spans, dtype=np.int64)
        return tokens, np.ones(tokens.size, np.bool_), np.concatenate([[0], np.cumsum(stops - starts + 1)])


def microseconds(run: Callable[[], object], repeats: int = 500) -> float:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


def time_loads() -> None:
    print("| workload | sequences | tokens | load_micro, microseconds | and its length groups |\n|---|---|---|---|---|")
    for name, shape in SHAPES.items():
        lengths = lengths_of(shape, shape[3])
        tokens, starts = InMemory(lengths), np.zeros(lengths.size, np.int32)
        micro = Micro(np.arange(lengths.size), starts, lengths.astype(np.int32), starts, 0, 0)
        plain = microseconds(lambda tokens=tokens, micro=micro: load_micro(tokens, micro, 0))
        grouped = microseconds(lambda tokens=tokens, micro=micro: load_micro(tokens, micro, 0).layout.groups)
        print(f"| {name} | {lengths.size} | {int(lengths.sum()):,} | {plain:.0f} | {grouped:.0f} |")


def compare_ahead(steps_per_round: int = 40) -> None:
    """W1 trained with batches loaded in the step's own time, and by the worker that runs ahead."""
    lengths = lengths_of(SHAPES["W1"], 2048 * steps_per_round)
    tokens = InMemory(lengths)
    made = plan(lengths, PlanSettings(tokens_per_step=2048, tokens_per_micro=4096), seed=0, epoch=0)
    model = build_model(model_config(W1), 8000)
    optimizer = make_optimizer(model, OptimSettings())
    device = torch.device("cpu")
    precision = choose_precision("auto", device)[0]

    def in_place() -> Iterator[list[RaggedBatch]]:
        for step in range(made.num_steps):
            micros = [load_micro(tokens, micro, 0) for micro in made.step(step)]
            for batch in micros:
                _ = batch.layout.groups
            yield micros

    def epoch(steps: Iterator[list[RaggedBatch]]) -> tuple[float, float]:
        seconds, waited = [], []
        while True:
            began = time.perf_counter()
            micros = next(steps, None)
            if micros is None:
                return statistics.median(seconds), sum(waited) / sum(seconds)
            waited.append(time.perf_counter() - began)
            train_step(model, micros, optimizer, weights=WEIGHTS, precision=precision, clip=1.0)
            seconds.append(time.perf_counter() - began)

    epoch(in_place())
    print(f"\n{made.num_steps} steps of W1 in {precision}, {torch.get_num_threads()} threads; {ROUNDS} rounds\n")
    rounds = [
        (epoch(in_place()), epoch(load_steps(partial(load_micro, tokens, pad_id=0), made, device, group_lengths=True)))
        for _ in range(ROUNDS)
    ]
    print("| | milliseconds per step | share of waiting |\n|---|---|---|")
    for side, name in enumerate(("loaded in place", "loaded ahead")):
        median = [statistics.median(found[side][value] for found in rounds) for value in (0, 1)]
        print(f"| {name} | {1e3 * median[0]:.2f} | {median[1]:.2%} |")
    print("\nahead / in place per round:", " ".join(f"{ahead[0] / place[0]:.3f}" for place, ahead in rounds))


# --------------------------------------------------------------------------- first step


def time_first_step(recipe: str = "zh_chat") -> None:
    """From the command to the first row of timing.jsonl, the cache warm; and processor seconds, which other work on the
    machine does not lengthen."""
    with tempfile.TemporaryDirectory() as name:
        environment = {**os.environ, "UNPAD_CACHE": str(Path(name) / "cache")}
        print("| start | first row after, s | processor seconds of the whole command |\n|---|---|---|")
        for number in range(ROUNDS + 1):
            folder = Path(name) / f"run-{number}"
            overrides = ["train.max_steps=1", "data.holdout=0"]
            command = [sys.executable, "-m", "unpad", "train", recipe, *overrides, "--out", str(folder)]
            began, used = time.perf_counter(), os.times()
            process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
            rows = folder / "timing.jsonl"
            while not (rows.exists() and b"\n" in rows.read_bytes()):
                assert process.poll() in (None, 0), "the command failed"
                time.sleep(0.01)
            first = time.perf_counter() - began
            assert process.wait() == 0
            now = os.times()
            busy = now.children_user + now.children_system - used.children_user - used.children_system
            print(f"| {'warm' if number else 'cold'} | {first:.2f} | {busy:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["tokenise", "loader", "first_step"])
    parser.add_argument("--text", type=Path, default=Path("unpad/examples/zh"))
    parser.add_argument("--megabytes", type=float, default=40.0)
    arguments = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} from other work before\n")
    if arguments.part == "tokenise":
        compare_tokenising(arguments.text, arguments.megabytes)
    elif arguments.part == "loader":
        time_loads()
        compare_ahead()
    else:
        time_first_step()


if __name__ == "__main__":
    main()
