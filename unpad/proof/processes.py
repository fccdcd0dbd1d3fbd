"""`unpad prove --processes`: an update by several processes equals that by one process to the bit, or with fast sums in
its gradient.

The command starts real processes, as many as the largest number asks for. Each number of them takes the same update
from the same weights, with dropout, through the planner, the loader and the step of training.
"""

import copy
import hashlib
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from unpad.batching.loader import load_steps
from unpad.batching.plan import Plan
from unpad.errors import RecipeError
from unpad.interchange.origin import open_named
from unpad.models.adapters import draw_adapters
from unpad.models.cost import cells_per_token
from unpad.processes.children import run_all
from unpad.processes.group import Group, joined
from unpad.processes.sums import sum_kind
from unpad.processes.worker import refuse_under_torchrun
from unpad.proof import sample as samples
from unpad.proof.line import Certificate, Line
from unpad.terminal.progress import progress
from unpad.terminal.table import number_of
from unpad.training.parallel.divisions import parallelism_class
from unpad.training.parallel.parallelism import Replicas
from unpad.training.parallel.share import Share, counts_of_all, counts_to_json, own_numbers, step_seed
from unpad.training.rehearsal import Rehearsal
from unpad.training.setup import Setup
from unpad.training.stage import prepare_model
from unpad.training.updates import takes_groups

# Relative error that fast sums may add to a gradient: fp32 keeps 24 bits, and they add one number per micro-batch.
FAST = 1e-6
MOST_SEQUENCES = 16  # of the update, for each process
UPDATES = 8  # share of the work of a one-process certificate, which computes about thirty passes in fp64
GRACE_S = 10.0  # for the others to end after one process has failed


@dataclass(frozen=True)
class Job:
    """Arguments of every process.

    Args:
        ports: rendezvous port on this machine for each number of processes.
        threads: threads of every process, the same for all numbers of processes.
    """

    name: str
    overrides: tuple[str, ...]
    ports: dict[int, int]
    threads: int


def prove_processes(name: str, overrides: Sequence[str], numbers: Sequence[int]) -> Certificate:
    """Compare an update of a recipe by several numbers of processes with the update by one.

    Args:
        numbers: of processes, one of them above 1.

    Raises:
        RecipeError: there is nothing to compare.
        UnpadError: an error of the recipe or its data, from one of the processes.
        LostProcessError: a process was killed.
    """
    refuse_under_torchrun("torchrun has started this process already, as one of several", "--processes", "leave it out")
    recipe, _ = open_named(name, overrides, samples.on_own_data(name))
    if what := parallelism_class(recipe).unequal:
        raise RecipeError(what, where="--processes", fix="set train.shard=none to prove the sums of whole models")
    wanted = sorted({1, *numbers})
    if wanted == [1]:
        raise RecipeError("one process has nothing to equal", where="--processes", fix="name more, as in 1,2,3")
    threads = recipe.train.threads or max(torch.get_num_threads() // wanted[-1], 1)
    job = Job(name, tuple(overrides), {number: _free_port() for number in wanted}, threads)
    with progress("proving"):
        return Certificate(tuple(_run(job)))


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _run(job: Job) -> list[Line]:
    """Start the processes and return the lines of the first."""
    calls = [(job, rank) for rank in range(max(job.ports))]
    fix = "run it again; with fewer processes if memory is short"
    return run_all(_compare, calls, modules=[__name__], grace=GRACE_S, fix=fix)[0]


# --------------------------------------------------------------------------- in every process


@contextmanager
def _group(job: Job, rank: int, size: int) -> Iterator[Group]:
    """The group of the first `size` processes."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(job.ports[size])}
    with joined() as group:
        yield group


def _compare(job: Job, rank: int) -> list[Line]:
    """Take the update by every number of processes, the largest first, which also reads the data."""
    torch.set_num_threads(job.threads)
    sizes = sorted(job.ports, reverse=True)
    with _group(job, rank, sizes[0]) as group:
        case = _Case.of(job, group)
        updates = {sizes[0]: case.update(group)}
    for size in sizes[1:]:
        if rank < size:
            with _group(job, rank, size) as group:
                updates[size] = case.update(group)
    return [line for size in sizes[-2::-1] if rank == 0 for line in case.lines(size, updates[size], updates[1])]


@dataclass(frozen=True)
class _UpdateResults:
    """Results of an update.

    Args:
        gradients: gradients of all parameters end to end, in fp64.
        rest: weights, state of the optimizer, loss terms and gradient norm, likewise.
        shares: micro-batches of every process.
        digests: sha256 of weights and state, of every process.
    """

    gradients: Tensor
    rest: Tensor
    shares: list[int]
    digests: list[str]


@dataclass(frozen=True)
class _Case:
    """An update: the recipe's model and a plan of one step over a sample of its data."""

    setup: Setup
    plan: Plan
    initial: dict[str, Tensor]

    @classmethod
    def of(cls, job: Job, group: Group) -> "_Case":
        setup = samples.open_setup(job.name, job.overrides, group)
        model, stage = setup.model, setup.stages[-1]
        with group.together():
            draw_adapters(model)
            prepare_model(model, stage)
            sample = samples.choose(
                setup, samples.candidates_of(setup), MOST_SEQUENCES * group.size, UPDATES * samples.WORK
            )
            samples.spread_margins(setup, sample)
            made = samples.plan_of_sample(setup, sample, samples.small_settings(setup))
        return cls(setup, made, copy.deepcopy(model.state_dict()))

    def update(self, group: Group) -> _UpdateResults:
        """Take the update, from the weights at the beginning."""
        setup, model, stage = self.setup, self.setup.model, self.setup.stages[-1]
        recipe = stage.recipe
        model.load_state_dict(self.initial)
        rehearsal = Rehearsal(setup, stage, copies=False)
        planned = self.plan.step(0)
        ratio, attended = cells_per_token(model), setup.data.table.attended
        own = partial(own_numbers, group=group, cells_per_token=ratio, attended=attended)
        steps = load_steps(setup.data.load, self.plan, setup.device, group_lengths=takes_groups(setup), own=own)
        with closing(steps), group.together() as talk:
            micros = next(steps)
            talk.own = counts_to_json(model, micros, own(planned))
        parallelism, seed = Replicas(group), recipe.train.seed
        is_summed = group.size > 1 or len(planned) > 1
        sums = parallelism.gradient_sum(self._kind(group.size), model) if is_summed else None
        share = Share(own(planned), counts_of_all(talk.told), (seed, 0), parallelism, sums)
        torch.manual_seed(step_seed(seed, 0))
        result = rehearsal.step(micros, share)
        states = [value for state in rehearsal.optimizer.state.values() for value in state.values()]
        numbers = torch.tensor([*result.terms.values(), result.grad_norm]).double()
        left = _flat([*model.state_dict().values(), *states, numbers])
        digests = group.exchange(hashlib.sha256(left.numpy().tobytes()).hexdigest())
        shares = [len(numbers) for numbers in talk.told]
        return _UpdateResults(
            _flat([torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]),
            left,
            shares,
            digests,
        )

    def _kind(self, size: int) -> str:
        return sum_kind(self.setup.recipe.train.sums, self.setup.device.type, size)

    def lines(self, size: int, found: _UpdateResults, one: _UpdateResults) -> list[Line]:
        """Claims about an update by `size` processes."""
        note = f"{number_of(sum(found.shares), 'micro-batches')}, by process: {', '.join(map(str, found.shares))}"
        gap = f"{note}: at least one process had nothing to compute, so no sum was compared" * (0 in found.shares)
        gap = gap or "all gradients are 0 with these weights" * (not bool(one.gradients.any()))
        other = len(set(found.digests)) - 1
        alike = Line(f"weights in all of {size} processes are equal", "", float(other), 0.0, other == 0).unless(gap)
        if self._kind(size) == "exact":
            differ = _num_unlike(found.gradients, one.gradients) + _num_unlike(found.rest, one.rest)
            equal = Line(f"an update by {size} processes = by one", "", float(differ), 0.0, differ == 0, note)
            return [equal.unless(gap), alike]
        difference = (found.gradients - one.gradients).norm() / one.gradients.norm().clamp_min(1e-30)
        error = float(difference.nan_to_num(float("inf")))
        near = Line(f"gradient by {size} processes against one", "", error, FAST, error <= FAST, note)
        return [near.unless(gap), alike]


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([one.detach().double().flatten().cpu() for one in tensors])


def _num_unlike(one: Tensor, other: Tensor) -> int:
    """Number of values that are not equal; NaN equals NaN."""
    return int(((one != other) & ~(one.isnan() & other.isnan())).sum())
