"""Cost of reading and answering questions, with all visual tokens and with the kept ones."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch

from unpad.batching.batch import RaggedBatch, required
from unpad.data.sources.split import PARTS, Split
from unpad.data.vqa import VqaData
from unpad.errors import RecipeError
from unpad.evaluation.metrics import EXTREMES, Metric
from unpad.inference.engine import advance, prefill
from unpad.inference.loaded import generation_precision, load
from unpad.models.cost import pruner_operations, reading_operations, sizes_of
from unpad.models.vision_language.model import TEACHING, Mode, VisionLanguage
from unpad.nn.block import BEFORE
from unpad.nn.linear import independent_rows, keep_copies
from unpad.nn.precision import CPU, autocast

MAX_PROMPTS = 16
ROUNDS = 7
NEW_TOKENS = 16


@dataclass(frozen=True)
class Cost:
    """Cost of one reading of the prompts and some steps of decoding.

    Args:
        decode_seconds: time per step and row.
        cache_bytes: size of all buffers, with room for the new tokens.
        operations: operations of the prefill, in the language model and the heads that prune it.
    """

    prefill_seconds: float
    decode_seconds: float
    cache_bytes: int
    operations: int


def evaluate_cost(run: str) -> dict[str, Metric]:
    """Measure a run on questions with images of the part valid.

    Every mode that decodes reads the same prompts in turn, round after round, so that other load of the machine affects
    all alike. Each `prefill_milliseconds_MODE` includes tower, projector and merging, and `decode_milliseconds_MODE` is
    per new token of a row; both are medians with the least and the most. `prefill_operations_MODE` are the products of
    the language model and of its heads, which is where modes differ.

    Raises:
        RecipeError: the run is not one of images and questions, or it has one mode only.
    """
    loaded = load(run, device=CPU)  # clocks do not wait for a card
    if not isinstance(loaded.model, VisionLanguage) or len(loaded.model.modes) < 2:
        fix = "use a run of a model with a merge or a prune section"
        raise RecipeError("the model has one mode, so there are no costs to compare", where=str(loaded.folder), fix=fix)
    data = cast(VqaData, loaded.data())  # what models of vision and language read
    ids = np.flatnonzero((data.table.split == Split.HOLDOUT) & (data.num_patches > 0))[:MAX_PROMPTS]
    prompts = data.prompts(ids.tolist())
    precision = generation_precision(loaded.recipe.generate)
    with torch.inference_mode(), autocast(precision, CPU), keep_copies(), independent_rows():
        costs_by_mode = measure(loaded.model, prompts, ROUNDS, NEW_TOKENS, time.perf_counter)
    metrics: dict[str, Metric] = {}
    for mode, costs in costs_by_mode.items():
        columns: dict[str, list[float]] = {
            "prefill_milliseconds": [1e3 * cost.prefill_seconds for cost in costs],
            "decode_milliseconds": [1e3 * cost.decode_seconds for cost in costs],
            "cache_bytes": [cost.cache_bytes for cost in costs],
            "prefill_operations": [cost.operations for cost in costs],
        }
        for key, values in columns.items():
            metrics[f"{key}_{mode}"] = Metric(float(np.median(values)), min(values), max(values), len(ids), EXTREMES)
    return {name: replace(metric, part=PARTS[Split.HOLDOUT]) for name, metric in metrics.items()}


def measure(
    model: VisionLanguage, prompts: RaggedBatch, rounds: int, num_new: int, clock: Callable[[], float]
) -> dict[Mode, list[Cost]]:
    """Measure the cost of every mode in every round; the first round warms up and is dropped."""
    costs_by_mode: dict[Mode, list[Cost]] = {
        mode: [] for mode in model.modes if mode not in TEACHING
    }  # which save nothing
    for _ in range(rounds + 1):
        for mode, costs in costs_by_mode.items():
            model.mode = mode
            costs.append(_once(model, prompts, num_new, clock))
    model.mode = None
    return {mode: costs[1:] for mode, costs in costs_by_mode.items()}


def _once(model: VisionLanguage, prompts: RaggedBatch, num_new: int, clock: Callable[[], float]) -> Cost:
    most = prompts.layout.lengths().max() + num_new
    began = clock()
    cache, hidden = prefill(model, prompts, int(most))
    tokens = model.logits(hidden).argmax(-1)
    read = clock()
    num_bytes = cache.num_bytes
    for _ in range(num_new):
        tokens = model.logits(advance(model, cache, tokens)).argmax(-1)
    decoded = clock()
    per_token = (decoded - read) / max(num_new * prompts.num_seqs, 1)
    return Cost(read - began, per_token, num_bytes, prefill_operations(model, prompts))


def prefill_operations(model: VisionLanguage, prompts: RaggedBatch) -> int:
    """Operations of the language model and its heads in the last reading of these prompts.

    Merging and ranking are not counted, nor what is the same in every mode: tower, projector, and an image's way in.
    """
    lengths, config = prompts.layout.lengths(), model.config
    seqs, media = required(prompts.media_seqs), required(prompts.media)
    patches = torch.zeros_like(lengths).index_add(0, seqs, media.layout.lengths())
    visual = [counts.tolist() for counts in model.kept] or [patches.tolist()] * config.language.blocks
    text = (lengths - patches).tolist()
    read = [[a + b for a, b in zip(block, text, strict=True)] for block in visual]
    total = reading_operations(sizes_of(config.language, model.vocab_size), read, prompts.num_seqs)
    if model.mode == "hard" and config.prune is not None and config.prune.learns:
        for layer in config.prune.layers:  # the text of a prompt is all question
            judged = model.given.tolist() if layer == BEFORE else visual[layer]
            total += pruner_operations(config.language.width, config.prune.inner, judged, text)
    return total
