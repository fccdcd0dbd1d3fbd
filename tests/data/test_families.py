"""What every family of data has, so that no other file needs to know their names."""

from __future__ import annotations

from types import ModuleType

import pytest

from unpad import models
from unpad.data.family import family_of
from unpad.data.text import TOKENIZER
from unpad.recipes.data import KINDS
from unpad.recipes.recipe import Recipe

MODELS = models.model_kinds()


def family(kind: str) -> ModuleType:
    return family_of(Recipe(model={"kind": kind}))


def test_every_kind_of_data_is_read_by_one_family() -> None:
    families = {family(kind) for kind in MODELS}
    assert sorted(kind for one in families for kind in one.KINDS) == sorted(KINDS)


@pytest.mark.parametrize("kind", MODELS)
def test_a_family_says_what_its_runs_are_used_with(kind: str) -> None:
    own = family(kind)
    assert all(unit.endswith("s") for unit in own.UNITS)
    assert len(own.UNITS) == 2
    assert own.next_command(Recipe(), "mine-1").startswith("unpad ")
    assert " mine-1" in own.next_command(Recipe(), "mine-1")
    if TOKENIZER not in own.FILES:
        what, fix = own.NO_TEXT
        assert what.endswith("writes no text")
        assert " mine-1" in fix.format(run="mine-1")
