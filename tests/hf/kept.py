"""Set-ups of trainers for `attach`, by the first column of the table in docs/internals/attach.md, with their truth."""

import copy
import itertools
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.hf.families import IGNORED, SHARED, VOCAB, distance, make_model, make_rows, make_sequences
from tests.hf.trainers import Backwards, Recorder, make_trainer, tokenizer, trained

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from peft import LoraConfig, PrefixTuningConfig, PromptEncoderConfig, PromptTuningConfig, get_peft_model
    from transformers import (
        AutoConfig,
        AutoModelForMaskedLM,
        AutoModelForSeq2SeqLM,
        AutoModelForSequenceClassification,
        AutoModelForTokenClassification,
        DataCollatorForLanguageModeling,
        DataCollatorWithFlattening,
        DataCollatorWithPadding,
        Trainer,
        TrainerCallback,
        default_data_collator,
    )
    from transformers import DataCollatorForSeq2Seq as Padded
    from transformers.loss.loss_utils import ForCausalLMLoss
    from trl import SFTTrainer

from unpad import prove_trainer
from unpad.errors import UnpadError
from unpad.hf import attach

SEQUENCES = make_sequences(8, seed=5, low=4, high=30)
ROWS = make_rows(SEQUENCES)
HELD_OUT = make_sequences(9, seed=7, low=4, high=20)
Pairs = list[tuple[list[int], list[int]]]  # tokens and labels of sequences


def data(rows: Sequence[Mapping[str, Any]]) -> datasets.Dataset:
    return datasets.Dataset.from_list([dict(row) for row in rows])


def alone(rows: Sequence[Sequence[int]]) -> datasets.Dataset:
    return data([{"input_ids": list(row)} for row in rows])


# --------------------------------------------------------------------------- truth


def truth_of(model: nn.Module, pairs: Pairs) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradient of a fresh copy in fp64, one sequence at a time, divided by all targets."""
    one = type(model)(copy.deepcopy(model.config))
    one.load_state_dict(model.state_dict())
    one = one.double().train()
    one.set_attn_implementation("eager")
    count = sum(label != IGNORED for _, labels in pairs for label in labels[1:])
    total = 0.0
    for ids, labels in pairs:
        if any(label != IGNORED for label in labels[1:]):
            logits = one(input_ids=torch.tensor([ids]), use_cache=False).logits[0].double()
            share = F.cross_entropy(logits[:-1], torch.tensor(labels[1:]), reduction="sum") / count
            share.backward()
            total += float(share.detach())
    return total, {name: p.grad for name, p in one.named_parameters() if p.grad is not None}


def error_of(trainer: Trainer, wanted: Mapping[str, Tensor]) -> float:
    """Distance of the gradients of an epoch in one update, in which nothing is learnt."""
    recorder = trained(trainer)
    assert recorder.num_steps == 1
    return distance(recorder.gradient, wanted)


def kept(trainer: Trainer, pairs: Pairs, prove: bool = True, warns: str = "") -> None:
    """After `attach` the update is that of the sequences, and the certificate is of the trainer before."""
    _, wanted = truth_of(trainer.model, pairs)
    with pytest.warns(UserWarning, match=warns) if warns else nullcontext():
        attachment = attach(trainer, tokens_per_micro=64, prove=prove)
    assert not prove or attachment.certificate is not None
    certificate = prove_trainer(trainer)
    assert certificate.passed, str(certificate)
    assert error_of(trainer, wanted) < 1e-5


def refused(trainer: Trainer, message: str) -> None:
    """`attach` refuses by this name, with and without a proof, and leaves the trainer as it was."""
    kind, attention = type(trainer), getattr(trainer.model.config, "_attn_implementation", None)
    with pytest.raises(UnpadError, match=message):
        attach(trainer)
    assert type(trainer) is kind
    assert vars(trainer).get("attachment") is None
    assert getattr(trainer.model.config, "_attn_implementation", None) == attention
    assert not trainer.model._forward_pre_hooks


def named(trainer: Trainer, message: str) -> None:
    """Refused by name, also without a proof."""
    refused(trainer, message)
    with pytest.raises(UnpadError, match=message):
        attach(trainer, prove=False)


def plain(folder: Path, rows: Any, collator: Any = None, base: type[Trainer] | None = None, **changes: Any) -> Trainer:
    """A Trainer on a Llama with the whole data in one update of several micro-batches."""
    options = {"per_device_train_batch_size": 3, **changes}
    given = {} if collator is None else {"data_collator": collator}
    return make_trainer("plain", make_model("llama"), folder, base, train_dataset=rows, **given, **options)


def whole(rows: Sequence[Sequence[int]]) -> Pairs:
    return [(list(row), list(row)) for row in rows]


def labelled_rows(pairs: Pairs) -> list[dict[str, Any]]:
    return [{"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels} for ids, labels in pairs]


def labelled(rows: Sequence[Mapping[str, Any]]) -> Pairs:
    return [(list(row["input_ids"]), list(row["labels"])) for row in rows]


def masked_prompt(ids: Sequence[int]) -> list[int]:
    half = len(ids) // 2
    return [IGNORED] * half + list(ids)[half:]


pad = Padded(tokenizer())
BERT = {name: SHARED[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")}
plain_labels = DataCollatorForLanguageModeling(tokenizer(), mlm=False)
PROMPTS = [(ids, masked_prompt(ids)) for ids in SEQUENCES]


def padded(pairs: Pairs) -> Any:
    return pad([{"input_ids": ids, "labels": labels} for ids, labels in pairs])


def tokens_of(rows: list[dict[str, Any]]) -> list[list[int]]:
    return [row["input_ids"] for row in rows]


# --------------------------------------------------------------------------- targets


def masking(rows: list[dict[str, Any]]) -> Any:
    return padded([(ids, masked_prompt(ids)) for ids in tokens_of(rows)])


def masks_prompts(folder: Path) -> None:
    for prove in (True, False):
        kept(plain(folder, alone(SEQUENCES), masking), PROMPTS, prove=prove)


def tokenizes(folder: Path) -> None:
    words = tokenizer()
    texts = [" ".join(f"t{token}" for token in one) for one in SEQUENCES]

    def written(rows: list[dict[str, Any]]) -> Any:
        return padded(whole([words.convert_tokens_to_ids(row["text"].split()) for row in rows]))

    rows = data([{"text": text} for text in texts])
    kept(plain(folder, rows, written, remove_unused_columns=False), whole(SEQUENCES))


def pads_in_the_data(folder: Path) -> None:
    width = max(map(len, SEQUENCES))

    def row(one: list[int], left: bool) -> dict[str, Any]:
        gap = width - len(one)

        def wide(values: list[int], value: int) -> list[int]:
            return [value] * gap + values if left else values + [value] * gap

        labels = [IGNORED, *one[1:]] if left else one
        return {"input_ids": wide(one, 0), "labels": wide(labels, IGNORED), "attention_mask": wide([1] * len(one), 0)}

    for left in (False, True):
        rows = data([row(one, left) for one in SEQUENCES])
        kept(plain(folder, rows, default_data_collator), whole(SEQUENCES))


def pads_with_the_end(folder: Path) -> None:
    words = tokenizer()
    words.pad_token = words.eos_token
    ended = [[*one[:3], 2, *one[3:], 2] for one in SEQUENCES]
    pairs = [(ids, [IGNORED if token == 2 else token for token in ids]) for ids in ended]

    def compared(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        ids = nn.utils.rnn.pad_sequence([torch.tensor(row["input_ids"]) for row in rows], True, 2)
        mask = torch.arange(ids.shape[1]) < torch.tensor([[len(row["input_ids"]) - 1] for row in rows])
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(ids == 2, IGNORED)}

    for collator in (DataCollatorForLanguageModeling(words, mlm=False), compared):
        text = "takes the last token, 2, of . of . rows for padding"
        kept(plain(folder, alone(ended), collator), pairs, warns=text)


def hides_the_end(folder: Path) -> None:
    def hidden(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        ids = nn.utils.rnn.pad_sequence([torch.tensor(row["input_ids"]) for row in rows], True, 2)
        return {"input_ids": ids, "attention_mask": ids != 2, "labels": ids}

    trainer = plain(folder, alone([[*one, 2] for one in SEQUENCES]), hidden)
    named(trainer, "hidden labels 1 tokens that attention_mask hides")


def stock_collators(folder: Path) -> None:
    for collator in (pad, Padded(tokenizer(), pad_to_multiple_of=8), DataCollatorWithFlattening()):
        kept(plain(folder, data(ROWS), collator), labelled(ROWS))
    kept(plain(folder, alone(SEQUENCES), plain_labels), whole(SEQUENCES))
    refused(plain(folder, data(ROWS), DataCollatorWithPadding(tokenizer())), "Unable to create tensor")  # of labels
    blocks = [(one * 9)[:12] for one in SEQUENCES]
    rows = data([{"input_ids": one, "labels": one} for one in blocks])
    kept(plain(folder, rows, default_data_collator), whole(blocks))
    for options in ({}, {"padding_free": True, "max_length": None, "pad_to_multiple_of": 8}):
        kept(make_trainer("sft", make_model("llama"), folder, train_dataset=data(ROWS), **options), labelled(ROWS))


def packed(folder: Path) -> None:
    options = {"packing": True, "max_length": 64, "train_dataset": data(ROWS)}
    kept(make_trainer("sft", make_model("llama"), folder, **options), labelled(ROWS))
    row = {name: [*ROWS[0][name], *ROWS[1][name]] for name in ROWS[0]}
    row["position_ids"] = [at for one in ROWS[:2] for at in range(len(one["input_ids"]))]

    def single(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        return {name: torch.tensor([rows[0][name]]) for name in rows[0]}

    trainer = plain(folder, data([row] * 4), single, per_device_train_batch_size=1)
    named(trainer, "single gives position_ids .* that do not count the tokens of a sequence from 0")


def transformed(folder: Path) -> None:
    def tokens(rows: dict[str, list[str]]) -> dict[str, Any]:
        return {"input_ids": [[int(word) for word in text.split()] for text in rows["text"]]}

    rows = data([{"text": " ".join(map(str, one))} for one in SEQUENCES]).with_transform(tokens)
    kept(plain(folder, rows, masking, remove_unused_columns=False), PROMPTS)


def drawn_anew(folder: Path) -> None:
    def crop(rows: dict[str, Any]) -> dict[str, Any]:
        starts = [random.randint(0, 9) for _ in rows["input_ids"]]
        return {"input_ids": [one[at : at + 8] for one, at in zip(rows["input_ids"], starts, strict=True)]}

    long = alone(make_sequences(16, seed=6, low=18, high=30)).with_transform(crop)
    named(plain(folder, long, plain_labels, remove_unused_columns=False), "a row is drawn anew")


def changes_the_data(folder: Path) -> None:
    class Staged(torch.utils.data.Dataset[dict[str, Any]]):
        length = 100

        def __len__(self) -> int:
            return len(SEQUENCES)

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"input_ids": SEQUENCES[index][: self.length]}

    class Shortens(TrainerCallback):
        def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            rows.length = 4

    rows = Staged()
    trainer = plain(folder, rows, plain_labels)
    trainer.add_callback(Shortens())
    attach(trainer, tokens_per_micro=64)
    with pytest.raises(UnpadError, match=r"a row has .4, 3. tokens and targets, and had"):
        trainer.train()


def other_in_batches(folder: Path) -> None:
    def to_the_shortest(rows: list[dict[str, Any]]) -> Any:
        least = min(map(len, tokens_of(rows)))
        return padded(whole([ids[:least] for ids in tokens_of(rows)]))

    def first_alone(rows: list[dict[str, Any]]) -> Any:
        made = padded(whole(tokens_of(rows)))
        made["labels"][1:] = IGNORED
        return made

    for collator in (to_the_shortest, first_alone):
        message = f"{collator.__name__} gives rows others in a batch of 3"
        named(plain(folder, alone(SEQUENCES), collator), message)


def no_single_rows(folder: Path) -> None:
    def pairs(rows: list[dict[str, Any]]) -> Any:
        assert len(rows) > 1, "a pair"
        return padded(whole(tokens_of(rows)))

    named(plain(folder, alone(SEQUENCES), pairs), "pairs fails on a row alone: AssertionError: a pair")


def hides_tokens(folder: Path) -> None:
    words = tokenizer()
    words.add_special_tokens({"mask_token": "t4"})
    collator = DataCollatorForLanguageModeling(words, mlm=True)
    named(plain(folder, alone(SEQUENCES), collator), "DataCollatorForLanguageModeling has mlm=True")
    model = AutoModelForMaskedLM.from_config(AutoConfig.for_model("bert", **BERT))
    trainer = make_trainer("plain", model, folder, train_dataset=alone(SEQUENCES), data_collator=collator)
    named(trainer, "BertForMaskedLM is no causal language model")


def changes_rows(folder: Path) -> None:
    """The data stay as they were."""

    def growing(rows: list[dict[str, Any]]) -> Any:
        for row in rows:
            row["input_ids"].append(2)
        return padded(whole(tokens_of(rows)))

    rows = [{"input_ids": list(one)} for one in SEQUENCES]
    for given in (rows, alone(SEQUENCES)):
        kept(plain(folder, given, growing), whole([[*one, 2] for one in SEQUENCES]))
    assert rows == [{"input_ids": list(one)} for one in SEQUENCES]


# --------------------------------------------------------------------------- columns and losses


def weigh(shape: Callable[[Tensor], torch.Size]) -> Any:
    """A collator with a further column of this shape, of the tokens' one."""

    def weighted(rows: list[dict[str, Any]]) -> Any:
        made = padded(whole(tokens_of(rows)))
        return {**made, "weights": torch.ones(shape(made["input_ids"]))}

    return weighted


Total = Callable[[Tensor, Tensor], Tensor]  # of logits, (rows, vocabulary, width), and the labels below, (rows, width)


def nll_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="none", ignore_index=IGNORED)


def by_loss(name: str, total: Total, divide: Callable[[Tensor, Any], Any] = lambda labels, count: count) -> Any:
    """A trainer with a loss of logits and the labels of the tokens that they predict.

    Args:
        divide: what the total is divided by, of the labels of a batch, (rows, width), and the targets of the update.
    """

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        given, labels = {name: x for name, x in inputs.items() if name != "labels"}, inputs["labels"]
        logits = model(**given).logits.transpose(1, 2)
        return total(logits[..., :-1], labels[:, 1:]) / divide(labels, num_items_in_batch)

    return type(name, (Trainer,), {"compute_loss": compute_loss})


def own_divisors(folder: Path) -> None:
    for name in ("get_batch_samples", "_get_num_items_in_batch"):
        trainer = plain(folder, data(ROWS), None, overriding(name))
        named(trainer, f"Overriding.{name} chooses micro-batches or what their loss is divided by")


def overriding(name: str) -> type[Trainer]:
    """A class with a method of its own that calls the trainer's."""

    def own(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        return getattr(Trainer, name)(self, *args, **kwargs)

    return type("Overriding", (Trainer,), {name: own})


def balances(folder: Path) -> None:
    model = make_model("gpt_oss", router_aux_loss_coef=0.5, output_router_logits=True)
    trainer = make_trainer("plain", model, folder, train_dataset=data(ROWS))
    with pytest.warns(UserWarning, match="auxiliary loss is one of each micro-batch.*it is another"):
        attach(trainer, tokens_per_micro=64)


def further_columns(folder: Path) -> None:
    for of, shape in ((lambda ids: ids.shape[:1], r"\(1,\)"), (lambda ids: ids.shape, r"\(1, \d+\)")):
        named(plain(folder, alone(SEQUENCES), weigh(of)), rf"weigh.*gives `weights` of shape {shape}; only")


def focal(logits: Tensor, labels: Tensor) -> Tensor:
    nll = nll_of(logits, labels)
    return ((1 - (-nll).exp()) ** 2 * nll).sum()


class Passing(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


def right_losses(folder: Path) -> None:
    kept(plain(folder, data(ROWS), None, Passing), labelled(ROWS))

    def given(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        logits = outputs.logits[:, :-1].flatten(0, 1)
        return F.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch

    kept(plain(folder, data(ROWS), None, compute_loss_func=given), labelled(ROWS))


ONE_BATCH = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1}


class Ignoring(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(**inputs).loss


def ignores_the_count(folder: Path) -> None:
    trainer = plain(folder, data(ROWS), None, Ignoring, gradient_accumulation_steps=3)
    refused(trainer, r"Ignoring.compute_loss is another loss than the mean cross-entropy.*divide .*num_items_in_batch")
    trainer = plain(folder, data(ROWS), None, Ignoring, **ONE_BATCH)  # right there, and not in two micro-batches
    refused(trainer, r"with Ignoring.compute_loss: .*divide the sum .*num_items_in_batch")


class Unshifted(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        given = {name: x for name, x in inputs.items() if name != "labels"}
        return nll_of(model(**given).logits.transpose(1, 2), inputs["labels"]).sum() / num_items_in_batch


def mean_of_rows(logits: Tensor, labels: Tensor) -> Tensor:
    return (nll_of(logits, labels).sum(1) / (labels != IGNORED).sum(1).clamp(min=1)).mean()


def total_nll(logits: Tensor, labels: Tensor) -> Tensor:
    return nll_of(logits, labels).sum()


NO_MEANS = (
    by_loss("PerSequence", mean_of_rows, lambda labels, count: 1),
    # The labels of the batch, that of each row's first token too.
    by_loss("BeforeShift", total_nll, lambda labels, count: (labels != IGNORED).sum()),
    by_loss("Budget", total_nll, lambda labels, count: 64),
)


def other_losses(folder: Path) -> None:
    for kind in (by_loss("Focal", focal), Unshifted):
        refused(plain(folder, data(ROWS), None, kind), rf"{kind.__name__}.compute_loss is another loss than the mean")


def no_mean_over_targets(folder: Path) -> None:
    """A divisor of the batch or a constant, also where an update is one micro-batch."""
    rows = data(labelled_rows(whole(SEQUENCES)))
    for kind in NO_MEANS:
        for num in (1, 2):
            sizes = {"gradient_accumulation_steps": num, "per_device_train_batch_size": 8 // num}
            refused(plain(folder, rows, pad, kind, **sizes), rf"{kind.__name__}.compute_loss is another loss than the")


class ReadsMask(Trainer):
    seen = 0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self.seen += int(inputs["attention_mask"].sum())
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


def reads_rows(folder: Path) -> None:
    """A flat batch has no mask."""
    refused(plain(folder, data(ROWS), None, ReadsMask), "ReadsMask.compute_loss: KeyError: .attention_mask.")


def mended(folder: Path) -> None:
    text = "was not right, and is on flat batches: wrong loss"
    trainer = plain(folder, data(ROWS))
    trainer.model_accepts_loss_kwargs = False
    kept(trainer, labelled(ROWS), warns=text)
    words = tokenizer()
    words.padding_side = "left"
    options = {"per_device_train_batch_size": 3, "train_dataset": data(ROWS), "data_collator": Padded(words)}
    kept(make_trainer("plain", make_model("gpt2"), folder, **options), labelled(ROWS), warns=text)


def stock_losses(folder: Path) -> None:
    named(plain(folder, data(ROWS), label_smoothing_factor=0.1), "label_smoothing_factor makes another loss")
    named(make_trainer("sft", make_model("llama"), folder, train_dataset=data(ROWS), loss_type="dft"), "loss_type=dft")


# --------------------------------------------------------------------------- what makes batches


def own_batches(folder: Path) -> None:
    for name in ("get_train_dataloader", "_get_dataloader"):
        named(plain(folder, data(ROWS), None, overriding(name)), f"Overriding.{name} makes the batches")
        trainer = plain(folder, data(ROWS))
        setattr(trainer, name, vars(overriding(name))[name].__get__(trainer))
        named(trainer, f"Trainer's own {name} makes the batches")


def own_evaluation(folder: Path) -> None:
    class Half(Trainer):
        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            return super().get_eval_dataloader(self.eval_dataset.select(range(4)))

    seen = []

    class Looking(Trainer):
        def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(tuple(inputs["input_ids"].shape))
            return super().prediction_step(model, inputs, *args, **kwargs)

    for kind in (Half, Looking):
        options = {"eval_dataset": alone(HELD_OUT), "per_device_eval_batch_size": 2}
        trainer = plain(folder, alone(SEQUENCES), plain_labels, kind, **options)
        before = trainer.evaluate()["eval_loss"]
        attach(trainer, tokens_per_micro=64)
        assert trainer.evaluate()["eval_loss"] == pytest.approx(before, rel=1e-5)
    assert {rows for rows, _ in seen} == {1, 2}


def changed_later(folder: Path) -> None:
    trainer = plain(folder, data(ROWS))
    attach(trainer, tokens_per_micro=64)
    trainer.data_collator = masking
    for call in (trainer.train, trainer.evaluate):
        with pytest.raises(UnpadError, match=r"data_collator is another than when unpad.hf.attach proved"):
            call()
    with pytest.raises(UnpadError, match=r"unpad.hf.attach has this trainer already"):
        attach(trainer)
    trainer = plain(folder, data(ROWS))
    attach(trainer, tokens_per_micro=64)
    trainer.compute_loss_func = lambda outputs, labels, num_items_in_batch=None: outputs.logits.mean()
    with pytest.raises(UnpadError, match="compute_loss_func is another"):
        trainer.train()
    pair = [plain(folder, data(ROWS)) for _ in range(2)]
    attach(pair[0], tokens_per_micro=64)
    for trainer in pair:
        trainer.args.gradient_accumulation_steps = 2
    found, wanted = map(trained, pair)
    assert (found.num_steps, distance(found.gradient, wanted.gradient)) == (2, pytest.approx(0, abs=1e-5))


def made_anew(folder: Path) -> None:
    trainer = plain(folder, data(ROWS), None, lambda **given: Trainer(**{**given, "model": None}, model_init=remade))
    named(trainer, "model_init makes the model again")


def remade(trial: Any = None) -> nn.Module:
    return make_model("llama")


def liger(folder: Path) -> None:
    trainer = plain(folder, data(ROWS))
    trainer.args.use_liger_kernel = True
    named(trainer, "use_liger_kernel exchanges layers")


def other_model_later(folder: Path) -> None:
    def is_another(trainer: Trainer) -> None:
        recorder = Recorder()
        trainer.add_callback(recorder)
        with pytest.raises(UnpadError, match=r"the model is another than when unpad.hf.attach proved it"):
            trainer.train()
        assert recorder.num_steps == 0

    for number, change in enumerate(CHANGES_OF_THE_MODEL):
        trainer = plain(folder, data(ROWS))
        attach(trainer, tokens_per_micro=64, prove=False)
        if number % 2:
            change(trainer)
            with pytest.raises(UnpadError, match="the model is another"):
                trainer.evaluate()
        else:
            trainer.add_callback(Changing(trainer, change))
        is_another(trainer)
    trainer = plain(folder, data(ROWS))
    hooked_head(trainer)
    attach(trainer, tokens_per_micro=64)
    assert trainer.attachment.certificate.passed
    assert trainer.attachment.head.mode == "targets"


def streams(folder: Path) -> None:
    named(plain(folder, alone(SEQUENCES).to_iterable_dataset(), masking, max_steps=2), "IterableDataset has no length")
    named(plain(folder, Numbered(), masking), "Numbered has no length, or no rows by number")


class Numbered(torch.utils.data.IterableDataset):
    """A stream that knows its length."""

    def __len__(self) -> int:
        return len(SEQUENCES)

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        return ({"input_ids": one} for one in SEQUENCES)


def evaluates_streams(folder: Path) -> None:
    trainer = plain(folder, alone(SEQUENCES), masking, eval_dataset=Numbered(), per_device_eval_batch_size=3)
    wanted = truth_of(trainer.model, PROMPTS)[0]
    attach(trainer, tokens_per_micro=64)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(wanted, rel=1e-5)


def as_alone(folder: Path, base: type[Trainer] | None = None, **options: Any) -> Trainer:
    """A trainer whose gradients of several updates are those that it has without `attach`."""
    pair = [plain(folder, data(ROWS), None, base, gradient_accumulation_steps=1, **options) for _ in range(2)]
    attach(pair[0], tokens_per_micro=64)
    found, wanted = map(trained, pair)
    assert found.num_steps == wanted.num_steps > 1
    assert distance(found.gradient, wanted.gradient) < 1e-5
    return pair[0]


def sorts(folder: Path) -> None:
    as_alone(folder, train_sampling_strategy="sequential")
    as_alone(folder, Backwards)
    named(plain(folder, data(ROWS), train_sampling_strategy="batch_rebalance"), "is batch_rebalance, which makes")
    trainer = plain(folder, data(ROWS), accelerator_config={"dispatch_batches": True})
    named(trainer, "dispatch_batches lets one process make the batches")
    named(plain(folder, data(ROWS), auto_find_batch_size=True), "auto_find_batch_size makes updates smaller")


def drops_the_last(folder: Path) -> None:
    trainer = as_alone(folder, dataloader_drop_last=True, data_seed=3)
    rows = [len(batch["cu_seq_lens_q"]) - 1 for batch in trainer.get_train_dataloader()]
    assert rows == [3, 3]


def callbacks(folder: Path) -> None:
    shapes = []

    class Looking(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **kw: Any) -> None:
            shapes.extend(len(batch["input_ids"]) for batch in train_dataloader)

    trainer = plain(folder, data(ROWS))
    trainer.add_callback(Looking())
    wanted = truth_of(trainer.model, labelled(ROWS))[1]
    attach(trainer, tokens_per_micro=64)
    assert error_of(trainer, wanted) < 1e-5
    assert set(shapes) == {1}


class Wrapper(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model

    def forward(self, **inputs: Any) -> Any:
        return self.inner(**inputs)


def hooked_head(trainer: Trainer) -> None:
    trainer.model.lm_head.register_forward_hook(lambda module, given, made: made / 2)


def other_layer(trainer: Trainer) -> None:
    trainer.model.model.layers[0].mlp = copy.deepcopy(trainer.model.model.layers[0].mlp)


def other_forward(trainer: Trainer) -> None:
    layer = trainer.model.model.layers[0].self_attn
    layer.forward = layer.forward


class Changing(TrainerCallback):
    """Makes a change when training begins."""

    def __init__(self, trainer: Trainer, change: Callable[[Trainer], None]) -> None:
        self.trainer, self.change = trainer, change

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.change(self.trainer)


CHANGES_OF_THE_MODEL: tuple[Callable[[Trainer], object], ...] = (
    lambda trainer: vars(trainer).update(dict.fromkeys(("model", "model_wrapped"), make_model("llama"))),
    lambda trainer: setattr(trainer, "model", make_model("llama")),
    lambda trainer: trainer.model.set_attn_implementation("sdpa"),
    other_layer,
    lambda trainer: trainer.model.add_adapter(LoraConfig(target_modules=["q_proj"])),
    lambda trainer: setattr(trainer.model, "loss_function", ForCausalLMLoss),
    lambda trainer: trainer.model.lm_head.register_full_backward_hook(lambda module, given, made: None),
    lambda trainer: setattr(trainer, "_wrap_model", lambda model, **kwargs: Wrapper(model)),
    lambda trainer: trainer.model._forward_pre_hooks.clear(),
    other_forward,
    hooked_head,
)

# --------------------------------------------------------------------------- evaluation


@torch.no_grad()
def logits_of(model: nn.Module, ids: Sequence[int]) -> np.ndarray:
    found: np.ndarray = model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0].numpy()
    return found


def metrics(folder: Path) -> None:
    """What metrics get of a trainer is what those of one without `attach` get."""
    silent = {"input_ids": [5, 6, 7, 8], "labels": [IGNORED] * 4}
    rows = [*make_rows(HELD_OUT), silent, *make_rows(HELD_OUT[:2])]
    for kind, choice in itertools.product(("plain", "sft"), ("logits", "argmax", "batches", "inputs", "loss")):
        seen: list[list[Any]] = [[], []]
        pair = [make_trainer(kind, make_model("llama"), folder, train_dataset=data(ROWS)) for _ in seen]
        for trainer, mine in zip(pair, seen, strict=True):
            trainer.eval_dataset, trainer.args.per_device_eval_batch_size = data(rows), 3
            trainer.compute_metrics = lambda given, compute_result=True, mine=mine: mine.append(given) or {}
            if choice == "argmax":
                trainer.preprocess_logits_for_metrics = lambda logits, labels: logits.argmax(-1)
            trainer.args.batch_eval_metrics = choice == "batches"
            trainer.args.include_for_metrics = [choice] if choice in ("inputs", "loss") else []
        attach(pair[0], tokens_per_micro=64, tokens_per_eval=40)
        wanted_loss = truth_of(pair[1].model, labelled(rows))[0]
        assert pair[0].evaluate()["eval_loss"] == pytest.approx(wanted_loss, rel=1e-5)
        pair[1].evaluate()
        for found, wanted in zip(*seen, strict=True):
            assert np.array_equal(found.label_ids, wanted.label_ids), (kind, choice)
            assert found.predictions.shape == wanted.predictions.shape
            learnt = wanted.label_ids != IGNORED  # what stands on padding is nobody's
            np.testing.assert_allclose(found.predictions[learnt], wanted.predictions[learnt], atol=1e-4)
            assert choice != "inputs" or np.array_equal(found.inputs, wanted.inputs)


def metrics_over_padding(folder: Path) -> None:
    def accuracy(given: Any) -> dict[str, float]:
        return {"accuracy": float((given.predictions[:, :-1] == given.label_ids[:, 1:]).mean())}

    options = {
        "eval_dataset": data(make_rows(HELD_OUT)),
        "preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1),
        "per_device_eval_batch_size": 3,
    }
    trainer = plain(folder, data(ROWS), compute_metrics=accuracy, **options)
    before = trainer.evaluate()["eval_accuracy"]
    with pytest.warns(
        UserWarning, match="compute_metrics still reads the trainer's own batches, padded: leave out the"
    ):
        attach(trainer, tokens_per_micro=64)
    assert trainer.evaluate()["eval_accuracy"] == before
    assert trainer.predict(trainer.eval_dataset).metrics["test_accuracy"] == before


def predicts(folder: Path) -> None:
    model = make_model("llama")
    trainer = plain(folder, data(ROWS), per_device_eval_batch_size=2)
    attach(trainer, tokens_per_micro=64)
    found = trainer.predict(data(make_rows(HELD_OUT)))
    assert len(found.predictions) == len(HELD_OUT)
    for row, one in zip(HELD_OUT, found.predictions, strict=True):
        assert np.abs(one[: len(row)] - logits_of(model.eval(), row)).max() < 1e-4


def noise(folder: Path) -> None:
    named(plain(folder, data(ROWS), neftune_noise_alpha=5.0), "neftune_noise_alpha adds noise")


# --------------------------------------------------------------------------- other tasks


def other_models(folder: Path) -> None:
    t5 = {"d_model": 32, "d_ff": 48, "num_layers": 2, "num_heads": 4, "d_kv": 8, "decoder_start_token_id": 0}
    models = [
        AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model("t5", vocab_size=VOCAB, **t5)),
        AutoModelForSequenceClassification.from_config(make_model("llama").config),
        AutoModelForTokenClassification.from_config(AutoConfig.for_model("bert", **BERT)),
    ]
    for model in models:
        trainer = make_trainer("plain", model, folder, train_dataset=data(ROWS))
        named(trainer, type(model).__name__)


def other_trainers(folder: Path) -> None:
    """Classes of TRL by name: to make them takes other data, packages or models."""
    for name in ("DPOTrainer", "RewardTrainer", "ORPOTrainer", "GRPOTrainer", "GKDTrainer"):
        is_sft = name == "GKDTrainer"
        kind = type(name, (SFTTrainer if is_sft else Trainer,), {"__module__": "trl.trainer.other"})
        trainer = make_trainer("sft", make_model("llama"), folder) if is_sft else plain(folder, data(ROWS))
        trainer.__class__ = kind
        module = ModuleType(kind.__module__)
        setattr(module, name, kind)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, module.__name__, module)
            named(trainer, f"{name} of TRL")


def virtual_tokens(folder: Path) -> None:
    shared = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 4}
    for config, name in (
        (PromptTuningConfig(**shared), "PROMPT_TUNING"),
        (PromptEncoderConfig(**shared, encoder_hidden_size=16), "P_TUNING"),
        (PrefixTuningConfig(**shared), "PREFIX_TUNING"),
    ):
        model = get_peft_model(make_model("llama"), config)
        trainer = make_trainer("plain", model, folder, train_dataset=data(ROWS))
        named(trainer, f"{name} puts virtual tokens")


SETUPS: dict[str, tuple[Callable[[Path], None], ...]] = {
    "a collator that masks prompts, appends or cuts tokens, or tokenizes": (
        masks_prompts, tokenizes,
    ),
    "the collators of transformers and TRL": (stock_collators, pads_with_the_end),
    "padding in the dataset": (pads_in_the_data,),
    "a collator whose `attention_mask` hides what it labels, such as the end of a sequence": (hides_the_end,),
    "rows that are packed": (packed,),
    "`with_transform`, `set_transform`": (transformed,),
    "rows that are drawn anew each time that they are read, by the data or the collator": (drawn_anew,),
    "a callback that changes the lengths of rows": (changes_the_data,),
    "a collator that gives a row other targets in a batch than alone": (other_in_batches,),
    "a collator that fails on a single row, or gives no labels or `input_ids`": (no_single_rows,),
    "a collator that changes the rows of the data": (changes_rows,),
    "a column that the collator gives besides tokens, labels and boundaries": (further_columns,),
    "a loss of one's own that is the mean cross-entropy over targets": (right_losses,),
    "a loss of one's own that reads what flat batches lack": (reads_rows,),
    "a loss of one's own that is another": (other_losses, no_mean_over_targets, ignores_the_count),
    "`label_smoothing_factor`, `loss_type`": (stock_losses,),
    "`_get_num_items_in_batch`, `get_batch_samples`": (own_divisors,),
    "a router's auxiliary loss": (balances,),
    "the usual loss, wrong in the trainer's own batches": (mended,),
    "`get_train_dataloader`, `_get_dataloader`": (own_batches,),
    "`train_sampling_strategy`, `_get_train_sampler`": (sorts,),
    "a streamed dataset": (streams,),
    "a streamed dataset to evaluate": (evaluates_streams,),
    "`dataloader_drop_last`, `data_seed`": (drops_the_last,),
    "callbacks that read batches": (callbacks,),
    "`get_eval_dataloader`, `prediction_step`, `evaluation_loop`": (own_evaluation,),
    "`compute_metrics`, `preprocess_logits_for_metrics`, `batch_eval_metrics`, `include_for_metrics`": (
        metrics,
    ),
    "`compute_metrics` that may count padding": (metrics_over_padding,),
    "`predict`": (predicts,),
    "`neftune_noise_alpha`": (noise,),
    "another collator, loss or accumulation after `attach`": (changed_later,),
    "`model_init`, `hyperparameter_search`": (made_anew,),
    "another model, attention, layer, adapter or loss function in it after `attach`": (other_model_later,),
    "`use_liger_kernel`": (liger,),
    "masked language models, `mlm=True`": (hides_tokens,),
    "T5, sequence and token classification": (other_models,),
    "DPO, Reward, ORPO, GRPO and GKD trainers": (other_trainers,),
    "prompt tuning, p-tuning, prefix tuning": (virtual_tokens,),
}  # fmt: skip
