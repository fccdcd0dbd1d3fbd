"""A run's recipe pointed at new data keeps what says how the data is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from unpad.evaluation.new_data import recipe_for
from unpad.recipes.recipe import Recipe


@pytest.mark.parametrize(
    ("fields", "field"), [(["body"], "body"), (["body", "body"], "body"), (["body", "text"], None)]
)
def test_the_field_of_the_run_s_texts_is_that_of_new_ones_if_it_is_one(
    tmp_path: Path, fields: list[str], field: str | None
) -> None:
    (tmp_path / "new.jsonl").write_text('{"text": "a", "body": "b"}\n')
    recipe = Recipe(**{"data": {"text": [{"path": f"{i}.jsonl", "field": name} for i, name in enumerate(fields)]}})
    [source] = recipe_for(recipe, tmp_path / "new.jsonl").data.sources("text")
    assert (source.path, source.field) == (str(tmp_path / "new.jsonl"), field)
