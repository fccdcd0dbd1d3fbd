"""The range of the learning rate: 100 steps at rates that rise from one to the next, on a copy of the model.

After Smith 2017, arXiv 1506.01186, section 3.3. A few batches take turns, and each is compared with its own first loss,
so that what differs between batches does not look like learning.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from unpad.doctor.subject import Subject, Trial, total_loss
from unpad.terminal.progress import progress

STEPS, LOWEST, HIGHEST = 100, 1e-6, 1.0
LEAST = 24  # rates, four of each power of ten: fewer say nothing
BATCHES = 4
SMOOTH = 5  # steps that a value is the mean of
DIVERGED = 4.0  # times its first loss, at which the sweep ends
SEQUENCES, TOKENS = 32, 1024  # of a batch, at most
HALF = 0.5
LEAST_FALL = 0.05  # of the first loss; a sweep that falls less says nothing about rates


@dataclass(frozen=True)
class Sweep:
    """Losses over the learning rate.

    Args:
        rates: of each step, (num_steps,), ascending.
        losses: of each step over the first of its batch, smoothed, (num_steps,).
        low, high: the range in which the loss falls: from half of its fall to its lowest; None if it does not fall.
        short: rates that the time allowed, where these are too few to say anything; then there are no losses.
    """

    rates: np.ndarray
    losses: np.ndarray
    low: float | None
    high: float | None
    short: int = 0

    @property
    def middle(self) -> float:
        """A rate to begin with, in the middle of the range."""
        assert self.low is not None, "asked where there is a range"
        assert self.high is not None, "asked where there is a range"
        return math.sqrt(self.low * self.high)


def sweep(subject: Subject, seconds: float) -> Sweep:
    """Measure losses over rates; batches are made smaller until 100 steps take no longer than `seconds`."""
    trial = Trial(subject, drops=False, clip=1.0, weight_decay=0.0)
    batches = [subject.small_batch(SEQUENCES, TOKENS, first) for first in range(BATCHES)]
    trial.rate(LOWEST)
    clock = subject.clock
    began = clock.now()
    trial.step(batches[:1])
    share = seconds / STEPS / max(clock.now() - began, 1e-9)
    if share < 1:
        tokens, sequences = max(int(TOKENS * share), 32), max(int(SEQUENCES * share), 2)
        batches = [subject.small_batch(sequences, tokens, first) for first in range(BATCHES)]
    first: dict[int, float] = {}
    all_rates, rates, losses, began = np.geomspace(LOWEST, HIGHEST, STEPS), list[float](), list[float](), clock.now()
    with progress("trying learning rates", STEPS, "steps") as bar:
        step = 0
        while step < STEPS:
            trial.rate(float(all_rates[step]))
            number = len(rates) % BATCHES
            result = trial.step([batches[number]])
            loss = total_loss(result, trial.weights)
            rates.append(float(all_rates[step]))
            losses.append(loss / max(first.setdefault(number, loss), 1e-12))
            if trial.is_lost(result) or not losses[-1] < DIVERGED:
                break
            # On a machine that slows down, rates are left out so that the highest is reached in time.
            spent = max(clock.now() - began, 1e-9)
            stride = math.ceil((STEPS - step) * spent / len(rates) / max(seconds - spent, spent / len(rates)))
            bar.advance(stride)
            step += stride
    if len(rates) < LEAST and step > len(rates):
        return Sweep(np.zeros(0), np.zeros(0), None, None, short=len(rates))
    if not math.isfinite(losses[-1]):
        rates.pop()
        losses.pop()
    return _ranged(np.array(rates), np.array(losses))


def _ranged(rates: np.ndarray, losses: np.ndarray) -> Sweep:
    """Smooth the losses and find the range."""
    if not len(losses):
        return Sweep(rates, losses, None, None)
    near = SMOOTH // 2
    smooth = np.array([losses[max(i - near, 0) : i + near + 1].mean() for i in range(len(losses))])
    lowest = int(smooth.argmin())
    fall = 1 - float(smooth[lowest])
    if fall < LEAST_FALL:
        return Sweep(rates, smooth, None, None)
    half = int(np.argmax(smooth <= 1 - HALF * fall))
    return Sweep(rates, smooth, float(rates[half]), float(rates[lowest]))
