"""Examples of an evaluation, a row each, with the numbers that its metrics are computed from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from unpad.data.family import Data
from unpad.evaluation.metrics import Metric, measured, ratio, ratio_of
from unpad.storage.parquet import write_parquet, write_table

Columns = dict[str, np.ndarray]  # (num_rows,) each; a number that a row lacks is nan, anything else None
LINES = ".jsonl"
ID, WHERE, KIND, GROUP, PART = "id", "where", "kind", "group", "part"
LANDMARK = "landmark"  # beside the id, of a patient that may have several


class Ratio(NamedTuple):
    """A metric that is the sum of one column over that of another, over the rows that have both.

    Args:
        num: column of the numbers that are summed; None counts every row once.
        kind: of the rows, in data of several kinds; None for all.
        scale: of the result.
        share: as that of `metrics.measured`.
    """

    total: str
    num: str | None = None
    kind: str | None = None
    scale: float = 1.0
    share: bool = False

    def has(self, rows: Columns) -> np.ndarray:
        """Rows that count, (num_rows,) bool."""
        has: np.ndarray = np.isfinite(rows[self.total].astype(np.float64)) & (self.counts(rows) > 0)
        return has if self.kind is None else has & (rows[KIND] == self.kind)

    def counts(self, rows: Columns) -> np.ndarray:
        """The numbers that are summed, (num_rows,)."""
        total = rows[self.total]
        return np.ones(len(total)) if self.num is None else rows[self.num].astype(np.float64)

    def of(self, rows: Columns, weights: np.ndarray | None = None) -> np.ndarray:
        """The metric of rows that count, with weights as those of `metrics.ratio`."""
        return self.scale * ratio(rows[self.total], self.counts(rows), weights)

    def metric(self, rows: Columns) -> Metric:
        """The metric of rows that count."""
        return ratio_of(rows[self.total], self.counts(rows), rows[GROUP], scale=self.scale, share=self.share)


class Ranked(NamedTuple):
    """A metric of all rows together that have a column, groups of which are independent of each other.

    Args:
        needs: columns of which a row has any; those that have the first are counted.
        of: takes the columns, and weights as those of `metrics.ratio`.
        finish: takes the metric and the columns, and returns it with the reason where it does not exist, or with exact
            limits; None leaves it as it is.
        positive, share: as those of `metrics.measured`.
    """

    needs: tuple[str, ...]
    of: Callable[[Columns, np.ndarray | None], np.ndarray]
    finish: Callable[[Metric, Columns], Metric] | None = None
    positive: bool = False
    share: bool = False

    def has(self, rows: Columns) -> np.ndarray:
        """Rows that count, (num_rows,) bool."""
        return np.any([having(rows, name) for name in self.needs if name in rows], 0)

    def metric(self, rows: Columns) -> Metric:
        """The metric of rows that count."""
        of_rows, groups = partial(self.of, rows), rows[GROUP]
        counted = having(rows, self.needs[0])
        how = {"positive": self.positive, "share": self.share}
        metric = measured(of_rows, len(groups), groups, counted=counted, **how)
        return metric if self.finish is None else self.finish(metric, rows)


Measures = dict[str, Ratio | Ranked]  # by name


@dataclass(frozen=True, eq=False)
class ExampleRows:
    """Rows of an evaluation.

    Args:
        columns: those of `named` first; the first of all names the row.
    """

    columns: Columns
    measures: Measures = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.columns[GROUP])

    def metrics(self) -> dict[str, Metric]:
        """The measures of the rows that have them, with intervals over groups; those that no row has are left out."""
        metrics: dict[str, Metric] = {}
        for name, measure in self.measures.items():
            mine = self.only(measure.has(self.columns))
            if len(mine):
                metrics[name] = measure.metric(mine.columns)
        return metrics

    def only(self, chosen: np.ndarray) -> "ExampleRows":
        """Some of the rows, by a mask or by their numbers."""
        return replace(self, columns={name: column[chosen] for name, column in self.columns.items()})

    def of_part(self, part: str) -> "ExampleRows":
        """The same rows, with the name of the part in those that name none."""
        named = [part if one is None else one for one in self.columns[PART]]
        return replace(self, columns=self.columns | {PART: objects(named)})


@dataclass(frozen=True)
class Evaluation:
    """Result of `evaluate` of a family.

    Args:
        lines: examples, as text.
        metrics: those of the part that was measured have no `part`, which `evaluate_run` fills in.
        drawn: `evaluation.json` for the run's page; None leaves the run as it is.
        rows: the rows that were measured; None for a family without them.
        facts: of new data what sets it apart from the training data, for programs, by name.
        simple: of a metric that a simple method has: its name, the difference, and a sentence that judges by it.
    """

    metrics: dict[str, Metric]
    lines: list[str]
    drawn: dict[str, object] | None = None
    rows: ExampleRows | None = None
    facts: dict[str, object] = field(default_factory=dict)
    simple: dict[str, dict[str, Any]] = field(default_factory=dict)

    def to_json(self) -> dict[str, dict[str, Any]]:
        """Values of the metrics, by name."""
        return {name: metric.to_json() | self.simple.get(name, {}) for name, metric in self.metrics.items()}


def having(rows: Columns, name: str) -> np.ndarray:
    """Rows with a value in a column of objects, (num_rows,) bool."""
    return np.array([value is not None for value in rows[name]], np.bool_)


def objects(values: Sequence[object]) -> np.ndarray:
    """Values such as texts, (num,) object."""
    column = np.empty(len(values), object)
    column[:] = values
    return column


def placed(data: Data, seq_ids: np.ndarray) -> Columns:
    """First columns of the rows of a family without identities; `where` is the place of a row in its file."""
    return named(data, seq_ids, WHERE, objects([data.where(i) for i in seq_ids.tolist()]))


def named(data: Data, seq_ids: np.ndarray, name: str, values: np.ndarray) -> Columns:
    """First columns of rows: their names, `group`, the number of what intervals are taken over, and `part`.

    Args:
        name: `where` or `id`; values: of the rows, (num_rows,).
    """
    return {name: values, GROUP: data.table.group[seq_ids], PART: objects([None] * len(seq_ids))}


def joined(tables: Sequence[Columns]) -> Columns:
    """Rows of tables one after the other; what a table lacks is missing in its rows."""
    names = list(dict.fromkeys(name for table in tables for name in table))
    columns = {}
    for name in names:
        is_object = any(table[name].dtype == object for table in tables if name in table)
        nothing, dtype = (None, object) if is_object else (np.nan, np.float64)
        parts = [table.get(name, np.full(len(table[GROUP]), nothing, dtype)) for table in tables]
        columns[name] = np.concatenate(parts)
    return columns


# --------------------------------------------------------------------------- files


def write_rows(out: Path, rows: ExampleRows, *, private: bool) -> None:
    """Write rows as parquet, or as JSON lines if the file is named so; an existing file is replaced.

    Args:
        private: whether only the owner may read the file.

    Raises:
        DiskError: it cannot be written.
    """
    import pyarrow as pa

    columns = {name: pa.array(column, from_pandas=True) for name, column in rows.columns.items()}
    counts = {name: column.cast(pa.int64()) for name, column in columns.items() if name.startswith("num_")}
    table = pa.table(columns | counts)  # in numpy a count that some rows lack is a float
    if out.suffix.lower() == LINES:
        write_table(out, table.to_pylist(), private=private)
    else:
        write_parquet(out, table, private=private)
