"""What one client can do to another: the most expensive legal requests of every kind, each with a victim beside it.

    python benchmarks/serve_rude.py            # a table like that of benchmarks/serve.md

The runs are of packaged recipes after a few steps. The victim asks for little, again and again, while the other request
is answered: its longest wait is what counts, and LONGEST the gate.
"""

from __future__ import annotations

import base64
import io
import json
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from http.client import HTTPConnection
from pathlib import Path
from threading import Thread
from time import perf_counter, sleep
from typing import Any

import numpy as np
from PIL import Image
from serve_sides import NAME, ours

from unpad.machine import processor_name

LONGEST = 1.0  # seconds
PATIENCE = 300  # seconds
CHAT, TEXTS = "/v1/chat/completions", "/v1/completions"
PREDICT, EXPLAIN = f"/v1/models/{NAME}:predict", f"/v1/models/{NAME}:explain"
Asked = tuple[str, dict[str, Any]]  # a path and a body


def picture(width: int, height: int, scans: int = 0) -> str:
    """A picture in base64: a PNG, or a JPEG with so many more scans."""
    image, file = (
        Image.fromarray(np.tile(np.arange(256, dtype=np.uint8), (height, width // 256 + 1))[:, :width]),
        io.BytesIO(),
    )
    image.save(file, *(["JPEG"] if scans else ["PNG"]), progressive=True)
    whole = file.getvalue()
    last = whole.rfind(b"\xff\xda")
    return base64.b64encode(whole[:-2] + whole[last:-2] * scans + whole[-2:] if scans else whole).decode()


def said(*turns: str, **fields: Any) -> Asked:
    messages = [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(turns)]
    return CHAT, {"messages": messages, **fields}


def about(image: str) -> Asked:
    url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}}
    return CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "?"}, url]}], "max_tokens": 2}


def patients(path: str, number: int, days: int) -> Asked:
    events = [{"days": -1 - day, "code": "infection"} for day in range(days)]
    return path, {"instances": [{"id": place, "events": events} for place in range(number)]}


def asks() -> dict[str, tuple[Asked, dict[str, Asked]]]:
    """By recipe, what the victim asks for, and the others."""
    prompts = {"prompt": ["小猫喜欢红色的花。" * 6] * 256, "max_tokens": 64, "echo": True, "logprobs": 5}
    chats: dict[str, Asked] = {
        "4 MB of one letter": said("a" * 4_000_000),
        "60,000 turns, the oldest left out": said(*["a"] * 60_001, history="trim"),
        "4 MB in the middle, left out": said("b" * 2_000_000, "b" * 2_000_000, "a", history="trim"),
        "16 answers with 20 log probabilities": said("小猫", n=16, max_tokens=500, logprobs=True, top_logprobs=20),
        "256 prompts with echo": (TEXTS, prompts),
    }
    large, scanned = picture(8000, 5000), picture(8000, 5000, 4)
    images: dict[str, Asked] = {
        "a PNG of 40 million pixels": ("/v1/classify", {"inputs": large}),
        "20 of them": ("/v1/classify", {"inputs": [large] * 20}),
        "a JPEG of 40 million pixels, 10 scans": ("/v1/classify", {"inputs": scanned}),
        "256 pictures": ("/v1/classify", {"inputs": [picture(512, 512)] * 256}),
    }
    events: dict[str, Asked] = {
        "2,000 sets": patients(PREDICT, 1, 2000),
        "9 patients of 2,000 sets": patients(PREDICT, 9, 2000),
        "250 sets explained": patients(EXPLAIN, 1, 250),
        "80 patients of 250 sets explained": patients(EXPLAIN, 80, 250),
    }
    questions = {"a PNG of 40 million pixels": about(large), "a JPEG of 40 million pixels, 10 scans": about(scanned)}
    small = picture(28, 28)
    return {
        "zh_chat": (said("你好", max_tokens=2), chats), "images": (("/v1/classify", {"inputs": small}), images),
        "vqa": (about(small), questions), "events": (patients(PREDICT, 1, 3), events),
    }  # fmt: skip


def post(port: int, path: str, content: bytes) -> tuple[float, int]:
    """Seconds until an answer was read, and its status."""
    connection, began = HTTPConnection("127.0.0.1", port, timeout=PATIENCE), perf_counter()
    connection.request("POST", path, content, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    answer.read()
    return perf_counter() - began, answer.status


def beside(port: int, victim: Asked, other: Asked) -> tuple[float, float, float, int]:
    """Longest wait of the victim alone, and beside the other, the other's own, and its status."""
    (path, body), (other_path, other_body) = victim, other
    content, rude = json.dumps(body).encode(), json.dumps(other_body).encode()
    alone = max(post(port, path, content)[0] for _ in range(5))
    found: list[tuple[float, int]] = []
    thread = Thread(target=lambda: found.append(post(port, other_path, rude)))
    thread.start()
    sleep(0.1)  # until it has arrived
    waits = [post(port, path, content)[0]]
    while thread.is_alive() and sum(waits) < PATIENCE / 5:
        waits.append(post(port, path, content)[0])
    thread.join()
    return alone, max(waits), *found[0]


def main() -> int:
    ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter).parse_args()
    print(f"{processor_name()}\n\n| recipe | request | its answer, s | victim alone, s | victim beside it, s |")
    print("|---|---|---|---|---|")
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for recipe, (victim, others) in asks().items():
            run = Path(folder, recipe)
            train = ["train", recipe, "train.max_steps=2", "--out", str(run)]
            subprocess.run([sys.executable, "-m", "unpad", *train], check=True, capture_output=True, cwd=folder)
            with ours(run, Path(folder, "log"), 1) as (side, _):
                for name, other in others.items():
                    alone, wait, seconds, status = beside(side.address.port, victim, other)
                    worst = max(worst, wait)
                    print(f"| {recipe} | {name} | {seconds:.1f}, {status} | {alone:.2f} | {wait:.2f} |", flush=True)
    return int(worst > LONGEST)


if __name__ == "__main__":
    sys.exit(main())
