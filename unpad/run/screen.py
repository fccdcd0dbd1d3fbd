"""Progress of a run on the screen: a live bar on a terminal, plain lines elsewhere. No failure here ends a run."""

import os
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from time import perf_counter
from typing import NamedTuple

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from unpad.terminal.printing import print_styled
from unpad.terminal.progress import ProgressBar, erase, held, progress, told
from unpad.terminal.table import folded, short, span

RECENT_STEPS = 50  # number of steps for rates and time left
REFRESH_SECONDS = 0.1


def open_console() -> Console:
    """Console of the standard output.

    With NO_COLOR in the environment (no-color.org) it prints no colour, style or control sequence, so there is no live
    bar either.
    """
    return Console(highlight=False, soft_wrap=True, force_terminal=False if os.environ.get("NO_COLOR") else None)


class StepWork(NamedTuple):
    """Duration, real tokens and sequences of a step."""

    seconds: float
    tokens: int
    sequences: int


class Screen:
    """Progress of a run on a console.

    Args:
        log_every: steps between lines without a terminal.
        total_steps: last step of the whole run, None while unknown.
        verbose: show a line for every step, on a terminal too.
    """

    def __init__(self, console: Console, *, log_every: int, total_steps: int | None, verbose: bool) -> None:
        self.console, self.verbose = console, verbose
        self._log_every, self._total, self._exact, self._of_epochs = log_every, total_steps, True, ""
        self.live: Live | None = None
        self._bar: ProgressBar | None = None
        self._alone = ExitStack()
        self._progress = Progress(
            TextColumn("{task.description}", markup=False), BarColumn(None), TextColumn("{task.fields[at]}")
        )
        self._task = self._progress.add_task("", total=total_steps, at="")
        self._status = Text()
        self._shown_at = 0.0
        self._start_clock()

    def start(self) -> None:
        """Begin the live bar if the console is a terminal that can move its cursor; else a line of progress."""
        if self.console.is_terminal and not self.console.is_dumb_terminal and not self.console.quiet:
            with self._unbreakable():
                # Drawn from `step` alone: a thread of its own would have to survive a vanished terminal too.
                live = Live(Group(self._progress, self._status), console=self.console, auto_refresh=False)
                live.start()
                self.live = live
                self._alone.enter_context(held())  # evaluations show their progress here
        else:
            self._bar = self._alone.enter_context(progress("training", self._total, "steps"))

    def stage(self, name: str, total_steps: int | None, exact: bool = True, max_epochs: int | None = None) -> None:
        """Begin a stage of `max_epochs` epochs: reset rates and time left."""
        self._of_epochs = f"/{max_epochs}" if max_epochs else ""
        self._progress.update(self._task, description=name)
        self.expect(total_steps, exact)
        self._start_clock()

    def expect(self, total_steps: int | None, exact: bool) -> None:
        """Set the last step of the whole run, all stages included; without `exact` it is shown as "about"."""
        self._total, self._exact = total_steps, exact
        self._progress.update(self._task, total=total_steps)
        if self._bar:
            self._bar.total = total_steps

    def step(self, step: int, stage: str, epoch: int, numbers: str, usage: str, work: StepWork) -> None:
        """Show a step: `numbers`, the rates, `usage`, and last the time left."""
        self._recent.append(work)
        self._busy += work.seconds
        where = f"{step}/{'' if self._exact else 'about '}{self._total}" if self._total else f"{step}"
        in_stage = f"{stage} epoch {epoch}{self._of_epochs}"
        due = step % self._log_every == 0 or step == self._total
        if self.verbose or (due and not self.live):
            tokens_rate, sequences_rate = self._rates()
            rates = f"{tokens_rate:,.0f} tok/s  {sequences_rate:,.0f} seq/s"
            self.line(f"step {where}  {in_stage}  {numbers}  {rates}  {usage}{self._left(step)}")
        if self.live and (step == self._total or perf_counter() - self._shown_at >= REFRESH_SECONDS):
            with self._unbreakable():
                at = f"{where}{self._left(step)}"
                self._progress.update(self._task, description=in_stage, completed=step, at=at)
                line, width = f"{numbers}  {short(self._rates()[0])} tok/s  {usage}", self.console.width
                self._status.plain = line if len(line) <= width else line[: width + 2].rpartition("  ")[0]
                self.live.refresh()
            self._shown_at = perf_counter()
        if self._bar:
            if not self._bar.done:  # a continued run
                self._bar.begin_at(step - 1)
            self._bar.advance(step - self._bar.done)

    def line(self, line: str) -> None:
        """Show a line, above the bar if there is one."""
        erase()  # progress on standard error, which is drawn again with the next step
        with self._unbreakable():
            # Soft wrap would hold for the bar below as well, and a terminal that wraps it itself miscounts its lines.
            parts = folded(line, self.console.width) if self.console.is_terminal else [line]
            for part in parts:
                print_styled(self.console, part, wraps=not self.live)
        if not self.console.quiet:
            told()

    def close(self) -> None:
        """Stop the live bar where it is and release the terminal."""
        if self.live:
            with self._unbreakable():
                self.live.stop()
        self._alone.close()

    def _start_clock(self) -> None:
        self._recent: deque[StepWork] = deque(maxlen=RECENT_STEPS)
        self._busy, self._began = 0.0, perf_counter()

    def _rates(self) -> tuple[float, float]:
        """Real tokens and sequences per second of the recent steps."""
        seconds, tokens, sequences = (sum(column) for column in zip(*self._recent, strict=True))
        return tokens / max(seconds, 1e-9), sequences / max(seconds, 1e-9)

    def _left(self, step: int) -> str:
        """Recent seconds per step, times the overhead of evaluations and saving in this stage so far."""
        if not self._total:
            return ""
        per_step = sum(work.seconds for work in self._recent) / len(self._recent)
        added = max(1.0, (perf_counter() - self._began) / max(self._busy, 1e-9))
        return f"  left {span(max(0, self._total - step) * per_step * added)}"

    @contextmanager
    def _unbreakable(self) -> Iterator[None]:
        """After a write error the screen stays silent and the run continues; rich raises SystemExit for a broken
        pipe."""
        try:
            yield
        except (OSError, ValueError):
            self.console.quiet = True
        except SystemExit:
            if not self.console.quiet:
                raise
