"""Set-ups of Trainer and SFTTrainer as people write them, and what `unpad.hf.attach` makes of each.

    python benchmarks/attach_unseen.py                 # all of them, about three minutes on one core
    python benchmarks/attach_unseen.py focal_loss bfd  # some, with tracebacks and whole messages
    python benchmarks/attach_unseen.py --tokens 4096   # where an update is one micro-batch

They were written without sight of the code of `unpad.hf` and of the proof. `attach_judge.py` says how they are judged.
"""

from __future__ import annotations

import copy
import random

from attach_judge import (
    ASSISTANT,
    BOS,
    END,
    EOS,
    IGNORED,
    NUM_ROWS,
    PAD,
    SEP,
    UNK,
    USER,
    WIDTH,
    Case,
    Example,
    Ids,
    Measures,
    Run,
    after,
    arguments,
    batch_of,
    case_of,
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

# The judge comes first: it sets the environment that transformers reads.
# isort: split

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from datasets import Dataset
from peft import LoraConfig, PromptTuningConfig
from torch import nn
from torch.utils.data import DataLoader, SequentialSampler, WeightedRandomSampler
from transformers import (
    BatchEncoding,
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithFlattening,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    default_data_collator,
)
from trl import SFTTrainer

# Collators


class PromptMasker:
    """Pads, and learns what stands behind `SEP`."""

    def __call__(self, features: list[dict]) -> dict[str, torch.Tensor]:
        return batch_of([(row["input_ids"], after(row["input_ids"], SEP)) for row in features])


@setup("keep")
def masks_prompts() -> Case:
    """A collator that finds a separator and masks the prompt before it."""
    rows = with_prompts(words())
    trainer = Trainer(model(), arguments(), PromptMasker(), table(rows))
    return case_of(trainer, [(row, after(row, SEP)) for row in rows])


class EosCollator(DataCollatorForLanguageModeling):
    """Appends `EOS` to each example."""

    def torch_call(self, examples: list[dict]) -> dict:
        return super().torch_call([{"input_ids": [*example["input_ids"], EOS]} for example in examples])


@setup("keep", padded_is_true=False)  # transformers counts the first token of a row among GPT-2's targets
def appends_eos() -> Case:
    """A collator of transformers, subclassed so that it ends each example."""
    rows = [row[:-1] for row in words()]
    trainer = Trainer(model("GPT2"), arguments(), EosCollator(tokenizer(), mlm=False), table(rows))
    return case_of(trainer, whole([[*row, EOS] for row in rows]))


@setup("keep")
def truncates_from_the_left() -> Case:
    """A function as collator that keeps the last ten tokens."""
    rows = words()

    def collate(features: list[dict]) -> dict:
        return batch_of(whole([row["input_ids"][-10:] for row in features]))

    trainer = Trainer(model("Qwen2"), arguments(), collate, table(rows))
    return case_of(trainer, whole([row[-10:] for row in rows]))


@setup("keep")
def drops_tokens() -> Case:
    """A collator that drops tokens, say of mark-up."""
    rows = words()

    def clean(row: Ids) -> Ids:
        return [token for token in row if token % 7 != 3]

    def collate(features: list[dict]) -> dict:
        return batch_of(whole([clean(row["input_ids"]) for row in features]))

    trainer = Trainer(model("Phi"), arguments(), collate, table(rows))
    return case_of(trainer, whole([clean(row) for row in rows]))


def left_padded(kind: str, first: int) -> Case:
    """The collator of sequence-to-sequence models, which pads labels too, with a tokenizer that pads on the left.

    Args:
        first: label of the first token of a row, which stands behind padding and has nothing to be predicted from.
    """
    rows = words()
    labels = [[first, *row[1:]] for row in rows]
    trainer = Trainer(
        model(kind),
        arguments(),
        DataCollatorForSeq2Seq(tokenizer(padding_side="left")),
        table(rows, labels=labels, attention_mask=[[1] * len(row) for row in rows]),
    )
    return case_of(trainer, whole(rows))


@setup("keep")
def pads_on_the_left() -> Case:
    """Left padding, with a model that counts positions by the mask."""
    return left_padded("OPT", IGNORED)


@setup("either", padded_is_true=False)
def pads_on_the_left_without_positions() -> Case:
    """Left padding, with a model that counts the padding among its positions."""
    return left_padded("GPT2", IGNORED)


@setup("either", padded_is_true=False)
def predicts_the_first_token_of_padding() -> Case:
    """Left padding with labels that are the ids: each first token is learnt from the padding before it."""
    return left_padded("Llama", BOS)


def shifted(row: Ids) -> Ids:
    """Labels that a collator has moved by one."""
    return [*row[1:], IGNORED]


class OwnShift(Trainer):
    """Labels come shifted, and the loss does not shift them."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = F.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        return (loss, outputs) if return_outputs else loss


@setup("either")
def shifts_labels_itself() -> Case:
    """A collator that shifts the labels, and a loss that knows it; one batch is an update."""
    rows = words()

    def collate(features: list[dict]) -> dict:
        return batch_of([(row["input_ids"], shifted(row["input_ids"])) for row in features])

    trainer = OwnShift(model(), arguments(12, 1, remove_unused_columns=False), collate, table(rows))
    trainer.loss_is_scaled_for_ga = True
    return case_of(trainer, whole(rows))


@setup("either")
def shifts_labels_twice() -> Case:
    """A collator that shifts the labels for a model that shifts them too: it learns the token after the next."""
    rows = words()

    def collate(features: list[dict]) -> dict:
        return batch_of([(row["input_ids"], shifted(row["input_ids"])) for row in features])

    trainer = Trainer(model("Qwen2"), arguments(), collate, table(rows))
    return case_of(trainer, [(row, shifted(row)) for row in rows])


@setup("keep")
def pads_to_multiples() -> Case:
    """A BatchEncoding padded to a multiple of 8."""
    rows = words()

    def collate(features: list[dict]) -> BatchEncoding:
        batch = batch_of(whole([row["input_ids"] for row in features]))
        more = -batch["input_ids"].shape[1] % 8
        fill = {"input_ids": PAD, "attention_mask": 0, "labels": IGNORED}
        return BatchEncoding({name: F.pad(value, (0, more), value=fill[name]) for name, value in batch.items()})

    return case_of(Trainer(model("Qwen3"), arguments(), collate, table(rows)), whole(rows))


@setup("either")
def replaces_words_at_random() -> Case:
    """A collator that replaces a fifth of the words, anew in each epoch."""
    rows = words()

    def collate(features: list[dict]) -> dict:
        drawn = [
            [UNK if token >= 8 and random.random() < 0.2 else token for token in row["input_ids"]] for row in features
        ]
        return batch_of([(new, row["input_ids"]) for new, row in zip(drawn, features, strict=True)])

    def originals(seen: list[Ids]) -> list[Example]:
        left, found = list(rows), []
        for ids in seen:
            fits = [
                row
                for row in left
                if len(row) == len(ids) and all(b in (a, UNK) for a, b in zip(row, ids, strict=True))
            ]
            left.remove(fits[0])
            found.append((ids, fits[0]))
        return found

    def check(run: Run, _: PreTrainedModel) -> str:
        first, second = run.sequences(0), run.sequences(1)
        share = sum(row.count(UNK) for row in first) / sum(len(row) - 2 for row in first)
        if not 0.08 < share < 0.35:
            return f"{share:.0%} of the words are replaced"
        return "two epochs see the same words" if sorted(first) == sorted(second) else ""

    trainer = Trainer(model(), arguments(max_steps=2), collate, table(rows))
    return Case(trainer, lambda m, seen: token_mean(m, originals(seen)), None, check)


def padded_rows(rows: list[Ids], to: int = 24) -> dict[str, list]:
    """Columns as of a tokenizer with padding='max_length'."""
    return {
        "input_ids": padded(rows, PAD, to).tolist(),
        "attention_mask": padded([[1] * len(row) for row in rows], 0, to).tolist(),
    }


@setup("keep")
def padded_in_the_dataset() -> Case:
    """Rows padded when they were tokenized, their padding ignored in the labels."""
    rows = words()
    data = Dataset.from_dict({**padded_rows(rows), "labels": padded(rows, IGNORED, 24).tolist()})
    return case_of(Trainer(model(), arguments(), default_data_collator, data), whole(rows))


@setup("either")
def learns_its_padding() -> Case:
    """The same with labels that are a copy of the ids: padding is learnt as well."""
    rows = words()
    data = Dataset.from_dict({**padded_rows(rows), "labels": padded(rows, PAD, 24).tolist()})

    def loss(m: PreTrainedModel, _: list[Ids]) -> torch.Tensor:
        parts = []
        for row in rows:
            ids = [*row, *[PAD] * (24 - len(row))]
            mask = torch.tensor([[1] * len(row) + [0] * (24 - len(row))])
            parts.append(losses_of(m, (ids, ids), attention_mask=mask))
        return torch.cat(parts).mean()

    return Case(Trainer(model(), arguments(), default_data_collator, data), loss, rows)


@setup("either")
def pads_with_eos() -> Case:
    """The collator of transformers where padding is the end token: the end is not learnt."""
    rows = words()
    collator = DataCollatorForLanguageModeling(tokenizer(pad_token="<eos>"), mlm=False)
    trainer = Trainer(model(), arguments(), collator, table(rows))
    examples = [(row, [*row[:-1], IGNORED]) for row in rows]
    return Case(trainer, lambda m, _: token_mean(m, examples))


@setup("either")
def tokenizes_in_the_collator() -> Case:
    """The dataset is text; the collator writes a template and tokenizes."""
    rows, made = words(), tokenizer()
    data = Dataset.from_dict({"question": [text(row[:4]) for row in rows], "answer": [text(row[4:]) for row in rows]})

    def collate(features: list[dict]) -> BatchEncoding:
        texts = [f"<bos> <user> {row['question']} <assistant> {row['answer']} <eos>" for row in features]
        batch = made(texts, padding=True, return_tensors="pt", return_token_type_ids=False)
        batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORED)
        return batch

    ids = [[BOS, USER, *row[1:4], ASSISTANT, *row[4:]] for row in rows]
    return case_of(Trainer(model(), arguments(remove_unused_columns=False), collate, data), whole(ids))


@setup("either")
def joins_pairs() -> Case:
    """A collator that writes the two examples of a batch behind each other, as one sequence."""
    rows = words()

    def collate(features: list[dict]) -> dict:
        one, two = (row["input_ids"] for row in features)
        return batch_of(whole([[*one, *two[1:]]]))

    def check(run: Run, _: PreTrainedModel) -> str:
        pairs = [row for row in run.sequences() if row.count(EOS) == 2]
        return "" if len(pairs) == NUM_ROWS // 2 else f"{len(pairs)} pairs of {NUM_ROWS} examples"

    trainer = Trainer(model(), arguments(), collate, table(rows))
    return Case(trainer, lambda m, seen: token_mean(m, whole(seen)), None, check)


@setup("either")
def adds_rows() -> Case:
    """A collator that adds each example read from behind: twice as many rows as examples."""
    rows = words()

    def both(some: list[Ids]) -> list[Ids]:
        return [*some, *([BOS, *row[-2:0:-1], EOS] for row in some)]

    def collate(features: list[dict]) -> dict:
        return batch_of(whole(both([row["input_ids"] for row in features])))

    return case_of(Trainer(model("Qwen2"), arguments(), collate, table(rows)), whole(both(rows)))


class Arrays(torch.utils.data.Dataset):
    """Rows as arrays of numpy."""

    def __init__(self, rows: list[Ids]) -> None:
        self.rows = [np.array(row) for row in rows]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict:
        return {"input_ids": self.rows[index], "labels": self.rows[index].copy()}


@setup("keep")
def arrays() -> Case:
    """A torch dataset of numpy arrays."""
    rows = words()
    return case_of(Trainer(model("Qwen3"), arguments(), DataCollatorForSeq2Seq(tokenizer()), Arrays(rows)), whole(rows))


@setup("keep")
def flattens_already() -> Case:
    """The collator of transformers that writes flat batches itself."""
    rows = words()
    return case_of(Trainer(model(), arguments(), DataCollatorWithFlattening(), table(rows, labels=rows)), whole(rows))


@setup("keep")
def rows_without_targets() -> Case:
    """A collator that masks prompts, and every third row is a prompt alone."""
    rows = with_prompts(words())
    rows = [row[: row.index(SEP) + 1] if index % 3 == 0 else row for index, row in enumerate(rows)]
    trainer = Trainer(model(), arguments(), PromptMasker(), table(rows))
    return case_of(trainer, [(row, after(row, SEP)) for row in rows])


@setup("either")
def masks_in_the_middle() -> Case:
    """An attention mask that hides a word in the middle of each row, which keeps its position."""
    rows = words()
    masks = [[0 if index == 3 else 1 for index in range(len(row))] for row in rows]
    labels = [[IGNORED if index == 3 else token for index, token in enumerate(row)] for row in rows]
    data = table(rows, attention_mask=masks, labels=labels)

    def loss(m: PreTrainedModel, _: list[Ids]) -> torch.Tensor:
        parts = [
            losses_of(m, (row, wanted), attention_mask=torch.tensor([mask]))
            for row, wanted, mask in zip(rows, labels, masks, strict=True)
        ]
        return torch.cat(parts).mean()

    return Case(Trainer(model(), arguments(), DataCollatorForSeq2Seq(tokenizer()), data), loss, rows)


# Losses


@setup("keep")
def smooths_labels() -> Case:
    """`label_smoothing_factor` of the arguments."""
    rows = words()

    def loss(m: PreTrainedModel, _: list[Ids]) -> torch.Tensor:
        pairs = [predictions(m, example) for example in whole(rows)]
        logits, targets = torch.cat([one for one, _ in pairs]), torch.cat([one for _, one in pairs])
        return F.cross_entropy(logits, targets, label_smoothing=0.1)

    trainer = plain(Trainer, "Llama", arguments(label_smoothing_factor=0.1), rows)
    return Case(trainer, loss, rows)


def focal(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Focal loss with gamma 2, summed."""
    losses = F.cross_entropy(logits, targets, reduction="none", ignore_index=IGNORED)
    return ((1 - (-losses).exp()) ** 2 * losses).sum()


@setup("keep")
def focal_loss() -> Case:
    """A focal loss as `compute_loss_func`, of a model with a window of six tokens."""
    rows = words()

    def loss_func(outputs, labels, num_items_in_batch=None):
        return focal(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()) / num_items_in_batch

    def loss(m: PreTrainedModel, _: list[Ids]) -> torch.Tensor:
        pairs = [predictions(m, example) for example in whole(rows)]
        return sum(focal(*pair) for pair in pairs) / sum(len(targets) for _, targets in pairs)

    args = arguments()
    trainer = Trainer(
        model("Mistral", sliding_window=6),
        args,
        lm_collator(),
        table(rows),
        compute_loss_func=loss_func,
    )
    return Case(trainer, loss, rows)


def weights_for(rows: list[Ids]) -> list[list[float]]:
    """A weight for each token."""
    draw = random.Random(5)
    return [[draw.choice([0.2, 1.0, 3.0]) for _ in row] for row in rows]


class TokenWeights(Trainer):
    """Weighs the loss of each token by a column of the dataset."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        weights, labels = inputs.pop("weights"), inputs.pop("labels")
        outputs = model(**inputs)
        losses = F.cross_entropy(
            outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none", ignore_index=IGNORED
        )
        loss = (losses * weights[:, 1:].flatten()).sum() / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


@setup("keep")
def weighs_tokens() -> Case:
    """Weights per token, a column that the collator pads and the loss takes out."""
    rows = words()
    weights = weights_for(rows)

    def collate(features: list[dict]) -> dict:
        batch = batch_of(whole([row["input_ids"] for row in features]))
        return {**batch, "weights": padded([row["weights"] for row in features], 0.0)}

    def loss(m: PreTrainedModel, _: list[Ids]) -> torch.Tensor:
        parts = [
            losses_of(m, (row, row)) * torch.tensor(one[1:]).double() for row, one in zip(rows, weights, strict=True)
        ]
        return torch.cat(parts).sum() / sum(map(len, parts))

    data = table(rows, weights=weights)
    return Case(TokenWeights(model("Phi"), arguments(remove_unused_columns=False), collate, data), loss, rows)


def row_losses(outputs, labels: torch.Tensor) -> torch.Tensor:
    """Mean loss of each row, (batch,)."""
    losses = next_losses(outputs.logits, labels)
    return losses.sum(1) / (labels[:, 1:] != IGNORED).sum(1)


class RowWeights(Trainer):
    """Weighs the mean loss of each row; the rows of an update are one batch."""

    loss_is_scaled_for_ga = True

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        weight = inputs.pop("weight")
        outputs = model(**inputs)
        loss = (row_losses(outputs, inputs["labels"]) * weight).mean()
        return (loss, outputs) if return_outputs else loss


@setup("either")
def weighs_rows() -> Case:
    """A weight per example: mean of each row, weighed, mean over the rows."""
    rows = words()
    weights = [0.5 + index / 4 for index in range(len(rows))]

    def collate(features: list[dict]) -> dict:
        batch = batch_of(whole([row["input_ids"] for row in features]))
        return {**batch, "weight": torch.tensor([row["weight"] for row in features])}

    def loss(m: PreTrainedModel, _: list[Ids]) -> torch.Tensor:
        return torch.stack([w * losses_of(m, (row, row)).mean() for row, w in zip(rows, weights, strict=True)]).mean()

    data = table(rows, weight=weights)
    return Case(RowWeights(model(), arguments(12, 1, remove_unused_columns=False), collate, data), loss, rows)


class RowMean(Trainer):
    """Every sequence counts the same, whatever its length."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = row_losses(outputs, inputs["labels"]).mean() / self.args.gradient_accumulation_steps
        return (loss, outputs) if return_outputs else loss


@setup("either")
def means_per_sequence() -> Case:
    """Mean of each sequence, mean over sequences, divided by the accumulated batches."""
    rows = words()
    trainer = plain(RowMean, "Qwen3", arguments(), rows)
    return Case(trainer, lambda m, _: torch.stack([losses_of(m, (row, row)).mean() for row in rows]).mean(), rows)


class ZLoss(Trainer):
    """Adds the square of the log of the partition function at the learnt tokens."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
        real = inputs["labels"][:, 1:] != IGNORED
        z = outputs.logits[:, :-1].logsumexp(-1).pow(2)[real].sum() / num_items_in_batch
        loss = outputs.loss + 0.1 * z
        return (loss, outputs) if return_outputs else loss


@setup("keep")
def z_loss() -> Case:
    """A z-loss over the learnt tokens, divided by their number in the update."""
    rows = words()

    def loss(m: PreTrainedModel, _: list[Ids]) -> torch.Tensor:
        logits = torch.cat([predictions(m, example)[0] for example in whole(rows)])
        return token_mean(m, whole(rows)) + 0.1 * logits.logsumexp(-1).pow(2).mean()

    args = arguments()
    made = model("Gemma2", attn_implementation="eager", sliding_window=6, attn_logit_softcapping=20.0)
    collator = lm_collator()
    return Case(ZLoss(made, args, collator, table(rows)), loss, rows)


class PenaltyOfAll(Trainer):
    """The same over whatever stands in the batch."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = outputs.loss + 0.1 * outputs.logits.logsumexp(-1).pow(2).mean()
        return (loss, outputs) if return_outputs else loss


@setup("either", padded_is_true=False)
def z_loss_over_padding() -> Case:
    """A z-loss over the whole batch, whose padding counts too; one batch is an update."""
    rows = words()

    def loss(m: PreTrainedModel, _: list[Ids]) -> torch.Tensor:
        logits = torch.cat([logits_of(m, row) for row in rows])
        return token_mean(m, whole(rows)) + 0.1 * logits.logsumexp(-1).pow(2).mean()

    return Case(plain(PenaltyOfAll, "Llama", arguments(12, 1), rows), loss, rows)


class TwoHeads(transformers.LlamaForCausalLM):
    """A second head tells whether the next token is even."""

    def __init__(self, config):
        super().__init__(config)
        self.parity = nn.Linear(config.hidden_size, 2)
        self.post_init()

    def forward(self, input_ids=None, labels=None, num_items_in_batch=None, **kwargs):
        kwargs["output_hidden_states"] = True
        out = super().forward(input_ids, labels=labels, num_items_in_batch=num_items_in_batch, **kwargs)
        if labels is not None:
            targets = labels[:, 1:].flatten()
            parity = torch.where(targets == IGNORED, IGNORED, targets % 2)
            logits = self.parity(out.hidden_states[-1][:, :-1]).flatten(0, 1)
            total = F.cross_entropy(logits, parity, ignore_index=IGNORED, reduction="sum")
            out.loss = out.loss + 0.5 * total / (
                (parity != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
            )
        out.hidden_states = None
        return out


@setup("keep", padded_is_true=False)  # transformers does not know that the loss of this class shifts labels
def auxiliary_head() -> Case:
    """A model of one's own whose loss has a second term."""
    rows = words()
    config = model().config
    torch.manual_seed(0)

    def loss(m: PreTrainedModel, _: list[Ids]) -> torch.Tensor:
        parts = []
        for row in rows:
            hidden = m.model(input_ids=torch.tensor([row])).last_hidden_state[0, :-1]
            targets = torch.tensor(row[1:])
            parts.append(
                F.cross_entropy(m.lm_head(hidden), targets, reduction="none")
                + 0.5 * F.cross_entropy(m.parity(hidden), targets % 2, reduction="none")
            )
        return torch.cat(parts).mean()

    collator = lm_collator()
    return Case(Trainer(TwoHeads(config), arguments(), collator, table(rows)), loss, rows)


class Forgetful(Trainer):
    """Takes the model's loss without `num_items_in_batch`."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


@setup("either", padded_is_true=False)
def forgets_accumulation() -> Case:
    """A mean per batch, which nobody divides by the accumulated batches."""
    rows = words()
    return case_of(plain(Forgetful, "Llama", arguments(), rows), whole(rows))


@setup("keep")
def mean_of_one_batch() -> Case:
    """The same where one batch is an update: the mean over its tokens."""
    rows = words()
    return case_of(plain(Forgetful, "Llama", arguments(12, 1), rows), whole(rows))


class ByHand(Trainer):
    """Shifts by hand, as older scripts do."""

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        labels = inputs.get("labels")
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        logits = outputs.get("logits")
        shift_logits, shift_labels = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
        loss = nn.CrossEntropyLoss()(shift_logits.view(-1, logits.size(-1)), shift_labels.view(-1))
        return (loss, outputs) if return_outputs else loss


@setup("either")
def shifts_by_hand() -> Case:
    """The model is called with ids and mask alone, and the loss made by hand; one batch is an update."""
    rows = words()
    return case_of(plain(ByHand, "Llama", arguments(12, 1), rows), whole(rows))


class Distiller(Trainer):
    """Learns the distribution of a teacher."""

    teacher: PreTrainedModel

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        seen = {name: value for name, value in inputs.items() if name != "labels"}
        with torch.no_grad():
            wanted = self.teacher(**seen).logits
        real = inputs["labels"][:, 1:] != IGNORED
        apart = F.kl_div(
            outputs.logits[:, :-1].log_softmax(-1), wanted[:, :-1].log_softmax(-1), reduction="none", log_target=True
        )
        loss = apart.sum(-1)[real].sum() / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


@setup("either")
def distils_a_teacher() -> Case:
    """A second model, an attribute of the trainer, reads the same batch."""
    rows = words()
    trainer = plain(Distiller, "Llama", arguments(), rows)
    trainer.teacher = model("GPT2", seed=9).eval().requires_grad_(False)

    def loss(m: PreTrainedModel, _: list[Ids]) -> torch.Tensor:
        teacher, parts = copy.deepcopy(trainer.teacher).double(), []
        for row in rows:
            ours, wanted = (logits_of(one, row)[:-1].log_softmax(-1) for one in (m, teacher))
            parts.append((wanted.exp() * (wanted - ours)).sum(-1))
        return torch.cat(parts).mean()

    return Case(trainer, loss, rows)


class Unlikely(Trainer):
    """Makes tokens that a row has had already less likely."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
        total = outputs.loss
        for row, logits in zip(inputs["input_ids"], outputs.logits, strict=True):
            before = torch.zeros(logits.shape[-1])
            ids = row[row != PAD]
            for position in range(len(ids) - 1):
                before[ids[position]] = 1
                wrong = before.clone()
                wrong[ids[position + 1]] = 0
                less = torch.log1p(-logits[position].softmax(-1).clamp(max=0.999))
                total = total - 0.1 * (less * wrong).sum() / num_items_in_batch
        return (total, outputs) if return_outputs else total


@setup("either")
def unlikelihood_per_row() -> Case:
    """A loss that walks over the rows of `input_ids`."""
    rows = words()

    def loss(m: PreTrainedModel, _: list[Ids]) -> torch.Tensor:
        total, num = torch.zeros((), dtype=torch.float64), sum(len(row) - 1 for row in rows)
        for row in rows:
            chances = logits_of(m, row)[:-1].softmax(-1)
            for position, chance in enumerate(chances):
                target = row[position + 1]
                wrong = [token for token in set(row[: position + 1]) if token != target]
                total = total - chance[target].log() - 0.1 * torch.log1p(-chance[wrong].clamp(max=0.999)).sum()
        return total / num

    return Case(plain(Unlikely, "Llama", arguments(), rows), loss, rows)


class LastToken(Trainer):
    """Adds a loss at the last token of each row, found by the mask."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
        labels = inputs["labels"]
        last = labels.shape[1] - 1 - (labels != IGNORED).flip(1).int().argmax(1)
        scores = outputs.logits[torch.arange(len(last)), last, SEP]
        loss = outputs.loss + 0.1 * scores.pow(2).sum() / NUM_ROWS
        return (loss, outputs) if return_outputs else loss


@setup("either")
def scores_the_last_token() -> Case:
    """A second term of the last token of each row."""
    rows = words()

    def loss(m: PreTrainedModel, _: list[Ids]) -> torch.Tensor:
        scores = torch.stack([logits_of(m, row)[-1, SEP] for row in rows])
        return token_mean(m, whole(rows)) + 0.1 * scores.pow(2).mean()

    return Case(plain(LastToken, "Llama", arguments(), rows), loss, rows)


class Contrastive(Trainer):
    """Tells the rows of a batch apart by their last tokens, as sentence embeddings are learnt."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs, output_hidden_states=True)
        last = inputs["attention_mask"].sum(1) - 1
        ends = F.normalize(outputs.hidden_states[-1][torch.arange(len(last)), last], dim=-1)
        loss = outputs.loss + (ends @ ends.T * 5).logsumexp(-1).mean()
        return (loss, outputs) if return_outputs else loss


@setup("either")
def contrasts_rows() -> Case:
    """A second term between all rows of a batch; one batch is an update."""
    rows = words()

    def loss(m: PreTrainedModel, _: list[Ids]) -> torch.Tensor:
        ends = [m.model(input_ids=torch.tensor([row])).last_hidden_state[0, -1] for row in rows]
        ends = F.normalize(torch.stack(ends), dim=-1)
        return token_mean(m, whole(rows)) + (ends @ ends.T * 5).logsumexp(-1).mean()

    return Case(plain(Contrastive, "Llama", arguments(12, 1), rows), loss, rows)


class Domains(Trainer):
    """Keeps the sum of the loss and the number of tokens of each domain, and learns as ever."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        domains = inputs.pop("domain")
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        with torch.no_grad():
            labels = inputs["labels"]
            losses = next_losses(outputs.logits, labels)
            self.sums = getattr(self, "sums", torch.zeros(2))
            self.sums.index_add_(0, domains, losses.sum(1))
        return (loss, outputs) if return_outputs else loss


@setup("either")
def watches_domains() -> Case:
    """A column that says where an example is from, for a log of the loss per domain."""
    rows = words()
    domains = [index % 2 for index in range(len(rows))]

    def collate(features: list[dict]) -> dict:
        batch = batch_of(whole([row["input_ids"] for row in features]))
        return {**batch, "domain": torch.tensor([row["domain"] for row in features])}

    def check(run: Run, m: PreTrainedModel) -> str:
        for domain, found in enumerate(run.trainer.sums):
            true = sum(losses_of(m, (row, row)).sum().item() for row in rows[domain::2])
            if abs(found - true) > 1e-3 * true:
                return f"a loss of {found:.4f} in domain {domain}, of {true:.4f}"
        return ""

    trainer = Domains(model(), arguments(remove_unused_columns=False), collate, table(rows, domain=domains))
    return Case(trainer, lambda m, _: token_mean(m, whole(rows)), rows, check)


class Renamed(Trainer):
    """Labels under a name of one's own."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        targets = inputs.pop("targets")
        return super().compute_loss(model, {**inputs, "labels": targets}, return_outputs, num_items_in_batch)


@setup("either")
def renames_labels() -> Case:
    """Labels come as `targets`, by `label_names`; one batch is an update."""
    rows = with_prompts(words())

    def collate(features: list[dict]) -> dict:
        batch = batch_of([(row["input_ids"], after(row["input_ids"], SEP)) for row in features])
        return {**batch, "targets": batch.pop("labels")}

    args = arguments(12, 1, label_names=["targets"], remove_unused_columns=False)
    trainer = Renamed(model(), args, collate, table(rows))
    trainer.loss_is_scaled_for_ga = True
    return case_of(trainer, [(row, after(row, SEP)) for row in rows])


class HalfMixin:
    """Halves the loss of the class behind it."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        return (loss / 2, outputs) if return_outputs else loss / 2


class CountMixin:
    """Counts its calls while it trains."""

    calls = 0

    def training_step(self, model, inputs, num_items_in_batch=None):
        self.calls += 1
        return super().training_step(model, inputs, num_items_in_batch)


class MixedTrainer(HalfMixin, CountMixin, Trainer):
    """Both."""


@setup("keep")
def mixins() -> Case:
    """Two mixins before Trainer: one changes the loss, one counts steps."""
    rows = words()
    trainer = plain(MixedTrainer, "OPT", arguments(), rows)

    def check(run: Run, _: PreTrainedModel) -> str:
        return "" if run.trainer.calls else "training_step of a mixin was not called"

    return Case(trainer, lambda m, _: token_mean(m, whole(rows)) / 2, rows, check)


@setup("either")
def classifies_rows() -> Case:
    """A classifier: one label per row, at its last token."""
    rows = words()
    classes = [index % 3 for index in range(len(rows))]

    def collate(features: list[dict]) -> dict:
        batch = batch_of(whole([row["input_ids"] for row in features]))
        return {**batch, "labels": torch.tensor([row["labels"] for row in features])}

    def loss(m: PreTrainedModel, _: list[Ids]) -> torch.Tensor:
        logits = torch.stack([m(input_ids=torch.tensor([row])).logits[0] for row in rows])
        return F.cross_entropy(logits, torch.tensor(classes))

    made = model("Llama", "ForSequenceClassification", num_labels=3)
    return Case(Trainer(made, arguments(12, 1), collate, table(rows, labels=classes)), loss, rows)


# Loaders and samplers


class OwnLoader(Trainer):
    """Leaves out what a quality filter marks, in its own loader."""

    def get_train_dataloader(self) -> DataLoader:
        good = self.train_dataset.filter(lambda row: len(row["input_ids"]) > 9)
        return self.accelerator.prepare(DataLoader(good, batch_size=4, collate_fn=self.data_collator))


@setup("either")
def own_loader() -> Case:
    """`get_train_dataloader` of one's own: short rows are filtered out, in the order of the file."""
    rows = words()
    good = [row for row in rows if len(row) > 9]
    accumulate = -(-len(good) // 4)
    return case_of(plain(OwnLoader, "Llama", arguments(4, accumulate), rows), whole(good), tokens_per_micro=80)


class Curriculum(Trainer):
    """Short rows first."""

    def _get_train_sampler(self, train_dataset=None):
        return SequentialSampler(self.train_dataset)


@setup("either")
def curriculum() -> Case:
    """A sampler that keeps the order of difficulty: the first update is the easier half."""
    rows = sorted(words(), key=len)
    trainer = plain(Curriculum, "Llama", arguments(3, 2), rows)

    def check(run: Run, _: PreTrainedModel) -> str:
        seen = run.sequences()
        return (
            "" if sorted(seen) == sorted(rows[: len(seen)]) and len(seen) < 12 else "the first rows are not the easiest"
        )

    return Case(trainer, lambda m, seen: token_mean(m, whole(seen)), None, check)


class Weighted(Trainer):
    """Draws rows by a weight, with replacement."""

    def _get_train_sampler(self, train_dataset=None):
        weights = [0.0 if index % 2 else 1.0 for index in range(len(self.train_dataset))]
        return WeightedRandomSampler(weights, NUM_ROWS, generator=torch.Generator().manual_seed(1))


@setup("either")
def weighted_sampler() -> Case:
    """A WeightedRandomSampler that never draws half of the rows."""
    rows = words()

    def check(run: Run, _: PreTrainedModel) -> str:
        never = [row for row in run.sequences() if row in rows[1::2]]
        if never:
            return f"{len(never)} rows of weight zero were drawn"
        return "" if len(run.sequences()) == NUM_ROWS else f"{len(run.sequences())} rows in an update of {NUM_ROWS}"

    trainer = plain(Weighted, "Llama", arguments(), rows)
    return Case(trainer, lambda m, seen: token_mean(m, whole(seen)), None, check)


@setup("either")
def grouped_by_length() -> Case:
    """Rows of like length together, and a last batch that is not full is dropped."""
    rows = words()
    args = arguments(train_sampling_strategy="group_by_length", dataloader_drop_last=True)
    return case_of(plain(Trainer, "Llama", args, rows), whole(rows))


@setup("refuse")
def streamed() -> Case:
    """An IterableDataset."""
    rows = words()
    collator = lm_collator()
    trainer = Trainer(model(), arguments(), collator, table(rows).to_iterable_dataset())
    return case_of(trainer, whole(rows))


class FixedCount(Trainer):
    """Divides by a constant, so that long updates weigh more."""

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        return batches, torch.tensor(100)


@setup("either")
def divides_by_a_constant() -> Case:
    """`get_batch_samples` of one's own, with a count of its own."""
    rows = words()
    trainer = plain(FixedCount, "Llama", arguments(), rows)
    num = sum(len(row) - 1 for row in rows)
    return Case(trainer, lambda m, _: token_mean(m, whole(rows)) * num / 100, rows)


# Callbacks and the loop


class Freezer(TrainerCallback):
    """Freezes the embedding when training starts."""

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        model.get_input_embeddings().requires_grad_(False)


@setup("keep")
def callback_freezes() -> Case:
    """A callback that freezes the embedding when training starts."""
    rows = words()
    trainer = plain(Trainer, "Phi", arguments(), rows, callbacks=[Freezer()])

    def loss(m: PreTrainedModel, _: list[Ids]) -> torch.Tensor:
        m.get_input_embeddings().requires_grad_(False)
        return token_mean(m, whole(rows))

    return Case(trainer, loss, rows)


class Staged(torch.utils.data.Dataset):
    """Rows that are longer in later stages."""

    def __init__(self, rows: list[Ids]) -> None:
        self.rows, self.length = rows, 100

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict:
        return {"input_ids": self.rows[index][: self.length]}


class Stages(TrainerCallback):
    """Sets the length of an epoch's rows when the epoch begins."""

    def __init__(self, data: Staged) -> None:
        self.data = data

    def on_epoch_begin(self, args, state, control, **kwargs):
        self.data.length = 6


@setup("either")
def callback_changes_the_data() -> Case:
    """A callback that shortens the rows of a torch dataset when an epoch begins."""
    rows = words()
    data = Staged(rows)
    collator = lm_collator()
    trainer = Trainer(model(), arguments(), collator, data, callbacks=[Stages(data)])
    return case_of(trainer, whole([row[:6] for row in rows]))


class Counting(Trainer):
    """Counts real tokens and rows, to log them."""

    num_tokens = 0
    num_rows = 0

    def training_step(self, model, inputs, num_items_in_batch=None):
        self.num_tokens += int(inputs["attention_mask"].sum())
        self.num_rows += inputs["input_ids"].shape[0]
        return super().training_step(model, inputs, num_items_in_batch)


@setup("either")
def counts_tokens_and_rows() -> Case:
    """`training_step` of one's own that looks at mask and shape of the batch."""
    rows = words()

    def check(run: Run, _: PreTrainedModel) -> str:
        found, true = (run.trainer.num_tokens, run.trainer.num_rows), (sum(map(len, rows)), len(rows))
        return "" if found == true else f"counts {found} tokens and rows, of {true}"

    return Case(plain(Counting, "Llama", arguments(), rows), lambda m, _: token_mean(m, whole(rows)), rows, check)


class TwoRates(Trainer):
    """A rate of its own for the head, and logs of its own."""

    logged: list

    def create_optimizer(self, *args, **kwargs):
        head = list(self.model.lm_head.parameters())
        body = list(self.model.model.parameters())
        self.optimizer = torch.optim.SGD([{"params": body, "lr": 1e-3}, {"params": head, "lr": 1e-1}])
        return self.optimizer

    def log(self, logs, *args, **kwargs):
        self.logged = [*getattr(self, "logged", []), logs.get("loss")]
        super().log({**logs, "perplexity": float(np.exp(logs["loss"])) if "loss" in logs else 0.0}, *args, **kwargs)


@setup("keep")
def own_optimizer_and_log() -> Case:
    """`create_optimizer` with two rates, and `log` that adds the perplexity."""
    rows = words()
    args = arguments(logging_strategy="steps", logging_steps=1)
    trainer = plain(TwoRates, "Llama", args, rows)
    start = {name: value.detach().double().clone() for name, value in trainer.model.named_parameters()}

    def check(run: Run, m: PreTrainedModel) -> str:
        for name, value in run.trainer.model.named_parameters():
            rate = 0.1 if name.startswith("lm_head") else 1e-3
            wanted = start[name] - rate * run.grads[name]
            if (value.double() - wanted).abs().max() > 1e-6:
                return f"{name} was not updated at its rate"
        loss, logged = token_mean(m, whole(rows)).item(), run.trainer.logged[0]
        return "" if abs(loss - logged) < 1e-3 else f"logs a loss of {logged:.4f}, of {loss:.4f}"

    return Case(trainer, lambda m, _: token_mean(m, whole(rows)), rows, check)


class Penalized(SFTTrainer):
    """Adds weight decay to the loss."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        penalty = 0.01 * sum(value.pow(2).sum() for value in model.parameters()) / self.args.gradient_accumulation_steps
        return (loss[0] + penalty, loss[1]) if return_outputs else loss + penalty


@setup("either")
def adds_a_penalty_per_batch() -> Case:
    """A penalty of the weights, of which each of the accumulated batches adds its share."""
    rows = words()

    def loss(m: PreTrainedModel, _: list[Ids]) -> torch.Tensor:
        return token_mean(m, whole(rows)) + 0.01 * sum(value.pow(2).sum() for value in m.parameters())

    args = sft_arguments()
    return Case(Penalized(model(), args, None, table(rows), processing_class=tokenizer()), loss, rows)


# Metrics


def accuracy(prediction) -> Measures:
    """Share of learnt tokens that are predicted, of predictions that are ids."""
    guesses, labels = prediction.predictions[:, :-1], prediction.label_ids[:, 1:]
    real = labels != IGNORED
    return {"accuracy": float((guesses == labels)[real].mean()), "tokens": float(real.sum())}


@setup("keep")
def accuracy_of_two_sets() -> Case:
    """`compute_metrics` per token over two sets, with the logits made smaller first."""
    rows, made = words(), model("Qwen2")

    def half_right(some: list[Ids]) -> list[Example]:
        examples = []
        for row in some:
            guesses = logits_of(made, row).argmax(-1).tolist()
            labels = [row[0], *(guess if at % 2 else row[at + 1] for at, guess in enumerate(guesses[:-1]))]
            examples.append((row, labels))
        return examples

    def as_table(examples: list[Example]) -> Dataset:
        ids, labels = zip(*examples, strict=True)
        return table(list(ids), labels=list(labels), attention_mask=[[1] * len(row) for row in ids])

    sets = {"near": half_right(words(7, 11)), "far": half_right(words(9, 12))}
    trainer = Trainer(
        made,
        arguments(per_device_eval_batch_size=12),
        DataCollatorForSeq2Seq(tokenizer()),
        as_table(whole(rows)),
        eval_dataset={name: as_table(some) for name, some in sets.items()},
        compute_metrics=accuracy,
        preprocess_logits_for_metrics=lambda logits, labels: (
            logits[0] if isinstance(logits, tuple) else logits
        ).argmax(-1),
    )

    def measured(m: PreTrainedModel) -> Measures:
        found = {}
        for name, some in sets.items():
            pairs = [predictions(m, example) for example in some]
            logits, targets = torch.cat([one for one, _ in pairs]), torch.cat([one for _, one in pairs])
            found[f"eval_{name}_accuracy"] = float((logits.argmax(-1) == targets).double().mean())
            found[f"eval_{name}_tokens"] = float(len(targets))
            found[f"eval_{name}_loss"] = F.cross_entropy(logits, targets).item()
        assert all(0.3 < value < 0.8 for name, value in found.items() if name.endswith("accuracy"))
        return found

    return case_of(trainer, whole(rows), measure=lambda one: one.evaluate(), measured=measured)


@setup("keep")
def measures_rows() -> Case:
    """`compute_metrics` that goes over rows: the loss of the worst row, and their number."""
    rows, some = words(), words(8, 21)

    def row_metrics(prediction) -> Measures:
        worst = []
        for logits, labels in zip(prediction.predictions, prediction.label_ids, strict=True):
            real = labels[1:] != IGNORED
            worst.append(float(F.cross_entropy(torch.tensor(logits[:-1][real]), torch.tensor(labels[1:][real]))))
        return {"worst": max(worst), "first": worst[0], "rows": float(len(worst))}

    trainer = plain(
        Trainer,
        "Llama",
        arguments(per_device_eval_batch_size=3),
        rows,
        eval_dataset=table(some),
        compute_metrics=row_metrics,
    )

    def measured(m: PreTrainedModel) -> Measures:
        losses = [float(losses_of(m, (row, row)).mean()) for row in some]
        return {"eval_worst": max(losses), "eval_first": losses[0], "eval_rows": 8.0}

    return case_of(trainer, whole(rows), measure=lambda one: one.evaluate(), measured=measured)


@setup("keep", padded_is_true=False)
def predicts_rows() -> Case:
    """`predict`, whose rows are read one by one in the order of the dataset."""
    rows, some = words(), words(8, 22)
    trainer = plain(Trainer, "GPT2", arguments(per_device_eval_batch_size=3), rows)

    def measure(one: Trainer) -> Measures:
        found = one.predict(table(some))
        logits, labels = found.predictions, found.label_ids
        measures = {"rows": float(len(logits))}
        for index, row in enumerate(some):
            real = labels[index] != IGNORED
            measures[f"labels {index}"] = float(labels[index][real].sum())
            measures[f"logits {index}"] = float(np.abs(logits[index][: len(row)]).sum())
        return measures

    def measured(m: PreTrainedModel) -> Measures:
        measures = {"rows": 8.0}
        for index, row in enumerate(some):
            measures[f"labels {index}"] = float(sum(row))
            measures[f"logits {index}"] = float(logits_of(m, row).abs().sum())
        return measures

    return case_of(trainer, whole(rows), measure=measure, measured=measured)


class RowEvaluation(Trainer):
    """Evaluates the mean loss of rows."""

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad():
            outputs = model(**inputs)
        return row_losses(outputs, inputs["labels"]).mean(), None, None


@setup("either")
def own_prediction_step() -> Case:
    """`prediction_step` of one's own: the mean over rows, of one batch."""
    rows, some = words(), words(8, 23)
    args = arguments(per_device_eval_batch_size=8)
    trainer = plain(RowEvaluation, "Llama", args, rows, eval_dataset=table(some))

    def measured(m: PreTrainedModel) -> Measures:
        return {"eval_loss": float(np.mean([float(losses_of(m, (row, row)).mean()) for row in some]))}

    return case_of(trainer, whole(rows), measure=lambda one: one.evaluate(), measured=measured)


# Columns


@setup("either", padded_is_true=False)
def token_types() -> Case:
    """`token_type_ids` in the dataset, which GPT-2 adds to its embeddings."""
    rows = words()
    kinds = [[SEP if index < len(row) // 2 else USER for index in range(len(row))] for row in rows]
    data = table(rows, token_type_ids=kinds, labels=rows)

    def collate(features: list[dict]) -> dict:
        batch = batch_of([(row["input_ids"], row["labels"]) for row in features])
        return {**batch, "token_type_ids": padded([row["token_type_ids"] for row in features], PAD)}

    def loss(m: PreTrainedModel, _: list[Ids]) -> torch.Tensor:
        parts = [
            losses_of(m, (row, row), token_type_ids=torch.tensor([one])) for row, one in zip(rows, kinds, strict=True)
        ]
        return torch.cat(parts).mean()

    return Case(Trainer(model("GPT2"), arguments(), collate, data), loss)


@setup("either")
def positions_given() -> Case:
    """`position_ids` in the dataset, which count by two from seven on."""
    rows = words()
    places = [list(range(7, 7 + 2 * len(row), 2)) for row in rows]
    data = table(rows, position_ids=places, labels=rows)

    def collate(features: list[dict]) -> dict:
        batch = batch_of([(row["input_ids"], row["labels"]) for row in features])
        return {**batch, "position_ids": padded([row["position_ids"] for row in features], 0)}

    def loss(m: PreTrainedModel, _: list[Ids]) -> torch.Tensor:
        parts = []
        for row, one in zip(rows, places, strict=True):
            mask = torch.ones(1, len(row))  # without it, a step of two would begin another sequence
            more = {"position_ids": torch.tensor([one]), "attention_mask": mask}
            parts.append(losses_of(m, (row, row), **more))
        return torch.cat(parts).mean()

    return Case(Trainer(model(), arguments(), collate, data), loss, rows)


@setup("keep")
def tensors_and_frozen_layers() -> Case:
    """A dataset formatted as tensors, and a first layer that does not learn."""
    rows = words()
    data = table(rows, labels=rows, attention_mask=[[1] * len(row) for row in rows]).with_format("torch")
    made = model("Llama")
    made.model.layers[0].requires_grad_(False)

    def collate(features: list[dict]) -> dict:
        fill = {"input_ids": PAD, "attention_mask": 0, "labels": IGNORED}
        return {
            name: nn.utils.rnn.pad_sequence([row[name] for row in features], batch_first=True, padding_value=value)
            for name, value in fill.items()
        }

    return case_of(Trainer(made, arguments(), collate, data), whole(rows))


@setup("either")
def random_crops() -> Case:
    """`with_transform`: another crop of a document each time that it is read."""
    rows = words(low=19, high=30)

    def crop(batch: dict) -> dict:
        cut = [random.randint(1, 10) for _ in batch["input_ids"]]
        return {"input_ids": [[BOS, *row[at : at + 8]] for row, at in zip(batch["input_ids"], cut, strict=True)]}

    def check(run: Run, _: PreTrainedModel) -> str:
        first, second = run.sequences(0), run.sequences(1)
        if {len(row) for row in first} != {9}:
            return "rows were not cropped"
        return "two epochs see the same crops" if sorted(first) == sorted(second) else ""

    collator = lm_collator()
    args = arguments(max_steps=2, remove_unused_columns=False)
    trainer = Trainer(model(), args, collator, table(rows).with_transform(crop))
    return Case(trainer, lambda m, seen: token_mean(m, whole(seen)), None, check)


# SFTTrainer


@setup("keep")
def bfd() -> Case:
    """Packing by best fit, which cuts what is longer than a row."""
    rows = words()
    trainer = sft(rows, packing=True, max_length=16, batch=20, accumulate=1)
    return case_of(trainer, whole([row[:16] for row in rows]))


@setup("keep")
def bfd_split() -> Case:
    """Packing by best fit, which goes on with the rest in another row."""
    rows = words()
    args = {"packing": True, "packing_strategy": "bfd_split", "max_length": 9}
    pieces = [row[at : at + 9] for row in rows for at in range(0, len(row), 9)]
    return case_of(sft(rows, model("Qwen3"), batch=40, accumulate=1, **args), whole(pieces))


@setup("either")
def wrapped() -> Case:
    """Packing into full rows, over the ends of documents, which see each other."""
    rows = words()
    stream = [token for row in rows for token in row]
    pieces = [stream[at : at + 16] for at in range(0, len(stream), 16)]
    trainer = sft(rows, packing=True, packing_strategy="wrapped", max_length=16, batch=40, accumulate=1)
    return case_of(trainer, whole(pieces))


@setup("keep")
def padding_free() -> Case:
    """The flat batches of TRL itself."""
    rows = words()
    return case_of(sft(rows, model("Qwen2"), padding_free=True, max_length=None), whole(rows))


@setup("keep")
def keeps_the_end() -> Case:
    """SFTConfig that cuts long rows at their beginning."""
    rows = words()
    return case_of(
        sft(rows, model("Mistral"), max_length=10, truncation_mode="keep_end"), whole([row[-10:] for row in rows])
    )


def prompts(rows: list[Ids]) -> tuple[Dataset, list[Example]]:
    """Prompts and completions as text, and what is learnt of them."""
    data = Dataset.from_dict(
        {"prompt": [text(row[:5]) for row in rows], "completion": [" " + text(row[5:]) for row in rows]}
    )
    return data, [(row[1:], [*[IGNORED] * 4, *row[5:]]) for row in rows]


@setup("keep")
def prompt_completion() -> Case:
    """Prompts and completions of text, of which the completions are learnt."""
    data, examples = prompts(words(low=6))
    trainer = SFTTrainer(model(), sft_arguments(), None, data, processing_class=tokenizer())
    return case_of(trainer, examples)


@setup("keep")
def assistant_only() -> Case:
    """Conversations, of which the answers are learnt."""
    rows = words(24, low=3, high=9)
    talks, examples = [], []
    for first, second in zip(rows[::2], rows[1::2], strict=True):
        talk, ids, labels = [], [], []
        for question, answer in ((first[1:3], first[3:-1]), (second[1:3], second[3:-1])):
            talk.append({"role": "user", "content": text(question)})
            talk.append({"role": "assistant", "content": text(answer)})
            ids += [USER, *question, END, ASSISTANT, *answer, END]
            labels += [IGNORED] * (len(question) + 3) + [*answer, END]
        talks.append(talk)
        examples.append((ids, labels))
    args = sft_arguments(assistant_only_loss=True)
    data = Dataset.from_dict({"messages": talks})
    return case_of(SFTTrainer(model(), args, None, data, processing_class=tokenizer()), examples)


@setup("keep")
def dft() -> Case:
    """The loss `dft`: each token weighed by its own probability."""
    rows = words()

    def loss(m: PreTrainedModel, _: list[Ids]) -> torch.Tensor:
        losses = torch.cat([losses_of(m, (row, row)) for row in rows])
        return (losses * (-losses).exp().detach()).mean()

    return Case(sft(rows, loss_type="dft"), loss, rows)


@setup("keep")
def lora_with_checkpointing() -> Case:
    """LoRA on the attention, with gradient checkpointing."""
    rows = words()
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return case_of(
        sft(rows, model("Gemma2", attn_implementation="eager"), peft_config=config, gradient_checkpointing=True),
        whole(rows),
    )


@setup("refuse")
def prompt_tuning() -> Case:
    """Learnt virtual tokens before each sequence."""
    rows = words()
    config = PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")
    data = table(rows, labels=[[IGNORED, *row[1:]] for row in rows])
    trainer = SFTTrainer(model(), sft_arguments(), None, data, processing_class=tokenizer(), peft_config=config)
    return case_of(trainer, whole(rows))


@setup("keep")
def sft_label_smoothing() -> Case:
    """`label_smoothing_factor` of SFTConfig."""
    rows = words()

    def loss(m: PreTrainedModel, _: list[Ids]) -> torch.Tensor:
        pairs = [predictions(m, example) for example in whole(rows)]
        logits, targets = torch.cat([one for one, _ in pairs]), torch.cat([one for _, one in pairs])
        return F.cross_entropy(logits, targets, label_smoothing=0.2)

    return Case(sft(rows, label_smoothing_factor=0.2), loss, rows)


@setup("keep")
def response_template() -> Case:
    """A collator of one's own for SFTTrainer that looks for the beginning of the answer."""
    rows = with_prompts(words())

    def collate(features: list[dict]) -> dict:
        return batch_of([(row["input_ids"], after(row["input_ids"], SEP)) for row in features])

    trainer = SFTTrainer(model("OPT"), sft_arguments(), collate, table(rows), processing_class=tokenizer())
    return case_of(trainer, [(row, after(row, SEP)) for row in rows])


@setup("either")
def noisy_embeddings() -> Case:
    """NEFTune: noise by the length of a sequence, added to the embeddings."""
    rows = words(low=18, high=22)
    trainer = sft(rows, neftune_noise_alpha=5.0)
    sizes: list[float] = []

    def note(module: nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        if module.training and torch.is_grad_enabled():
            sizes.append(float((output - module.weight[inputs[0]]).abs().max()) * WIDTH**0.5 / 5)

    class Listener(TrainerCallback):
        """Measures the noise behind the hook that makes it."""

        def on_train_begin(self, args, state, control, model=None, **kwargs):
            model.get_input_embeddings().register_forward_hook(note)

    def check(run: Run, _: PreTrainedModel) -> str:
        least, most = (size(map(len, rows)) ** -0.5 for size in (max, min))
        if not sizes or max(sizes) == 0:
            return "no noise"
        return (
            ""
            if 0.95 * least < min(sizes) <= max(sizes) < 1.05 * most
            else f"noise of {min(sizes) / least:.2f} of its size"
        )

    trainer.add_callback(Listener())
    return Case(trainer, None, rows, check)


@setup("keep")
def dropout() -> Case:
    """A model with dropout, which must stay on."""
    rows = words()
    made = model("Phi", resid_pdrop=0.3, embd_pdrop=0.3)
    trainer = Trainer(made, arguments(), lm_collator(), table(rows))

    def check(run: Run, m: PreTrainedModel) -> str:
        truth = true_gradient(m, token_mean(m, whole(rows)))
        ours, theirs = (torch.cat([one[name].flatten() for name in truth]) for one in (run.grads, truth))
        alike = float(F.cosine_similarity(ours, theirs, dim=0))
        return "" if 0.3 < alike < 0.999 else f"cosine of {alike:.4f} with the gradient without dropout"

    return Case(trainer, None, rows, check)


@setup("keep")
def tied_head_and_windows() -> Case:
    """Gemma 3: a tied head, windows of six tokens in one layer of two, gradient checkpointing."""
    rows = words()
    layers = ["sliding_attention", "full_attention"]
    made = model("Gemma3Text", sliding_window=6, layer_types=layers, tie_word_embeddings=True)
    args = arguments(gradient_checkpointing=True)
    trainer = Trainer(made, args, lm_collator(), table(rows))
    return case_of(trainer, whole(rows))


if __name__ == "__main__":
    main()
