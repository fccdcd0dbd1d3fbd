"""unpad/nn/native/decode.h and rowwise_linear.h against torch in fp64."""

import pytest
import torch
from torch import Tensor

from tests.helpers.attention_cases import error
from tests.helpers.grid import pairs
from tests.helpers.paths import LOWEST, NATIVE_DTYPES, needs_kernels
from unpad.nn.attend import Attend
from unpad.nn.linear import rowwise_linear
from unpad.nn.native.attention import decode_attention
from unpad.nn.rope import rotary_frequencies, rotary_table, rotate

pytestmark = [needs_kernels, pytest.mark.promise("speed.kernels")]

BF16 = torch.bfloat16
ERROR = {BF16: 3e-3, torch.float32: 1e-6, torch.float64: 1e-13}
HEADS = [(4, 4, 16), (4, 2, 64), (3, 1, 48), (2, 2, 128), (2, 1, 80)]  # heads, kv_heads, head_dim
LENGTHS = [0, 1, 15, 16, 17, 300]
MORE = 10  # tokens that each row's buffer has room for


class Inputs:
    """Random arguments of `decode_attention`; cells behind a row's length are NaN, which no result may show."""

    def __init__(
        self, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, turned: bool, window: int | None = None
    ) -> None:
        torch.manual_seed(head_dim)
        rows = len(LENGTHS)
        self.heads, self.lengths, self.window = heads, torch.tensor(LENGTHS), window
        self.qkv = torch.randn(rows, heads + 2 * kv_heads, head_dim).to(dtype)
        self.rows = [torch.randn(2, kv_heads, length + MORE, head_dim).to(dtype) for length in LENGTHS]
        for row, length in zip(self.rows, LENGTHS, strict=True):
            row[:, :, length:] = torch.nan
        wide = torch.promote_types(dtype, torch.float32)
        frequencies = rotary_frequencies(head_dim, 10000.0, "none", 1.0)
        self.rotary = rotary_table(self.lengths, frequencies, wide) if turned else None

    def run(self) -> tuple[Tensor, list[Tensor]]:
        """The output, and the rows afterwards."""
        rows = [row.clone() for row in self.rows]
        how = Attend(window=self.window, rotary=self.rotary)
        out = decode_attention(self.qkv, rows, self.lengths.tolist(), self.heads, how)
        return out, rows

    def select(self, row: int) -> None:
        """Keep one row alone."""
        self.lengths, self.qkv = self.lengths[row : row + 1], self.qkv[row : row + 1]
        self.rows = self.rows[row : row + 1]
        if self.rotary is not None:
            self.rotary = self.rotary[0][row : row + 1], self.rotary[1][row : row + 1]

    def expected(self) -> tuple[Tensor, Tensor]:
        """The output in fp64, and the new keys (num_rows, kv_heads, head_dim)."""
        kv_heads = self.rows[0].shape[1]
        q, k, v = self.qkv.split([self.heads, kv_heads, kv_heads], 1)
        if self.rotary is not None:
            q, k = rotate(q, *self.rotary), rotate(k, *self.rotary)
        outputs = []
        for row, length in enumerate(self.lengths.tolist()):
            keys = torch.cat([self.rows[row][0, :, :length], k[row][:, None]], 1).double()
            values = torch.cat([self.rows[row][1, :, :length], v[row][:, None]], 1).double()
            seen = slice(None if self.window is None else -self.window, None)
            keys, values = keys[:, seen], values[:, seen]
            weights = (q[row].double().unflatten(0, (kv_heads, -1)) @ keys.mT * q.shape[-1] ** -0.5).softmax(-1)
            outputs.append((weights @ values).flatten(0, 1))
        return torch.stack(outputs), k


@pytest.mark.parametrize(
    ("dtype", "sizes", "turned", "window"), pairs(NATIVE_DTYPES, HEADS, [False, True], [None, 1, 16, 50])
)
def test_one_token_attends_to_its_row_and_is_stored(dtype, sizes, turned, window):
    inputs = Inputs(dtype, *sizes, turned, window)
    out, rows = inputs.run()
    expected, new_keys = inputs.expected()
    assert error(out, expected) < ERROR[dtype]
    for row, length in enumerate(LENGTHS):
        stored = rows[row][0, :, length].double()
        assert (stored - new_keys[row]).abs().max() <= (2**-7 if dtype == BF16 else ERROR[dtype]) * 4
        assert torch.equal(rows[row][1, :, length], inputs.qkv[row, -rows[row].shape[1] :])
        rows[row][:, :, length] = torch.nan
        assert torch.equal(rows[row].nan_to_num(), inputs.rows[row].nan_to_num())  # nothing else was written


@pytest.mark.parametrize("row", range(len(LENGTHS)))
def test_a_row_is_bit_equal_alone_and_among_others_at_any_number_of_threads(row):
    inputs = Inputs(LOWEST, 8, 4, 64, turned=True)
    together = inputs.run()[0][row]
    torch.set_num_threads(2)
    assert torch.equal(inputs.run()[0][row], together)
    inputs.select(row)
    assert torch.equal(inputs.run()[0][0], together)


@pytest.mark.parametrize("dtype", NATIVE_DTYPES, ids=str)
@pytest.mark.parametrize("where", ["query", "key", "value"])
def test_nan_stays_visible_in_its_row_and_reaches_no_other(dtype, where):
    inputs = Inputs(dtype, 2, 1, 32, turned=True)
    if where == "query":
        inputs.qkv[3, :2, 5] = torch.nan
    else:
        inputs.rows[3][["key", "value"].index(where), :, 7, 5] = torch.nan
    out = inputs.run()[0]
    assert out[3].isnan().flatten(1).any(1).all()
    assert out[[0, 1, 2, 4, 5]].isfinite().all()


def test_scores_too_large_for_exp_do_not_overflow():
    inputs = Inputs(LOWEST, 2, 2, 32, turned=False)
    inputs.qkv[:, :2] *= 1000
    assert inputs.run()[0].isfinite().all()


# --------------------------------------------------------------------------- rows through a linear layer


@pytest.mark.parametrize(
    ("dtype", "sizes", "bias"),
    pairs(NATIVE_DTYPES, [(1, 1), (7, 5), (33, 17), (64, 100), (512, 48), (1000, 3)], [False, True]),
)
def test_a_rowwise_linear_layer_is_the_product(dtype, sizes, bias):
    width, outputs = sizes
    torch.manual_seed(width)
    weight, shift = torch.randn(outputs, width).to(dtype), torch.randn(outputs).to(dtype) if bias else None
    for rows in (0, 1, 2, 3, 4, 5, 7, 32, 33):
        x = torch.randn(rows, width).to(dtype)
        y = rowwise_linear(x, weight, shift)
        expected = x.double() @ weight.double().t() + (0 if shift is None else shift.double())
        assert y.dtype == dtype
        assert y.shape == (rows, outputs)
        rtol, atol = (2**-8, 1e-4) if dtype == BF16 else (10 * ERROR[dtype], 50 * ERROR[dtype])
        torch.testing.assert_close(y.double(), expected, rtol=rtol, atol=atol)


def test_a_nan_of_a_rowwise_linear_layer_stays_in_its_row():
    x = torch.ones(5, 40, dtype=LOWEST)
    x[2, 39] = torch.nan
    assert rowwise_linear(x, torch.ones(20, 40, dtype=LOWEST)).isnan().any(1).nonzero().tolist() == [[2]]
