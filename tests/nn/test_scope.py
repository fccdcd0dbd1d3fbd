"""`Scope`: a value for the code inside a `with`, of one thread, that torch.compile follows."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from unpad.nn.scope import Scope

SCALE = Scope(1.0)


def scaled(x: Tensor) -> Tensor:
    return x * SCALE.get()


def test_the_value_holds_inside_and_is_restored_also_after_an_error():
    with SCALE.of(2.0):
        with SCALE.of(3.0):
            assert SCALE.get() == 3.0
        assert SCALE.get() == 2.0
        try:
            with SCALE.of(4.0):
                raise KeyError
        except KeyError:
            assert SCALE.get() == 2.0
    assert SCALE.get() == 1.0


def test_another_thread_reads_its_own_value():
    found: list[float] = []
    with SCALE.of(2.0):
        thread = threading.Thread(target=lambda: found.append(SCALE.get()))
        thread.start()
        thread.join()
    assert found == [1.0]


@pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0:RuntimeWarning")  # of torch
def test_compiled_code_follows_the_value():
    graphs: list[Any] = []

    def backend(graph: Any, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph

    compiled, one = torch.compile(scaled, backend=backend), torch.ones(1)
    assert compiled(one).item() == 1.0
    assert len(graphs) == 1  # nothing that cannot be traced
    with SCALE.of(2.0):
        assert compiled(one).item() == 2.0
    with SCALE.of(3.0):
        assert compiled(one).item() == 3.0
    assert compiled(one).item() == 1.0
