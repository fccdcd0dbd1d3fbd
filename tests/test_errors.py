"""Hints name what is near, and lack of memory is told from other errors."""

import pytest

from unpad.errors import LONGEST_LINE, OutOfMemoryError, RecipeError, is_memory_error, needs_memory


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (MemoryError(), True), (RuntimeError("[x] can't allocate memory: 9 bytes"), True),
        (RuntimeError("CUDA out of memory."), True), (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("not enough memory: you tried"), True),
        (RuntimeError("Storage size calculation overflowed"), True),
        (RuntimeError("multiplication overflow in size"), True), (RuntimeError("shapes differ"), False),
        (ValueError("out of memory"), False), (RuntimeError("could not create a primitive"), True),
        (RuntimeError("could not create a primitive descriptor for the matmul"), False),
        (ImportError("libarrow.so: failed to map segment from shared object"), True),
        (ImportError("No module named 'optuna'"), False),
    ],
)  # fmt: skip
def test_an_error_of_memory_is_told_by_its_message(error, is_memory):
    assert is_memory_error(error) == is_memory
    with pytest.raises(OutOfMemoryError if is_memory else type(error)), needs_memory("the model", "lower model.width"):
        raise error


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (MemoryError(), "MemoryError"), (MemoryError("\nmore"), "MemoryError"), (MemoryError("full\nmore"), "full"),
        (RuntimeError("bad_alloc" + "x" * 300), "bad_alloc" + "x" * 191),
    ],
)  # fmt: skip
def test_what_does_not_fit_says_why_on_one_line_and_what_to_lower(error, reason):
    with pytest.raises(OutOfMemoryError) as caught, needs_memory("the model", "lower model.width"):
        raise error
    assert caught.value.what == f"the model does not fit into memory: {reason}"
    assert caught.value.fix == "lower model.width"
    assert caught.value.__cause__ is error


@pytest.mark.promise("input.long-lines")
def test_the_middle_of_a_long_line_is_left_out_and_its_ends_stay():
    error = RecipeError(f"no key {'a' * 9000} is known", where="x" * LONGEST_LINE, fix="shorten it")
    what, where, fix = str(error).split("\n")
    assert len(what) <= LONGEST_LINE
    assert what.startswith("RecipeError: no key aaa")
    assert what.endswith("aaa is known")
    assert " … " in where
    assert fix == "  do: shorten it"
