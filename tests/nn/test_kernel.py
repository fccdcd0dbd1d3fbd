"""The kernel that `choose_kernels` names is the one that `self_attention` runs."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from itertools import product
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.helpers.attention_cases import as_on_a_card, definition, error, in_double, make_case
from unpad.batching.layout import Layout, PaddedLayout, build_layout
from unpad.nn import attention, kernel
from unpad.nn.attend import Attend
from unpad.nn.attention import self_attention
from unpad.nn.block import Block, BlockConfig, Stream
from unpad.nn.kernel import Kernel, by_definition, choose_kernels, takes_flash
from unpad.nn.losses import cross_entropy
from unpad.nn.native import library
from unpad.training.memory import peak_of

CPU = torch.device("cpu")
HEADS, KV_HEADS = 2, 1
LONG = 20  # in these tests bf16 takes matrix products up to this length
LAYOUTS: dict[str, Layout | PaddedLayout] = {
    "ragged": build_layout(np.array([3, 24, 0, 22, 5, 1, 24])),
    "one sequence": build_layout(np.array([7])),
    "no sequence": build_layout(np.array([], np.int64)),
    "padded": PaddedLayout(torch.tensor([[True] * 4, [False, True, True, False], [False] * 4])),
}
HEAD_DIMS = {16: "supported", 6: "too small for the native kernel"}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
BOTH = (False, True)


@dataclass(frozen=True)
class Case:
    native: bool
    definition: bool
    dtype: torch.dtype
    head_dim: int
    layout: str
    causal: bool
    key_bias: bool
    dropout: bool


CASES = [
    case
    for case in map(lambda values: Case(*values), product(BOTH, BOTH, DTYPES, HEAD_DIMS, LAYOUTS, BOTH, BOTH, BOTH))
    if not (case.definition and case.dropout)  # the definition has no dropout
]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Kernel]:
    """The kernels that run, in their order, as the functions that compute them note it."""
    kernels: list[Kernel] = []
    monkeypatch.setattr(kernel, "MATMUL_MAX_LENGTH", LONG)

    def note(owner: Any, name: str, of: Callable[[], Kernel]) -> None:
        right = getattr(owner, name)

        def noted(*args: Any, **options: Any) -> Any:
            kernels.append(of())
            return right(*args, **options)

        monkeypatch.setattr(owner, name, noted)

    padded = False

    def in_rectangle(*args: Any) -> Tensor:
        nonlocal padded
        padded = True
        try:
            return right(*args)
        finally:
            padded = False

    right = attention._padded
    monkeypatch.setattr(attention, "_padded", in_rectangle)
    note(attention, "native_attention", lambda: Kernel.NATIVE)
    note(attention, "reference_attention", lambda: Kernel.DEFINITION)
    note(attention, "_matmul_attention", lambda: Kernel.PADDED_MATMUL if padded else Kernel.GROUP_MATMUL)
    note(F, "scaled_dot_product_attention", lambda: Kernel.PADDED_SDPA if padded else Kernel.GROUP_SDPA)
    return kernels


def run(case: Case, device: torch.device = CPU) -> tuple[Kernel, ...]:
    """Attend once, and return what is chosen for such inputs on a device."""
    layout = LAYOUTS[case.layout]
    total = layout.attention_mask.numel() if isinstance(layout, PaddedLayout) else int(layout.cu_seqlens[-1])
    qkv = torch.ones(total, HEADS + 2 * KV_HEADS, case.head_dim, dtype=case.dtype)
    bias = torch.zeros(total, dtype=case.dtype) if case.key_bias else None
    how = Attend(case.causal, dropout=0.5 if case.dropout else 0.0, key_bias=bias)
    self_attention(qkv, layout, HEADS, how)
    return choose_kernels(case.dtype, device, layout, case.head_dim, how)


def switches(case: Case) -> ExitStack:
    stack = ExitStack()
    if not case.native:
        stack.enter_context(library.switched_off())
    if case.definition:
        stack.enter_context(by_definition())
    return stack


def test_the_kernel_that_runs_is_the_one_that_is_chosen_in_every_combination(ran):
    met: set[Kernel] = set()
    for case in CASES:
        ran.clear()
        with switches(case):
            chosen = run(case)
        assert tuple(ran) == chosen, case
        met.update(chosen)
    native = {Kernel.NATIVE} if library.enabled() else set()
    assert met == {*Kernel} - {Kernel.NATIVE, Kernel.VARLEN_FLASH} | native


def test_on_an_accelerator_the_flash_kernel_runs_where_it_is_chosen(ran, monkeypatch):
    def flash(q: Tensor, *rest: object) -> Tensor:
        ran.append(Kernel.VARLEN_FLASH)
        return q

    def choose(dtype: torch.dtype, _: torch.device, *rest: Any, **options: Any) -> tuple[Kernel, ...]:
        return choose_kernels(dtype, torch.device("cuda"), *rest, **options)

    monkeypatch.setattr(kernel, "card_version", lambda device: 8 if device.type == "cuda" else 0)
    monkeypatch.setattr(attention, "_varlen", flash)
    monkeypatch.setattr(attention, "choose_kernels", choose)  # what it chooses there, run with the tensors of a CPU
    met: set[Kernel] = set()
    for case in CASES:
        ran.clear()
        with switches(case):
            chosen = run(case, torch.device("cuda"))
        assert tuple(ran) == chosen, case
        met.update(chosen)
    assert met == {*Kernel} - {Kernel.NATIVE}


def test_the_flash_kernel_is_chosen_for_what_it_takes():
    half, other, card = torch.bfloat16, torch.float32, torch.device("meta")  # neither processor nor card
    cases = [(half, 64, 8), (torch.float16, 12, 12), (half, 256, 9), (other, 64, 9), (half, 264, 9), (half, 64, 7)]
    assert [takes_flash(*case) for case in cases] == [True] * 3 + [False] * 3
    assert choose_kernels(half, card, LAYOUTS["one sequence"], 512, Attend()) == (Kernel.GROUP_SDPA,)


@pytest.mark.parametrize(
    ("head_dim", "kv_heads", "causal", "window"),
    [(4, 4, True, None), (12, 2, True, 3), (64, 2, False, None), (250, 1, True, None)],
)
@pytest.mark.parametrize("version", ["2.13", "2.11", "ROCm"])
def test_heads_of_any_size_attend_by_the_flash_kernel_of_any_version(
    head_dim, kv_heads, causal, window, version, monkeypatch
):
    from torch.nn.attention import varlen

    def older(*args: Any, return_aux: Any = None, scale: float | None = None, window_size: Any = (-1, -1)) -> Any:
        assert len({x.shape[1] for x in args[:3]}) == 1, "heads are not shared"
        return varlen._varlen_attn(*args, False, scale, list(window_size), num_splits=None)[0]

    if version == "2.11":
        monkeypatch.setattr(varlen, "varlen_attn", older)
    monkeypatch.setattr(torch.version, "hip", "7.1" if version == "ROCm" else None)
    case = make_case([5, 1, 9], torch.bfloat16, 4, kv_heads, head_dim, causal)._replace(window=window)
    wide = in_double(case)
    with as_on_a_card(), kernel.noted() as kernels:
        out = case.run()
        none = make_case([], torch.bfloat16, head_dim=head_dim).run()
    assert kernels == {Kernel.VARLEN_FLASH}
    assert none.shape == (0, 4, head_dim)
    truth = definition(wide)
    assert error(out, truth) < 0.005
    assert error(case.gradients(out)[0], wide.gradients(truth)[0]) < 0.008


@pytest.mark.promise("batch.attention")
@pytest.mark.parametrize("window", [None, 64])
def test_memory_of_a_rectangle_and_of_a_window_grows_with_the_length(window, monkeypatch):
    monkeypatch.setattr(attention, "BLOCK_CELLS", 1 << 16)

    def peak(length: int) -> int:
        layout = build_layout(np.array([length]))
        mask = torch.ones(1, length, dtype=torch.bool)
        qkv = torch.randn(length, 6, 16, requires_grad=True)
        laid_out = PaddedLayout(mask) if window is None else layout
        return peak_of(lambda: self_attention(qkv, laid_out, 2, Attend(window=window)).sum().backward(), CPU)

    with library.switched_off():
        assert peak(2048) < 2.5 * peak(1024)


# --------------------------------------------------------------------------- switches


@pytest.mark.parametrize("switch", [by_definition, library.switched_off])
def test_a_switch_in_one_thread_changes_nothing_in_another(switch):
    def choice() -> tuple[Kernel, ...]:
        return choose_kernels(torch.float64, CPU, LAYOUTS["one sequence"], 16, Attend())

    usual, both = choice(), Barrier(2, timeout=600)

    def switched() -> tuple[Kernel, ...]:
        with switch():
            both.wait()  # the other thread chooses now
            both.wait()
            return choice()

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(switched)
        both.wait()
        assert choice() == usual
        with switch():  # entered second and left first
            pass
        both.wait()
        in_there = other.result()
    with switch():
        assert choice() == in_there
    assert (in_there != usual) == (switch is by_definition or library.enabled())


@pytest.mark.parametrize("native_forward", BOTH)
def test_a_backward_pass_takes_the_path_of_its_forward_pass_wherever_it_runs(native_forward):
    """Attention, norm, activation, linear and loss choose in forward; backward in another context changes nothing."""
    config = BlockConfig(width=32, heads=2, hidden=64, dropout=0.1, attention_dropout=0.1)
    torch.manual_seed(0)
    block, head = Block(config), torch.randn(11, 32, requires_grad=True)
    x, layout = torch.randn(48, 32), build_layout(np.array([20, 24, 4]))

    def gradient(backward: Callable[[Tensor], object]) -> Tensor:
        block.zero_grad()
        torch.manual_seed(1)
        with nullcontext() if native_forward else library.switched_off(), torch.autocast("cpu", torch.bfloat16):
            hidden = block(Stream(x, None, layout)).hidden()
            loss = cross_entropy(hidden.to(torch.bfloat16), head, torch.arange(48) % 11, 0.1)[0]
        backward(loss)
        return torch.cat([p.grad.flatten() for p in block.parameters() if p.grad is not None])

    def elsewhere(loss: Tensor) -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(loss.backward).result()

    def other_path(loss: Tensor) -> None:
        with library.switched_off() if native_forward else nullcontext():
            loss.backward()

    expected = gradient(elsewhere)
    assert torch.isfinite(expected).all()
    for way in (other_path, Tensor.backward):
        assert torch.equal(gradient(way), expected)
