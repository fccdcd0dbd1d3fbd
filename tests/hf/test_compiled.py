"""Models under torch.compile: few graphs for any batches, with the losses and gradients of the model as it stands."""

from contextlib import nullcontext

import pytest
import torch
from torch._dynamo.utils import counters

from tests.helpers.attention_cases import as_on_a_card
from tests.helpers.paths import Waits
from tests.hf.families import distance, make_model, make_rows, make_sequences, take_gradient
from tests.hf.trainers import make_trainer, weights_of
from unpad.hf import attach, collate, prepare

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.compile warns of what it looks at itself
BATCHES = [collate(make_rows(make_sequences(2 + seed % 4, seed, high=12))) for seed in range(30)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "is_prepared", "on_card", "num_graphs"),
    [("qwen3", True, False, 1), ("llama", True, True, 1), ("mistral", True, True, 1), ("llama", False, False, 5)],
)
def test_a_compiled_model_has_few_graphs_for_any_batches(family, is_prepared, on_card, num_graphs):
    torch._dynamo.reset()
    counters.clear()
    with as_on_a_card() if on_card else nullcontext():
        model = make_model(family, "unpad", head_dim=16).to(torch.bfloat16 if on_card else torch.float32)
        called = torch.compile(prepare(model).model if is_prepared else model, dynamic=True, backend="eager")
        for batch in BATCHES:
            called(**batch, use_cache=False).loss.backward()
            got = take_gradient(model)
            model(**batch, use_cache=False).loss.backward()
            assert distance(got, take_gradient(model)) < (2e-2 if on_card else 1e-5)
    assert counters["stats"]["unique_graphs"] == num_graphs


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["plain", "sft"])
def test_a_trainer_compiles_two_graphs_and_ends_with_the_same_weights(tmp_path, kind):
    weights, options = [], {"learning_rate": 1e-2, "gradient_accumulation_steps": 1, "per_device_train_batch_size": 5}
    for changes in ({}, {"torch_compile": True, "torch_compile_backend": "aot_eager"}):
        torch._dynamo.reset()
        counters.clear()
        options |= {"save_strategy": "steps", "save_steps": 20, "max_steps": 30, **changes}
        trainer = make_trainer(kind, make_model("llama", head_dim=16), tmp_path / str(len(changes)), **options)
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
    head = attach(trainer, prove=False).head
    with as_on_a_card(), Waits() as waits, head.alone():
        trainer.model(**BATCHES[0])
    assert [name for name in waits.found if name != "_score_block"] == ["_find_targets"]
