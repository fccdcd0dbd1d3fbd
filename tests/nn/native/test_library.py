"""Without a compiler, without the instructions or switched off, everything still runs through torch and says so."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.paths import needs_kernels
from tests.helpers.targets import able, has
from tests.helpers.toy import write_toy
from unpad.nn.native import library

ROOT = Path(__file__).parents[3]


@pytest.fixture
def bare_copy(tmp_path: Path) -> Path:
    """The project without anything compiled."""
    shutil.copytree(ROOT / "unpad", tmp_path / "unpad", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    shutil.copy(ROOT / "setup.py", tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copy(ROOT / "README.md", tmp_path)
    return tmp_path


def run(folder: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)


@pytest.mark.nightly
@pytest.mark.promise("speed.no-kernels")
def test_an_installation_without_a_compiler_succeeds_and_trains(bare_copy, monkeypatch):
    monkeypatch.delenv("UNPAD_NATIVE", raising=False)
    missing = {"CC": "/no/compiler", "CXX": "/no/compiler"}
    built = run(bare_copy, sys.executable, "setup.py", "build_ext", "--inplace", **missing)
    assert built.returncode == 0, built.stderr
    assert not list(bare_copy.rglob("*.so"))
    recipe = str(write_toy(bare_copy / "toy"))
    trained = run(bare_copy, sys.executable, "-m", "unpad", "train", recipe, "--out", "run", "train.max_steps=3")
    assert trained.returncode == 0, trained.stderr
    assert "torch kernels (not compiled" in trained.stdout


# A line of each forked child: the library is loaded once in a process.
SWITCHED = """
import os, sys, torch
from unpad.nn.native import library
for asked in sys.argv[1:]:
    if not (child := os.fork()):
        os.environ[library.SWITCH] = asked
        print(library.describe(), library.computes(torch.bfloat16), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


def switched(*asked: str) -> list[str]:
    """The kernels, and whether they compute in bf16, with each value of the switch."""
    return run(ROOT, sys.executable, "-c", SWITCHED, *asked).stdout.splitlines()


@pytest.mark.promise("speed.no-kernels")
def test_the_switch_turns_the_kernels_off():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(library.SWITCH, "0")
        library._load.cache_clear()
        shown = (library.enabled(), library.describe())
    library._load.cache_clear()
    assert shown == (False, "torch kernels (switched off by UNPAD_NATIVE=0)")


def test_where_the_kernels_can_be_compiled_and_run_they_are():
    if sys.platform != "linux" or shutil.which("g++") is None or os.environ.get("UNPAD_NATIVE") == "0":
        pytest.skip("no compiler, or switched off")
    assert library.enabled(), library.describe()


@pytest.mark.promise("speed.instructions")
def test_the_best_target_of_the_processor_is_taken_unless_the_switch_names_another():
    """One that is missing is named, and the one for tests is taken if it is asked for."""
    if not library.enabled():
        pytest.skip("no native kernels here")
    flags = Path("/proc/cpuinfo").read_text()
    needs = {"avx512_amx": "amx_bf16", "avx512_bf16": "avx512_bf16", "avx512": "avx512dq", "avx2": "avx2", "plain": ""}
    found = [target for target, flag in needs.items() if flag in flags]
    assert list(needs) == list(library.TARGETS)
    assert library.PLAIN_TILES not in library.TARGETS
    targets = {"": found[0], "1": found[0], **{name: name for name in found}}
    missing = [target for target in library.TARGETS if not has(target)]
    tiles = [library.PLAIN_TILES] * has(library.PLAIN_TILES)
    assert switched(*targets, *missing, *tiles) == [
        *(f"native kernels ({library.TARGETS[name]}) {name in library.BF16_TARGETS}" for name in targets.values()),
        *(f"torch kernels (this processor has no {library.TARGETS[target]}) False" for target in missing),
        *(f"native kernels ({library.NAMES[target]}) True" for target in tiles),
    ]


# In a process of its own: no other request of it may be refused.
DENIED = """
import ctypes, os, sys, torch
from unpad.nn.native import library
from unpad.training.setup import _kernels

class Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("program", ctypes.c_char_p))

def code(operation, value, yes=0, no=0):
    return operation.to_bytes(2, "little") + bytes([yes, no]) + value.to_bytes(4, "little")

# The system refuses arch_prctl(ARCH_REQ_XCOMP_PERM) from here on.
load, equal, give = 0x20, 0x15, 0x06
program = b"".join([
    code(load, 0), code(equal, 158, no=3), code(load, 16), code(equal, 0x1023, no=1), code(give, 0x50001),
    code(give, 0x7fff0000),
])
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.byref(Filter(len(program) // 8, program))) == 0, os.strerror(ctypes.get_errno())

class Library(ctypes.CDLL):
    \"\"\"Of a processor with tiles.\"\"\"
    def unpad_has_tiles(self):
        return 1

ctypes.CDLL = Library
print(library.describe(), library.target())
print(_kernels(torch.device("cpu"), "fp32", 32))
library._load.cache_clear()
os.environ[library.SWITCH] = "avx512_amx"
print(library.describe())
library._load.cache_clear()
os.environ[library.SWITCH] = "avx2"
print(library.describe())
"""


@pytest.mark.promise("speed.instructions")
@pytest.mark.skipif(library.TARGETS["plain"] == "NEON", reason="tiles are of x86-64")
@pytest.mark.nightly
def test_where_the_system_denies_tiles_the_next_target_is_taken_and_the_log_says_so():
    if not library.enabled():
        pytest.skip("no native kernels here")
    done = run(ROOT, sys.executable, "-c", DENIED, UNPAD_NATIVE="")
    assert done.returncode == 0, done.stderr
    denied = "the system does not let this process use AMX (arch_prctl)"
    best = next(target for target in able() if target != "avx512_amx")
    taken = f"native kernels ({library.TARGETS[best]}; {denied})"
    assert done.stdout.splitlines() == [
        *(f"{taken} {best}", taken, f"torch kernels ({denied})", f"native kernels ({library.TARGETS['avx2']})")
    ]


def test_the_table_of_kernels_is_the_same_in_all_three_files():
    header, every = (Path(library.__file__).with_name(name).read_text() for name in ("kernels.h", "all.h"))
    declared = re.findall(
        r"^    \w+ \(\*(\w+)\)\(", header.split("struct unpad_kernels {")[1].split("\n};")[0], re.MULTILINE
    )
    filled = re.findall(r"\w+", every.split("unpad_kernels table = {")[1].split("}")[0])
    assert len(declared) >= 9
    assert declared == filled == [name for name, _ in library._Table._fields_]
    assert f"#define UNPAD_INTERFACE {library.INTERFACE}\n" in header


@pytest.mark.nightly
@pytest.mark.promise("speed.instructions")
@pytest.mark.skipif(shutil.which("g++") is None or shutil.which("nm") is None, reason="no g++ or no nm")
def test_no_function_compiled_for_a_target_is_shared_with_the_others(tmp_path):
    """The linker keeps one of several weak functions of a name, and a processor with less would run it."""
    source, compiled = Path(library.__file__).parent / "target_avx2.cpp", tmp_path / "target.o"
    subprocess.run(
        ["g++", "-std=c++17", "-O1", "-fopenmp", "-fno-math-errno", "-w", "-c", str(source), "-o", str(compiled)],
        check=True,
    )
    symbols = subprocess.run(["nm", "-C", str(compiled)], capture_output=True, text=True, check=True).stdout
    assert not [line for line in symbols.splitlines() if " W " in line or " u " in line]


def test_a_switch_that_names_no_target_is_refused(unpad, monkeypatch):
    monkeypatch.setenv(library.SWITCH, "avx3")
    library._load.cache_clear()
    try:
        failed = unpad("train", "zh_chat")
    finally:
        monkeypatch.undo()
        library._load.cache_clear()
    assert failed.code == 2
    assert "or set it to 0 for none or to a target: avx512_amx, avx512_bf16" in failed.err


@needs_kernels
def test_one_openmp_runtime_serves_torch_and_the_kernels():
    assert len(library._openmp_runtimes()) == 1


@pytest.mark.promise("speed.no-kernels")
def test_a_second_openmp_runtime_turns_the_kernels_off(monkeypatch):
    if not library.enabled():
        pytest.skip("no native kernels here")
    monkeypatch.setattr(library, "_openmp_runtimes", lambda: {"/a/libgomp.so.1", "/b/libiomp5.so"})
    library._load.cache_clear()
    try:
        assert not library.enabled()
        assert "two OpenMP runtimes" in library.describe()
    finally:
        monkeypatch.undo()
        library._load.cache_clear()
        assert library.enabled()


@pytest.mark.promise("speed.no-kernels")
def test_a_processor_without_the_instructions_takes_torch(monkeypatch):
    if not library.enabled():
        pytest.skip("no native kernels here")

    class Targets:
        """A library whose processor can run no target."""

        restype = None

        def __call__(self, target: bytes) -> None:
            return None

    class Other:
        def __init__(self, interface: int) -> None:
            self.unpad_interface = lambda: interface
            self.unpad_kernels_for = Targets()
            self.unpad_has_tiles = lambda: False

    try:
        monkeypatch.setenv(library.SWITCH, "avx512")
        for interface, reason in ((library.INTERFACE, "this processor has no AVX-512"), (0, "compiled from other")):
            monkeypatch.setattr(library.ctypes, "CDLL", lambda _, i=interface: Other(i))
            library._load.cache_clear()
            assert library.describe().startswith(f"torch kernels ({reason}")
    finally:
        monkeypatch.undo()
        library._load.cache_clear()
