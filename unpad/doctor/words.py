"""Words of the output in English and Chinese, besides those of findings, and the choice of the language."""

from __future__ import annotations

import os
from typing import Literal

from unpad.doctor.catalogue import CATALOGUE
from unpad.terminal.finding import Finding, Severity, Value

Language = Literal["en", "zh"]

WORDS: dict[str, tuple[str, str]] = {
    "fault": ("FAULT", "故障"),
    "warning": ("warning", "警告"),
    "note": ("note", "提示"),
    "do": ("do: ", "办法："),
    "nothing": ("nothing is wrong, as far as these checks see", "就这些检查来看，没有问题"),
    "one_trouble": ("one thing to mend", "有 1 处需要处理"),
    "troubles": ("{number} things to mend, the worst first", "有 {number} 处需要处理，最严重的在前"),
    "seconds": ("{verdict} ({number:.0f} s)", "{verdict}（{number:.0f} 秒）"),
    "looked": ("What was measured", "测量结果"),
    "sweep": ("Loss over the learning rate, {steps} steps", "损失随学习率的变化，{steps} 步"),
    "recipe": ("{rate:.1e}, the recipe's", "{rate:.1e}，本配方"),
    "no_gradient": ("they get no gradient", "它们没有梯度"),
    "no_step": ("steps leave them as they are", "每一步都不改变它们"),
    "forward": ("forward", "前向"),
    "backward": ("backward", "反向"),
    "begin": ("beginning", "开头"),
    "characters": ("characters", "个字符"),
    "bytes": ("bytes", "个字节"),
    "of_words": ("words", "个词"),
    "html": ("tags or entities of HTML", "HTML 标签或实体"),
    "wiki": ("markup of a wiki", "维基标记"),
    "subtitles": ("time codes of subtitles", "字幕时间码"),
    "learnt": ("what is learnt", "要学的内容"),
    "asked": ("the questions", "问题"),
    "digits": ("numbers", "数字"),
    "json": ("JSON", "JSON 数据"),
    "apart": ("letters that stand apart", "被空格隔开的字母"),
    "end": ("end", "末尾"),
    "greets": (
        "nearly all conversations begin with the same question of the user, as a service greets, and the first "
        "replies "
        "differ",
        "几乎所有对话都以用户的同一个问题开头，像是客服的问候，而第一条回复各不相同",
    ),
    "few_said": (
        "what is trained says the same few things in all conversations, and what users say differs",
        "训练的消息在所有对话中都是同样几句，而用户说的各不相同",
    ),
    "after": ("after it", "之后"),
    "before": ("before it", "之前"),
    "length": ("their length", "长度"),
    "words": ("their words", "用词"),
    "by_blank": ("blanks at an end of it", "首尾的空白"),
    "by_begin": ("the prefix with which it begins", "开头的前缀"),
    "by_end": ("the words with which it ends", "结尾的文字"),
    "by_final": ("the mark at its end", "句末的标点"),
    "by_sign": ("one character in it", "其中的一个字符"),
    "by_words": ("all its words, of which the sides share so few, as in two languages", "全部用词（两边共有的比例）"),
    "by_word": ("one word in it", "其中的一个词"),
    "front": ("before its first word", "在第一个词之前"),
    "back": ("behind its last word", "在最后一个词之后"),
    "has_mark": ("it has one, the other has none", "它有，另一个没有"),
    "has_none": ("it has none, the other has one", "它没有，另一个有"),
    "rejected": ("rejected", "被拒绝的"),
    "chosen": ("chosen", "被选中的"),
    "stay": ("hardly leaves the weights that it starts from", "几乎不离开起始权重"),
    "wander": ("may go anywhere from the weights that it starts from", "会远离起始权重"),
    "backslashes": ("escapes with a backslash", "反斜杠转义"),
    "percents": ("escapes with a percent sign", "百分号转义"),
    "base64": ("base64", "base64 编码"),
    "doubled": ("Words stand twice, one after the other", "每个词都连写了两遍"),
    "literal": ("a literal of a program, with its brackets and quotes", "程序里的字面量（带括号和引号）"),
    "joined": ("Words stand without blanks between them", "词与词之间没有空格"),
    "reversed": ("Texts run backwards, from their last letter to their first", "文本是倒着写的"),
    "sorted": ("Words stand in alphabetical order: they were sorted", "词语按字母顺序排列：它们被排过序"),
    "by_size": ("Words stand in the order of their length: they were sorted", "词语按长度排列：它们被排过序"),
    "letters_sorted": ("The letters of words were sorted", "词中的字母被排过序"),
    "letters_shuffled": ("The letters of words stand in any order, as if shuffled", "词中的字母没有顺序，像被打乱了"),
    "word_by_word": (
        "Lines run backwards, from their last word to their first: the order of words was reversed",
        "各行从最后一个词写到第一个词：词序被颠倒了",
    ),
    "shuffled": ("Words stand in no order, as if shuffled", "词语没有顺序，像被打乱了"),
    "picture_size": ("The size of a picture", "图像的大小"),
    "picture_aspect": ("The ratio of width and height", "宽高比"),
    "picture_mode": ("The colour mode of a picture", "图像的颜色模式"),
    "picture_file": ("The kind of file", "文件的格式"),
    "log_length": ("the logarithm (base 10) of the length in characters", "字符长度的对数（以 10 为底）"),
    "capitals": ("the share of capitals", "大写字母的比例"),
    "beyond_ascii": ("the share of characters beyond ASCII", "非 ASCII 字符的比例"),
    "blanks": ("the share of blanks", "空白的比例"),
    "begun_capital": ("the share that begins with a capital", "以大写字母开头的比例"),
    "ended_mark": ("the share that ends with a full stop or such a mark", "以句号等标点结尾的比例"),
    "decimals": ("the share of digits", "数字的比例"),
    "not_held": ("in held-out pictures it does not", "在验证图像中却不行"),
    "at_edges": ("no part but the edge does", "除边缘外没有别的部分能做到"),
    "at_upper_left": ("the upper left corner", "左上角"),
    "at_upper_right": ("the upper right corner", "右上角"),
    "at_lower_left": ("the lower left corner", "左下角"),
    "at_lower_right": ("the lower right corner", "右下角"),
    "at_upper": ("the upper border", "上边"),
    "at_lower": ("the lower border", "下边"),
    "at_left": ("the left border", "左边"),
    "at_right": ("the right border", "右边"),
    "at_middle": ("the middle", "中间"),
    "brightness": ("the brightness", "亮度"),
    "contrast": ("the contrast", "对比度"),
    "colour": ("the strength of colours", "色彩的浓度"),
    "warmth": ("red less blue", "红色减蓝色"),
    "log_aspect": ("the logarithm (base 10) of width by height", "宽高比的对数（以 10 为底）"),
    "log_detail": ("the sharpness (logarithm of the difference of neighbouring pixels)", "清晰度（相邻像素差的对数）"),
    "log_pixels": ("the logarithm (base 10) of the number of pixels", "像素数的对数（以 10 为底）"),
    "num_events": ("The number of events", "事件数"),
    "last_event": (
        "The time of the last event, in days before the landmark (below 0)",
        "最后一个事件距预测时点的天数（负数）",
    ),
    "unknown_code": ("the share of patients with codes that the model does not know", "含有未知编码的病人比例"),
    "log_events": ("the logarithm (base 10) of the number of events", "事件数的对数（以 10 为底）"),
    "no_label": ("without a label", "没有标签"),
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
        "{seconds:.3f} s: forward {forward:.0%}, backward {backward:.0%}, optimizer {optimize:.0%}; loading "
        "beside it "
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


def language_of(asked: str | None) -> Language:
    """The language that is asked for; otherwise that of the locale, English where it is neither of the two."""
    if asked is not None:
        return "zh" if asked == "zh" else "en"
    given = next((value for name in ("LC_ALL", "LC_MESSAGES", "LANG") if (value := os.environ.get(name))), "")
    return "zh" if given.lower().startswith("zh") else "en"


def word(name: str, language: Language, /, **values: Value) -> str:
    """A word or sentence of the output."""
    return WORDS[name][language == "zh"].format(**values)


def sentences(finding: Finding, language: Language) -> tuple[str, str]:
    """The reason and the advice of a finding. A text `@name` among its values is one of `WORDS`."""
    entry = CATALOGUE[finding.code]
    both = (entry.reason_zh, entry.advice_zh) if language == "zh" else (entry.reason, entry.advice)
    values = {
        name: word(value[1:], language) if isinstance(value, str) and value.startswith("@") else value
        for name, value in finding.values.items()
    }
    reason, advice = (text.format(number=finding.number, **values) for text in both)
    return reason, advice


def severity_name(severity: Severity, language: Language) -> str:
    return word(severity, language)
