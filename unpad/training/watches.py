"""The watches of a stage: the one place that chooses them, by what the model can do."""

from __future__ import annotations

from unpad.models.contract import HasLatent, Model
from unpad.run.timers import Timers
from unpad.training.collapse import CollapseMonitor
from unpad.training.stage import StageSetup
from unpad.training.watch import SavedWatches, Watch


def start_watches(stage: StageSetup, model: Model, saved: SavedWatches, timers: Timers) -> list[Watch]:
    """Start the watches of a stage; the time it takes counts as theirs."""
    watches: list[Watch] = []
    if isinstance(model, HasLatent):
        with timers(CollapseMonitor.subject):
            watches.append(CollapseMonitor.start(stage, model, saved))
    return watches
