"""The Chinese corpora beside the checkout are read whole."""

import json
from pathlib import Path

import pytest

from tests.helpers.corpus import prepare
from unpad.recipes.file import load_recipe
from unpad.recipes.recipe import Recipe

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
