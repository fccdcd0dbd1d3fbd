"""The head by tiles: its error beside that of three products and a cross-entropy, threads, and targets left out."""

from collections.abc import Iterator

import pytest
import torch

from tests.helpers.attention_cases import error
from tests.helpers.paths import check_operator
from tests.helpers.targets import has, running
from tests.helpers.tile_cases import Problem, drawn
from unpad.nn import losses
from unpad.nn.losses import cross_entropy
from unpad.nn.native import library
from unpad.nn.native.cross_entropy import head_backward, head_forward

pytestmark = [
    pytest.mark.skipif(not has(library.PLAIN_TILES), reason=f"no AVX-512 BF16: {library.describe()}"),
    pytest.mark.promise("speed.tiles"),
]
NO_AMX = pytest.mark.skipif(not has("avx512_amx"), reason="no AMX: the instructions of tiles were not run")


@pytest.fixture(params=[library.PLAIN_TILES, pytest.param("avx512_amx", marks=NO_AMX)])
def by_tiles(request: pytest.FixtureRequest) -> str:
    """Each target with tiles."""
    name: str = request.param
    return name


# Rows of one and of two blocks; vocabularies whose last panel has 8, 9, 17 and 3 words.
SIZES = [(100, 64, 1000), (530, 48, 1001), (70, 80, 6129), (40, 16, 20_003)]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_loss_and_gradients_err_no_more_than_without_tiles(sizes, smoothing):
    """The gradient of the weight, which is summed in fp32 and stays so, at most a quarter. Smoothed targets are not as
    near to whole numbers as others, and what their rounding takes off is added again."""
    problem = drawn(*sizes, smoothing)
    with losses.all_rows():
        tiled, present, exact = (
            problem.solved_by(library.PLAIN_TILES),
            problem.solved_by("avx512_bf16"),
            problem.exact(),
        )
    for share, a, b, wanted in zip((1.1, 1.1, 0.95 if smoothing else 1.1, 0.25), tiled, present, exact, strict=True):
        assert error(a, wanted) <= share * error(b, wanted) + 1e-7


@NO_AMX
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_instructions_give_the_bits_of_plain_tiles(sizes):
    problem = drawn(*sizes, 0.1)
    assert all(map(torch.equal, problem.solved_by("avx512_amx"), problem.solved_by(library.PLAIN_TILES)))


def sure() -> Problem:
    """Targets of which four in five are all but certain."""
    problem = drawn(600, 32, 1100, spread=1.0)
    certain = torch.arange(600) % 5 > 0
    hidden = problem.hidden.float() * 0.1 + certain[:, None] * problem.weight[problem.labels]
    return problem._replace(hidden=hidden.bfloat16())


def test_targets_that_are_sure_are_left_out_of_the_second_pass(by_tiles):
    problem = sure()
    fewer, present = problem.solved_by(by_tiles), problem.solved_by("avx512_bf16")
    with losses.all_rows():
        every = problem.solved_by(by_tiles)
    exact = problem.exact()
    assert 300 < int((fewer[2] == 0).all(1).sum()) < 500
    assert not (every[2] == 0).all(1).any()
    assert torch.equal(fewer[0], every[0])
    for share, a, b, wanted in zip((1.1, 1.1, 1.1, 1.1), fewer, present, exact, strict=True):
        assert error(a, wanted) <= share * error(b, wanted)
    kept = (fewer[2] != 0).any(1)
    assert torch.equal(fewer[2][kept], every[2][kept])


@pytest.mark.parametrize("problem", [drawn(1100, 48, 1001, 0.1), sure()], ids=["smoothed", "sure"])
def test_every_number_of_threads_gives_the_same_bits(by_tiles, problem):
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(problem.solved_by(by_tiles))
    for result in results[1:]:
        assert all(map(torch.equal, result, results[0]))


def test_a_row_has_the_same_bits_among_any_others(by_tiles):
    hidden, weight, labels, _ = drawn(700, 32, 500)
    weight = weight.bfloat16()
    with running(by_tiles):
        found = head_forward(hidden, weight, labels, 0.1)
        order = torch.randperm(700)[:600]
        for whole, part in zip(found, head_forward(hidden[order], weight, labels[order], 0.1), strict=True):
            assert torch.equal(whole[order], part)


@pytest.mark.parametrize("below_zero", [False, True])
def test_logits_of_any_size_have_finite_losses_and_gradients(by_tiles, below_zero):
    """The largest of a row is taken off; a sure target costs nothing, and never less."""
    problem = drawn(64, 32, 1000, spread=60.0)
    if below_zero:  # all of them, also the largest
        problem = problem._replace(hidden=problem.hidden.abs(), weight=-problem.weight.abs())
    exact = problem.exact()
    for got, wanted in zip(problem.solved_by(by_tiles), exact, strict=True):
        assert error(got, wanted) < 5e-3
    weight = problem.weight.bfloat16()
    largest = (problem.hidden.float() @ weight.float().T).argmax(1)
    with running(by_tiles):
        assert 0 <= head_forward(problem.hidden, weight, largest, 0.0)[1].min() < 1e-6


def test_no_rows_cost_nothing_and_only_what_is_wanted_is_computed(by_tiles):
    hidden, weight, labels, _ = drawn(33, 16, 50)
    weight = weight.bfloat16()
    with running(by_tiles):
        none = Problem(hidden[:0], weight, labels[:0]).solved()
        assert (none[0], none[1], none[2].shape) == (0, 0, (0, 16))
        assert not none[3].any()
        _, nll, log_z = head_forward(hidden, weight, labels, 0.0)
        both = head_backward(hidden, weight, labels, 0.0, nll, log_z, True, True)
        for wanted in ((True, False), (False, True)):
            some = head_backward(hidden, weight, labels, 0.0, nll, log_z, *wanted)
            for asked, whole, alone in zip(wanted, both, some, strict=True):
                assert torch.equal(alone, whole) if asked else not alone.numel()


def test_labels_outside_of_the_vocabulary_are_refused(by_tiles):
    hidden, weight, labels, _ = drawn(5, 16, 50)
    labels[2], labels[4] = 50, -1
    with running(by_tiles), pytest.raises(IndexError, match="2 labels are out of range of a vocabulary of 50"):
        cross_entropy(hidden, weight, labels)


@pytest.fixture
def _plain_tiles() -> Iterator[None]:
    with running(library.PLAIN_TILES):
        yield


@pytest.mark.usefixtures("_plain_tiles")
def test_operators_tell_their_shapes_without_running():
    hidden, weight, labels, _ = drawn(5, 16, 50)
    arguments = hidden, weight.bfloat16(), labels, 0.1
    check_operator("head_forward", *arguments)
    _, nll, log_z = head_forward(*arguments)
    check_operator("head_backward", *arguments, nll, log_z, True, True)
