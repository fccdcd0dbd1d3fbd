"""The certificate for trainers of Hugging Face: what it says, and that it leaves no trace."""

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DataCollatorForLanguageModeling, Trainer
from trl import SFTTrainer

import unpad
import unpad.hf
from tests.proof.foreign.hugging_face import (
    IGNORE,
    build,
    dataset,
    flatten,
    pad,
    quiet,
    sequences,
    sft,
    tokenizer,
    trainer,
)
from unpad.errors import ProofError, RecipeError
from unpad.hf import update
from unpad.proof.foreign import judge
from unpad.proof.foreign.certificate import ForeignCertificate
from unpad.proof.foreign.judge import NO_ROUTER_LOSS
from unpad.proof.foreign.update import LabelledSequence, labelled
from unpad.terminal import progress

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and TRL
quiet()

Make = Callable[[Path], Trainer]
DROPOUT = {"attention_dropout": 0.3}
DROPOUTS = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}  # of GPT-2


def adapted() -> nn.Module:
    torch.manual_seed(1)
    adapters = LoraConfig(r=4, lora_dropout=0.2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model: nn.Module = get_peft_model(build("llama"), adapters)
    return model


class OwnLoss(Trainer):
    """The mean cross-entropy over targets."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs["labels"]
        logits = model(**{k: v for k, v in inputs.items() if k != "labels"}).logits[:, :-1]
        nll = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE, reduction="none")
        return nll.sum() / num_items_in_batch


def mean_of_means(folder: Path, **changes: object) -> Trainer:
    """The mean over micro-batches of their means, as where a model takes no `num_items_in_batch`."""
    made = trainer(build("llama"), folder, **changes)
    made.model_accepts_loss_kwargs = False
    return made


def attached(one: Trainer) -> Trainer:
    """A trainer on our batches."""
    unpad.hf.attach(one, tokens_per_micro=64)
    return one


SOUND: dict[str, Make] = {
    "our batches, where theirs leak": lambda folder: attached(trainer(build("lfm2"), folder)),
    "padded": lambda folder: trainer(build("llama"), folder),
    "flattened": lambda folder: trainer(build("qwen3"), folder, collator=flatten),
    "padded by TRL": lambda folder: sft(build("llama"), folder),
    "padding_free": lambda folder: sft(build("llama"), folder, padding_free=True, max_length=None),
    "packed": lambda folder: sft(build("llama"), folder, packing=True),
    "dropout": lambda folder: trainer(build("gpt2", **DROPOUTS), folder),
    "checkpointing and dropout": lambda folder: sft(build("llama", **DROPOUT), folder, gradient_checkpointing=True),
    "adapters": lambda folder: sft(adapted(), folder),
    "experts with a router loss": lambda folder: trainer(build("mixtral", output_router_logits=True), folder),
    "noise in the router": lambda folder: trainer(build("mixtral", router_jitter_noise=0.3), folder),
    "a loss of one's own": lambda folder: trainer(build("llama"), folder, kind=OwnLoss),
    "data without labels": lambda folder: trainer(
        build("llama"), folder, dataset(sequences()).remove_columns("labels"),
        collator=DataCollatorForLanguageModeling(tokenizer(), mlm=False),
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.promise("proof.precision")
@pytest.mark.parametrize("name", SOUND)
def test_a_sound_trainer_passes(name, tmp_path):
    made = SOUND[name](tmp_path)
    certificate = unpad.prove_trainer(made)
    assert certificate.passed, str(certificate)
    assert (NO_ROUTER_LOSS in certificate.notes) == (name == "experts with a router loss")
    # TRL's head computes in fp32.
    assert certificate.precision == ("fp32" if isinstance(made, SFTTrainer) else "fp64")


def ends_are_padding(folder: Path) -> Trainer:
    rows = dataset([[*one, 2] for one in sequences()]).remove_columns("labels")
    words = tokenizer()
    words.pad_token = words.eos_token
    return trainer(build("llama"), folder, rows, collator=DataCollatorForLanguageModeling(words, mlm=False))


FAULTS: dict[str, tuple[Make, str, str, str]] = {  # trainer, verdict, kind, part of the advice
    "mean of means": (
        mean_of_means, "wrong loss", "loss", "of the whole update",
    ),
    "padded left": (
        lambda folder: trainer(build("llama"), folder, dataset(sequences(), prompts=False), collator=pad("left")),
        "wrong loss", "padding", "targets predicted from padding: 2",
    ),
    "a model that leaks": (
        lambda folder: sft(build("gpt_oss"), folder, padding_free=True, max_length=None),
        "leaking", "isolation", "the model does not keep",
    ),
    "a model that leaks, without a cache": (
        lambda folder: trainer(build("opt"), folder, collator=flatten),
        "leaking", "isolation", "the model does not keep",
    ),
    "a cache": (
        lambda folder: trainer(build("llama"), folder, collator=flatten, use_cache=True),
        "leaking", "isolation", "pass use_cache=False",
    ),
    "ends that are padding": (ends_are_padding, "not proven", "targets", "takes the last token, 2, of 4 of 4"),
}  # fmt: skip


@pytest.mark.promise("proof.faults")
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_and_named(name, tmp_path):
    make, verdict, kind, advice = FAULTS[name]
    certificate = unpad.prove_trainer(make(tmp_path))
    assert certificate.verdict == verdict, str(certificate)
    assert advice in {finding.kind: finding.advice or finding.gap for finding in certificate.findings}[kind]
    assert not certificate.passed


Rows = Sequence[Mapping[str, list[int]]]


def dropped(rows: Rows) -> dict[str, Tensor]:
    """The fourth of four rows is left out, which no part of three shows."""
    return flatten(rows[:3])


def shifted(rows: Rows) -> dict[str, Tensor]:
    made = flatten(rows)
    return {**made, "labels": made["labels"].roll(-1, 1)} if len(rows) == 4 else made


def merged(rows: Rows) -> dict[str, Tensor]:
    made = flatten(rows)
    return {**made, "position_ids": torch.arange(made["input_ids"].numel())[None]}


LONG: dict[str, tuple[Callable[..., Trainer], str]] = {  # of an update with more tokens than are computed; verdict
    "sound": (lambda folder, **changes: trainer(build("qwen3"), folder, collator=flatten, **changes), "sound"),
    "dropped row": (lambda folder, **changes: trainer(build("qwen3"), folder, collator=dropped, **changes), "cut"),
    "shifted labels": (
        lambda folder, **changes: trainer(build("qwen3"), folder, collator=shifted, **changes), "wrong loss",
    ),
    "merged boundaries": (
        lambda folder, **changes: trainer(build("qwen3"), folder, collator=merged, **changes), "leaking",
    ),
    "mean of means": (mean_of_means, "wrong loss"),
}  # fmt: skip


@pytest.mark.promise("proof.faults")
@pytest.mark.parametrize("name", LONG)
def test_a_part_of_a_long_update_is_enough(name, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(update, "MOST_TOKENS", 48)  # three rows, and one
    monkeypatch.setattr(judge, "FIRST_LINE", 0.0)
    monkeypatch.setattr(progress, "_ended", float("-inf"))
    monkeypatch.setattr(progress, "_watcher", None)
    monkeypatch.setenv("UNPAD_PROGRESS", "1")
    make, verdict = LONG[name]
    certificate = unpad.prove_trainer(make(tmp_path, per_device_train_batch_size=4))
    assert certificate.verdict == verdict, str(certificate)
    assert certificate.num_tokens <= 48
    assert any(f"{certificate.num_sequences} of " in note for note in certificate.notes)
    assert "after 0s: proving in fp64 " in capfd.readouterr().err


def test_the_rows_that_are_enough_are_of_every_micro_batch_with_the_longest_and_the_shortest():
    rows = [labelled([[7] * length], None) for length in (500, 900, 700, 2, 600, 800, 300, 1000)]
    assert update.enough(rows, [4, 4]) == {0, 1, 3, 6, 7}  # the rest, up to 3,072 tokens, is of the first micro-batch
    assert update.enough(rows[:2], [1, 1]) == {0, 1}
    long = [labelled([[7] * 5000], None)] * 6
    assert update.enough(long, [3, 3]) == {0, 3, 5}
    assert update.enough([[LabelledSequence([7], [IGNORE])], *long], [4, 3]) == {1, 4, 6}


def everything(one: Trainer) -> dict[str, object]:
    """State that training depends on, and that of the trainer."""
    state = {name: value.clone() for name, value in one.model.state_dict().items()}
    gradients = {name: value.grad for name, value in one.model.named_parameters()}
    modes = [(module.training, getattr(module, "p", None)) for module in one.model.modules()]
    plain = {name: repr(value) for name, value in vars(one).items() if isinstance(value, dict | list | int | str)}
    generators = (random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist())
    links = len(one.accelerator._dataloaders), one.accelerator.gradient_state.active_dataloader
    return {
        "weights": {name: value.tolist() for name, value in state.items()}, "gradients": gradients, "modes": modes,
        "attributes": plain, "names": sorted(vars(one)), "generators": generators, "accelerator": links,
        "state": repr(one.state), "control": repr(one.control), "config": one.model.config.to_dict(),
        "arguments": one.args.to_dict(),
    }  # fmt: skip


def trained(make: Make, folder: Path, prove: bool) -> tuple[dict[str, Tensor], ForeignCertificate | None]:
    one = make(folder)
    certificate = None
    if prove:
        before = everything(one)
        certificate = unpad.prove_trainer(one)
        after = everything(one)
        assert {name for name in before if before[name] != after[name]} == set()
    one.train()
    return one.model.state_dict(), certificate


@pytest.mark.slow
@pytest.mark.promise("proof.changes-nothing")
@pytest.mark.parametrize(
    "make",
    [
        lambda folder: trainer(build("gpt2", **DROPOUTS), folder, num_train_epochs=2, dataloader_num_workers=0),
        lambda folder: sft(adapted(), folder, packing=True),
        lambda folder: sft(build("mixtral", output_router_logits=True), folder, bf16=True),
        lambda folder: attached(trainer(build("llama"), folder, num_train_epochs=2)),
    ],
    ids=["dropout", "adapters", "experts", "our batches"],
)
def test_training_after_a_proof_equals_training_without_to_the_bit(make, tmp_path):
    plain, _ = trained(make, tmp_path / "plain", prove=False)
    proved, certificate = trained(make, tmp_path / "proved", prove=True)
    assert certificate is not None
    assert certificate.passed
    assert plain.keys() == proved.keys()
    assert all(torch.equal(plain[name], proved[name]) for name in plain)


def test_what_cannot_be_proved_says_what_to_do(tmp_path):
    with pytest.raises(ProofError, match="no trainer of transformers"):
        unpad.prove_trainer(build("llama"))
    with pytest.raises(ProofError, match="pass the token ids as sequences="):
        unpad.prove_trainer(sft(build("llama"), tmp_path, packing=True, packing_strategy="wrapped"))
    with pytest.raises(RecipeError, match="label_smoothing_factor makes another loss"):
        unpad.prove_trainer(trainer(build("llama"), tmp_path, label_smoothing_factor=0.1))
