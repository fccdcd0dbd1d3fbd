"""Ctrl-C and SIGTERM: the first waits for the end of the step, a second acts at once."""

import signal
from pathlib import Path

import pytest

from unpad.errors import Interrupted, Terminated
from unpad.training.context import Signals


@pytest.mark.parametrize(
    ("number", "kind", "name", "second"),
    [
        (signal.SIGINT, Interrupted, "Ctrl-C", signal.default_int_handler),
        (signal.SIGTERM, Terminated, "SIGTERM", signal.SIG_DFL),
    ],
)
def test_a_first_signal_is_noted_and_named_and_a_second_one_is_the_systems(number, kind, name, second):
    signals, numbers = Signals(), (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(one) for one in numbers]
    with signals.listen():
        signals.raise_if_received(Path("run"))
        signal.raise_signal(number)
        assert signals.received == number
        handlers = {one: signal.getsignal(one) for one in numbers}
        assert handlers.pop(number) is second
        assert set(handlers.values()).isdisjoint({second, *before})
        with pytest.raises(kind, match=name) as caught:
            signals.raise_if_received(Path("run"))
    assert (type(caught.value), caught.value.where) == (kind, "run")
    assert [signal.getsignal(one) for one in numbers] == before
