"""External loggers of a run's curves, Weights & Biases and MLflow, in addition to the run's own files.

Each logger has its own thread, so a slow or silent server delays no step, and an error in its library ends only the
logger. A run keeps its id with each logger, and a resumed run continues with the same ids.
"""

import json
import logging
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from queue import Full, Queue
from secrets import token_hex
from threading import Lock, Thread
from typing import Any, Protocol

from unpad.errors import RecipeError, UnpadError
from unpad.recipes.training import LogSettings
from unpad.storage import write_atomic

LOGGERS = "loggers.json"  # of a run: its id with each logger
MOST_WAITING = 10_000  # largest lag of a logger in steps; further steps are dropped
CLOSE_SECONDS = 30.0  # time that the end of a run waits for a logger
_keeping = Lock()  # of the file of ids


@dataclass(frozen=True)
class Opening:
    """Facts about a run for the start of a logger.

    Args:
        name: name of the run directory.
        id: the run's id with this logger; None for a new one.
        config: the recipe, as JSON values.
    """

    project: str
    name: str
    folder: Path
    id: str | None
    config: dict[str, Any]


class Logger(Protocol):
    """A receiver of scalars. Its methods are called in one thread, and may raise anything."""

    def open(self, opening: Opening) -> str:
        """Begin or continue a run, and return its id."""

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Log the values of a step, by names such as train/loss."""

    def close(self, finished: bool) -> None:
        """Send the rest, and report whether the run has finished or was stopped."""


class Wandb:
    """Weights & Biases. WANDB_MODE=offline writes only to the run directory, for a later `wandb sync`."""

    def open(self, opening: Opening) -> str:
        import wandb

        id = opening.id or token_hex(4)
        self._run = wandb.init(
            project=opening.project, name=opening.name, id=id, resume="allow", config=opening.config,
            dir=opening.folder,
            settings=wandb.Settings(console="off", disable_git=True, save_code=False, silent=True),
        )  # fmt: skip
        return id

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self, finished: bool) -> None:
        self._run.finish(exit_code=0 if finished else 1)


class Mlflow:
    """MLflow, on the server or in the database at MLFLOW_TRACKING_URI; without it, in a file of the run."""

    def open(self, opening: Opening) -> str:
        import mlflow
        from mlflow.entities import Metric, Param

        self._metric, self._newest = Metric, dict[str, int]()
        logging.getLogger("mlflow").setLevel(logging.WARNING)  # its log lines about tables would interrupt the bar
        uri = None if mlflow.is_tracking_uri_set() else f"sqlite:///{(opening.folder / 'mlflow.db').absolute()}"
        self._client = mlflow.MlflowClient(uri)
        self._resumed = opening.id is not None
        if opening.id is not None:
            self._id = opening.id
            self._client.update_run(self._id, status="RUNNING")
            return self._id
        known = self._client.get_experiment_by_name(opening.project)
        experiment = known.experiment_id if known else self._client.create_experiment(opening.project)
        self._id = self._client.create_run(experiment, run_name=opening.name).info.run_id
        fields = [Param(re.sub(r"[^\w. /-]", "_", key), text[:500]) for key, text in _flat(opening.config).items()]
        for first in range(0, len(fields), 100):  # more at once are refused
            self._client.log_batch(self._id, params=fields[first : first + 100])
        return self._id

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        # Steps that a resumed run repeats are already logged, with equal losses.
        fresh = [name for name in values if not self._resumed or step > self._newest_step(name)]
        if fresh:
            self._client.log_batch(self._id, metrics=[self._metric(name, values[name], now, step) for name in fresh])

    def _newest_step(self, name: str) -> int:
        if name not in self._newest:
            history = self._client.get_metric_history(self._id, name)
            self._newest[name] = max((metric.step for metric in history), default=-1)
        return self._newest[name]

    def close(self, finished: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if finished else "KILLED")


LIBRARIES: dict[str, Callable[[], Logger]] = {"wandb": Wandb, "mlflow": Mlflow}


def check_loggers(settings: LogSettings) -> None:
    """Refuse a logger that is not installed, before anything is read.

    Raises:
        RecipeError: names the extra.
    """
    for name in settings.to:
        if name in LIBRARIES and find_spec(name) is None:
            fix = f"pip install 'unpad[{name}]', or leave {name} out of log.to"
            raise RecipeError(f"log.to names {name}, which is not installed", where="log.to", fix=fix)


class Worker:
    """A logger in a thread of its own; a failure ends only the logger, with one message.

    Args:
        warn: called once, in the caller's thread, with what failed or was left out.
    """

    def __init__(self, name: str, opening: Opening, warn: Callable[[str], None]) -> None:
        self._name, self._opening, self._warn = name, opening, warn
        self._queue: Queue[Callable[[Logger], None] | None] = Queue(MOST_WAITING)
        self._fault, self._told, self._finished = "", False, False
        # A daemon: a server that never answers does not keep the program from ending.
        self._thread = Thread(target=self._work, name=f"unpad-{name}", daemon=True)
        self._thread.start()

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Hand the values of a step over; returns at once."""
        self._put(lambda logger: logger.scalars(values, step))

    def close(self, finished: bool) -> None:
        """End the logger, and wait for it a while."""
        self._finished = finished
        self._put(None)
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive() and not self._fault:
            self._fault = f"it did not end within {CLOSE_SECONDS:.0f} s"
        self._tell()

    def _put(self, work: Callable[[Logger], None] | None) -> None:
        if not self._fault:
            try:
                self._queue.put_nowait(work)
            except Full:
                self._fault = f"it is {MOST_WAITING:,} steps behind"
        self._tell()

    def _tell(self) -> None:
        if self._fault and not self._told:
            self._told = True
            self._warn(f"nothing more goes to {self._name}: {self._fault}; the run's own files have everything")

    def _work(self) -> None:
        try:
            logger = LIBRARIES[self._name]()
            _keep_id(self._opening.folder, self._name, logger.open(self._opening))
            while (work := self._queue.get()) is not None:
                work(logger)
                if self._fault:
                    return
            logger.close(self._finished)
        except BaseException as error:  # SystemExit of a login that was declined, too
            lines = (error.what if isinstance(error, UnpadError) else str(error)).strip().splitlines()
            self._fault = f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def open_loggers(
    settings: LogSettings, folder: Path, config: dict[str, Any], warn: Callable[[str], None]
) -> list[Worker]:
    """Start the loggers that a recipe names besides TensorBoard, with the ids in the run directory."""
    known = _known_ids(folder)
    names = [name for name in dict.fromkeys(settings.to) if name in LIBRARIES]
    return [
        Worker(name, Opening(settings.project, folder.absolute().name, folder, known.get(name), config), warn)
        for name in names
    ]


def _known_ids(folder: Path) -> dict[str, str]:
    try:
        ids = json.loads((folder / LOGGERS).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # a new run, or an unreadable file: new ids
        return {}
    return {name: id for name, id in ids.items() if isinstance(id, str)} if isinstance(ids, dict) else {}


def _keep_id(folder: Path, name: str, id: str) -> None:
    with _keeping:
        known = _known_ids(folder)
        if known.get(name) != id:
            write_atomic(folder / LOGGERS, json.dumps({**known, name: id}) + "\n")


def _flat(value: Any, prefix: str = "") -> dict[str, str]:
    """Fields of a recipe by dotted keys, as text."""
    if isinstance(value, dict) and value:
        parts = (_flat(item, f"{prefix}.{key}" if prefix else str(key)) for key, item in value.items())
        return {key: text for part in parts for key, text in part.items()}
    return {prefix: json.dumps(value, ensure_ascii=False)}
