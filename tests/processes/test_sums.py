"""Exact sums of gradients: the same bits in every order and for every assignment, equal to whole-number arithmetic."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.helpers.paths import PATHS, on
from unpad.processes import sums
from unpad.processes.group import ALONE, Group
from unpad.processes.sums import QUANTUM, ExactSum

# Rows: micro-batches. Sums without rounding, and those in fp32, give other bits in another order of the rows.
TELLING = [
    [1.0, 1.0, 0.1, 3e-8],
    [2.0**-53, 2.0**-24, 0.3, 7e-15],
    [2.0**-53, 2.0**-24, -0.7, 2.0**-48],
    [2.0**-24, 2.0**-24, 1e-6, -9e-15],
]


@dataclass(frozen=True)
class Wire(Group):
    """A process of several that are run one after the other: `others` holds the tensors of those before it."""

    others: list[Tensor] = field(default_factory=list)
    last: bool = True

    def add(self, values: Tensor) -> None:
        if not self.last:
            self.others.append(values.clone())
        for other in self.others if self.last else ():
            values.add_(other)


def added(gradients, shares, *, scale=1.0, dtype=torch.float32):
    """The `.grad` of every parameter after an update.

    Args:
        gradients: of every micro-batch, one per parameter.
        shares: micro-batches of every process, in the order in which it computes them.
        scale: that autograd's gradients have been multiplied by.
    """
    group = Wire(size=len(shares), last=False) if len(shares) > 1 else ALONE
    made, used = [], set[int]()
    for share in shares:
        shapes = [next(g.shape for g in column if g is not None) for column in zip(*gradients, strict=True)]
        parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
        exact = ExactSum(parameters)
        exact.begin(rounded=len(gradients) > 1, takes=len(share))
        for micro in share:
            for parameter, gradient in zip(parameters, gradients[micro], strict=True):
                parameter.grad = None if gradient is None else gradient * scale
            exact.take(scale)
        used |= exact.used
        made.append((exact, parameters))
    for exact, _ in made[:-1]:
        exact.finish(group, used)
    last, parameters = made[-1]
    last.finish(Wire(size=len(shares), others=group.others) if isinstance(group, Wire) else ALONE, used)
    return [parameter.grad for parameter in parameters]


def bits(gradients: Sequence[Tensor | None]) -> list[bytes | None]:
    return [None if gradient is None else gradient.numpy().tobytes() for gradient in gradients]


def by_whole_numbers(column: Sequence[float]) -> np.float32:
    """Sum of an entry over micro-batches, each as the nearest whole number of QUANTUM, ties to the even one."""
    return np.float32(float(sum(round(Fraction(x) / Fraction(QUANTUM)) for x in column)) * QUANTUM)


numbers = st.one_of(
    st.floats(-15, 15, width=32),
    st.floats(-(2.0**-20), 2.0**-20, width=32),
    st.integers(-9, 9).map(lambda k: k * QUANTUM / 2),  # ties
)
rows = st.integers(1, 4).flatmap(lambda n: st.lists(st.lists(numbers, min_size=n, max_size=n), min_size=2, max_size=4))


@pytest.mark.promise("processes.sums")
@pytest.mark.parametrize("path", PATHS)
@settings(deadline=None, max_examples=60)
@example(TELLING, [3, 2, 1, 0], [0, 0, 0, 0])
@example(TELLING, [0, 1, 2, 3], [0, 1, 2, 3])
@given(rows, st.permutations(range(4)), st.lists(st.integers(0, 3), min_size=4, max_size=4))
def test_any_order_and_assignment_gives_the_sum_of_whole_numbers(path, rows, order, process_of):
    gradients = [[torch.tensor(row)] for row in rows]
    order = [micro for micro in order if micro < len(rows)]
    shares = [[micro for micro in order if process_of[micro] == process] for process in range(4)]
    with on(path):
        whole, shared = added(gradients, [list(range(len(rows)))]), added(gradients, shares)
    expected = np.array([by_whole_numbers(column) for column in np.float32(rows).T.tolist()])
    assert bits(whole) == bits(shared) == [expected.tobytes()]


def test_the_rows_of_the_example_tell_sums_without_rounding_and_sums_in_fp32_apart():
    for dtype in (torch.float64, torch.float32):
        found = set()
        for order in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 2, 3, 0]):
            total = torch.zeros(4, dtype=dtype)
            for micro in order:
                total += torch.tensor(TELLING[micro]).to(dtype)
            found.add(total.float().numpy().tobytes())
        assert len(found) > 1, dtype


def test_each_micro_batch_is_rounded_by_at_most_half_a_quantum():
    generator = torch.Generator().manual_seed(0)
    gradients = [
        [torch.randn(1000, generator=generator) * 2.0 ** -torch.randint(0, 60, (1000,), generator=generator)]
        for _ in range(5)
    ]
    exact = ExactSum([nn.Parameter(torch.zeros(1000))])
    exact.begin(rounded=True, takes=5)
    for (gradient,) in gradients:
        exact.parameters[0].grad = gradient.clone()
        exact.take()
    exact._add_held()
    total = exact._sums()[0]
    true = sum(gradient.double() for (gradient,) in gradients)  # within 2^-50 of the truth
    assert (total - true).abs().max() <= 5 * 2.0**-48 + 2.0**-50
    assert torch.equal(total / QUANTUM, (total / QUANTUM).round())


def by_definition(gradients: Sequence[Sequence[Tensor | None]], shares: Sequence[Sequence[int]]) -> list[Tensor | None]:
    """The same as `added` gives, each gradient rounded and added by itself to a sum in fp64."""
    found: list[Tensor | None] = []
    for column in zip(*gradients, strict=True):
        totals = []
        for share in shares:
            given = [gradient for micro in share if (gradient := column[micro]) is not None]
            rounded = [gradient.double() + 48.0 - 48.0 for gradient in given] if len(gradients) > 1 else given
            totals += [sum(rounded[1:], rounded[0])] if rounded else []
        found.append(sum(totals[:-1], totals[-1]).float() if totals else None)  # in the order of `Wire`
    return found


any_number = st.one_of(
    st.floats(width=32),
    st.floats(-64, 64, width=32),
    st.floats(-(2.0**-20), 2.0**-20, width=32),
    st.integers(-9, 9).map(lambda k: k * QUANTUM / 2),
    st.sampled_from([-0.0, 2.0**-149, -(2.0**-126), 15.999999, -16.0, 63.999996, 64.0, 2.0**56, float("nan")]),
)
column = st.lists(st.one_of(st.none(), st.lists(any_number, min_size=9, max_size=9)), min_size=7, max_size=7)


@pytest.mark.slow
@pytest.mark.promise("processes.sums")
@pytest.mark.parametrize("path", PATHS)
@settings(deadline=None, max_examples=150)
@example([[[2.0**80] * 9, [-(2.0**80)] * 9, [1.0] * 9, *[None] * 4]] * 2, 3, [0, 1, 2, 3, 4, 5, 6], [0] * 7, True, 1.0)
@given(
    columns=st.lists(column, min_size=2, max_size=2),
    num=st.integers(1, 7),
    order=st.permutations(range(7)),
    process_of=st.lists(st.integers(0, 2), min_size=7, max_size=7),
    alone=st.booleans(),
    scale=st.sampled_from([1.0, 2.0**10]),
)
def test_gradients_that_are_held_have_the_bits_of_each_added_by_itself(
    path, columns, num, order, process_of, alone, scale
):
    """Any numbers: ties, subnormal, huge and non-finite ones; any micro-batch may leave a parameter without."""
    gradients: list[list[Tensor | None]] = [
        [None if row is None else torch.tensor(row) / scale for row in rows] for rows in zip(*columns, strict=True)
    ][:num]
    gradients.append([torch.full((9,), 0.25)] * 2)  # no parameter is without any
    order = [micro for micro in order if micro < num] + [num]
    shares = [[micro for micro in order if alone or process_of[micro % 7] == process] for process in range(3)]
    shares = shares[:1] if alone else shares
    with on(path), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sums, "_BLOCK", 4)
        found = added(gradients, shares, scale=scale)
    for one, other in zip(found, by_definition(gradients, shares), strict=True):
        np.testing.assert_array_equal(one, other)  # NaN equals NaN
        assert torch.equal(one.signbit() & ~one.isnan(), other.signbit() & ~other.isnan())


@pytest.mark.promise("processes.sums")
@pytest.mark.parametrize(("micros", "processes"), [(1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (8, 1), (4, 4), (4, 2)])
def test_no_more_is_held_during_a_pass_than_is_foretold(micros, processes):
    parameters = [nn.Parameter(torch.zeros(size)) for size in (10, 300)]
    exact, group, own = ExactSum(parameters), Wire(size=processes), micros // processes
    for _ in range(3):
        most = 0
        exact.begin(rounded=micros > 1, takes=own)
        for _ in range(own):
            held = [gradient for given in exact._held for gradient in given.values()]
            flat = [] if exact._flat is None else [exact._flat]
            most = max(most, sum(tensor.nbytes for tensor in held + flat))
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            exact.take()
        exact.finish(group, exact.used)
        assert not any(exact._held), "of a sum nothing is held"
    assert most == sum(sums.held_bytes(parameter, micros, processes) for parameter in parameters)


@pytest.mark.parametrize("path", PATHS)
def test_an_update_of_one_micro_batch_keeps_its_gradient_whoever_computes_it(path):
    gradient = torch.tensor([1.0, -0.0, 2.0**-100, 0.1, float("nan")])
    with on(path):
        for scale in (1.0, 2.0**16):
            for shares in ([[0]], [[], [0]], [[0], [], []]):
                assert bits(added([[gradient]], shares, scale=scale)) == bits([gradient])


@pytest.mark.promise("processes.sums")
def test_one_process_with_one_micro_batch_makes_no_copy():
    parameter = nn.Parameter(torch.zeros(3))
    exact, gradient = ExactSum([parameter]), torch.ones(3)
    exact.begin(rounded=False, takes=1)
    parameter.grad = gradient
    exact.take()
    exact.finish(ALONE, exact.used)
    assert parameter.grad is gradient


@pytest.mark.parametrize("path", PATHS)
def test_parameters_without_a_gradient_keep_none_and_frozen_ones_are_left_alone(path):
    one, two, three, frozen = (nn.Parameter(torch.zeros(2), requires_grad=i < 3) for i in range(4))
    exact = ExactSum([one, frozen, two, three])
    frozen.grad = torch.full((2,), 5.0)
    with on(path):
        for _ in range(2):  # the second update finds the sums of the first
            exact.begin(rounded=True, takes=2)
            for first, last in ((None, 3.0), (1.0, 4.0)):
                one.grad = None if first is None else torch.full((2,), first)
                three.grad, two.grad = torch.full((2,), last), None
                exact.take()
                assert one.grad is None
                assert three.grad is None
            assert exact.used == {0, 2}
            exact.finish(ALONE, exact.used)
            assert two.grad is None
            assert [one.grad.tolist(), three.grad.tolist(), frozen.grad.tolist()] == [[1, 1], [7, 7], [5, 5]]
            one.grad = two.grad = three.grad = None
        # a parameter that only another process has used: this one contributes nothing
        gradients = [[torch.ones(2), None, torch.ones(2)], [None, None, torch.ones(2)], [None, torch.ones(2), None]]
        assert [g.tolist() for g in added(gradients, [[0], [1], [2]])] == [[1, 1], [1, 1], [2, 2]]


@pytest.mark.parametrize("path", PATHS)
def test_nan_infinity_and_huge_gradients_pass_through(path):
    inf, nan = float("inf"), float("nan")
    gradients = [
        torch.tensor([nan, inf, -inf, inf, 3e38, 16.0, -20.03, 2.0**56]),
        torch.tensor([1.0, 1, 1, -inf, 0, 0, 0, 0]),
    ]
    with on(path):
        for shares in ([[0, 1]], [[1], [0]]):
            (total,) = added([[gradient] for gradient in gradients], shares)
            assert total is not None
            np.testing.assert_array_equal(total, gradients[0] + gradients[1])  # NaN equals NaN


@pytest.mark.parametrize("path", PATHS)
def test_sums_beyond_64_are_those_of_ordinary_fp64(path):
    gradients = [torch.randn(500, generator=torch.Generator().manual_seed(i)) * 10.0**i for i in range(6)]
    with on(path):
        (total,) = added([[gradient] for gradient in gradients], [[0, 1, 2, 3, 4, 5]])
    true = torch.stack(gradients).double().sum(0)
    assert (total.double() - true).abs().max() <= true.abs().max() * 2.0**-24


@pytest.mark.parametrize("path", PATHS)
def test_gradients_of_fp16_are_divided_by_the_loss_scale_before_they_are_rounded(path):
    gradients = [[torch.tensor(row)] for row in TELLING]
    with on(path):
        plain = added(gradients, [[0, 1, 2, 3]])
        assert bits(added(gradients, [[2, 0], [3, 1]], scale=2.0**16)) == bits(plain)
        with pytest.raises(AssertionError, match="power of two"):
            added(gradients, [[0, 1, 2, 3]], scale=3.0)


def test_parameters_in_bf16_are_rounded_once_and_those_in_fp64_are_not_rounded_to_multiples():
    rows = [[0.5, 2.0**-60], [2.0**-9, 2.0**-60], [2.0**-9, 0.0]]
    low = added([[torch.tensor(row).bfloat16()] for row in rows], [[2, 1, 0]], dtype=torch.bfloat16)
    assert low[0].dtype == torch.bfloat16
    assert low[0].tolist() == [0.50390625, 0.0]  # bf16 alone would round 0.5 + 2^-9 back to 0.5, twice
    (double,) = added([[torch.tensor(row).double()] for row in rows], [[0, 1, 2]], dtype=torch.float64)
    assert double.tolist() == [0.5 + 2.0**-8, 2.0**-59]


def test_sums_of_an_update_do_not_change_with_the_next():
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    exact, kept = ExactSum([parameter]), []
    for value in (1.0, 2.0):
        exact.begin(rounded=True, takes=2)
        parameter.grad = torch.full((2,), value, dtype=torch.float64)
        exact.take()
        exact.finish(ALONE, exact.used)
        kept.append(parameter.grad)
    assert [gradient.tolist() for gradient in kept] == [[1, 1], [2, 2]]


@pytest.mark.parametrize("path", PATHS)
def test_gradients_that_are_not_contiguous_or_longer_than_a_block_are_added_at_their_places(path, monkeypatch):
    monkeypatch.setattr(sums, "_BLOCK", 7)
    gradients = [[torch.randn(4, 5, generator=torch.Generator().manual_seed(i)).T] for i in range(3)]
    with on(path):
        found = added(gradients, [[0, 1, 2]])
        assert bits(found) == bits(added([[g.contiguous()] for (g,) in gradients], [[0], [2, 1]]))
    assert found[0] is not None
    torch.testing.assert_close(found[0], sum(g for (g,) in gradients), rtol=1e-6, atol=1e-6)


def test_a_model_without_trained_parameters_has_nothing_to_add():
    exact = ExactSum([nn.Parameter(torch.zeros(2), requires_grad=False)])
    exact.begin(rounded=True, takes=2)
    exact.take()
    exact.finish(ALONE, exact.used)
    assert exact.used == set()
