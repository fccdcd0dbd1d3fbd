"""Sentences of several languages, as examples and conversations."""

import random

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
