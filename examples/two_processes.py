"""Two processes train one model, and every bit is that of one process.

python examples/two_processes.py

It needs unpad alone; the data comes with it. Under a minute on two cores.
"""

import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path

# A micro-batch of 256 tokens gives both processes work, and equal bits need equal numbers of threads.
FIELDS = ["train.max_steps=4", "plan.tokens_per_micro=256", "train.threads=1"]


def train(out: Path, processes: int) -> dict[str, str]:
    """Train a run by so many processes; return the sha256 of its weights and of its metrics."""
    command = [sys.executable, "-m", "unpad", "train", "zh_chat", *FIELDS, "--out", out, "--processes", str(processes)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(done.stderr)
    files = {"weights": out / "checkpoints/best/model.safetensors", "metrics": out / "metrics.jsonl"}
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        one, two = (train(Path(folder) / f"by-{number}", number) for number in (1, 2))
    for name in one:
        print(f"{name} of one process and of two: {'equal to the bit' if one[name] == two[name] else 'DIFFERENT'}")
