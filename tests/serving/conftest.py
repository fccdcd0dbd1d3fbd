"""One server of a tiny run of conversations for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.helpers.families import Finished
    from tests.helpers.serving import Running


@pytest.fixture(scope="session")
def chats(finished: Finished) -> Iterator[Running]:
    """A server of conversations, at an address of its own."""
    from tests.helpers.serving import running

    with running(finished("conversations").run, name="demo") as made:
        yield made
