"""An update that several processes share: the gradient of one batch of everything, with the bits of one process."""

import inspect
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from benchmarks.equal_processes import digests
from tests.conftest import random_batch, tiny_model
from tests.helpers.toy import quiet, write_toy
from tests.helpers.turns import in_turns
from unpad.batching.balance import assign
from unpad.batching.batch import RaggedBatch, concatenate
from unpad.models.contract import Trainable
from unpad.nn.draws import seeded
from unpad.nn.losses import Terms
from unpad.processes.group import Group
from unpad.training import step
from unpad.training.loop import train
from unpad.training.parallel.parallelism import Replicas
from unpad.training.parallel.share import Share, counts_of_all, counts_to_json, step_seed
from unpad.training.step import LossScaler, train_step

SIZES = (1, 2, 3, 4, 7)
SEED = (3, 41)  # of a run, and the number of its update


class TwoTerms(nn.Module):
    """A decoder with a second loss term, of every third sequence, that alone uses a second head; a part is frozen, and
    a part is never used."""

    def __init__(self, dtype: torch.dtype, **fields: object) -> None:
        super().__init__()
        self.decoder = tiny_model(dtype, **fields)
        self.second = nn.Linear(16, 1, dtype=dtype)
        self.unused = nn.Linear(16, 1, dtype=dtype)
        self.decoder.embed.weight.requires_grad_(False)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return super().parameters(recurse)

    def count_targets(self, batch: RaggedBatch) -> dict[str, int]:
        num = int((torch.arange(batch.num_seqs) % 3 == 2).sum())
        return {**self.decoder.count_targets(batch), "second": num}

    def losses(self, batch: RaggedBatch) -> Terms:
        terms, num = self.decoder.losses(batch), self.count_targets(batch)["second"]
        if num == 0:
            return terms | {"second": (torch.zeros((), dtype=self.second.weight.dtype), 0)}
        chosen = batch.select(range(2, batch.num_seqs, 3))
        ends = self.second(self.decoder(chosen)).squeeze(-1)[chosen.layout.cu_seqlens[1:].long() - 1]
        return terms | {"second": (ends.square().sum(), num)}


WEIGHTS = {"cross_entropy": 1.0, "second": 0.3}


def updates() -> dict[str, list[RaggedBatch]]:
    """Micro-batches of an update, by what is special about them."""
    silent, empty = random_batch([9, 4], share=0.0), random_batch([3]).select([])
    several = [
        random_batch([12, 3, 30], 1), empty, random_batch([1, 20], 2), silent, random_batch([7, 7, 7, 2, 40, 5], 3),
    ]  # fmt: skip
    return {
        "several, one empty and one without targets": several,
        "fewer than processes": [random_batch([12, 3, 30], 1), random_batch([25], 2)],
        "one": [random_batch([12, 3, 30], 1)],
        "one with targets, which is the last": [empty, silent, silent, random_batch([8, 8, 8], 4)],
        "none with targets": [silent, empty],
    }


def share_of(model: Trainable, micros: Sequence[RaggedBatch], group: Group, kind: str = "exact") -> Share:
    """The share of a process, as the training loop makes it."""
    numbers = assign([float(batch.total_tokens) for batch in micros], group.size)[group.rank]
    told = group.exchange(counts_to_json(model, [micros[i] for i in numbers], numbers))
    sums = Replicas(group).gradient_sum(kind, model)
    return Share(
        numbers, counts_of_all(told), SEED, Replicas(group), sums if group.size > 1 or len(micros) > 1 else None
    )


def update_of(
    size: int, micros: Sequence[RaggedBatch], dtype: torch.dtype, *, scale: float = 1.0, dropout: float = 0.0
) -> list[tuple[dict[str, Tensor], dict[str, float]]]:
    """Gradients by name, and sums of all terms, that each of `size` processes ends with."""

    def work(group: Group) -> tuple[dict[str, Tensor], dict[str, float]]:
        model = TwoTerms(dtype, dropout=dropout, attention_dropout=dropout).train()
        share = share_of(model, micros, group)
        torch.manual_seed(step_seed(*SEED))
        own = [micros[number] for number in share.numbers]
        sums, _ = step.accumulate(model, own, WEIGHTS, "fp32", scale, share=share)
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        if scale != 1.0 and share.sums is None:
            gradients = {name: gradient / scale for name, gradient in gradients.items()}
        return gradients, {name: float(total) for name, total in sums.items()}

    return in_turns(size, work)


@pytest.mark.parametrize("name", updates())
def test_the_gradient_is_that_of_one_batch_of_everything(name):
    micros = updates()[name]
    model = TwoTerms(torch.float64)
    counts = [model.count_targets(batch) for batch in micros]
    together = concatenate([batch for batch, count in zip(micros, counts, strict=True) if any(count.values())])
    # Every third sequence of a micro-batch counts in the second term, which a joined batch cannot know.
    terms = [model.losses(batch) for batch in micros]
    total = {term: sum(count[term] for count in counts) for term in WEIGHTS}
    whole = model.decoder.losses(together)["cross_entropy"][0]
    second = torch.stack([term["second"][0] for term in terms]).sum()
    trained = [
        weight * loss / total[term]
        for (term, weight), loss in zip(WEIGHTS.items(), (whole, second), strict=True)
        if total[term]
    ]
    if trained:
        torch.stack(trained).sum().backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    norm = torch.cat([torch.zeros(1), *(gradient.flatten() for gradient in expected.values())]).norm()
    for size in SIZES:
        for found, _ in update_of(size, micros, torch.float64):
            assert found.keys() == expected.keys(), size
            for parameter, gradient in found.items():
                assert (gradient - expected[parameter]).norm() <= 1e-12 * norm, (size, parameter)
    assert not any("unused" in name or "embed.weight" in name for name in expected)


@pytest.mark.parametrize("name", updates())
@pytest.mark.parametrize("scale", [1.0, 2.0**12])
def test_bits_are_those_of_one_process(name, scale):
    """Of fp32, with both dropouts; a scale of fp16 is taken out before gradients are rounded."""
    micros = updates()[name]
    ((expected, sums),) = update_of(1, micros, torch.float32, scale=scale, dropout=0.1)
    for size in SIZES[1:]:
        for found, total in update_of(size, micros, torch.float32, scale=scale, dropout=0.1):
            assert total == sums
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[one], expected[one]) for one in found)


class Linear(nn.Module):
    """A model whose gradient in a micro-batch is what the test says."""

    def __init__(self, gradients: Sequence[float]) -> None:
        super().__init__()
        self.weight, self.gradients = nn.Parameter(torch.zeros(1)), gradients

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return super().parameters(recurse)

    def count_targets(self, batch: RaggedBatch) -> dict[str, int]:
        return {"cross_entropy": 1}

    def losses(self, batch: RaggedBatch) -> Terms:
        gradient = self.gradients[batch.num_seqs - 1] * len(self.gradients)
        return {"cross_entropy": ((self.weight * gradient).sum(), 1)}


def linear_sums(gradients: Sequence[float], size: int) -> list[float]:
    """The gradient that each of `size` processes has after micro-batches with these."""
    micros = [random_batch([2] * (number + 1)) for number in range(len(gradients))]

    def work(group: Group) -> float:
        model = Linear(gradients)
        share = share_of(model, micros, group)
        step.accumulate(
            model, [micros[number] for number in share.numbers], {"cross_entropy": 1.0}, "fp32", share=share
        )
        return float(model.weight.grad)

    return in_turns(size, work)


# The last bits of small numbers are lost beside large ones that cancel, unless they are no smaller than the quantum.
CANCELLING = [1.0, 2.0**-40 / 3, 0.5, -1.0, 2.0**-39 / 7, -0.5]


@settings(deadline=None, max_examples=15)
@given(
    st.lists(
        st.builds(lambda sign, power, rest: sign * 2.0**power * (1 + rest), st.sampled_from([-1.0, 1.0]),
                  st.integers(-60, 1), st.floats(0, 1, width=32)), min_size=2, max_size=7,
    )
)  # fmt: skip
def test_no_order_of_numbers_of_any_size_changes_their_sum(gradients):
    expected = linear_sums(gradients, 1)
    for size in (2, 3, 5):
        assert linear_sums(gradients, size) == expected * size


# --------------------------------------------------------------------------- faults that must not pass


@dataclass(frozen=True)
class Fault:
    """An edit of one place of a function.

    Args:
        module: of the function, whose name may be that of a method; old, new: text of its source.
    """

    module: str
    function: str
    old: str
    new: str

    def plant(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replace the function until the test ends."""
        module = import_module(self.module)
        *owners, name = self.function.split(".")
        place: Any = getattr(module, owners[0]) if owners else module
        source = textwrap.dedent(inspect.getsource(getattr(place, name)))
        assert source.count(self.old) == 1, "the fault is no longer an edit of one place"
        found: dict[str, Any] = {}
        code = compile("from __future__ import annotations\n" + source.replace(self.old, self.new), name, "exec")
        exec(code, vars(module), found)
        original = getattr(place, name)
        places = [place, *(one for key, one in sys.modules.items() if key.startswith("unpad."))]
        for one in places:  # others import it by name
            if vars(one).get(name) is original:
                monkeypatch.setattr(one, name, found[name])


SHARE, PARALLELISM = (f"unpad.training.parallel.{name}" for name in ("share", "parallelism"))
STEP, LOOP = "unpad.training.step", "unpad.training.stage_loop"
NOT_ROUNDED = Fault(STEP, "accumulate", "rounded=len(share.counts) > 1", "rounded=False")
FAULTS = {
    "sums in fp32": Fault(PARALLELISM, "Replicas.gradient_sum", '"exact"', '"exact" and self.group.size == 1'),
    "draws by process": Fault(SHARE, "Share.draw_seed", "step_seed(*self.seed)",
                              "step_seed(*self.seed) + self.group.rank"),
    "local divisor": Fault(SHARE, "Share.total", "for micro in self.counts",
                           "for micro in [self.counts[i] for i in self.numbers]"),
    "local counts of metrics": Fault(LOOP, "_record_of", "stage.run.progress, loaded.share.counts",
                                     "stage.run.progress, [loaded.share.counts[i] for i in loaded.share.numbers]"),
}  # fmt: skip


def test_sums_that_are_not_rounded_depend_on_the_number_of_processes(monkeypatch):
    expected = linear_sums(CANCELLING, 1)
    assert all(linear_sums(CANCELLING, size) == expected * size for size in (2, 3, 5))
    NOT_ROUNDED.plant(monkeypatch)
    expected = linear_sums(CANCELLING, 1)
    assert not all(linear_sums(CANCELLING, size) == expected * size for size in (2, 3, 5))


@pytest.mark.parametrize("name", [None, *FAULTS])
def test_a_planted_fault_makes_runs_of_one_and_of_two_processes_differ(name, tmp_path, monkeypatch):
    recipe = write_toy(tmp_path, stages=[], data={"chat": []}, train={"threads": 1, "max_steps": 3})
    if name is not None:
        FAULTS[name].plant(monkeypatch)
    for size in (1, 2):
        folder = tmp_path / str(size)
        in_turns(size, lambda group, folder=folder: train(str(recipe), folder, console=quiet(), group=group))
    found, expected = digests(tmp_path / "2"), digests(tmp_path / "1")
    assert [file for file in found if found[file] != expected[file]] == (
        [] if name is None else ["metrics.jsonl", "metrics.csv"] if "metrics" in name else list(found)
    )


# --------------------------------------------------------------------------- one process


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_one_process_with_one_micro_batch_takes_the_plain_path_to_the_bit(precision):
    """Neither rounding nor sums in fp64: as `backward` of the mean of the losses and the optimizer alone."""
    batch, dropout = random_batch([12, 8, 15]), {"dropout": 0.1, "attention_dropout": 0.1}
    ours, plain = (tiny_model(torch.float32, **dropout).train() for _ in range(2))
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True) for model in (ours, plain)]
    scaler = LossScaler(2.0**8) if precision == "fp16" else None
    scale = 1.0 if scaler is None else scaler.scale
    for number in range(3):
        (counts,) = counts_of_all([counts_to_json(ours, [batch], [0])])
        share = Share([0], [counts], (0, number))
        options: dict[str, Any] = {"weights": {"cross_entropy": 1.0}, "precision": precision, "clip": None}
        train_step(ours, [batch], optimizers[0], scaler=scaler, share=share, **options)
        optimizers[1].zero_grad()
        with torch.autocast("cpu", torch.float16, enabled=precision == "fp16"), seeded(step_seed(0, number)):
            total, count = plain.losses(batch.numbered(0))["cross_entropy"]
        (total / count * scale).backward()
        for parameter in plain.parameters():
            parameter.grad = None if parameter.grad is None else parameter.grad / scale
        optimizers[1].step()
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), plain.parameters(), strict=True))
