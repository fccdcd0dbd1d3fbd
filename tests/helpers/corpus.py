"""A small corpus of texts and conversations, and recipes of it."""

import json
from pathlib import Path
from typing import Any

from unpad.data.tokens.corpus import CorpusReport, TokenSet, open_corpus
from unpad.data.tokens.tokenizer import Tokenizer
from unpad.recipes.file import parse_recipe
from unpad.recipes.recipe import Recipe

TEXTS = [f"第{i}句话讲的是水的第{i * 7}种样子，它流过山谷。" for i in range(40)]
CHATS = [(f"第{i}个问题？", f"这是第{i}个回答。") for i in range(30)]


def messages(*contents: str) -> list[dict[str, str]]:
    roles = ("user", "assistant") * len(contents)
    return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]


def write_corpus(folder: Path) -> None:
    for name, texts in (("a.json", TEXTS[:20]), ("b.json", TEXTS[20:])):
        (folder / "text").mkdir(parents=True, exist_ok=True)
        (folder / "text" / name).write_text(json.dumps(texts, ensure_ascii=False))
    rows = [{"messages": messages(*chat), "keywords": ["这是"], "group": f"g{i}"} for i, chat in enumerate(CHATS)]
    (folder / "chat.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def make_recipe(folder: Path, **sections: dict[str, Any]) -> Recipe:
    data = {"root": str(folder), "text": "text", "chat": "chat.jsonl", "holdout": 0.2, **sections.pop("data", {})}
    return parse_recipe({"data": data, "tokenizer": {"vocab_size": 600}, **sections})


def prepare(recipe: Recipe, **options: Any) -> tuple[TokenSet, Tokenizer, CorpusReport]:
    """A recipe's data, read, split, encoded and compared; `options` are those of `open_corpus`."""
    corpus = open_corpus(recipe, **options)
    return corpus.tokens, corpus.tokenizer, corpus.compare()
