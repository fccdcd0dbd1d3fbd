"""A lower set of instructions is set before torch is loaded, and believed only when it was seen."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
AVX512, ONLY_AVX2 = {"avx2", "fma", "avx512f"}, {"avx2", "fma"}
SAYS_AVX2, SAYS_AVX512 = "Intel(R) AVX2 enabled processors", "Intel(R) AVX-512 with support for BF16"


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    module = importlib.import_module("forced")
    for variable in module.VARIABLES["avx2"]:
        monkeypatch.delenv(variable, raising=False)
    yield module
    sys.modules.pop("forced", None)


@pytest.mark.parametrize("arguments", [["W1", "--force", "avx2"], ["--force=avx2", "W1"]])
def test_every_library_is_told(forced: Any, monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    with pytest.raises(AssertionError, match="torch has read"):
        forced.force(arguments)
    monkeypatch.delitem(sys.modules, "torch")
    for variable in forced.VARIABLES["avx2"]:
        monkeypatch.setenv(variable, "")  # restored at the end
    forced.force(["W1"])
    assert os.environ["UNPAD_NATIVE"] == ""
    forced.force(arguments)
    told = {"UNPAD_NATIVE": "avx2", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
    told["ONEDNN_MAX_CPU_ISA"] = "AVX2"
    assert {name: os.environ[name] for name in told} == told
    with forced.unforced("avx2"):
        assert not told.keys() & os.environ.keys()
    assert {name: os.environ[name] for name in told} == told


def _found(forced: Any, *rates: float, torch: str = "AVX2", native: str | None = "avx2", says: Any = None) -> Any:
    return forced.Found(list(rates), torch, native, says)


def test_a_product_that_is_clearly_slower_shows_the_effect(forced: Any) -> None:
    seen = forced.check("avx2", AVX512, _found(forced, 5, 5, 9), _found(forced, 10, 10, 10))
    assert seen == "a product in fp32 runs at 0.50 of its speed without force"


def test_without_an_effect_nothing_is_measured(forced: Any) -> None:
    free = _found(forced, 10, 10, 10)
    for says in (None, SAYS_AVX512):
        with pytest.raises(SystemExit, match=r"took no effect: .* at 0\.90 of its speed"):
            forced.check("avx2", AVX512, _found(forced, 9, 9, 9, says=says), free)
    for fields in ({"torch": "AVX512"}, {"native": "avx512"}):
        with pytest.raises(SystemExit, match="took no effect: torch's kernels"):
            forced.check("avx2", AVX512, _found(forced, 5, 5, 5, **fields), free)
    with pytest.raises(SystemExit, match="no AVX2"):
        forced.check("avx2", {"sse4_2"}, _found(forced, 5), _found(forced, 10))


def test_a_processor_that_multiplies_no_faster_with_more_is_believed_by_the_librarys_word(forced: Any) -> None:
    seen = forced.check("avx2", AVX512, _found(forced, 9, says=SAYS_AVX2), _found(forced, 10))
    assert seen.endswith("0.90 of its speed without force; the library of matrix products says that it takes AVX2")
    assert forced.check("avx2", ONLY_AVX2, _found(forced, 10), _found(forced, 10)) == "the processor has no AVX-512"
