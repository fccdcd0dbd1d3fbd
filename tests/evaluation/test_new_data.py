"""A run's recipe pointed at new data keeps what says how the data is read."""

import pytest

from unpad.evaluation.run import recipe_for
from unpad.recipes.recipe import Recipe


@pytest.mark.parametrize(
    ("fields", "field"), [(["body"], "body"), (["body", "body"], "body"), (["body", "text"], None)]
)
def test_the_field_of_the_run_s_texts_is_that_of_new_ones_if_it_is_one(tmp_path, fields, field):
    (tmp_path / "new.jsonl").write_text('{"text": "a", "body": "b"}\n')
    recipe = Recipe(**{"data": {"text": [{"path": f"{i}.jsonl", "field": name} for i, name in enumerate(fields)]}})
    [source] = recipe_for(recipe, tmp_path / "new.jsonl").data.sources("text")
    assert (source.path, source.field) == (str(tmp_path / "new.jsonl"), field)


def test_new_patients_are_not_looked_up_in_the_run_s_table_of_parts(tmp_path):
    for name in ("tests.parquet", "people.parquet"):
        (tmp_path / name).write_bytes(b"")
    events = {"labels": {"path": "old/people.parquet", "label": "died"}, "split": "old/parts.parquet"}
    recipe = Recipe(
        **{
            "data": {"events": [{"path": "old/tests.parquet", "time": "days"}]},
            "events": events,
            "model": {"kind": "set_sequence"},
        }
    )
    assert recipe.events.split is not None
    new = recipe_for(recipe, tmp_path)
    assert new.events.split is None
    assert [new.data.sources("events")[0].path, new.events.labels.path] == [
        str(tmp_path / "tests.parquet"), str(tmp_path / "people.parquet"),
    ]  # fmt: skip
