"""Monitor of a run in training: progress on the screen, metrics, timing and log files, TensorBoard and the page.

`metrics.jsonl` and `metrics.csv` depend on data and seeds alone, so that a run and the same run killed and resumed
leave equal bytes. Everything that depends on the machine or the clock is in `timing.jsonl` and `log.jsonl`.
"""

import json
import math
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from time import perf_counter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from rich.console import Console

from unpad.errors import DiskError, SourceError
from unpad.recipes.training import LogSettings
from unpad.run.loggers import Sender, open_loggers
from unpad.run.report import history
from unpad.run.screen import RECENT_STEPS, Screen, StepWork
from unpad.run.timers import StepShare
from unpad.storage import LineLog, write_atomic
from unpad.terminal.table import csv_text

if TYPE_CHECKING:
    from unpad.run.board import Board

COLUMNS = (
    *("step", "stage", "kind", "epoch", "loss", "perplexity", "heldout_loss", "lr", "grad_norm", "sequences"),
    *("tokens", "padded_tokens", "targets", "pad_share", "skipped", "best", "rows", "values"),
)
AT_CHANCE = 0.98 * 2 * math.log(2)  # loss of a discriminator
WARNING_STEPS = 100  # at most one gradient norm warning in this number of steps
# An evaluation redraws the page once this many times its own cost has passed, so it takes at most 2 %.
REPORT_PAUSE = 50
SHOWN_ENTRIES = ("early_stop", "nothing_to_do", "resumed", "skipped_step", "stage_skipped", "warning")
SHOWN_ON_TERMINAL = (*SHOWN_ENTRIES, "checkpoint")


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step.

    Args:
        step: 1-based, counted over all stages.
        micros: number of micro-batches of this process.
        tokens: real tokens.
        padded_tokens: computed cells, real tokens included.
        loss: mean negative log-likelihood per target, in nats.
        grad_norm: global L2 norm before clipping.
        terms: the loss terms by name, each a mean.
        weights: of the terms that were trained.
        measures: further numbers of the step, by name.
        skipped: the weights were not changed because the loss or a gradient was not finite.
        rows: digest of its sequences and spans, of `batching.plan.rows_digest`.
    """

    step: int
    stage: str
    epoch: int
    micros: int
    sequences: int
    tokens: int
    padded_tokens: int
    targets: int
    loss: float
    lr: float
    grad_norm: float
    terms: dict[str, float]
    weights: dict[str, float]
    skipped: bool = False
    measures: dict[str, float] = field(default_factory=dict)
    rows: str | None = None


def perplexity(loss: float) -> float:
    """exp(loss); infinite where that overflows."""
    with suppress(OverflowError):
        return math.exp(loss)
    return math.inf


class Monitor:
    """Writer of a run's files and progress; the screen may disappear at any time, the files may not.

    At a step the loop calls `step`, then `evaluation` and `epoch` where they are due, then `sync`, and only then saves
    its checkpoint: the rows that a checkpoint relies on are on the device before it. `log("finished")` comes before
    `close`.

    Args:
        folder: the run directory; it exists.
        log_every: steps between lines without a terminal.
        grad_norm_warning: gradient norm above which a step is marked and a warning is logged.
        total_steps: last step of the whole run, None while unknown.
        verbose: show a line for every step and every log entry.
        share: share of the cores that compute the steps; None where another device does.

    Raises:
        DiskError: a file cannot be opened, or later written.
    """

    def __init__(
        self,
        folder: Path,
        *,
        log_every: int,
        grad_norm_warning: float,
        console: Console,
        total_steps: int | None,
        verbose: bool = False,
        share: StepShare | None = None,
    ) -> None:
        self._share = share
        self.folder = folder
        self._grad_norm_warning = grad_norm_warning
        self._screen = Screen(console, log_every=log_every, total_steps=total_steps, verbose=verbose)
        self._metrics, self._timing = LineLog(folder / history.METRICS), LineLog(folder / history.TIMING)
        self._log = LineLog(history.log_file(folder))
        self._files: list[LineLog | Board] = [self._metrics, self._timing, self._log]  # that are open
        self._board: Board | None = None
        self._has_board = True
        self._purge_step: int | None = None
        self._known: set[tuple[Any, ...]] = set()
        self._forget()
        self._num_large, self._warned_at = 0, -math.inf
        self._seconds, self._waited = 0.0, 0.0  # of this process's steps
        self._peak = 0  # bytes
        self._recent: deque[tuple[float, float]] = deque(maxlen=RECENT_STEPS)  # the newest of them
        self._judged: list[float] = []  # losses of a discriminator since the last look at them
        self._report_due = -math.inf
        self._loggers, self._finished = list[Sender](), False
        self._closed = False
        # It is never flushed, so a power cut may leave zeros anywhere in it.
        self._say_lost(history.log_file(folder).name, self._log.truncate(lambda entry: True, mend=True))

    def _forget(self) -> None:
        self._epoch: tuple[str, int] | None = None  # stage and epoch of the newest step
        self._has_gap = False  # whether rows of the epoch so far are lost
        self._nll, self._targets = 0.0, 0  # of the epoch so far
        self._heldout: dict[str, Any] | None = None  # newest held-out row

    def _say_lost(self, file: str, numbers: list[int]) -> None:
        if numbers:
            lines = ", ".join(map(str, numbers[:5])) + (f" and {len(numbers) - 5} more" if len(numbers) > 5 else "")
            self.log("warning", message=f"{file} was damaged in line {lines}, which is left out")

    def send_to(self, log: LogSettings, config: dict[str, Any]) -> None:
        """Choose the external loggers; without this call only TensorBoard gets the numbers.

        Args:
            config: the recipe, as JSON values.
        """
        self._has_board = "tensorboard" in log.to
        self._loggers = open_loggers(log, self.folder, config, lambda message: self.log("warning", message=message))

    # ----------------------------------------------------------------------- the run's course

    def start(self, message_lines: list[str]) -> None:
        """Show lines about the run, and start the live bar on a terminal."""
        for line in message_lines:
            self._screen.line(line)
        self._screen.start()

    def resume(self, step: int, epoch_steps: int = 0) -> None:
        """Cut metrics, timing and TensorBoard back to the records of steps up to `step`; the log keeps everything.

        A row of exactly `step` that is reported again is not written twice, so it does not matter on which side of the
        checkpoint an evaluation fell. Steps up to `step` without a row are named in a warning, and the mean loss of
        an epoch that lacks some is left out.

        Args:
            epoch_steps: steps done within the epoch that goes on.

        Raises:
            CheckpointError: a line of the metrics before others that are kept is damaged; names file:line.
        """
        self._metrics.truncate(lambda row: None if history.metric_fault(row) else row["step"] <= step)
        # Depends only on the clock.
        lost = self._timing.truncate(lambda row: None if history.timing_fault(row) else row["step"] <= step, mend=True)
        self._say_lost(history.TIMING, lost)
        self._purge_step = step + 1
        self._forget()
        trained = []
        for row in history.load_metrics(self.folder):
            self._absorb(row)
            if row["kind"] == "train":
                trained.append(row["step"])
            if row["step"] == step:
                self._known.add(_identity(row))
        timed = [row["step"] for row in history.read_rows(self.folder / history.TIMING)]
        for file, steps in ((history.METRICS, trained), (history.TIMING, timed)):
            gaps = history.missing_steps(steps, step)
            if gaps:
                self.log("warning", message=history.describe_gaps(file, gaps), step=step, missing=gaps)
            if file == history.METRICS:
                self._has_gap = bool(epoch_steps and gaps and gaps[-1][1] > step - epoch_steps)
        self._write_csv()

    def stage(
        self, name: str, total_steps: int | None, *, exact: bool = True, max_epochs: int | None = None, **fields: Any
    ) -> None:
        """Begin a stage.

        Args:
            total_steps: last step of the whole run, all stages included; `exact` unless it is an estimate.
            max_epochs: epochs of the stage; None if its steps end it.
        """
        self._screen.stage(name, total_steps, exact, max_epochs)
        self.log("stage", name=name, total_steps=total_steps, total_exact=exact, max_epochs=max_epochs, **fields)

    def expect(self, total_steps: int, exact: bool) -> None:
        """Correct the last step of the whole run, when the plan of another epoch is known."""
        self._screen.expect(total_steps, exact)

    def step(
        self,
        record: StepRecord,
        *,
        seconds: float,
        waited: float,
        processor: float,
        memory_bytes: int,
        peak_bytes: int = 0,
    ) -> None:
        """Record one step.

        Args:
            seconds: duration, including the wait for batches, without evaluation and saving.
            waited: seconds spent waiting for batches.
            processor: seconds that the threads of this process worked besides that wait.
            memory_bytes: memory in use after the step.
            peak_bytes: peak memory so far, also within steps; never less than after a step.
        """
        self._peak = max(self._peak, peak_bytes, memory_bytes)
        row = train_row(record)
        self._write(row)
        self._seconds, self._waited = self._seconds + seconds, self._waited + waited
        self._recent.append((seconds, waited))
        per_second = 1 / seconds if seconds > 0 else 0.0
        rates = {"tokens_per_second": record.tokens * per_second, "sequences_per_second": record.sequences * per_second}
        times = {"seconds": seconds, "waited": waited, "waited_share": waited * per_second, **rates}
        times |= {"memory_bytes": memory_bytes, "peak_bytes": self._peak}
        times |= {"processor": processor, "micros": record.micros}
        self._timing.append({"step": record.step, "stage": record.stage, **times})
        names = ("loss", "perplexity", "lr", "grad_norm", "pad_share")
        pairs = {name: record.terms[name] for name in ("accuracy", "margin") if name in record.terms}
        self._curves("train", {name: row[name] for name in names} | rates | record.measures | pairs, record.step)
        large = record.grad_norm > self._grad_norm_warning
        if large:
            self._warn_of_norm(record)
        if "discriminator" in record.terms:
            self._warn_of_chance(record)
        measured = f"ppl {row['perplexity']:.4g}"
        if "preference" in record.terms:
            measured = f"accuracy {record.terms['accuracy']:.1%}  margin {record.terms['margin']:.3f}"
        numbers = f"loss {record.loss:.3f}  {measured}  lr {record.lr:.1e}  grad {record.grad_norm:.2f}"
        recent_seconds, recent_waited = (sum(column) for column in zip(*self._recent, strict=True))
        usage = f"pad {row['pad_share']:.1%}  wait {recent_waited / max(recent_seconds, 1e-9):.1%}"
        is_known = self._peak > 0  # Windows does not tell
        usage += f"  mem {memory_bytes / 1e9:.2f} GB, peak {self._peak / 1e9:.2f}" if is_known else "  mem unknown"
        usage += "  skipped" if record.skipped else ""
        if self._screen.verbose:
            cells = f"tokens {record.tokens}/{record.padded_tokens}  targets {record.targets}"
            usage += f"  micros {record.micros}  {cells}"
        numbers += "!" if large else ""
        work = StepWork(seconds, record.tokens, record.sequences)
        self._screen.step(record.step, record.stage, record.epoch, numbers, usage, work)
        changed = None if self._share is None else self._share.step(seconds - waited, processor)
        if changed is not None:
            self.notice("cores", message=changed, step=record.step)

    @property
    def verbose(self) -> bool:
        """True if lines of detail are shown."""
        return self._screen.verbose

    def detail(self, lines: list[str]) -> None:
        """Show lines of detail under a step; only with `verbose`."""
        for line in lines if self.verbose else []:
            self._screen.line(f"  {line}")

    @property
    def waited_share(self) -> float:
        """Share of the time of this process's steps in which they waited for their batches; 0 before the first."""
        return self._waited / self._seconds if self._seconds > 0 else 0.0

    def evaluation(
        self,
        step: int,
        stage: str,
        values: dict[str, float],
        num_targets: int,
        best: bool,
        refused: Mapping[str, str] = MappingProxyType({}),
        mode: str = "",
    ) -> None:
        """Record a held-out evaluation.

        Args:
            values: "loss" (nats per target) and other measures.
            refused: measures that this data does not allow -> the reason; their values are null.
            mode: in which its loss is another quantity than that of training; shown beside it.
        """
        values = {name: float(value) for name, value in values.items()}
        epoch, loss = self._epoch_of(stage), values.pop("loss", None)
        measures = {**values, **dict.fromkeys(refused)}
        row = _row("eval", step, stage, epoch, loss, targets=num_targets, best=best, values=measures)
        self._write(row)
        names = ("loss",) if "margin" in values else ("loss", "perplexity")  # of pairs there is none
        measured = {name: row[name] for name in names if row[name] is not None} | values
        self._curves("heldout", measured, step)
        shown = "  ".join(
            [f"{name.replace('_', ' ')} {value:.4g}" for name, value in measured.items()]
            + [f"{name.replace('_', ' ')} - ({why})" for name, why in refused.items()]
        )
        shown += (f"  ({mode})" if mode else "") + ("  best so far" if best else "")
        self._screen.line(f"held out at step {step}  {stage}  {shown}")
        if perf_counter() >= self._report_due:
            self._report()

    def row(self, kind: str, step: int, stage: str, values: dict[str, Any]) -> None:
        """Record values of another kind than steps and evaluations, such as the reading of a watch; JSON values."""
        self._write(_row(kind, step, stage, self._epoch_of(stage), None, values=values))
        self._curves(kind, {name: value for name, value in values.items() if isinstance(value, float)}, step)

    def epoch(self, step: int, stage: str, epoch: int) -> None:
        """Record the end of an epoch: its mean training loss per target, and the newest held-out loss of the stage."""
        newest = self._heldout["loss"] if self._heldout and self._heldout["stage"] == stage else None
        loss = self._nll / self._targets if self._targets and not self._has_gap else None
        self._write(_row("epoch", step, stage, epoch, loss, heldout_loss=newest, targets=self._targets))

    def _epoch_of(self, stage: str) -> int | None:
        """Epoch of the newest step, None if it belongs to another stage."""
        return self._epoch[1] if self._epoch and self._epoch[0] == stage else None

    def log(self, kind: str, **fields: Any) -> None:
        """Log an event with its time; fields are JSON values. The screen shows a field `message` alone."""
        self._event(kind, fields, shown=kind in (SHOWN_ON_TERMINAL if self._screen.live else SHOWN_ENTRIES))

    def notice(self, kind: str, **fields: Any) -> None:
        """Log an event of any kind and show it."""
        self._event(kind, fields, shown=True)

    def _event(self, kind: str, fields: dict[str, Any], shown: bool) -> None:
        self._finished |= kind == "finished"
        time = datetime.now().astimezone().isoformat(timespec="milliseconds")
        self._log.append({"time": time, "kind": kind} | fields)
        if shown or self._screen.verbose:
            flat = {name: value for name, value in fields.items() if not isinstance(value, dict | list)}
            details = fields.get("message") or "  ".join(f"{name} {value}" for name, value in flat.items())
            self._screen.line(f"{kind.replace('_', ' ')}  {details}")

    def sync(self) -> None:
        """Flush metrics and timing to the device, before a checkpoint that relies on them."""
        self._metrics.sync()
        self._timing.sync()

    def close(self) -> None:
        """Leave the screen, draw the report a last time and close the files. A second call does nothing, or closes the
        files after a failed first call, which leaves the log open for the error."""
        if not self._closed:
            self._closed = True
            with suppress(DiskError):  # of a warning; the next lines report it
                for logger in self._loggers:
                    logger.close(self._finished)
            self._screen.close()
            self.sync()
            if self._metrics.is_in_place():  # else the directory was removed or renamed, and must not come back
                self._report()
            self._log.sync()  # a finished run is not resumed, which would repair the effects of a power cut
        while self._files:
            self._files.pop().close()

    # ----------------------------------------------------------------------- files

    def _write(self, row: dict[str, Any]) -> None:
        if _identity(row) not in self._known:
            self._metrics.append(row)
            self._absorb(row)

    def _absorb(self, row: dict[str, Any]) -> None:
        """Update the sums of the epoch; resume feeds the rows of the file, so the sums are equal to the bit."""
        if row["kind"] == "eval":
            self._heldout = row
        elif row["kind"] == "epoch":
            self._nll, self._targets, self._has_gap = 0.0, 0, False
        elif row["kind"] == "train":
            if self._epoch != (row["stage"], row["epoch"]):
                self._epoch, self._nll, self._targets = (row["stage"], row["epoch"]), 0.0, 0
            if not row["skipped"]:
                self._nll += row["loss"] * row["targets"]
                self._targets += row["targets"]

    def _curves(self, group: str, values: dict[str, float], step: int) -> None:
        for logger in self._loggers:
            logger.scalars({f"{group}/{name}": value for name, value in values.items()}, step)
        if self._has_board:
            self._to_board(group, values, step)

    def _write_csv(self) -> None:
        """Rewrite metrics.csv from metrics.jsonl."""
        rows = history.read_rows(self.folder / history.METRICS, history.metric_fault)
        table = csv_text(COLUMNS, ([_cell(row.get(name)) for name in COLUMNS] for row in rows))
        write_atomic(self.folder / "metrics.csv", table)

    def _report(self) -> None:
        from unpad.run.report.page import write_report  # the pages of all families, which only a drawing needs

        began = perf_counter()
        try:
            self._write_csv()
            write_report(self.folder)
        except SourceError as error:  # no step yet, or a damaged file: no reason to end training
            self.log("report_skipped", message=f"{error.what} ({error.where}): {error.fix}")
        now = perf_counter()
        self._report_due = now + max(5.0, REPORT_PAUSE * (now - began))

    def _to_board(self, group: str, values: dict[str, float], step: int) -> None:
        """Write to TensorBoard; if this fails, continue without it, since the metrics have its curves too."""
        try:
            if self._board is None:
                from unpad.run.board import Board  # slow to import, and only a run needs it

                self._board = Board(self.folder / "tensorboard", self._purge_step)
                self._files.append(self._board)
            self._board.scalars({f"{group}/{name}": value for name, value in values.items()}, step)
        except ImportError:
            self._has_board = False
            remedy = "pip install 'unpad[tensorboard]', or leave it out of log.to"
            self.log("warning", message=f"TensorBoard is not installed, so the run has no files of it: {remedy}")
        except (OSError, DiskError) as error:
            self._has_board = False
            reason = error.what if isinstance(error, DiskError) else error.strerror or error
            self.log("warning", message=f"TensorBoard's files end here and are incomplete: {reason}")

    def _warn_of_norm(self, record: StepRecord) -> None:
        self._num_large += 1
        if record.step - self._warned_at >= WARNING_STEPS:
            self._warned_at = record.step
            message = f"step {record.step}: gradient norm {record.grad_norm:.3g} is above {self._grad_norm_warning:g}"
            self.log("warning", message=message, step=record.step, num_steps_so_far=self._num_large)

    def _warn_of_chance(self, record: StepRecord) -> None:
        """Warn of a discriminator that tells nothing apart, every WARNING_STEPS steps; 2 ln 2 is the loss at chance."""
        self._judged.append(record.terms["discriminator"])
        if len(self._judged) == WARNING_STEPS:
            if sum(self._judged) / WARNING_STEPS > AT_CHANCE:
                what = f"step {record.step}: the discriminator has been at chance for {WARNING_STEPS} steps, so that"
                message = f"{what} `adversarial` teaches nothing; raise losses.discriminator or its learning rate"
                self.log("warning", message=message, step=record.step)
            self._judged.clear()


class _Silent:
    """Monitor without screen and files."""

    verbose = False
    waited_share = 0.0

    def __init__(self, take: Callable[[StepRecord], None] | None) -> None:
        self._take = take

    def step(self, record: StepRecord, **_: float) -> None:
        if self._take is not None:
            self._take(record)

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


def silent_monitor(take: Callable[[StepRecord], None] | None = None) -> Monitor:
    """A monitor that shows and writes nothing, for the other processes of a run, or for repeated steps.

    Args:
        take: called with every step.
    """
    return cast(Monitor, _Silent(take))


def _row(kind: str, step: int, stage: str, epoch: int | None, loss: float | None, **rest: Any) -> dict[str, Any]:
    """A row with every column, in the order of the columns."""
    first = {"step": step, "stage": stage, "kind": kind, "epoch": epoch, "loss": loss, "values": {}}
    return dict.fromkeys(COLUMNS) | first | {"perplexity": None if loss is None else perplexity(loss)} | rest


def train_row(record: StepRecord) -> dict[str, Any]:
    """Row of a step in `metrics.jsonl`."""
    same = ("lr", "grad_norm", "sequences", "tokens", "padded_tokens", "targets", "skipped", "rows")
    pad_share = 1 - record.tokens / record.padded_tokens if record.padded_tokens else 0.0
    values = dict(record.terms)
    if len(record.weights) > 1:
        values |= {f"{name}_weight": weight for name, weight in record.weights.items()}
    values |= record.measures
    rest = {name: getattr(record, name) for name in same} | {"pad_share": pad_share, "values": values}
    return _row("train", record.step, record.stage, record.epoch, record.loss, **rest)


def _identity(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["kind"], row["stage"], row["step"]


def _cell(value: Any) -> Any:
    """A value as a table shows it; the csv module writes numbers to their last digit, as JSON does."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, bool | dict) else value
