"""Fast sums: those of exact sums up to rounding, sent while backward goes on, and no process waits for a failed one."""

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import VOCAB, random_batch
from tests.helpers.ranks import run_ranks
from unpad.batching.batch import RaggedBatch
from unpad.errors import LostProcessError, OutOfMemoryError
from unpad.nn.losses import Terms
from unpad.processes.group import Group
from unpad.processes.sums import ExactSum, FastSum, GradientSum
from unpad.training.parallel.parallelism import Replicas
from unpad.training.parallel.share import Share, count_micro
from unpad.training.step import accumulate

WEIGHTS = {"cross_entropy": 1.0}
MICROS = [random_batch(lengths, seed) for seed, lengths in enumerate([[9, 4], [30], [5, 5], [7]])]
LONG = 25  # tokens from which a micro-batch uses `rare`
SHARES = {"uneven": [[0, 2, 3], [1]], "no work": [[0, 1, 2, 3], []], "no targets": [[0, 1, 2], [3]]}


class Toy(nn.Module):
    """Layers of which one is used by long micro-batches alone, one by none, and one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.rare, self.unused, self.frozen = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.fail: str | None = None

    def losses(self, batch: RaggedBatch) -> Terms:
        x = self.embed(batch.input_ids)
        if self.fail is not None:
            x = _Fails.apply(x, self.fail)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        x = self.frozen(self.rare(x) if batch.total_tokens > LONG else x)
        logits = (x @ self.embed.weight.t())[batch.target_index]
        total = nn.functional.cross_entropy(logits, batch.labels[batch.target_index], reduction="sum")
        return {"cross_entropy": (total, batch.num_targets)}

    def count_targets(self, batch: RaggedBatch) -> dict[str, int]:
        return {"cross_entropy": batch.num_targets}


class _Fails(torch.autograd.Function):
    """Fails in backward, when the layers above have their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, how: str) -> Tensor:
        ctx.how = how
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        if ctx.how == "memory":
            raise RuntimeError("not enough memory: you tried to allocate 1 bytes")
        os._exit(17)


def micros_of(case: str) -> list[RaggedBatch]:
    return [*MICROS[:3], random_batch([7], share=0.0)] if case == "no targets" else MICROS


def update(model: Toy, group: Group, sums: GradientSum, case: str, scale: float = 1.0) -> list[Tensor | None]:
    """Gradients of an update."""
    model.zero_grad()
    micros, numbers = micros_of(case), SHARES[case][group.rank]
    share = Share(numbers, [count_micro(model, batch) for batch in micros], parallelism=Replicas(group), sums=sums)
    accumulate(model, [micros[number] for number in numbers], WEIGHTS, "fp32", scale, share=share)
    return [p.grad for p in model.parameters()]


def compare(model: Toy, group: Group, fast: FastSum, case: str, scale: float = 1.0) -> dict[str, Any]:
    wanted = update(model, group, ExactSum(list(model.parameters())), case)
    sent_early = []
    finish = fast.finish
    fast.finish = lambda group, used: (sent_early.append(len(fast._sent)), finish(group, used))[1]
    got = [None if g is None else g.clone() for g in update(model, group, fast, case, scale)]
    again = update(model, group, fast, case, scale)
    del fast.finish
    return {
        "missing": [(a is None, b is None) for a, b in zip(got, wanted, strict=True)],
        "error": max(
            float((a - b).norm() / b.norm().clamp_min(1e-9)) for a, b in zip(got, wanted, strict=True) if a is not None
        ),
        "sent_early": sent_early[0],
        "repeats": all(torch.equal(a, b) for a, b in zip(got, again, strict=True) if a is not None),
        "hooks": sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()),
        "sums": [None if g is None else float(g.double().sum()) for g in got],
    }


def work(group: Group) -> dict[str, Any]:
    model = Toy()
    fast = FastSum(list(model.parameters()), group, bucket_bytes=1)
    told: dict[str, Any] = {case: compare(model, group, fast, case) for case in SHARES}
    told["one bucket"] = compare(model, group, FastSum(list(model.parameters()), group), "uneven")
    told["scaled"] = compare(model, group, fast, "uneven", scale=1024.0)
    told["buckets"] = len(fast._buckets)
    model.fail = "memory" if group.rank == 1 else None
    try:
        update(model, group, fast, "uneven")
    except OutOfMemoryError as error:
        told["out of memory"] = str(error)
    model.fail = None
    told["after an error"] = compare(model, group, fast, "uneven")
    told["by rank"] = group.exchange(told)
    model.fail = "exit" if group.rank == 1 else None
    try:
        update(model, group, fast, "uneven")
    except LostProcessError as error:
        told["lost"] = error.exit_code
    return told


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_ranks(tmp_path_factory.mktemp("fast") / "ranks", 2, work)


@pytest.mark.promise("processes.fast-sums")
@pytest.mark.parametrize("case", [*SHARES, "one bucket", "scaled", "after an error"])
def test_gradients_are_those_of_exact_sums(told, case):
    found = told[0][case]
    assert found["error"] < 1e-6
    assert all(got == wanted for got, wanted in found["missing"])
    assert sum(got for got, _ in found["missing"]) == (2 + 2 if "targets" not in case else 4)  # unused, frozen
    assert found["repeats"]
    assert found["hooks"] == 0


@pytest.mark.promise("processes.fast-sums")
def test_gradients_are_sent_before_the_backward_pass_ends(told):
    unused = 2  # process 1 has the micro-batch that uses `rare`
    assert told[0]["by rank"][1]["scaled"]["sent_early"] == told[0]["buckets"] - unused
    assert told[0]["by rank"][1]["no work"]["sent_early"] == 0


def test_an_error_in_one_process_is_that_of_all_and_a_lost_one_is_noticed(told):
    assert "does not fit" in told[0]["out of memory"]
    assert "(process 1)" in told[0]["out of memory"]
    assert told[0]["lost"] == LostProcessError.exit_code
    assert told[1] == "exit 17"
