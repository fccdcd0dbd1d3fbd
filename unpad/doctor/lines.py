"""The examination as text for 80 columns, or a narrower terminal, and its sweep of learning rates as an SVG file."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from unpad.doctor.finding import Language, Value, Words
from unpad.doctor.trials import HIGHEST, LOWEST, Sweep
from unpad.run.report.svg import WIDE, Axes, Curve, picture
from unpad.storage import write_atomic
from unpad.terminal.table import cells, columns, wrapped

COLUMNS, ROWS = 60, 9  # of the drawing, at most
LEFT = 7  # cells of what stands at its left
MARK = 6  # cells of a learning rate below it, with a blank


WORDS: dict[str, Words] = {
    "nothing": ("nothing is wrong, as far as these checks see", "就这些检查来看，没有问题"),
    "one_trouble": ("one thing to mend", "有 1 处需要处理"),
    "troubles": ("{number} things to mend, the worst first", "有 {number} 处需要处理，最严重的在前"),
    "seconds": ("{verdict} ({number:.0f} s)", "{verdict}（{number:.0f} 秒）"),
    "looked": ("What was measured", "测量结果"),
    "sweep": ("Loss over the learning rate, {steps} steps", "损失随学习率的变化，{steps} 步"),
    "recipe": ("{rate:.1e}, the recipe's", "{rate:.1e}，本配方"),
    "subject": (
        "{name}: stage {stage}, {parameters:,} parameters, {steps:,} steps",
        "{name}：阶段 {stage}，{parameters:,} 个参数，{steps:,} 步",
    ),
    "of_run": (", weights of step {step:,}", "，第 {step:,} 步的权重"),
    "of_pairs": (
        "Steps of pairs are not tried: rows, settings and weights are looked at.",
        "偏好对的训练步不作试验：只检查数据、设置和权重。",
    ),
    "others": (
        "Not looked at: stage {others}. stages.{stage}.train.max_epochs=0 goes on to it.",
        "未检查阶段 {others}；加上 stages.{stage}.train.max_epochs=0 就检查下一个。",
    ),
    "heart": ("a batch, overfit", "记住一批"),
    "heart_value": (
        "loss {start:.3g} to {end:.2g} in {steps} steps, {sequences} sequences",
        "损失 {start:.3g} 到 {end:.2g}，{steps} 步，{sequences} 个样本",
    ),
    "rate": ("learning rate", "学习率"),
    "rate_value": ("{rate:.1e}; learns from {low:.1e} to {high:.1e}", "{rate:.1e}；合适范围 {low:.1e} 到 {high:.1e}"),
    "step": ("a step", "一步"),
    "step_value": (
        "{seconds:.3f} s: forward {forward:.0%}, backward {backward:.0%}, optimizer {optimize:.0%}; loading beside it "
        "{load:.0%}",
        "{seconds:.3f} 秒：前向 {forward:.0%}，反向 {backward:.0%}，优化器 {optimize:.0%}；同时读取数据 {load:.0%}",
    ),
    "saved": ("a checkpoint", "一个检查点"),
    "saved_value": ("{save:.3f} s", "{save:.3f} 秒"),
    "norm": ("gradient", "梯度"),
    "norm_value": ("norm {norm:.3g} over {blocks} blocks, all finite", "范数 {norm:.3g}，{blocks} 个块，全部有限"),
    "cores": ("threads", "线程"),
    "cores_value": ("{threads} on {cores} cores; {kernels}", "{threads} 个，共 {cores} 个核；{kernels}"),
}


def word(name: str, language: Language, /, **values: Value) -> str:
    """A word or sentence of the output."""
    return WORDS[name][language == "zh"].format(**values)


def fact_lines(facts: list[tuple[str, str]]) -> list[str]:
    """Names with their values, which continue below themselves."""
    column = max((cells(name) for name, _ in facts), default=0) + 2
    lines = []
    for name, value in facts:
        first, *more = wrapped(value, columns() - column)
        lines.append(f"{name}{' ' * (column - cells(name))}{first}")
        lines += [" " * column + line for line in more]
    return lines


def drawing(sweep: Sweep, rate: float, language: Language) -> list[str]:
    """The sweep as characters: the loss over the learning rate, the range, and the recipe's own rate."""
    if not len(sweep.rates):
        return []
    decades, wide = math.log10(HIGHEST / LOWEST), min(COLUMNS, columns() - LEFT)

    def column(value: float) -> int:
        return min(max(round(math.log10(value / LOWEST) / decades * (wide - 1)), 0), wide - 1)

    top, bottom = max(1.0, min(float(sweep.losses.max()), 1.5)), float(sweep.losses.min())
    canvas = np.full((ROWS, wide), " ")
    for value, loss in zip(sweep.rates, sweep.losses, strict=True):
        height = (top - min(loss, top)) / max(top - bottom, 1e-12)
        canvas[round(height * (ROWS - 1)), column(float(value))] = "*"
    lines = [word("sweep", language, steps=len(sweep.rates))]
    for row, cells_of_row in enumerate(canvas):
        level = top - row / (ROWS - 1) * (top - bottom)
        lines.append(f"{level:5.0%} |{''.join(cells_of_row)}".rstrip())
    axis = ["-"] * wide
    if sweep.low is not None and sweep.high is not None:
        axis[column(sweep.low) : column(sweep.high) + 1] = "=" * (column(sweep.high) - column(sweep.low) + 1)
    lines.append(f"      +{''.join(axis)}")
    room = min(wide + MARK, columns() - LEFT)
    marks = [" "] * room
    for power in range(0, round(decades) + 1, math.ceil(MARK * decades / wide)):
        value = LOWEST * 10**power
        at = min(column(value), room - MARK + 1)
        marks[at : at + MARK - 1] = f"{value:.0e}"
    lines.append(f"{' ' * LEFT}{''.join(marks)}".rstrip())
    at, said = LEFT + column(min(max(rate, LOWEST), HIGHEST)), word("recipe", language, rate=rate)
    fits = at + 2 + cells(said) <= columns()
    lines.append(f"{' ' * at}^ {said}" if fits else f"{' ' * (at - 1 - cells(said))}{said} ^")
    return lines


HIGHEST_DRAWN = 1.5  # of the first loss: what diverges would press the rest flat


def write_picture(path: Path, sweep: Sweep, rate: float, language: Language) -> None:
    """Draw the loss over the learning rate, with the range and the recipe's own rate.

    Raises:
        DiskError: the file cannot be written.
    """
    shown = sweep.losses <= HIGHEST_DRAWN
    x, y = np.log10(sweep.rates[shown]), sweep.losses[shown]
    marks = [(word("recipe", language, rate=rate), float(np.log10(rate)))]
    if sweep.low is not None and sweep.high is not None:
        marks += [(f"{end:.1e}", float(np.log10(end))) for end in (sweep.low, sweep.high)]
    title = word("sweep", language, steps=len(sweep.rates))
    axes = Axes(size=WIDE, begin=float(np.log10(LOWEST)), powers=True, over=word("rate", language))
    write_atomic(path, picture(title, Curve("main", [(x, y)]), axes, marks))
