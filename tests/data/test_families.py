"""What every family of data has, so that no other file needs to know their names."""

from inspect import isfunction

import pytest

from unpad import models
from unpad.data.family import Family, check_near_duplicates, family_of
from unpad.data.images import ImageData
from unpad.data.patients import EventData
from unpad.data.text import TextData
from unpad.data.tokens.tokenizer import TOKENIZER
from unpad.data.vqa import VqaData
from unpad.errors import RecipeError
from unpad.recipes.data import KINDS, DataSettings
from unpad.recipes.recipe import Recipe

MODELS = models.model_kinds()


def family(kind: str) -> Family:
    return family_of(Recipe(model={"kind": kind}))


def test_every_kind_of_data_is_read_by_one_family():
    assert sorted(kind for one in {family(kind) for kind in MODELS} for kind in one.KINDS) == sorted(KINDS)


@pytest.mark.parametrize("kind", MODELS)
def test_a_family_says_what_its_runs_are_used_with(kind):
    own = family(kind)
    assert all(unit.endswith("s") for unit in own.UNITS)
    assert len(own.UNITS) == 2
    assert own.next_command(Recipe(), "mine-1").startswith("unpad ")
    assert " mine-1" in own.next_command(Recipe(), "mine-1")
    assert (own.NO_TEXT is None) == (TOKENIZER in own.FILES)
    if own.NO_TEXT is not None:
        what, fix = own.NO_TEXT
        assert what.endswith("writes no text")
        assert " mine-1" in fix.format(run="mine-1")


@pytest.mark.parametrize("kind", MODELS)
def test_a_family_has_every_member_that_its_interface_names(kind):
    members = {*Family.__annotations__, *(name for name, value in vars(Family).items() if isfunction(value))}
    assert {"KINDS", "open_data"} <= members
    assert {name for name in members if not name.startswith("_")} <= set(vars(family(kind)))


@pytest.mark.parametrize("rule", ["together", "refuse"])
def test_a_rule_for_near_duplicates_that_nothing_follows_is_refused(rule):
    recipe = Recipe(data=DataSettings(near_duplicates=rule))
    for data in (TextData, ImageData, VqaData):
        check_near_duplicates(recipe, data)
    with pytest.raises(RecipeError, match=f"{rule} does not apply: .* not in patients") as refused:
        check_near_duplicates(recipe, EventData)
    assert "leave data.near_duplicates at report" in refused.value.fix
    check_near_duplicates(Recipe(), EventData)
    old = Recipe(data=DataSettings(near_duplicates=rule, split_version=1))
    if rule == "together":
        with pytest.raises(RecipeError, match="split_version=1"):
            check_near_duplicates(old, TextData)
    else:
        check_near_duplicates(old, TextData)
