"""One server of a tiny run of conversations for all tests of this folder."""

from collections.abc import Iterator

import pytest

from tests.helpers.families import Finished
from tests.helpers.serving import Running, running


@pytest.fixture(scope="session")
def chats(finished: Finished) -> Iterator[Running]:
    """A server of conversations, at an address of its own."""
    with running(finished("conversations").run, name="demo") as made:
        yield made
