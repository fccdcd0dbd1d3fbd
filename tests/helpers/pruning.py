"""Small vision-language models that prune visual tokens, and samples for them."""

from typing import Any

from tests.helpers.vision import Row, tiny
from unpad.batching.batch import RaggedBatch
from unpad.models.vision_language.model import VisionLanguage
from unpad.models.vision_language.prune_pass import PrunePass

WIDTH, BLOCKS, HEADS, KV_HEADS = 32, 4, 2, 1
# Eight samples: images before, within and after the question, several, none, a single visual token; two prompts end
# with an image, from which the answer is then predicted.
ROWS: list[Row] = [
    ("1 5 <image> 7 8", [(3, 4)], "9 10"),
    ("<image> 3", [(2, 2)], "4 5 6 7 8 9 1 2"),
    ("2 3 4", [], "5 6"),
    ("7 <image> 8 9 11 <image> <image> 4", [(2, 3), (4, 1), (1, 3)], "1"),
    ("1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 <image> 19", [(5, 5)], "20 21 22"),
    ("6", [], "3"),
    ("<image>", [(1, 1)], "3 4"),
    ("12 13 14 <image>", [(6, 2)], "8 2"),
]
METHODS: dict[str, dict[str, Any]] = {
    "learned": {"threshold": 0.5},
    "learned, top share": {"keep": 0.4},
    "relevance": {"method": "relevance", "keep": 0.4},
    "random": {"method": "random", "keep": 0.4},
    "uniform": {"method": "uniform", "keep": 0.4},
    "attention": {"method": "attention", "keep": 0.4},
}
# Before the first block, where no text has seen an image yet, and once more after the second.
EARLY = {
    "learned": {"layers": [-1, 1], "keep": 0.6},
    "relevance": {"layers": [-1, 1], "method": "relevance", "keep": 0.6},
    "random": {"layers": [-1, 1], "method": "random", "keep": 0.6},
}


def pruned(mode: str | None = None, positions: str = "rotary", blocks: int = BLOCKS, **prune: Any) -> VisionLanguage:
    sizes = {"width": WIDTH, "blocks": blocks, "heads": HEADS, "kv_heads": KV_HEADS, "positions": positions}
    heads = {"layers": [0, 2], "inner": 8, "heads": 2, **prune}
    model = tiny({"blocks": 1, "positions": "grid"}, sizes, prune=heads)
    model.mode = mode
    return model


def pass_of(model: VisionLanguage, batch: RaggedBatch) -> PrunePass:
    """What the heads judged, and left, on the way of a batch through the language model."""
    reading = model._read(batch)
    pruning = model._pruning(reading)
    model.decoder(reading.batch, None, pruning)
    return pruning
