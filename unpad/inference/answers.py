"""Answers to questions about images, decoded in batches."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from unpad.data.measuring import Measuring
from unpad.data.vqa import VqaData
from unpad.inference.generate import complete
from unpad.inference.loaded import LoadedRun
from unpad.models.contract import PrunesTokens
from unpad.models.vision_language.model import VisionLanguage
from unpad.recipes.training import GenerateSettings
from unpad.run.report.vqa import Kept


def answer(run: LoadedRun, data: VqaData, seq_ids: np.ndarray) -> list[str]:
    """Answer questions greedily, in fp32, in batches of the run's size; answers do not depend on the batch."""
    return answer_counted(run, data, seq_ids)[0]


def answer_counted(run: LoadedRun, data: VqaData, seq_ids: np.ndarray) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Answer questions as `answer` does, and count visual tokens.

    Returns:
        The answers; the visual tokens of every row before any is removed, (num_rows,) int64; and those that entered
        each block, (num_rows, blocks) int64, without blocks if there is one token per patch.
    """
    model = run.model
    assert isinstance(model, PrunesTokens), "a model of images and questions counts its visual tokens"
    answers: dict[int, str] = {}
    counts: dict[int, np.ndarray] = {}
    for ids, texts in _answered(run, data, seq_ids):
        rows = np.stack([one.numpy() for one in (model.given, *model.kept)], 1)
        answers |= dict(zip(ids, texts, strict=True))
        counts |= dict(zip(ids, rows, strict=True))
    order = seq_ids.tolist()
    table = np.stack([counts[seq] for seq in order])
    return [answers[seq] for seq in order], table[:, 0], table[:, 1:]


def answer_shown(run: LoadedRun, data: VqaData, seq_ids: np.ndarray) -> list[Kept]:
    """Answer questions about one image each, and show the kept patches; for models that remove patches and merge
    none."""
    shown: dict[int, Kept] = {}
    model = run.model
    assert isinstance(model, VisionLanguage), "a model that removes patches"
    assert model.config.prune is not None, "models that remove patches have a prune section"
    blocks = model.config.prune.layers
    for ids, texts in _answered(run, data, seq_ids):
        first = np.cumsum(data.num_patches[ids]) - data.num_patches[ids]  # index in the batch of each row's first patch
        counts = [model.kept[block + 1].tolist() for block in blocks]
        tokens = [model.kept_tokens[block + 1].numpy() for block in blocks]
        rows = [np.split(one, np.cumsum(count)[:-1]) for one, count in zip(tokens, counts, strict=True)]
        for place, (seq, text) in enumerate(zip(ids, texts, strict=True)):
            stays = {block: np.zeros(data.num_patches[seq], np.bool_) for block in blocks}
            for block, of_rows in zip(blocks, rows, strict=True):
                stays[block][of_rows[place] - first[place]] = True
            example = data.examples[seq]
            shown[seq] = Kept(data.album.picture(example.images[0]), data.album.patch, stays, example.question, text)
    return [shown[seq] for seq in seq_ids.tolist()]


def greedy(run: LoadedRun) -> GenerateSettings:
    """Settings of answers about images."""
    return run.recipe.generate.model_copy(update={"temperature": 0.0, "beams": 1})


def _answered(run: LoadedRun, data: VqaData, seq_ids: np.ndarray) -> Iterator[tuple[list[int], list[str]]]:
    """Yield rows and their answers, batch by batch; the model's counts are those of the latest batch."""
    settings = greedy(run)
    for micro in Measuring(run.model, data, seq_ids, run.recipe.plan).micros():
        ids = micro.seq_ids.tolist()
        completions = complete(run.generator, run.tokenizer, data.prompts(ids), settings)
        yield ids, [one.text for one in completions]
