"""External loggers of a run's curves, Weights & Biases and MLflow, in addition to the run's own files.

An error in a library ends only its logger. A run keeps its id with each, and a resumed run continues with the same ids.
"""

import json
import logging
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from secrets import token_hex
from typing import Any

from unpad.errors import RecipeError, UnpadError
from unpad.recipes.training import LogSettings
from unpad.storage import write_atomic
from unpad.storage.strict_json import json_object

LOGGERS = "loggers.json"  # of a run: its id with each logger


class Wandb:
    """Weights & Biases. WANDB_MODE=offline writes only to the run directory, for a later `wandb sync`."""

    def open(self, project: str, folder: Path, id: str | None, config: dict[str, Any]) -> str:
        """Begin a run, or continue that of an id, and return its id; `config` is the recipe, as JSON values."""
        import wandb

        id, quiet = id or token_hex(4), {"console": "off", "disable_git": True, "save_code": False, "silent": True}
        settings = wandb.Settings(**quiet)
        self._run = wandb.init(
            project=project, name=folder.name, id=id, resume="allow", config=config, dir=folder, settings=settings
        )
        return id

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Log the values of a step, by names such as train/loss."""
        self._run.log(dict(values), step=step)

    def close(self, finished: bool) -> None:
        """Send the rest, and report whether the run has finished or was stopped."""
        self._run.finish(exit_code=0 if finished else 1)


class Mlflow:
    """The same for MLflow, at MLFLOW_TRACKING_URI; without it, in a file of the run."""

    def open(self, project: str, folder: Path, id: str | None, config: dict[str, Any]) -> str:
        import mlflow

        self._mlflow = mlflow
        logging.getLogger("mlflow").setLevel(logging.WARNING)  # its log lines about tables would interrupt the bar
        if not mlflow.is_tracking_uri_set():
            mlflow.set_tracking_uri(f"sqlite:///{folder / 'mlflow.db'}")
        mlflow.set_experiment(project)
        run = mlflow.start_run(id, run_name=folder.name)
        if id is None:
            mlflow.log_params({section: json.dumps(fields, ensure_ascii=False) for section, fields in config.items()})
        return str(run.info.run_id)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        self._mlflow.log_metrics(dict(values), step=step, synchronous=False)

    def close(self, finished: bool) -> None:
        self._mlflow.end_run("FINISHED" if finished else "KILLED")


Logger = Wandb | Mlflow
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


class Sender:
    """A logger that ends with its first failure, of which one message tells.

    Args:
        warn: called with what failed.
    """

    def __init__(self, name: str, begin: Callable[[Logger], None], warn: Callable[[str], None]) -> None:
        self._name, self._warn, self._logger = name, warn, LIBRARIES[name]()
        self._has_ended = False
        self._try(begin)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Send the values of a step; both libraries send them in threads of their own."""
        self._try(lambda logger: logger.scalars(values, step))

    def close(self, finished: bool) -> None:
        """End the logger."""
        self._try(lambda logger: logger.close(finished))
        self._has_ended = True

    def _try(self, work: Callable[[Logger], None]) -> None:
        if self._has_ended:
            return
        try:
            work(self._logger)
        except (Exception, SystemExit) as error:  # the latter of a login that was declined
            lines = (error.what if isinstance(error, UnpadError) else str(error)).strip().splitlines()
            fault = f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
            self._has_ended = True
            self._warn(f"nothing more goes to {self._name}: {fault}; the run's own files have everything")


def open_loggers(
    settings: LogSettings, folder: Path, config: dict[str, Any], warn: Callable[[str], None]
) -> list[Sender]:
    """Start the loggers that a recipe names besides TensorBoard, with the ids in the run directory."""

    def begin(name: str, logger: Logger) -> None:
        path = folder / LOGGERS
        ids = json_object(path.read_bytes()) if path.is_file() else None  # an unreadable file: new ids
        known = {name: id for name, id in (ids or {}).items() if isinstance(id, str)}
        id = logger.open(settings.project, folder.absolute(), known.get(name), config)
        write_atomic(path, json.dumps({**known, name: id}) + "\n")

    names = [name for name in dict.fromkeys(settings.to) if name in LIBRARIES]
    return [Sender(name, partial(begin, name), warn) for name in names]
