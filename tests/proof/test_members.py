"""Protocols of other people's objects hold on every version of Python."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Protocol, runtime_checkable

import pytest
from torch import nn

from unpad.proof.members import HasMembers

SOURCES = Path(__file__).parents[2] / "unpad"


@runtime_checkable
class Embeds(HasMembers, Protocol):
    embed: nn.Module


class Forwarding:
    """An object with the members of another, as a tokenizer or a compiled model."""

    def __init__(self, inner: object) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)


class Broken:
    @property
    def embed(self) -> nn.Module:
        raise AttributeError("the module was never made")


class Derived(Embeds):
    """A class that names the protocol as its base."""


def test_an_object_is_asked_for_its_members() -> None:
    module = nn.Module()
    module.embed = nn.Embedding(3, 2)
    assert isinstance(module, Embeds), "torch keeps a submodule apart"
    assert isinstance(Forwarding(module), Embeds)
    assert not isinstance(nn.Module(), Embeds)
    assert not isinstance(Broken(), Embeds), "the class has the name, the object nothing to read"
    assert not isinstance(module, Derived)
    assert isinstance(Derived(), Derived)


@pytest.mark.parametrize("folder", ["proof", "hf"])
def test_every_protocol_that_is_checked_at_runtime_asks(folder: str) -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in (SOURCES / folder).rglob("*.py"))
    bases = re.findall(r"@runtime_checkable\nclass \w+\((.*)\):", text)
    assert set(bases) == {"HasMembers, Protocol"}
    assert len(bases) == text.count("@runtime_checkable\n")
