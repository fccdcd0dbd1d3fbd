"""A third set of trainers as people write them, and what `unpad.hf.attach` makes of each.

    python benchmarks/attach_unseen_3.py                     # all of them, about two minutes of one core
    python benchmarks/attach_unseen_3.py medusa fgm          # some, with tracebacks and whole messages
    python benchmarks/attach_unseen_3.py --tokens 4096       # where an update is one micro-batch

They were written without sight of the code of `unpad.hf` and of the proof, and their truths were compared with the
trainers before any was attached. Of `unknown_is_padding` the rows were changed after its first verdict: two ended in a
hidden token by mistake. `attach_judge.py` says how they are judged.
"""

from __future__ import annotations

import copy

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
    WIDTH,
    Case,
    Ids,
    Measures,
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
    tokenizer,
    towards,
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
from datasets import Dataset
from peft import IA3Config, LoraConfig, get_peft_model
from torch import nn
from torch.utils.data import Subset
from transformers import DataCollatorWithPadding, LlamaForCausalLM, PreTrainedModel, Trainer, TrainerCallback
from trl import SFTTrainer

# Models as people change them


@setup("keep")
def model_from_a_function() -> Case:
    """`model_init` in place of a model: `train` makes the model anew."""
    rows = words()
    trainer = Trainer(None, arguments(), lm_collator(), table(rows), model_init=lambda: model())
    return Case(trainer, lambda m, _: learns_all(m, rows))


def focal(logits, labels, vocab_size, num_items_in_batch=None, **kwargs):
    """A loss as a model of transformers calls it: small where a token is known already."""
    targets = F.pad(labels, (0, 1), value=IGNORED)[..., 1:].reshape(-1)
    each = F.cross_entropy(logits.view(-1, vocab_size), targets, ignore_index=IGNORED, reduction="none")
    total = ((1 - torch.exp(-each)) ** 2 * each).sum()
    return total / (targets.ne(IGNORED).sum() if num_items_in_batch is None else num_items_in_batch)


@setup("keep")
def loss_function_of_the_model() -> Case:
    """`model.loss_function = focal`, which no trainer knows of."""
    examples = [(row, after(row, SEP)) for row in with_prompts(words())]
    made = model("Qwen2")
    made.loss_function = focal
    data = table([ids for ids, _ in examples], labels=[labels for _, labels in examples])
    trainer = Trainer(
        made, arguments(), lambda rows: batch_of([(row["input_ids"], row["labels"]) for row in rows]), data
    )

    def loss(m: PreTrainedModel, _: list[Ids]) -> torch.Tensor:
        each = torch.cat([losses_of(m, example) for example in examples])
        return ((1 - torch.exp(-each)) ** 2 * each).mean()

    return Case(trainer, loss, [ids for ids, _ in examples])


@setup("keep")
def temperature_by_a_hook() -> Case:
    """A hook of the head that divides its logits, and a head with a bias."""
    rows, made = words(), model("Phi")
    made.lm_head.register_forward_hook(lambda module, inputs, output: output / 1.5)
    return case_of(plain(Trainer, made, arguments(), rows), whole(rows))


@setup("keep")
def weight_norm_of_the_head() -> Case:
    """The head's weight is computed from two parameters at each use."""
    rows, made = words(), model("Llama")
    nn.utils.parametrizations.weight_norm(made.lm_head)
    return case_of(plain(Trainer, made, arguments(), rows), whole(rows))


class Wrapped(nn.Module):
    """A module of one's own around a model, without positions and further arguments."""

    def __init__(self, inner: PreTrainedModel) -> None:
        super().__init__()
        self.inner, self.config = inner, inner.config

    def get_input_embeddings(self) -> nn.Module:
        return self.inner.get_input_embeddings()

    def forward(self, input_ids, attention_mask=None, labels=None):
        logits = self.inner(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), "logits": logits}


@setup("either")
def wrapper_without_positions() -> Case:
    """A plain module around a model, whose loss is a mean; all rows are one batch."""
    rows = words()

    def loss(m: nn.Module, _: list[Ids]) -> torch.Tensor:
        return learns_all(m.inner, rows)

    return Case(plain(Trainer, Wrapped(model()), arguments(12, 1), rows), loss, rows)


class SoftPrompted(LlamaForCausalLM):
    """Four learnt vectors stand before each row."""

    def __init__(self, config) -> None:
        super().__init__(config)
        self.soft = nn.Parameter(torch.randn(4, config.hidden_size) * 0.3)

    def forward(self, input_ids, attention_mask=None, labels=None, num_items_in_batch=None, **kwargs):
        embedded = self.get_input_embeddings()(input_ids)
        embedded = torch.cat([self.soft.expand(len(embedded), -1, -1), embedded], 1)
        if attention_mask is not None:
            attention_mask = F.pad(attention_mask, (4, 0), value=1)
        if labels is not None:
            labels = F.pad(labels, (4, 0), value=IGNORED)
        more = {} if num_items_in_batch is None else {"num_items_in_batch": num_items_in_batch}
        return super().forward(
            inputs_embeds=embedded, attention_mask=attention_mask, labels=labels, use_cache=False, **more
        )


@setup("refuse")
def soft_prompt_by_hand() -> Case:
    """Learnt vectors put before each row by the model itself, labels and mask made longer."""
    examples = [(row, after(row, SEP)) for row in with_prompts(words())]
    torch.manual_seed(0)
    made = SoftPrompted(model().config)
    data = table([ids for ids, _ in examples], labels=[labels for _, labels in examples])
    trainer = Trainer(
        made, arguments(), lambda rows: batch_of([(row["input_ids"], row["labels"]) for row in rows]), data
    )
    return case_of(trainer, examples)


class Remembering(nn.Module):
    """A feed-forward layer with a recurrent one beside it."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp, self.gru = mlp, nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.mlp(hidden) + self.gru(hidden)[0]


@setup("either")
def recurrent_side_layer() -> Case:
    """A GRU beside the feed-forward layer of a block."""
    rows, made = words(), model("Llama")
    made.model.layers[1].mlp = Remembering(made.model.layers[1].mlp)
    return case_of(plain(Trainer, made, arguments(), rows), whole(rows))


class MyLlama(LlamaForCausalLM):
    """A class whose name does not tell transformers its loss: the first token of each row is counted as a target."""


@setup("either", padded_is_true=False)
def class_of_another_name() -> Case:
    """A subclass that changes nothing but the name; the trainer divides by rows and targets in place of targets."""
    rows = words()
    torch.manual_seed(0)
    return case_of(plain(Trainer, MyLlama(model().config), arguments(), rows), whole(rows))


@setup("keep")
def speakers_as_token_types() -> Case:
    """Conversations of GPT-2, where each token's embedding is added to that of its speaker."""
    rows = with_prompts(words())
    speakers = [[USER] * row.index(SEP) + [ASSISTANT] * (len(row) - row.index(SEP)) for row in rows]
    examples = [(row, after(row, SEP)) for row in rows]

    def collate(features: list[dict]) -> dict[str, torch.Tensor]:
        batch = batch_of([(row["input_ids"], row["labels"]) for row in features])
        return {**batch, "token_type_ids": padded([row["token_type_ids"] for row in features], USER)}

    data = table(rows, token_type_ids=speakers, labels=[labels for _, labels in examples])

    def loss(m: PreTrainedModel, _: list[Ids]) -> torch.Tensor:
        pairs = zip(examples, speakers, strict=True)
        return torch.cat([losses_of(m, one, token_type_ids=torch.tensor([who])) for one, who in pairs]).mean()

    return Case(Trainer(model("GPT2"), arguments(), collate, data), loss)


@setup("keep")
def learns_some_tokens() -> Case:
    """LoRA that also learns the vectors of two tokens, in an embedding that is the head too."""
    rows = with_prompts(words())
    config = LoraConfig(target_modules=["q_proj"], trainable_token_indices=[SEP, EOS], init_lora_weights=False)
    made = get_peft_model(model("Qwen2", tie_word_embeddings=True), config)
    return case_of(plain(Trainer, made, arguments(), rows), whole(rows))


@setup("keep")
def ia3() -> Case:
    """An SFTTrainer that learns factors of keys, values and feed-forward layers."""
    config = IA3Config(
        target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"], init_ia3_weights=False
    )
    rows = words()
    return case_of(sft(rows, model("Mistral"), peft_config=config), whole(rows))


# Losses


class NamesItsInputs(SFTTrainer):
    """Gives the model what it knows of, and no more."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs.get("attention_mask"))
        loss = next_losses(outputs.logits, inputs["labels"]).sum() / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


@setup("either")
def names_its_inputs() -> Case:
    """`compute_loss` that passes ids and mask by name, and nothing else of the batch."""
    rows = words()
    return case_of(sft(rows, kind=NamesItsInputs), whole(rows))


class BackboneThenHead(Trainer):
    """Calls the parts of the model by themselves."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        made = self.accelerator.unwrap_model(model)
        hidden = made.model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).last_hidden_state
        logits = made.lm_head(hidden)
        loss = next_losses(logits, inputs["labels"]).sum() / num_items_in_batch
        return (loss, {"logits": logits}) if return_outputs else loss


@setup("either")
def backbone_then_head() -> Case:
    """`compute_loss` that calls the body and the head of the model, with the mask that the batch must have."""
    rows = words()
    return case_of(plain(BackboneThenHead, "StableLm", arguments(), rows), whole(rows))


class EarlyExit(Trainer):
    """The first block shall predict as well."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs, output_hidden_states=True)
        early = model.lm_head(model.model.norm(outputs.hidden_states[1]))
        each = next_losses(outputs.logits, labels) + 0.3 * next_losses(early, labels)
        loss = each.sum() / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


@setup("keep")
def early_exit() -> Case:
    """A second loss at the hidden states of the first block."""
    rows = words()

    def loss(m: PreTrainedModel, _: list[Ids]) -> torch.Tensor:
        total = []
        for row in rows:
            outputs = m(input_ids=torch.tensor([row]), use_cache=False, output_hidden_states=True)
            early = m.lm_head(m.model.norm(outputs.hidden_states[1]))
            targets = torch.tensor(row[1:])
            total.append(
                F.cross_entropy(outputs.logits[0, :-1], targets, reduction="none")
                + 0.3 * F.cross_entropy(early[0, :-1], targets, reduction="none")
            )
        return torch.cat(total).mean()

    return Case(plain(EarlyExit, "Olmo2", arguments(), rows), loss, rows)


def repeats(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Unlikelihood, summed over targets, of all tokens that were targets before and are not the next one."""
    logits, targets = logits[:, :-1], labels[:, 1:]
    real = targets.ne(IGNORED)
    targets = targets.masked_fill(~real, PAD)
    width = targets.shape[1]
    earlier = targets[:, None, :].expand(-1, width, -1).tril(-1)
    earlier = earlier.masked_fill(earlier == targets[:, :, None], PAD)
    unwanted = torch.zeros_like(logits).scatter(-1, earlier, 1.0)
    unwanted[..., PAD] = 0.0
    each = -torch.log((1 - logits.softmax(-1)).clamp(min=1e-5)) * unwanted
    return each.sum(-1)[real].sum()


class Unlikelihood(Trainer):
    """Tokens shall not come again."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        total = next_losses(outputs.logits, labels).sum() + 0.5 * repeats(outputs.logits, labels)
        return (total / num_items_in_batch, outputs) if return_outputs else total / num_items_in_batch


@setup("either")
def unlikelihood() -> Case:
    """A term that reads all earlier targets of the same row."""
    rows = words()

    def loss(m: PreTrainedModel, _: list[Ids]) -> torch.Tensor:
        terms = [repeats(logits_of(m, row)[None], torch.tensor([row])) for row in rows]
        return learns_all(m, rows) + 0.5 * sum(terms) / sum(len(row) - 1 for row in rows)

    return Case(plain(Unlikelihood, "Llama", arguments(), rows), loss, rows)


class HeadsForCausalLM(LlamaForCausalLM):
    """Further heads for the tokens behind the next one."""

    def __init__(self, config) -> None:
        super().__init__(config)
        self.heads = nn.ModuleList(nn.Linear(config.hidden_size, config.vocab_size, bias=False) for _ in range(2))


class Medusa(Trainer):
    """Each head predicts one token further."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs, output_hidden_states=True)
        loss = next_losses(outputs.logits, labels).sum()
        for far, head in enumerate(model.heads, 2):
            logits, targets = head(outputs.hidden_states[-1])[:, :-far], labels[:, far:]
            each = F.cross_entropy(logits.transpose(1, 2), targets, ignore_index=IGNORED, reduction="sum")
            loss = loss + 0.5 * each
        loss = loss / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


@setup("either")
def medusa() -> Case:
    """Two further heads, whose labels are shifted by two and three."""
    rows = words()
    torch.manual_seed(0)
    made = HeadsForCausalLM(model().config)

    def loss(m: PreTrainedModel, _: list[Ids]) -> torch.Tensor:
        total = 0.0
        for row in rows:
            outputs = m(input_ids=torch.tensor([row]), use_cache=False, output_hidden_states=True)
            ids = torch.tensor(row)
            total = total + F.cross_entropy(outputs.logits[0, :-1], ids[1:], reduction="sum")
            for far, head in enumerate(m.heads, 2):
                logits = head(outputs.hidden_states[-1][0, :-far])
                total = total + 0.5 * F.cross_entropy(logits, ids[far:], reduction="sum")
        return total / sum(len(row) - 1 for row in rows)

    return Case(plain(Medusa, made, arguments(), rows), loss, rows)


class SharpAttention(Trainer):
    """Attention of the last block shall be sharp."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs, output_attentions=True)
        weights = outputs.attentions[-1]
        entropy = -(weights * torch.log(weights + 1e-9)).sum(-1).mean(1)[:, :-1]
        total = next_losses(outputs.logits, labels).sum() + 0.3 * entropy[labels[:, 1:].ne(IGNORED)].sum()
        return (total / num_items_in_batch, outputs) if return_outputs else total / num_items_in_batch


@setup("either")
def attention_entropy() -> Case:
    """A term of the attention's own weights, in a model with attention `eager`."""
    rows, made = words(), model("Llama")
    made.set_attn_implementation("eager")

    def loss(m: PreTrainedModel, _: list[Ids]) -> torch.Tensor:
        entropies = []
        for row in rows:
            weights = m(input_ids=torch.tensor([row]), use_cache=False, output_attentions=True).attentions[-1]
            entropies.append(-(weights * torch.log(weights + 1e-9)).sum(-1).mean(1)[0, :-1])
        return learns_all(m, rows) + 0.3 * torch.cat(entropies).mean()

    return Case(plain(SharpAttention, made, arguments(), rows), loss, rows)


class CountsWeights(Trainer):
    """A mean by the weights of all tokens of an update."""

    def _get_num_items_in_batch(self, batch_samples, device):
        real = [batch["labels"][:, 1:].ne(IGNORED) for batch in batch_samples]
        pairs = zip(batch_samples, real, strict=True)
        return sum((batch["weights"][:, 1:] * is_real).sum() for batch, is_real in pairs)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels, weights = inputs.pop("labels"), inputs.pop("weights")
        outputs = model(**inputs)
        total = (next_losses(outputs.logits, labels) * weights[:, 1:]).sum()
        return (total / num_items_in_batch, outputs) if return_outputs else total / num_items_in_batch


def weighed(rows: list[Ids]) -> list[list[float]]:
    """A weight for each token: 0.25 to 1.75."""
    return [[0.25 * (token % 7) + 0.25 for token in row] for row in rows]


def collate_weights(features: list[dict]) -> dict[str, torch.Tensor]:
    """Rows that are learnt as a whole, with a weight for each token."""
    batch = batch_of([(row["input_ids"], row["input_ids"]) for row in features])
    return {**batch, "weights": padded([row["weights"] for row in features], 0.0)}


@setup("keep")
def counts_weights() -> Case:
    """`_get_num_items_in_batch` that adds weights in place of tokens: the loss is a weighted mean of the update."""
    rows = words()
    weights = weighed(rows)
    args = arguments(remove_unused_columns=False)
    trainer = CountsWeights(model("Granite"), args, collate_weights, table(rows, weights=weights))

    def loss(m: PreTrainedModel, _: list[Ids]) -> torch.Tensor:
        each = torch.cat([losses_of(m, (row, row)) for row in rows])
        weight = torch.tensor([one for some in weights for one in some[1:]], dtype=each.dtype)
        return (each * weight).sum() / weight.sum()

    return Case(trainer, loss, rows)


class DecaysByArguments(Trainer):
    """A penalty of the embedding, shared out among the batches of an update by the arguments."""

    def num_batches(self) -> int:
        return self.args.gradient_accumulation_steps

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        penalty = model.get_input_embeddings().weight.pow(2).sum()
        loss = loss + 0.02 * penalty / self.num_batches()
        return (loss, outputs) if return_outputs else loss


class DecaysByCount(DecaysByArguments):
    """The same, by the number of batches that this update really has."""

    def num_batches(self) -> int:
        return self.current_gradient_accumulation_steps


def decayed(kind: type[Trainer]) -> Case:
    """A trainer with a penalty that counts once per update."""
    rows = words()

    def loss(m: PreTrainedModel, _: list[Ids]) -> torch.Tensor:
        return learns_all(m, rows) + 0.02 * m.get_input_embeddings().weight.pow(2).sum()

    return Case(plain(kind, "Llama", arguments(), rows), loss, rows)


@setup("either")
def penalty_by_arguments() -> Case:
    """A penalty of weights divided by `args.gradient_accumulation_steps`."""
    return decayed(DecaysByArguments)


@setup("keep")
def penalty_by_count() -> Case:
    """A penalty of weights divided by `current_gradient_accumulation_steps`."""
    return decayed(DecaysByCount)


def squared_norm(logits: torch.Tensor) -> torch.Tensor:
    """The square of the logarithm of the sum of exponentials of each position."""
    return torch.logsumexp(logits, -1) ** 2


class Ramp(Trainer):
    """A term that fades while the trainer goes on."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        share = 0.1 * (1 - self.state.global_step / self.state.max_steps)
        real = labels[:, 1:].ne(IGNORED)
        total = next_losses(outputs.logits, labels).sum() + share * squared_norm(outputs.logits[:, :-1])[real].sum()
        return (total / num_items_in_batch, outputs) if return_outputs else total / num_items_in_batch


@setup("keep")
def fades_by_progress() -> Case:
    """A z-loss by `state.global_step / state.max_steps`, which a trainer that does not train yet divides by zero."""
    rows = words()

    def loss(m: PreTrainedModel, _: list[Ids]) -> torch.Tensor:
        norms = torch.cat([squared_norm(logits_of(m, row)[:-1]) for row in rows])
        return learns_all(m, rows) + 0.1 * norms.mean()

    return Case(plain(Ramp, "GPTNeoX", arguments(), rows), loss, rows)


class Confident(Trainer):
    """Takes the entropy off by a share that a callback sets."""

    share = 0.0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        entropy = torch.distributions.Categorical(logits=outputs.logits[:, :-1]).entropy()
        total = next_losses(outputs.logits, labels) - self.share * entropy * labels[:, 1:].ne(IGNORED)
        loss = total.sum() / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


class SetsShare(TrainerCallback):
    """Sets the share when a step begins."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def on_step_begin(self, args, state, control, **kwargs):
        self.trainer.share = 0.2


@setup("keep")
def share_by_callback() -> Case:
    """A factor of the loss that is zero until a callback sets it."""
    rows = words()
    trainer = plain(Confident, "Qwen3", arguments(), rows)
    trainer.add_callback(SetsShare(trainer))

    def loss(m: PreTrainedModel, _: list[Ids]) -> torch.Tensor:
        entropies = [torch.distributions.Categorical(logits=logits_of(m, row)[:-1]).entropy() for row in rows]
        return learns_all(m, rows) - 0.2 * torch.cat(entropies).mean()

    return Case(trainer, loss, rows)


class LogsItsParts(SFTTrainer):
    """Adds up its losses, and logs the sum."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.parts = []

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        self.parts.append(loss.item())
        return loss

    def log(self, logs, *args, **kwargs):
        if self.parts:
            logs["sum_of_parts"] = sum(self.parts)
            self.parts.clear()
        super().log(logs, *args, **kwargs)


@setup("keep")
def logs_its_parts() -> Case:
    """A list of losses on the trainer, whose sum is logged after each update."""
    rows = words()
    trainer = sft(rows, kind=LogsItsParts, logging_strategy="steps", logging_steps=1)

    def check(run: Run, m: PreTrainedModel) -> str:
        logged = [one["sum_of_parts"] for one in run.trainer.state.log_history if "sum_of_parts" in one]
        true = learns_all(m, rows).item()
        return "" if len(logged) == 1 and abs(logged[0] - true) < TOLERANCE else f"logged {logged}, of {true:.5g}"

    return case_of(trainer, whole(rows), check=check)


class HardestTokens(Trainer):
    """Learns the harder half of a batch's tokens."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        each = next_losses(outputs.logits, labels)[labels[:, 1:].ne(IGNORED)]
        loss = each.topk(len(each) // 2).values.mean()
        return (loss, outputs) if return_outputs else loss


@setup("either")
def hardest_tokens() -> Case:
    """The harder half of the tokens of an update, which is one batch."""
    rows = words()

    def loss(m: PreTrainedModel, _: list[Ids]) -> torch.Tensor:
        each = torch.cat([losses_of(m, (row, row)) for row in rows])
        return each.topk(len(each) // 2).values.mean()

    return Case(plain(HardestTokens, "Llama", arguments(12, 1), rows), loss, rows)


class IgnoresPadding(Trainer):
    """Takes the padding token for what is not learnt."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits, targets = outputs.logits[:, :-1].reshape(-1, VOCAB), labels[:, 1:].reshape(-1)
        loss = F.cross_entropy(logits, targets, ignore_index=PAD)
        return (loss, outputs) if return_outputs else loss


@setup("either")
def ignores_padding() -> Case:
    """Labels that are the padded ids, and a loss with `ignore_index=pad_token_id`; all rows are one batch."""
    rows = words()

    def collate(features: list[dict]) -> dict[str, torch.Tensor]:
        ids = padded([row["input_ids"] for row in features], PAD)
        return {"input_ids": ids, "attention_mask": ids.ne(PAD).long(), "labels": ids.clone()}

    return case_of(IgnoresPadding(model("Llama"), arguments(12, 1), collate, table(rows)), whole(rows))


@setup("keep")
def dynamic_fine_tuning() -> Case:
    """`loss_type="dft"` of TRL: each token's loss by its own probability."""
    rows = words()

    def loss(m: PreTrainedModel, _: list[Ids]) -> torch.Tensor:
        each = torch.cat([losses_of(m, (row, row)) for row in rows])
        return (each * torch.exp(-each).detach()).mean()

    return Case(sft(rows, model("Gemma2"), loss_type="dft"), loss, rows)


class LabelsItself(Trainer):
    """Makes labels of the ids that it is given."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, IGNORED)
        outputs = model(**inputs, labels=labels)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


@setup("either")
def labels_in_the_loss() -> Case:
    """A collator that only pads, and labels that `compute_loss` makes; all rows are one batch."""
    rows = words()
    collator = DataCollatorWithPadding(tokenizer())
    return case_of(LabelsItself(model("Llama"), arguments(12, 1), collator, table(rows)), whole(rows))


# Steps of training


class Adversarial(Trainer):
    """Moves the embedding against the gradient so far, and adds the gradient from there."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, dict(inputs), num_items_in_batch)
        weight = model.get_input_embeddings().weight
        kept = weight.data.clone()
        weight.data.add_(0.5 * weight.grad / weight.grad.norm())
        super().training_step(model, dict(inputs), num_items_in_batch)
        weight.data.copy_(kept)
        return loss


def adversarial(batch: int, accumulate: int) -> Case:
    """A trainer of the fast gradient method, for which the whole update is one step."""
    rows = words()

    def loss(m: PreTrainedModel, _: list[Ids]) -> torch.Tensor:
        first = true_gradient(m, learns_all(m, rows))
        weight = m.get_input_embeddings().weight
        way = weight.grad / weight.grad.norm()
        weight.data.add_(0.5 * way)
        second = true_gradient(m, learns_all(m, rows))
        weight.data.sub_(0.5 * way)
        return towards(m, {name: value + second[name] for name, value in first.items()})

    return Case(plain(Adversarial, "Llama", arguments(batch, accumulate), rows), loss, rows)


@setup("either")
def fgm() -> Case:
    """`training_step` with a second gradient of an embedding that was moved, an update being one batch."""
    return adversarial(12, 1)


@setup("refuse", padded_is_true=False)
def fgm_of_small_batches() -> Case:
    """The same with six batches per update: each moves the embedding otherwise, and so would other batches."""
    return adversarial(2, 6)


@setup("refuse", padded_is_true=False)
def clamps_gradients() -> Case:
    """A hook that clamps the gradient of the head, of each batch instead of the update."""
    rows, made = words(), model("Llama")
    made.lm_head.weight.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))

    def loss(m: PreTrainedModel, _: list[Ids]) -> torch.Tensor:
        wanted = true_gradient(m, learns_all(m, rows))
        wanted["lm_head.weight"] = wanted["lm_head.weight"].clamp(-1e-3, 1e-3)
        return towards(m, wanted)

    return Case(plain(Trainer, made, arguments(), rows), loss, rows)


# Collators and data


@setup("refuse")
def unknown_is_padding() -> Case:
    """Padding with the unknown token, and a mask of what is not it: unknown words inside are hidden as well."""
    rows = words()
    rows = [[*(UNK if at % 5 == 3 else token for at, token in enumerate(row[:-1])), EOS] for row in rows]

    def collate(features: list[dict]) -> dict[str, torch.Tensor]:
        ids = padded([row["input_ids"] for row in features], UNK)
        labels = padded([row["input_ids"] for row in features], IGNORED)
        return {"input_ids": ids, "attention_mask": ids.ne(UNK).long(), "labels": labels}

    def loss(m: PreTrainedModel, _: list[Ids]) -> torch.Tensor:
        masks = [torch.tensor([row]).ne(UNK).long() for row in rows]
        pairs = zip(rows, masks, strict=True)
        return torch.cat([losses_of(m, (row, row), attention_mask=mask) for row, mask in pairs]).mean()

    return Case(Trainer(model("Llama"), arguments(), collate, table(rows)), loss)


def sees_its_prompt(row: Ids, width: int) -> torch.Tensor:
    """A mask (width, width) where the tokens up to `SEP` see each other."""
    mask = torch.ones(width, width, dtype=torch.bool).tril()
    end = row.index(SEP) + 1
    mask[:end, :end] = True
    return mask


@setup("refuse")
def prefix_sees_itself() -> Case:
    """A collator with a mask of four dimensions, in which prompts are seen as a whole."""
    rows = with_prompts(words())
    examples = [(row, after(row, SEP)) for row in rows]

    def collate(features: list[dict]) -> dict[str, torch.Tensor]:
        batch = batch_of([(row["input_ids"], row["labels"]) for row in features])
        width = batch["input_ids"].shape[1]
        batch["attention_mask"] = torch.stack([sees_its_prompt(row["input_ids"], width)[None] for row in features])
        return batch

    def loss(m: PreTrainedModel, _: list[Ids]) -> torch.Tensor:
        masks = [sees_its_prompt(row, len(row))[None, None] for row in rows]
        pairs = zip(examples, masks, strict=True)
        return torch.cat([losses_of(m, example, attention_mask=mask) for example, mask in pairs]).mean()

    data = table(rows, labels=[labels for _, labels in examples])
    return Case(Trainer(model("Llama"), arguments(), collate, data), loss, rows)


@setup("keep")
def templates_in_the_collator() -> Case:
    """An SFTTrainer whose data stay messages; the collator writes them by the template and masks by its marks."""
    tok, talks, examples = tokenizer(), [], []
    for row in words(low=6):
        question, answer = row[1:4], row[4:-1]
        talks.append([{"role": "user", "content": text(question)}, {"role": "assistant", "content": text(answer)}])
        ids = [USER, *question, END, ASSISTANT, *answer, END]
        examples.append((ids, [IGNORED] * (len(question) + 3) + ids[len(question) + 3 :]))

    def collate(features: list[dict]) -> dict[str, torch.Tensor]:
        batch = tok.apply_chat_template(
            [row["messages"] for row in features],
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            padding=True,
            return_tensors="pt",
        )
        mask = torch.as_tensor(batch["assistant_masks"])
        labels = batch["input_ids"].masked_fill(mask == 0, IGNORED)
        return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "labels": labels}

    args = sft_arguments(dataset_kwargs={"skip_prepare_dataset": True}, remove_unused_columns=False)
    data = Dataset.from_dict({"messages": talks})
    trainer = SFTTrainer(model("Qwen3"), args, collate, data, processing_class=tok)
    return case_of(trainer, examples)


def odds(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The logarithm of the odds of each row, by its mean over targets."""
    mean = -next_losses(logits, labels).sum(-1) / labels[:, 1:].ne(IGNORED).sum(-1)
    return mean - torch.log1p(-torch.exp(mean))


class OddsRatio(Trainer):
    """ORPO as people write it: the first half of a batch is chosen, the second rejected."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        chosen, rejected = odds(outputs.logits, labels).chunk(2)
        half = len(labels) // 2
        likely = F.cross_entropy(
            outputs.logits[:half, :-1].flatten(0, 1), labels[:half, 1:].flatten(), ignore_index=IGNORED
        )
        loss = likely - 0.5 * F.logsigmoid(chosen - rejected).mean()
        return (loss, outputs) if return_outputs else loss


@setup("refuse")
def odds_ratio() -> Case:
    """Pairs of answers, of which the collator makes two rows each; all pairs are one batch."""
    pairs = list(zip(words(6), words(6, 5), strict=True))

    def collate(features: list[dict]) -> dict[str, torch.Tensor]:
        rows = [row["chosen"] for row in features] + [row["rejected"] for row in features]
        return batch_of([(row, row) for row in rows])

    def loss(m: PreTrainedModel, _: list[Ids]) -> torch.Tensor:
        gaps = []
        for pair in pairs:
            chosen, rejected = (odds(logits_of(m, row)[None], torch.tensor([row])) for row in pair)
            gaps.append(F.logsigmoid(chosen - rejected))
        return learns_all(m, [row for row, _ in pairs]) - 0.5 * torch.cat(gaps).mean()

    data = Dataset.from_dict({"chosen": [one for one, _ in pairs], "rejected": [two for _, two in pairs]})
    args = arguments(6, 1, remove_unused_columns=False)
    return Case(OddsRatio(model("Llama"), args, collate, data), loss, [row for pair in pairs for row in pair])


@setup("either")
def positions_that_skip() -> Case:
    """Positions that jump in the middle of each row, to train for longer texts."""
    rows = words()
    jumps = [10 + 5 * index for index in range(len(rows))]

    def placed(row: Ids, jump: int) -> list[int]:
        return [at + jump * (at >= len(row) // 2) for at in range(len(row))]

    def collate(features: list[dict]) -> dict[str, torch.Tensor]:
        batch = batch_of([(row["input_ids"], row["input_ids"]) for row in features])
        return {**batch, "position_ids": padded([placed(row["input_ids"], row["jump"]) for row in features], 0)}

    def loss(m: PreTrainedModel, _: list[Ids]) -> torch.Tensor:
        pairs = zip(rows, jumps, strict=True)
        each = []
        for row, jump in pairs:  # without a mask, transformers takes a jump for the begin of another sequence
            seen = {"position_ids": torch.tensor([placed(row, jump)]), "attention_mask": torch.ones(1, len(row)).long()}
            each.append(losses_of(m, (row, row), **seen))
        return torch.cat(each).mean()

    args = arguments(remove_unused_columns=False)
    return Case(Trainer(model("Llama"), args, collate, table(rows, jump=jumps)), loss, rows)


class Infilling(torch.utils.data.Dataset):
    """Arrays in which the middle was moved to the end."""

    def __init__(self, rows: list[Ids]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        row = self.rows[int(index)]
        first, second = len(row) // 3, 2 * len(row) // 3
        moved = [BOS, SEP, *row[1:first], USER, *row[second:-1], ASSISTANT, *row[first:second], EOS]
        return {"input_ids": np.array(moved), "labels": np.array(moved)}


@setup("keep")
def infilling_by_kind() -> Case:
    """Prefix, suffix and middle by a map-style dataset of arrays; rows of a rare kind are taken several times."""
    data = Infilling(words(9))
    order = [0, 1, 2, 3, 4, 5, 6, 7, 8, 2, 5, 2]
    examples = [tuple(data[index]["input_ids"].tolist() for _ in range(2)) for index in order]

    def collate(features: list[dict]) -> dict[str, torch.Tensor]:
        return batch_of([(row["input_ids"].tolist(), row["labels"].tolist()) for row in features])

    return case_of(Trainer(model("Starcoder2"), arguments(), collate, Subset(data, order)), examples)


# Callbacks, optimizers and evaluation


class Thaws(TrainerCallback):
    """Holds the lower half of a model for one update."""

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        lower(model).requires_grad_(False)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        lower(model).requires_grad_(True)


def lower(made: PreTrainedModel) -> nn.ModuleList:
    """The embedding and the first block."""
    return nn.ModuleList([made.model.embed_tokens, made.model.layers[0]])


def rate(name: str) -> float:
    """A learning rate that is smaller the deeper a parameter lies."""
    return SHARP * (0.25 if "embed" in name else 0.5 if "layers.0." in name else 1.0)


class Layerwise(SFTTrainer):
    """A group of parameters for each rate."""

    def create_optimizer(self, model=None):
        named = list(self.model.named_parameters())
        rates = sorted({rate(name) for name, _ in named})
        groups = [{"params": [p for name, p in named if rate(name) == one], "lr": one} for one in rates]
        self.optimizer = torch.optim.SGD(groups)
        return self.optimizer


@setup("keep")
def thaws_layer_by_layer() -> Case:
    """`create_optimizer` with a rate for each depth, and a callback that freezes the lower half for one update."""
    rows = words()
    trainer = sft(rows, model("Llama"), Layerwise, max_steps=2, learning_rate=SHARP)
    trainer.add_callback(Thaws())

    def is_held(name: str) -> bool:
        return "embed" in name or "layers.0." in name

    def loss(m: PreTrainedModel, _: list[Ids]) -> torch.Tensor:
        wanted = true_gradient(m, learns_all(m, rows))
        return towards(m, {name: value for name, value in wanted.items() if not is_held(name)})

    def check(run: Run, m: PreTrainedModel) -> str:
        start = copy.deepcopy(m)
        for step in range(2):
            grads = true_gradient(m, learns_all(m, rows))
            with torch.no_grad():
                for name, value in m.named_parameters():
                    value -= 0.0 if step == 0 and is_held(name) else rate(name) * grads[name]
        return astray(run.trainer.model, m, start)

    return Case(trainer, loss, rows, check)


@setup("either")
def other_data_in_a_second_stage() -> Case:
    """Two calls of `train`, with another `train_dataset` put on the trainer in between."""
    first, second = words(), words(12, 77)
    trainer = plain(Trainer, "Llama", arguments(learning_rate=SHARP), first)

    def train(one: Trainer) -> None:
        one.train()
        one.train_dataset = table(second)
        one.train()

    def check(run: Run, m: PreTrainedModel) -> str:
        start = copy.deepcopy(m)
        *_, end = descent(m, [first, second], learns_all)
        return astray(run.trainer.model, end, start)

    return Case(trainer, lambda m, _: learns_all(m, first), first, check, train=train)


PROMPTS = [[BOS, 20, 31, 42, 53], [BOS, 60], [BOS, 17, 90, 33]]
NEW = 6


class Samples(TrainerCallback):
    """Writes on from prompts when training begins, padded on the left."""

    def __init__(self) -> None:
        self.written = []

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        model.eval()
        ids = padded(PROMPTS, PAD, left=True)
        out = model.generate(
            input_ids=ids, attention_mask=ids.ne(PAD).long(), max_new_tokens=NEW, do_sample=False, pad_token_id=PAD
        )
        self.written = [row[ids.shape[1] :].tolist() for row in out]
        model.train()


@setup("keep")
def writes_while_training() -> Case:
    """A callback that generates from prompts padded on the left, with a cache."""
    rows, samples = words(), Samples()
    trainer = plain(Trainer, "Qwen3", arguments(), rows)
    trainer.add_callback(samples)

    def check(_: Run, m: PreTrainedModel) -> str:
        for prompt, written in zip(PROMPTS, samples.written, strict=True):
            ids = list(prompt)
            while len(ids) < len(prompt) + NEW and ids[-1] != EOS:
                ids.append(int(logits_of(m, ids)[-1].argmax()))
            true = ids[len(prompt) :]
            if written[: len(true)] != true:
                return f"wrote {written}, of {true}"
        return ""

    return case_of(trainer, whole(rows), check=check)


class WeightsTokens(Trainer):
    """A sum by weights, over the number of tokens."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels, weights = inputs.pop("labels"), inputs.pop("weights")
        outputs = model(**inputs)
        loss = (next_losses(outputs.logits, labels) * weights[:, 1:]).sum() / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


def weighted_accuracy(result: object) -> Measures:
    """Of metrics that get labels and weights, filled up with -100."""
    labels, weights = result.label_ids
    real = labels[:, 1:] != IGNORED
    hit = (result.predictions[:, :-1] == labels[:, 1:])[real]
    weight = weights[:, 1:][real]
    return {"weighted": float((hit * weight).sum() / weight.sum())}


@setup("keep")
def metrics_of_two_labels() -> Case:
    """`label_names` with a column of weights, which loss and metrics take."""
    rows, some = words(), words(7, 31)
    held_out = table(some, weights=weighed(some))
    args = arguments(remove_unused_columns=False, label_names=["labels", "weights"], per_device_eval_batch_size=2)
    trainer = WeightsTokens(
        model("Llama"),
        args,
        collate_weights,
        table(rows, weights=weighed(rows)),
        held_out,
        compute_metrics=weighted_accuracy,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
    )

    def loss(m: PreTrainedModel, _: list[Ids]) -> torch.Tensor:
        each = torch.cat([losses_of(m, (row, row)) for row in rows])
        return (each * torch.tensor([one for some in weighed(rows) for one in some[1:]], dtype=each.dtype)).mean()

    def measured(m: PreTrainedModel) -> Measures:
        hits, weights = 0.0, 0.0
        for row, weight in zip(some, weighed(some), strict=True):
            logits, targets = predictions(m, (row, row))
            hits += float(((logits.argmax(-1) == targets) * torch.tensor(weight[1:])).sum())
            weights += sum(weight[1:])
        return {"eval_weighted": hits / weights}

    return Case(trainer, loss, rows, measure=lambda one: one.evaluate(), measured=measured)


if __name__ == "__main__":
    main()
