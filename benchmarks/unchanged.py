"""Hashes of what a change of the code that changes no result must leave as it is.

    python benchmarks/unchanged.py --write FILE.json       # before the change
    python benchmarks/unchanged.py --against FILE.json     # after it; exit code 1 if anything differs

Every packaged recipe is trained for 20 updates with one and with two processes: the bytes of `metrics.jsonl` and of the
weights are hashed. `unpad prove` of every recipe is kept as its lines and verdicts, without measured numbers. The
hashes hold on one machine and one installation; some ten minutes of one core.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.equal_processes import FILES, TENSORS

RECIPES = sorted(path.stem for path in (Path(__file__).parents[1] / "unpad" / "recipes").glob("*.yaml"))
STARTS = {"dpo": "model.from"}  # recipes that start from a run: the one of zh_chat
SHORT = ["train.max_steps=20", "train.eval_every=10", "checkpoint.every=10", "train.threads=1"]


def unpad(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "unpad", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def digests(run: Path) -> dict[str, str]:
    """sha256 of the metrics of a run and of all weights that it kept, by file."""
    paths = [run / name for name in FILES] + sorted(run.glob("checkpoints/*/*.safetensors"))
    assert any(path.name == TENSORS[0] for path in paths), f"{run} has no weights"
    return {str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def measure(folder: Path, names: list[str]) -> dict[str, object]:
    """Hashes of every run, and lines of every proof, by the command that made them."""
    found: dict[str, object] = {}
    for name in sorted(names, key=lambda name: (name in STARTS, name)):
        start = [f"{STARTS[name]}={folder / 'zh_chat-1'}"] if name in STARTS else []
        for processes in (1, 2):
            run = folder / f"{name}-{processes}"
            words = ["train", name, *SHORT, *start, "--out", str(run), "--processes", str(processes)]
            done = unpad(words, folder)
            found[f"train {name}, {processes} processes"] = digests(run) if done.returncode == 0 else done.stderr
        proof = unpad(["prove", name, *start, "train.threads=1", "--json"], folder)
        try:
            lines = json.loads(proof.stdout)["lines"]
            found[f"prove {name}"] = [[line["name"], line["passed"]] for line in lines]
        except (ValueError, KeyError):
            found[f"prove {name}"] = proof.stdout + proof.stderr
        print(name, *(found[f"train {name}, {processes} processes"] for processes in (1, 2)), file=sys.stderr)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=RECIPES, help="recipes; default all that are packaged")
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--write", type=Path)
    chosen.add_argument("--against", type=Path)
    options = parser.parse_args()
    names = options.names if not STARTS.keys() & set(options.names) else sorted({"zh_chat", *options.names})
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("UNPAD_CACHE", str(Path(folder) / "cache"))
        found = measure(Path(folder), names)
    if options.write is not None:
        options.write.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        return
    expected = json.loads(options.against.read_text(encoding="utf-8"))
    different = [command for command in found if found[command] != expected.get(command)]
    print(
        f"{len(found) - len(different)} of {len(found)} are equal",
        *(f"DIFFERENT: {one}" for one in different),
        sep="\n",
    )
    sys.exit(1 if different else 0)


if __name__ == "__main__":
    main()
