"""A sixth set of forty trainers as people write them, by somebody who had not seen the code of `unpad.hf`.

    python benchmarks/attach_unseen_6.py [NAME ...]

Twenty are right and can be kept. Ten are wrong in the trainer's own batches (`padded_is_true=False`): their truth is
what their authors meant, and `either` is expected, mended with a word or refused. Ten need more than a flat batch has,
rows, a stream or a state: eight are to be refused, and of two a way to keep them can be thought of (`either`).
What the columns of the table mean stands in `attach_judge.py`.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np
import torch
import torch.nn.functional as F
from attach_judge import (
    ASSISTANT,
    BOS,
    END,
    EOS,
    IGNORED,
    PAD,
    SEP,
    SHARP,
    USER,
    VOCAB,
    WIDTH,
    Case,
    Example,
    Ids,
    Run,
    after,
    arguments,
    astray,
    batch_of,
    case_of,
    descent,
    learns_all,
    lm_collator,
    logits_of,
    losses_of,
    main,
    model,
    next_losses,
    padded,
    plain,
    predictions,
    setup,
    sft,
    sft_arguments,
    table,
    text,
    token_mean,
    tokenizer,
    true_gradient,
    whole,
    with_prompts,
    words,
)
from datasets import Dataset
from peft import LNTuningConfig
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import SequentialSampler
from transformers import (
    DataCollatorForSeq2Seq,
    DataCollatorForTokenClassification,
    LlamaForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
)
from trl import SFTTrainer

Batch = dict[str, torch.Tensor]
Term = Callable[[PreTrainedModel, int, Example], torch.Tensor]


def room(rows: Sequence[Ids], micro_batches: int) -> int:
    """Tokens of a micro-batch with which so many hold all rows."""
    return max(max(map(len, rows)) + 2, int(1.6 * sum(map(len, rows)) / micro_batches) + 1)


def floats(rows: Sequence[Ids], seed: int, low: float, high: float) -> list[list[float]]:
    """A number for each token."""
    draw = random.Random(seed)
    return [[round(draw.uniform(low, high), 3) for _ in row] for row in rows]


def answers(rows: Sequence[Ids]) -> list[Example]:
    """Examples in which what stands behind `SEP` is learnt."""
    return [(row, after(row, SEP)) for row in rows]


def summed(examples: Sequence[Example], term: Term, over: float | None = None) -> Callable:
    """A loss: the sum of a term per sequence over the number of targets, or over another number."""
    divisor = over or sum(label != IGNORED for _, labels in examples for label in labels[1:])
    return lambda m, _: sum(term(m, index, example) for index, example in enumerate(examples)) / divisor


def collator_of(**columns: float) -> Callable[[list[dict]], Batch]:
    """Pads ids, labels (ids where there are none) and columns of a number per token, with the value of each."""

    def collate(examples: list[dict]) -> Batch:
        batch = batch_of([(example["input_ids"], example.get("labels", example["input_ids"])) for example in examples])
        return batch | {name: padded([one[name] for one in examples], value) for name, value in columns.items()}

    return collate


def entropy_of(logits: torch.Tensor) -> torch.Tensor:
    """Entropy of each next token, in nats."""
    log_probs = logits.log_softmax(-1)
    return -(log_probs.exp() * log_probs).sum(-1)


# Losses


@setup("keep")
def entropy_bonus() -> Case:
    """Answers, and a bonus for the entropy of each prediction of them."""

    class Exploring(Trainer):
        beta = 0.05

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            real = labels[:, 1:].ne(IGNORED)
            bonus = (entropy_of(outputs.logits[:, :-1]) * real).sum()
            items = real.sum() if num_items_in_batch is None else num_items_in_batch
            loss = (next_losses(outputs.logits, labels).sum() - self.beta * bonus) / items
            return (loss, outputs) if return_outputs else loss

    def term(m: PreTrainedModel, _: int, example: Example) -> torch.Tensor:
        logits, targets = predictions(m, example)
        return F.cross_entropy(logits, targets, reduction="sum") - 0.05 * entropy_of(logits).sum()

    examples = answers(with_prompts(words(seed=101)))
    rows = [row for row, _ in examples]
    data = table(rows, labels=[labels for _, labels in examples])
    trainer = Exploring(model("Qwen2"), arguments(3, 4), collator_of(), data)
    return Case(trainer, summed(examples, term), rows, tokens_per_micro=room(rows, 4))


@setup("keep")
def weights_by_frequency() -> Case:
    """Rare words count more, by their frequency in the training set, over the number of targets."""
    rows = words(seed=102)
    counts = Counter(chain.from_iterable(rows))
    rarity = torch.tensor([1 / (1 + counts[token]) ** 0.5 for token in range(VOCAB)])

    def rare(outputs, labels, num_items_in_batch=None):
        logits = outputs.logits[..., :-1, :].float()
        targets = labels[..., 1:]
        weight = rarity[targets.clamp(min=0)] * (targets != IGNORED)
        nll = -logits.log_softmax(-1).gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return (weight * nll).sum() / num_items_in_batch

    def term(m: PreTrainedModel, _: int, example: Example) -> torch.Tensor:
        return (rarity.double()[torch.tensor(example[0][1:])] * losses_of(m, example)).sum()

    trainer = plain(Trainer, "Gemma", arguments(2, 6), rows, compute_loss_func=rare)
    return Case(trainer, summed(whole(rows), term), rows, tokens_per_micro=room(rows, 6))


@setup("keep")
def chunked_cross_entropy() -> Case:
    """The body, then the head in chunks of 16 targets that are computed again, to save memory."""

    class Chunked(Trainer):
        chunk = 16

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels = inputs.pop("labels")
            states = model.model(**inputs).last_hidden_state[:, :-1]
            real = labels[:, 1:] != IGNORED
            states, targets = states[real], labels[:, 1:][real]

            def of_chunk(some, to):
                return F.cross_entropy(model.lm_head(some).float(), to, reduction="sum")

            pairs = zip(states.split(self.chunk), targets.split(self.chunk), strict=True)
            loss = sum(checkpoint(of_chunk, some, to, use_reentrant=False) for some, to in pairs)
            loss = loss / (num_items_in_batch or len(targets))
            return (loss, {"loss": loss}) if return_outputs else loss

    rows = words(seed=103)
    trainer = plain(Chunked, model("Qwen3", tie_word_embeddings=True), arguments(3, 4), rows)
    return case_of(trainer, whole(rows), tokens_per_micro=room(rows, 4))


@setup("keep")
def smoothing_by_hand() -> Case:
    """`F.cross_entropy(label_smoothing=0.1)` of logits and labels shifted by hand, in a `compute_loss_func`."""

    def smooth(outputs, labels, num_items_in_batch=None):
        logits = outputs.logits[:, :-1].contiguous().view(-1, outputs.logits.size(-1))
        targets = labels[:, 1:].contiguous().view(-1)
        loss = F.cross_entropy(logits, targets, ignore_index=IGNORED, label_smoothing=0.1, reduction="sum")
        return loss / num_items_in_batch

    def term(m: PreTrainedModel, _: int, example: Example) -> torch.Tensor:
        return F.cross_entropy(*predictions(m, example), label_smoothing=0.1, reduction="sum")

    rows = words(13, seed=104)  # a last micro-batch of one row
    made = model("GPTNeoX", hidden_dropout=0.0)
    trainer = plain(Trainer, made, arguments(3, 5), rows, compute_loss_func=smooth)
    return Case(trainer, summed(whole(rows), term), rows, tokens_per_micro=room(rows, 5))


@setup("keep")
def prompts_fade_by_step() -> Case:
    """Prompts count in full at first, by half in the second update, not at all in the third."""
    rows = with_prompts(words(18, seed=105))
    prompts = [[int(at <= row.index(SEP)) for at in range(len(row))] for row in rows]

    class Fading(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            prompt, labels = inputs.pop("is_prompt")[:, 1:], inputs.pop("labels")
            outputs = model(**inputs)
            share = max(0.0, 1.0 - self.state.global_step / 2)
            weight = torch.where(prompt.bool(), share, 1.0)
            loss = (weight * next_losses(outputs.logits, labels)).sum() / num_items_in_batch
            return (loss, outputs) if return_outputs else loss

    def faded(m: PreTrainedModel, seen: list[Ids], step: int) -> torch.Tensor:
        def term(m: PreTrainedModel, _: int, example: Example) -> torch.Tensor:
            nll, cut = losses_of(m, example), example[0].index(SEP)
            return max(0.0, 1.0 - step / 2) * nll[:cut].sum() + nll[cut:].sum()

        return summed(whole(seen), term)(m, seen)

    def check(run: Run, m: PreTrainedModel) -> str:
        updates = [run.sequences(step) for step in range(3)]
        *_, last = descent(copy.deepcopy(m), updates, lambda one, some: faded(one, some, updates.index(some)))
        return astray(run.trainer.model, last, m)

    args = arguments(2, 3, max_steps=3, learning_rate=SHARP, remove_unused_columns=False)
    trainer = Fading(model(), args, collator_of(is_prompt=0), table(rows, is_prompt=prompts))
    return Case(trainer, lambda m, seen: faded(m, seen, 0), check=check, tokens_per_micro=room(rows, 9))


@setup("keep")
def clipped_ratios() -> Case:
    """PPO off line: advantages and old log-probabilities per token are columns, ratios are clipped."""
    rows = with_prompts(words(seed=106))
    gains, old = floats(rows, 1, -1.0, 1.0), floats(rows, 2, -6.5, -4.0)

    class Policy(Trainer):
        epsilon = 0.2

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            gain, before = inputs.pop("advantages")[:, 1:], inputs.pop("old_logps")[:, 1:]
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            ratio = torch.exp(-next_losses(outputs.logits, labels) - before)
            clipped = ratio.clamp(1 - self.epsilon, 1 + self.epsilon)
            loss = -torch.minimum(ratio * gain, clipped * gain)
            loss = (loss * (labels[:, 1:] != IGNORED)).sum() / num_items_in_batch
            return (loss, outputs) if return_outputs else loss

    def term(m: PreTrainedModel, index: int, example: Example) -> torch.Tensor:
        nll = losses_of(m, example)
        gain, before = (torch.tensor(one[index]).double()[-len(nll) :] for one in (gains, old))
        ratio = torch.exp(-nll - before)
        return -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).sum()

    examples = answers(rows)
    data = table(rows, labels=[labels for _, labels in examples], advantages=gains, old_logps=old)
    args = arguments(2, 6, remove_unused_columns=False)
    trainer = Policy(model("Mistral"), args, collator_of(advantages=0.0, old_logps=0.0), data)
    return Case(trainer, summed(examples, term), rows, tokens_per_micro=room(rows, 6))


@setup("keep")
def rows_alike_by_a_column() -> Case:
    """Each row counts alike: a column made with `map` has one over its number of targets, for each token."""
    rows = with_prompts(words(seed=107))

    def weigh(example: dict) -> dict:
        num = sum(label != IGNORED for label in example["labels"])
        return {"token_weight": [1 / num] * len(example["labels"])}

    class Alike(Trainer):
        loss_is_scaled_for_ga = True

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            weight, labels = inputs.pop("token_weight")[:, 1:], inputs.pop("labels")
            outputs = model(**inputs)
            num_rows = self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps
            loss = (weight * next_losses(outputs.logits, labels)).sum() / num_rows
            return (loss, outputs) if return_outputs else loss

    examples = answers(rows)
    data = table(rows, labels=[labels for _, labels in examples]).map(weigh)
    args = arguments(3, 4, remove_unused_columns=False)
    trainer = Alike(model("Olmo2"), args, collator_of(token_weight=0.0), data)
    loss = summed(examples, lambda m, _, example: losses_of(m, example).mean(), len(rows))
    return Case(trainer, loss, rows, tokens_per_micro=room(rows, 4))


# Collators and data


def corrupted(row: Ids, seed: int) -> Example:
    """A row with spans behind sentinels: what is left, then the spans, which alone are learnt."""
    draw, sentinels = random.Random(seed), [USER, ASSISTANT, END]
    left, spans, at = [BOS], [], 1
    while at < len(row) - 1:
        length = draw.randint(1, 3)
        if draw.random() < 0.4 and sentinels:
            mark = sentinels.pop(0)
            left.append(mark)
            spans += [mark, *row[at : min(at + length, len(row) - 1)]]
        else:
            left += row[at : min(at + length, len(row) - 1)]
        at += length
    return [*left, SEP, *spans, EOS], [IGNORED] * (len(left) + 1) + [*spans, EOS]


@setup("keep")
def spans_behind_sentinels() -> Case:
    """The denoising of UL2 for a decoder: a dataset of torch makes the spans of each row from its index."""
    rows = words(seed=108, low=8, high=24)

    class Denoising(torch.utils.data.Dataset):
        def __len__(self):
            return len(rows)

        def __getitem__(self, index):
            ids, labels = corrupted(rows[index], index)
            return {"input_ids": torch.tensor(ids), "labels": torch.tensor(labels)}

    def collate(examples: list[dict]) -> Batch:
        return batch_of([(one["input_ids"].tolist(), one["labels"].tolist()) for one in examples])

    examples = [corrupted(row, index) for index, row in enumerate(rows)]
    trainer = Trainer(model("Starcoder2"), arguments(4, 3), collate, Denoising())
    return case_of(trainer, examples, tokens_per_micro=room([ids for ids, _ in examples], 3))


@setup("keep")
def buckets_and_loss_masks() -> Case:
    """A mask of what is learnt comes with the dataset, and batches are padded to one of four widths."""
    rows, draw = words(seed=109), random.Random(3)
    masks = [[0, *(int(draw.random() < 0.6) for _ in row[2:]), 1] for row in rows]
    buckets = (8, 16, 24, 32)

    def collate(examples: list[dict]) -> Batch:
        longest = max(len(example["input_ids"]) for example in examples)
        width = next(bucket for bucket in buckets if bucket >= longest)
        ids = np.full((len(examples), width), PAD)
        labels, mask = np.full_like(ids, IGNORED), np.zeros_like(ids)
        for at, example in enumerate(examples):
            row, learnt = np.array(example["input_ids"]), np.array(example["loss_mask"], dtype=bool)
            ids[at, : len(row)], mask[at, : len(row)] = row, 1
            labels[at, : len(row)] = np.where(learnt, row, IGNORED)
        return {
            "input_ids": torch.from_numpy(ids),
            "attention_mask": torch.from_numpy(mask),
            "labels": torch.from_numpy(labels),
        }

    examples = [
        (row, [token if learnt else IGNORED for token, learnt in zip(row, mask, strict=True)])
        for row, mask in zip(rows, masks, strict=True)
    ]
    args = arguments(3, 4, remove_unused_columns=False)
    trainer = Trainer(model("GPT2"), args, collate, table(rows, loss_mask=masks))
    return case_of(trainer, examples, tokens_per_micro=room(rows, 4))


@setup("keep")
def cohere_left_padded() -> Case:
    """Cohere: blocks in parallel, scaled logits, a tied head; padding on the left, and activations computed again."""
    examples = answers(with_prompts(words(seed=110)))
    rows = [row for row, _ in examples]
    collate = DataCollatorForSeq2Seq(tokenizer(padding_side="left"), label_pad_token_id=IGNORED)
    args = arguments(3, 4, gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False})
    data = table(rows, labels=[labels for _, labels in examples])
    trainer = Trainer(model("Cohere", logit_scale=0.3, use_qk_norm=True), args, collate, data)
    return case_of(trainer, examples, tokens_per_micro=room(rows, 4))


@setup("keep")
def tags_of_words() -> Case:
    """Token classification on a causal model: labels are not shifted, and one batch is an update."""
    rows, draw = words(seed=111), random.Random(4)
    tags = [[IGNORED, *(draw.randrange(5) for _ in row[2:]), IGNORED] for row in rows]
    made = model("Llama", "ForTokenClassification", num_labels=5, classifier_dropout=0.0)
    trainer = Trainer(made, arguments(12, 1), DataCollatorForTokenClassification(tokenizer()), table(rows, labels=tags))

    def loss(m: PreTrainedModel, _: list[Ids]) -> torch.Tensor:
        each = [
            F.cross_entropy(logits_of(m, row), torch.tensor(tag), ignore_index=IGNORED, reduction="sum")
            for row, tag in zip(rows, tags, strict=True)
        ]
        return sum(each) / sum(tag != IGNORED for some in tags for tag in some)

    return Case(trainer, loss, rows)


@setup("keep")
def last_batch_dropped() -> Case:
    """`dataloader_drop_last` and a `data_seed`: two epochs of 14 rows, each an update of whole batches."""
    rows = words(14, seed=112)

    def check(run: Run, _: PreTrainedModel) -> str:
        for step in range(2):
            seen = run.sequences(step)
            if len(seen) != len({tuple(row) for row in seen}) or not seen or any(row not in rows for row in seen):
                return f"update {step} has rows twice, or none, or others"
        return "" if run.trainer.state.global_step == 2 else f"{run.trainer.state.global_step} updates"

    args = arguments(4, 3, dataloader_drop_last=True, data_seed=11, max_steps=-1, num_train_epochs=2)
    trainer = plain(Trainer, "Phi", args, rows)
    return Case(trainer, learns_all, check=check, tokens_per_micro=room(rows, 3))


# Callbacks and optimizers


@setup("keep")
def averaged_weights() -> Case:
    """A callback keeps a moving average of the weights and puts it into the model when the training ends."""

    class Average(TrainerCallback):
        decay = 0.5

        def on_train_begin(self, args, state, control, model=None, **kwargs):
            self.kept = {name: value.detach().clone() for name, value in model.named_parameters()}

        def on_step_end(self, args, state, control, model=None, **kwargs):
            for name, value in model.named_parameters():
                self.kept[name].lerp_(value.detach(), 1 - self.decay)

        def on_train_end(self, args, state, control, model=None, **kwargs):
            with torch.no_grad():
                for name, value in model.named_parameters():
                    value.copy_(self.kept[name])

    def check(run: Run, m: PreTrainedModel) -> str:
        mean, updates = copy.deepcopy(m), [run.sequences(step) for step in range(3)]
        for one in descent(copy.deepcopy(m), updates, learns_all):
            with torch.no_grad():
                for kept, value in zip(mean.parameters(), one.parameters(), strict=True):
                    kept.lerp_(value, 0.5)
        return astray(run.trainer.model, mean, m)

    rows = words(18, seed=113)
    args = arguments(2, 3, max_steps=3, learning_rate=SHARP)
    trainer = plain(Trainer, "Granite", args, rows, callbacks=[Average()])
    return Case(trainer, learns_all, check=check, tokens_per_micro=room(rows, 9))


@setup("keep")
def own_scheduler_and_momentum() -> Case:
    """`create_optimizer` with momentum, and `create_scheduler` with a rate of one over the update."""

    class Mine(Trainer):
        def create_optimizer(self, model=None):
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=SHARP, momentum=0.9)
            return self.optimizer

        def create_scheduler(self, num_training_steps, optimizer=None):
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
            return self.lr_scheduler

    def check(run: Run, m: PreTrainedModel) -> str:
        own, speed = copy.deepcopy(m), {}
        for step in range(3):
            truth = true_gradient(own, learns_all(own, run.sequences(step)))
            speed = {name: value + 0.9 * speed.get(name, 0.0) for name, value in truth.items()}
            with torch.no_grad():
                for name, value in own.named_parameters():
                    value -= SHARP / (1 + step) * speed[name]
        return astray(run.trainer.model, own, m)

    rows = words(18, seed=114)
    trainer = plain(Mine, "Qwen2", arguments(3, 2, max_steps=3), rows)
    return Case(trainer, learns_all, check=check, tokens_per_micro=room(rows, 6))


@setup("keep")
def counts_tokens_seen() -> Case:
    """`include_num_input_tokens_seen="non_padding"`, by which people compare runs."""
    rows = words(seed=115)

    def check(run: Run, _: PreTrainedModel) -> str:
        seen = int(run.trainer.state.num_input_tokens_seen)
        return "" if seen == sum(map(len, rows)) else f"{seen} tokens seen, of {sum(map(len, rows))}"

    args = arguments(3, 4, include_num_input_tokens_seen="non_padding", average_tokens_across_devices=False)
    trainer = plain(Trainer, "StableLm", args, rows)
    return case_of(trainer, whole(rows), check=check, tokens_per_micro=room(rows, 4))


# SFTTrainer


@setup("keep")
def norms_alone() -> Case:
    """LN tuning: the norms of all layers are the adapter; rows of ids are padded to multiples of 8."""
    rows = words(seed=116)
    config = LNTuningConfig(task_type="CAUSAL_LM", target_modules=["input_layernorm", "post_attention_layernorm"])
    trainer = sft(rows, model("Mistral"), peft_config=config, batch=3, accumulate=4, pad_to_multiple_of=8)
    return case_of(trainer, whole(rows), tokens_per_micro=room(rows, 4))


@setup("keep")
def poly_loss_of_completions() -> Case:
    """SFTTrainer with a mask of the completion and a `compute_loss_func`: cross-entropy and one minus probability."""
    rows = with_prompts(words(seed=117))

    def poly(outputs, labels, num_items_in_batch=None):
        nll = next_losses(outputs.logits, labels)
        away = (1 - torch.exp(-nll)) * (labels[:, 1:] != IGNORED)
        return (nll + 2.0 * away).sum() / num_items_in_batch

    def term(m: PreTrainedModel, _: int, example: Example) -> torch.Tensor:
        nll = losses_of(m, example)
        return (nll + 2.0 * (1 - torch.exp(-nll))).sum()

    examples = answers(rows)
    masks = [[int(label != IGNORED) for label in labels] for _, labels in examples]
    trainer = SFTTrainer(
        model("Qwen3"),
        sft_arguments(3, 4, completion_only_loss=True),
        None,
        table(rows, completion_mask=masks),
        processing_class=tokenizer(),
        compute_loss_func=poly,
    )
    return Case(trainer, summed(examples, term), rows, tokens_per_micro=room(rows, 4))


@setup("keep")
def two_sets_of_sft() -> Case:
    """SFTTrainer that cuts rows at 14 tokens and evaluates two sets, each in one batch."""
    rows, sets = words(seed=118), {"short": words(6, 119, low=2, high=8), "long": words(7, 120, low=8, high=24)}
    cut = [row[:14] for row in rows]
    trainer = SFTTrainer(
        model("Llama"),
        sft_arguments(3, 4, max_length=14, per_device_eval_batch_size=8),
        None,
        table(rows),
        {name: table(some) for name, some in sets.items()},
        processing_class=tokenizer(),
    )

    def measured(m: PreTrainedModel) -> dict[str, float]:
        truth = {}
        with torch.no_grad():
            for name, some in sets.items():
                short = whole([row[:14] for row in some])
                truth[f"eval_{name}_loss"] = float(token_mean(m, short))
        return truth

    return case_of(
        trainer, whole(cut), measure=lambda one: one.evaluate(), measured=measured, tokens_per_micro=room(cut, 4)
    )


# Metrics


@setup("keep")
def rows_by_two_predictions() -> Case:
    """`eval_accumulation_steps`, a tuple of predictions, and metrics per row: its mean loss and its worst token."""
    rows, held_out = words(seed=121), words(7, seed=122)

    def both(logits, labels):
        nll = F.pad(next_losses(logits, labels), (0, 1))
        return nll, logits.argmax(-1)

    def of_rows(outcome) -> dict[str, float]:
        nll, best = outcome.predictions
        real = outcome.label_ids[:, 1:] != IGNORED
        nll = np.where(real, nll[:, :-1], 0.0)
        return {
            "row_loss": (nll.sum(1) / real.sum(1)).mean(),
            "worst": nll.max(1).mean(),
            "num_rows": len(nll),
            "mean_best": best[:, :-1][real].mean(),
        }

    trainer = Trainer(
        model("Qwen2"),
        arguments(3, 4, per_device_eval_batch_size=3, eval_accumulation_steps=2),
        lm_collator(),
        table(rows),
        table(held_out),
        compute_metrics=of_rows,
        preprocess_logits_for_metrics=both,
    )

    def measured(m: PreTrainedModel) -> dict[str, float]:
        with torch.no_grad():
            each = [losses_of(m, one) for one in whole(held_out)]
            best = torch.cat([logits_of(m, row)[:-1].argmax(-1) for row in held_out])
        return {
            "eval_row_loss": float(torch.stack([one.mean() for one in each]).mean()),
            "eval_worst": float(torch.stack([one.max() for one in each]).mean()),
            "eval_num_rows": 7.0,
            "eval_mean_best": float(best.double().mean()),
        }

    return Case(
        trainer,
        lambda m, _: learns_all(m, rows),
        rows,
        measure=lambda one: one.evaluate(),
        measured=measured,
        tokens_per_micro=room(rows, 4),
    )


@setup("keep")
def metrics_with_inputs() -> Case:
    """`include_for_metrics=["inputs"]`: the loss behind the separator, which metrics look for in the inputs."""
    rows, held_out = words(seed=123), with_prompts(words(6, seed=124))

    def behind(outcome) -> dict[str, float]:
        real = outcome.label_ids[:, 1:] != IGNORED
        answer = (np.cumsum(outcome.inputs == SEP, 1) > 0)[:, :-1] & real
        return {"answer_loss": outcome.predictions[:, :-1][answer].mean(), "num_answer": int(answer.sum())}

    trainer = Trainer(
        model("Gemma"),
        arguments(3, 4, per_device_eval_batch_size=4, include_for_metrics=["inputs"]),
        lm_collator(),
        table(rows),
        table(held_out),
        compute_metrics=behind,
        preprocess_logits_for_metrics=lambda logits, labels: F.pad(next_losses(logits, labels), (0, 1)),
    )

    def measured(m: PreTrainedModel) -> dict[str, float]:
        with torch.no_grad():
            each = torch.cat([losses_of(m, one) for one in answers(held_out)])
        return {"eval_answer_loss": float(each.mean()), "eval_num_answer": float(len(each))}

    return case_of(
        trainer, whole(rows), measure=lambda one: one.evaluate(), measured=measured, tokens_per_micro=room(rows, 4)
    )


# Wrong in their own batches


@setup("either", padded_is_true=False)
def prompt_counted_from_the_left() -> Case:
    """Padding on the left, and the first tokens of a row are ignored by the length of its prompt: it is padding."""
    rows, tok = with_prompts(words(seed=125)), tokenizer(padding_side="left")
    lengths = [row.index(SEP) + 1 for row in rows]

    def collate(examples: list[dict]) -> Batch:
        batch = tok.pad({"input_ids": [example["input_ids"] for example in examples]}, return_tensors="pt")
        labels = batch["input_ids"].clone()
        for at, example in enumerate(examples):
            labels[at, : example["prompt_length"]] = IGNORED
        labels[batch["attention_mask"] == 0] = IGNORED
        return {**batch, "labels": labels}

    args = arguments(3, 4, remove_unused_columns=False)
    trainer = Trainer(model(), args, collate, table(rows, prompt_length=lengths))
    return case_of(trainer, answers(rows), tokens_per_micro=room(rows, 4))


@setup("either", padded_is_true=False)
def shifted_after_flattening() -> Case:
    """Logits and labels are laid end to end and then shifted: the end of a row learns the first token of the next."""

    class Flattened(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels = inputs.pop("labels").reshape(-1)[1:]
            outputs = model(**inputs)
            logits = outputs.logits.reshape(-1, outputs.logits.size(-1))[:-1]
            loss = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum") / num_items_in_batch
            return (loss, outputs) if return_outputs else loss

    rows = words(seed=126)
    trainer = plain(Flattened, "Llama", arguments(3, 4), rows)
    return case_of(trainer, whole(rows), tokens_per_micro=room(rows, 4))


@setup("either", padded_is_true=False)
def divergence_per_row() -> Case:
    """`F.kl_div(reduction="batchmean")` of three dimensions: it divides by rows, and padding is in it."""
    teacher = model("Llama", seed=1)

    class Distiller(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
            with torch.no_grad():
                taught = teacher(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
            apart = F.kl_div(outputs.logits.log_softmax(-1), taught.softmax(-1), reduction="batchmean")
            loss = 0.5 * outputs.loss + 0.5 * apart
            return (loss, outputs) if return_outputs else loss

    rows, double = words(seed=127), copy.deepcopy(teacher).double().eval()

    def term(m: PreTrainedModel, _: int, example: Example) -> torch.Tensor:
        with torch.no_grad():
            theirs = predictions(double, example)[0].log_softmax(-1)
        logits, targets = predictions(m, example)
        apart = (theirs.exp() * (theirs - logits.log_softmax(-1))).sum()
        return 0.5 * F.cross_entropy(logits, targets, reduction="sum") + 0.5 * apart

    trainer = plain(Distiller, "Llama", arguments(3, 4), rows)
    return Case(trainer, summed(whole(rows), term), rows, tokens_per_micro=room(rows, 4))


@setup("either", padded_is_true=False)
def sorted_without_weights() -> Case:
    """A collator sorts rows by length and forgets to sort their weights: a row has the weight of another."""
    rows = words(seed=128)
    weights = [0.25 + 0.25 * (index % 7) for index in range(len(rows))]

    def collate(examples: list[dict]) -> Batch:
        weight = torch.tensor([example["weight"] for example in examples])
        longest_first = sorted((example["input_ids"] for example in examples), key=len, reverse=True)
        batch = batch_of(whole(longest_first))
        return {**batch, "loss_weight": weight[:, None] * batch["attention_mask"]}

    class Weighted(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            weight, labels = inputs.pop("loss_weight")[:, 1:], inputs.pop("labels")
            outputs = model(**inputs)
            loss = (weight * next_losses(outputs.logits, labels)).sum() / num_items_in_batch
            return (loss, outputs) if return_outputs else loss

    args = arguments(3, 4, remove_unused_columns=False)
    trainer = Weighted(model("Qwen2"), args, collate, table(rows, weight=weights))
    loss = summed(whole(rows), lambda m, index, example: weights[index] * losses_of(m, example).sum())
    return Case(trainer, loss, rows, tokens_per_micro=room(rows, 4))


@setup("either", padded_is_true=False)
def mean_of_weighted_means() -> Case:
    """`nn.CrossEntropyLoss(weight=...)` divides by the weights of each batch; they are averaged over the update."""
    weights = torch.ones(VOCAB)
    weights[EOS], weights[60:] = 5.0, 0.3

    class Weighted(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            entropy = nn.CrossEntropyLoss(weight=weights)
            loss = entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            loss = loss / self.args.gradient_accumulation_steps
            return (loss, outputs) if return_outputs else loss

    def loss(m: PreTrainedModel, _: list[Ids]) -> torch.Tensor:
        pairs = [predictions(m, example) for example in whole(rows)]
        logits, targets = (torch.cat(some) for some in zip(*pairs, strict=True))
        return F.cross_entropy(logits, targets, weights.double())

    rows = words(seed=129)
    return Case(plain(Weighted, "Llama", arguments(2, 6), rows), loss, rows, tokens_per_micro=room(rows, 6))


@setup("either", padded_is_true=False)
def pooled_over_padding() -> Case:
    """A topic per row is guessed from the mean of its hidden states, over all columns of the batch."""
    rows = words(seed=130)
    topics = [index % 3 for index in range(len(rows))]

    def collate(examples: list[dict]) -> Batch:
        topic = torch.tensor([example["topic"] for example in examples])
        return {**batch_of(whole([example["input_ids"] for example in examples])), "topic": topic}

    class Topics(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            topic = inputs.pop("topic")
            outputs = model(**inputs, output_hidden_states=True, num_items_in_batch=num_items_in_batch)
            guess = model.topic(outputs.hidden_states[-1].mean(1))
            loss = outputs.loss + 0.5 * F.cross_entropy(guess, topic)
            return (loss, outputs) if return_outputs else loss

    def loss(m: PreTrainedModel, _: list[Ids]) -> torch.Tensor:
        states = [m(input_ids=torch.tensor([row]), output_hidden_states=True).hidden_states[-1][0] for row in rows]
        guess = m.topic(torch.stack([one.mean(0) for one in states]))
        return learns_all(m, rows) + 0.5 * F.cross_entropy(guess, torch.tensor(topics))

    made = model()
    made.topic = nn.Linear(WIDTH, 3)
    args = arguments(12, 1, remove_unused_columns=False)
    return Case(Topics(made, args, collate, table(rows, topic=topics)), loss, rows)


@setup("either", padded_is_true=False)
def masked_words_without_mask() -> Case:
    """BERT, which learns masked words, and a collator without `attention_mask`: rows look at their padding."""
    rows = words(seed=131)

    def hidden(row: Ids) -> Example:
        chosen = [token >= 8 and token % 5 == 0 for token in row]
        ids = [SEP if one else token for one, token in zip(chosen, row, strict=True)]
        return ids, [token if one else IGNORED for one, token in zip(chosen, row, strict=True)]

    def collate(examples: list[dict]) -> Batch:
        batch = batch_of([hidden(example["input_ids"]) for example in examples])
        return {"input_ids": batch["input_ids"], "labels": batch["labels"]}

    def loss(m: PreTrainedModel, _: list[Ids]) -> torch.Tensor:
        pairs = [(logits_of(m, ids), torch.tensor(labels)) for ids, labels in map(hidden, rows)]
        logits, targets = (torch.cat(some) for some in zip(*pairs, strict=True))
        return F.cross_entropy(logits, targets, ignore_index=IGNORED)

    made = model("Bert", "ForMaskedLM", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    trainer = Trainer(made, arguments(12, 1), collate, table(rows))
    return Case(trainer, loss, [ids for ids, _ in map(hidden, rows)])


@setup("either", padded_is_true=False)
def accuracy_over_padding() -> Case:
    """`(predictions == labels).mean()`, in which padding counts as wrong; the gradient is right."""
    rows = words(seed=132)
    held_out = [[BOS, *chain.from_iterable((token, token) for token in row[1:-1]), EOS] for row in words(6, 133)]

    def accuracy(outcome) -> dict[str, float]:
        return {"accuracy": float((outcome.predictions[:, :-1] == outcome.label_ids[:, 1:]).mean())}

    trainer = Trainer(
        model("Llama", tie_word_embeddings=True),
        arguments(3, 4, per_device_eval_batch_size=6),
        lm_collator(),
        table(rows),
        table(held_out),
        compute_metrics=accuracy,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
    )

    def measured(m: PreTrainedModel) -> dict[str, float]:
        with torch.no_grad():
            pairs = [predictions(m, example) for example in whole(held_out)]
        hits = torch.cat([logits.argmax(-1) == targets for logits, targets in pairs])
        return {"eval_accuracy": float(hits.double().mean())}

    return case_of(
        trainer, whole(rows), measure=lambda one: one.evaluate(), measured=measured, tokens_per_micro=room(rows, 4)
    )


@setup("either", padded_is_true=False)
def ends_grow() -> Case:
    """A collator appends the end to the lists of the dataset itself: in the second epoch they end twice."""
    rows = words(seed=134)
    data = [{"input_ids": row[:-1]} for row in rows]

    def collate(examples: list[dict]) -> Batch:
        for example in examples:
            example["input_ids"].append(EOS)
        return batch_of(whole([example["input_ids"] for example in examples]))

    def check(run: Run, _: PreTrainedModel) -> str:
        wrong = [step for step in range(2) if any(row.count(EOS) != 1 for row in run.sequences(step))]
        return f"ends are not single in updates {wrong}" if wrong else ""

    trainer = Trainer(model(), arguments(3, 4, max_steps=2), collate, data)
    return case_of(trainer, whole(rows), check=check, tokens_per_micro=room(rows, 4))


@setup("either", padded_is_true=False)
def divided_twice() -> Case:
    """A sum over the update's targets, and `loss_is_scaled_for_ga = False`: it is divided by the batches again."""

    class Twice(Trainer):
        loss_is_scaled_for_ga = False

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            loss = next_losses(outputs.logits, labels).sum() / num_items_in_batch
            return (loss, outputs) if return_outputs else loss

    rows = words(seed=135)
    return case_of(plain(Twice, "Llama", arguments(3, 4), rows), whole(rows), tokens_per_micro=room(rows, 4))


# More than a flat batch has


@setup("refuse")
def two_towers() -> Case:
    """Pairs of texts under names of their own, whose pooled states have a cosine that is learnt from a score."""
    first, second = words(seed=136), words(seed=137)
    scores = [round(0.1 + 0.07 * index, 2) for index in range(len(first))]

    def collate(examples: list[dict]) -> Batch:
        batch = {"score": torch.tensor([example["score"] for example in examples])}
        for side in ("ids_a", "ids_b"):
            batch[side] = padded([example[side] for example in examples], PAD)
        return batch

    def pooled(m: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
        mask = (ids != PAD).long()
        states = m.model(input_ids=ids, attention_mask=mask).last_hidden_state
        return (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)

    class Towers(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            near = F.cosine_similarity(pooled(model, inputs["ids_a"]), pooled(model, inputs["ids_b"]))
            loss = F.mse_loss(near, inputs["score"])
            return (loss, {"near": near}) if return_outputs else loss

    def loss(m: PreTrainedModel, _: list[Ids]) -> torch.Tensor:
        pairs = zip(first, second, strict=True)
        near = [F.cosine_similarity(*(pooled(m, torch.tensor([row])) for row in pair)) for pair in pairs]
        return F.mse_loss(torch.cat(near), torch.tensor(scores).double())

    data = Dataset.from_dict({"ids_a": first, "ids_b": second, "score": scores})
    trainer = Towers(model(), arguments(12, 1, remove_unused_columns=False), collate, data)
    return Case(trainer, loss, [*first, *second])


@setup("refuse")
def mixed_up_rows() -> Case:
    """Mixup: embeddings and losses of each row with those of another of its batch, where both are real."""
    rows = words(seed=138)

    def mixed(m: PreTrainedModel, batch: Batch) -> torch.Tensor:
        ids, mask, labels = batch["input_ids"], batch["attention_mask"], batch["labels"]
        both = mask.bool() & mask.flip(0).bool()
        x = m.get_input_embeddings()(ids)
        x = torch.where(both[..., None], 0.7 * x + 0.3 * x.flip(0), x)
        logits = m(inputs_embeds=x, attention_mask=mask).logits
        theirs = labels.flip(0).masked_fill(~both, IGNORED)
        loss = 0.7 * next_losses(logits, labels) + 0.3 * next_losses(logits, theirs)
        return loss.sum() / (labels[:, 1:] != IGNORED).sum()

    class Mixed(Trainer):
        def _get_train_sampler(self, train_dataset=None):
            return SequentialSampler(self.train_dataset)

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss = mixed(model, inputs)
            return (loss, {"loss": loss}) if return_outputs else loss

    trainer = plain(Mixed, "Llama", arguments(12, 1), rows)
    return Case(trainer, lambda m, _: mixed(m, batch_of(whole(rows))), rows)


@setup("refuse")
def tilted_towards_hard_rows() -> Case:
    """The log of the mean of exponentials of the rows' mean losses: hard rows count more."""

    class Tilted(Trainer):
        tilt = 2.0

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            per_row = next_losses(outputs.logits, labels).sum(1) / (labels[:, 1:] != IGNORED).sum(1)
            loss = (torch.logsumexp(self.tilt * per_row, 0) - np.log(len(per_row))) / self.tilt
            return (loss, outputs) if return_outputs else loss

    def loss(m: PreTrainedModel, _: list[Ids]) -> torch.Tensor:
        per_row = torch.stack([losses_of(m, example).mean() for example in whole(rows)])
        return torch.logsumexp(2.0 * per_row, 0) / 2.0

    rows = words(seed=139)
    return Case(plain(Tilted, "Llama", arguments(12, 1), rows), loss, rows)


@setup("refuse")
def length_to_a_power() -> Case:
    """Losses of rows over a power of their lengths, which the mask tells, and a mean over the rows of the update."""

    class Powered(Trainer):
        loss_is_scaled_for_ga = True

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            lengths = inputs["attention_mask"].sum(1)
            loss = (next_losses(outputs.logits, labels).sum(1) / lengths**0.7).mean()
            loss = loss / self.args.gradient_accumulation_steps
            return (loss, outputs) if return_outputs else loss

    rows = words(seed=140)
    loss = summed(whole(rows), lambda m, _, one: losses_of(m, one).sum() / len(one[0]) ** 0.7, len(rows))
    trainer = plain(Powered, "Llama", arguments(3, 4), rows)
    return Case(trainer, loss, rows, tokens_per_micro=room(rows, 4))


@setup("refuse")
def features_without_ids() -> Case:
    """Frames of an encoder in place of ids: the batch has `inputs_embeds`, a mask and labels."""
    rows, draws = words(seed=141), np.random.default_rng(5)
    frames = [draws.normal(0, 0.3, (len(row), WIDTH)).astype(np.float32).tolist() for row in rows]

    def collate(examples: list[dict]) -> Batch:
        batch = batch_of(whole([example["transcript"] for example in examples]))
        found = [torch.tensor(example["frames"]) for example in examples]
        del batch["input_ids"]
        return {**batch, "inputs_embeds": nn.utils.rnn.pad_sequence(found, batch_first=True)}

    def loss(m: PreTrainedModel, _: list[Ids]) -> torch.Tensor:
        total = 0.0
        for row, some in zip(rows, frames, strict=True):
            logits = m(inputs_embeds=torch.tensor([some]).double()).logits[0, :-1]
            total = total + F.cross_entropy(logits, torch.tensor(row[1:]), reduction="sum")
        return total / sum(len(row) - 1 for row in rows)

    data = Dataset.from_dict({"transcript": rows, "frames": frames})
    trainer = Trainer(model(), arguments(3, 4, remove_unused_columns=False), collate, data)
    return Case(trainer, loss, tokens_per_micro=room(rows, 4))


class SpokenForCausalLM(LlamaForCausalLM):
    """A model whose rows have a speaker, whose vector is added to each of their tokens."""

    def __init__(self, config):
        super().__init__(config)
        self.speakers = nn.Embedding(4, config.hidden_size)

    def forward(self, input_ids=None, speaker=None, attention_mask=None, labels=None, **kwargs):
        x = self.get_input_embeddings()(input_ids) + self.speakers(speaker)[:, None]
        return super().forward(inputs_embeds=x, attention_mask=attention_mask, labels=labels, **kwargs)


@setup("refuse")
def speaker_of_a_row() -> Case:
    """A number per row, (batch,), which the model itself spreads over the tokens of the row."""
    rows = words(seed=142)
    speakers = [index % 4 for index in range(len(rows))]

    def collate(examples: list[dict]) -> Batch:
        speaker = torch.tensor([example["speaker"] for example in examples])
        return {**batch_of(whole([example["input_ids"] for example in examples])), "speaker": speaker}

    def loss(m: PreTrainedModel, _: list[Ids]) -> torch.Tensor:
        each = [
            losses_of(m, example, speaker=torch.tensor([speaker]))
            for example, speaker in zip(whole(rows), speakers, strict=True)
        ]
        return torch.cat(each).mean()

    torch.manual_seed(2)
    trainer = Trainer(SpokenForCausalLM(model().config), arguments(3, 4), collate, table(rows, speaker=speakers))
    return Case(trainer, loss, rows, tokens_per_micro=room(rows, 4))


@setup("refuse")
def one_of_three_endings() -> Case:
    """Multiple choice: three endings per example, (batch, 3, seq), whose mean likelihoods are compared."""
    endings = [words(3, seed=200 + index) for index in range(12)]
    right = [index % 3 for index in range(12)]

    def collate(examples: list[dict]) -> Batch:
        flat = batch_of(whole(list(chain.from_iterable(example["endings"] for example in examples))))
        batch = {name: value.view(len(examples), 3, -1) for name, value in flat.items() if name != "labels"}
        return {**batch, "labels": torch.tensor([example["right"] for example in examples])}

    class Choice(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            right = inputs.pop("labels")
            ids, mask = inputs["input_ids"].flatten(0, 1), inputs["attention_mask"].flatten(0, 1)
            logits = model(input_ids=ids, attention_mask=mask).logits
            nll = next_losses(logits, ids.masked_fill(mask == 0, IGNORED)).sum(1) / (mask.sum(1) - 1)
            scores = -nll.view(-1, 3)
            loss = F.cross_entropy(scores, right) / self.args.gradient_accumulation_steps
            return (loss, {"logits": scores}) if return_outputs else loss

    def loss(m: PreTrainedModel, _: list[Ids]) -> torch.Tensor:
        means = [torch.stack([-losses_of(m, example).mean() for example in whole(some)]) for some in endings]
        return F.cross_entropy(torch.stack(means), torch.tensor(right))

    data = Dataset.from_dict({"endings": endings, "right": right})
    trainer = Choice(model(), arguments(3, 4, remove_unused_columns=False), collate, data)
    flat = list(chain.from_iterable(endings))
    return Case(trainer, loss, flat, tokens_per_micro=room(flat, 4))


@setup("refuse")
def state_space() -> Case:
    """Mamba: a state and a convolution run along the row, and know of no boundaries inside it."""
    rows = words(seed=143)
    made = model("Mamba", state_size=4, conv_kernel=3, tie_word_embeddings=False)
    trainer = plain(Trainer, made, arguments(3, 4), rows)
    return case_of(trainer, whole(rows), tokens_per_micro=room(rows, 4))


@setup("either")  # nobody knows the lengths of a stream beforehand, though each micro-batch could be laid flat
def streamed_text() -> Case:
    """SFTTrainer on a stream of text that it tokenizes on the way, without an epoch."""
    rows = words(seed=144)
    data = Dataset.from_dict({"text": [f"<bos> {text(row)} " for row in rows]}).to_iterable_dataset()
    trainer = SFTTrainer(model(), sft_arguments(3, 4), None, data, processing_class=tokenizer())
    return case_of(trainer, whole(rows), tokens_per_micro=room(rows, 4))


@setup("either")  # what the script means is a flat batch, though it has a mask of its own
def packed_with_a_block_mask() -> Case:
    """A collator that lays its rows end to end, with a mask of four dimensions by which they do not see each other."""
    rows = words(seed=145)

    def collate(examples: list[dict]) -> Batch:
        some = [example["input_ids"] for example in examples]
        which = torch.tensor([at for at, row in enumerate(some) for _ in row])
        seen = (which[:, None] == which[None]) & torch.ones(len(which), len(which)).tril().bool()
        return {
            "input_ids": torch.tensor([list(chain.from_iterable(some))]),
            "position_ids": torch.tensor([list(chain.from_iterable(range(len(row)) for row in some))]),
            "labels": torch.tensor([list(chain.from_iterable([IGNORED, *row[1:]] for row in some))]),
            "attention_mask": torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None],
        }

    trainer = Trainer(model(), arguments(3, 4), collate, table(rows))
    return case_of(trainer, whole(rows), tokens_per_micro=room(rows, 4))


if __name__ == "__main__":
    main()
