"""Files of earlier versions as today's."""

import pytest

from unpad.recipes.lines import to_yaml
from unpad.run import upgrade


def test_a_command_is_completed():
    values = {"recipe": "a.yaml", "overrides": ["plan.drop_last=true", "data.text=no"], "precision": "bf16", "id": "ab"}
    assert upgrade.command(values) == values
    assert upgrade.command({"overrides": []}) == {"overrides": [], "precision": None, "id": ""}


@pytest.mark.promise("versions.earlier-runs")
@pytest.mark.parametrize(
    ("function", "old", "added"),
    [
        (upgrade.entry, {"kind": "warning", "message": "a; b"}, {}),
        (upgrade.entry, {"kind": "resumed", "step": 3, "changed": {}}, {"undescribed": ""}),
        (
            upgrade.entry,
            {"kind": "resumed", "message": "at step 3; optim.lr is 1, was 2"},
            {"step": 0, "changed": {}, "undescribed": "at step 3; optim.lr is 1, was 2"},
        ),
        (upgrade.entry, {"kind": "timers", "rows": []}, {"after_step": None, "step": None}),
        (upgrade.step_row, {"step": 1}, {"rows": None}),
        (upgrade.time_row, {"memory_bytes": 7}, {"peak_bytes": 7}),
        (upgrade.time_row, {"memory_bytes": 7, "peak_bytes": 9}, {}),
        (upgrade.time_row, {}, {}),
        (upgrade.state, {"data": "", "imported": "x"}, {}),
        (upgrade.evaluation, {}, {"part": None, "best_of": None}),
    ],
)
def test_what_is_missing_is_added_and_what_is_there_stays(function, old, added):
    today = function(old)
    assert today == {**old, **added}
    assert function(today) == today


def test_a_state_gets_its_rule_and_counters():
    today = upgrade.state({"progress": {"step": 4}})
    assert today == {"update_rule": 1, "run": "", "progress": {"step": 4, "most_tokens": None}}
    assert upgrade.state({**today, "update_rule": 2})["update_rule"] == 2


def test_a_recipe_is_read_with_its_truths():
    old = {
        "plan": {"drop_last": "yes", "tokens_per_step": 1},
        "stages": [{"name": "a", "plan": {"drop_last": 1}, "train": {"max_epochs": 1}}],
        "model": {"tied": True},
    }
    values, lines = upgrade.parse_recipe(to_yaml(old).encode())
    assert values["plan"] == {"drop_last": True, "tokens_per_step": 1}
    assert values["stages"] == [{"name": "a", "plan": {"drop_last": True}, "train": {"max_epochs": 1}}]
    assert lines["plan", "drop_last"] == 2
