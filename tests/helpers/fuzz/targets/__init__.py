"""Readers of outside bytes that the fuzzer tries, by name."""

from importlib import import_module

from tests.helpers.fuzz.target import Builder

MODULES = ("rows", "tables", "pictures", "recipes", "tokens", "stored", "runs", "imported")


def builders() -> dict[str, Builder]:
    """Every target's builder, by the target's name."""
    found: dict[str, Builder] = {}
    for module in MODULES:
        found |= import_module(f"{__name__}.{module}").BUILDERS
    return found
