"""Time a cold and a warm start of the token cache.

    python benchmarks/cache.py [--documents 100000] [--kind words]

Makes Chinese-like documents of about 100 characters in ten JSON Lines files, encodes them into an empty cache, and
opens that cache again: within this process, and as a fresh process that also imports what it needs.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from unpad.data.tokens.corpus import CorpusReport, prepare
from unpad.recipes.file import parse_recipe
from unpad.recipes.recipe import Recipe

NUM_FILES, NUM_WARM = 10, 7
NUM_WORDS = 20_000
CHARS = 100


def make_documents(count: int, seed: int) -> list[str]:
    """Sentences of words of one to three characters; the n-th word is drawn in proportion to 1 / (n + 10)."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 4, NUM_WORDS)
    letters = rng.integers(0x4E00, 0x4E00 + 4000, (NUM_WORDS, 3))
    words = np.array(["".join(map(chr, row[:size])) for row, size in zip(letters, sizes, strict=True)])
    share = 1 / (np.arange(NUM_WORDS) + 10)
    per_document = CHARS // 2
    drawn = words[rng.choice(NUM_WORDS, (count, per_document), p=share / share.sum())]
    return ["，".join("".join(row[i : i + 8]) for i in range(0, per_document, 8)) + "。" for row in drawn.tolist()]


def write_files(folder: Path, documents: list[str]) -> int:
    """Write the documents over NUM_FILES files; return their bytes."""
    size = 0
    for number in range(NUM_FILES):
        rows = [json.dumps({"text": text}, ensure_ascii=False) for text in documents[number::NUM_FILES]]
        size += (folder / f"{number}.jsonl").write_bytes("".join(row + "\n" for row in rows).encode())
    return size


def timed(recipe: Recipe, cache: Path) -> tuple[float, CorpusReport]:
    start = time.perf_counter()
    report = prepare(recipe, cache=cache)[2]
    return time.perf_counter() - start, report


def describe(name: str, seconds: float, report: CorpusReport) -> str:
    stages = ", ".join(f"{stage} {value:.3f}" for stage, value in report.seconds.items())
    return f"| {name} | {seconds:.3f} | {report.cache_hits} | {report.encoded_documents:,} | {stages} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=100_000)
    parser.add_argument("--kind", choices=["words", "bpe"], default="words")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, cache = Path(name) / "data", Path(name) / "cache"
        folder.mkdir()
        size = write_files(folder, make_documents(arguments.documents, seed=0))
        settings = {"data": {"text": str(folder)}, "tokenizer": {"kind": arguments.kind}}
        recipe = parse_recipe(settings)
        cold, cold_report = timed(recipe, cache)
        warm = sorted((timed(recipe, cache) for _ in range(NUM_WARM)), key=lambda run: run[0])
        median, warm_report = warm[NUM_WARM // 2]
        code = (
            "import json, sys; from pathlib import Path; from unpad.recipes.file import parse_recipe; "
            "from unpad.data.tokens.corpus import prepare; "
            "prepare(parse_recipe(json.loads(sys.argv[1])), cache=Path(sys.argv[2]))"
        )
        fresh = []
        for _ in range(3):
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", code, json.dumps(settings), str(cache)], check=True)
            fresh.append(time.perf_counter() - start)
        shards = sum(path.stat().st_size for path in cache.rglob("*") if path.is_file())
    print(
        f"{arguments.documents:,} documents, {size / 1e6:.1f} MB in {NUM_FILES} files, {cold_report.tokens:,} tokens, "
        f"cache {shards / 1e6:.1f} MB, tokenizer {arguments.kind}\n"
    )
    print("| start | seconds | shard hits | documents encoded | stages, seconds |\n|---|---|---|---|---|")
    print(describe("cold", cold, cold_report))
    print(describe(f"warm, median of {NUM_WARM}", median, warm_report))
    print(f"| warm, slowest of {NUM_WARM} | {warm[-1][0]:.3f} | | | |")
    print(f"| warm, fresh process with its imports, median of 3 | {statistics.median(fresh):.3f} | | | |")


if __name__ == "__main__":
    main()
