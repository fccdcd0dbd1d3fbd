"""The native attention kernels: their error beside torch's, threads, and operators; tests/nn has what all paths do."""

import itertools

import pytest
import torch

from tests.helpers.attention_cases import SEED, definition, error, in_double, make_case, parts
from tests.helpers.paths import LOWEST, NATIVE_DTYPES, check_operator, needs_kernels
from unpad.batching.layout import Layout
from unpad.nn import attention
from unpad.nn.attend import Attend
from unpad.nn.native.attention import native_attention, supports

pytestmark = [needs_kernels, pytest.mark.promise("speed.kernels")]


@pytest.fixture(autouse=True)
def _known_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "draw", lambda: SEED)


@pytest.mark.parametrize("dtype", [d for d in NATIVE_DTYPES if d != torch.float64], ids=str)
def test_kernels_err_no_more_than_torch_in_the_same_numbers(dtype):
    for causal, rotary in itertools.product([True, False], repeat=2):
        case = make_case([150, 20, 64], dtype, causal=causal, rotary=rotary)
        exact = in_double(case)
        wanted, got, torch_out = definition(exact), case.run(), definition(case)
        least = 1.02 if dtype == torch.bfloat16 else 2.0  # fp32 rounds sums, and the kernels sum in another order
        assert error(got, wanted) <= error(torch_out, wanted) * least
        wanted_grad = exact.gradients(wanted)[0]
        native_grad, torch_grad = case.gradients(got)[0], case.gradients(torch_out)[0]
        for a, b, c in zip(*(parts(g, case) for g in (native_grad, torch_grad, wanted_grad)), strict=True):
            assert error(a, c) <= error(b, c) * least


@pytest.mark.parametrize("dtype", NATIVE_DTYPES, ids=str)
def test_repeated_calls_and_other_numbers_of_threads_give_the_same_bits(dtype):
    case = make_case([70, 1, 300, 20, 20, 5], dtype, rotary=True, bias=True, dropout=0.1)
    results = []
    for threads in (1, 1, 2, 3):
        torch.set_num_threads(threads)
        out = case.run()
        results.append([out, *case.gradients(out)])
    for result in results[1:]:
        for a, b in zip(result, results[0], strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("dtype", [d for d in NATIVE_DTYPES if d != torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [16, 48])
def test_a_bias_is_added_as_beforehand_on_any_number_of_threads(head_dim, dtype, rotary):
    case = make_case([70, 1, 300, 5], dtype, head_dim=head_dim, rotary=rotary, bias=rotary, dropout=0.1)

    def attend(*inputs: torch.Tensor) -> list[torch.Tensor]:
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        how = Attend(
            case.causal, dropout=case.dropout, qkv_bias=leaves[1] if len(leaves) > 1 else None, rotary=case.rotary,
            key_bias=case.key_bias, seed=SEED,
        )  # fmt: skip
        out = native_attention(leaves[0], Layout(case.cu_seqlens, 300), case.heads, how)
        return [out, *torch.autograd.grad(out, leaves, case.grad)]

    bias = torch.randn(case.qkv[0].numel()).to(dtype)
    wanted = attend(case.qkv + bias.view(case.qkv.shape[1:]))
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found = attend(case.qkv, bias)
        assert torch.equal(found[0], wanted[0])
        assert torch.equal(found[1], wanted[1])
        torch.testing.assert_close(found[2], wanted[1].flatten(1).sum(0))


@pytest.mark.parametrize("dtype", NATIVE_DTYPES, ids=str)
def test_a_large_bias_of_all_keys_changes_no_gradient(dtype):
    """Rows that complete a block of queries see it too."""
    case = make_case([5, 33], dtype, causal=False)
    plain = case.gradients(case.run())[0]
    biased = case._replace(key_bias=torch.full((38,), 2.0**11).to(torch.promote_types(dtype, torch.float32)))
    assert error(torch.autograd.grad(biased.run(), biased.qkv, case.grad)[0], plain) < 5e-3


def test_operators_show_by_name_in_a_profile():
    case = make_case([20], LOWEST)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        case.gradients(case.run())
    names = {event.key for event in profile.key_averages()}
    assert {"unpad::ragged_attention", "unpad::ragged_attention_backward"} <= names


def test_operators_tell_their_shapes_without_running():
    case = make_case([20, 3], LOWEST)
    bias = torch.randn(case.qkv[0].numel()).to(LOWEST)
    arguments = (case.qkv.detach(), bias, None, case.cu_seqlens, 4, 2, True, 0.2, None, None, 0.0, 0, None, 0)
    check_operator("ragged_attention", *arguments)
    out, log_z = torch.ops.unpad.ragged_attention(*arguments)
    check_operator("ragged_attention_backward", case.grad, out, log_z, *arguments, True)


def test_supports_says_which_heads_the_kernels_know():
    assert [d for d in range(8, 145, 8) if supports(LOWEST, d)] == [16, 32, 48, 64, 80, 96, 112, 128]
    assert supports(torch.float64, 18)
    assert not supports(torch.float64, 17)
    assert not supports(torch.float16, 32)
