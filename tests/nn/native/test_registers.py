"""Kernels in float compute in whole registers of their target, and use no register that its processors lack."""

import re
import shutil
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from unpad.nn.native import library

WIDEST = {"plain": "xmm", "avx2": "ymm"} | dict.fromkeys(("avx512", "avx512_bf16", "avx512_amx"), "zmm")
ARITHMETIC = re.compile(r"v?(?:add|sub|mul|div|max|min|fn?m(?:add|sub)\d+)ps")  # of whole registers of floats


def functions(file: Path) -> Iterator[tuple[int, str]]:
    """Address and source file of each function that no other file can call."""
    source = ""
    for line in printed("readelf", "--syms", "--wide", str(file)):
        match line.split():
            case [_, _, _, "FILE", _, _, _, source]:
                pass
            case [_, address, _, "FUNC", "LOCAL", *_]:
                yield int(address, 16), source


def registers(file: Path) -> dict[str, Counter[str]]:
    """The widest registers of instructions by target: `ymm` counts all, `ymm ps` arithmetic of floats."""
    source, found, owner = "", defaultdict[str, Counter[str]](Counter), dict(functions(file))
    for line in printed("objdump", "--disassemble", "--no-show-raw-insn", str(file)):
        if begins := re.match(r"([0-9a-f]+) <.*>:", line):
            source = owner.get(int(begins[1], 16), "")
        elif source.startswith("target_") and (code := re.match(r"\s+[0-9a-f]+:\s+(\w+)\s+(.*%[xyz]mm.*)", line)):
            target, widest = source.removeprefix("target_").removesuffix(".cpp"), max(re.findall("[xyz]mm", code[2]))
            found[target][widest] += 1
            found[target][f"{widest} ps"] += bool(ARITHMETIC.fullmatch(code[1]))
    return found


def printed(*command: str) -> list[str]:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.mark.skipif(shutil.which("objdump") is None or shutil.which("readelf") is None, reason="no objdump or readelf")
def test_float_kernels_of_every_target_use_its_whole_registers_and_none_that_it_lacks():
    if library.TARGETS["plain"] == "NEON" or not library.file().exists():
        pytest.skip("not compiled, or not for x86-64")
    found = registers(library.file())
    if not found:
        pytest.skip("the library was stripped of the names of its functions")
    assert found.keys() == WIDEST.keys()
    for target, counts in found.items():
        whole = counts[f"{WIDEST[target]} ps"]
        others = sum(counts[f"{width} ps"] for width in ("xmm", "ymm", "zmm")) - whole
        assert whole > 300, (target, counts)
        assert whole > 10 * others, (target, counts)
        assert not [width for width in counts if width[:3] > WIDEST[target]], (target, counts)
