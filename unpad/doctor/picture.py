"""The sweep of learning rates as an SVG file."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from unpad.doctor.trials.sweep import LOWEST, Sweep
from unpad.doctor.words import Language, word
from unpad.run.report.svg import WIDE, Axes, Curve, picture
from unpad.storage import write_atomic

HIGHEST_DRAWN = 1.5  # of the first loss: what diverges would press the rest flat


def write_picture(path: Path, sweep: Sweep, rate: float, language: Language) -> None:
    """Draw the loss over the learning rate, with the range and the recipe's own rate.

    Raises:
        DiskError: the file cannot be written.
    """
    shown = sweep.losses <= HIGHEST_DRAWN
    x, y = np.log10(sweep.rates[shown]), sweep.losses[shown]
    marks = [(word("recipe", language, rate=rate), float(np.log10(rate)))]
    if sweep.low is not None and sweep.high is not None:
        marks += [(f"{end:.1e}", float(np.log10(end))) for end in (sweep.low, sweep.high)]
    title = word("sweep", language, steps=len(sweep.rates))
    axes = Axes(size=WIDE, begin=float(np.log10(LOWEST)), powers=True, over=word("rate", language))
    write_atomic(path, picture(title, Curve("main", [(x, y)]), axes, marks))
