"""The kernels under AddressSanitizer and UndefinedBehaviorSanitizer, called from driver.cpp without Python or torch.

ASan reports a pointer that leads nowhere by itself, so the checks of UBSan that repeat it are left out: they double the
time.
"""

import os
import shutil
import subprocess

import pytest

from tests.helpers.driver import build_driver
from tests.helpers.paths import needs_kernels
from tests.helpers.targets import has
from unpad.nn.native import library

REPEATED = "-fno-sanitize=null,object-size,pointer-overflow"
SANITIZERS = ["-fsanitize=address,undefined", REPEATED, "-fno-sanitize-recover=all"]
ONE = "avx512" if has("avx512") else "plain"  # target that `make test` looks at
FLAGS = ["-std=c++17", "-g1", "-Og", "-fopenmp", "-Wno-psabi", *SANITIZERS]


@pytest.mark.promise("speed.bounds")
@needs_kernels
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
@pytest.mark.parametrize("target", [ONE, pytest.param(None, marks=pytest.mark.nightly, id="every target")])
def test_no_kernel_leaves_its_arrays(target, tmp_path):
    driver = build_driver(tmp_path, "g++", FLAGS, target=target)
    # The pool of threads of libgomp, and the buffers that its threads keep, live until the process ends: no leaks.
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE", "ASAN_OPTIONS": "detect_leaks=0"}
    run = subprocess.run([driver], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    kinds = run.stdout.splitlines()
    assert f"{target or library.target()}, float" in kinds
    tiles = sum(line.endswith("tiles") for line in kinds)
    assert tiles == (0 if target else has(library.PLAIN_TILES) + has("avx512_amx"))
    assert run.stdout.count("ok ") == 9 * sum(line.endswith(("float", "bf16")) for line in kinds) + 4 * tiles
