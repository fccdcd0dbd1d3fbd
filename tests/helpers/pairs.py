"""A tiny recipe of pairs of replies, for tests of preferences."""

import json
import random
from pathlib import Path
from typing import Any

from tests.helpers.toy import DOES, WHAT, WHO, write_toy

BETA = 0.2


def rows(num: int = 40, *, length: int = 3) -> list[dict[str, Any]]:
    """Prompts with a short right reply and a rejected one of other words, of many lengths."""
    draw = random.Random(11)
    made = []
    for index in range(num):
        who, does, what = draw.choice(WHO), draw.choice(DOES), draw.choice(WHAT)
        wrong = [one for one in WHAT if one != what]
        chosen = f"{who}{does}{what}。" * draw.randint(1, length)
        rejected = "".join(f"{who}{does}{draw.choice(wrong)}。" for _ in range(draw.randint(1, length)))
        earlier = (
            [{"role": "user", "content": "你好"}, {"role": "assistant", "content": "你好。"}] if index % 4 == 0 else []
        )
        prompt = [*earlier, {"role": "user", "content": f"第{index}问：{who}{does}什么？"}]
        made.append({"messages": prompt, "chosen": chosen, "rejected": rejected})
    return made


def write_pairs(folder: Path, made: list[dict[str, Any]] | None = None, **sections: Any) -> Path:
    """Write pairs, and a recipe that learns from them alone; `sections` change sections of the recipe."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "pairs.jsonl"
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in (rows() if made is None else made))
    path.write_text("".join(lines), encoding="utf-8")
    fields: dict[str, Any] = {
        "data": {"text": [], "chat": [], "pairs": str(path), "holdout": 0.2},
        "stages": [],
        "train": {"threads": 1, "max_epochs": 2, "beta": BETA},
    }
    for name, values in sections.items():
        fields[name] = {**fields.get(name, {}), **values} if isinstance(values, dict) else values
    return write_toy(folder, **fields)
