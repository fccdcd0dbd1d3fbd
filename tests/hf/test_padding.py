"""Trainers of pairs: `without_padding` lets them learn what they learnt, and `prove_trainer` judges them."""

import logging
import random
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Trainer
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

import unpad
import unpad.hf
from tests.hf.families import make_model
from tests.proof.foreign.hugging_face import tokenizer
from unpad.errors import ProofError, RecipeError
from unpad.proof.foreign.measure import gradient_error

pytestmark = pytest.mark.filterwarnings("default")  # trainers of other packages warn of their own affairs
logging.getLogger("trl").setLevel(logging.ERROR)
KINDS = {
    "dpo": (DPOTrainer, DPOConfig), "kto": (KTOTrainer, KTOConfig), "reward": (RewardTrainer, RewardConfig),
    "orpo": (ORPOTrainer, ORPOConfig), "cpo": (CPOTrainer, CPOConfig), "grpo": (GRPOTrainer, GRPOConfig),
}  # fmt: skip


def words(draw: random.Random, most: int) -> str:
    return " ".join(f"t{draw.randrange(3, 99)}" for _ in range(draw.randrange(2, most)))


def rows_for(seed: int) -> datasets.Dataset:
    draw = random.Random(seed)
    names = {"prompt": 12, "chosen": 20, "rejected": 20}
    return datasets.Dataset.from_list([{name: words(draw, most) for name, most in names.items()} for _ in range(8)])


def reward(completions: list[str], **rest: Any) -> list[float]:
    return [float(sum(map(ord, text)) % 7) for text in completions]


def make(kind: str, folder: Path, seed: int = 0, family: str = "llama", **changes: Any) -> Trainer:
    if not (folder / "model").exists():  # of which reference models are made
        make_model(family).save_pretrained(folder / "model")
    arguments: dict[str, Any] = {"max_steps": 3, "learning_rate": 0.1, "optim": "sgd", "bf16": False, "use_cpu": True}
    arguments |= {"output_dir": str(folder), "report_to": [], "save_strategy": "no", "disable_tqdm": True, "seed": seed}
    auto, fields = AutoModelForCausalLM, {}
    if kind == "reward":
        auto, fields = AutoModelForSequenceClassification, {"num_labels": 1}
    if kind == "grpo":
        arguments |= {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 8, "beta": 0.1}
    given = {"reward_funcs": reward} if kind == "grpo" else {}
    torch.manual_seed(seed)
    model = auto.from_pretrained(folder / "model", pad_token_id=0, **fields)
    trainer, config = KINDS[kind]
    given |= {"train_dataset": rows_for(seed), "processing_class": tokenizer()}
    return trainer(model, args=config(**arguments | changes), **given)


def learnt(trainer: Trainer) -> dict[str, torch.Tensor]:
    """What training adds to every weight."""
    before = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
    trainer.train()
    return {name: weight.detach() - before[name] for name, weight in trainer.model.named_parameters()}


CASES = [
    pytest.param(kind, seed, marks=[] if (kind, seed) == ("dpo", 0) else [pytest.mark.nightly])
    for kind in KINDS
    for seed in range(3)
]


@pytest.mark.promise("hf.padding")
@pytest.mark.parametrize(("kind", "seed"), CASES)
def test_a_trainer_learns_without_padding_what_it_learns_with_it(kind, seed, tmp_path):
    expected = learnt(make(kind, tmp_path, seed))
    trainer = make(kind, tmp_path, seed)
    done = unpad.hf.without_padding(trainer)
    assert max(done.loss, done.gradient) < 5e-6
    assert gradient_error(learnt(trainer), expected) < 2e-5
    assert done.num_tokens < done.num_cells
    assert "padding left out" in repr(done)


JUDGED = [one for one in CASES if one.values[0] != "grpo"]


@pytest.mark.promise("hf.pairs")
@pytest.mark.parametrize(("kind", "seed"), JUDGED)
def test_a_trainer_of_pairs_is_sound(kind, seed, tmp_path):
    trainer = make(kind, tmp_path, seed)
    certificate = unpad.prove_trainer(trainer)
    assert (certificate.verdict, certificate.precision) == ("sound", "fp64"), str(certificate)
    assert certificate.finding("filler") is not None
    assert not vars(trainer.model.base_model).get("forward")


def collated(change):
    """A trainer whose collator makes other masks."""

    def plant(trainer: Trainer) -> None:
        collate = trainer.data_collator
        trainer.data_collator = lambda rows: change(collate(rows))

    return plant


def hide_end(batch):
    """As a collator does that takes the end of a text for padding."""
    return batch | {"attention_mask": batch["attention_mask"] * (batch["input_ids"] != 2)}


def show_padding_on_the_left(batch):
    gaps = (1 - batch["attention_mask"]).sum(1).tolist()
    names = ("input_ids", "completion_mask")
    rows = {name: torch.stack([row.roll(gap) for row, gap in zip(batch[name], gaps, strict=True)]) for name in names}
    return batch | rows | {"attention_mask": torch.ones_like(batch["attention_mask"])}


def score_padding(batch):
    return batch | {"completion_mask": batch["completion_mask"] | (1 - batch["attention_mask"])}


def shift_by_the_longest(batch):
    """Completions begin where the batch's first one begins."""
    begins = int(batch["completion_mask"][0].argmax())
    mask = batch["attention_mask"].clone()
    mask[:, :begins] = 0
    return batch | {"completion_mask": mask}


def mix_rows(trainer: Trainer) -> None:
    trainer.model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: output + output.mean((0, 1)))


FAULTS = {
    "hidden ends": (collated(hide_end), "cut"),
    "visible padding": (collated(show_padding_on_the_left), "filler"),
    "padding scored": (collated(score_padding), "gradient"),
    "masks by the batch": (collated(shift_by_the_longest), "collated"),
    "mixed rows": (mix_rows, "isolation"),
}


@pytest.mark.promise("hf.pairs")
@pytest.mark.parametrize("name", FAULTS)
def test_a_trainer_of_pairs_whose_rows_depend_on_others_is_found(name, tmp_path):
    plant, kind = FAULTS[name]
    trainer = make("dpo", tmp_path)
    plant(trainer)
    certificate = unpad.prove_trainer(trainer)
    assert certificate.passed is False
    assert kind in {claim.kind for claim in certificate.failed}, str(certificate)
    assert certificate.cause


def test_a_step_that_raises_and_a_collator_of_several_rows_are_refused(tmp_path):
    trainer = make("dpo", tmp_path)
    collate = trainer.data_collator
    trainer.data_collator = lambda rows: {k: v for k, v in collate(rows).items() if k != "attention_mask"}
    certificate = unpad.prove_trainer(trainer)
    assert certificate.verdict == "refused"
    assert "attention_mask" in certificate.refused
    trainer.data_collator = lambda rows: collate(rows[:-1])
    with pytest.raises(ProofError, match="no batch of one row"):
        unpad.prove_trainer(trainer)


@pytest.mark.parametrize(("kind", "family", "changes"), [("reward", "gpt2", {}), ("dpo", "llama", {"bf16": True})])
def test_positions_begin_in_each_row_and_no_reference_is_in_mixed_precision(kind, family, changes, tmp_path):
    done = unpad.hf.without_padding(make(kind, tmp_path, family=family, **changes))
    assert max(done.loss, done.gradient) < 5e-6


def refused(trainer: Trainer, error: type[Exception], text: str) -> None:
    """The trainer is refused, and its model computes as before."""
    before = trainer.model.config._attn_implementation
    with pytest.raises(error, match=text):
        unpad.hf.without_padding(trainer)
    hooks = [hook for part in trainer.model.modules() for hook in part._forward_pre_hooks.values()]
    assert not any("unpad" in type(hook).__module__ for hook in hooks)
    assert trainer.model.config._attn_implementation == before


def mean_of_the_row(module, args, output):
    return output + output.mean(1, keepdim=True)


@pytest.mark.promise("hf.padding")
def test_a_model_that_mixes_the_tokens_of_a_row_is_refused_and_as_before(tmp_path):
    trainer = make("dpo", tmp_path)
    trainer.model.model.layers[0].mlp.register_forward_hook(mean_of_the_row)
    refused(trainer, ProofError, "without padding a step has another loss")


def test_noise_a_routers_loss_pooled_rows_and_no_padded_rows_are_refused(tmp_path):
    refused(make("dpo", tmp_path, neftune_noise_alpha=5.0), RecipeError, "neftune_noise_alpha adds noise")
    trainer = make("dpo", tmp_path)
    trainer.aux_loss_enabled = True
    refused(trainer, RecipeError, "auxiliary loss")
    trainer = make("dpo", tmp_path)
    trainer.model.model.register_forward_hook(lambda module, args, output: setattr(output, "pooler_output", output[0]))
    refused(trainer, ProofError, "pools rows before its head")
    trainer = make("dpo", tmp_path)
    trainer.data_collator = lambda rows, collate=trainer.data_collator: collate(rows) | {"output_hidden_states": True}
    refused(trainer, RecipeError, "0 rows of tokens reach the model")


def test_what_the_first_step_does_not_compare_is_said(tmp_path):
    trainer = make("dpo", tmp_path)
    trainer.compute_loss = lambda model, inputs, **kwargs: 0 * type(trainer).compute_loss(trainer, model, inputs)
    refused(trainer, RecipeError, "without padding or gradient: nothing can be compared")
    trainer = make("dpo", tmp_path)
    done = unpad.hf.without_padding(trainer)
    done.sides.clear()  # as of a first batch of equal rows
    with pytest.warns(UserWarning, match="padding on the (left|right) was not compared"):
        trainer.train()
