"""Trials of copies of a model: some steps, a range of learning rates, one batch overfit; and the machine meanwhile."""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from unpad.doctor.finding import Found, Severity, finding
from unpad.doctor.subject import Subject, TimeBudget, Trial, total_loss
from unpad.machine.load import Load, busy_seconds, cores, own_seconds, quota
from unpad.models.adapters import kept_weights
from unpad.recipes.recipe import Recipe
from unpad.recipes.training import OptimSettings, TrainSettings
from unpad.run.checkpoint import State, model_tensors, save
from unpad.terminal.progress import counted, progress
from unpad.training.optim import optimizer_tensors

# --------------------------------------------------------------------------- a few steps


@dataclass(frozen=True)
class Steps:
    """Some steps of the recipe.

    Args:
        norms: of the gradients, per step.
        load, forward, backward, optimize: median seconds of a step; load is beside the others, in another thread.
        save: seconds of a checkpoint, in a temporary folder.
        unmoved: names of parameters that no step changed.
    """

    norms: list[float]
    load: float
    forward: float
    backward: float
    optimize: float
    save: float
    unmoved: list[str]

    @property
    def compute(self) -> float:
        return self.forward + self.backward + self.optimize


class _Watch:
    """Seconds of the parts of one step."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now, self.forward, self.optimize = now, 0.0, 0.0
        self._began = 0.0

    @contextmanager
    def on(self, trial: Trial) -> Iterator[None]:
        """Time forward passes and the optimizer inside."""
        losses = trial.model.losses

        def timed(batch: object) -> object:
            began = self.now()
            try:
                return losses(batch)  # type: ignore[arg-type]
            finally:
                self.forward += self.now() - began

        def begin(*_: object) -> None:
            self._began = self.now()

        def end(*_: object) -> None:
            self.optimize += self.now() - self._began

        hooks = [trial.optimizer.register_step_pre_hook(begin), trial.optimizer.register_step_post_hook(end)]
        object.__setattr__(trial.model, "losses", timed)
        try:
            yield
        finally:
            object.__delattr__(trial.model, "losses")
            for hook in hooks:
                hook.remove()


def take_steps(subject: Subject, seconds: float) -> Steps:
    """Take up to 9 steps of the plan, as many as `seconds` allow, and save once."""
    trial, clock = Trial(subject), subject.clock
    norms, times, began, updated = list[float](), list[tuple[float, ...]](), clock.now(), 0
    for step in counted(range(9), "taking steps", 9, "steps"):
        if step >= 3 and clock.now() - began > seconds:
            break
        planned = subject.plan.step(step % subject.plan.num_steps)
        if subject.num_steps >= 3 * subject.plan.num_steps:
            for micro in planned:  # most loads find the pictures of an earlier epoch in memory
                subject.load(micro)
        start = clock.now()
        micros = [subject.load(micro) for micro in planned]
        loaded, watch = clock.now(), _Watch(clock.now)
        with watch.on(trial):
            result = trial.step(micros)
        whole = clock.now() - loaded
        norms.append(result.grad_norm)
        updated += result.updated
        times.append((loaded - start, watch.forward, whole - watch.forward - watch.optimize, watch.optimize))
    load, forward, backward, optimize = np.median(np.array(times[1:] or times), axis=0).tolist()
    before = dict(subject.setup.model.named_parameters())
    unmoved = [
        name
        for name, parameter in trial.model.named_parameters()
        if updated and parameter.requires_grad and torch.equal(parameter, before[name])
    ]
    saved = save_seconds(trial, clock)
    return Steps(norms, load, forward, backward, optimize, saved, unmoved)


def save_seconds(trial: Trial, clock: TimeBudget) -> float:
    """Seconds that a checkpoint takes, written to a temporary folder."""
    tensors = model_tensors(kept_weights(trial.model)) | optimizer_tensors(trial.model, trial.optimizer)
    with tempfile.TemporaryDirectory(prefix="unpad-doctor-") as folder:
        began = clock.now()
        save(Path(folder), State(1, tensors, {}), 2)
        return clock.now() - began


@finding(
    "loader",
    en=("Loading a step takes {number:.1f} times as long as computing it, {load:.3f} s and {compute:.3f} s: steps wait for "
        "data.", "put the files on a faster disk; images: smaller files, images.cache_mib, fewer images.max_tokens"),
    zh=("读取一步数据的时间是计算的 {number:.1f} 倍（{load:.3f} 秒对 {compute:.3f} 秒）：计算在等数据。",
        "把文件放到更快的磁盘；图像可用更小的文件、images.cache_mib 或更少的 images.max_tokens"),
)  # fmt: skip
def loader(steps: Steps) -> Found | None:
    """Loading that takes longer than computing, beside which it is done."""
    ratio = steps.load / max(steps.compute, 1e-9)
    return Found(ratio, "data", "images.cache_mib", load=steps.load, compute=steps.compute) if ratio >= 1.5 else None


@finding(
    "overhead",
    en=("{what} take about {number:.0%} of the time, after every {every:,} steps of {step:.2f} s.",
        "set {field}={usual}"),
    zh=("{what}约占 {number:.0%} 的时间：每 {every:,} 步（每步 {step:.2f} 秒）一次。", "设置 {field}={usual}"),
)  # fmt: skip
def overhead(subject: Subject, steps: Steps) -> Found | None:
    """Checkpoints, or evaluations by their tokens (a forward pass is a third of a step), that take most of the time."""
    plan, table, ids = subject.plan, subject.data.table, subject.stage.held_out_ids
    every = subject.setup.recipe.checkpoint.every or plan.num_steps
    share = steps.save / (steps.save + every * steps.compute)
    usual = max(int(20 * steps.save / max(steps.compute, 1e-9)), 100)
    # Few checkpoints of a short run cost nothing to speak of.
    is_much = share >= 0.3 and (every < 10 or steps.save * subject.num_steps / every >= 60)
    what, field = ("Checkpoints", "保存检查点"), "checkpoint.every"
    if not is_much:
        what, field = ("Evaluations", "评估"), subject.field("train.eval_every")
        every = subject.recipe.train.eval_every or plan.num_steps
        cost = float(table.positions[ids].sum()) / 3
        share = cost / max(cost + every * plan.padded_tokens / plan.num_steps, 1e-9)
        usual = max(int(10 * every * share / max(1 - share, 1e-9)), 1)
    result = Found(share, field, what=what, every=every, step=steps.compute, field=field, usual=usual)
    return result if is_much or share >= 0.5 else None


@finding(
    "padding", en=("{number:.0%} of what is computed is padding, by plan.strategy={strategy}.", "set {field}=pack"),
    zh=("计算量的 {number:.0%} 是填充（plan.strategy={strategy}）。", "设置 {field}=pack，它没有填充"),
)  # fmt: skip
def padding(subject: Subject) -> Found | None:
    """A plan of which a large part is padding."""
    share, field = subject.plan.pad_share, subject.field("plan.strategy")
    severity: Severity = "warning" if share >= 0.4 else "note"
    return (
        Found(share, field, severity=severity, strategy=subject.plan.strategy, field=field) if share >= 0.15 else None
    )


# --------------------------------------------------------------------------- the machine


@dataclass(frozen=True)
class System:
    """Readings of the machine; `now` is the clock that everything is timed by, in seconds."""

    cores: Callable[[], int] = cores
    quota: Callable[[], float | None] = quota
    threads: Callable[[], int] = torch.get_num_threads
    busy_seconds: Callable[[], float | None] = busy_seconds
    own_seconds: Callable[[], float] = own_seconds
    now: Callable[[], float] = time.perf_counter


@finding(
    "threads",
    en=("{threads} threads compute on {cores:g} usable cores: {why}.", "set {field}={usual:.0f}, and leave OMP_NUM_THREADS unset"),
    zh=("{threads} 个线程在 {cores:g} 个可用的核上计算：{why}。", "设置 {field}={usual:.0f}，并且不要设 OMP_NUM_THREADS"),
)  # fmt: skip
def threads(subject: Subject, system: System, load: Load | None) -> Found | None:
    """Compare threads with the cores that this process may use.

    Args:
        load: of the cores while steps were tried; more threads are advised only where it says that others rest.
    """
    if subject.setup.device.type != "cpu":
        return None
    num, limit, field = system.threads(), system.quota(), "train.threads"
    usable = system.cores() if limit is None else min(float(system.cores()), limit)
    if num > max(usable, 1):
        why = ("they wait for each other", "它们互相等待")
        return Found(num - usable, field, threads=num, cores=usable, field=field, usual=max(int(usable), 1), why=why)
    if num < int(usable) and load is not None and load.others < 0.1:
        idle, chosen = 1 - num / usable, subject.setup.recipe.profile == "low_power"
        why = (f"{idle:.0%} of the machine is idle", f"机器有 {idle:.0%} 闲着")
        severity: Severity = "note" if chosen else "warning"
        fields = ("profile", field) if chosen else (field,)
        return Found(idle, *fields, severity=severity, threads=num, cores=usable, field=field, usual=usable, why=why)
    return None


@finding(
    "neighbour",
    en=("Other processes use {number:.1f} of {cores} cores, this one {own:.1f}.",
        "end them, or wait; `top` names them. What was timed here is too slow"),
    zh=("其他进程占用了 {cores} 个核中的 {number:.1f} 个，本进程用了 {own:.1f} 个。",
        "结束它们或等一等，`top` 能列出它们。这里测到的时间偏慢"),
)  # fmt: skip
def neighbour(load: Load | None, num: int) -> Found | None:
    """Other processes that use a quarter of the cores or more while steps are tried."""
    if load is None or load.others < 0.25 * num:
        return None
    return Found(load.others, "/proc/stat", cores=num, own=load.own)


# --------------------------------------------------------------------------- learning rates


RATES, LOWEST, HIGHEST = 100, 1e-6, 1.0
LEAST_RATES = 24  # four of each power of ten: fewer say nothing


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
    """Measure losses over rates that rise from one step to the next, after Smith 2017, arXiv 1506.01186, section 3.3.

    A few batches take turns, and each is compared with its own first loss, so that what differs between batches does
    not look like learning. Batches are made smaller until all steps take no longer than `seconds`.
    """
    trial = Trial(subject, drops=False, clip=1.0, weight_decay=0.0)
    batches = [subject.small_batch(32, 1024, first) for first in range(4)]
    trial.rate(LOWEST)
    clock = subject.clock
    began = clock.now()
    trial.step(batches[:1])
    share = seconds / RATES / max(clock.now() - began, 1e-9)
    if share < 1:
        tokens, sequences = max(int(1024 * share), 32), max(int(32 * share), 2)
        batches = [subject.small_batch(sequences, tokens, first) for first in range(4)]
    first: dict[int, float] = {}
    all_rates, rates, losses, began = np.geomspace(LOWEST, HIGHEST, RATES), list[float](), list[float](), clock.now()
    with progress("trying learning rates", RATES, "steps") as bar:
        step = 0
        while step < RATES:
            trial.rate(float(all_rates[step]))
            number = len(rates) % 4
            result = trial.step([batches[number]])
            loss = total_loss(result, trial.weights)
            rates.append(float(all_rates[step]))
            losses.append(loss / max(first.setdefault(number, loss), 1e-12))
            if trial.is_lost(result) or not losses[-1] < 4.0:
                break
            # On a machine that slows down, rates are left out so that the highest is reached in time.
            spent = max(clock.now() - began, 1e-9)
            stride = math.ceil((RATES - step) * spent / len(rates) / max(seconds - spent, spent / len(rates)))
            bar.advance(stride)
            step += stride
    if len(rates) < LEAST_RATES and step > len(rates):
        return Sweep(np.zeros(0), np.zeros(0), None, None, short=len(rates))
    if not math.isfinite(losses[-1]):
        rates.pop()
        losses.pop()
    return _ranged(np.array(rates), np.array(losses))


def _ranged(rates: np.ndarray, losses: np.ndarray) -> Sweep:
    """Smooth the losses and find the range."""
    if not len(losses):
        return Sweep(rates, losses, None, None)
    near = 2
    smooth = np.array([losses[max(i - near, 0) : i + near + 1].mean() for i in range(len(losses))])
    lowest = int(smooth.argmin())
    fall = 1 - float(smooth[lowest])
    if fall < 0.05:
        return Sweep(rates, smooth, None, None)
    half = int(np.argmax(smooth <= 1 - fall / 2))
    return Sweep(rates, smooth, float(rates[half]), float(rates[lowest]))


# --------------------------------------------------------------------------- one batch

REPEATS, LEAST_REPEATS = 60, 40
USUAL_RATE = 1e-3


@dataclass(frozen=True)
class Overfit:
    """A batch repeated.

    Args:
        start, end: loss before and after `steps` with the recipe's settings; plain: after as many with usual ones,
            without dropout, decay and warm-up; None where it was not needed.
        is_lost: whether a step was not finite, and ended it.
        culprit: the field without which it is learnt, and the loss then; None where there is none.
    """

    sequences: int
    steps: int
    start: float
    end: float
    plain: float | None
    is_lost: bool = False
    culprit: tuple[str, float] | None = None

    @property
    def learnt(self) -> bool:
        return self.end < 0.9 * self.start

    @property
    def is_short(self) -> bool:
        """True if the time ended it before it could be judged."""
        return not self.learnt and not self.is_lost and self.steps < LEAST_REPEATS


def overfit_batch(subject: Subject, rates: Sweep, seconds: float) -> Overfit:
    """Repeat one batch, as often as `seconds` allow."""
    batch = subject.small_batch(16, 512)
    if batch.num_targets == 0:
        batch = subject.small_batch(1 << 20, 1 << 20)
    trial = Trial(subject)
    began = subject.clock.now()
    start = trial.loss(batch)
    trial.step([batch])
    one = max(subject.clock.now() - began, 1e-9)
    steps = min(REPEATS, max(LEAST_REPEATS, int(seconds / 2 / one)))

    def repeated(trial: Trial, done: int) -> tuple[float, int, bool]:
        began, is_lost = subject.clock.now(), False
        for _ in counted(range(done, steps), "overfitting one batch", steps - done, "steps"):
            done += 1
            is_lost = trial.is_lost(trial.step([batch]))
            if is_lost or subject.clock.now() - began > seconds:
                break
        return trial.loss(batch), done, is_lost

    end, taken, is_lost = repeated(trial, 1)
    plain, culprit = None, None
    if not end < 0.9 * start:
        usual = subject.recipe.model_copy(update={"train": _usual_train(subject.recipe)})
        optim = OptimSettings(lr=rates.high or USUAL_RATE, weight_decay=0.0).model_dump()
        plain = repeated(Trial(subject, drops=False, recipe=usual, **optim), 0)[0]
        if plain < 0.8 * start:
            ends = {name: repeated(one, 0)[0] for name, one in _changed_back(subject)}
            best = min(ends, key=lambda name: ends[name], default="")
            culprit = (best, ends[best]) if best and ends[best] < 0.8 * start else None
    return Overfit(batch.num_seqs, taken, start, end, plain, is_lost, culprit)


def _usual_train(recipe: Recipe) -> TrainSettings:
    """The recipe's `train` without what weakens targets or freezes parameters."""
    return recipe.train.model_copy(update={"label_smoothing": 0.0, "freeze": []})


def _changed_back(subject: Subject) -> Iterator[tuple[str, Trial]]:
    """Trials with one setting each back at its default, for all that the recipe changes, by field."""
    optim, usual = subject.recipe.optim, OptimSettings()
    for name in ("betas", "eps", "clip", "weight_decay", "groups", "lr", "lr_scale"):
        if getattr(optim, name) != getattr(usual, name):
            yield f"optim.{name}", Trial(subject, **{name: getattr(usual, name)})
    for name in ("label_smoothing", "freeze"):
        if getattr(subject.recipe.train, name):
            train = subject.recipe.train.model_copy(update={name: getattr(TrainSettings(), name)})
            yield f"train.{name}", Trial(subject, recipe=subject.recipe.model_copy(update={"train": train}))


@finding(
    "lr_high", "fault", explains={"by_heart", "decay", "exploding", "attention_sharp", "run_flat"},
    en=("The learning rate {rate:.1e} is too high, {number:,.0f} times the one with the lowest loss, {high:.1e}: steps "
        "leap over what they could learn.", "set {field}={middle:.1e}; in range here: {low:.1e} to {high:.1e}"),
    zh=("学习率 {rate:.1e} 是损失最低处学习率 {high:.1e} 的 {number:,.0f} 倍：每一步都跨得太大，学不到东西。",
        "设置 {field}={middle:.1e}；这里合适的范围是 {low:.1e} 到 {high:.1e}"),
)  # fmt: skip
def lr_high(subject: Subject, overfit: Overfit, rates: Sweep) -> Found | None:
    """A rate 10 times above the range, or 3 times on a batch that is not learnt."""
    if rates.low is None or rates.high is None:
        return None
    above, field = subject.rate / rates.high, subject.field("optim.lr")
    if above <= (10 if overfit.learnt else 3):
        return None
    return Found(above, field, rate=subject.rate, low=rates.low, high=rates.high, middle=rates.middle, field=field)


@finding(
    "lr_low", "fault", explains={"by_heart", "run_flat"},
    en=("The learning rate {rate:.1e} is too low, {number:,.0f} times below the range that learns here: {steps} steps on "
        "one batch took the loss from {start:.3g} to {end:.3g}.",
        "set {field}={middle:.1e}; in range here: {low:.1e} to {high:.1e}"),
    zh=("学习率 {rate:.1e} 只有合适范围下限的 1/{number:,.0f}：在同一批上走 {steps} 步，损失只从 {start:.3g} 变到 {end:.3g}。",
        "设置 {field}={middle:.1e}；这里合适的范围是 {low:.1e} 到 {high:.1e}"),
)  # fmt: skip
def lr_low(subject: Subject, overfit: Overfit, rates: Sweep) -> Found | None:
    """A rate 30 times below the range, on a batch that is not learnt."""
    if rates.low is None or rates.high is None or overfit.learnt or overfit.is_short:
        return None
    below, field = rates.low / subject.rate, subject.field("optim.lr")
    if below <= 30:
        return None
    return Found(below, field, rate=subject.rate, low=rates.low, high=rates.high, middle=rates.middle, field=field,
                 start=overfit.start, end=overfit.end, steps=overfit.steps)  # fmt: skip


@finding(
    "by_heart", "fault", explains={"run_flat"},
    en=("One batch of {sequences} sequences cannot be overfit: the loss went from {start:.3g} to {number:.3g} in {steps} "
        "steps, and to {plain:.3g} with {what}.", "{do}"),
    zh=("{sequences} 个样本的一批数据记不住：{steps} 步后损失从 {start:.3g} 到 {number:.3g}；{what}则到 {plain:.3g}。", "{do}"),
)  # fmt: skip
def by_heart(subject: Subject, overfit: Overfit, rates: Sweep) -> Found | None:
    """A batch that is not learnt with the recipe's settings, and the setting that is to blame, if one is."""
    if overfit.learnt or overfit.plain is None or overfit.is_short:
        return None
    plain, what = overfit.plain, ("usual settings", "用常规设置")
    fields: tuple[str, ...] = ("data", "model")
    do = ("labels do not follow from the inputs, or the model does not see them: look at the data first",
          "标签与输入无关，或模型看不到输入：先检查数据")  # fmt: skip
    if overfit.culprit is not None:
        name, plain = overfit.culprit
        section, _, key = name.partition(".")
        usual = getattr({"optim": OptimSettings(), "train": TrainSettings()}[section], key)
        fields, what = (subject.field(name),), (f"the default of {name} alone", f"只把 {name} 改回默认值")
        do = (f"set {fields[0]}={json.dumps(usual)}, its default", f"设 {fields[0]}={json.dumps(usual)}，即默认值")
    elif overfit.plain < 0.8 * overfit.start:
        fields, rate = ("optim", subject.field("optim.lr")), rates.high or USUAL_RATE
        do = (f"set {fields[1]}={rate:.1e}, as there; then go back to the defaults of optim one by one",
              f"先如该试验设 {fields[1]}={rate:.1e}，再把 optim 的设置逐个改回默认值")  # fmt: skip
    return Found(overfit.end, *fields, sequences=overfit.sequences, steps=overfit.steps, start=overfit.start,
                 plain=plain, what=what, do=do)  # fmt: skip
