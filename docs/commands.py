"""Commands that pages show on lines of their own, each run once in a folder with small stand-ins for the user's files.

python docs/commands.py             all of them, an hour or so on one core; exit code 1 where one fails
python docs/commands.py doctor      those that have one of the words

A line counts when it is indented by four blanks and begins with `unpad`; `docs/outputs.py` runs those with an output.
Trainings take two steps, in place of the recipe's. A command fails unless it ends with 0, or one of `FINDINGS`.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
from PIL import Image

from unpad.cli.main import main as unpad
from unpad.examples.drawn import draw_patients, ready_labels

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "README.zh-CN.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMAND = re.compile(r"^    (unpad .*?)(?:\s+#.*)?$", re.M)
NOT_RUN = ("unpad serve ", "Qwen/", "://", "log.to=")  # stays until stopped; asks hosts; needs a logger's library
FINDINGS = (12, 15)  # of `prove` and `doctor`
STEPS = "train.max_steps=2"
SMALL_TEXT = ["model.width=32", "model.blocks=1", "model.heads=2", "model.kv_heads=2", "model.hidden=64"]
PLACES = {
    "/data/": "data/",
    "RECIPE": "zh_chat",
    "from=RUN": "from=mine",
    "--step 120": "--step 2",
    "home, rehab, died": "0, 1",
}
TEXT = [{"text": f"北京是中国的首都，第{number}句。" * 3} for number in range(30)]
CHAT = [
    {"messages": [{"role": "user", "content": f"sort 9 {n} 5"}, {"role": "assistant", "content": f"5 9 {n}"}]}
    for n in range(30)
]
PAIRS = [{"prompt": f"sort 9 {n} 5", "chosen": f"5 9 {n}", "rejected": f"9 {n}"} for n in range(30)]
PROMPTS = [{"prompt": "你好"}, {"prompt": "再见"}]


def commands(words: list[str]) -> Iterator[str]:
    """Each command once, that has one of the words."""
    shown = [line for page in PAGES for line in COMMAND.findall(page.read_text(encoding="utf-8"))]
    yield from (line for line in dict.fromkeys(shown) if not words or any(word in line for word in words))


def call(folder: Path, words: list[str]) -> tuple[int, str]:
    """Exit code and output of a command in a process of its own, which has its modules already."""
    output = folder / "output.txt"
    if (child := os.fork()) == 0:
        os.chdir(folder)
        for number, name, mode in ((0, os.devnull, os.O_RDONLY), (1, output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)):
            os.dup2(os.open(name, mode, 0o600), number)
        os.dup2(1, 2)
        sys.argv, code = ["unpad", *words], 0
        try:
            unpad()
        except SystemExit as end:
            code = int(end.code or 0)
        finally:
            sys.stdout.flush()
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code, output.read_text(encoding="utf-8", errors="replace")


def rows_of(line: str, name: str) -> list[dict[str, object]]:
    """Rows of a stand-in, of the kind that the command reads it as."""
    if "pairs" in name:
        return list(PAIRS)
    return list(TEXT) if f"data.text={name}" in line or "text" in name else list(CHAT)


def write_rows(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def write_files(folder: Path) -> None:
    """Pictures, tables and other files that pages name, but rows of text."""
    rng = np.random.default_rng(0)
    for place in ("my_folder", "photos", "my_photos", "new_pictures"):
        for label in ("cat", "dog"):
            (folder / place / label).mkdir(parents=True)
            for number in range(8):
                pixels = rng.integers(0, 255, (16, 20, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / place / label / f"{number}.png")
    Image.open(folder / "photos/cat/1.png").save(folder / "picture.png")
    asked = [{"image": f"photos/cat/{n}.png", "question": "Which animal?", "answer": "cat"} for n in range(8)]
    write_rows(folder / "my_questions.jsonl", [dict(row) for row in asked])
    chapters = [f"CHAPTER {number}\n\n{row['text']}\n\n{row['text']}\n" for number, row in enumerate(TEXT * 5)]
    (folder / "pet.json").write_text(
        '{"type": "object", "properties": {"name": {"enum": ["猫", "狗"]}}}', encoding="utf-8"
    )
    (folder / "book.txt").write_text("\n".join(chapters), encoding="utf-8")
    tickets = [{"Customer message": f"Ticket {n}?", "Our answer": f"Answer {n}."} for n in range(30)]
    reviews = [{"comment": row["text"]} for row in TEXT]
    for name, rows in (("questions.csv", asked), ("tickets.csv", tickets), ("reviews.csv", reviews)):
        with (folder / name).open("w", newline="") as file:
            table = csv.DictWriter(file, list(rows[0]))
            table.writeheader()
            table.writerows(rows)
    events, patients = draw_patients(80, rng)
    history, labels = ready_labels(events, patients)
    for name, of in (("my", history), ("my_labels", labels), ("new", history)):
        pq.write_table(of, folder / f"{name}.parquet")
    pa_csv.write_csv(history, folder / "events.csv")
    write_rows(folder / "in.jsonl", [dict(row) for row in PROMPTS])
    (folder / "data" / "experiments").mkdir(parents=True)


def stand_ins(folder: Path, say: Callable[[str], None]) -> None:
    """Files and runs that the commands name."""
    write_files(folder)
    for name in ("mine", "base", "my", "data/chat", "conversations"):
        write_rows(folder / f"{name}.jsonl", list(TEXT if name == "base" else CHAT))
    sys.argv = ["tiny", str(folder / "Qwen3-0.6B"), "qwen3"]
    exec(compile((ROOT / "examples/hf/tiny.py").read_text(), "tiny.py", "exec"), {"__name__": "__main__"})
    shutil.copytree(folder / "Qwen3-0.6B", folder / "folder")
    shutil.copy(folder / "Qwen3-0.6B" / "config.json", folder)
    small = [*SMALL_TEXT, STEPS]
    pictures = ["images", "data.images=photos", STEPS]
    for line in (
        ["train", "zh_chat", "data.chat=my.jsonl", *small, "--out", "runs/zh_chat-1"],
        ["train", "chat", "data.chat=[my.jsonl, data/chat.jsonl]", *small, "--out", "runs/mine"],
        *(["train", "chat", f"data.chat={file}.jsonl", *small, "--out", f"runs/{run}"]
          for run, file in (("one", "data/chat"), ("many", "data/chat"), ("first", "data/chat"))),
        ["train", "small", "data.text=base.jsonl", *small, "--out", "runs/small-1"],
        ["train", "llm", "data.text=base.jsonl", *small, "--out", "runs/base"],
        ["train", *pictures, "--out", "runs/images-1"], ["train", *pictures, "--out", "runs/photos"],
        ["train", "events_labels", "data.events=my.parquet", "events.labels.path=my_labels.parquet", STEPS,
         "--out", "runs/events-1"],
        ["train", "events_labels", "data.events=events.csv", "events.labels.path=my_labels.parquet", STEPS,
         "--out", "runs/ward"],
        ["train", "vqa", "data.vqa=my_questions.jsonl", STEPS, "--out", "runs/vqa-1"],
        ["train", "vqa_prune", "data.vqa=my_questions.jsonl", "train.init_from=vqa-1", STEPS,
         "--out", "runs/vqa_prune-1"],
        ["train", "dpo", "model.from=mine", "data.pairs=my_pairs.jsonl", STEPS, "--out", "runs/dpo-1"],
        ["import", "Qwen3-0.6B", "--out", "runs/qwen"],
        ["train", "runs/qwen/recipe.yaml", "data.chat=conversations.jsonl", "lora.r=8", STEPS, "--out", "runs/tuned"],
        ["export", "zh_chat-1", "runs/demo8", "--int8"],
        ["recipes", "copy", "zh_chat", "mine.yaml"],
    ):  # fmt: skip
        if "my_pairs.jsonl" in " ".join(line):
            write_rows(folder / "my_pairs.jsonl", list(PAIRS))
        code, printed = call(folder, line)
        if code:
            say(f"stand-in: unpad {shlex.join(line)}: {code}\n{printed[-600:]}")
    shutil.copytree(folder / "runs/mine", folder / "runs/demo")
    shutil.copy(folder / "runs/qwen/recipe.yaml", folder / "qwen.yaml")
    shutil.copy(folder / "mine.yaml", folder / "my.yaml")


def words_of(line: str) -> list[str]:
    """Words of a command, with places of the stand-ins, and few steps."""
    for shown, put in PLACES.items():
        line = line.replace(shown, put)
    words = shlex.split(re.sub(r" > \S+$", "", line))[1:]
    if words[0] == "train":
        words = [word for word in words if not word.startswith("train.max_steps=")]
        words.insert(2 if words[1] != "--resume" else 3, STEPS)
        if words[1] in ("zh_chat", "chat", "llm", "small"):
            words[2:2] = SMALL_TEXT
    return words


def main(words: list[str], say: Callable[[str], None] = print) -> int:
    """Run the commands; 1 if one fails."""
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        os.environ["UNPAD_CACHE"], base, here = f"{name}/cache", Path(name) / "base", Path(name) / "here"
        base.mkdir()
        stand_ins(base, say)
        for line in commands(words):
            if any(part in line for part in NOT_RUN):
                continue
            shutil.copytree(base, here, symlinks=True)
            for file in re.findall(r"(?<!--out )\b[\w/]+\.jsonl", line):
                if not (here / file).exists() or re.search(rf"data\.(text|chat|pairs)={file}", line):
                    write_rows(here / file, rows_of(line, file))
            words_here = words_of(line)
            if "--out" in words_here or words_here[0] == "export":  # what it writes is new
                place = words_here[words_here.index("--out") + 1] if "--out" in words_here else words_here[2]
                shutil.rmtree(here / place, ignore_errors=True)
            if words_here[:2] == ["recipes", "copy"]:
                (here / words_here[3]).unlink(missing_ok=True)
            code, printed = call(here, words_here)
            if code and code not in FINDINGS:
                failed += 1
                say(f"{code}: {line}\n{printed[-600:]}")
            shutil.rmtree(here)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
