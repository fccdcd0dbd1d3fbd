"""Trials of copies of a model: some steps, a range of learning rates, one batch overfit, labels learnt from some
sequences and judged on others; and the machine meanwhile."""

import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from unpad.batching.batch import required
from unpad.batching.plan import Micro
from unpad.doctor.finding import Found, finding
from unpad.doctor.subject import Subject
from unpad.machine import Load, busy_seconds, cores, own_seconds, quota
from unpad.models.adapters import kept_weights
from unpad.models.contract import Classifies
from unpad.nn.precision import autocast
from unpad.recipes.training import OptimSettings
from unpad.run.checkpoint import State, model_tensors, save
from unpad.terminal.progress import counted, progress
from unpad.training.optim import optimizer_tensors
from unpad.training.rehearsal import Rehearsal

# --------------------------------------------------------------------------- a few steps


@dataclass(frozen=True)
class Steps:
    """Some steps of the recipe.

    Args:
        norms: of the gradients, per step.
        load, compute: median seconds of a step; load is beside the other, in another thread.
        save: seconds of a checkpoint, in a temporary folder.
        unmoved: names of parameters that no step changed.
    """

    norms: list[float]
    load: float
    compute: float
    save: float
    unmoved: list[str]


def take_steps(subject: Subject, seconds: float) -> Steps:
    """Take up to 9 steps of the plan, as many as `seconds` allow, and save once."""
    trial, now = subject.rehearsal(), subject.clock.now
    norms, times, began, updated = list[float](), list[tuple[float, ...]](), now(), 0
    for step in counted(range(9), "taking steps", 9, "steps"):
        if step >= 3 and now() - began > seconds:
            break
        planned = subject.plan.step(step % subject.plan.num_steps)
        # Most loads find the pictures of an earlier epoch in memory.
        if subject.num_steps >= 3 * subject.plan.num_steps:
            trial.load(planned)
        start = now()
        micros, loaded = trial.load(planned), now()
        result = trial.step(micros)
        times.append((loaded - start, now() - loaded))
        norms.append(result.grad_norm)
        updated += result.updated
    before = dict(subject.setup.model.named_parameters())
    unmoved = [name for name, parameter in trial.model.named_parameters()
               if updated and parameter.requires_grad and torch.equal(parameter, before[name])]  # fmt: skip
    tensors = model_tensors(kept_weights(trial.model)) | optimizer_tensors(trial.model, trial.optimizer)
    with tempfile.TemporaryDirectory(prefix="unpad-doctor-") as folder:
        began = now()
        save(Path(folder), State(1, tensors, {}), 2)
        saved = now() - began
    # The first step prepares kernels and memory.
    load, compute = np.median(np.array(times[1:] or times), axis=0).tolist()
    return Steps(norms, load, compute, saved, unmoved)


@finding("loader",
    en=("Loading a step takes {number:.1f} times as long as computing it, {compute:.3f} s: steps wait for data.",
        "use a faster disk, or images.cache_mib"),
    zh=("读取一步数据的时间是计算（{compute:.3f} 秒）的 {number:.1f} 倍：计算在等数据。",
        "用更快的磁盘或 images.cache_mib"))  # fmt: skip
def loader(steps: Steps) -> Found | None:
    """Loading that takes longer than computing, beside which it is done."""
    ratio = steps.load / max(steps.compute, 1e-9)
    return Found(ratio, "data", "images.cache_mib", load=steps.load, compute=steps.compute) if ratio >= 1.5 else None


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


@finding("threads",
    en=("{threads} threads compute on {cores:g} usable cores: {why}.", "set {field}={usual}, no OMP_NUM_THREADS"),
    zh=("{threads} 个线程在 {cores:g} 个可用的核上计算：{why}。",
        "设置 {field}={usual}，不设 OMP_NUM_THREADS"))  # fmt: skip
def threads(subject: Subject, system: System, load: Load | None) -> Found | None:
    """Compare threads with the cores that this process may use.

    Args:
        load: of the cores while steps were tried; more threads are advised only where it says that others rest.
    """
    num, limit, low = system.threads(), system.quota(), subject.setup.recipe.profile == "low_power"
    usable = system.cores() if limit is None else min(float(system.cores()), limit)
    why = ("they wait for each other", "它们互相等待")
    if num <= max(usable, 1):
        why = ("the others are idle", "其余的核闲着")
        if num >= int(usable) or load is None or load.others >= 0.1 or low:
            return None
    if subject.setup.device.type != "cpu":
        return None
    field, usual = "train.threads", max(int(usable), 1)
    return Found(num - usable, field, threads=num, cores=usable, field=field, usual=usual, why=why)


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
        return math.sqrt(self.low * self.high) if self.low and self.high else USUAL_RATE


def sweep(subject: Subject, seconds: float) -> Sweep:
    """Measure losses over rates that rise from one step to the next, after Smith 2017, arXiv 1506.01186, section 3.3.

    A few batches take turns, and each is compared with its own first loss, so that what differs between batches does
    not look like learning. Batches are made smaller until all steps take no longer than `seconds`.
    """
    trial, now = subject.rehearsal(drops=False, clip=1.0, weight_decay=0.0), subject.clock.now
    trial.rate(LOWEST)
    began = now()
    trial.step([subject.small_batch(32, 1024)])
    share = min(seconds / RATES / max(now() - began, 1e-9), 1)
    batches = [subject.small_batch(max(int(32 * share), 2), max(int(1024 * share), 32), first) for first in range(4)]
    first, all_rates = dict[int, float](), np.geomspace(LOWEST, HIGHEST, RATES)
    rates, losses, step, began = list[float](), list[float](), 0, now()
    with progress("trying learning rates", RATES, "steps") as bar:
        while step < RATES:
            trial.rate(float(all_rates[step]))
            number = len(rates) % 4
            result = trial.step([batches[number]])
            loss = sum(weight * result.terms[name] for name, weight in trial.weights.items() if name in result.terms)
            rates.append(float(all_rates[step]))
            losses.append(loss / max(first.setdefault(number, loss), 1e-12))
            if trial.is_lost(result) or not losses[-1] < 4.0:
                break
            # On a machine that slows down, rates are left out so that the highest is reached in time.
            spent = max(now() - began, 1e-9)
            stride = math.ceil((RATES - step) * spent / len(rates) / max(seconds - spent, spent / len(rates)))
            bar.advance(stride)
            step += stride
    if len(rates) < LEAST_RATES and step > len(rates):
        return Sweep(np.zeros(0), np.zeros(0), None, None, short=len(rates))
    num = len(rates) - (not math.isfinite(losses[-1]))
    smooth = np.array([np.mean(losses[max(i - 2, 0) : min(i + 3, num)]) for i in range(num)])
    tried, lowest = np.array(rates[:num]), int(smooth.argmin()) if num else 0
    if not num or smooth[lowest] > 0.95:
        return Sweep(tried, smooth, None, None)
    half = int(np.argmax(smooth <= (1 + smooth[lowest]) / 2))
    return Sweep(tried, smooth, float(tried[half]), float(tried[lowest]))


# --------------------------------------------------------------------------- one batch

REPEATS, LEAST_REPEATS, USUAL_RATE = 60, 60, 1e-3


@dataclass(frozen=True)
class Overfit:
    """A batch repeated.

    Args:
        start, end: loss before and after `steps` with the recipe's settings; plain: after as many with usual ones,
            without dropout, decay and warm-up; None where it was not needed.
        is_lost: whether a step was not finite, and ended it.
    """

    sequences: int
    steps: int
    start: float
    end: float
    plain: float | None
    is_lost: bool = False

    @property
    def learnt(self) -> bool:
        return self.end < 0.9 * self.start

    @property
    def is_short(self) -> bool:
        """True if the time ended it before it could be judged."""
        return not self.learnt and not self.is_lost and self.steps < LEAST_REPEATS


def overfit_batch(subject: Subject, rates: Sweep, seconds: float) -> Overfit:
    """Repeat one batch, as often as `seconds` allow."""
    batch, now = subject.small_batch(16, 512), subject.clock.now
    batch = batch if batch.num_targets else subject.small_batch(1 << 20, 1 << 20)
    trial, began = subject.rehearsal(), now()
    start = trial.loss(batch)
    trial.step([batch])
    steps = min(REPEATS, max(LEAST_REPEATS, int(seconds / 2 / max(now() - began, 1e-9))))

    def repeated(trial: Rehearsal, done: int = 0) -> tuple[float, int, bool]:
        began, is_lost = now(), False
        for _ in counted(range(done, steps), "overfitting one batch", steps - done, "steps"):
            done += 1
            is_lost = trial.is_lost(trial.step([batch]))
            if is_lost or now() - began > seconds:
                break
        return trial.loss(batch), done, is_lost

    end, taken, is_lost = repeated(trial, 1)
    plain, recipe = None, subject.recipe
    if not end < 0.9 * start:
        train = recipe.train.model_copy(update={"label_smoothing": 0.0, "freeze": []})
        recipe = recipe.model_copy(update={"train": train})
        usual = OptimSettings(lr=rates.high or USUAL_RATE, weight_decay=0.0).model_dump()
        plain = repeated(subject.rehearsal(drops=False, recipe=recipe, **usual))[0]
    return Overfit(batch.num_seqs, taken, start, end, plain, is_lost)


@finding("lr_high", "fault", explains={"by_heart", "exploding", "run_flat"},
    en=("The learning rate {rate:.1e} is too high, {number:,.0f} times the one with the lowest loss, {high:.1e}: "
        "steps leap over what they could learn.", "set {field}={middle:.1e}; in range here: {low:.1e} to {high:.1e}"),
    zh=("学习率 {rate:.1e} 是损失最低处学习率 {high:.1e} 的 {number:,.0f} 倍：每一步都跨得太大，学不到东西。",
        "设置 {field}={middle:.1e}；合适范围 {low:.1e} 到 {high:.1e}"))  # fmt: skip
def lr_high(subject: Subject, overfit: Overfit, rates: Sweep) -> Found | None:
    """A rate 10 times above the range, or 3 times on a batch that is not learnt."""
    above, field = subject.rate / (rates.high or math.inf), subject.field("optim.lr")
    values = {**vars(rates), "rate": subject.rate, "middle": rates.middle, "field": field}
    return Found(above, field, **values) if above > (10 if overfit.learnt else 3) else None


@finding("lr_low", "fault", explains={"by_heart", "run_flat"},
    en=("The learning rate {rate:.1e} is too low, {number:,.0f} times below the range that learns: {steps} steps on "
        "one batch took the loss from {start:.3g} to {end:.3g}.",
        "set {field}={middle:.1e}; range: {low:.1e} to {high:.1e}"),
    zh=("学习率 {rate:.1e} 只有合适范围下限的 1/{number:,.0f}：同一批上 {steps} 步，损失只从 {start:.3g} 到 "
        "{end:.3g}。", "设置 {field}={middle:.1e}；合适范围 {low:.1e} 到 {high:.1e}"))  # fmt: skip
def lr_low(subject: Subject, overfit: Overfit, rates: Sweep) -> Found | None:
    """A rate 30 times below the range, on a batch that is not learnt."""
    below, field = (rates.low or 0) / subject.rate, subject.field("optim.lr")
    values = {**vars(rates), **vars(overfit), "rate": subject.rate, "middle": rates.middle, "field": field}
    return Found(below, field, **values) if below > 30 and not overfit.learnt and not overfit.is_short else None


@finding("by_heart", "fault", explains={"run_flat"},
    en=("One batch of {sequences} sequences cannot be overfit: loss {start:.3g} to {number:.3g} in {steps} steps, and "
        "to {plain:.3g} with usual settings.", "{do}"),
    zh=("{sequences} 个样本的一批记不住：{steps} 步后损失 {start:.3g} 到 {number:.3g}；用常规设置则到 {plain:.3g}。",
        "{do}"))  # fmt: skip
def by_heart(subject: Subject, overfit: Overfit, rates: Sweep) -> Found | None:
    """A batch that is not learnt with the recipe's settings, and whether it is with usual ones."""
    if overfit.learnt or overfit.plain is None or overfit.is_short:
        return None
    field, rate = subject.field("optim.lr"), f"{rates.high or USUAL_RATE:.1e}"
    if overfit.plain < 0.8 * overfit.start:
        do = (f"set {field}={rate}, as there; then go back to the defaults one by one: optim.groups, optim.betas ...",
              f"先如该试验设 {field}={rate}，再把 optim.groups、optim.betas 等逐个改回默认值")  # fmt: skip
        return Found(overfit.end, "optim", field, do=do, **vars(overfit))
    do = ("labels do not follow from the inputs, or the model does not see them: look at the data first",
          "标签与输入无关，或模型看不到输入：先检查数据")  # fmt: skip
    return Found(overfit.end, "data", "model", do=do, **vars(overfit))


# --------------------------------------------------------------------------- labels against inputs

CARRY_STEPS = 360  # at most


@dataclass(frozen=True)
class Carry:
    """Training on some sequences, judged on others.

    Args:
        rarer: judged sequences of the rarer one of two classes; None where there are not two.
        start, end: loss of those that were trained on.
        errors: how much likelier their own labels are than those of their neighbours, in standard errors, the mean of
            some moments of training.
        steps: that were taken; by_heart: whether the trained ones were learnt; is_short: whether the time ended it.
    """

    learnt: int
    judged: int
    rarer: int | None
    start: float
    end: float
    errors: float
    steps: int
    by_heart: bool = False
    is_short: bool = False


def carry_over(subject: Subject, rates: Sweep, seconds: float) -> Carry | None:
    """Train on some sequences and judge on those held out; None with too few, or without classes."""
    classes, rng, positions = subject.data.class_labels(), np.random.default_rng(0), subject.data.table.positions
    if classes is None or not isinstance(subject.setup.model, Classifies):
        return None
    sides = [rng.permutation(ids) for ids in (subject.stage.train_ids, subject.stage.held_out_ids)]
    usable = (classes[0] >= 0) & (positions > 0)
    learnt, judged = (ids[usable[ids]][:num] for ids, num in zip(sides, (512, 400), strict=True))
    if min(len(learnt), len(judged)) < 24:
        return None
    trial, training = subject.rehearsal(drops=False, lr=rates.middle, lr_scale=1.0, clip=1.0), _batches(subject, learnt)
    began, moments, is_short, by_heart = subject.clock.now(), list[float](), False, False
    start = end = _mean_loss(trial, training)
    for step in counted(range(CARRY_STEPS), "learning some labels", CARRY_STEPS, "steps"):
        trial.step([subject.load(training[step % len(training)])])
        if (step + 1) % 20 == 0:
            moments.append(_errors(trial, _batches(subject, judged)))
            end = _mean_loss(trial, training)
            if by_heart := end < 0.1 * start or (step + 1 >= 120 and end < 0.7 * start):
                break
        if is_short := subject.clock.now() - began > seconds:
            break
    errors = float(np.mean(moments[-6:])) if moments else math.inf
    rarer = int(np.bincount(classes[0][judged], minlength=2).min()) if len(classes[1]) == 2 else None
    return Carry(len(learnt), len(judged), rarer, start, end, errors, step + 1, by_heart, is_short and not by_heart)


@finding("labels_random",
    en=("The model overfit {learnt} sequences, and nothing of it holds for {judged} others: their labels are no "
        "likelier than those of others ({number:.2f} standard errors){mirrored}.",
        "see how labels are matched with rows: they look shuffled"),
    zh=("模型记住了 {learnt} 个样本，却对另外 {judged} 个毫无用处（{number:.2f} 个标准误）{mirrored}。",
        "标签像被打乱了：检查对应关系"))  # fmt: skip
def labels_random(subject: Subject, carry: Carry) -> Found | None:
    """Labels that were overfit without anything that holds for others."""
    if not carry.by_heart or carry.errors >= 1.5:
        return None
    data, flip, mirrored = subject.data, subject.setup.recipe.images.flip, ("", "")
    fields = data.label_fields[:1] or (f"data.{data.kinds[0]}",)
    if data.augmentation == "images" and flip:
        mirrored = (f"; images.flip={flip:g} mirrors pictures, and labels may depend on left and right",
                    f"；images.flip={flip:g} 会左右翻转图像，标签可能与左右有关")  # fmt: skip
        fields = ("images.flip", *fields)
    # Outcomes are often weak, and look like none among few of the rarer class.
    is_weak = carry.rarer is not None and carry.rarer < 30 and carry.errors >= 1
    return Found(carry.errors, *fields, severity="note" if is_weak else None, mirrored=mirrored, **vars(carry))


def _batches(subject: Subject, ids: np.ndarray) -> list[Micro]:
    """Sequences in micro-batches of about 1,024 positions."""
    seed = (subject.recipe.train.seed, 0)
    lengths = subject.data.lengths(seed)[ids]
    groups, micros = np.cumsum(lengths) // 1024, []
    for group in np.unique(groups).tolist():
        stops = lengths[groups == group].astype(np.int32)
        micros.append(Micro(ids[groups == group], np.zeros_like(stops), stops, np.zeros_like(stops), 0, 0, seed))
    return micros


def _mean_loss(trial: Rehearsal, micros: list[Micro]) -> float:
    return float(np.mean([trial.loss(*trial.load([micro])) for micro in micros]))


@torch.no_grad()
def _errors(trial: Rehearsal, micros: list[Micro]) -> float:
    """Distance between the likelihood of labels at their own sequences and that at all others, in standard errors."""
    model, scores, labels = trial.model.eval(), [], []
    assert isinstance(model, Classifies), "checked before"
    for micro in micros:
        (batch,) = trial.load([micro])
        with autocast(trial.setup.precision, trial.setup.device):
            scores.append(model.classify(batch).double().log_softmax(-1).cpu())
        labels.append(required(batch.seq_labels).cpu())
    likely, targets = torch.cat(scores), torch.cat(labels)
    shares = torch.bincount(targets, minlength=likely.shape[1]).double() / len(targets)
    gain = likely.gather(1, targets[:, None])[:, 0] - likely @ shares
    return float(gain.mean() / (gain.std() / len(gain) ** 0.5).clamp_min(1e-12))
