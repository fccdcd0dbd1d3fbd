"""The kernels of ARM processors: compiled for them, and run by an emulator of such a processor.

    python -m pytest tests/nn/native/test_neon.py -rs      about half a minute, or why it was skipped

Needs `aarch64-linux-gnu-g++` and `qemu-aarch64` (packages g++-aarch64-linux-gnu and qemu-user of Debian). No Python is
emulated: driver.cpp compares what the kernels give in float with what the same code gives in double.
"""

import os
import shutil
import subprocess

import pytest

from tests.helpers.driver import build_driver

pytestmark = pytest.mark.slow

COMPILER = "aarch64-linux-gnu-g++"
EMULATOR = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
FLAGS = ["-std=c++17", "-O3", "-g0", "-fopenmp", "-fno-math-errno", "-Wno-psabi"]  # of setup.py


@pytest.mark.promise("speed.arm")
@pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"no {COMPILER}: the kernels were not compiled for ARM")
@pytest.mark.skipif(EMULATOR is None, reason="no qemu-aarch64: the kernels were not run on ARM")
def test_every_kernel_in_float_equals_double_on_arm(tmp_path):
    driver = build_driver(tmp_path, COMPILER, FLAGS, ["-static"])  # so that no library of ARM is looked for
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"}
    run = subprocess.run([str(EMULATOR), driver], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert [line for line in run.stdout.splitlines() if line.endswith(("float", "bf16"))] == ["plain, float"]
    assert run.stdout.count("ok ") == 9
