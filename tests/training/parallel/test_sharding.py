"""Models that are divided among processes by FSDP2."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conftest import random_batch
from tests.helpers.attention_cases import as_on_a_card
from tests.helpers.image_models import random_images, random_squares, small_cnn, tiny_vit
from tests.helpers.patients import random_patients, tiny_patients_model
from tests.helpers.ranks import forbid_pickles, run_ranks
from tests.helpers.toy import run, write_toy
from tests.helpers.vision import ROWS, prepare, tiny
from unpad.batching.batch import RaggedBatch
from unpad.errors import RecipeError
from unpad.models.contract import Model
from unpad.models.decoder import Config, Decoder
from unpad.nn.block import compile_blocks, recompute_blocks
from unpad.processes.divided import is_divided, total_norm, whole_tensor
from unpad.processes.group import Group
from unpad.recipes.recipe import Recipe
from unpad.recipes.training import OptimSettings, ParameterGroup
from unpad.training.optim import freeze, make_optimizer, update
from unpad.training.parallel.divisions import alone, parallelism_class
from unpad.training.parallel.parallelism import Lockstep
from unpad.training.parallel.sharding import Sharding
from unpad.training.parallel.share import Share, count_micro, step_seed
from unpad.training.step import accumulate

CPU = torch.device("cpu")
SEED = (3, 5)


def decoder(**fields: Any) -> Decoder:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"width": 18, "blocks": 2, "heads": 3, "hidden": 26, "context": 64, "dropout": 0.1}
    return Decoder(Config(**{**sizes, **fields}), 51)


# Every model with micro-batches of which one has no sequence; 51 rows and 3 heads divide by neither 2 nor 4.
Case = tuple[Callable[[], Model], Callable[[], RaggedBatch], dict[str, float]]
CASES: dict[str, Case] = {
    "decoder, tied": (decoder, lambda: random_batch([5, 1, 9, 3, 12]), {"cross_entropy": 1.0}),
    "decoder, untied": (lambda: decoder(tied=False), lambda: random_batch([5, 1, 9, 3, 12]), {"cross_entropy": 1.0}),
    "vit": (tiny_vit, random_images, {"cross_entropy": 1.0}),
    "cnn": (small_cnn, random_squares, {"cross_entropy": 1.0}),
    # Some micro-batches have no image, so that only some processes use the tower.
    "vision_language": (tiny, lambda: prepare(ROWS).batch, {"cross_entropy": 1.0}),
    # The decoder of sets trains in none, and must not be moved by decay.
    "set_sequence": (
        lambda: tiny_patients_model(sample=False),
        lambda: random_patients([7, 0, 30, 2]),
        {"classification": 1.0, "kl": 0.5},
    ),
}

# Of the weights, of the computation, and the largest relative difference of a gradient. One model shows the last two.
PRECISIONS = [(torch.float32, "fp32", 1e-6), (torch.float64, "fp32", 1e-12), (torch.float32, "bf16", 1e-6)]


def cut(batch: RaggedBatch) -> list[RaggedBatch]:
    """A micro-batch for every sequence, and one without any."""
    return [*(batch.select([i]) for i in range(batch.num_seqs)), batch.select([])]


def gradients(model: Model, micros: list[RaggedBatch], weights: dict[str, float], precision: str) -> dict[str, Tensor]:
    """Gradients of an update in one process, of the parameters that have one."""
    for parameter in model.parameters():
        parameter.grad = None
    model.begin_step(0, 1, weights)
    counts = [count_micro(model, batch) for batch in micros]
    torch.manual_seed(step_seed(*SEED))
    accumulate(model.train(), micros, weights, precision, share=Share(range(len(micros)), counts, SEED))
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def divided_gradients(
    sharding: Sharding, group: Group, micros: list[RaggedBatch], weights: dict[str, float], precision: str
) -> dict[str, Tensor]:
    """The same of a divided model, of which the first process computes one micro-batch, and the last most."""
    model, counts = sharding.model, [count_micro(sharding.model, batch) for batch in micros]
    for parameter in model.parameters():
        parameter.grad = None
    model.begin_step(0, 1, weights)
    owner = [min(number, group.size - 1) for number in range(len(micros))]
    numbers = [number for number, rank in enumerate(owner) if rank == group.rank]
    lockstep = Lockstep(max(owner.count(rank) for rank in range(group.size)), sharding.empty)
    share = Share(numbers, counts, SEED, sharding, sharding, lockstep)
    torch.manual_seed(step_seed(*SEED))
    accumulate(model.train(), [micros[i] for i in numbers], weights, precision, share=share)
    assert all(is_divided(parameter) for parameter in model.parameters())
    return {name: whole_tensor(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest relative difference of a tensor."""
    assert found.keys() == expected.keys()
    return max(float((found[n] - e).norm() / e.norm().clamp_min(1e-9)) for n, e in expected.items())


def compare_updates(group: Group) -> None:
    """Gradients and updated weights of every case are those of one process."""
    for name, (make, batch, weights) in CASES.items():
        for dtype, precision, limit in PRECISIONS if name == "decoder, tied" else PRECISIONS[:1]:
            case = f"{name}, {dtype}, {precision}"
            micros = cut(batch())
            alone, model = make().to(dtype), make().to(dtype)
            sharding = Sharding(model, micros[-1], group, CPU)
            expected = gradients(alone, micros, weights, precision)
            found = divided_gradients(sharding, group, micros, weights, precision)
            assert difference(found, expected) <= limit, case
            settings = OptimSettings(lr=1e-2, groups=[ParameterGroup(parameters=["*1.*"], clip=0.01)])
            optimizers = [make_optimizer(one, settings) for one in (alone, model)]
            for one, optimizer in zip((alone, model), optimizers, strict=True):
                norm = total_norm([p.grad for p in one.parameters() if p.grad is not None])
                update(optimizer, norm, 0.1)
            after = dict(alone.named_parameters())
            for parameter, tensor in model.named_parameters():
                torch.testing.assert_close(
                    whole_tensor(tensor.detach()), after[parameter].detach(), rtol=1e-4, atol=1e-5
                )
            with torch.no_grad():
                terms = model.eval().losses(micros[0])
                if isinstance(model, Decoder):
                    outputs = [one.logits(one(micros[0])) for one in (model, alone.eval())]
                    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)
            sharding.reshard()
            assert all(is_divided(tensor) for tensor in model.parameters()), case
            with torch.no_grad():
                one = alone.eval().losses(micros[0])
            assert all(abs(float(terms[key][0] - one[key][0])) < 1e-4 for key in one), case


def compare_frozen(group: Group) -> None:
    """A block that is frozen in one stage trains in the next."""
    alone, model = decoder(), decoder()
    micros, weights = cut(random_batch([5, 1, 9])), {"cross_entropy": 1.0}
    sharding = Sharding(model, micros[-1], group, CPU)
    for patterns in (["blocks.0.*", "embed.*"], []):
        assert freeze(alone, patterns) == freeze(model, patterns)
        found = divided_gradients(sharding, group, micros, weights, "fp32")
        assert difference(found, gradients(alone, micros, weights, "fp32")) <= 1e-6
        assert any(name.startswith("blocks.0.") for name in found) == (not patterns)


def rounded_by_travel(group: Group, *, prepared: bool) -> float:
    """Difference to one process of the gradients of a block that travels in bf16, as of fresh norms, whose weights are
    numbers of bf16 too.

    Args:
        prepared: whether it is also compiled, and computed again in the backward pass.
    """
    micros, weights = [random_batch([5, 4]), random_batch([9, 2])], {"cross_entropy": 1.0}
    one, model = (decoder(blocks=1, dropout=0.0) for _ in range(2))
    with as_on_a_card():
        sharding = Sharding(model, micros[-1], group, CPU, half=True)
        if prepared:
            recompute_blocks(model)
            compile_blocks(model, "eager")
        found = divided_gradients(sharding, group, micros, weights, "bf16")
        return difference(found, gradients(one, micros, weights, "bf16"))


@pytest.mark.nightly
@pytest.mark.promise("processes.shard")
def test_gradients_of_a_divided_model_are_those_of_one_process(tmp_path):
    def work(group: Group) -> None:
        forbid_pickles()
        compare_updates(group)
        compare_frozen(group)

    assert run_ranks(tmp_path / "two", 2, work) == [None, None]


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")  # torch.compile warns of what it looks at itself
@pytest.mark.parametrize("prepared", [False, True])
def test_blocks_that_travel_in_bf16_round_gradients_alone_compiled_and_computed_again_too(tmp_path, prepared):
    found = run_ranks(tmp_path / "two", 2, lambda group: rounded_by_travel(group, prepared=prepared))
    assert 1e-4 < max(found) < 4e-3  # of norms


@pytest.mark.promise("processes.failing")
def test_a_process_that_fails_within_a_pass_ends_by_its_own_error_and_the_others_notice(tmp_path):
    def work(group: Group) -> None:
        model, micros = decoder(), cut(random_batch([5, 1, 9]))
        sharding = Sharding(model, micros[-1], group, CPU)
        if group.rank == 1:
            model.blocks[1].feed_forward.forward = fail
        divided_gradients(sharding, group, micros, {"cross_entropy": 1.0}, "fp32")

    (lost, _), (failed, text) = run_ranks(tmp_path / "two", 2, work)
    assert (lost, failed) == ("LostProcessError", "OutOfMemoryError")
    assert "a micro-batch of 1 sequence," in text


def test_passes_in_lockstep_go_from_the_largest_to_an_empty_one():
    model, micros = decoder(), [random_batch([length]) for length in (5, 12, 9)]
    counts = [count_micro(model, batch) for batch in [*micros, random_batch([2])]]
    in_turn = Share([0, 1, 2], counts)
    lockstep = Share([0, 1, 2], counts, lockstep=Lockstep(4, random_batch([])))
    assert [number for number, _ in in_turn.passes(micros, ["nll"])] == [0, 1, 2]
    assert [number for number, _ in lockstep.passes(micros, ["nll"])] == [1, 2, 0, None]
    tokens = [batch.total_tokens for _, batch in lockstep.passes(micros, ["nll"])]
    assert tokens == sorted(tokens, reverse=True)
    assert tokens[-1] == 0


def fail(_: Tensor) -> Tensor:
    raise MemoryError


# --------------------------------------------------------------------------- what is refused


def recipe_of(**sections: Any) -> Recipe:
    return Recipe(**{"model": {"kind": "decoder"}, "train": {"shard": "full"}, **sections})


REFUSED: list[tuple[Callable[[], Model], Recipe, int, str, str]] = [
    (decoder, recipe_of(), 1, "one process", "--processes 2"),
    (decoder, recipe_of(lora={"r": 2}), 2, "adapters", "train.shard=none"),
    (tiny_patients_model, recipe_of(), 2, "posterior collapse", "collapse.policy=off"),
    (
        lambda: tiny(prune={"method": "random", "layers": [0], "keep": 0.5}), recipe_of(), 2, "model.prune",
        "train.shard=none",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("make", "recipe", "size", "what", "fix"), REFUSED, ids=[case[3] for case in REFUSED])
def test_what_cannot_be_divided_is_refused_by_name(make, recipe, size, what, fix):
    with pytest.raises(RecipeError, match=what) as caught:
        parallelism_class(recipe).check_model(recipe, make(), size, goes_on=False)
    assert caught.value.where == "train.shard"
    assert fix in caught.value.fix
    whole = alone(recipe)
    parallelism_class(whole).check_model(whole, make(), size, goes_on=False)


def test_a_run_of_one_process_is_refused_before_its_directory_is_made(tmp_path):
    recipe = write_toy(tmp_path / "toy")
    with pytest.raises(RecipeError, match="one process has nobody to divide the model with"):
        run(recipe, tmp_path / "run", "train.shard=full")
    assert not (tmp_path / "run").exists()
