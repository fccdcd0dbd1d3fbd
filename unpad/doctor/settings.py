"""Findings on a recipe's settings, and on the metrics of a run."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from unpad.doctor.finding import Finding, Found, Severity, finding, level
from unpad.doctor.subject import Subject
from unpad.recipes.training import Ramp, Weight
from unpad.run.report.history import METRICS, load_metrics
from unpad.training.optim import Schedule
from unpad.training.stage import StageSetup, course, stage_epochs

BLOCKED = {"by_heart", "labels_random"}  # what follows where nothing can be learnt


def look(subject: Subject) -> list[Finding]:
    """Findings on the recipe, before anything is tried, and on the metrics of a run."""
    stages = [stage for stage in subject.setup.stages if stage.recipe.train.max_epochs != 0]
    short = [item for stage in stages for item in few_steps(subject, stage)]
    findings = [*extreme(subject), *schedule(subject), *frozen_at_start(subject), *short]
    if subject.folder is None or not (subject.folder / METRICS).exists():  # a run made from another, not trained
        return findings
    rows = load_metrics(subject.folder)
    for stage in dict.fromkeys(row["stage"] for row in rows if row["kind"] == "train"):
        trained = [row for row in rows if row["kind"] == "train" and row["stage"] == stage]
        findings += run_flat(stage, trained, getattr(subject.setup.model.config, "last_values", False))
    return [*findings, *overfit(subject, rows)]


@finding("extreme", explains={*BLOCKED, "exploding", "lr_low", "run_flat"},
    en=("{field} is {number:g}, beyond {limit:g}: it leaves little to see or to learn from.", "set {field}={usual}"),
    zh=("{field} 为 {number:g}，超过 {limit:g}：可看或可学的东西所剩无几。", "设置 {field}={usual}"))  # fmt: skip
def extreme(subject: Subject) -> Found | None:
    """The setting furthest beyond what leaves something to learn: targets, dropout, augmentation, colours, terms."""
    recipe, setup = subject.recipe, subject.setup.recipe
    optim, (first, second) = recipe.optim, recipe.optim.betas
    decays = [group.weight_decay * group.lr_scale for group in optim.groups if group.weight_decay is not None]
    clips = [one for one in (optim.clip, *(group.clip for group in optim.groups)) if one is not None]
    # Field, value, the largest that is sensible, and the usual one; what may not be small has a minus. Adam need not
    # converge where its mean of gradients reaches further back than that of squares (Reddi et al. 2018, arXiv
    # 1904.09237), and weight decay alone may not halve a matrix in 300 steps.
    given: list[tuple[str, float, float, object]] = [
        ("train.label_smoothing", recipe.train.label_smoothing, 0.3, 0.1),
        ("optim.betas", first, math.sqrt(max(second, 0.0)) + 1e-9, "[0.9,0.95]"),
        ("optim.eps", optim.eps, 1e-3, "1e-8"),
        ("optim.clip", -min(clips, default=1.0), -1e-3, 1.0),
        ("optim.groups", -min((group.lr_scale for group in optim.groups if group.lr_scale), default=1.0), -2e-3, "[]"),
        ("optim.weight_decay", max([optim.weight_decay, *decays]), math.log(2) / 300 / subject.rate, 0.01),
        *((field, share, 0.55, 0.1) for field, share in _dropouts(subject.setup.model.config.model_dump(), "model")),
    ]
    if optim.schedule in ("cosine", "warmup"):
        given.append(("optim.warmup", optim.warmup, 0.5, 0.05))
    if subject.data.augmentation == "images":
        limits = {"shift": 0.5, "scale": 2.0, "zoom": 2.0, "color": 0.8, "erase": 0.8, "flip": 0.99}
        given += [(f"images.{name}", getattr(setup.images, name), most, most / 4) for name, most in limits.items()]
    for name, weight in recipe.losses.items():
        usual = _last(subject.setup.model.weights.get(name, 1.0)) or 1.0
        given.append((f"losses.{name}", _last(weight), 50 * usual, usual))
    window = getattr(subject.setup.model.config, "sliding_window", None)
    if window is not None and getattr(subject.setup.model.config, "sliding_blocks", None) is None:
        given.append(("model.sliding_window", -window, -4, 128))
    beyond = [(value / limit if limit > 0 else limit / value, field, value, limit, usual)
              for field, value, limit, usual in given if value >= limit]  # fmt: skip
    if not beyond:
        return None
    times, name, value, limit, default = max(beyond, key=lambda item: item[0])
    field = subject.field(name)
    return Found(abs(value), field, name, severity=level(times >= 2), field=field, limit=abs(limit), usual=str(default))


def _dropouts(section: dict[str, Any], path: str) -> Iterator[tuple[str, float]]:
    """Fields of a section that are shares of numbers to drop."""
    for name, value in section.items():
        if isinstance(value, dict):
            yield from _dropouts(value, f"{path}.{name}")
        elif "dropout" in name and isinstance(value, float):
            yield f"{path}.{name}", value


def _last(weight: Weight) -> float:
    return weight.end if isinstance(weight, Ramp) else weight


@finding("schedule", explains=BLOCKED,
    en=("The schedule {name} {what}: hardly a step has a rate to learn by.", "set {field}=cosine, or {others}"),
    zh=("{name} 调度{what}：几乎没有一步用到有效的学习率。", "设置 {field}=cosine，或修改 {others}"))  # fmt: skip
def schedule(subject: Subject) -> Found | None:
    """A warm-up of most of the stage, or a rate that is near 0, or jumps, over most of it."""
    optim, steps, peak = subject.recipe.optim, subject.num_steps, subject.rate
    names = {"exponential": ("decay", "decay_epochs"), "restarts": ("restarts", "first_cycle", "floor")}
    others = names.get(optim.schedule, ("warmup", "floor"))
    fields = [subject.field(f"optim.{name}") for name in ("schedule", *others)]
    values = {"name": optim.schedule, "field": fields[0], "others": ", ".join(fields[1:])}
    epochs = stage_epochs(subject.stage)
    taken = np.unique(np.linspace(0, steps - 1, 2000).astype(int)).tolist()
    rates = np.array([Schedule(optim, epochs, steps).rate(step, int(epochs.epochs_before(step))) for step in taken])
    area, end = float(rates.mean()) / peak, float(rates[-1])
    what = (f"runs at {area:.1%} of the peak rate on average (mean), from {peak:.1e} down to {end:.1e}",
            f"的平均学习率只有峰值的 {area:.1%}，从 {peak:.1e} 降到 {end:.1e}")  # fmt: skip
    if optim.schedule == "restarts" and optim.per == "update" and steps < 10 * (optim.restarts + 1) >= 50:
        what = (f"restarts {optim.restarts} times in {steps:,} steps", f"在 {steps:,} 步中重启 {optim.restarts} 次")
    elif area >= 0.08:
        return None
    return Found(area, *fields, severity=level(area < 0.03), what=what, **values)


@finding("frozen_at_start", explains={*BLOCKED, "frozen"},
    en=("train.freeze leaves {number:.0%} of the parameters as they were drawn at random, such as {layer}: this model "
        "has not learnt before.", "leave out {field}, or start from trained weights: train.init_from=RUN"),
    zh=("train.freeze 让 {number:.0%} 的参数保持随机初值，例如 {layer}：它没有训练过。",
        "去掉 {field}，或用 train.init_from=RUN"))  # fmt: skip
def frozen_at_start(subject: Subject) -> Found | None:
    """Parameters that `train.freeze` leaves as they were drawn, in a model that has learnt nothing before."""
    recipe = subject.recipe
    given = recipe.train.init_from is not None or "from" in subject.setup.recipe.model or subject.setup.base is not None
    if not recipe.train.freeze or given or subject.stage.name != subject.setup.stages[0].name:
        return None
    sizes = [(name, p.numel(), p.requires_grad) for name, p in subject.rehearsal().model.named_parameters()]
    frozen = [(name, size) for name, size, trains in sizes if not trains]
    share = sum(size for _, size in frozen) / max(sum(size for _, size, _ in sizes), 1)
    blocks = [trains for name, _, trains in sizes if name.startswith("blocks.")]
    if share < 0.1 and (not blocks or any(blocks)):
        return None
    field = subject.field("train.freeze")
    return Found(share, field, severity=level(share >= 0.4 or not any(blocks)), layer=frozen[0][0], field=field)


@finding("few_steps",
    en=("Stage {stage} has {number:,.0f} steps: not much is learnt in so few{why}.",
        "lower {field}, or raise {longer}"),
    zh=("阶段 {stage} 只有 {number:,.0f} 步：学不到什么{why}。", "调小 {field}，或调大 {longer}"))  # fmt: skip
def few_steps(subject: Subject, stage: StageSetup) -> Found | None:
    """A stage of few steps, or of none: it has no data, or train.max_steps ends the run before."""
    steps, field_of = course(subject.setup.stages).get(stage.name), subject.setup.recipe.field_of
    most, kind = stage.recipe.train.max_steps, stage.kinds[0]
    over = steps is not None and most is not None and steps.first >= most
    if steps is not None and not steps.is_short and not over:
        return None
    field = field_of(stage.name, "plan.tokens_per_step") if steps is not None else f"stages.{stage.name}.use"
    longer = f"data.{kind}" if steps is None else "train.max_steps" if over else field_of(stage.name, steps.longer)
    patient = any(one.recipe.train.patience is not None for one in subject.setup.stages)  # it may end one sooner
    why = ("; train.max_steps is of all stages together", "；train.max_steps 是所有阶段合计") if over else ("", "")
    more = ("stages", f"stages.{stage.name}", "train.max_epochs") if over or steps is None else ()
    severity: Severity = "note" if over and patient else "warning"
    num = 0 if steps is None or over else steps.num_steps
    return Found(num, longer, field, *more, severity=severity, stage=stage.name, field=field, longer=longer, why=why)


@finding("run_flat", "fault",
    en=("The loss of stage {stage} hardly fell in {steps:,} steps: {start:.3g} to {end:.3g}; {bad} steps were not "
        "finite.", "see the findings above; without any, try optim.lr 3 times as high and as low"),
    zh=("阶段 {stage} 的损失在 {steps:,} 步中几乎没有下降：{start:.3g} 到 {end:.3g}；{bad} 步不是有限数。",
        "把 optim.lr 乘以、除以 3 各试一次"))  # fmt: skip
def run_flat(stage: str, trained: list[dict[str, Any]], regressed: bool = False) -> Found | None:
    """A stage whose training loss was not finite, or did not fall though it did not begin as regression."""
    losses = np.array([float(row["loss"]) for row in trained])
    finite, part = losses[np.isfinite(losses)], max(len(losses) // 10, 3)
    bad = len(losses) - len(finite)
    start, end = (float(side.mean()) if len(side) else math.nan for side in (finite[:part], finite[-part:]))
    fall = (start - end) / max(abs(start), 1e-9)
    if not bad and (regressed or len(losses) < 40 or fall >= 0.03):
        return None
    return Found(fall, "optim.lr", METRICS, "precision", stage=stage, steps=len(losses), start=start, end=end, bad=bad)


@finding("overfit",
    en=("The held-out loss rose by {number:.0%} since step {step:,}, the training loss fell to {end:.3g}: later steps "
        "overfit.", "set train.patience=3, raise model.dropout or optim.weight_decay, or give more data"),
    zh=("从第 {step:,} 步起验证损失升高 {number:.0%}，训练损失降到 {end:.3g}：过拟合。",
        "设 train.patience=3，或增加数据"))  # fmt: skip
def overfit(subject: Subject, rows: list[dict[str, Any]]) -> Found | None:
    """The last stage's held-out loss after its best."""
    last = subject.setup.stages[-1]
    held = [row for row in rows if row["kind"] == "eval" and row["loss"] is not None and row["stage"] == last.name]
    trained = [float(row["loss"]) for row in rows if row["kind"] == "train"]
    if len(held) < 2 or not trained:
        return None
    best = min(held, key=lambda row: float(row["loss"]))
    rise = float(held[-1]["loss"]) / max(float(best["loss"]), 1e-9) - 1
    severity: Severity = "warning" if rise >= 0.3 and last.recipe.train.patience is None else "note"
    fields = ("train.patience", "model.dropout")
    return Found(rise, *fields, severity=severity, step=best["step"], end=trained[-1]) if rise >= 0.1 else None
