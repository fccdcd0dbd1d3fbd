"""A patient of 20,000 events goes through the model whole, in memory that does not grow with the square."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.nightly

CHILD = """
import os
import resource
import sys

import torch

from tests.helpers.patients import BINS, NUM_CODES, random_patients
from unpad.models import build_model, model_config

torch.set_num_threads(1)
model = build_model(model_config({"kind": "set_sequence", "bins": BINS}), NUM_CODES).train()


def update(num_events: int, largest: int) -> int:
    batch = random_patients([num_events, 3], largest=largest)
    with torch.autocast("cpu", torch.bfloat16):
        terms = model.losses(batch)
    torch.stack([terms[name][0] for name in model.weights]).sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


for largest in map(int, sys.argv[1:]):
    if not (child := os.fork()):  # the peak of a process never falls
        before = update(50, largest)
        print(update(20_000, largest) - before, flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.promise("patients.max-events")
def test_memory_of_a_patient_of_20000_events():
    """One weight of attention per pair of events would take 1,600 MiB for a single head."""
    sets = ("3", "1000")  # the most events of a set
    run = subprocess.run([sys.executable, "-c", CHILD, *sets], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    grown = [int(line) for line in run.stdout.splitlines()]  # MiB
    assert len(grown) == len(sets)
    assert max(grown) < 1300
