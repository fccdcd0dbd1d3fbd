"""Every command that a page shows on a line of its own ends well, with small stand-ins for the user's files."""

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "docs" / "commands.py"


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_every_command_of_the_pages_runs():
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_commands_of_the_pages_are_found_once_and_shortened():
    script: dict[str, Any] = runpy.run_path(str(SCRIPT))
    shown = list(script["commands"]([]))
    assert len(shown) == len(set(shown)) > 100
    assert script["words_of"]("unpad replay mine --step 120") == ["replay", "mine", "--step", "2"]
    assert "train.max_steps=2" in script["words_of"]("unpad train events")
