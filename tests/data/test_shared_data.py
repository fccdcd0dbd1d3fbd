"""The Chinese corpora beside the checkout: read whole, planned without padding, accounted for to the token."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.corpus import prepare
from unpad.batching.layout import attention_cells, length_groups
from unpad.batching.plan import plan
from unpad.recipes.file import load_recipe
from unpad.recipes.recipe import Recipe
from unpad.recipes.training import strategy_names
from unpad.trials.strategy_table import compare

SHARED = Path(__file__).parents[2] / "../shared/data/zh"
CORPORA = {
    "pretraining": ("zh_chat", [f"data.text={SHARED / 'pretraining'}", "data.chat=[]"]),
    "chat": ("zh_chat", [f"data.chat={SHARED / 'chat'}", "data.text=[]"]),
    "sayings": ("llm", [f"data.text={SHARED / 'sayings.jsonl'}", "tokenizer.vocab_size=2000"]),
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not SHARED.is_dir(), reason="the Chinese corpora are not beside the checkout"),
]


def recipe_of(name: str) -> Recipe:
    recipe, overrides = CORPORA[name]
    return load_recipe(recipe, overrides)


def texts_of(name: str) -> list[str]:
    """The corpus as a plain reader sees it: what users wrote, nothing parsed."""
    if name == "sayings":
        with (SHARED / "sayings.jsonl").open(encoding="utf-8") as lines:
            return [json.loads(line)["text"] for line in lines]
    files = sorted((SHARED / name).glob("*.json"))
    return [text for file in files for text in json.loads(file.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("name", CORPORA)
def test_every_row_is_read_and_every_text_comes_back(name):
    tokens, tokenizer, report = prepare(recipe_of(name))
    texts = texts_of(name)
    assert report.rows_used == len(texts) == len(tokens)
    decoded = sorted(tokenizer.decode(tokens.tokens(i).tolist()) for i in range(len(tokens)))
    assert decoded == sorted(text.strip("\r\n") if name != "chat" else text for text in texts)
    assert report.leaks is not None


@pytest.mark.parametrize("name", CORPORA)
def test_pack_has_no_padding_and_every_ledger_adds_up_to_the_token(name):
    recipe = recipe_of(name)
    tokens, _, _ = prepare(recipe)
    positions = tokens.lengths - 1
    context = 128 if name != "sayings" else 512
    rows = compare(positions, recipe.plan, seed=0, max_tokens=context, targets=tokens.count_targets)
    assert [row.name for row in rows if not row.refused] == strategy_names()
    for row in rows:
        ledger = row.ledger
        assert ledger.total == int(positions.sum()), row.name
        assert ledger.tokens("trained") == int(tokens.num_targets.sum()), row.name
        assert ledger.tokens("truncated") == ledger.tokens("dropped") == 0, row.name
    shares = {row.name: row.pad_share for row in rows}
    assert shares["pack"] == 0
    assert shares["fixed"] > shares["dynamic"] > shares["bucket"] > 0


@pytest.mark.promise("plan.table")
@pytest.mark.parametrize("name", CORPORA)
def test_pad_share_and_attention_cells_equal_a_recount(name):
    recipe = recipe_of(name)
    tokens, _, _ = prepare(recipe)
    positions = tokens.lengths - 1
    for row in compare(positions, recipe.plan, seed=0, max_tokens=512, targets=tokens.count_targets):
        chosen = recipe.plan.model_copy(update={"strategy": row.name})
        made = plan(positions, chosen, seed=0, epoch=0, max_tokens=512, targets=tokens.count_targets)
        real = cells = needed = computed = 0
        for step in range(made.num_steps):
            for micro in made.step(step):
                sizes = np.sort((micro.stops - micro.starts).astype(np.int64))[::-1]
                real, needed = real + int(sizes.sum()), needed + int((sizes**2).sum())
                if micro.pad_to:
                    cells += micro.pad_to * len(sizes)
                    computed += micro.pad_to**2 * len(sizes)
                    continue
                sizes = np.concatenate([sizes, np.ones(max(micro.fill_to - int(sizes.sum()), 0), np.int64)])
                cells += int(sizes.sum())
                computed += attention_cells(sizes, length_groups(sizes))
        assert row.pad_share == pytest.approx(1 - real / cells)
        assert (row.attention_cells_needed, row.attention_cells_computed) == (needed, computed), row.name
