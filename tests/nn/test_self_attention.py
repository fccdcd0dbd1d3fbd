"""Attention by every path agrees with the definition, forward and backward, and sequences stay apart."""

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests.helpers.attention_cases import SEED, Case, definition, error, in_double, make_case
from tests.helpers.grid import pairs
from tests.helpers.paths import PATHS, Path, on, taken
from unpad.batching.layout import build_layout
from unpad.nn import attention
from unpad.nn.attend import Attend
from unpad.nn.attention import reference_attention
from unpad.nn.rope import rotate

pytestmark = pytest.mark.promise("speed.kernels")


@pytest.fixture(params=PATHS, autouse=True)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The path that attention takes, with a known seed."""
    monkeypatch.setattr(attention, "draw", lambda: SEED)
    with on(request.param):
        yield request.param


LENGTHS = {
    "mixed": [1, 2, 20, 0, 33, 48, 49, 7, 64, 17, 16, 31], "one": [45], "long": [3, 300, 5],
    "longer than a block of keys": [517], "ones": [1] * 30,
}  # fmt: skip
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
DOUBLE, FLOAT = (1e-12, 1e-11), (2e-6, 4e-6)  # of the output and of gradients
# Relative norm of the error; rounding the inputs alone costs 0.0017, and torch's path rounds scores or weights too.
BF16: dict[Path, tuple[float, float]] = {"native": (0.006, 0.008), "torch": (0.012, 0.014)}


def bound(dtype: torch.dtype, path: Path) -> tuple[float, float]:
    """Largest errors of the output and of gradients."""
    return {torch.float64: DOUBLE, torch.float32: FLOAT}.get(dtype) or BF16[taken(path, dtype)]


def check(case: Case, forward: float, backward: float) -> None:
    exact = in_double(case)
    wanted = definition(exact)
    got = case.run()
    assert got.dtype == case.qkv.dtype
    assert error(got, wanted) <= forward
    for a, b in zip(case.gradients(got), exact.gradients(wanted), strict=True):
        assert error(a, b) <= backward


def test_the_definition_here_is_the_reference():
    case = make_case(LENGTHS["mixed"], torch.float64, rotary=True)
    q, k, v = case.qkv.split([4, 2, 2], 1)
    layout = build_layout(np.array(LENGTHS["mixed"]))
    expected = reference_attention(rotate(q, *case.rotary), rotate(k, *case.rotary), v, layout, Attend())
    torch.testing.assert_close(definition(case), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("lengths", "causal", "dtype", "path"), pairs(LENGTHS, [True, False], DTYPES, PATHS), indirect=["path"]
)
def test_every_shape_of_run_equals_the_definition(lengths, causal, dtype, path):
    check(make_case(LENGTHS[lengths], dtype, causal=causal, rotary=True), *bound(dtype, path))


@pytest.mark.parametrize(
    ("head_dim", "heads", "rotary", "causal", "dtype", "path"),
    pairs(range(16, 129, 16), [(4, 2), (8, 2), (8, 8), (3, 1)], [True, False], [True, False], DTYPES, PATHS),
    indirect=["path"],
)
def test_every_size_and_number_of_heads_equals_the_definition(head_dim, heads, rotary, causal, dtype, path):
    check(make_case([70, 1, 19], dtype, *heads, head_dim, causal, rotary), *bound(dtype, path))


@pytest.mark.parametrize("head_dim", [18, 22, 100])
def test_any_even_head_size_works_in_double(head_dim):
    check(make_case([70, 1, 19], torch.float64, head_dim=head_dim, rotary=True), 1e-12, 1e-11)


@pytest.mark.parametrize(
    ("causal", "dropout", "bias", "dtype", "path"),
    pairs([True, False], [0.0, 0.3], [True, False], DTYPES, PATHS),
    indirect=["path"],
)
def test_key_bias_and_dropout_equal_the_definition(causal, dropout, bias, dtype, path):
    check(make_case([1, 300, 20, 0, 47], dtype, causal=causal, bias=bias, dropout=dropout), *bound(dtype, path))


@pytest.mark.parametrize(
    ("window", "lengths", "dtype", "path"),
    pairs([1, 5, 16, 33, 48, 100, 300], [LENGTHS["mixed"], [700, 3, 40]], DTYPES, PATHS),
    indirect=["path"],
)
def test_a_window_equals_the_definition(window, lengths, dtype, path):
    check(make_case(lengths, dtype, rotary=True)._replace(window=window), *bound(dtype, path))


@pytest.mark.parametrize("window", [5, 60])
@pytest.mark.parametrize(("bias", "dropout", "spread"), [(True, 0.0, 1.0), (False, 0.3, 1.0), (False, 0.0, 6.0)])
def test_a_window_with_bias_dropout_and_large_scores_equals_the_definition(window, bias, dropout, spread):
    case = make_case([1, 300, 20, 0, 47], torch.float64, bias=bias, dropout=dropout, spread=spread)
    check(case._replace(window=window), 1e-11, 1e-10)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_scores_neither_overflow_nor_vanish(dtype, path):
    """Scores of thousands, where a softmax without its maximum is infinite."""
    case = make_case([60, 1, 200], dtype, spread=40.0)
    wanted = definition(in_double(case))
    out = case.run()
    assert torch.isfinite(out).all()
    if (taken(path, dtype), dtype) != ("torch", torch.bfloat16):  # which rounds scores of thousands by tens
        assert error(out, wanted) <= 10 * bound(dtype, path)[0]


@pytest.mark.parametrize("spread", [3.0, 4.5])
def test_scores_on_both_sides_of_the_safe_bound_agree(spread, path):
    check(make_case([300], torch.float64, spread=spread), 1e-11, 1e-10)
    check(make_case([300], torch.float32, spread=spread), 1e-5, 1e-4)
    forward, backward = bound(torch.bfloat16, path)
    scale = 1 if taken(path, torch.bfloat16) == "native" else 4  # torch rounds scores of up to a hundred to halves
    check(make_case([300], torch.bfloat16, spread=spread), scale * forward, 2 * scale * backward)


def test_a_thousand_sequences_equal_the_definition():
    check(make_case(np.random.default_rng(0).integers(0, 4, 1000).tolist(), torch.float64, 2, 1, 16), *DOUBLE)


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_empty_run_gives_empty_results(lengths, dtype):
    case = make_case(lengths, dtype, rotary=True, bias=True)
    out = case.run()
    assert out.shape == (0, 4, 32)
    assert [g.numel() for g in case.gradients(out)] == [0, 0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("new", [2.5, math.nan, math.inf])
def test_a_sequence_changes_nothing_but_itself(dtype, new):
    case = make_case([40, 33, 300, 1], dtype, rotary=True)
    inside = torch.zeros(374, dtype=torch.bool)
    inside[40:73] = True
    changed = case.qkv.detach().clone()
    changed[inside] = new if math.isfinite(new) else changed[inside]
    changed[40] = new
    other = case._replace(qkv=changed.requires_grad_())
    out, other_out = case.run(), other.run()
    for a, b in zip([out, *case.gradients(out)], [other_out, *other.gradients(other_out)], strict=True):
        assert torch.equal(a[~inside], b[~inside])
        assert not torch.equal(a[inside], b[inside])
        assert bool(b[inside].isnan().any()) != math.isfinite(new)
    if not math.isfinite(new):
        assert other_out[inside].isnan().all()


@pytest.mark.parametrize("part", [0, 4, 6])
def test_a_nan_in_query_key_or_value_is_seen(part):
    """In the last token: only a query of its own, or keys and values that all queries see."""
    for dtype, spread in itertools.product(DTYPES, [1.0, 40.0]):
        case = make_case([30, 40], dtype, causal=False, spread=spread)
        qkv = case.qkv.detach().clone()
        qkv[69, part, 3] = math.nan
        out = case.run(qkv=qkv)
        assert not out[:30].isnan().any()
        assert out[69, 0].isnan().any()
        assert part == 0 or out[30:, 0].isnan().any(-1).all()


def test_dropout_keeps_its_share_and_depends_on_the_seed(monkeypatch):
    case = make_case([200], torch.float64, causal=False, dropout=0.25)
    qkv = torch.zeros_like(case.qkv)
    qkv[:, 6:] = 1.0  # equal weights and values of one: each output is the kept share over 0.75
    out = case.run(qkv=qkv)
    assert abs(float(out.mean()) - 1) < 0.01
    for other in (SEED + 1, SEED + 2**32):
        monkeypatch.setattr(attention, "draw", lambda other=other: other)
        assert not torch.equal(out, case.run(qkv=qkv))
