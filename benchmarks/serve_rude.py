"""What one client can do to another: the most expensive legal requests of every kind, each with a victim beside it.

    python benchmarks/serve_rude.py                 # a table like that of benchmarks/serve.md
    python benchmarks/serve_rude.py --minutes 30    # again and again, and the servers' memory

The runs are of packaged recipes after a few steps. The victim asks for little, again and again, while the other request
is answered: its longest wait is what counts, and LONGEST the gate; its answers are those that it gets alone. Memory is
told every minute, and compared between the ends of the first and the last round, where nothing is answered.
"""

from __future__ import annotations

import base64
import io
import json
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterable
from contextlib import ExitStack
from http.client import HTTPConnection
from pathlib import Path
from threading import Event, Thread
from time import perf_counter, sleep
from typing import Any

import numpy as np
from PIL import Image
from serve_sides import NAME, Side, ours

from unpad.machine import processor_name

LONGEST = 1.0  # seconds
GROWTH = 0.05  # of memory
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
        "zh_chat": (said("你好", max_tokens=2, seed=1), chats), "images": (("/v1/classify", {"inputs": small}), images),
        "vqa": (about(small), questions), "events": (patients(PREDICT, 1, 3), events),
    }  # fmt: skip


def post(port: int, path: str, content: bytes) -> tuple[float, int, bytes]:
    """Seconds until an answer was read, its status, and its body."""
    connection, began = HTTPConnection("127.0.0.1", port, timeout=PATIENCE), perf_counter()
    connection.request("POST", path, content, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    told = answer.read()
    return perf_counter() - began, answer.status, told


def meaning(told: bytes) -> Any:
    """What an answer says, without its name and time."""
    value = json.loads(told)
    return value.get("choices", value.get("predictions")) if type(value) is dict else value


def beside(port: int, victim: Asked, other: Asked) -> tuple[float, float, float, int, bool]:
    """Longest wait of the victim alone, and beside the other, the other's own, its status, and whether the victim's
    answers are one."""
    (path, body), (other_path, other_body) = victim, other
    content, rude = json.dumps(body).encode(), json.dumps(other_body).encode()
    alone = [post(port, path, content) for _ in range(5)]
    found: list[tuple[float, int, bytes]] = []
    thread = Thread(target=lambda: found.append(post(port, other_path, rude)))
    thread.start()
    sleep(0.1)  # until it has arrived
    waits = [post(port, path, content)]
    while thread.is_alive() and sum(wait for wait, *_ in waits) < PATIENCE / 5:
        waits.append(post(port, path, content))
    thread.join()
    same = all(status == 200 and meaning(told) == meaning(alone[0][2]) for _, status, told in [*alone, *waits])
    return max(alone)[0], max(waits)[0], *found[0][:2], same


def memory(sides: Iterable[Side]) -> list[int]:
    """Resident memory of servers, in MiB."""
    statuses = [Path(f"/proc/{side.pid}/status").read_text() for side in sides]
    return [int(status.partition("VmRSS:")[2].split()[0]) >> 10 for status in statuses]


def each_minute(sides: Iterable[Side], done: Event) -> None:
    while not done.wait(60):
        print(f"memory, MiB: {memory(sides)}", file=sys.stderr, flush=True)


def main() -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=0, help="go on with further rounds for so long")
    until = perf_counter() + 60 * parser.parse_args().minutes
    print(f"{processor_name()}\n\n| recipe | request | its answer, s | victim alone, s | victim beside it, s |")
    print("|---|---|---|---|---|")
    worst, ends, same, sides, done, given = 0.0, list[list[int]](), True, dict[str, Side](), Event(), asks()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        for recipe in given:
            run = Path(folder, recipe)
            train = ["train", recipe, "train.max_steps=2", "--out", str(run)]
            subprocess.run([sys.executable, "-m", "unpad", *train], check=True, capture_output=True, cwd=folder)
            sides[recipe], _ = stack.enter_context(ours(run, Path(folder, f"{recipe}.log"), 1))
        Thread(target=each_minute, args=(sides.values(), done), daemon=True).start()
        while not ends or perf_counter() < until:
            for recipe, (victim, others) in given.items():
                for name, other in others.items():
                    alone, wait, seconds, status, equal = beside(sides[recipe].address.port, victim, other)
                    worst, same = max(worst, wait), same and equal
                    print(f"| {recipe} | {name} | {seconds:.1f}, {status} | {alone:.2f} | {wait:.2f} |", flush=True)
            ends.append(memory(sides.values()))
        done.set()
    grown = max(last / first - 1 for first, last in zip(ends[0], ends[-1], strict=True))
    print(f"\nmemory of {[*sides]} after each round, MiB: {ends}; the victim's answers equal those alone: {same}")
    return int(worst > LONGEST or grown > GROWTH or not same)


if __name__ == "__main__":
    sys.exit(main())
