"""Models under torch.compile: few graphs for any batches, with the losses and gradients of the model as it stands."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from tests.helpers.attention_cases import as_on_a_card
from tests.helpers.paths import Waits
from tests.hf.families import distance, make_model, make_rows, make_sequences, take_gradient
from tests.hf.trainers import make_trainer, weights_of
from unpad.hf import attach, collate, prepare

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.compile warns of what it looks at itself
BATCHES = [collate(make_rows(make_sequences(2 + seed % 4, seed, high=12))) for seed in range(30)]
ALONE = {"input_ids", "labels", "position_ids"}


def computed(model: nn.Module, called: Callable[..., Any], names: set[str]) -> list[dict[str, Tensor]]:
    """Losses and gradients of all batches."""
    results = []
    for batch in BATCHES:
        loss = called(**{name: batch[name] for name in names & batch.keys()}, use_cache=False).loss
        loss.backward()
        results.append({"loss": loss.detach(), **take_gradient(model)})
        model.zero_grad()
    return results


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "is_prepared", "on_card", "num_graphs"),
    [("qwen3", True, False, 1), ("llama", True, True, 1), ("mistral", True, True, 1), ("llama", False, False, 5)],
)
def test_a_compiled_model_has_few_graphs_for_any_batches(family, is_prepared, on_card, num_graphs):
    with as_on_a_card() if on_card else nullcontext():
        model = make_model(family, "unpad", head_dim=16, num_hidden_layers=2)
        model.to(torch.bfloat16 if on_card else torch.float32)
        if is_prepared:
            prepare(model)
        names = {*BATCHES[0]} if is_prepared else ALONE
        expected = computed(model, model, names)
        torch._dynamo.reset()
        counters.clear()
        results = computed(model, torch.compile(model, dynamic=True, backend="eager"), names)
    assert counters["stats"]["unique_graphs"] == num_graphs
    for got, wanted in zip(results, expected, strict=True):
        assert distance(got, wanted) < (2e-2 if on_card else 1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["plain", "sft"])
def test_a_trainer_compiles_two_graphs_and_ends_with_the_same_weights(tmp_path, kind):
    weights = []
    for compiles in (False, True):
        torch._dynamo.reset()
        counters.clear()
        options = {"torch_compile": True, "torch_compile_backend": "aot_eager"} if compiles else {}
        options |= {"learning_rate": 1e-2, "gradient_accumulation_steps": 1, "per_device_train_batch_size": 5}
        options |= {"save_strategy": "steps", "save_steps": 20, "max_steps": 30}
        trainer = make_trainer(kind, make_model("llama", head_dim=16), tmp_path / str(compiles), **options)
        attach(trainer, 64, prove=False)
        trainer.train()
        weights.append(weights_of(trainer.model))
    assert counters["stats"]["unique_graphs"] == 2
    torch.testing.assert_close(*weights, rtol=0, atol=1e-5)
    evaluated = trainer.evaluate()["eval_loss"]
    trainer.train(resume_from_checkpoint=True)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(evaluated, abs=1e-6)


def test_a_pass_waits_for_a_card_once(tmp_path):
    trainer = make_trainer("plain", make_model("llama", head_dim=16).bfloat16(), tmp_path)
    with as_on_a_card():
        attached = attach(trainer, prove=False)
        with Waits() as waits, attached.head.alone():
            trainer.model(**BATCHES[0])
    assert [name for name in waits.found if name != "_score_block"] == ["_find_targets"]
