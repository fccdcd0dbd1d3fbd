"""Compiled blocks, and what an update waits for, on the processor as a card computes."""

import re
from functools import partial

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from tests.conftest import random_batch
from tests.helpers.attention_cases import as_on_a_card
from tests.helpers.paths import Waits
from tests.helpers.toy import SMALL_MODEL, events, run, same_tensors, weights, write_toy
from unpad.api import batches
from unpad.errors import RecipeError
from unpad.models.decoder import Config, Decoder
from unpad.nn.block import compile_blocks, recompute_blocks
from unpad.recipes.file import load_recipe
from unpad.recipes.training import OptimSettings
from unpad.training import setup
from unpad.training.memory import peak_of
from unpad.training.optim import make_optimizer, update
from unpad.training.setup import compiles
from unpad.training.step import train_step

CPU = torch.device("cpu")
# torch.compile warns of what it looks at itself.
pytestmark = pytest.mark.filterwarnings("ignore")


def trained(compiled: bool, dropout: float, updates: int) -> tuple[list[float], torch.Tensor]:
    """Losses and the last weights of some updates of flat runs, in which not every token has a target."""
    torch.manual_seed(0)
    config = Config(width=32, blocks=3, heads=2, hidden=48, context=64, dropout=dropout)
    model = Decoder(config, 97).train()
    if compiled:
        compile_blocks(model, "eager")
    optimizer, rng, losses = make_optimizer(model, OptimSettings()), np.random.default_rng(0), []
    corpus = [rng.integers(3, 97, size) for size in rng.integers(2, 60, 40 * updates)]
    counted = [rng.random(len(one)) < 0.7 for one in corpus]
    for micros in batches(corpus, counted, strategy="pack", tokens_per_step=256, tokens_per_micro=128):
        result = train_step(model, micros, optimizer, weights={"cross_entropy": 1.0}, precision="bf16", clip=1.0)
        losses.append(result.terms["nll"])
        if len(losses) == updates:
            break
    return losses, model.blocks[-1].feed_forward.down.weight.detach().clone()


@pytest.mark.nightly
def test_a_run_compiles_on_a_card_alone_says_so_and_ends_with_the_same_weights(tmp_path, monkeypatch):
    toy, half = str(write_toy(tmp_path / "toy")), ["precision=bf16", "train.max_steps=3"]
    recipe, off, card = load_recipe(toy, []), load_recipe(toy, ["train.compile=off"]), torch.device("cuda", 0)
    cases = [(recipe, card, "bf16"), (recipe, CPU, "bf16"), (recipe, card, "fp32"), (off, card, "bf16")]
    assert [compiles(*case) for case in cases] == [True, False, False, False]
    with as_on_a_card():
        run(toy, tmp_path / "plain", *half)
        monkeypatch.setattr(setup, "compiles", lambda *_: True)
        monkeypatch.setattr(setup, "compile_blocks", partial(compile_blocks, backend="eager"))
        run(toy, tmp_path / "compiled", *half)
    (said,) = events(tmp_path / "compiled", "compiled")
    assert re.fullmatch(r"blocks compiled: \d+ graphs?, \d+ s", said["message"])
    assert not events(tmp_path / "plain", "compiled")
    assert same_tensors(weights(tmp_path / "compiled"), weights(tmp_path / "plain"))


@pytest.mark.nightly
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_blocks_are_three_graphs_for_any_batches_and_draw_what_they_draw_uncompiled(dropout):
    with as_on_a_card():
        expected = trained(False, dropout, 6)
        torch._dynamo.reset()
        counters.clear()
        losses, weights = trained(True, dropout, 6)
    assert counters["stats"]["unique_graphs"] == 3
    assert not counters["graph_break"]
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected[0]), rtol=2e-3, atol=0)
    torch.testing.assert_close(weights, expected[1], rtol=0, atol=2e-3)


def test_blocks_that_are_computed_again_give_the_same_bits_in_less_memory(tmp_path):
    toy = str(write_toy(tmp_path / "toy", model=SMALL_MODEL | {"blocks": 3}))
    for name in ("false", "true"):
        run(toy, tmp_path / name, f"train.checkpoint_blocks={name}", "train.max_steps=3")
    assert same_tensors(weights(tmp_path / "true"), weights(tmp_path / "false"))
    model, batch = Decoder(Config(width=32, blocks=9, heads=2, hidden=96, dropout=0.1), 97).train(), random_batch([99])
    plain = peak_of(lambda: model.losses(batch)["cross_entropy"][0].backward(), CPU)
    recompute_blocks(model)
    assert peak_of(lambda: model.losses(batch)["cross_entropy"][0].backward(), CPU) < 0.7 * plain
    with pytest.raises(RecipeError, match="would draw anew"):
        load_recipe(toy, ["train.checkpoint_blocks=true", "lora.dropout=0.1"])


# Lines that only the processor runs, or that read a number of its own; a card would wait for no other.
NO_CARD_WAITS = {"draw", "_embed", "_score_block", "_within", "train_step"}


def test_an_update_waits_for_a_card_once():
    with as_on_a_card(), Waits() as waits:
        trained(False, 0.2, 1)
    assert set(waits.found) <= NO_CARD_WAITS


def test_a_step_that_is_not_finite_is_left_out_without_asking():
    weights = []
    for finite in (None, True, False):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        optimizer = make_optimizer(model, OptimSettings())
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        update(optimizer, torch.tensor(1.0), None, None if finite is None else torch.tensor(finite))
        weights.append(model.weight.detach())
        assert optimizer.state[model.weight]["step"] == (finite is not False)
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
