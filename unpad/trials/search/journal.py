"""Journal of a search: optuna's study as lines of JSON in its directory (apart: it loads an optional library)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NotRequired

import optuna
from optuna.exceptions import DuplicatedStudyError
from optuna.storages.journal import BaseJournalBackend
from typing_extensions import TypedDict

from unpad.errors import SourceError
from unpad.run.report.history import read_rows
from unpad.storage import LineLog
from unpad.storage.reading import misfit

STUDY = "search"


class Journal(BaseJournalBackend):
    """Records of a study, written like the files of a run: a line truncated by a kill is dropped on opening.

    Only the process with the directory's lock may hold it, so it never needs to be read again.

    Raises:
        SourceError: a line is damaged; DiskError: the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._log = LineLog(path)
        self._rows = list(read_rows(path))

    def read_logs(self, log_number_from: int) -> list[dict[str, Any]]:
        return self._rows[log_number_from:]

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        for record in logs:
            self._log.append(record)
        self._log.sync()
        self._rows += logs

    def close(self) -> None:
        self._log.close()


class _Settings(TypedDict):
    name: str
    fields: list[str]
    metric: str
    recipe: dict[str, Any]


class _Attributes(TypedDict):
    settings: NotRequired[_Settings]


def open_study(journal: Journal) -> optuna.Study:
    """Load the study of a journal, or create one in an empty journal.

    Raises:
        SourceError: the records of the journal do not belong to a search.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    pruner = optuna.pruners.NopPruner()  # the search compares trials itself
    try:
        storage = optuna.storages.JournalStorage(journal)
        begun = optuna.get_all_study_names(storage)  # read first: a request refused later leaves no line
        study = (optuna.load_study if begun else optuna.create_study)(study_name=STUDY, storage=storage, pruner=pruner)
        fault = misfit(study.user_attrs, _Attributes) if begun else ""
    except (LookupError, TypeError, ValueError, AttributeError, AssertionError, DuplicatedStudyError) as error:
        fault = f"{type(error).__name__}: {error}"
    if fault:
        fix = "put the file back from a copy, or begin a search in another --out"
        raise SourceError(
            f"{journal.path.name} is not that of a search: {fault}"[:300], where=str(journal.path), fix=fix
        )
    return study
