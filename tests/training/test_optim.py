"""Learning rates to the number, decay groups, freezing, and an optimizer state that survives."""

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.conftest import random_batch, tiny_model
from unpad.errors import RecipeError
from unpad.recipes.training import OptimSettings
from unpad.training import optim
from unpad.training.step import train_step

ONE = optim.Epochs((0,), (1,))


def rates(total: int, steps_per_epoch: int = 10, **fields: Any) -> list[float]:
    chosen = OptimSettings(**{"lr": 1e-3, "warmup": 0, **fields})
    schedule = optim.Schedule(chosen, optim.Epochs((0,), (steps_per_epoch,)), total)
    return [schedule.rate(step, step // steps_per_epoch) for step in range(total)]


@pytest.mark.promise("train.exponential")
def test_exponential_decay_has_the_documented_values():
    by_update = rates(1000, 10, schedule="exponential")
    assert by_update[0] == 1e-3
    assert by_update[100] == pytest.approx(9.50e-4, abs=5e-7)  # epoch 10
    assert by_update[500] == pytest.approx(7.74e-4, abs=5e-7)  # epoch 50
    assert by_update[15] == pytest.approx(1e-3 * 0.95**0.15)
    by_epoch = rates(1000, 10, schedule="exponential", per="epoch")
    assert by_epoch[15] == by_epoch[10] == by_epoch[19] == pytest.approx(1e-3 * 0.95**0.1)
    assert by_epoch[100] == by_update[100]


@pytest.mark.promise("train.exponential")
def test_warm_up_reaches_its_peak_at_the_stated_step():
    found = rates(200, schedule="warmup", warmup=0.1)
    assert found[:3] == pytest.approx([0.5e-4, 1e-4, 1.5e-4])
    assert found.index(1e-3) == 19  # the last of the 20 steps that are a tenth of 200
    assert set(found[19:]) == {1e-3}
    for total, peak in ((200, 49), (60, 29), (2000, 99)):  # half of a short stage, and a share of a long one
        assert rates(total, warmup=0.05, min_warmup=50).index(1e-3) == peak
    assert rates(7, schedule="constant") == [1e-3] * 7
    assert rates(7, schedule="constant", lr_scale=0.5) == [5e-4] * 7


@pytest.mark.promise("train.restarts")
def test_restarts_come_at_exact_steps_with_one_percent_just_before_each():
    found = rates(120, schedule="restarts", restarts=3)
    assert [step for step, rate in enumerate(found) if rate == 1e-3] == [0, 30, 60, 90]
    assert [found[step] for step in (29, 59, 89, 119)] == pytest.approx([1e-5] * 4)
    assert min(found) == pytest.approx(1e-5)
    by_epoch = rates(120, 10, schedule="restarts", restarts=2, per="epoch")
    assert [step for step, rate in enumerate(by_epoch) if rate == 1e-3] == [*range(10), *range(40, 50), *range(80, 90)]
    assert by_epoch[39] == by_epoch[119] == pytest.approx(1e-5)


@pytest.mark.promise("train.restarts", "patients.weights")
def test_cycles_that_grow_restart_where_sgdr_does():
    fields: dict[str, Any] = {"schedule": "restarts", "first_cycle": 1000, "cycle_factor": 2, "floor": 0.01}
    found = rates(15000, **fields)
    starts = [0, 1000, 3000, 7000]
    assert [step for step, rate in enumerate(found) if rate == 1e-3] == starts
    assert [found[step - 1] for step in (*starts[1:], 15000)] == pytest.approx([1e-5] * 4)
    for start, length in zip(starts, (1000, 2000, 4000, 8000), strict=True):
        middle = 1e-3 * (0.01 + 0.99 * (1 + math.cos(math.pi * (length // 3) / (length - 1))) / 2)
        assert found[start + length // 3] == pytest.approx(middle)
    cut = rates(5000, **fields)  # the third cycle is as long as the rest, so that the stage ends at the floor
    assert cut[:3000] == found[:3000]
    assert cut[3000] == 1e-3
    assert cut[4999] == pytest.approx(1e-5)
    assert cut[3000:] == sorted(cut[3000:], reverse=True)
    by_epoch = rates(70, 10, schedule="restarts", first_cycle=1, cycle_factor=2, per="epoch")
    assert [step for step in range(0, 70, 10) if by_epoch[step] == 1e-3] == [0, 10, 30]
    even = rates(12, schedule="restarts", first_cycle=4)
    assert [step for step, rate in enumerate(even) if rate == 1e-3] == [0, 4, 8]
    assert even == rates(12, schedule="restarts", restarts=2)  # equal cycles, as they are without a first one
    third = rates(30, schedule="restarts", first_cycle=4, cycle_factor=1.5)
    assert [step for step, rate in enumerate(third) if rate == 1e-3] == [0, 4, 10, 19]


@pytest.mark.promise("train.restarts")
@settings(deadline=None)
@given(
    schedule=st.sampled_from(["cosine", "restarts"]), total=st.integers(2, 400), restarts=st.integers(0, 20),
    warmup=st.floats(0, 0.5), floor=st.floats(0, 1),
)  # fmt: skip
def test_the_last_step_is_at_the_floor_for_any_total(schedule, total, restarts, warmup, floor):
    assume(schedule == "cosine" or restarts < total)
    chosen = OptimSettings(lr=1e-3, schedule=schedule, restarts=restarts, warmup=warmup, floor=floor)
    schedule = optim.Schedule(chosen, ONE, total)
    schedule.check()
    found = [schedule.rate(step, step) for step in range(total)]
    assert found[-1] == pytest.approx(1e-3 * floor)
    assert max(found) == pytest.approx(1e-3)
    assert schedule.rate(total + 3, total + 3) == found[-1]  # an epoch longer than the first
    if schedule == "restarts":
        bounds = [round(total * cycle / (restarts + 1)) for cycle in range(1, restarts + 1)]
        for bound in bounds:
            assert found[bound] == pytest.approx(1e-3) or bound == total - 1


@pytest.mark.promise("train.restarts")
def test_as_many_restarts_as_steps_are_refused():
    chosen = OptimSettings(schedule="restarts", restarts=5)
    optim.Schedule(chosen, ONE, 6).check()
    for total in (5, 4):
        with pytest.raises(RecipeError, match=f"5 restarts do not fit into {total} steps") as caught:
            optim.Schedule(chosen, ONE, total).check()
        assert f"at most {total - 1}" in caught.value.fix
    with pytest.raises(RecipeError, match="do not fit into 5 epochs"):
        optim.Schedule(
            OptimSettings(schedule="restarts", restarts=5, per="epoch"), optim.Epochs((0,), (10,)), 50
        ).check()


# --------------------------------------------------------------------------- groups and state


def test_each_limit_holds_for_the_norm_of_its_own_gradients():
    """Norms 3, 4 and 12, of which the first group has a limit of its own, the second one that it keeps to."""
    parts = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
    for part, norm in zip(parts, (3.0, 4.0, 12.0), strict=True):
        part.grad = torch.tensor([0.0, norm])
    groups = [
        {"params": [part], "clip": clip, "part": i}
        for i, (part, clip) in enumerate(zip(parts, (1, 5, None), strict=True))
    ]
    optim.update(torch.optim.SGD(groups, lr=0.0), torch.tensor(13.0), clip=6.0)
    assert [float(part.grad[1]) for part in parts] == pytest.approx([1.0, 4.0, 6.0], rel=1e-5)


@pytest.mark.parametrize(("norm", "touched"), [(4.9, False), (5.0, True), (5.1, True)])
def test_gradients_within_the_limit_are_not_multiplied(norm, touched):
    part = torch.nn.Parameter(torch.zeros(2))
    part.grad = gradient = torch.tensor([0.6, 0.8]) * norm
    expected = gradient.clone() * (5 / (torch.tensor(norm) + 1e-6)).clamp(max=1.0)
    version = gradient._version
    optim.update(torch.optim.SGD([part], lr=0.0), torch.tensor(norm), clip=5.0)
    assert torch.equal(gradient, expected)
    assert (gradient._version != version) == touched


def test_only_matrices_decay_and_never_embeddings():
    model = tiny_model(norm="layernorm", activation="relu", bias=True, positions="learned", tied=False)
    optimizer = optim.make_optimizer(model, OptimSettings(weight_decay=0.3))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decays = {
        names[id(parameter)]: group["weight_decay"] for group in optimizer.param_groups for parameter in group["params"]
    }
    assert decays.keys() == dict(model.named_parameters()).keys()
    for name, decay in decays.items():
        is_matrix = name.endswith(".weight") and "norm" not in name and "embed" not in name
        assert decay == (0.3 if is_matrix else 0.0), name


@pytest.mark.promise("train.frozen")
def test_freezing_by_pattern_counts_and_can_be_undone():
    model = tiny_model()
    total = sum(parameter.numel() for parameter in model.parameters())
    assert optim.freeze(model, ["embed.*"]) == model.embed.weight.numel()
    assert not model.embed.weight.requires_grad
    assert (
        sum(len(group["params"]) for group in optim.make_optimizer(model, OptimSettings()).param_groups)
        == len(list(model.parameters())) - 1
    )
    assert optim.freeze(model, []) == 0
    assert sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad) == total
    with pytest.raises(RecipeError, match="every parameter is frozen"):
        optim.freeze(model, ["*"])
    with pytest.raises(RecipeError, match=r'"blocks\.9\.\*" matches no parameter') as caught:
        optim.freeze(model, ["blocks.9.*"])
    assert "embed.weight" in caught.value.fix


def test_an_optimizer_put_back_takes_the_same_steps():
    batch, chosen = random_batch([9, 14, 3]), OptimSettings(lr=0.01)

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        train_step(model, [batch], optimizer, weights={"cross_entropy": 1.0}, precision="fp32", clip=1.0)

    model = tiny_model(torch.float32)
    optimizer = optim.make_optimizer(model, chosen)
    for _ in range(3):
        step(model, optimizer)
    tensors = {name: value.clone() for name, value in optim.optimizer_tensors(model, optimizer).items()}
    assert {name.rpartition(".")[2] for name in tensors} == {"exp_avg", "exp_avg_sq", "step"}
    copy = tiny_model(torch.float32)
    copy.load_state_dict(model.state_dict())
    other = optim.make_optimizer(copy, chosen)
    optim.load_optimizer_tensors(copy, other, tensors)
    for _ in range(2):
        step(model, optimizer)
        step(copy, other)
    for name, value in model.state_dict().items():
        assert torch.equal(value, copy.state_dict()[name]), name
