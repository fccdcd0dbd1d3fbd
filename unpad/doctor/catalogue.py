"""The words of every finding, in English and Chinese: the reason with its number, and what to do.

The order is the rank of findings of one severity: a cause stands before what follows from it. Both languages name the
same values of the finding, in braces.
"""

from __future__ import annotations

from typing import NamedTuple


class Entry(NamedTuple):
    """The words of a finding."""

    reason: str
    advice: str
    reason_zh: str
    advice_zh: str


CATALOGUE: dict[str, Entry] = {
    "weights_not_finite": Entry(
        "{number:,.0f} weights are NaN or infinite, first in {layer}.",
        "start from an earlier checkpoint: train.init_from=RUN, with a lower optim.lr",
        "有 {number:,.0f} 个权重是 NaN 或无穷大，最先出现在 {layer}。",
        "从更早的检查点重新开始：train.init_from=RUN，并调低 optim.lr",
    ),
    "overflow": Entry(
        "In {precision} the output of {layer} overflows; in fp32 it is finite, the largest number {number:.3g}.",
        "set precision=fp32, or bf16 in place of fp16",
        "用 {precision} 计算时 {layer} 的输出溢出；用 fp32 则是有限的，最大为 {number:.3g}。",
        "设置 precision=fp32，或用 bf16 代替 fp16",
    ),
    "not_finite": Entry(
        "{layer} is the first layer whose output is not finite: {number:.1%} of it, in the {pass_name} pass.",
        "look at this layer; if its weights are large, lower optim.lr, or start from an earlier checkpoint",
        "{layer} 是第一个输出出现 NaN 或无穷大的层（占输出的 {number:.1%}，{pass_name}）。",
        "检查这一层；如果它的权重很大，就调低 optim.lr，或从更早的检查点开始",
    ),
    "targets_shifted": Entry(
        "{number:.0%} of the labels are not the next token of their own sequence, such as at {where}.",
        "labels are tokens[1:] and inputs tokens[:-1] of one sequence: look at the code that makes the batches",
        "{number:.0%} 的标签不是本序列的下一个词元，例如 {where}。",
        "同一序列中标签应为 tokens[1:]，输入应为 tokens[:-1]：检查生成批次的代码",
    ),
    "sees_target": Entry(
        "A later token changes outputs before it, by {number:.2g} of their size: the model sees the token that "
        "it is to predict.",
        "set {field}=true; a loss near 0 is no success here",
        "后面的词元会改变前面的输出（幅度 {number:.2g}）：模型看到了它要预测的词元。",
        "设置 {field}=true；这时损失接近 0 并不说明学会了",
    ),
    "padding_labels": Entry(
        "{number:.0%} of the labels that count are on padding or filler.",
        "padding has no label: its loss mask is False; plan.strategy=pack has no padding",
        "计入损失的标签中有 {number:.0%} 落在填充位置上。",
        "填充位置不应有标签，损失掩码应为 False；plan.strategy=pack 没有填充",
    ),
    "leaking_code": Entry(
        "{number:.0%} of the patients with {code} have label {target}: {covered:.0%} of all with this label, and "
        "{others:.1%} of the others. It may be the outcome itself.",
        "leave it out of the events, or predict before it: events.landmark; a loss near 0 is no success here",
        "有 {code} 的病人中 {number:.0%} 的标签是 {target}：占该标签病人的 {covered:.0%}，而其他病人中只有"
        " {others:.1%}。它可能就是结局本身。",
        "从事件中去掉它，或用 events.landmark 在它之前预测；这时损失接近 0 并不说明学会了",
    ),
    "leaking_value": Entry(
        "The value of {code} alone tells the label of {sequences:,} patients, AUROC {number:.3f}: it may be written "
        "after the outcome.",
        "leave it out of the events and of `static`, or predict before it: events.landmark",
        "单凭 {code} 的数值就能分出 {sequences:,} 个病人的标签，AUROC 为 {number:.3f}：它可能是结局之后才写入的。",
        "从事件和 `static` 中去掉它，或用 events.landmark 在它之前预测",
    ),
    "no_history": Entry(
        "{number:.0%} of {sequences:,} patients have no event with a time up to the landmark; {late:,} events are "
        "after it.",
        "compare events.landmark with the times in the files: both count from the same day, in events.unit",
        "{sequences:,} 个病人中有 {number:.0%} 在预测时点之前没有任何带时间的事件；之后的事件有 {late:,} 个。",
        "把 events.landmark 与文件里的时间对照：两者应从同一天算起，单位为 events.unit",
    ),
    "long_history": Entry(
        "{number:.1%} of {sequences:,} patients have events more than a lifetime before the landmark, up to "
        "{years:,.0f} years.",
        "look at `unit` of the tables (minutes read as days?) and at placeholders such as 1900-01-01",
        "{sequences:,} 个病人中有 {number:.1%} 的事件比预测时点早一辈子以上，最早 {years:,.0f} 年。",
        "检查各表的 `unit`（分钟当成了天？）以及 1900-01-01 之类的占位日期",
    ),
    "read_as": Entry(
        "The text is garbled: UTF-8 was read in the encoding {encoding}. in {number:.0%} of the rows "
        "its bytes are UTF-8 again, such as {shown!r} at {where}.",
        "write the file again from its source, read as UTF-8; do not train on garbled characters",
        "文本是乱码：UTF-8 被当作 {encoding} 读取。用它编码回去，{number:.0%} 的行又是 UTF-8，例如 {where} 的"
        " {shown!r}。",
        "从源文件以 UTF-8 重新写出；不要用乱码训练",
    ),
    "bytes_as_letters": Entry(
        "The text is garbled: {number:.0%} of its characters stand in runs of accented letters, as bytes of another "
        "encoding do that were read as Latin-1; such as {shown!r} at {where}.",
        "find the encoding of the source (GB18030, Shift-JIS, KOI8-R ...), and write the file again as UTF-8",
        "文本是乱码：{number:.0%} 的字符是连续的带符号字母，像是把别的编码的字节当成了 Latin-1；例如 {where} 的"
        " {shown!r}。",
        "找出源文件的编码（GB18030、Shift-JIS、KOI8-R 等），再以 UTF-8 写出",
    ),
    "replaced": Entry(
        "{number:.1%} of the characters are U+FFFD, which stands for bytes that were lost when the text was decoded; "
        "such as {shown!r} at {where}.",
        "decode the source in its own encoding, and write the file again as UTF-8",
        "{number:.1%} 的字符是 U+FFFD，即解码时丢失的字节；例如 {where} 的 {shown!r}。",
        "用源文件自己的编码解码，再以 UTF-8 写出",
    ),
    "no_text": Entry(
        "{number:.0%} of the rows are no text but {why}, such as {shown!r} at {where}.",
        "look at the field, column or separator that the text is taken from: {{path: FILE, field: NAME}} names it, and "
        "JSON lines end in .jsonl",
        "{number:.0%} 的行不是正文，而是{why}，例如 {where} 的 {shown!r}。",
        "检查正文取自哪个字段、列或分隔符：用 {{path: FILE, field: NAME}} 指定；JSON 行文件应以 .jsonl 结尾",
    ),
    "no_order": Entry(
        "The order of characters says nothing: packed, the text takes {number:.0%} of the room of the same characters "
        "shuffled; such as {shown!r} at {where}. It is no language, or was scrambled.",
        "look at the field that the text is taken from, and at how it was decoded, unpacked or shuffled",
        "字符的顺序没有规律：压缩后的大小是打乱后的 {number:.0%}；例如 {where} 的 {shown!r}。它不是语言，或被打乱了。",
        "检查正文取自哪个字段，以及它是如何解码、解压或打乱的",
    ),
    "unseen": Entry(
        "{number:.1%} of the characters are control characters or marks without width, mostly {shown}: the model "
        "learns to write them.",
        "take them out of the files",
        "{number:.1%} 的字符是控制字符或零宽字符，最多的是 {shown}：模型会学着写它们。",
        "从文件中去掉它们",
    ),
    "markup": Entry(
        "{number:.0%} of the characters are tags or entities of HTML, such as {shown!r}: the model learns markup in "
        "place of text.",
        "take the text out of the HTML before training; keep markup only where the model is to write it",
        "{number:.0%} 的字符是 HTML 标签或实体，例如 {shown!r}：模型学的是标记而不是正文。",
        "训练前从 HTML 中取出正文；只有要让模型写标记时才保留",
    ),
    "swapped_roles": Entry(
        "{number:.0%} of the replies ask something, such as {shown!r}, and {asked:.0%} of the messages of users: the "
        "roles look swapped.",
        "exchange user and assistant in the files, or the fields that hold them",
        "{number:.0%} 的回复在提问，例如 {shown!r}，而用户消息中只有 {asked:.0%} 在提问：角色看起来反了。",
        "在文件中交换 user 和 assistant，或交换对应的字段",
    ),
    "given_answer": Entry(
        "{number:.0%} of the questions hold their own answer, such as {answer!r} in {question!r}, and {others:.0%} "
        "that "
        "of another: the model only has to copy it.",
        "take the answer out of the question; a low loss is no success here",
        "{number:.0%} 的问题里已经写着自己的答案，例如 {question!r} 里的 {answer!r}；写着别的问题的答案的只有 "
        "{others:.0%}："
        "模型照抄即可。",
        "从问题中去掉答案；这时损失低并不说明学会了",
    ),
    "clashing_labels": Entry(
        "{number:.0%} of {sequences:,} training inputs are equal to one with another label or answer, such as {where}: "
        "no model can tell them apart.",
        "look at how labels are matched with rows, and at what makes the inputs alike",
        "{sequences:,} 个训练输入中有 {number:.0%} 与标签或答案不同的另一个完全相同，例如 {where}：任何模型都分不开。",
        "检查标签与样本的对应关系，以及输入为何相同",
    ),
    "cut_alike": Entry(
        "{number:.0%} of the texts are cut after exactly {most:,} {unit}, the largest length there is, and end without "
        "a mark, such as {shown!r} at {where}.",
        "look for a limit of a column or of an export, such as VARCHAR({most}), and export them again without it",
        "{number:.0%} 的文本正好在 {most:,} {unit}处被截断，这是出现的最大长度，结尾没有标点，例如 {where} 的 "
        "{shown!r}。",
        "检查数据库列或导出程序的长度上限，例如 VARCHAR({most})，去掉后重新导出",
    ),
    "same_reply": Entry(
        "{number:.0%} of {sequences:,} conversations have the same reply, {target!r}, to different questions, beside "
        "others that differ: the model learns to say it to everything.",
        "take these rows out of the files, or all but a few, if it is an excuse or an error message",
        "{sequences:,} 段对话中有 {number:.0%} 对不同的问题给出同一回答 {target!r}，"
        "其余回答各不相同：模型会学着对什么都这样说。",
        "如果它是推托或错误信息，请从文件中去掉这些行，或只留少数",
    ),
    "held_out_unlike": Entry(
        "Held-out texts are unlike the training ones: they share {number:.0%} of their tokens, and parts of training "
        "as large share {usual:.0%}; such as {where}. Their loss says nothing about what is learnt: another "
        "language or source is held out.",
        "hold out rows of the same source: check their splits in the files, or leave those out and set "
        "data.holdout=0.1",
        "留出的文本与训练文本不同：两者的词元分布只有 {number:.0%} 重合，而同样大小的训练部分之间有 "
        "{usual:.0%}；例如 {where}。"
        "留出的是另一种语言或来源，其损失不能说明学到了什么。",
        "从同一来源留出：检查文件里的 split，或去掉它们并设 data.holdout=0.1",
    ),
    "two_answers": Entry(
        "{number:.0%} of the questions occur again with another answer: {question!r} has {first!r} and {second!r}, "
        "which "
        "contradict each other.",
        "keep one answer of each question, or say in the question what tells them apart",
        "{number:.0%} 的问题重复出现而答案不同：{question!r} 的答案有 {first!r} 和 {second!r}，互相矛盾。",
        "每个问题只留一个答案，或在问题中写明区别",
    ),
    "common_part": Entry(
        "{number:.0%} of what is learnt is a part that nearly all rows share at their {place}, {characters} "
        "characters: "
        "{shown!r}. The loss looks low for it.",
        "take the header, prefix or closing out of the files; in conversations a system message is the place for it",
        "学习的内容中有 {number:.0%} 是几乎所有行{place}共有的 {characters} 个字符：{shown!r}。损失会因此显得低。",
        "从文件中去掉这段页眉、前缀或结尾；对话可把它放进 system 消息",
    ),
    "dates_as_values": Entry(
        "The values of {code} are dates, not measurements: their mean, {mean:.6g}, is a time since 1970. Codes like "
        "it: "
        "{codes}, with {number:.0%} of all values.",
        "name the column as `time`, or leave it out of the values of data.events",
        "{code} 的数值是日期而不是测量值：均值 {mean:.6g} 是 1970 年以来的时间。这样的编码有 {codes} 种，占全部数值的"
        " {number:.0%}。",
        "把这一列设为 `time`，或不要放进 data.events 的数值",
    ),
    "equal_values": Entry(
        "All values of {code} are {mean:.6g}, or differ by less than single precision tells apart: they say nothing. "
        "Codes like it: {codes}, with {number:.0%} of all values.",
        "look at the column that data.events takes the values from",
        "{code} 的数值都是 {mean:.6g}，或者差别小于单精度能分辨的程度：没有信息。这样的编码有 {codes} 种，占全部数值的"
        " {number:.0%}。",
        "检查 data.events 取数值的那一列",
    ),
    "one_time": Entry(
        "{number:.0%} of {sequences:,} patients with several events have all of them at one time: there is no course "
        "to "
        "learn from.",
        "look at the time column of the tables and its unit: dates without a day, or years read as days?",
        "{sequences:,} 个有多个事件的病人中有 {number:.0%} 的事件全在同一时刻：没有病程可学。",
        "检查各表的时间列及其单位：日期是否缺少日，或把年当成了天？",
    ),
    "unknown_codes": Entry(
        "{number:.0%} of the events have codes that the model does not know; it knows {codes}.",
        "lower events.min_count, or map codes to coarser ones",
        "{number:.0%} 的事件的编码模型不认识；它认识的只有 {codes} 种。",
        "调低 events.min_count，或把编码归并成更粗的",
    ),
    "constant_labels": Entry(
        "{number:.1%} of {sequences:,} sequences have the same target, {target}: there is nothing to tell apart.",
        "look at the labels or answers in the files, and at the field that names them",
        "{sequences:,} 个样本中有 {number:.1%} 目标相同，都是 {target}：没有可以区分的东西。",
        "检查文件里的标签或答案，以及指定它们的字段",
    ),
    "constant_inputs": Entry(
        "{number:.0%} of {sequences:,} inputs hold one value throughout, such as {where}: there is nothing to "
        "see in them.",
        "look at the files, and at how they are decoded",
        "{sequences:,} 个输入中有 {number:.0%} 从头到尾是同一个值，例如 {where}：里面没有信息。",
        "检查这些文件，以及它们的解码方式",
    ),
    "one_patch": Entry(
        "{number:.0%} of the pictures are one patch: the model sees each as one vector, and nothing of its parts.",
        "change {field}; a patch has {patch} pixels a side, and a picture should have 16 patches or more",
        "{number:.0%} 的图像只有一个图块：模型把每张图看成一个向量，看不到其中的部分。",
        "修改 {field}；图块边长为 {patch} 像素，一张图最好有 16 个以上图块",
    ),
    "picture_scale": Entry(
        "The numbers of pictures are {number:.3g} in size after images.mean and images.std, and spread by "
        "{spread:.3g}: "
        "models expect about 1.",
        "set images.std and images.mean to those of colours from 0 to 1, such as 0.5 each",
        "经过 images.mean 和 images.std 之后，图像数值的大小是 {number:.3g}，离散程度 {spread:.3g}：模型期望约为 1。",
        "把 images.std 和 images.mean 设为 0 到 1 的颜色的统计值，例如都是 0.5",
    ),
    "augmentation": Entry(
        "{field} is {number:g}: little is left of what training is to see.",
        "set {field}={usual:.2g}",
        "{field} 为 {number:g}：训练时原来的内容所剩无几。",
        "设置 {field}={usual:.2g}",
    ),
    "rare_codes": Entry(
        "{number:.0%} of the events have codes that one patient alone has, {codes:,} of {all_codes:,} codes: nothing "
        "of them holds for others.",
        "take numbers and names of rows out of the code column, map codes to coarser ones, or set events.min_count=5",
        "{number:.0%} 的事件用的编码只出现在一个病人身上（{all_codes:,} 种编码中的 {codes:,} 种）：对别的病人没有用。",
        "去掉编码列中的流水号和名称，把编码归并成更粗的，或设 events.min_count=5",
    ),
    "far_values": Entry(
        "{far:,} values of {code} are {times:,.0f} times as far from the median as all others, and make its standard "
        "deviation {number:,.0f} times as large: the others look equal. Codes like it: {codes}.",
        "look for another unit or placeholders such as 9999 among them; convert or empty these cells",
        "{code} 有 {far:,} 个数值离中位数的距离是其余的 {times:,.0f} 倍，使标准差变成 {number:,.0f} 倍：其余数值看起来"
        "都一样。这样的编码有 {codes} 种。",
        "检查其中是否混有别的单位或 9999 之类的占位值；换算或清空这些单元格",
    ),
    "unknown_tokens": Entry(
        "{number:.1%} of the characters are lost to unknown tokens, such as {common}: the tokenizer cannot spell "
        "this text.",
        "use tokenizer.kind=bpe with tokenizer.path=null, which learns from your text, or a file made from text like "
        "it",
        "{number:.1%} 的字符成了未知词元，例如 {common}：这个分词器无法表示这些文本。",
        "用 tokenizer.kind=bpe 或 words，它们从你的文本学词表；或换用同类文本训练的分词器文件",
    ),
    "other_tokenizer": Entry(
        "The tokenizer takes {per_character:.2f} tokens for a character, {number:.1f} times as many as one made "
        "from this text; {unused:.0%} of its vocabulary never occurs.",
        "set tokenizer.kind=bpe and tokenizer.path=null, or name a file made from text of this language",
        "这个分词器每个字符要用 {per_character:.2f} 个词元，是用这些文本训练的分词器的 {number:.1f} 倍；词表有"
        " {unused:.0%} 从未出现。",
        "设置 tokenizer.kind=bpe 和 tokenizer.path=null，或使用由同一种语言的文本训练的分词器文件",
    ),
    "double_marks": Entry(
        "{number:.0%} of the sequences have {mark} twice at the {place}.",
        "BOS and EOS are added once by the encoder: take them out of the texts or the template",
        "{number:.0%} 的序列在{place}有两个 {mark}。",
        "编码时已经各加一次 BOS 和 EOS：从文本或模板中去掉它们",
    ),
    "small_vocabulary": Entry(
        "A vocabulary of {size} takes {per_character:.2f} tokens for a character, {number:.1f} times as many as one "
        "of a usual size: sequences are that much longer.",
        "raise tokenizer.vocab_size, such as to 4000",
        "{size} 的词表每个字符要用 {per_character:.2f} 个词元，是常用大小的 {number:.1f} 倍：序列也长那么多。",
        "调大 tokenizer.vocab_size，例如 4000",
    ),
    "same_rows": Entry(
        "{number:.0%} of {sequences:,} held-out sequences looked at are also trained on, such as {where}: the "
        "held-out loss is too good.",
        "take them out of one part; or leave out `split` and let data.holdout divide the rows",
        "看过的 {sequences:,} 个验证样本中有 {number:.0%} 也在训练集里，例如 {where}：验证损失好得不真实。",
        "从其中一边删掉它们；或者不写 split，由 data.holdout 来划分",
    ),
    "near_rows": Entry(
        "{number:.0%} of {sequences:,} held-out rows are training rows with hardly a change, such as {where}: the "
        "held-out loss is too good.",
        "set data.near_duplicates=together, or take one of each pair out of the files",
        "{sequences:,} 个验证样本中有 {number:.0%} 只是训练样本稍加改动，例如 {where}：验证损失好得不真实。",
        "设置 data.near_duplicates=together，或从文件中删掉其中一个",
    ),
    "repeats": Entry(
        "{number:.0%} of {sequences:,} training rows repeat an earlier one; {where} occurs {times} times.",
        "keep one copy of each row; to train on some more often, give their source a weight",
        "{sequences:,} 个训练样本中有 {number:.0%} 与前面的完全相同；{where} 出现了 {times} 次。",
        "每行只留一份；要多训练某些数据，可给来源设 weight",
    ),
    "held_out": Entry(
        "{number:.0%} of the rows are held out, and {trained:,} are left to train on.",
        "lower data.holdout, such as to 0.05, or look at `split` in the rows",
        "{number:.0%} 的行留作验证，只剩 {trained:,} 行用于训练。",
        "调小 data.holdout，例如 0.05，或检查行中的 `split`",
    ),
    "cut_short": Entry(
        "Sequences of {whole:,.0f} {unit} on average are cut to {number:,.1f}; {lost:.0%} of what there is is "
        "left out.",
        "raise {field}",
        "平均长 {whole:,.0f} 的序列（单位 {unit}）被截成 {number:,.1f}；{lost:.0%} 的内容没有用上。",
        "调大 {field}",
    ),
    "swallowed": Entry(
        "{where} has {number:.2%} of the targets of an epoch, the other sources have all the rest.",
        "raise its weight, or lower that of the others: {field}",
        "一轮的目标中，{where} 只占 {number:.2%}，其余全是别的来源。",
        "调高它的权重，或调低其他来源的权重：{field}",
    ),
    "class_weight": Entry(
        "{field} is {weight:g}: class {side} counts {number:,.0f} times as much in the loss as all of the other class, "
        "so that every probability goes to {side}.",
        "set {field}={usual:g}, with which both classes count the same, or 1",
        "{field} 为 {weight:g}：类别 {side} 在损失中的分量是另一类总和的 {number:,.0f} 倍，所有概率都会趋向 {side}。",
        "设置 {field}={usual:g}，使两类分量相同，或设为 1",
    ),
    "loss_weight": Entry(
        "{field} is {weight:g}, {number:,.0f} times its default, {usual:g}: the other terms, clipping and epsilon do "
        "not "
        "fit it.",
        "set {field}={usual:g}",
        "{field} 为 {weight:g}，是默认值 {usual:g} 的 {number:,.0f} 倍：其他损失项、裁剪和 epsilon 都与它不相配。",
        "设置 {field}={usual:g}",
    ),
    "smoothing": Entry(
        "Label smoothing takes {number:.0%} of every target: the model learns to be unsure.",
        "set {field}=0, or up to 0.1",
        "标签平滑拿走了每个目标的 {number:.0%}：模型学到的是不确定。",
        "设置 {field}=0，最多 0.1",
    ),
    "frozen_at_start": Entry(
        "train.freeze leaves {number:.0%} of the parameters and {blocks} blocks as they were drawn at random, such as "
        "{layer}: this model has not learnt before.",
        "leave out {field}, or start from trained weights: train.init_from=RUN",
        "train.freeze 让 {number:.0%} 的参数和 {blocks} 个块保持随机初值，例如 {layer}：这个模型之前没有训练过。",
        "去掉 {field}，或从训练好的权重开始：train.init_from=RUN",
    ),
    "schedule": Entry(
        "The schedule {schedule} runs at {number:.1%} of the peak rate on average, from {peak:.1e} down to "
        "{last:.1e}: the "
        "stage is over before much is learnt.",
        "set {field}=cosine, or change {others}",
        "{schedule} 调度的平均学习率只有峰值的 {number:.1%}，从 {peak:.1e} 降到 {last:.1e}：还没学到多少就没有学习率"
        "了。",
        "设置 {field}=cosine，或修改 {others}",
    ),
    "betas": Entry(
        "With betas {first:g} and {second:g} the mean of gradients reaches back {number:,.0f} steps, further than "
        "the mean "
        "of squares that it is divided by: Adam need not converge.",
        "set {field}=[0.9,0.95]",
        "betas 为 {first:g} 和 {second:g} 时，梯度均值回溯 {number:,.0f} 步，比用来除它的平方均值还长：Adam 不一定收"
        "敛。",
        "设置 {field}=[0.9,0.95]",
    ),
    "stale": Entry(
        "With beta {first:g} the mean of gradients reaches back {number:,.0f} steps, and the stage has {steps:,}: "
        "its steps "
        "follow old gradients.",
        "set {field}=[0.9,0.95]",
        "beta 为 {first:g} 时，梯度均值回溯 {number:,.0f} 步，而本阶段只有 {steps:,} 步：更新跟着过时的梯度走。",
        "设置 {field}=[0.9,0.95]",
    ),
    "eps": Entry(
        "Adam's epsilon, {eps:g}, is {number:,.0f} times the size of a gradient's numbers, {size:.1e}: steps shrink "
        "as much.",
        "set {field}=1e-8",
        "Adam 的 epsilon（{eps:g}）是梯度数值大小（{size:.1e}）的 {number:,.0f} 倍：每一步缩小同样的倍数。",
        "设置 {field}=1e-8",
    ),
    "lr_high": Entry(
        "The learning rate {rate:.1e} is {number:,.0f} times the one with the lowest loss, {high:.1e}: steps "
        "leap over what they could learn.",
        "set {field}={middle:.1e}; in range here: {low:.1e} to {high:.1e}",
        "学习率 {rate:.1e} 是损失最低处学习率 {high:.1e} 的 {number:,.0f} 倍：每一步都跨得太大，学不到东西。",
        "设置 {field}={middle:.1e}；这里合适的范围是 {low:.1e} 到 {high:.1e}",
    ),
    "step_size": Entry(
        "The learning rate {rate:.1e} is too high for layers of this width: a step of Adam moves each of {inputs:,.0f} "
        "weights of an output by about the rate, together {number:.1f} times the size of its inputs.",
        "lower {field}: rates of 1e-4 to 1e-2 are usual",
        "对这样宽的层，学习率 {rate:.1e} 过高：Adam 的一步把一个输出的 {inputs:,.0f} 个权重各移动约一个学习率，合起来"
        "是输入大小的"
        " {number:.1f} 倍。",
        "调低 {field}：通常在 1e-4 到 1e-2 之间",
    ),
    "lr_low": Entry(
        "The learning rate {rate:.1e} is {number:,.0f} times below the range that learns here: {steps} steps on "
        "one batch took the loss from {start:.3g} to {end:.3g}.",
        "set {field}={middle:.1e}; in range here: {low:.1e} to {high:.1e}",
        "学习率 {rate:.1e} 只有合适范围下限的 1/{number:,.0f}：在同一批上走 {steps} 步，损失只从 {start:.3g} 变到"
        " {end:.3g}。",
        "设置 {field}={middle:.1e}；这里合适的范围是 {low:.1e} 到 {high:.1e}",
    ),
    "clip": Entry(
        "Clipping to {clip:.1g} makes gradients {number:,.0f} times smaller in every step; their direction is "
        "lost in Adam's epsilon.",
        "set {field}=1.0; gradients here have a norm of {norm:.2g}",
        "裁剪到 {clip:.1g} 使每一步的梯度缩小 {number:,.0f} 倍，淹没在 Adam 的 epsilon 里。",
        "设置 {field}=1.0；这里的梯度范数约为 {norm:.2g}",
    ),
    "dropout": Entry(
        "Dropout leaves {kept:.0%} of the numbers in {layer}; with it {steps} steps on one batch end at a loss "
        "of {number:.3g}.",
        "set {field}=0.1",
        "{layer} 的 dropout 只留下 {kept:.0%} 的数值；带着它在一批上走 {steps} 步，损失停在 {number:.3g}。",
        "设置 {field}=0.1",
    ),
    "decay": Entry(
        "Weight decay forgets: without gradients {half:,.0f} steps would halve every matrix, and the stage has "
        "{steps:,}.",
        "set {field}={usual:.2g}; optim.lr times optim.weight_decay is {number:.1e} in a step",
        "权重衰减过强：没有梯度时，{half:,.0f} 步就会让所有矩阵减半，而本阶段有 {steps:,} 步。",
        "设置 {field}={usual:.2g}；现在每一步的 optim.lr × optim.weight_decay 是 {number:.1e}",
    ),
    "warmup": Entry(
        "The learning rate warms up for {number:.0%} of the stage, {warm:,} of {steps:,} steps: hardly a step "
        "has its full size.",
        "set {field}=0.05",
        "学习率预热占了本阶段的 {number:.0%}，{steps:,} 步中的 {warm:,} 步：几乎没有一步用到完整的学习率。",
        "设置 {field}=0.05",
    ),
    "ends_soon": Entry(
        "An evaluation counts as progress only if it gains {number:g} nats: training ends while it still learns.",
        "set {field}=0",
        "一次评估要降低 {number:g} 纳特才算进步：还在学习时训练就结束了。",
        "设置 {field}=0",
    ),
    "tiny_steps": Entry(
        "A step has {number:.1f} sequences with {targets:.1f} targets on average: its gradient is mostly chance.",
        "raise {field}, such as to {usual}",
        "平均每步只有 {number:.1f} 个序列、{targets:.1f} 个目标：梯度大多是偶然的。",
        "调大 {field}，例如 {usual}",
    ),
    "narrow_model": Entry(
        "The model is {number:.0f} channels wide, too few to tell its inputs apart.",
        "raise {field}, such as to 128",
        "模型宽度只有 {number:.0f} 个通道，分不清输入。",
        "调大 {field}，例如 128",
    ),
    "no_blocks": Entry(
        "The model has {number:.0f} blocks: no token sees another.",
        "set {field}=2, or more",
        "模型有 {number:.0f} 个块：词元之间互相看不到。",
        "设置 {field}=2 或更大",
    ),
    "rope_base": Entry(
        "The base of the rotary positions is {number:.2g}: all channels turn about as fast, and far places look like "
        "near "
        "ones.",
        "set {field}=10000",
        "旋转位置编码的底数是 {number:.2g}：所有通道转得差不多快，远处和近处分不清。",
        "设置 {field}=10000",
    ),
    "narrow_heads": Entry(
        "A head of attention has {number:.0f} channels of a width of {width}: queries and keys can hardly tell "
        "tokens apart.",
        "set {field}={usual}, or another number that leaves 16 channels or more to a head",
        "宽度 {width} 中每个注意力头只有 {number:.0f} 个通道：查询和键几乎分不清词元。",
        "设置 {field}={usual}，或让每个头有 16 个以上通道",
    ),
    "short_window": Entry(
        "Attention reaches {number:.0f} tokens, the token itself included: nothing further back is seen.",
        "raise {field}, or leave it out",
        "注意力只能看到 {number:.0f} 个词元（包括自己）：更早的内容看不到。",
        "调大 {field}，或去掉它",
    ),
    "few_steps": Entry(
        "The stage has {number:,.0f} steps: there is not much to learn in so few.",
        "lower {field}, or raise {longer}",
        "本阶段只有 {number:,.0f} 步：这么少的步数学不到什么。",
        "调小 {field}，或调大 {longer}",
    ),
    "frozen": Entry(
        "{number:.0%} of the parameters to train do not change, such as {layer}: {why}.",
        "look at train.freeze, optim.groups (lr_scale 0) and losses; in code, at detach and no_grad",
        "要训练的参数中有 {number:.0%} 不变化，例如 {layer}：{why}。",
        "检查 train.freeze、optim.groups（lr_scale 为 0）和 losses；代码里检查 detach 和 no_grad",
    ),
    "slow_group": Entry(
        "optim.groups lets {number:.0%} of the parameters, {layer} and others, learn at {scale:g} of the rate: they "
        "hardly "
        "change.",
        "raise lr_scale of the group, or leave the group out",
        "optim.groups 让 {number:.0%} 的参数（{layer} 等）只用 {scale:g} 倍的学习率：它们几乎不变。",
        "调大该组的 lr_scale，或去掉这一组",
    ),
    "starved": Entry(
        "The outcome has {number:.2%} of the gradient that the layers get, {strongest} has {other:.0%}: they hardly "
        "learn it.",
        "set {field}={usual:g}, the default, or lower losses.{strongest}",
        "各层得到的梯度中结局只占 {number:.2%}，{strongest} 占 {other:.0%}：几乎学不到结局。",
        "设置 {field}={usual:g}（默认值），或调低 losses.{strongest}",
    ),
    "dead_units": Entry(
        "{number:.0%} of the units of {layer} are 0 for every token: they pass no gradient.",
        "lower optim.lr, or begin anew; another model.activation than relu dies less easily",
        "{layer} 中 {number:.0%} 的单元对所有词元都输出 0：梯度无法通过。",
        "调低 optim.lr 或重新开始；不用 relu 的 model.activation 不容易死",
    ),
    "attention_sharp": Entry(
        "{heads} of {all_heads} heads look at one token alone (entropy {number:.1%} of the most), first in "
        "{layer}: attention has collapsed.",
        "begin anew with a lower optim.lr and optim.warmup=0.1; model.qk_norm=true bounds the scores of decoders",
        "{all_heads} 个注意力头中有 {heads} 个只看一个词元（熵为最大值的 {number:.1%}），最先在 {layer}：注意力已"
        "坍缩。",
        "调低 optim.lr 并设 optim.warmup=0.1，重新开始；解码器可用 model.qk_norm=true 限制分数",
    ),
    "attention_uniform": Entry(
        "All {all_heads} heads look at all tokens alike (entropy {number:.2%} of the most): queries and keys "
        "tell nothing apart.",
        "look at the weights of queries and keys: train.freeze, optim.groups, and the learning rate",
        "全部 {all_heads} 个注意力头对所有词元一视同仁（熵为最大值的 {number:.2%}）：查询和键没有区分任何东西。",
        "检查查询和键的权重：train.freeze、optim.groups 和学习率",
    ),
    "exploding": Entry(
        "Numbers grow {number:,.0f} times from the first block to {layer}; the gradient's norm is {norm:.2g}.",
        "lower optim.lr and optim.clip, warm up longer (optim.warmup=0.1), or start from an earlier checkpoint",
        "从第一个块到 {layer}，数值增大了 {number:,.0f} 倍；梯度范数是 {norm:.2g}。",
        "调低 optim.lr 和 optim.clip，延长预热（optim.warmup=0.1），或从更早的检查点开始",
    ),
    "labels_flipped": Entry(
        "The model learnt {learnt} sequences by heart, and nothing of it holds for {sequences} others ({number:.2f} "
        "standard errors), while images.flip mirrors pictures: their labels depend on left and right, or are shuffled.",
        "set images.flip=0 if a mirrored picture has another label; if this finding stays, look at how labels are "
        "matched with pictures",
        "模型记住了 {learnt} 个样本，却对另外 {sequences} 个毫无用处（相差 {number:.2f} 个标准误），"
        "同时 images.flip 会左右翻转图像：标签与左右有关，或者被打乱了。",
        "如果翻转后的图像应有另一个标签，设 images.flip=0；若仍有此提示，检查标签与图像的对应关系",
    ),
    "labels_random": Entry(
        "The model learnt {learnt} sequences by heart, and nothing of it holds for {sequences} others: their "
        "labels are no likelier than those of their neighbours ({number:.2f} standard errors).",
        "look at how labels are matched with rows: they look shuffled",
        "模型记住了 {learnt} 个样本，却对另外 {sequences} 个毫无用处：它们自己的标签并不比别人的更可能（相差"
        " {number:.2f} 个标准误）。",
        "检查标签与样本的对应关系：看起来被打乱了",
    ),
    "by_heart": Entry(
        "One batch of {sequences} sequences is not learnt by heart: the loss went from {start:.3g} to "
        "{number:.3g} in {steps} steps, without dropout, decay and tight clipping.",
        "labels do not follow from the inputs, or the model does not see them: look at the data first",
        "{sequences} 个样本的一批数据记不住：不用 dropout、衰减和强裁剪，{steps} 步后损失从 {start:.3g} 到 "
        "{number:.3g}。",
        "标签与输入无关，或模型看不到输入：先检查数据",
    ),
    "setting": Entry(
        "One batch of {sequences} sequences is not learnt by heart: the loss went from {start:.3g} to {number:.3g} in "
        "{steps} steps, and to {plain:.3g} with the default of {field} alone.",
        "go back to the default of {field}",
        "{sequences} 个样本的一批数据记不住：{steps} 步后损失从 {start:.3g} 到 {number:.3g}；只把 {field} 改回默认值"
        "则到"
        " {plain:.3g}。",
        "把 {field} 改回默认值",
    ),
    "by_heart_settings": Entry(
        "One batch of {sequences} sequences is not learnt by heart: with this recipe the loss went from "
        "{start:.3g} to {number:.3g} in {steps} steps, with usual settings to {plain:.3g}.",
        "go back to the defaults of optim one by one: betas, eps, groups",
        "{sequences} 个样本的一批数据记不住：用本配方 {steps} 步后损失从 {start:.3g} 到 {number:.3g}，用常规设置"
        "则到 {plain:.3g}。",
        "把 optim 的设置逐个改回默认值：betas、eps、groups",
    ),
    "imbalance": Entry(
        "{number:.1%} of {sequences:,} training sequences are of one class, {target}: to say it always is nearly "
        "right.",
        "judge by auroc or per class; events: model.positive_weight; images: give more of the others",
        "{sequences:,} 个训练样本中有 {number:.1%} 属于同一类（{target}）：永远答它就几乎全对。",
        "看 auroc 或各类分别的指标；病人数据可设 model.positive_weight；图像请补充其他类",
    ),
    "run_nan": Entry(
        "{number:,.0f} steps of the run were not finite, first step {step:,}.",
        "lower optim.lr, set optim.warmup=0.1 and optim.clip=0.5; compare with precision=fp32",
        "训练中有 {number:,.0f} 步出现 NaN 或无穷大，最早是第 {step:,} 步。",
        "调低 optim.lr，设 optim.warmup=0.1 和 optim.clip=0.5；并与 precision=fp32 对比",
    ),
    "run_flat": Entry(
        "The loss of stage {stage} hardly fell in {steps:,} steps: {start:.3g} to {end:.3g}, {number:.1%}.",
        "the findings above say why; without any, try optim.lr 3 times as high and as low",
        "阶段 {stage} 的损失在 {steps:,} 步中几乎没有下降：{start:.3g} 到 {end:.3g}，{number:.1%}。",
        "原因见上面的条目；若没有，把 optim.lr 乘以和除以 3 各试一次",
    ),
    "run_spikes": Entry(
        "{number:,.0f} steps of the run have a loss or gradient far above their neighbours, such as step {step:,}.",
        "lower optim.lr, or optim.clip; `unpad report` shows the steps",
        "训练中有 {number:,.0f} 步的损失或梯度远高于邻近的步，例如第 {step:,} 步。",
        "调低 optim.lr 或 optim.clip；`unpad report` 会画出这些步",
    ),
    "overfit": Entry(
        "The held-out loss rose by {number:.0%} since step {step:,}, while the training loss fell to {end:.3g}: "
        "later steps learn by heart.",
        "set train.patience=3, raise model.dropout or optim.weight_decay, or give more data",
        "从第 {step:,} 步起验证损失升高了 {number:.0%}，而训练损失降到 {end:.3g}：后面只是在死记。",
        "设 train.patience=3，调大 model.dropout 或 optim.weight_decay，或增加数据",
    ),
    "saving": Entry(
        "Checkpoints take {number:.0%} of the time: {seconds:.2f} s each, after every {every:,} steps of {step:.2f} s.",
        "set {field}={usual}, or checkpoint.every_seconds=600",
        "保存检查点占 {number:.0%} 的时间：每 {every:,} 步（每步 {step:.2f} 秒）就存一次，每次 {seconds:.2f} 秒。",
        "设置 {field}={usual}，或 checkpoint.every_seconds=600",
    ),
    "evaluating": Entry(
        "Evaluations take about {number:.0%} of the time: {tokens:,} held-out {unit} after every {every:,} steps.",
        "set {field}={usual}, or hold out less",
        "评估约占 {number:.0%} 的时间：每 {every:,} 步就要算 {tokens:,} 个验证单位（{unit}）。",
        "设置 {field}={usual}，或减少验证数据",
    ),
    "loader": Entry(
        "Loading a step takes {number:.1f} times as long as computing it, {load:.3f} s and {compute:.3f} s: "
        "steps wait for data.",
        "put the files on a faster disk; images: smaller files, images.cache_mib, fewer images.max_tokens",
        "读取一步数据的时间是计算的 {number:.1f} 倍（{load:.3f} 秒对 {compute:.3f} 秒）：计算在等数据。",
        "把文件放到更快的磁盘；图像可用更小的文件、images.cache_mib 或更少的 images.max_tokens",
    ),
    "padding": Entry(
        "{number:.0%} of what is computed is padding, by plan.strategy={strategy}.",
        "set {field}=pack, which has none",
        "计算量的 {number:.0%} 是填充（plan.strategy={strategy}）。",
        "设置 {field}=pack，它没有填充",
    ),
    "neighbour": Entry(
        "Other processes use {number:.1f} of {cores} cores, this one {own:.1f}.",
        "end them, or wait; `top` names them. What was timed here is too slow",
        "其他进程占用了 {cores} 个核中的 {number:.1f} 个，本进程用了 {own:.1f} 个。",
        "结束它们或等一等，`top` 能列出它们。这里测到的时间偏慢",
    ),
    "threads": Entry(
        "{threads} of {cores} cores compute: {number:.0%} of the machine is idle.",
        "set {field}={cores}, and leave OMP_NUM_THREADS unset",
        "{cores} 个核中只有 {threads} 个在计算：机器有 {number:.0%} 闲着。",
        "设置 {field}={cores}，并且不要设 OMP_NUM_THREADS",
    ),
    "too_many_threads": Entry(
        "{threads} threads share {cores:g} cores{why}: they wait for each other.",
        "set {field}={number:.0f}",
        "{threads} 个线程共用 {cores:g} 个核{why}：它们互相等待。",
        "设置 {field}={number:.0f}",
    ),
    "swap": Entry(
        "{number:.1f} GiB of this process are swapped out to the disk.",
        "lower plan.tokens_per_micro, or end other programs",
        "本进程有 {number:.1f} GiB 内存被换到了磁盘上。",
        "调小 plan.tokens_per_micro，或关掉其他程序",
    ),
    "short_sweep": Entry(
        "Only {number:.0f} learning rates were tried in the time, of at least {least}: nothing is said about the rate.",
        "give more time: --seconds {seconds}",
        "在规定时间内只试了 {number:.0f} 个学习率，至少要 {least} 个：对学习率不作判断。",
        "给更多时间：--seconds {seconds}",
    ),
    "short_heart": Entry(
        "Only {number:.0f} steps on one batch were taken in the time, of at least {least}: nothing is said about "
        "whether it can be learnt.",
        "give more time: --seconds {seconds}",
        "在规定时间内同一批上只走了 {number:.0f} 步，至少要 {least} 步：对能否学会不作判断。",
        "给更多时间：--seconds {seconds}",
    ),
    "short_labels": Entry(
        "Only {number:.0f} steps on labelled sequences were taken in the time, of at least {least}: nothing is said "
        "about the labels.",
        "give more time: --seconds {seconds}",
        "在规定时间内带标签的样本上只走了 {number:.0f} 步，至少要 {least} 步：对标签不作判断。",
        "给更多时间：--seconds {seconds}",
    ),
}
