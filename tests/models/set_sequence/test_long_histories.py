"""A patient of 20,000 events goes through the model whole, in memory that does not grow with the square."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

CHILD = """
import resource
import sys

import torch

from tests.helpers.patients import BINS, NUM_CODES, random_patients
from unpad.models import build_model, model_config

torch.set_num_threads(1)
model = build_model(model_config({"kind": "set_sequence", "bins": BINS}), NUM_CODES).train()


def update(num_events: int) -> int:
    batch = random_patients([num_events, 3], largest=int(sys.argv[1]))
    with torch.autocast("cpu", torch.bfloat16):
        terms = model.losses(batch)
    torch.stack([terms[name][0] for name in model.weights]).sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


before = update(50)
print(update(20_000) - before)
"""


@pytest.mark.parametrize("largest", [3, 1000])
def test_memory_of_a_patient_of_20000_events(largest: int) -> None:
    """One weight of attention per pair of events would take 1,600 MiB for a single head."""
    run = subprocess.run([sys.executable, "-c", CHILD, str(largest)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) < 1300  # MiB
