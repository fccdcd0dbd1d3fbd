"""Ways to train in further families, sound and faulty, chosen after the engine was final and not used to change it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import datasets
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DataCollatorForLanguageModeling, DataCollatorForSeq2Seq, DataCollatorWithFlattening, Trainer

from tests.proof.foreign.hugging_face import COMMON, IGNORE, build, flatten, pad, sft, tokenizer, trainer
from tests.proof.foreign.setups import Batch, Rows, packed, right, with_positions, without
from unpad.proof.foreign.collators import trl_packed, trl_padding_free
from unpad.proof.foreign.small_model import build_config, build_small

VOCABULARY = 60  # ids of ordinary tokens of every small model: 8 to 59


def drawn(lengths: Sequence[int], seed: int = 11) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(8, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


ROWS = drawn((7, 19, 4, 26, 11, 2))


# Fields without which a class of transformers does not make a model.
FIELDS: dict[str, dict[str, object]] = {
    "nemotron": {"num_key_value_heads": 8, "head_dim": 128},
    "hunyuan_v1_dense": {"head_dim": 128},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1},
}


def small(kind: str) -> nn.Module:
    return build_small(build_config(kind, FIELDS.get(kind, {}), kind)).model


@dataclass(frozen=True)
class Way:
    """A model type with fields of its configuration, and a collator."""

    kind: str
    collate: Callable[..., object]
    rows: Rows = tuple(map(tuple, ROWS))
    masks: list[list[bool]] | None = None
    change: Callable[[nn.Module], nn.Module] = lambda model: model


def language_modeling(rows: Rows) -> Batch:
    return dict(DataCollatorForLanguageModeling(tokenizer(), mlm=False)([{"input_ids": list(one)} for one in rows]))


def seq2seq(rows: Rows, masks: Sequence[Sequence[bool]]) -> Batch:
    labels = [[t if keep else IGNORE for t, keep in zip(r, m, strict=True)] for r, m in zip(rows, masks, strict=True)]
    examples = [{"input_ids": list(row), "labels": label} for row, label in zip(rows, labels, strict=True)]
    return dict(DataCollatorForSeq2Seq(tokenizer(), pad_to_multiple_of=8)(examples))


def flash_kwargs(rows: Rows) -> Batch:
    """Flattening with the arguments of FlashAttention."""
    made = DataCollatorWithFlattening(return_flash_attn_kwargs=True)([{"input_ids": list(one)} for one in rows])
    return {**made, "use_cache": False}


def two_packed(rows: Rows) -> list[Batch]:
    return [packed(rows[:3]), packed(rows[3:])] if len(rows) > 3 else [packed(rows)]


def one_each(rows: Rows) -> list[Batch]:
    return [right([one]) for one in rows]


def shift_labels(batch: Batch) -> Batch:
    """Labels that are already shifted."""
    return {**without(batch, "labels"), "shift_labels": F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORE)}


def only_last(rows: Rows) -> Batch:
    """One target per sequence."""
    batch = right(rows)
    lengths = batch["attention_mask"].sum(1, keepdim=True)
    last = torch.arange(batch["labels"].shape[1]) == lengths - 1
    return {**batch, "labels": batch["labels"].masked_fill(~last, IGNORE)}


def boolean_mask(rows: Rows) -> Batch:
    batch = right(rows)
    return {**batch, "attention_mask": batch["attention_mask"].bool()}


def tied(model: nn.Module) -> nn.Module:
    model.config.tie_word_embeddings = True
    model.tie_weights()
    return model


def no_biases(model: nn.Module) -> nn.Module:
    """Only matrices learn."""
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.dim() > 1)
    return model


def in_fp64(model: nn.Module) -> nn.Module:
    return model.double()


TAILS = [[at + 3 >= len(one) for at in range(len(one))] for one in ROWS]

SOUND: dict[str, Way] = {
    "cohere, packed by TRL": Way("cohere", trl_packed("bfd", 48)),
    "cohere2, a window": Way("cohere2", packed),
    "starcoder2, padding_free": Way("starcoder2", trl_padding_free),
    "stablelm, language modeling": Way("stablelm", language_modeling),
    "glm4, arguments of FlashAttention": Way("glm4", flash_kwargs),
    "nemotron, split packs": Way("nemotron", trl_packed("bfd_split", 32)),
    "exaone4, two packed rows": Way("exaone4", two_packed),
    "ernie4_5, replies of three tokens": Way("ernie4_5", seq2seq, masks=TAILS),
    "olmoe, packed experts": Way("olmoe", packed),
    "deepseek_v3, latent attention": Way("deepseek_v3", right),
    "helium, shifted labels": Way("helium", lambda rows: shift_labels(packed(rows))),
    "gptj, one target each": Way("gptj", only_last),
    "gpt_neo, learned positions packed": Way("gpt_neo", right),
    "biogpt, padded": Way("biogpt", right),
    "xglm, sinusoids": Way("xglm", right),
    "mpt, ALiBi": Way("mpt", right),
    "jamba, padded": Way("jamba", right),
    "recurrent_gemma, padded": Way("recurrent_gemma", right),
    "arcee, tied": Way("arcee", packed, change=tied),
    "seed_oss, boolean mask": Way("seed_oss", boolean_mask),
    "hunyuan_v1_dense, one batch each": Way("hunyuan_v1_dense", one_each),
    "persimmon, only matrices learn": Way("persimmon", packed, change=no_biases),
    "phimoe, padded experts": Way("phimoe", right),
    "dots1, padded": Way("dots1", right),
    "codegen, padded with positions": Way("codegen", lambda rows: with_positions(right(rows))),
    "minimax, padded": Way("minimax", right),
    "falcon_mamba, padded": Way("falcon_mamba", right),
    "llama, equal lengths without a mask": Way(
        "llama", lambda rows: without(right(rows), "attention_mask"), rows=tuple(map(tuple, drawn((9, 9, 9)))),
    ),
}  # fmt: skip


def off_by_one(rows: Rows) -> Batch:
    """Positions restart a token late."""
    batch = packed(rows)
    return {**batch, "position_ids": batch["position_ids"].roll(1, 1)}


def joined_pairs(rows: Rows) -> Batch:
    """Positions restart only at every second sequence."""
    merged = [[*rows[at], *(rows[at + 1] if at + 1 < len(rows) else [])] for at in range(0, len(rows), 2)]
    return {**packed(rows), "position_ids": packed(merged)["position_ids"]}


def mask_covers_padding(rows: Rows) -> Batch:
    """Padded on the left, first labels masked, a mask of ones."""
    batch = pad("left")([{"input_ids": list(one)} for one in rows])
    first = batch["attention_mask"].cumsum(1) == 1
    ones = torch.ones_like(batch["attention_mask"])
    return {**batch, "labels": batch["labels"].masked_fill(first, IGNORE), "attention_mask": ones}


def last_lost(rows: Rows) -> Batch:
    """The last token of each longer sequence is lost."""
    return right([one[:-1] if len(one) > 4 else one for one in rows])


def mask_late(rows: Rows, masks: Sequence[Sequence[bool]]) -> Batch:
    """Replies begin a token late."""
    late = [[keep and (at == 0 or mask[at - 1]) for at, keep in enumerate(mask)] for mask in masks]
    return seq2seq(rows, late)


def swapped(rows: Rows) -> Batch:
    """Two tokens of the first sequence have each other's labels."""
    batch = right(rows)
    labels = batch["labels"].clone()
    labels[0, [1, 2]] = labels[0, [2, 1]] if len(rows[0]) > 2 else labels[0, [1, 2]]
    return {**batch, "labels": labels}


def separated(rows: Rows) -> Batch:
    """A token of no sequence between all of them, as a target."""
    return packed([[*one, 7] for one in rows]) if len(rows) > 1 else packed(rows)


class Normed(nn.Module):
    """A model whose logits are normalised over the batch."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        logits: Tensor = self.inner(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
        return logits - logits.mean((0, 1), keepdim=True)


FAULTS: dict[str, tuple[Way, str]] = {
    "cohere, joined rows": (Way("cohere", trl_packed("wrapped", 24)), "leaking"),
    "starcoder2, positions a token late": (Way("starcoder2", off_by_one), "leaking"),
    "stablelm, pairs joined": (Way("stablelm", joined_pairs), "leaking"),
    "glm4, padding attended": (Way("glm4", mask_covers_padding), "leaking"),
    "exaone4, last tokens lost": (Way("exaone4", last_lost), "cut"),
    "ernie4_5, replies a token late": (Way("ernie4_5", mask_late, masks=TAILS), "wrong loss"),
    "olmoe, swapped labels": (Way("olmoe", swapped), "wrong loss"),
    "helium, a token between": (Way("helium", separated), "wrong loss"),
    "arcee, means over the batch": (Way("arcee", right, change=Normed), "leaking"),
    "biogpt, packed": (Way("biogpt", packed), "leaking"),
    "jamba, packed": (Way("jamba", packed), "leaking"),
    "mpt, packed": (Way("mpt", packed), "leaking"),
    "recurrent_gemma, packed": (Way("recurrent_gemma", packed), "leaking"),
    "kimi_linear, padding_free by TRL": (Way("kimi_linear", trl_padding_free), "refused"),
}


class Summed(Trainer):
    """The sum over targets, not their mean."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        output = model(**inputs)
        return output.loss * (inputs["labels"][:, 1:] != IGNORE).sum()


class Stopped(Trainer):
    """A step whose gradient of the embeddings is lost."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        model.get_input_embeddings().weight.grad = None
        return loss


class Weighted(Trainer):
    """A loss of its own: later targets weigh more."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[:, :-1]
        wanted = inputs["labels"][:, 1:]
        each = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=IGNORE, reduction="none")
        weight = 1 + torch.arange(wanted.shape[1]).expand_as(wanted).flatten() / 10
        return (each * weight).sum() / num_items_in_batch


def conversations(folder: Path, **changes: object) -> Trainer:
    """An SFTTrainer on conversations, of which replies are targets."""
    from trl import SFTConfig, SFTTrainer

    words = tokenizer()
    words.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}t3 {{ m['content'] }} t4 "
        "{% else %}{% generation %}{{ m['content'] }} t2 {% endgeneration %}{% endif %}{% endfor %}"
    )
    turns = [[" ".join(f"t{token}" for token in part) for part in (one[:3], one[3:])] for one in ROWS if len(one) > 4]
    rows = [[{"role": "user", "content": a}, {"role": "assistant", "content": b}] for a, b in turns]
    data = datasets.Dataset.from_dict({"messages": rows})
    fields = {**COMMON, "bf16": False, "max_length": 64, "assistant_only_loss": True, **changes}
    args = SFTConfig(output_dir=str(folder), **fields)
    return SFTTrainer(model=build("qwen3"), args=args, train_dataset=data, processing_class=words)


Make = Callable[[Path], Trainer]
TRAINERS_SOUND: dict[str, Make] = {
    "conversations": conversations,
    "conversations, packed": lambda folder: conversations(folder, packing=True),
    "conversations, padding_free": lambda folder: conversations(folder, padding_free=True, max_length=None),
    "by length": lambda folder: trainer(small("glm4"), folder, train_sampling_strategy="group_by_length"),
    "bf16": lambda folder: trainer(small("cohere").bfloat16(), folder, collator=flatten, bf16=True),
    "DFT": lambda folder: sft(small("arcee"), folder, loss_type="dft", packing=True),
    "weighted targets": lambda folder: trainer(small("helium"), folder, kind=Weighted),
    "one sequence": lambda folder: trainer(
        small("stablelm"), folder, per_device_train_batch_size=1, gradient_accumulation_steps=1
    ),
}
TRAINERS_FAULTY: dict[str, tuple[Make, str]] = {
    "a sum": (lambda folder: trainer(small("helium"), folder, kind=Summed), "wrong loss"),
    "a gradient stopped": (lambda folder: trainer(small("cohere"), folder, kind=Stopped), "wrong loss"),
    "conversations joined": (
        lambda folder: conversations(folder, packing=True, packing_strategy="wrapped", max_length=24), "leaking",
    ),
    "a leak under TRL": (lambda folder: sft(small("biogpt"), folder, packing=True), "leaking"),
    "no loss arguments": (lambda folder: without_loss_arguments(trainer(small("glm4"), folder)), "wrong loss"),
}  # fmt: skip


def without_loss_arguments(one: Trainer) -> Trainer:
    """A trainer that does not tell the model how many targets there are."""
    one.model_accepts_loss_kwargs = False
    return one
