"""A fourth set of trainers as people write them, and what `unpad.hf.attach` makes of each.

    python benchmarks/attach_unseen_4.py                            # all of them, some minutes of one core
    python benchmarks/attach_unseen_4.py hardest_half soft_prompt   # some, with tracebacks and whole messages
    python benchmarks/attach_unseen_4.py --tokens 4096              # where an update is one micro-batch

They were written without sight of the code of `unpad.hf` and of the proof, and their truths were compared with the
trainers before any was attached. 28 are right, and a sum over sequences: of these "either" stands at what the pages of
`attach` say is refused, at a router's loss, and at a teacher that `attach` cannot see. 7 are right, and no flat batches
can keep them: their rows are coupled, each has a step of its own, or virtual tokens before it. 5 have a bug: refused or
mended with a warning, both is right. Three were changed after their first verdict: the rows of
`answers_between_markers`, `history_is_masked` and `tools_and_dynamic_fine_tuning` do not fit into the six micro-batches
of 48 tokens that an update had, so it has six of 80. `attach_judge.py` says how they are judged.
"""

from __future__ import annotations

import copy
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from attach_judge import (
    ASSISTANT,
    BOS,
    END,
    EOS,
    IGNORED,
    PAD,
    SEP,
    SHARP,
    TOLERANCE,
    UNK,
    USER,
    VOCAB,
    Case,
    Example,
    Ids,
    Measures,
    Run,
    after,
    arguments,
    astray,
    batch_of,
    case_of,
    descent,
    error_of,
    folder,
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

# The judge comes first: it sets the environment that transformers reads.
# isort: split

import torch
import torch.nn.functional as F
from datasets import Dataset, interleave_datasets
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch.utils.data import SequentialSampler
from transformers import DataCollatorForLanguageModeling, PreTrainedModel, Trainer, TrainerCallback
from trl import SFTTrainer

# What several of them share


def prompted(rows: list[Ids]) -> list[Example]:
    """Examples that learn what stands behind a `SEP`."""
    return [(row, after(row, SEP)) for row in with_prompts(rows)]


def columns(examples: Sequence[Example], **more: list) -> Dataset:
    """A dataset of input_ids, labels and other columns."""
    return table([ids for ids, _ in examples], labels=[labels for _, labels in examples], **more)


def collate(rows: list[dict]) -> dict[str, torch.Tensor]:
    """Padded on the right, with the labels of the data."""
    return batch_of([(row["input_ids"], row["labels"]) for row in rows])


def case_by(
    trainer: Trainer, examples: Sequence[Example], each: Callable[..., torch.Tensor], tokens_per_micro: int = 48
) -> Case:
    """A case whose loss is a mean over the learnt tokens of all examples."""
    ids = [ids for ids, _ in examples]
    return Case(
        trainer,
        lambda m, _: torch.cat([each(m, example) for example in examples]).mean(),
        ids,
        tokens_per_micro=tokens_per_micro,
    )


def left_batch(examples: Sequence[Example]) -> dict[str, torch.Tensor]:
    """Padded on the left."""
    rows = [ids for ids, _ in examples]
    mask = padded([[1] * len(row) for row in rows], 0, left=True)
    labels = padded([labels for _, labels in examples], IGNORED, left=True)
    return {"input_ids": padded(rows, PAD, left=True), "attention_mask": mask, "labels": labels}


def of_answers(kind: type[Trainer], examples: Sequence[Example], made: PreTrainedModel | None = None) -> Trainer:
    """A trainer of examples with labels of their own."""
    return kind(made or model(), arguments(), collate, columns(examples))


def over_updates(run: Run, m: PreTrainedModel, loss: Callable[..., torch.Tensor], clip: float = 0.0) -> str:
    """What is wrong with the weights after all updates; the loss knows which update it is of."""
    start = copy.deepcopy(m)
    for step in range(run.trainer.state.global_step):
        next(descent(m, [run.sequences(step)], lambda m, rows, step=step: loss(m, rows, step), clip))
    return astray(run.trainer.model, m, start)


def uneven(run: Run, rows: list[Ids]) -> str:
    """Words for rows that were not seen as often as others, or are not of the data."""
    times = Counter(tuple(row) for step in range(len(run.steps)) for row in run.sequences(step))
    copies = Counter(map(tuple, rows))
    epochs = {times[row] // number for row, number in copies.items()}
    if set(times) - set(copies) or max(epochs) - min(epochs) > 1:
        return f"rows were seen {sorted(times.values())} times, {len(set(times) - set(copies))} are not of the data"
    return ""


def groups(rows: list[Ids], number: int = 6) -> Iterator[list[Ids]]:
    """The rows of each batch of an update."""
    return (rows[start : start + number] for start in range(0, len(rows), number))


def chats(number: int = 12, seed: int = 4) -> list[list[Ids]]:
    """Conversations: questions and answers in turn, of one to three rounds."""
    draw = random.Random(seed)
    return [
        [[draw.randrange(8, VOCAB) for _ in range(draw.randint(1, 6))] for _ in range(2 * draw.randint(1, 3))]
        for _ in range(number)
    ]


def spoken(ids: Ids) -> str:
    """Words of a turn."""
    return " ".join(f"w{token}" for token in ids)


def messages_of(turns: list[Ids], system: str = "") -> list[dict[str, str]]:
    """A conversation as chat templates take it."""
    first = [{"role": "system", "content": system}] if system else []
    roles = ("user", "assistant")
    return first + [{"role": roles[index % 2], "content": spoken(turn)} for index, turn in enumerate(turns)]


def conversations(turns: list[list[Ids]], system: str = "") -> Dataset:
    """Messages, and tools as JSON."""
    messages = [messages_of(some, system) for some in turns]
    return Dataset.from_dict({"messages": messages, "tools": [json.dumps(tools_of(i)) for i in range(len(turns))]})


def example_of(turns: list[Ids], head: Ids, learnt: Callable[[int], bool], tail: Ids) -> Example:
    """A conversation behind a head: of the answers of some turns the words and the `END` are learnt."""
    ids, labels = list(head), [IGNORED] * len(head)
    for index, turn in enumerate(turns):
        ids += [USER if index % 2 == 0 else ASSISTANT, *turn, END]
        labels += [IGNORED, *([*turn, END] if learnt(index) else [IGNORED] * (len(turn) + 1))]
    return ids + tail, labels + (tail if learnt(len(turns) - 1) else [IGNORED] * len(tail))


TOOLS_TEMPLATE = (
    "{{ '<bos> ' }}{% if tools %}{% for tool in tools %}{{ '<sep> ' + tool['function']['name'] + ' ' }}{% endfor %}"
    "{% endif %}{% for message in messages %}{% if message['role'] == 'assistant' %}{{ '<assistant> ' }}"
    "{% generation %}{{ message['content'] + ' <end>' }}{% endgeneration %}{{ ' ' }}{% else %}"
    "{{ ('<user> ' if message['role'] == 'user' else '<unk> ') + message['content'] + ' <end> ' }}{% endif %}"
    "{% endfor %}"
)


def tools_of(index: int) -> list[dict]:
    """Tools of a conversation, as functions of a schema: of two conversations in three some."""
    names = [f"w{100 + index + more}" for more in range(index % 3)]
    return [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in names]


def head_of(index: int) -> Ids:
    """Tokens of the tools of a conversation, behind `BOS`."""
    return [BOS, *(token for more in range(index % 3) for token in (SEP, 100 + index + more))]


# Collators, templates and data


class BetweenMarkers(DataCollatorForLanguageModeling):
    """The collator for completions that older releases of TRL had, as it is pasted into scripts now."""

    def __init__(self, response: int, instruction: int, **more):
        super().__init__(mlm=False, **more)
        self.response, self.instruction = response, instruction

    def torch_call(self, examples):
        batch = super().torch_call(examples)
        for row, labels in zip(batch["input_ids"], batch["labels"], strict=True):
            keep = torch.zeros_like(labels, dtype=torch.bool)
            answers = (row == self.response).nonzero().flatten().tolist()
            questions = [*(row == self.instruction).nonzero().flatten().tolist(), len(row)]
            for start in answers:
                keep[start + 1 : next(end for end in questions if end > start)] = True
            labels[~keep] = -100
        return batch


@setup("keep")
def answers_between_markers() -> Case:
    """Conversations of several rounds: what stands between the marker of an answer and that of the next question."""
    examples = [example_of(turns, [BOS], lambda index: index % 2 == 1, [EOS]) for turns in chats()]
    collator = BetweenMarkers(ASSISTANT, USER, tokenizer=tokenizer())
    return case_of(
        Trainer(model(), arguments(), collator, table([ids for ids, _ in examples])), examples, tokens_per_micro=80
    )


class LastAnswer:
    """Renders conversations with their tools, and learns the last answer alone (`mask_history` of LLaMA-Factory)."""

    def __init__(self):
        self.tokenizer = tokenizer()
        self.tokenizer.chat_template = TOOLS_TEMPLATE

    def __call__(self, rows):
        examples = []
        for row in rows:
            tools, wanted = json.loads(row["tools"]) or None, {"return_assistant_tokens_mask": True}
            made = self.tokenizer.apply_chat_template(row["messages"], tools=tools, return_dict=True, **wanted)
            ids, mask = made["input_ids"], made["assistant_masks"]
            start = max(index for index, learnt in enumerate(mask) if learnt and not mask[index - 1])
            examples.append((ids, [IGNORED] * start + ids[start:]))
        return batch_of(examples)


@setup("keep")
def history_is_masked() -> Case:
    """Messages with a system prompt and tools, rendered by the collator; other columns are left where they are."""
    turns = chats(seed=5)
    data = conversations(turns, "w40 w41").add_column("id", [f"sample-{index}" for index in range(len(turns))])
    examples = []
    for index, some in enumerate(turns):
        last = len(some) - 1
        examples.append(example_of(some, [*head_of(index), UNK, 40, 41, END], last.__eq__, []))
    trainer = Trainer(model("Qwen3"), arguments(remove_unused_columns=False), LastAnswer(), data)
    return case_of(trainer, examples, tokens_per_micro=80)


@setup("keep")
def tools_and_dynamic_fine_tuning() -> Case:
    """SFTTrainer: conversations with tools as JSON, answers alone, and the loss of dynamic fine-tuning."""
    turns, made = chats(seed=6), tokenizer()
    made.chat_template = TOOLS_TEMPLATE
    args = sft_arguments(assistant_only_loss=True, loss_type="dft")
    trainer = SFTTrainer(model("Qwen2"), args, None, conversations(turns), processing_class=made)
    examples = [example_of(some, head_of(index), lambda turn: turn % 2 == 1, []) for index, some in enumerate(turns)]

    def each(m: PreTrainedModel, example: Example) -> torch.Tensor:
        nll = losses_of(m, example)
        return torch.exp(-nll).detach() * nll

    return case_by(trainer, examples, each, tokens_per_micro=80)


@setup("keep")
def left_padding_done_right() -> Case:
    """Padding on the left with positions from the mask; long prompts lose their begin, and are not learnt."""
    rows, room = with_prompts(words(seed=7)), 14

    def cut(row: Ids) -> Ids:
        start = min(max(len(row) - room, 0), row.index(SEP) - 1)
        return [BOS, *row[start + 1 :]]

    def left(batch):
        rows = [cut(row["input_ids"]) for row in batch]
        made = left_batch([(row, after(row, SEP)) for row in rows])
        return made | {"position_ids": (made["attention_mask"].cumsum(-1) - 1).clamp(min=0)}

    trainer = Trainer(model("GPT2"), arguments(), left, table(rows))
    return case_of(trainer, [(cut(row), after(cut(row), SEP)) for row in rows])


class FillInTheMiddle(torch.utils.data.Dataset):
    """Texts that are tokenized when they are read, in the order prefix, suffix, middle; each by a draw of its own."""

    def __init__(self, texts: list[str], tokenizer):
        self.texts, self.tokenizer = texts, tokenizer

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        ids = self.tokenizer(self.texts[index], add_special_tokens=False)["input_ids"]
        draw = random.Random(f"fim {index}")
        if draw.random() < 0.3:
            return {"input_ids": [BOS, *ids, EOS]}
        one, two = sorted((draw.randint(0, len(ids)), draw.randint(0, len(ids))))
        return {"input_ids": [BOS, USER, *ids[:one], ASSISTANT, *ids[two:], SEP, *ids[one:two], EOS]}


@setup("keep")
def fill_in_the_middle() -> Case:
    """A dataset of torch whose rows are made anew at each access, and always alike."""
    data = FillInTheMiddle([text(row) for row in words(seed=8)], tokenizer())
    trainer = Trainer(model("Phi"), arguments(), lm_collator(), data)
    return case_of(trainer, whole([data[index]["input_ids"] for index in range(len(data))]))


@setup("keep")
def windows_that_overlap() -> Case:
    """Long documents in windows with a stride: what a window before has learnt already is context."""
    size, stride = 20, 12
    examples: list[Example] = []
    for row in words(5, seed=9, low=25, high=60):
        for start in range(0, max(len(row) - size + stride, 1), stride):
            ids = row[start : start + size]
            known = size - stride if start else 0
            if len(ids) > known:
                examples.append((ids, [IGNORED] * known + ids[known:]))
    trainer = Trainer(model(), arguments(accumulate=(len(examples) + 1) // 2), collate, columns(examples))
    return case_of(trainer, examples)


@setup("keep")
def packed_by_hand() -> Case:
    """Rows of several documents, whose positions begin again; no mask, and one row per batch."""
    rows = words(14, seed=10)
    packs: list[list[Ids]] = [[]]
    for row in rows:
        if sum(map(len, packs[-1])) + len(row) > 40:
            packs.append([])
        packs[-1].append(row)
    data = Dataset.from_dict(
        {
            "input_ids": [[token for row in pack for token in row] for pack in packs],
            "position_ids": [[index for row in pack for index in range(len(row))] for pack in packs],
            "labels": [[token for row in pack for token in (IGNORED, *row[1:])] for pack in packs],
        }
    )

    def only(batch):
        (row,) = batch
        return {name: torch.tensor([row[name]]) for name in ("input_ids", "position_ids", "labels")}

    return case_of(Trainer(model("Qwen2"), arguments(1, len(packs)), only, data), whole(rows))


@setup("keep")
def interleaved_sources() -> Case:
    """Two sources by probabilities, the smaller one over again; a column of the source, and one short last update."""
    sources = [table(words(9, seed=11), source=["web"] * 9), table(words(4, seed=12, low=12), source=["code"] * 4)]
    data = interleave_datasets(sources, probabilities=[0.6, 0.4], seed=5, stopping_strategy="all_exhausted")
    args = arguments(2, 3, max_steps=-1, num_train_epochs=2)
    trainer = Trainer(model(), args, lm_collator(), data)
    return Case(trainer, learns_all, check=lambda run, _: uneven(run, data["input_ids"][:]))


@setup("either")
def streamed_and_shuffled() -> Case:
    """A stream with a buffer that shuffles, tokenized on its way."""
    rows, made = words(seed=13), tokenizer()
    stream = Dataset.from_dict({"text": [f"<bos> {text(row)} <eos>" for row in rows]}).to_iterable_dataset()
    stream = stream.shuffle(seed=1, buffer_size=4)
    stream = stream.map(lambda row: {"input_ids": made(row["text"])["input_ids"]}, remove_columns=["text"])
    return case_of(Trainer(model(), arguments(), lm_collator(), stream), whole(rows))


# Losses


class PromptWeighted(Trainer):
    """Weights per token that the collator gives."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        weights, labels = inputs.pop("loss_weights"), inputs.pop("labels")
        outputs = model(**inputs)
        num = labels[:, 1:].ne(IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
        loss = (next_losses(outputs.logits, labels) * weights[:, 1:]).sum() / num
        return (loss, outputs) if return_outputs else loss


@setup("keep")
def prompts_at_a_tenth() -> Case:
    """Prompts are learnt as well, at a tenth of the weight of answers."""
    rows = with_prompts(words(seed=14))

    def weights(row: Ids) -> list[float]:
        start = row.index(SEP) + 1
        return [0.1] * start + [1.0] * (len(row) - start)

    def weigh(batch):
        rows = [row["input_ids"] for row in batch]
        return batch_of(whole(rows)) | {"loss_weights": padded([weights(row) for row in rows], 0.0)}

    trainer = PromptWeighted(model(), arguments(remove_unused_columns=False), weigh, table(rows))
    return case_by(trainer, whole(rows), lambda m, one: losses_of(m, one) * torch.tensor(weights(one[0])[1:]).double())


CLASS_WEIGHTS = torch.ones(VOCAB)
CLASS_WEIGHTS[EOS], CLASS_WEIGHTS[8:30] = 3.0, 0.5


def weighted_with_z_loss(outputs, labels, num_items_in_batch=None):
    """Cross-entropy with a weight per class, and a penalty on large normalizers."""
    logits, targets = outputs.logits[:, :-1].float(), labels[:, 1:]
    real = targets != IGNORED
    weights = CLASS_WEIGHTS.to(logits.dtype)
    total = F.cross_entropy(logits[real], targets[real], weight=weights, reduction="sum")
    total = total + 1e-2 * logits[real].logsumexp(-1).square().sum()
    return total / (real.sum() if num_items_in_batch is None else num_items_in_batch)


@setup("keep")
def class_weights_and_z_loss() -> Case:
    """`compute_loss_func`: the end weighs more, common words less, and logits are held small."""
    examples = prompted(words(seed=15))
    trainer = Trainer(model("Qwen2"), arguments(), collate, columns(examples), compute_loss_func=weighted_with_z_loss)

    def each(m: PreTrainedModel, example: Example) -> torch.Tensor:
        logits, targets = predictions(m, example)
        return CLASS_WEIGHTS.double()[targets] * losses_of(m, example) + 1e-2 * logits.logsumexp(-1) ** 2

    return case_by(trainer, examples, each)


@setup("keep")
def smoothed_completions() -> Case:
    """SFTTrainer on prompts and completions as text, with smoothed labels."""
    examples = prompted(words(seed=16))
    halves = [(ids[: ids.index(SEP)], ids[ids.index(SEP) + 1 : -1]) for ids, _ in examples]
    texts = [{"prompt": f"<bos> {spoken(one[1:])} <sep>", "completion": f" {spoken(two)}"} for one, two in halves]
    args, data = sft_arguments(label_smoothing_factor=0.1), Dataset.from_list(texts)
    trainer = SFTTrainer(model(), args, None, data, processing_class=tokenizer())

    def each(m: PreTrainedModel, example: Example) -> torch.Tensor:
        return F.cross_entropy(*predictions(m, example), reduction="none", label_smoothing=0.1)

    return case_by(trainer, examples, each)


def divergence(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """KL(p, q) of logits, summed over all but what is before the vocabulary."""
    return (p.softmax(-1) * (p.log_softmax(-1) - q.log_softmax(-1))).sum(-1)


class Distilled(Trainer):
    """Half of the loss is the distance to a teacher at a temperature of 2."""

    def __init__(self, *args, teacher=None, **more):
        super().__init__(*args, **more)
        self.teacher = teacher.eval()

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        with torch.no_grad():
            aim = self.teacher(**inputs).logits
        real = labels[:, 1:] != IGNORED
        far = 4 * divergence(aim[:, :-1][real] / 2, outputs.logits[:, :-1][real] / 2).sum()
        loss = (0.5 * next_losses(outputs.logits, labels).sum() + 0.5 * far) / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


@setup("either")
def larger_teacher() -> Case:
    """A teacher of more layers, that the trainer holds beside the model."""
    examples, teacher = prompted(words(seed=17)), model("Llama", seed=1, num_hidden_layers=3)
    trainer = Distilled(model(), arguments(), collate, columns(examples), teacher=teacher)
    wise = copy.deepcopy(teacher).double()

    def each(m: PreTrainedModel, example: Example) -> torch.Tensor:
        aim = predictions(wise, example)[0].detach()
        return losses_of(m, example) / 2 + 2 * divergence(aim / 2, predictions(m, example)[0] / 2)

    return case_by(trainer, examples, each)


class NearTheBase(Trainer):
    """Adapters that are held near the model without them."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        with torch.no_grad(), self.accelerator.unwrap_model(model).disable_adapter():
            base = model(**inputs).logits
        real = labels[:, 1:] != IGNORED
        far = divergence(outputs.logits[:, :-1][real], base[:, :-1][real]).sum()
        loss = (next_losses(outputs.logits, labels).sum() + 0.2 * far) / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


@setup("keep")
def adapters_near_their_base() -> Case:
    """KL to the base, which is the same model with its adapters off."""
    examples = prompted(words(seed=18))
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    torch.manual_seed(2)
    trainer = of_answers(NearTheBase, examples, get_peft_model(model(), lora))

    def each(m: PreTrainedModel, example: Example) -> torch.Tensor:
        with torch.no_grad(), m.disable_adapter():
            base = predictions(m, example)[0]
        return losses_of(m, example) + 0.2 * divergence(predictions(m, example)[0], base)

    return case_by(trainer, examples, each)


class TwoViews(Trainer):
    """R-Drop with words left out in place of dropout: the same text twice, once with holes."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
        holes = inputs["input_ids"].masked_fill(inputs["input_ids"] % 5 == 0, UNK)
        others = model(**{**inputs, "input_ids": holes}, num_items_in_batch=num_items_in_batch)
        real = inputs["labels"][:, 1:] != IGNORED
        p, q = outputs.logits[:, :-1][real], others.logits[:, :-1][real]
        loss = (outputs.loss + others.loss) / 2 + 0.5 * (divergence(p, q) + divergence(q, p)).sum() / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


@setup("keep")
def two_views_of_a_text() -> Case:
    """Two passes of each batch, and what they disagree in."""
    examples = prompted(words(seed=19))

    def holed(ids: Ids) -> Ids:
        return [UNK if token % 5 == 0 else token for token in ids]

    def each(m: PreTrainedModel, example: Example) -> torch.Tensor:
        (p, targets), (q, _) = (predictions(m, view) for view in (example, (holed(example[0]), example[1])))
        nll = (F.cross_entropy(p, targets, reduction="none") + F.cross_entropy(q, targets, reduction="none")) / 2
        return nll + 0.5 * (divergence(p, q) + divergence(q, p))

    case = case_by(of_answers(TwoViews, examples), examples, each)
    case.tokens = None  # those with holes are seen as well
    return case


class Unlikelihood(SFTTrainer):
    """Answers that were marked as bad are made unlikely."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels, signs = inputs.pop("labels"), inputs.pop("signs")
        outputs = model(**inputs)
        nll = next_losses(outputs.logits, labels)
        away = -torch.log1p(-torch.exp(-nll).clamp(max=1 - 1e-6))
        loss = torch.where(signs[:, 1:] > 0, nll, away)[labels[:, 1:] != IGNORED].sum() / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


@setup("keep")
def unlikely_answers() -> Case:
    """Signs per token, from a thumb up or down per row that the collator spreads."""
    examples = prompted(words(seed=20))
    thumbs = [index % 3 != 0 for index in range(len(examples))]

    def spread(batch):
        signs = [[1 if row["thumb"] else -1] * len(row["input_ids"]) for row in batch]
        return collate(batch) | {"signs": padded(signs, 0)}

    args = sft_arguments(remove_unused_columns=False, dataset_kwargs={"skip_prepare_dataset": True})
    trainer = Unlikelihood(model(), args, spread, columns(examples, thumb=thumbs), processing_class=tokenizer())

    def each(m: PreTrainedModel, example: Example) -> torch.Tensor:
        nll = losses_of(m, example)
        return nll if thumbs[examples.index(example)] else -torch.log1p(-torch.exp(-nll))

    return case_by(trainer, examples, each)


class RewardWeighted(Trainer):
    """Reward-weighted regression: each answer by the exponential of its reward."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        weights = torch.exp(inputs.pop("reward") / 0.7)
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = (next_losses(outputs.logits, labels).sum(-1) * weights).sum() / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


@setup("either")
def reward_of_each_row() -> Case:
    """One number per row, in a column of the batch."""
    examples = prompted(words(seed=21))
    rewards = [random.Random(index).uniform(-1, 1) for index in range(len(examples))]

    def reward(batch):
        return collate(batch) | {"reward": torch.tensor([row["reward"] for row in batch])}

    args = arguments(remove_unused_columns=False)
    trainer = RewardWeighted(model(), args, reward, columns(examples, reward=rewards))
    weights = torch.exp(torch.tensor(rewards).double() / 0.7)
    return case_by(trainer, examples, lambda m, one: weights[examples.index(one)] * losses_of(m, one))


class AnnealedEntropy(Trainer):
    """A bonus for undecided predictions that ends with the training."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        bonus = 0.3 * (1 - self.state.global_step / self.args.max_steps)
        outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
        logits = outputs.logits[:, :-1][inputs["labels"][:, 1:] != IGNORED]
        entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum()
        loss = outputs.loss - bonus * entropy / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


@setup("keep")
def bonus_that_fades() -> Case:
    """Three updates, of which each has another loss."""
    rows = words(18, seed=22)
    args = arguments(2, 3, max_steps=3, learning_rate=SHARP)

    def loss(m: PreTrainedModel, rows: list[Ids], step: int = 0) -> torch.Tensor:
        logits = torch.cat([predictions(m, example)[0] for example in whole(rows)])
        entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
        return learns_all(m, rows) - 0.3 * (1 - step / 3) * entropy.mean()

    return Case(plain(AnnealedEntropy, "Llama", args, rows), loss, check=lambda run, m: over_updates(run, m, loss))


# Updates


@setup("keep")
def last_update_of_one_row() -> Case:
    """13 rows in batches of 2, three to an update, for two epochs: the last update of each has one row."""
    rows = words(13, seed=23)
    args = arguments(2, 3, max_steps=-1, num_train_epochs=2, learning_rate=SHARP)

    def check(run: Run, m: PreTrainedModel) -> str:
        return uneven(run, rows) or over_updates(run, m, lambda m, rows, _: learns_all(m, rows))

    return Case(plain(Trainer, "Llama", args, rows), learns_all, check=check)


class ShortestFirst(Trainer):
    """A curriculum: rows in the order of the data, which is sorted."""

    def _get_train_sampler(self, train_dataset=None):
        return SequentialSampler(self.train_dataset if train_dataset is None else train_dataset)


@setup("either")
def shortest_first() -> Case:
    """24 rows sorted by length: the first update has the 12 shortest."""
    rows = sorted(words(24, seed=24, low=3, high=24), key=len)
    return case_of(plain(ShortestFirst, "Llama", arguments(), rows), whole(rows[:12]))


@setup("either")
def grouped_by_length() -> Case:
    """Batches of rows of like length, for one epoch."""
    rows = words(24, seed=25)
    args = arguments(3, 4, max_steps=-1, num_train_epochs=1, train_sampling_strategy="group_by_length")
    return Case(plain(Trainer, "Llama", args, rows), learns_all, check=lambda run, _: uneven(run, rows))


class StopsOnce(TrainerCallback):
    """A time limit of a cluster: the job ends after the second update."""

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop |= state.global_step == 2


@setup("keep")
def clipped_and_resumed() -> Case:
    """Small gradients by clipping, a stop after two updates, and the rest from the checkpoint."""
    rows, clip = words(18, seed=26), 0.5
    saves = {"output_dir": folder(), "save_strategy": "steps", "save_steps": 1}
    args = arguments(2, 3, max_steps=4, learning_rate=SHARP, max_grad_norm=clip, **saves)
    trainer = plain(Trainer, "Llama", args, rows, callbacks=[StopsOnce()])

    def loss(m: PreTrainedModel, rows: list[Ids]) -> torch.Tensor:
        truth = true_gradient(m, learns_all(m, rows))
        scale = clip / float(torch.stack([value.norm() for value in truth.values()]).norm())
        return towards(m, {name: min(1.0, scale) * value for name, value in truth.items()})

    def check(run: Run, m: PreTrainedModel) -> str:
        if run.trainer.state.global_step != 4:
            return f"{run.trainer.state.global_step} updates"
        return uneven(run, rows) or over_updates(run, m, lambda m, rows, _: learns_all(m, rows), clip)

    def train(trainer: Trainer) -> None:
        trainer.train()
        trainer.train(resume_from_checkpoint=True)

    return Case(trainer, loss, check=check, train=train)


# Evaluation


def likeliest(logits, labels):
    """The twenty words that are likeliest at each place: logits would fill the memory."""
    return logits.topk(20).indices


def accuracy_of_answers(prediction):
    """Share of the words of answers that are among the likeliest."""
    guesses, labels = prediction.predictions[:, :-1], prediction.label_ids[:, 1:]
    real = labels != IGNORED
    return {"accuracy": (guesses == labels[..., None]).any(-1)[real].mean(), "targets": real.sum()}


@setup("keep")
def two_sets_at_each_step() -> Case:
    """Two sets to evaluate with metrics of the likeliest words, before the training and after each update."""
    examples = prompted(words(seed=27))
    sets = {"easy": prompted(words(7, seed=28, high=9)), "hard": prompted(words(6, seed=29, low=10))}
    args = arguments(eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=8, learning_rate=SHARP)
    evaluated = {name: columns(some) for name, some in sets.items()}
    metrics = {"compute_metrics": accuracy_of_answers, "preprocess_logits_for_metrics": likeliest}
    trainer = Trainer(model(), args, collate, columns(examples), evaluated, **metrics)

    def measured(m: PreTrainedModel) -> Measures:
        found: Measures = {}
        with torch.no_grad():
            for name, some in sets.items():
                guesses = [predictions(m, example) for example in some]
                right = torch.cat(
                    [(likeliest(logits, None) == targets[:, None]).any(-1) for logits, targets in guesses]
                )
                found[f"eval_{name}_loss"] = float(token_mean(m, some))
                found[f"eval_{name}_accuracy"] = float(right.double().mean())
                found[f"eval_{name}_targets"] = len(right)
        return found

    def check(run: Run, m: PreTrainedModel) -> str:
        next(descent(m, [[]], lambda m, _: token_mean(m, examples)))
        logged = {name: value for line in run.trainer.state.log_history for name, value in line.items()}
        wrong = [name for name, value in measured(m).items() if not abs(logged[name] / value - 1) <= TOLERANCE]
        return f"after the update: {', '.join(wrong)}" if wrong else ""

    return case_of(trainer, examples, check=check, measure=lambda trainer: trainer.evaluate(), measured=measured)


# Models


@setup("keep")
def dora_and_some_embeddings() -> Case:
    """DoRA in SFTTrainer, with a trained head and the embeddings of a few tokens; layers are computed twice."""
    torch.manual_seed(3)
    tokens = {"embed_tokens": [USER, ASSISTANT, SEP]}
    parts = {"target_modules": ["q_proj", "o_proj", "down_proj"], "modules_to_save": ["lm_head"]}
    kind = {"use_dora": True, "use_rslora": True, "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    adapter = LoraConfig(r=4, trainable_token_indices=tokens, **parts, **kind)
    rows = with_prompts(words(seed=30))
    trainer = sft(rows, peft_config=adapter, gradient_checkpointing=True)
    return case_of(trainer, whole(rows))


@setup("keep")
def window_and_new_tokens() -> Case:
    """A window of four tokens, a head that is the embedding, and a vocabulary that grew by eight."""
    made = model("Mistral", sliding_window=4, tie_word_embeddings=True)
    made.resize_token_embeddings(VOCAB + 8, mean_resizing=False)
    rows = [[BOS, VOCAB + index % 8, *row[1:]] for index, row in enumerate(words(seed=31))]
    return case_of(plain(Trainer, made, arguments(), rows), whole(rows))


class Thaw(TrainerCallback):
    """The lowest layer is trained from the second update on."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == 1:
            model.model.layers[0].requires_grad_(True)


@setup("keep")
def thawed_by_a_callback() -> Case:
    """The embedding and the lowest layer are frozen, and the layer is thawed; the optimizer has all of them."""
    rows, made = words(18, seed=32), model("Qwen2")
    made.get_input_embeddings().requires_grad_(False)
    made.model.layers[0].requires_grad_(False)
    args = arguments(2, 3, max_steps=3, gradient_checkpointing=True)
    optimizers = (torch.optim.SGD(made.parameters(), lr=SHARP), None)
    trainer = plain(Trainer, made, args, rows, optimizers=optimizers, callbacks=[Thaw()])

    def loss(m: PreTrainedModel, rows: list[Ids], step: int = 0) -> torch.Tensor:
        m.model.layers[0].requires_grad_(step > 0)
        return learns_all(m, rows)

    return Case(trainer, loss, check=lambda run, m: over_updates(run, m, loss))


@setup("either")
def router_that_balances() -> Case:
    """Experts, and a loss that spreads the tokens of the whole update over them; one batch is an update."""
    rows, experts, scale = words(seed=33), 4, 0.1
    sizes = {"num_local_experts": experts, "num_experts_per_tok": 2}
    made = model("Mixtral", output_router_logits=True, router_aux_loss_coef=scale, **sizes)

    def loss(m: PreTrainedModel, _: list[Ids]) -> torch.Tensor:
        m.set_experts_implementation("eager")  # others are not for fp64
        gates = [m(input_ids=torch.tensor([row]), use_cache=False).router_logits for row in rows]
        shares = torch.cat([gate for layers in gates for gate in layers]).softmax(-1)
        chosen = F.one_hot(shares.topk(2).indices, experts).sum(1).double()
        return learns_all(m, rows) + scale * experts * (chosen.mean(0) * shares.mean(0)).sum()

    return Case(plain(Trainer, made, arguments(12, 1), rows), loss, rows)


@setup("keep")
def autocast_in_bf16() -> Case:
    """Mixed precision: the gradient is the true one up to the rounding of bf16."""
    examples = prompted(words(seed=34))
    trainer = Trainer(model(), arguments(bf16=True), collate, columns(examples))

    def check(run: Run, m: PreTrainedModel) -> str:
        error = error_of(run.grads, true_gradient(m, token_mean(m, examples)))
        return "" if error < 0.05 else f"the gradient is {error:.0e} away"

    return Case(trainer, None, [ids for ids, _ in examples], check)


# Right, and not to be kept by flat batches


class InBatchContrast(Trainer):
    """The end of each prompt is to find the end of its own answer among those of the batch."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs, num_items_in_batch=num_items_in_batch, output_hidden_states=True)
        hidden, ids = outputs.hidden_states[-1], inputs["input_ids"]
        questions, answers = (F.normalize(hidden[ids == mark], dim=-1) for mark in (SEP, EOS))
        apart = F.cross_entropy(questions @ answers.T / 0.2, torch.arange(len(questions)))
        loss = outputs.loss + 0.5 * apart / self.current_gradient_accumulation_steps
        return (loss, outputs) if return_outputs else loss


@setup("refuse")
def contrast_in_the_batch() -> Case:
    """A second loss over all pairs of rows of a batch."""
    rows = with_prompts(words(seed=35))

    def apart(m: PreTrainedModel, batch: list[Ids]) -> torch.Tensor:
        ends: list[list[torch.Tensor]] = [[], []]
        for row in batch:
            hidden = m(input_ids=torch.tensor([row]), use_cache=False, output_hidden_states=True).hidden_states[-1][0]
            ends[0].append(F.normalize(hidden[row.index(SEP)], dim=-1))
            ends[1].append(F.normalize(hidden[-1], dim=-1))
        return F.cross_entropy(torch.stack(ends[0]) @ torch.stack(ends[1]).T / 0.2, torch.arange(len(batch)))

    def loss(m: PreTrainedModel, seen: list[Ids]) -> torch.Tensor:
        return learns_all(m, rows) + 0.5 * sum(apart(m, batch) for batch in groups(seen)) / 2

    return Case(plain(InBatchContrast, "Llama", arguments(6, 2), rows), loss, rows)


class Preference(Trainer):
    """Chosen answers are learnt, and are to be likelier than rejected ones (ORPO with a margin)."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        mean = next_losses(outputs.logits, labels).sum(-1) / labels[:, 1:].ne(IGNORED).sum(-1)
        chosen, rejected = mean[0::2], mean[1::2]
        loss = (chosen - 0.5 * F.logsigmoid(2 * (rejected - chosen))).mean()
        loss = loss / self.current_gradient_accumulation_steps
        return (loss, outputs) if return_outputs else loss


@setup("refuse")
def chosen_beside_rejected() -> Case:
    """Each row of the data is two of the batch, which are compared."""
    prompts = words(12, seed=36, low=1, high=5)
    answers = [words(12, seed=seed, low=2, high=12) for seed in (37, 38)]
    one, two = ([[*ask[:-1], SEP, *say[1:]] for ask, say in zip(prompts, some, strict=True)] for some in answers)
    pairs, data = list(zip(one, two, strict=True)), Dataset.from_dict({"chosen": one, "rejected": two})

    def both(batch):
        rows = [row[name] for row in batch for name in ("chosen", "rejected")]
        return batch_of([(row, after(row, SEP)) for row in rows])

    def loss(m: PreTrainedModel, _: list[Ids]) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for pair in pairs:
            one, two = (losses_of(m, (row, after(row, SEP))).mean() for row in pair)
            total = total + one - 0.5 * F.logsigmoid(2 * (two - one))
        return total / len(pairs)

    trainer = Preference(model(), arguments(remove_unused_columns=False), both, data)
    return Case(trainer, loss, [row for pair in pairs for row in pair])


class HardestHalf(Trainer):
    """The rows of a batch with the largest losses are learnt, as many as the others."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        mean = next_losses(outputs.logits, labels).sum(-1) / labels[:, 1:].ne(IGNORED).sum(-1)
        loss = mean.topk((len(mean) + 1) // 2).values.mean() / self.current_gradient_accumulation_steps
        return (loss, outputs) if return_outputs else loss


@setup("refuse")
def hardest_half() -> Case:
    """Which rows are learnt depends on those beside them."""
    rows = words(seed=39)

    def loss(m: PreTrainedModel, seen: list[Ids]) -> torch.Tensor:
        halves = [torch.stack([losses_of(m, (row, row)).mean() for row in batch]).topk(3) for batch in groups(seen)]
        return torch.stack([half.values.mean() for half in halves]).mean()

    return Case(plain(HardestHalf, "Llama", arguments(6, 2), rows), loss, rows)


class VariedOnAverage(Trainer):
    """The mean prediction of a batch is to be spread over many words."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
        real = inputs["labels"][:, 1:] != IGNORED
        mean = outputs.logits[:, :-1][real].softmax(-1).mean(0)
        loss = outputs.loss + 0.5 * (mean * mean.log()).sum() / self.current_gradient_accumulation_steps
        return (loss, outputs) if return_outputs else loss


@setup("refuse")
def varied_on_average() -> Case:
    """The entropy of a mean over the tokens of a batch."""
    rows = words(seed=40)

    def loss(m: PreTrainedModel, seen: list[Ids]) -> torch.Tensor:
        total = learns_all(m, rows)
        for batch in groups(seen):
            mean = torch.cat([predictions(m, (row, row))[0].softmax(-1) for row in batch]).mean(0)
            total = total + 0.25 * (mean * mean.log()).sum()
        return total

    return Case(plain(VariedOnAverage, "Qwen2", arguments(6, 2), rows), loss, rows)


class ClippedEach(Trainer):
    """Private training: the gradient of each row is clipped by itself, and they are added."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        inputs = self._prepare_inputs(inputs)
        weights = [value for value in model.parameters() if value.requires_grad]
        losses = []
        for index in range(len(inputs["input_ids"])):
            loss = model(**{name: value[index : index + 1] for name, value in inputs.items()}).loss
            grads = torch.autograd.grad(loss, weights)
            norm = torch.stack([grad.norm() for grad in grads]).norm()
            for value, grad in zip(weights, grads, strict=True):
                part = grad * (1.0 / norm).clamp(max=1.0) / 12
                value.grad = part if value.grad is None else value.grad + part
            losses.append(loss.detach())
        return torch.stack(losses).mean() / self.current_gradient_accumulation_steps


@setup("refuse")
def clipped_each() -> Case:
    """A step that takes the rows of a batch one by one."""
    rows = words(seed=41)

    def loss(m: PreTrainedModel, _: list[Ids]) -> torch.Tensor:
        wanted = {name: torch.zeros_like(value) for name, value in m.named_parameters()}
        for row in rows:
            truth = true_gradient(m, learns_all(m, [row]))
            norm = float(torch.stack([value.norm() for value in truth.values()]).norm())
            for name, value in truth.items():
                wanted[name] += value * min(1.0, 1.0 / norm) / 12
        return towards(m, wanted)

    return Case(plain(ClippedEach, "Llama", arguments(3, 4), rows), loss, rows)


@setup("refuse")
def soft_prompt() -> Case:
    """Prompt tuning: four virtual tokens before each row."""
    torch.manual_seed(5)
    examples = prompted(words(seed=42))
    made = get_peft_model(model(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    return case_of(of_answers(Trainer, examples, made), examples)


class AboveTheMean(Trainer):
    """Policy gradient: what a reward is above the mean of the batch, per token."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels, rewards = inputs.pop("labels"), inputs.pop("rewards")[:, 1:]
        outputs = model(**inputs)
        real = labels[:, 1:] != IGNORED
        gain = (rewards - rewards[real].mean()) / rewards[real].std()
        loss = (gain * next_losses(outputs.logits, labels)).sum() / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


@setup("refuse")
def rewards_above_the_mean() -> Case:
    """Rewards per token, which are made comparable within each batch."""
    examples = prompted(words(seed=43))
    rewards = [[random.Random(index).gauss(0, 1)] * len(ids) for index, (ids, _) in enumerate(examples)]

    def reward(batch):
        return collate(batch) | {"rewards": padded([row["rewards"] for row in batch], 0.0)}

    args = arguments(6, 2, remove_unused_columns=False)
    trainer = AboveTheMean(model(), args, reward, columns(examples, rewards=rewards))
    known = {tuple(example[0]): (example, one[0]) for example, one in zip(examples, rewards, strict=True)}

    def loss(m: PreTrainedModel, seen: list[Ids]) -> torch.Tensor:
        parts = []
        for batch in groups(seen):
            each = [losses_of(m, known[tuple(row)][0]) for row in batch]
            gains = [torch.full_like(nll.detach(), known[tuple(row)][1]) for nll, row in zip(each, batch, strict=True)]
            gain = torch.cat(gains)
            parts.append((gain - gain.mean()) / gain.std() * torch.cat(each))
        return torch.cat(parts).mean()

    return Case(trainer, loss, [ids for ids, _ in examples])


# With a bug


@setup("either", padded_is_true=False)
def shifted_twice() -> Case:
    """Labels that were shifted in the data already, as loops of one's own need them; the model shifts them again."""
    rows = words(seed=44)
    trainer = Trainer(model(), arguments(), collate, columns([(row, [*row[1:], IGNORED]) for row in rows]))
    return case_of(trainer, whole(rows))


class PaddingInTheMean(Trainer):
    """The mean over all places of a batch, of which padding has a loss of zero."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = next_losses(outputs.logits, labels).mean() / self.current_gradient_accumulation_steps
        return (loss, outputs) if return_outputs else loss


@setup("either", padded_is_true=False)
def padding_in_the_mean() -> Case:
    """How much a word counts depends on the longest row beside it."""
    rows = words(seed=45)
    return case_of(plain(PaddingInTheMean, "Llama", arguments(4, 3), rows), whole(rows))


@setup("either", padded_is_true=False)
def cut_to_the_shortest() -> Case:
    """A collator that stacks rows by cutting each to the shortest of the batch."""
    rows = words(seed=46)

    def stack(batch):
        size = min(len(row["input_ids"]) for row in batch)
        ids = torch.tensor([row["input_ids"][:size] for row in batch])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}

    return case_of(Trainer(model(), arguments(), stack, table(rows)), whole(rows))


class MeanOfEachBatch(Trainer):
    """A loss of older tutorials: the trainer no longer divides it by the number of batches."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.get("labels")
        outputs = model(input_ids=inputs.get("input_ids"), attention_mask=inputs.get("attention_mask"))
        logits = outputs.get("logits")[..., :-1, :].contiguous()
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), labels[..., 1:].contiguous().view(-1))
        return (loss, outputs) if return_outputs else loss


@setup("either", padded_is_true=False)
def mean_of_each_batch() -> Case:
    """Means of batches are added up: six times too large, and short answers count more."""
    examples = prompted(words(seed=47))
    return case_of(of_answers(MeanOfEachBatch, examples, model("Qwen2")), examples)


@setup("either", padded_is_true=False)
def left_padding_without_positions() -> Case:
    """Learnt positions, and a tokenizer that still pads on the left, as generation needs it."""
    examples = prompted(words(seed=48))

    def left(batch):
        return left_batch([(row["input_ids"], row["labels"]) for row in batch])

    return case_of(Trainer(model("GPT2"), arguments(), left, columns(examples)), examples)


if __name__ == "__main__":
    main()
