"""`without_padding`: trainers of pairs compute the real tokens of their rows alone, and learn what they learnt."""

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


def make(kind: str, folder: Path, seed: int = 0) -> Trainer:
    if not (folder / "model").exists():  # of which reference models are made
        make_model("llama").save_pretrained(folder / "model")
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
    return trainer(model, args=config(**arguments), **given)


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


def test_a_routers_loss_and_a_model_without_padded_rows_are_refused(tmp_path):
    trainer = make("dpo", tmp_path)
    trainer.aux_loss_enabled = True
    refused(trainer, RecipeError, "auxiliary loss")
    trainer = make("dpo", tmp_path)
    trainer.data_collator = lambda rows, collate=trainer.data_collator: collate(rows) | {"output_hidden_states": True}
    refused(trainer, RecipeError, "0 padded rows reach the model")
