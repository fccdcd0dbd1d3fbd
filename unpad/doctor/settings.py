"""Findings on a recipe's settings, and on the metrics of a run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from unpad.doctor.finding import Finding, Found, Severity, finding, level
from unpad.doctor.subject import Subject, Trial
from unpad.recipes.training import OptimSettings, Ramp, Weight
from unpad.run.report.history import METRICS, load_metrics
from unpad.training.length import course
from unpad.training.optim import Schedule
from unpad.training.stage import StageSetup, stage_epochs

BLOCKED = {"by_heart", "labels_random"}  # what follows where nothing can be learnt


def look(subject: Subject) -> list[Finding]:
    """Findings on the recipe, before anything is tried, and on the metrics of a run."""
    stages = [stage for stage in subject.setup.stages if stage.recipe.train.max_epochs != 0]
    short = [item for stage in stages for item in few_steps(subject, stage)]
    findings = [*extreme(subject), *schedule(subject), *decay(subject), *frozen_at_start(subject), *short]
    if subject.folder is None or not (subject.folder / METRICS).exists():  # a run made from another, not trained
        return findings
    rows = load_metrics(subject.folder)
    for stage in dict.fromkeys(row["stage"] for row in rows if row["kind"] == "train"):
        trained = [row for row in rows if row["kind"] == "train" and row["stage"] == stage]
        findings += [*run_flat(stage, trained), *term_worse(stage, trained)]
    return [*findings, *overfit(subject, rows)]


@finding(
    "extreme", explains={*BLOCKED, "clip", "exploding", "starved", "lr_low"},
    en=("{field} is {number:g}, beyond {limit:g}: it leaves little to see or to learn from.", "set {field}={usual}"),
    zh=("{field} 为 {number:g}，超过 {limit:g}：可看或可学的东西所剩无几。", "设置 {field}={usual}"),
)  # fmt: skip
def extreme(subject: Subject) -> Found | None:
    """The setting furthest beyond what leaves something to learn: targets, dropout, augmentation, colours, terms."""
    recipe, setup = subject.recipe, subject.setup.recipe
    first, second = recipe.optim.betas
    # Field, value, the largest that is sensible, and the usual one. Adam need not converge where its mean of gradients
    # reaches further back than that of squares (Reddi et al. 2018, arXiv 1904.09237).
    given: list[tuple[str, float, float, object]] = [
        ("train.label_smoothing", recipe.train.label_smoothing, 0.3, 0.1),
        ("optim.betas", first, math.sqrt(max(second, 0.0)) + 1e-9, "[0.9,0.95]"),
        *((field, share, 0.55, 0.1) for field, share in _dropouts(subject.setup.model.config.model_dump(), "model")),
    ]
    if subject.data.augmentation == "images":
        given += [(f"images.{name}", getattr(setup.images, name), limit, limit / 4) for name, limit in
                  {"shift": 0.5, "scale": 2.0, "zoom": 2.0, "color": 0.8, "erase": 0.8, "flip": 0.99}.items()]  # fmt: skip
        given += [("images.std", max(setup.images.std), 10.0, "[0.5,0.5,0.5]"),
                  ("images.std", -min(setup.images.std), -0.02, "[0.5,0.5,0.5]")]  # fmt: skip
    elif subject.data.augmentation == "augment" and setup.augment.multiplier:
        given += [(f"augment.{name}", getattr(setup.augment, name), limit, limit / 4) for name, limit in
                  {"delete": 0.4, "insert": 0.7, "synonyms": 0.9}.items()]  # fmt: skip
    for name, weight in recipe.losses.items():
        usual = _last(subject.setup.model.weights.get(name, 1.0)) or 1.0
        given.append((f"losses.{name}", _last(weight), 50 * usual, usual))
    window = getattr(subject.setup.model.config, "sliding_window", None)
    if window is not None and getattr(subject.setup.model.config, "sliding_blocks", None) is None:
        given.append(("model.sliding_window", -window, -4, 128))
    if recipe.train.patience is not None and recipe.train.min_delta != "auto":
        given.append(("train.min_delta", recipe.train.min_delta, 0.2, 0))
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


@finding(
    "schedule", explains=BLOCKED,
    en=("The schedule {name} {what}: hardly a step has a rate to learn by.", "set {field}={usual}, or change {others}"),
    zh=("{name} 调度{what}：几乎没有一步用到有效的学习率。", "设置 {field}={usual}，或修改 {others}"),
)  # fmt: skip
def schedule(subject: Subject) -> Found | None:
    """A warm-up of most of the stage, or a rate that is near 0, or jumps, over most of it."""
    optim, steps, peak = subject.recipe.optim, subject.num_steps, subject.rate
    names = {"exponential": ("decay", "decay_epochs"), "restarts": ("restarts", "first_cycle", "floor")}
    others = names.get(optim.schedule, ("warmup", "floor"))
    fields = [subject.field(f"optim.{name}") for name in ("schedule", *others)]
    values = {"name": optim.schedule, "field": fields[0], "usual": "cosine", "others": ", ".join(fields[1:])}
    if optim.schedule in ("cosine", "warmup") and optim.warmup >= 0.5:
        warm = math.ceil(optim.warmup * steps)
        what = (
            f"warms up for {optim.warmup:.0%} of the stage, {warm:,} of {steps:,} steps",
            f"预热占 {optim.warmup:.0%}",
        )
        values |= {"field": fields[1], "usual": "0.05", "others": fields[0]}
        return Found(optim.warmup, fields[1], *fields, severity=level(optim.warmup >= 0.9), what=what, **values)
    epochs = stage_epochs(subject.stage, subject.plan)
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


@finding(
    "decay", explains={*BLOCKED, "run_flat"},
    en=("Weight decay forgets: without gradients {half:,.0f} steps would halve every matrix, and the stage has {steps:,}.",
        "set {field}=0.01; optim.lr times optim.weight_decay is {number:.1e} in a step"),
    zh=("权重衰减过强：没有梯度时，{half:,.0f} 步就会让所有矩阵减半，而本阶段有 {steps:,} 步。",
        "设置 {field}=0.01；现在每一步的 optim.lr × optim.weight_decay 是 {number:.1e}"),
)  # fmt: skip
def decay(subject: Subject) -> Found | None:
    """Weight decay against the learning rate: how fast a matrix would fade without gradients."""
    optim = subject.recipe.optim
    groups = [group.weight_decay * group.lr_scale for group in optim.groups if group.weight_decay is not None]
    step = subject.rate * max([optim.weight_decay, *groups])
    half = math.log(2) / step if step else math.inf
    field = subject.field("optim.weight_decay")
    return (
        Found(step, field, severity=level(half < 100), half=half, steps=subject.num_steps, field=field)
        if half <= 300
        else None
    )


@finding(
    "frozen_at_start", explains={*BLOCKED, "frozen"},
    en=("train.freeze leaves {number:.0%} of the parameters as they were drawn at random, such as {layer}: this model has "
        "not learnt before.",
        "leave out {field}, or start from trained weights: train.init_from=RUN"),
    zh=("train.freeze 让 {number:.0%} 的参数保持随机初值，例如 {layer}：这个模型之前没有训练过。",
        "去掉 {field}，或从训练好的权重开始：train.init_from=RUN"),
)  # fmt: skip
def frozen_at_start(subject: Subject) -> Found | None:
    """Parameters that `train.freeze` leaves as they were drawn, in a model that has learnt nothing before."""
    recipe = subject.recipe
    given = recipe.train.init_from is not None or "from" in subject.setup.recipe.model or subject.setup.base is not None
    if not recipe.train.freeze or given or subject.stage.name != subject.setup.stages[0].name:
        return None
    sizes = [(name, p.numel(), p.requires_grad) for name, p in Trial(subject).model.named_parameters()]
    frozen = [(name, size) for name, size, trains in sizes if not trains]
    share = sum(size for _, size in frozen) / max(sum(size for _, size, _ in sizes), 1)
    blocks = [trains for name, _, trains in sizes if name.startswith("blocks.")]
    if share < 0.1 and (not blocks or any(blocks)):
        return None
    field = subject.field("train.freeze")
    return Found(share, field, severity=level(share >= 0.4 or not any(blocks)), layer=frozen[0][0], field=field)


@finding(
    "few_steps",
    en=("Stage {stage} has {number:,.0f} steps: there is not much to learn in so few{why}.",
        "lower {field}, or raise {longer}"),
    zh=("阶段 {stage} 只有 {number:,.0f} 步：这么少的步数学不到什么{why}。", "调小 {field}，或调大 {longer}"),
)  # fmt: skip
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


@finding(
    "clip", explains=BLOCKED,
    en=("Clipping to {clip:.1g} makes gradients {number:,.0f} times smaller in every step; their direction is lost in "
        "Adam's epsilon.", "set {field}=1.0; gradients here have a norm of {norm:.2g}"),
    zh=("裁剪到 {clip:.1g} 使每一步的梯度缩小 {number:,.0f} 倍，淹没在 Adam 的 epsilon 里。",
        "设置 {field}=1.0；这里的梯度范数约为 {norm:.2g}"),
)  # fmt: skip
def clip(subject: Subject, norms: list[float]) -> Found | None:
    """The smallest clipping threshold, of all parameters or of a group, against the norms of some steps."""
    optim = subject.recipe.optim
    given = [(optim.clip, subject.field("optim.clip")), *((group.clip, "optim.groups") for group in optim.groups)]
    least, field = min(((one, name) for one, name in given if one is not None), default=(math.inf, ""))
    times, middle = min(norms, default=0.0) / least, float(np.median(norms or [0.0]))
    return (
        Found(times, field, severity=level(times > 1000), clip=least, norm=middle, field=field) if times > 100 else None
    )


@finding(
    "eps", explains=BLOCKED,
    en=("Adam's epsilon, {eps:g}, is {number:,.0f} times the size of a gradient's numbers, {size:.1e}: steps shrink as "
        "much.", "set {field}=1e-8"),
    zh=("Adam 的 epsilon（{eps:g}）是梯度数值大小（{size:.1e}）的 {number:,.0f} 倍：每一步缩小同样的倍数。", "设置 {field}=1e-8"),
)  # fmt: skip
def eps(subject: Subject, norms: list[float]) -> Found | None:
    """Adam's epsilon against the numbers of a gradient: where it is larger, steps shrink by as much."""
    given, finite = subject.recipe.optim.eps, [norm for norm in norms if math.isfinite(norm)]
    num = sum(parameter.numel() for parameter in subject.model.parameters() if parameter.requires_grad)
    if not finite or not num or given <= OptimSettings().eps:
        return None
    size, field = float(np.median(finite)) / math.sqrt(num), subject.field("optim.eps")
    times = given / max(size, 1e-30)
    return Found(times, field, severity=level(times >= 30), eps=given, size=size, field=field) if times >= 3 else None


@finding(
    "run_flat", "fault",
    en=("The loss of stage {stage} hardly fell in {steps:,} steps: {start:.3g} to {end:.3g}, {number:.1%}; {bad} steps "
        "were not finite.", "the findings above say why; without any, try optim.lr 3 times as high and as low"),
    zh=("阶段 {stage} 的损失在 {steps:,} 步中几乎没有下降：{start:.3g} 到 {end:.3g}，{number:.1%}；{bad} 步出现 NaN 或无穷大。",
        "原因见上面的条目；若没有，把 optim.lr 乘以和除以 3 各试一次"),
)  # fmt: skip
def run_flat(stage: str, trained: list[dict[str, Any]]) -> Found | None:
    """A stage whose training loss did not fall, or was not finite."""
    losses = np.array([float(row["loss"]) for row in trained])
    finite, part = losses[np.isfinite(losses)], max(len(losses) // 10, 3)
    bad = len(losses) - len(finite)
    start, end = (float(side.mean()) if len(side) else math.nan for side in (finite[:part], finite[-part:]))
    fall = (start - end) / max(abs(start), 1e-9)
    if not bad and (len(losses) < 40 or fall >= 0.03):
        return None
    return Found(fall, "optim.lr", METRICS, "precision", stage=stage, steps=len(losses), start=start, end=end, bad=bad)


@finding(
    "term_worse",
    en=("In stage {stage} {name} (of chosen replies, in a stage of pairs) rose from {start:.3g} to {end:.3g}, {number:.1f} "
        "times its start: the stage unlearned it.", "look at losses.{name} and train.beta, and lower optim.lr"),
    zh=("阶段 {stage} 中 {name} 一项（偏好对阶段为被选中的回答）从 {start:.3g} 升到 {end:.3g}，是开始时的 {number:.1f} 倍：反而忘了它。",
        "检查 losses.{name} 和 train.beta，并调低 optim.lr"),
)  # fmt: skip
def term_worse(stage: str, trained: list[dict[str, Any]]) -> Found | None:
    """A loss term that a stage logs or trains, and that ends far above its start; that of rejected replies is meant to."""
    part = max(len(trained) // 10, 1)
    for name in ("cross_entropy", "nll", "classification", "reconstruction", "next_code", "next_value", "next_time"):
        logged = [float(row["values"][name]) for row in trained if row["values"].get(name) is not None]
        start, end = (float(np.mean(side)) if side else 0.0 for side in (logged[:part], logged[-part:]))
        if len(logged) >= 10 and end >= max(1.5 * start, start + 0.5) and start > 0:
            fields = ("optim.lr", "train.beta", f"losses.{name}", METRICS)
            return Found(end / start, *fields, stage=stage, name=name, start=start, end=end)
    return None


@finding(
    "overfit",
    en=("The held-out loss rose by {number:.0%} since step {step:,}, while the training loss fell to {end:.3g}: later "
        "steps overfit.", "set train.patience=3, raise model.dropout or optim.weight_decay, or give more data"),
    zh=("从第 {step:,} 步起验证损失升高了 {number:.0%}，而训练损失降到 {end:.3g}：后面只是在死记。",
        "设 train.patience=3，调大 model.dropout 或 optim.weight_decay，或增加数据"),
)  # fmt: skip
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
