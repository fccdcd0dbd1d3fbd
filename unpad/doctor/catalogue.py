"""The words of every finding, in English and Chinese: the reason with its number, and what to do.

The order is the rank of findings of one severity: a cause stands before what follows from it. Both languages name the
same values of the finding, in braces. Those on rows, the most, are in `catalogue_rows.py`.
"""

from __future__ import annotations

from unpad.doctor.catalogue_rows import OF_ROWS, Entry

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
    **OF_ROWS,
    "class_weight": Entry(
        "{field} is {weight:g}: class {side} counts {number:,.0f} times as much in the loss as all of the other "
        "class, "
        "so that every probability goes to {side}.",
        "set {field}={usual:g}, with which both classes count the same, or 1",
        "{field} 为 {weight:g}：类别 {side} 在损失中的分量是另一类总和的 {number:,.0f} 倍，所有概率都会趋向 {side}。",
        "设置 {field}={usual:g}，使两类分量相同，或设为 1",
    ),
    "ramp_unfinished": Entry(
        "The ramp of {field} takes {length:,} steps and the stage has {steps:,}: its weight ends at {last:.2g}, "
        "{number:.0%} of the way to {end:g}.",
        "set the ramp's steps to a part of the stage, or give `share` in their place, such as 0.3",
        "{field} 的渐变需要 {length:,} 步，而本阶段只有 {steps:,} 步：权重结束时为 {last:.2g}，只走了到 {end:g} 的"
        " {number:.0%}。",
        "把渐变的 steps 设为本阶段的一部分，或改用 `share`，例如 0.3",
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
        "train.freeze leaves {number:.0%} of the parameters and {blocks} blocks as they were drawn at random, "
        "such as "
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
    "many_restarts": Entry(
        "The schedule restarts {number:,.0f} times, after {steps:.1f} steps each: the rate jumps to its peak before "
        "anything settles.",
        "set {field}=2, or optim.schedule=cosine",
        "学习率调度重启 {number:,.0f} 次，每次只有 {steps:.1f} 步：还没稳定学习率就又跳回峰值。",
        "设置 {field}=2，或 optim.schedule=cosine",
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
        "The learning rate {rate:.1e} is too high, {number:,.0f} times the one with the lowest loss, {high:.1e}: steps "
        "leap over what they could learn.",
        "set {field}={middle:.1e}; in range here: {low:.1e} to {high:.1e}",
        "学习率 {rate:.1e} 是损失最低处学习率 {high:.1e} 的 {number:,.0f} 倍：每一步都跨得太大，学不到东西。",
        "设置 {field}={middle:.1e}；这里合适的范围是 {low:.1e} 到 {high:.1e}",
    ),
    "step_size": Entry(
        "The learning rate {rate:.1e} is too high for layers of this width: a step of Adam moves each of "
        "{inputs:,.0f} "
        "weights of an output by about the rate, together {number:.1f} times the size of its inputs.",
        "lower {field}: rates of 1e-4 to 1e-2 are usual",
        "对这样宽的层，学习率 {rate:.1e} 过高：Adam 的一步把一个输出的 {inputs:,.0f} 个权重各移动约一个学习率，合起来"
        "是输入大小的"
        " {number:.1f} 倍。",
        "调低 {field}：通常在 1e-4 到 1e-2 之间",
    ),
    "lr_low": Entry(
        "The learning rate {rate:.1e} is too low, {number:,.0f} times below the range that learns here: {steps} steps "
        "on one batch took the loss from {start:.3g} to {end:.3g}.",
        "set {field}={middle:.1e}; in range here: {low:.1e} to {high:.1e}",
        "学习率 {rate:.1e} 只有合适范围下限的 1/{number:,.0f}：在同一批上走 {steps} 步，损失只从 {start:.3g} 变到"
        " {end:.3g}。",
        "设置 {field}={middle:.1e}；这里合适的范围是 {low:.1e} 到 {high:.1e}",
    ),
    "later_rate": Entry(
        "Stage {stage} has the learning rate {rate:.1e}, {number:.0f} times that of the stage before it, "
        "{before:.1e}: its first steps undo what was learnt.",
        "lower {field}: a later stage usually has a tenth to one of the rate before it",
        "阶段 {stage} 的学习率是 {rate:.1e}，为前一阶段（{before:.1e}）的 {number:.0f} 倍：最初几步就会毁掉已学到的。",
        "调低 {field}：后面的阶段通常是前面的十分之一到一倍",
    ),
    "faster_than_origin": Entry(
        "The learning rate {rate:.1e} is {number:.0f} times that of the run whose weights it starts from, "
        "{before:.1e}: "
        "the first steps undo (unlearn) what these know.",
        "lower {field}, such as to {usual:.1e}: fine-tuning usually has a hundredth to one of the rate before it",
        "学习率 {rate:.1e} 是起始权重所在训练的 {number:.0f} 倍（{before:.1e}）：最初几步就会毁掉已学到的。",
        "调低 {field}，例如 {usual:.1e}：微调的学习率通常是之前的百分之一到一倍",
    ),
    "stage_order": Entry(
        "Stage {stage} learns {kind} alone, in {number:.0f} steps, after stage {earlier} has learnt {other} in "
        "{steps}: the order of stages is the wrong way round. The last stage makes the model forget what the one "
        "before "
        "it taught.",
        "let {earlier} come after {stage} in stages, or give {stage} some of data.{other} as well",
        "阶段 {stage} 只学 {kind}（{number:.0f} 步），排在学 {other} 的阶段 {earlier}（{steps} 步）之后："
        "阶段的顺序反了，后一阶段会让模型忘记前一阶段教的。",
        "在 stages 中把 {earlier} 放到 {stage} 之后，或让 {stage} 也用 data.{other}",
    ),
    "other_template": Entry(
        "The run to start from was trained with other role marks: data.template.{part} is {ours!r} here and "
        "{theirs!r} "
        "there ({number:.0f} prefixes differ). Its weights know the roles by those.",
        "give data.template the values of that run, or leave out train.init_from",
        "起始权重是用别的角色前缀训练的：这里 data.template.{part} 是 {ours!r}，那里是 {theirs!r}"
        "（{number:.0f} 处不同）。那些权重靠原来的前缀识别角色。",
        "data.template 用那次训练的值，或去掉 train.init_from",
    ),
    "other_colours": Entry(
        "images.mean and images.std are {mean} and {std} here, and {their_mean} and {their_std} in the run to start "
        "from (a difference of {number:.2g}): its weights know pictures in that scale of colours.",
        "give images.mean and images.std the values of that run",
        "这里的 images.mean 和 images.std 是 {mean} 和 {std}，起始权重所在的训练是 {their_mean} 和 {their_std}"
        "（相差 {number:.2g}）：那些权重只认识那种颜色尺度。",
        "images.mean 和 images.std 用那次训练的值",
    ),
    "later_slow": Entry(
        "Stage {stage} has the learning rate {rate:.1e}, {number:.1e} of that of the stage before it, "
        "{before:.1e}: it learns next to nothing.",
        "raise {field}: a later stage usually has a hundredth to one of the rate before it",
        "阶段 {stage} 的学习率是 {rate:.1e}，只有前一阶段（{before:.1e}）的 {number:.1e}：几乎学不到东西。",
        "调高 {field}：后面的阶段通常是前面的百分之一到一倍",
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
    "never_evaluated": Entry(
        "An evaluation comes every {number:,.0f} steps, and the stage has {steps:,}: train.patience and the "
        "choice of the "
        "best weights never see one on the way.",
        "lower {field}, such as to a tenth of the steps",
        "每 {number:,.0f} 步评估一次，而本阶段只有 {steps:,} 步：train.patience 和最佳权重的选择途中一次也看不到评估。",
        "调小 {field}，例如步数的十分之一",
    ),
    "ends_soon": Entry(
        "An evaluation counts as progress only if it gains {number:g} nats: training ends while it still learns.",
        "set {field}=0",
        "一次评估要降低 {number:g} 纳特才算进步：还在学习时训练就结束了。",
        "设置 {field}=0",
    ),
    "impatient": Entry(
        "With a patience of {patience} a stage of {steps:,} steps ends after {number:.0f} steps without "
        "progress: the chance of a few evaluations stops it.",
        "raise {field}, or evaluate less often",
        "patience 为 {patience} 时，{steps:,} 步的阶段只要 {number:.0f} 步没有进展就结束：几次评估的偶然波动就会"
        "让它停下。",
        "调大 {field}，或减少评估次数",
    ),
    "generation": Entry(
        "{field}={number:g} spoils the replies of a model that has learnt well: they are cut, random or avoid "
        "words that they need.",
        "set {field}={usual}",
        "{field}={number:g} 会毁掉学得很好的模型的回答：被截断、随机，或避开需要的词。",
        "设置 {field}={usual}",
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
    "narrow_hidden": Entry(
        "The feed-forward part has {number:.0f} channels at a width of {width}: it lets next to nothing through.",
        "set {field}={usual}, two to four times the width",
        "前馈部分只有 {number:.0f} 个通道，而宽度是 {width}：几乎什么都通不过。",
        "设置 {field}={usual}，即宽度的两到四倍",
    ),
    "norm_eps": Entry(
        "The epsilon of the norms is {number:g}, as large as what they divide by: they do not normalize.",
        "set {field}=1e-6",
        "归一化的 epsilon 是 {number:g}，与被除的量一样大：起不到归一化的作用。",
        "设置 {field}=1e-6",
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
    "later_few_steps": Entry(
        "Stage {stage} has {number:.0f} steps: there is not much to learn in so few.",
        "lower {field}, or raise {longer}",
        "阶段 {stage} 只有 {number:.0f} 步：这么少的步数学不到什么。",
        "调小 {field}，或调大 {longer}",
    ),
    "stage_without_step": Entry(
        "Stage {stage} gets no step: train.max_steps is {number:,.0f} for all stages together, and they are done at "
        "the end of stage {earlier}.",
        "raise train.max_steps, or lower {field}",
        "阶段 {stage} 一步也没有：train.max_steps 为 {number:,.0f}，是所有阶段合计的步数，到阶段 {earlier} 结束时已经"
        "用完。",
        "调大 train.max_steps，或调低 {field}",
    ),
    "stage_without_data": Entry(
        "Stage {stage} gets no step: {number:.0f} sequences of data.{kind} are there to train on.",
        "give data.{kind} rows that are not held out, or leave the stage out of stages",
        "阶段 {stage} 一步也没有：data.{kind} 中可训练的样本有 {number:.0f} 个。",
        "给 data.{kind} 一些不留作验证的数据，或从 stages 中去掉这个阶段",
    ),
    "many_epochs": Entry(
        "The stage goes {number:,.0f} times through the same {sequences:,} sequences: it overfits them "
        "(overfits), and nothing ends it before.",
        "set train.patience=3, or lower {field}",
        "本阶段把同样的 {sequences:,} 个样本重复 {number:,.0f} 遍：只是死记（过拟合），也没有提前结束的条件。",
        "设 train.patience=3，或调低 {field}",
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
    "lora_scale": Entry(
        "The output of adapters is scaled by {number:g}, alpha over r: they drown the weights, or add nothing.",
        "set lora.alpha={usual}, twice lora.r",
        "适配器的输出乘以 {number:g}（alpha 除以 r）：不是淹没原有权重，就是毫无作用。",
        "设置 lora.alpha={usual}，即 lora.r 的两倍",
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
        "The model overfit {learnt} sequences, and nothing of it holds for {sequences} others ({number:.2f} "
        "standard errors), while images.flip mirrors pictures: their labels depend on left and right, or are "
        "shuffled.",
        "set images.flip=0 if a mirrored picture has another label; if this finding stays, look at how labels are "
        "matched with pictures",
        "模型记住了 {learnt} 个样本，却对另外 {sequences} 个毫无用处（相差 {number:.2f} 个标准误），"
        "同时 images.flip 会左右翻转图像：标签与左右有关，或者被打乱了。",
        "如果翻转后的图像应有另一个标签，设 images.flip=0；若仍有此提示，检查标签与图像的对应关系",
    ),
    "labels_random": Entry(
        "The model overfit {learnt} sequences, and nothing of it holds for {sequences} others: their "
        "labels are no likelier than those of their neighbours ({number:.2f} standard errors).",
        "look at how labels are matched with rows: they look shuffled",
        "模型记住了 {learnt} 个样本，却对另外 {sequences} 个毫无用处：它们自己的标签并不比别人的更可能（相差"
        " {number:.2f} 个标准误）。",
        "检查标签与样本的对应关系：看起来被打乱了",
    ),
    "by_heart": Entry(
        "One batch of {sequences} sequences cannot be overfit: the loss went from {start:.3g} to "
        "{number:.3g} in {steps} steps, without dropout, decay and tight clipping.",
        "labels do not follow from the inputs, or the model does not see them: look at the data first",
        "{sequences} 个样本的一批数据记不住：不用 dropout、衰减和强裁剪，{steps} 步后损失从 {start:.3g} 到 "
        "{number:.3g}。",
        "标签与输入无关，或模型看不到输入：先检查数据",
    ),
    "setting": Entry(
        "One batch of {sequences} sequences cannot be overfit: the loss went from {start:.3g} to "
        "{number:.3g} in "
        "{steps} steps, and to {plain:.3g} with the default of {field} alone.",
        "set {field}={default}, its default",
        "{sequences} 个样本的一批数据记不住：{steps} 步后损失从 {start:.3g} 到 {number:.3g}；只把 {field} 改回默认值"
        "则到"
        " {plain:.3g}。",
        "设 {field}={default}，即默认值",
    ),
    "by_heart_settings": Entry(
        "One batch of {sequences} sequences cannot be overfit: with this recipe the loss went from "
        "{start:.3g} to {number:.3g} in {steps} steps, with usual settings to {plain:.3g}.",
        "set {field}={rate:.1e}, as there; then go back to the defaults of optim one by one: betas, eps, groups",
        "{sequences} 个样本的一批数据记不住：用本配方 {steps} 步后损失从 {start:.3g} 到 {number:.3g}，用常规设置"
        "则到 {plain:.3g}。",
        "先如该试验设 {field}={rate:.1e}，再把 optim 的设置逐个改回默认值：betas、eps、groups",
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
        "lower optim.lr, or optim.clip; `unpad runs RUN` shows the steps",
        "训练中有 {number:,.0f} 步的损失或梯度远高于邻近的步，例如第 {step:,} 步。",
        "调低 optim.lr 或 optim.clip；`unpad runs RUN` 会画出这些步",
    ),
    "chosen_unlearned": Entry(
        "In stage {stage} the loss of the chosen replies themselves ({name}) rose from {start:.3g} to {end:.3g}, "
        "{number:.1f} times: the model unlearned to say them too, while it learnt to avoid the rejected ones.",
        "lower optim.lr, raise train.beta, or give losses.cross_entropy a weight, and begin anew",
        "阶段 {stage} 中被选中回答自身的损失（{name}）从 {start:.3g} 升到 {end:.3g}，为 {number:.1f} 倍："
        "模型在避开被拒回答的同时也忘了怎么说被选中的。",
        "调低 optim.lr、调大 train.beta，或给 losses.cross_entropy 一个权重，重新训练",
    ),
    "term_worse": Entry(
        "In stage {stage} the term {name} rose from {start:.3g} to {end:.3g}, {number:.1f} times its start: the "
        "stage "
        "unlearned it.",
        "look at losses.{name}, and lower optim.lr",
        "阶段 {stage} 中 {name} 一项从 {start:.3g} 升到 {end:.3g}，是开始时的 {number:.1f} 倍：这一阶段反而忘了它。",
        "检查 losses.{name}，并调低 optim.lr",
    ),
    "overfit": Entry(
        "The held-out loss rose by {number:.0%} since step {step:,}, while the training loss fell to {end:.3g}: "
        "later steps overfit.",
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
        "Only {number:.0f} of at least {least} learning rates could be tried in the time: nothing is said about the "
        "rate.",
        "give more time: --seconds {seconds}",
        "在规定时间内只试了 {number:.0f} 个学习率，至少要 {least} 个：对学习率不作判断。",
        "给更多时间：--seconds {seconds}",
    ),
    "short_heart": Entry(
        "Only {number:.0f} of at least {least} steps on one batch could be taken in the time: nothing is said about "
        "whether it can be learnt.",
        "give more time: --seconds {seconds}",
        "在规定时间内同一批上只走了 {number:.0f} 步，至少要 {least} 步：对能否学会不作判断。",
        "给更多时间：--seconds {seconds}",
    ),
    "short_labels": Entry(
        "Only {number:.0f} of at least {least} steps on labelled sequences could be taken in the time: nothing is said "
        "about the labels.",
        "give more time: --seconds {seconds}",
        "在规定时间内带标签的样本上只走了 {number:.0f} 步，至少要 {least} 步：对标签不作判断。",
        "给更多时间：--seconds {seconds}",
    ),
}
