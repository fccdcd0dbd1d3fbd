"""A fifth set of forty trainers as people write them, by somebody who had not seen the code of `unpad.hf`.

    python benchmarks/attach_unseen_5.py [NAME ...]

Seven trainers are wrong without `attach` (`padded_is_true=False`): their truth is what their authors meant. Of six the
fault is the script's own. `either` is expected where it can be mended, with a word, or be refused; `refuse` where
nothing can be made of it. What the columns of the table mean stands in `attach_judge.py`.
"""

from __future__ import annotations

import copy
import math
import random
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
    error_of,
    learns_all,
    lm_collator,
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
    towards,
    true_gradient,
    whole,
    with_prompts,
    words,
)
from datasets import Dataset, interleave_datasets
from peft import IA3Config, LoraConfig, get_peft_model
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import WeightedRandomSampler, random_split
from transformers import (
    DataCollatorForSeq2Seq,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    default_data_collator,
)
from trl import SFTTrainer

Batch = dict[str, torch.Tensor]
Turns = list[tuple[str, Ids]]


def room(rows: Sequence[Ids], accumulate: int) -> int:
    """Tokens of a micro-batch with which an update holds all rows."""
    return max(max(map(len, rows)) + 2, int(1.6 * sum(map(len, rows)) / accumulate) + 1)


def floats(rows: Sequence[Ids], seed: int, low: float = 0.0, high: float = 1.0) -> list[list[float]]:
    """A number for each token."""
    draw = random.Random(seed)
    return [[round(draw.uniform(low, high), 3) for _ in row] for row in rows]


def conversations(num: int = 12, seed: int = 4) -> list[Turns]:
    """Conversations of one to three questions and answers, as roles and words."""
    draw = random.Random(seed)
    made = []
    for _ in range(num):
        turns = []
        for _ in range(draw.randint(1, 3)):
            for role in ("user", "assistant"):
                turns.append((role, [draw.randrange(8, VOCAB) for _ in range(draw.randint(1, 6))]))
        made.append(turns)
    return made


def messages_of(turns: Turns) -> list[dict[str, str]]:
    """The same as a column `messages`."""
    return [{"role": role, "content": text(ids)} for role, ids in turns]


def rendered(turns: Turns, end: int = END) -> Example:
    """Ids and labels of a conversation: answers are learnt, with the mark that ends them."""
    ids, labels = [], []
    for role, said in turns:
        learnt = role == "assistant"
        ids += [ASSISTANT if learnt else USER, *said, end]
        labels += [IGNORED, *(said if learnt else [IGNORED] * len(said)), end if learnt else IGNORED]
    return ids, labels


def terms(
    rows: Sequence[Example], term: Callable[[PreTrainedModel, int, Example], torch.Tensor], num: float | None = None
) -> Callable[[PreTrainedModel, list[Ids]], torch.Tensor]:
    """A loss: the sum of a term per sequence, by its index, over the number of targets or another number."""
    over = num or sum(label != IGNORED for _, labels in rows for label in labels[1:])
    return lambda m, _: sum(term(m, index, example) for index, example in enumerate(rows)) / over


# Collators


@setup("keep")
def response_template_left_padded() -> Case:
    """The answer stands behind a template of two tokens, of which the first is in the prompt too; left padding."""
    template = [SEP, ASSISTANT]
    draw = random.Random(8)
    rows = []
    for row in words(seed=11):
        cut = draw.randint(2, len(row) - 2)
        rows.append([*row[:1], SEP, *row[1:cut], *template, *row[cut:]])
    rows[5] = [token for token in rows[5] if token != ASSISTANT]  # one row lacks the template, and is not learnt
    tok = tokenizer(padding_side="left")

    def collate(examples: list[dict]) -> Batch:
        batch = tok.pad([{"input_ids": example["input_ids"]} for example in examples], return_tensors="pt")
        labels = batch["input_ids"].clone()
        for row, ids in enumerate(batch["input_ids"].tolist()):
            starts = [at for at in range(len(ids) - 1) if ids[at : at + 2] == template]
            labels[row, : starts[0] + 2 if starts else None] = IGNORED
        return {**batch, "labels": labels}

    examples = [(row, after(row, ASSISTANT) if ASSISTANT in row else [IGNORED] * len(row)) for row in rows]
    made = model("Qwen3", tie_word_embeddings=True)
    trainer = Trainer(made, arguments(3, 4), collate, table(rows))
    learnt = [example for example in examples if ASSISTANT in example[0]]
    return Case(trainer, lambda m, _: token_mean(m, learnt), rows, tokens_per_micro=room(rows, 4))


@setup("keep")
def chat_template_in_collator() -> Case:
    """Raw conversations up to the collator, which renders them and learns the answers by the template's own mask."""
    talks = conversations()
    tok = tokenizer()

    def collate(examples: list[dict]) -> Batch:
        made = []
        for example in examples:
            one = tok.apply_chat_template(example["messages"], return_dict=True, return_assistant_tokens_mask=True)
            pairs = zip(one["input_ids"], one["assistant_masks"], strict=True)
            made.append((one["input_ids"], [token if learnt else IGNORED for token, learnt in pairs]))
        return batch_of(made)

    data = Dataset.from_dict({"id": list(range(len(talks))), "messages": [messages_of(turns) for turns in talks]})
    trainer = Trainer(model(), arguments(3, 4, remove_unused_columns=False), collate, data)
    examples = [rendered(turns) for turns in talks]
    return case_of(trainer, examples, tokens_per_micro=room([ids for ids, _ in examples], 4))


@setup("keep")
def instruction_prepended() -> Case:
    """A fixed instruction behind `BOS`, which is not learnt, and a cut at 20 tokens; windows of 8 tokens."""
    instruction, longest = [USER, 17, 88, 41, 23, SEP], 20
    rows = words(seed=12)

    def collate(examples: list[dict]) -> Batch:
        ids = [torch.tensor([BOS, *instruction, *example["input_ids"][1:]])[:longest] for example in examples]
        batch = pad_sequence(ids, batch_first=True, padding_value=PAD)
        mask = pad_sequence([torch.ones_like(one) for one in ids], batch_first=True)
        labels = batch.masked_fill(mask == 0, IGNORED)
        labels[:, : 1 + len(instruction)] = IGNORED
        return {"input_ids": batch, "attention_mask": mask, "labels": labels}

    whole_rows = [[BOS, *instruction, *row[1:]][:longest] for row in rows]
    examples = [(row, [IGNORED] * 7 + row[7:]) for row in whole_rows]
    trainer = Trainer(model("Mistral", sliding_window=8), arguments(2, 6), collate, table(rows))
    return case_of(trainer, examples, tokens_per_micro=room(whole_rows, 6))


@setup("keep", padded_is_true=False)
def blocks_of_text() -> Case:
    """The `group_texts` of run_clm: documents end to end, cut into blocks of 24, and `default_data_collator`.

    Trainer 5.23 does not know that the loss of `GPT2LMHeadModel` shifts labels, and counts the first of each block.
    """
    rows, block = words(20, seed=13), 24

    def group_texts(examples: dict[str, list]) -> dict[str, list]:
        joined = list(chain.from_iterable(examples["input_ids"]))
        end = len(joined) // block * block
        pieces = [joined[at : at + block] for at in range(0, end, block)]
        return {"input_ids": pieces, "attention_mask": [[1] * block for _ in pieces], "labels": pieces}

    data = table(rows).map(group_texts, batched=True, remove_columns=["input_ids"])
    blocks = data["input_ids"][:]
    trainer = Trainer(model("GPT2"), arguments(3, 4), default_data_collator, data)
    return case_of(trainer, whole(blocks), tokens_per_micro=room(blocks, 4))


@setup("keep")
def packed_by_hand() -> Case:
    """Documents packed in a loop of one's own, with position_ids that begin again; one pack per micro-batch."""
    rows = with_prompts(words(14, seed=14))
    packs: list[list[Example]] = [[]]
    for row in rows:
        if sum(len(ids) for ids, _ in packs[-1]) + len(row) > 45:
            packs.append([])
        packs[-1].append((row, after(row, SEP)))
    data = Dataset.from_dict(
        {
            "input_ids": [[token for ids, _ in pack for token in ids] for pack in packs],
            "labels": [[label for _, labels in pack for label in labels] for pack in packs],
            "position_ids": [[at for ids, _ in pack for at in range(len(ids))] for pack in packs],
        }
    )
    trainer = Trainer(model("Llama"), arguments(1, len(packs)), default_data_collator, data)
    examples = [(row, after(row, SEP)) for row in rows]
    return case_of(trainer, examples, tokens_per_micro=room(rows, len(packs)))


@setup("refuse")
def middle_filled_at_random() -> Case:
    """Half of the rows become prefix, suffix and middle when they are collated: a plan cannot know their lengths."""
    draws = np.random.default_rng(3)

    def collate(examples: list[dict]) -> Batch:
        made = []
        for example in examples:
            row = example["input_ids"]
            if draws.random() < 0.5:
                low, high = sorted(draws.choice(np.arange(1, len(row)), 2, replace=False).tolist())
                row = [BOS, SEP, *row[1:low], USER, *row[high:-1], ASSISTANT, *row[low:high], EOS]
            made.append((row, row))
        return batch_of(made)

    rows = words(seed=15)
    trainer = Trainer(model(), arguments(4, 3), collate, table(rows))
    return Case(trainer, learns_all, tokens_per_micro=room(rows, 2))


@setup("keep")
def smoothing_per_token() -> Case:
    """A column says how much each target is smoothed, padded by the collator; the divisor is that of the update."""
    rows = with_prompts(words(seed=16))
    amounts = floats(rows, 5, 0.0, 0.4)

    def collate(examples: list[dict]) -> Batch:
        batch = batch_of([(example["input_ids"], example["labels"]) for example in examples])
        return {**batch, "smoothing": padded([example["smoothing"] for example in examples], 0.0)}

    class Smooth(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            amount, labels = inputs.pop("smoothing")[:, 1:], inputs.pop("labels")
            outputs = model(**inputs)
            real = labels[:, 1:] != IGNORED
            even = -outputs.logits[:, :-1].log_softmax(-1).mean(-1)
            loss = (1 - amount) * next_losses(outputs.logits, labels) + amount * even * real
            loss = loss.sum() / (real.sum() if num_items_in_batch is None else num_items_in_batch)
            return (loss, outputs) if return_outputs else loss

    def term(m: PreTrainedModel, index: int, example: Example) -> torch.Tensor:
        logits, targets = predictions(m, example)
        amount = torch.tensor(amounts[index], dtype=torch.float64)[-len(targets) :]
        even = -logits.log_softmax(-1).mean(-1)
        return ((1 - amount) * F.cross_entropy(logits, targets, reduction="none") + amount * even).sum()

    examples = [(row, after(row, SEP)) for row in rows]
    data = table(rows, labels=[labels for _, labels in examples], smoothing=amounts)
    trainer = Smooth(model("Olmo2"), arguments(4, 3, remove_unused_columns=False), collate, data)
    return Case(trainer, terms(examples, term), rows, tokens_per_micro=room(rows, 3))


@setup("refuse")
def weight_per_row() -> Case:
    """Means per row, weighted by a number per row: the loss needs rows, which flat batches do not have."""
    rows = words(seed=17)
    weights = [float(1 + index % 4) for index in range(len(rows))]

    def collate(examples: list[dict]) -> Batch:
        weight = torch.tensor([example["weight"] for example in examples])
        return {**batch_of([(example["input_ids"],) * 2 for example in examples]), "weight": weight}

    class Weighted(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            weight, labels = inputs.pop("weight"), inputs.pop("labels")
            outputs = model(**inputs)
            per_row = next_losses(outputs.logits, labels).sum(1) / (labels[:, 1:] != IGNORED).sum(1)
            loss = (weight * per_row).sum() / weight.sum()
            return (loss, outputs) if return_outputs else loss

    def loss(m: PreTrainedModel, _: list[Ids]) -> torch.Tensor:
        each = [weight * losses_of(m, (row, row)).mean() for row, weight in zip(rows, weights, strict=True)]
        return sum(each) / sum(weights)

    args = arguments(12, 1, remove_unused_columns=False)
    return Case(Weighted(model(), args, collate, table(rows, weight=weights)), loss, rows)


@setup("keep")
def quality_spread_over_tokens() -> Case:
    """A row's quality is given to each of its tokens by the collator; the divisor is the sum of the weights."""
    rows = with_prompts(words(seed=18))
    qualities = [0.2 + 0.15 * (index % 6) for index in range(len(rows))]

    def collate(examples: list[dict]) -> Batch:
        batch = batch_of([(example["input_ids"], after(example["input_ids"], SEP)) for example in examples])
        quality = torch.tensor([example["quality"] for example in examples])
        return {**batch, "loss_weight": quality[:, None] * batch["attention_mask"]}

    class Weighted(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            weight, labels = inputs.pop("loss_weight")[:, 1:], inputs.pop("labels")
            outputs = model(**inputs)
            real = labels[:, 1:] != IGNORED
            loss = (weight * next_losses(outputs.logits, labels)).sum() / (weight * real).sum()
            return (loss, outputs) if return_outputs else loss

    def loss(m: PreTrainedModel, _: list[Ids]) -> torch.Tensor:
        each = [losses_of(m, (row, after(row, SEP))) for row in rows]
        total = sum(quality * len(one) for one, quality in zip(each, qualities, strict=True))
        return sum(quality * one.sum() for one, quality in zip(each, qualities, strict=True)) / total

    args = arguments(12, 1, remove_unused_columns=False)
    return Case(Weighted(model("Granite"), args, collate, table(rows, quality=qualities)), loss, rows)


@setup("keep")
def no_mask_right_padded() -> Case:
    """A collator that gives no attention_mask: a causal model with padding on the right does not miss it."""

    def collate(examples: list[dict]) -> Batch:
        ids = pad_sequence([torch.tensor(one["input_ids"]) for one in examples], batch_first=True, padding_value=PAD)
        return {"input_ids": ids, "labels": ids.masked_fill(ids == PAD, IGNORED)}

    rows = words(13, seed=19)  # a last micro-batch of one row
    made = model("GPTNeoX", hidden_dropout=0.0)
    trainer = Trainer(made, arguments(3, 5, average_tokens_across_devices=False), collate, table(rows))
    return case_of(trainer, whole(rows), tokens_per_micro=room(rows, 5))


# Losses


@setup("keep")
def focal_with_logs() -> Case:
    """A focal loss over the update's targets, and a count of tokens by the attention_mask for the logs."""

    class Focal(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels = inputs.pop("labels")
            self.num_tokens = getattr(self, "num_tokens", 0) + int(inputs["attention_mask"].sum())
            outputs = model(**inputs)
            nll = next_losses(outputs.logits, labels)
            loss = ((1 - torch.exp(-nll)) ** 2 * nll).sum() / num_items_in_batch
            return (loss, outputs) if return_outputs else loss

        def log(self, logs, *args, **kwargs):
            super().log({**logs, "num_tokens": self.num_tokens}, *args, **kwargs)

    def term(m: PreTrainedModel, _: int, example: Example) -> torch.Tensor:
        nll = losses_of(m, example)
        return ((1 - torch.exp(-nll)) ** 2 * nll).sum()

    rows = words(10, seed=20)  # micro-batches of three, three, three and one
    trainer = plain(Focal, "Phi3", arguments(3, 4, logging_strategy="steps", logging_steps=1), rows)
    return Case(trainer, terms(whole(rows), term), rows, tokens_per_micro=room(rows, 4))


@setup("keep")
def teacher_beside() -> Case:
    """Distillation from a frozen teacher, which reads what the student reads; both terms over the update's targets."""

    class Distiller(Trainer):
        def __init__(self, *args, teacher: PreTrainedModel, temperature: float = 2.0, alpha: float = 0.3, **kwargs):
            super().__init__(*args, **kwargs)
            self.teacher = teacher.eval().requires_grad_(False)
            self.temperature, self.alpha = temperature, alpha

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            with torch.no_grad():
                taught = self.teacher(**inputs).logits
            nll = next_losses(outputs.logits, labels).sum()
            at = self.temperature
            ours, theirs = (outputs.logits / at).log_softmax(-1), (taught / at).log_softmax(-1)
            apart = F.kl_div(ours, theirs, log_target=True, reduction="none").sum(-1)[:, :-1]
            apart = (apart * (labels[:, 1:] != IGNORED)).sum() * at**2
            loss = (self.alpha * nll + (1 - self.alpha) * apart) / num_items_in_batch
            return (loss, outputs) if return_outputs else loss

    def term(m: PreTrainedModel, _: int, example: Example) -> torch.Tensor:
        nll = losses_of(m, example).sum()
        with torch.no_grad():
            taught = predictions(double, example)[0]
        ours, theirs = (predictions(m, example)[0] / 2).log_softmax(-1), (taught / 2).log_softmax(-1)
        return 0.3 * nll + 0.7 * 4 * (theirs.exp() * (theirs - ours)).sum()

    rows = words(seed=21)
    double = model(seed=1, num_hidden_layers=3).double().eval()
    trainer = plain(Distiller, "Llama", arguments(2, 6), rows, teacher=model(seed=1, num_hidden_layers=3))
    return Case(trainer, terms(whole(rows), term), rows, tokens_per_micro=room(rows, 6))


@setup("keep")
def teacher_top_three() -> Case:
    """Distillation from files: each token has the teacher's three likeliest next tokens and their probabilities."""
    rows, draw = words(seed=22), random.Random(6)
    best = [[draw.sample(range(8, VOCAB), 3) for _ in row] for row in rows]
    chances = [[[0.6, 0.3, 0.1] if draw.random() < 0.5 else [0.5, 0.25, 0.25] for _ in row] for row in rows]

    def collate(examples: list[dict]) -> Batch:
        batch = batch_of([(example["input_ids"],) * 2 for example in examples])
        for name in ("top_ids", "top_probs"):
            batch[name] = pad_sequence([torch.tensor(example[name]) for example in examples], batch_first=True)
        return batch

    class Distiller(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            ids, chance = inputs.pop("top_ids"), inputs.pop("top_probs")
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            soft = -(chance * outputs.logits.log_softmax(-1).gather(-1, ids)).sum(-1)[:, :-1]
            loss = 0.5 * next_losses(outputs.logits, labels) + 0.5 * soft * (labels[:, 1:] != IGNORED)
            loss = loss.sum() / num_items_in_batch
            return (loss, outputs) if return_outputs else loss

    def term(m: PreTrainedModel, index: int, example: Example) -> torch.Tensor:
        logits, targets = predictions(m, example)
        ids, chance = torch.tensor(best[index][:-1]), torch.tensor(chances[index][:-1], dtype=torch.float64)
        soft = -(chance * logits.log_softmax(-1).gather(-1, ids)).sum()
        return 0.5 * F.cross_entropy(logits, targets, reduction="sum") + 0.5 * soft

    data = table(rows, top_ids=best, top_probs=chances)
    trainer = Distiller(model(), arguments(3, 4, remove_unused_columns=False), collate, data)
    return Case(trainer, terms(whole(rows), term), rows, tokens_per_micro=room(rows, 4))


@setup("keep")
def z_loss_by_function() -> Case:
    """A `compute_loss_func` with a z-loss of the targets' logits; caps of scores and logits, and a tied head."""

    def with_z(outputs, labels, num_items_in_batch=None):
        shifted = F.pad(labels, (0, 1), value=IGNORED)[:, 1:].reshape(-1)
        logits = outputs.logits.float().reshape(-1, outputs.logits.shape[-1])
        loss = F.cross_entropy(logits, shifted, ignore_index=IGNORED, reduction="sum")
        z = torch.logsumexp(logits, -1)[shifted != IGNORED].square().sum()
        return (loss + 1e-2 * z) / num_items_in_batch

    def term(m: PreTrainedModel, _: int, example: Example) -> torch.Tensor:
        logits, targets = predictions(m, example)
        return F.cross_entropy(logits, targets, reduction="sum") + 1e-2 * logits.logsumexp(-1).square().sum()

    rows = words(seed=23)
    made = model("Gemma2", sliding_window=6, query_pre_attn_scalar=8)
    trainer = plain(Trainer, made, arguments(4, 3), rows, compute_loss_func=with_z)
    return Case(trainer, terms(whole(rows), term), rows, tokens_per_micro=room(rows, 3))


@setup("keep")
def unwanted_tokens() -> Case:
    """Unlikelihood where a column marks a target as unwanted, likelihood elsewhere; prompts are not learnt."""
    rows, draw = with_prompts(words(seed=24)), random.Random(9)
    unwanted = [[int(draw.random() < 0.25) for _ in row] for row in rows]

    def collate(examples: list[dict]) -> Batch:
        batch = batch_of([(example["input_ids"], after(example["input_ids"], SEP)) for example in examples])
        return {**batch, "unwanted": padded([example["unwanted"] for example in examples], 0)}

    class Unlikely(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            bad, labels = inputs.pop("unwanted")[:, 1:].bool(), inputs.pop("labels")
            outputs = model(**inputs)
            nll = next_losses(outputs.logits, labels)
            real = labels[:, 1:] != IGNORED
            away = -torch.log1p(-torch.exp(-nll).clamp(max=1 - 1e-6))
            loss = (torch.where(bad, away, nll) * real).sum() / num_items_in_batch
            return (loss, outputs) if return_outputs else loss

    def term(m: PreTrainedModel, index: int, example: Example) -> torch.Tensor:
        nll = losses_of(m, example)
        bad = torch.tensor(unwanted[index])[-len(nll) :].bool()
        return nll[~bad].sum() - torch.log1p(-torch.exp(-nll[bad])).sum()

    examples = [(row, after(row, SEP)) for row in rows]
    data = table(rows, unwanted=unwanted)
    trainer = Unlikely(model("Qwen3"), arguments(2, 6, remove_unused_columns=False), collate, data)
    return Case(trainer, terms(examples, term), rows, tokens_per_micro=room(rows, 6))


@setup("keep")
def sum_over_a_constant() -> Case:
    """A sum over tokens divided by a budget that never changes, and said to be scaled already."""

    class Budget(Trainer):
        loss_is_scaled_for_ga = True
        budget = 256

        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            loss = next_losses(outputs.logits, labels).sum() / self.budget
            return (loss, outputs) if return_outputs else loss

    rows = words(seed=25)
    trainer = plain(Budget, "Starcoder2", arguments(3, 4), rows)
    loss = terms(whole(rows), lambda m, _, example: losses_of(m, example).sum(), 256)
    return Case(trainer, loss, rows, tokens_per_micro=room(rows, 4))


@setup("refuse")
def verdict_at_last_token() -> Case:
    """A second head reads the last token of each row and learns a label per row."""
    rows = words(seed=26)
    verdicts = [float(index % 2) for index in range(len(rows))]

    def collate(examples: list[dict]) -> Batch:
        verdict = torch.tensor([example["verdict"] for example in examples])
        return {**batch_of([(example["input_ids"],) * 2 for example in examples]), "verdict": verdict}

    class Both(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            verdict = inputs.pop("verdict")
            outputs = model(**inputs, output_hidden_states=True)
            last = inputs["attention_mask"].sum(1) - 1
            state = outputs.hidden_states[-1][torch.arange(len(last)), last]
            guess = model.verdict(state)[:, 0]
            loss = outputs.loss + 0.5 * F.binary_cross_entropy_with_logits(guess, verdict)
            return (loss, outputs) if return_outputs else loss

    def loss(m: PreTrainedModel, _: list[Ids]) -> torch.Tensor:
        states = [m(input_ids=torch.tensor([row]), output_hidden_states=True).hidden_states[-1][0, -1] for row in rows]
        guesses = m.verdict(torch.stack(states))[:, 0]
        truth = torch.tensor(verdicts, dtype=torch.float64)
        return learns_all(m, rows) + 0.5 * F.binary_cross_entropy_with_logits(guesses, truth)

    made = model()
    made.verdict = nn.Linear(WIDTH, 1)
    args = arguments(12, 1, remove_unused_columns=False)
    return Case(Both(made, args, collate, table(rows, verdict=verdicts)), loss, rows)


@setup("keep")
def difficulty_head() -> Case:
    """A second head on the hidden states guesses how hard each next token is, from a column."""
    rows = words(seed=27)
    hardness = floats(rows, 7)

    def collate(examples: list[dict]) -> Batch:
        batch = batch_of([(example["input_ids"],) * 2 for example in examples])
        return {**batch, "difficulty": padded([example["difficulty"] for example in examples], 0.0)}

    class Both(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            difficulty = inputs.pop("difficulty")
            outputs = model(**inputs, output_hidden_states=True, num_items_in_batch=num_items_in_batch)
            guess = model.difficulty(outputs.hidden_states[-1])[:, :-1, 0]
            real = inputs["labels"][:, 1:] != IGNORED
            extra = ((guess - difficulty[:, 1:]) ** 2 * real).sum() / num_items_in_batch
            loss = outputs.loss + 0.3 * extra
            return (loss, outputs) if return_outputs else loss

    def term(m: PreTrainedModel, index: int, example: Example) -> torch.Tensor:
        states = m(input_ids=torch.tensor([example[0]]), output_hidden_states=True).hidden_states[-1][0]
        wanted = torch.tensor(hardness[index], dtype=torch.float64)[1:]
        extra = ((m.difficulty(states)[:-1, 0] - wanted) ** 2).sum()
        return losses_of(m, example).sum() + 0.3 * extra

    made = model("Llama", tie_word_embeddings=True)
    made.difficulty = nn.Linear(WIDTH, 1)
    args = arguments(3, 4, remove_unused_columns=False)
    trainer = Both(made, args, collate, table(rows, difficulty=hardness))
    return Case(trainer, terms(whole(rows), term), rows, tokens_per_micro=room(rows, 4))


@setup("refuse")
def divisor_before_the_shift() -> Case:
    """The divisor counts labels before they are shifted, one more per row: a flat batch has no label there."""

    class Counted(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            loss = next_losses(outputs.logits, labels).sum() / (labels != IGNORED).sum()
            return (loss, outputs) if return_outputs else loss

    rows = words(seed=28)
    loss = terms(whole(rows), lambda m, _, example: losses_of(m, example).sum(), sum(map(len, rows)))
    return Case(plain(Counted, "Llama", arguments(12, 1), rows), loss, rows)


@setup("keep")
def near_to_the_base() -> Case:
    """LoRA with a KL term to the base model, computed by the same model with its adapter disabled."""

    class Near(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
            with torch.no_grad(), model.disable_adapter():
                base = model(**{name: value for name, value in inputs.items() if name != "labels"}).logits
            ours, theirs = outputs.logits.log_softmax(-1), base.log_softmax(-1)
            apart = (ours.exp() * (ours - theirs)).sum(-1)[:, :-1]
            apart = (apart * (inputs["labels"][:, 1:] != IGNORED)).sum() / num_items_in_batch
            loss = outputs.loss + 0.2 * apart
            return (loss, outputs) if return_outputs else loss

    def term(m: PreTrainedModel, _: int, example: Example) -> torch.Tensor:
        with torch.no_grad(), m.disable_adapter():
            theirs = predictions(m, example)[0].log_softmax(-1)
        ours = predictions(m, example)[0].log_softmax(-1)
        return losses_of(m, example).sum() + 0.2 * (ours.exp() * (ours - theirs)).sum()

    rows = words(seed=29)
    settings = LoraConfig(
        r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    trainer = plain(Near, get_peft_model(model(), settings), arguments(2, 6), rows)
    return Case(trainer, terms(whole(rows), term), rows, tokens_per_micro=room(rows, 6))


@setup("refuse", padded_is_true=False)
def loss_of_the_model_accumulated() -> Case:
    """An override that calls the model without `num_items_in_batch`: a sum of the micro-batches' means."""

    class Mine(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            outputs = model(**inputs)
            self.last_loss = outputs.loss.item()  # for a progress bar
            return (outputs.loss, outputs) if return_outputs else outputs.loss

    rows = words(seed=30)
    return case_of(plain(Mine, "Llama", arguments(3, 4), rows), whole(rows), tokens_per_micro=room(rows, 4))


# Loaders and samplers


@setup("refuse")
def rare_rows_more_often() -> Case:
    """A sampler that draws rows with replacement, by weights."""
    rows = words(seed=31)
    weights = [5.0 if index % 3 == 0 else 1.0 for index in range(len(rows))]

    class Balanced(Trainer):
        def _get_train_sampler(self, train_dataset=None):
            draws = torch.Generator().manual_seed(5)
            return WeightedRandomSampler(weights, len(rows), replacement=True, generator=draws)

    drawn = WeightedRandomSampler(weights, len(rows), replacement=True, generator=torch.Generator().manual_seed(5))
    seen = [rows[index] for index in drawn]
    return case_of(plain(Balanced, "Llama", arguments(4, 3), rows), whole(seen), tokens_per_micro=room(seen, 3))


@setup("refuse")
def streamed_rows() -> Case:
    """A streamed dataset, filtered and mapped on the way: nobody knows its lengths beforehand."""
    rows = words(seed=32)
    data = table(rows).to_iterable_dataset()
    data = data.filter(lambda row: len(row["input_ids"]) > 8).map(lambda row: {"input_ids": [*row["input_ids"], END]})
    kept = [[*row, END] for row in rows if len(row) > 8]
    count = len(kept) // 3
    trainer = Trainer(model(), arguments(3, count), lm_collator(), data)
    return case_of(trainer, whole(kept[: 3 * count]), tokens_per_micro=room(kept, count))


@setup("keep")
def two_sources_clipped() -> Case:
    """Two datasets interleaved by probabilities, with rows that come twice; gradients are clipped."""
    first, second = table(words(9, seed=33)), table(words(5, seed=34, low=10, high=24))
    mixed = interleave_datasets([first, second], [0.7, 0.3], seed=2, stopping_strategy="all_exhausted")
    rows = mixed["input_ids"][:]
    count = math.ceil(len(rows) / 3)
    clip = 0.3

    def loss(m: PreTrainedModel, _: list[Ids]) -> torch.Tensor:
        truth = true_gradient(m, learns_all(m, rows))
        norm = float(torch.stack([value.norm() for value in truth.values()]).norm())
        scale = min(1.0, clip / (norm + 1e-6))
        return towards(m, {name: value * scale for name, value in truth.items()})

    trainer = Trainer(model(), arguments(3, count, max_grad_norm=clip), lm_collator(), mixed)
    return Case(trainer, loss, rows, tokens_per_micro=room(rows, count))


@setup("keep")
def split_with_perplexity() -> Case:
    """A torch dataset that tokenizes when it is asked, split at random, and an `evaluate` that adds the perplexity."""
    rows, tok = words(16, seed=35), tokenizer()

    class Lines(torch.utils.data.Dataset):
        def __init__(self, lines: list[str]):
            self.lines = lines

        def __len__(self):
            return len(self.lines)

        def __getitem__(self, index):
            return tok(f"<bos> {self.lines[index]} <eos>")

    class Perplexed(Trainer):
        def evaluate(self, *args, **kwargs):
            metrics = super().evaluate(*args, **kwargs)
            return {**metrics, "eval_perplexity": math.exp(metrics["eval_loss"])}

    learnt, held_out = random_split(Lines([text(row) for row in rows]), [12, 4], torch.Generator().manual_seed(1))
    args = arguments(4, 3, per_device_eval_batch_size=4)
    trainer = Perplexed(model("StableLm"), args, lm_collator(), learnt, held_out)

    def measured(m: PreTrainedModel) -> dict[str, float]:
        with torch.no_grad():
            loss = float(learns_all(m, [rows[index] for index in held_out.indices]))
        return {"eval_loss": loss, "eval_perplexity": math.exp(loss)}

    seen = [rows[index] for index in learnt.indices]
    return case_of(
        trainer, whole(seen), measure=lambda one: one.evaluate(), measured=measured, tokens_per_micro=room(seen, 3)
    )


@setup("either")  # the order is asked for, though its only purpose is to save padding that flat batches do not have
def grouped_by_length() -> Case:
    """Rows of like length in a batch, by a column of lengths."""
    rows = words(24, seed=36, low=3, high=30)
    args = arguments(
        4,
        2,
        train_sampling_strategy="group_by_length",
        length_column_name="num_tokens",
        max_steps=-1,
        num_train_epochs=1,
    )
    data = table(rows, num_tokens=[len(row) for row in rows])
    return Case(Trainer(model(), args, lm_collator(), data), learns_all, tokens_per_micro=96)


# Callbacks


@setup("keep")
def frozen_by_callback() -> Case:
    """A callback freezes the embedding and the first layer when the training begins."""

    def freeze(m: PreTrainedModel) -> None:
        m.model.embed_tokens.requires_grad_(False)
        m.model.layers[0].requires_grad_(False)

    class Freeze(TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, **kwargs):
            freeze(model)

    def loss(m: PreTrainedModel, _: list[Ids]) -> torch.Tensor:
        freeze(m)
        return learns_all(m, rows)

    rows = words(seed=37)
    trainer = plain(Trainer, model("Qwen2"), arguments(2, 6), rows, callbacks=[Freeze()])
    return Case(trainer, loss, rows, tokens_per_micro=room(rows, 6))


@setup("keep")
def rates_by_callback() -> Case:
    """A callback lowers the rate of each update, another stops after an epoch, whose last update is smaller."""

    class Rates(TrainerCallback):
        def on_step_begin(self, args, state, control, optimizer=None, **kwargs):
            for group in optimizer.param_groups:
                group["lr"] = SHARP / (1 + state.global_step)

    class OneEpoch(TrainerCallback):
        def on_epoch_end(self, args, state, control, **kwargs):
            control.should_training_stop = True
            return control

    def check(run: Run, m: PreTrainedModel) -> str:
        updates = [run.sequences(step) for step, seen in enumerate(run.steps) if seen]
        if sorted(chain.from_iterable(updates)) != sorted(rows):
            return "an epoch is not every row once"
        way = descent(copy.deepcopy(m), updates, lambda one, some: learns_all(one, some) / (1 + updates.index(some)))
        return astray(run.trainer.model, list(way)[-1], m)

    rows = words(22, seed=38)
    args = arguments(3, 3, max_steps=-1, num_train_epochs=5, learning_rate=SHARP)
    trainer = plain(Trainer, "Llama", args, rows, callbacks=[Rates(), OneEpoch()])
    return Case(trainer, learns_all, check=check, tokens_per_micro=44)


# SFTTrainer


@setup("keep")
def completions_dora_checkpointed() -> Case:
    """Prompts and completions as text, DoRA on all linear layers, activations computed again."""
    rows = with_prompts(words(seed=39))
    cuts = [row.index(SEP) + 1 for row in rows]
    data = Dataset.from_dict(
        {
            "prompt": [f"<bos> {text(row[1 : cut - 1])} <sep>" for row, cut in zip(rows, cuts, strict=True)],
            "completion": [f" {text(row[cut:-1])} " for row, cut in zip(rows, cuts, strict=True)],
        }
    )
    settings = LoraConfig(
        r=4, lora_alpha=8, use_dora=True, use_rslora=True, target_modules="all-linear", init_lora_weights=False
    )
    args = sft_arguments(3, 4, gradient_checkpointing=True, completion_only_loss=True)
    trainer = SFTTrainer(model(), args, None, data, processing_class=tokenizer(), peft_config=settings)
    examples = [(row, after(row, SEP)) for row in rows]
    return case_of(trainer, examples, tokens_per_micro=room(rows, 4))


@setup("keep")
def answers_only_gemma() -> Case:
    """Conversations of several turns of which the answers are learnt; windows in every second layer."""
    talks = conversations(14, seed=5)
    data = Dataset.from_dict({"messages": [messages_of(turns) for turns in talks]})
    made = model(
        "Gemma3Text", sliding_window=6, layer_types=["sliding_attention", "full_attention"], query_pre_attn_scalar=8
    )
    args = sft_arguments(4, 4, assistant_only_loss=True)
    trainer = SFTTrainer(made, args, None, data, processing_class=tokenizer())
    examples = [rendered(turns) for turns in talks]
    return case_of(trainer, examples, tokens_per_micro=room([ids for ids, _ in examples], 4))


@setup("keep")
def packed_best_fit() -> Case:
    """`packing=True` of rows with labels of their own, which mask the prompts."""
    rows = with_prompts(words(seed=40))
    examples = [(row, after(row, SEP)) for row in rows]
    data = table(rows, labels=[labels for _, labels in examples])
    args = sft_arguments(2, 4, packing=True, max_length=32)
    trainer = SFTTrainer(model("Qwen3"), args, None, data, processing_class=tokenizer())
    return case_of(trainer, examples, tokens_per_micro=room(rows, 4))


@setup("keep")
def dynamic_fine_tuning_ia3() -> Case:
    """`loss_type="dft"`, each loss times its probability, and IA3."""
    rows = words(seed=41)
    settings = IA3Config(
        task_type="CAUSAL_LM", target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]
    )

    def term(m: PreTrainedModel, _: int, example: Example) -> torch.Tensor:
        nll = losses_of(m, example)
        return (torch.exp(-nll).detach() * nll).sum()

    trainer = sft(rows, peft_config=settings, loss_type="dft")
    return Case(trainer, terms(whole(rows), term), rows, tokens_per_micro=room(rows, 6))


# Metrics


@setup("keep")
def two_sets_accuracy() -> Case:
    """DataCollatorForSeq2Seq to multiples of 8, two sets to evaluate, and how often the 20 likeliest have the token."""
    examples = [([BOS, *ids, EOS], [IGNORED, *labels, EOS]) for ids, labels in map(rendered, conversations(20, seed=6))]
    few, many = examples[12:15], examples[15:20]

    def dataset(some: list[Example]) -> Dataset:
        return table([ids for ids, _ in some], labels=[labels for _, labels in some])

    def accuracy(outcome) -> dict[str, float]:
        best, labels = outcome.predictions[:, :-1], outcome.label_ids[:, 1:]  # (batch, seq, 20), (batch, seq)
        real = labels != IGNORED
        return {"accuracy": float((best == labels[..., None]).any(-1)[real].mean()), "num_targets": int(real.sum())}

    collate = DataCollatorForSeq2Seq(tokenizer(), label_pad_token_id=IGNORED, pad_to_multiple_of=8)
    trainer = Trainer(
        model("GPT2"),
        arguments(3, 4, per_device_eval_batch_size=8),
        collate,
        dataset(examples[:12]),
        {"few": dataset(few), "many": dataset(many)},
        compute_metrics=accuracy,
        preprocess_logits_for_metrics=lambda logits, labels: logits.topk(20).indices,
    )

    def measured(m: PreTrainedModel) -> dict[str, float]:
        truth = {}
        for name, some in {"few": few, "many": many}.items():
            with torch.no_grad():
                pairs = [predictions(m, one) for one in some]
                hits = torch.cat([(logits.topk(20).indices == to[:, None]).any(-1) for logits, to in pairs])
                truth[f"eval_{name}_loss"] = float(token_mean(m, some))
            truth[f"eval_{name}_accuracy"] = float(hits.double().mean())
            truth[f"eval_{name}_num_targets"] = float(len(hits))
        return truth

    room_of = room([ids for ids, _ in examples[:12]], 4)
    return case_of(
        trainer, examples[:12], measure=lambda one: one.evaluate(), measured=measured, tokens_per_micro=room_of
    )


@setup("keep")
def scores_of_sequences_neftune() -> Case:
    """Metrics per row from log-probabilities of the labels, and noise on embeddings, in training alone."""
    rows, held_out = words(seed=42), words(6, seed=43)

    def label_scores(logits, labels):
        return logits[:, :-1].log_softmax(-1).gather(-1, labels[:, 1:].clamp(min=0)[..., None])[..., 0]

    def of_rows(outcome) -> dict[str, float]:
        real = outcome.label_ids[:, 1:] != IGNORED
        scores = np.where(real, outcome.predictions, 0.0).sum(1)
        return {"best": int(scores.argmax()), "first": scores[0], "of_means": (scores / real.sum(1)).mean()}

    args = arguments(3, 4, per_device_eval_batch_size=8, neftune_noise_alpha=0.5)
    trainer = plain(
        Trainer,
        "Mistral",
        args,
        rows,
        eval_dataset=table(held_out),
        compute_metrics=of_rows,
        preprocess_logits_for_metrics=label_scores,
    )

    def measured(m: PreTrainedModel) -> dict[str, float]:
        with torch.no_grad():
            each = [-losses_of(m, (row, row)) for row in held_out]
            loss = float(learns_all(m, held_out))
        scores = [float(one.sum()) for one in each]
        means = float(torch.stack([one.mean() for one in each]).mean())
        best = float(np.argmax(scores))
        return {"eval_loss": loss, "eval_best": best, "eval_first": scores[0], "eval_of_means": means}

    def check(run: Run, m: PreTrainedModel) -> str:
        away = error_of(run.grads, true_gradient(m, learns_all(m, rows)))
        return "" if 1e-3 < away < 1 else f"the gradient is {away:.0e} from that without noise"

    return Case(trainer, None, rows, check, lambda one: one.evaluate(), measured, tokens_per_micro=room(rows, 4))


# Training arguments


@setup("keep")
def smoothed_opt() -> Case:
    """`label_smoothing_factor`, positions by the mask, and a last micro-batch of one row."""
    rows = words(13, seed=44)

    def term(m: PreTrainedModel, _: int, example: Example) -> torch.Tensor:
        logits, targets = predictions(m, example)
        even = -logits.log_softmax(-1).mean(-1).sum()
        return 0.9 * F.cross_entropy(logits, targets, reduction="sum") + 0.1 * even

    trainer = plain(Trainer, "OPT", arguments(3, 5, label_smoothing_factor=0.1), rows)
    return Case(trainer, terms(whole(rows), term), rows, tokens_per_micro=room(rows, 5))


# Scripts with a fault of their own


@setup("refuse", padded_is_true=False)
def forgotten_shift() -> Case:
    """Cross-entropy of logits and labels at the same place, over the update's targets."""

    class Unshifted(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            logits = outputs.logits.view(-1, outputs.logits.shape[-1])
            loss = F.cross_entropy(logits, labels.view(-1), reduction="sum") / num_items_in_batch
            return (loss, outputs) if return_outputs else loss

    rows = with_prompts(words(seed=45))
    examples = [(row, after(row, SEP)) for row in rows]

    def collate(some: list[dict]) -> Batch:
        return batch_of([(one["input_ids"], after(one["input_ids"], SEP)) for one in some])

    trainer = Unshifted(model(), arguments(3, 4), collate, table(rows))
    return case_of(trainer, examples, tokens_per_micro=room(rows, 4))


@setup("either", padded_is_true=False)  # the padding may be left out with a word, or be refused
def labels_on_padding() -> Case:
    """Tokenized to a fixed length, and labels that are a copy of the ids, padding and all."""
    rows, tok = words(seed=46), tokenizer()

    def tokenize(examples: dict[str, list]) -> dict[str, list]:
        made = tok(examples["text"], padding="max_length", max_length=24, truncation=True)
        return {**made, "labels": [ids.copy() for ids in made["input_ids"]]}

    data = Dataset.from_dict({"text": [f"<bos> {text(row)} <eos>" for row in rows]})
    data = data.map(tokenize, batched=True, remove_columns=["text"])
    trainer = Trainer(model(), arguments(3, 4), default_data_collator, data)
    return case_of(trainer, whole(rows), tokens_per_micro=2 * room(rows, 4))


@setup("either", padded_is_true=False)  # without padding the fault is gone, which deserves a word
def left_padded_without_mask() -> Case:
    """Padding on the left, and no attention_mask: rows see the padding before them."""
    rows = with_prompts(words(seed=47))

    def collate(examples: list[dict]) -> Batch:
        ids = padded([example["input_ids"] for example in examples], PAD, left=True)
        labels = padded([after(example["input_ids"], SEP) for example in examples], IGNORED, left=True)
        return {"input_ids": ids, "labels": labels}

    examples = [(row, after(row, SEP)) for row in rows]
    return case_of(Trainer(model(), arguments(3, 4), collate, table(rows)), examples, tokens_per_micro=room(rows, 4))


@setup("either", padded_is_true=False)  # each row alone has the fault too: nothing is mended, so a word is due
def shifted_twice() -> Case:
    """Labels shifted by the collator, and again by the model: the token after the next is learnt."""
    rows = words(seed=48)

    def collate(examples: list[dict]) -> Batch:
        return batch_of([(one["input_ids"], [*one["input_ids"][1:], IGNORED]) for one in examples])

    trainer = Trainer(model("Qwen2"), arguments(3, 4), collate, table(rows))
    return case_of(trainer, whole(rows), tokens_per_micro=room(rows, 4))


@setup("either", padded_is_true=False)  # whether the end should be learnt only its author knows: to be told or refused
def end_is_padding() -> Case:
    """`tokenizer.pad_token = tokenizer.eos_token`, and masks by comparison: the end is never learnt."""
    rows = words(seed=49)
    tok = tokenizer()
    tok.pad_token = tok.eos_token

    def collate(examples: list[dict]) -> Batch:
        ids = padded([example["input_ids"] for example in examples], tok.pad_token_id)
        mask = (ids != tok.pad_token_id).long()
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, IGNORED)}

    trainer = Trainer(model(), arguments(3, 4), collate, table(rows))
    return Case(trainer, lambda m, _: learns_all(m, rows), tokens_per_micro=room(rows, 4))


if __name__ == "__main__":
    main()
