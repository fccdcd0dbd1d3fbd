"""Small vision-language models that merge visual tokens."""

from typing import Any

from tests.helpers.vision import tiny
from unpad.models.vision_language.model import Mode, VisionLanguage

WIDTH, BLOCKS = 16, 3
MERGES: dict[str, dict[str, Any]] = {
    "simple": {"variant": "simple", "ratio": 0.4, "inner": 8},
    "question": {"variant": "question", "ratio": 0.4, "inner": 8, "heads": 2},
    "slots": {"variant": "slots", "slots": 5, "inner": 8, "heads": 2},
    "similarity": {"variant": "similarity", "ratio": 0.4},
    "class_token": {"variant": "class_token", "ratio": 0.4},
}
PRUNES: dict[str, dict[str, Any]] = {
    "none": {},
    "learned": {"prune": {"layers": [0, 1], "inner": 8, "heads": 2}},
    "class_token": {"prune": {"layers": [0], "method": "class_token", "keep": 0.5}},
    "uniform": {"prune": {"layers": [0], "method": "uniform", "keep": 0.5}},
}


def merging(merge: str | None, mode: Mode | None = None, prune: str = "none", **fields: Any) -> VisionLanguage:
    model = tiny(
        {"positions": "grid"}, {"width": WIDTH, "blocks": BLOCKS, "heads": 2, "context": 96},
        **({} if merge is None else {"merge": {**MERGES[merge], **fields}}), **PRUNES[prune],
    )  # fmt: skip
    model.mode = mode
    return model
