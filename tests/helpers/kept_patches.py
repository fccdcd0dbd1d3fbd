"""A picture, the patches of it that were kept, and a question."""

import numpy as np

from unpad.run.report.vqa import Kept

PATCH, GRID = 8, (3, 4)
QUESTION = "图里是什么形状？"


def kept(question: str = "Which <shape>?", answer: str = "circle") -> Kept:
    pixels = np.random.default_rng(0).integers(0, 256, (GRID[0] * PATCH, GRID[1] * PATCH, 3), np.uint8)
    stays = np.zeros((2, 12), np.bool_)
    stays[0, [0, 5, 7]], stays[1, 5] = True, True
    return Kept(pixels, PATCH, {0: stays[0], 2: stays[1]}, question, answer)
