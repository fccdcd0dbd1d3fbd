"""Sentences of several languages, as examples and conversations."""

import random

from unpad.data.sources.example import Example, Turn

WORDS = [
    "le", "café", "où", "déjà", "une", "forêt", "très", "après", "l'été", "garçon", "élève", "mange", "voit", "la",
    "leçon", "du", "château", "naïf",
]  # fmt: skip
CHINESE = "今天天气很好我们一起去公园散步看见许多花草树木孩子们在湖边玩水"
RUSSIAN = [
    "сегодня", "хорошая", "погода", "мы", "идём", "гулять", "в", "старый", "парк", "и", "видим", "много", "деревьев",
]  # fmt: skip


def lines_of(words: list[str], num: int = 80, between: str = " ") -> list[str]:
    draw = random.Random(1)
    return [between.join(draw.choice(words) for _ in range(draw.randint(8, 20))) + "." for _ in range(num)]


def texts(lines: list[str]) -> dict[str, list[Example]]:
    return {"text": [Example(f"a.jsonl:{i}", (Turn("text", line),)) for i, line in enumerate(lines)]}


def talks(pairs: list[tuple[str, str]]) -> dict[str, list[Example]]:
    turns = [(Turn("system", "You are a helpful assistant who answers."), Turn("user", ask), Turn("assistant", say))
             for ask, say in pairs]  # fmt: skip
    return {"chat": [Example(f"a.jsonl:{i}", three) for i, three in enumerate(turns)]}


PARTS = [
    "ba", "con", "dri", "el", "fu", "gam", "hos", "in", "jel", "kor", "lum", "mi", "nat", "os", "pre", "qui", "rul",
]  # fmt: skip
MANY_WORDS = sorted({f"{one}{other}{end}" for one in PARTS for other in PARTS if one < other for end in ("st", "e")})


def rich_sentences(num: int = 500) -> list[str]:
    """Of some hundred words, of which each follows few others."""
    draw, made = random.Random(7), []
    for _ in range(num):
        at, own = draw.randrange(len(MANY_WORDS)), list[str]()
        for _ in range(14):
            own.append(MANY_WORDS[at])
            at = (5 * at + draw.randrange(4)) % len(MANY_WORDS)
        made.append(f"{' '.join(own[:7]).capitalize()}, {' '.join(own[7:])}.")
    return made
