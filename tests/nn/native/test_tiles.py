"""Attention by tiles: its error beside that of the kernel without tiles, and its bits from instructions and plain C++.

    UNPAD_TILE_CASES=2000 python -m pytest tests/nn/native/test_tiles.py      more cases

`test_tiled_head.py` has the head.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.conftest import random_batch, tiny_model
from tests.helpers.targets import has, running
from tests.helpers.tile_cases import NAMES, Case, attend, attend_by
from unpad.nn.attend import Attend
from unpad.nn.native import library
from unpad.nn.native.attention import piece_attention
from unpad.proof.certificate import prove

pytestmark = [
    pytest.mark.skipif(not has(library.PLAIN_TILES), reason=f"no AVX-512 BF16: {library.describe()}"),
    pytest.mark.promise("speed.tiles"),
]
NO_AMX = pytest.mark.skipif(not has("avx512_amx"), reason="no AMX: the instructions of tiles were not run")

ROOT = Path(__file__).parents[3]
EXAMPLES = int(os.environ.get("UNPAD_TILE_CASES", "40"))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Lengths around the edges of panels and blocks as often as any other."""
    edges = st.sampled_from([0, 1, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 127, 128, 129, 256, 257, 289])
    kv_heads, group = draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (1, 3), (2, 2)]))
    causal = draw(st.booleans())
    return Case(
        tuple(draw(st.lists(edges | st.integers(0, 300), min_size=1, max_size=3))),
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=16 * draw(st.integers(1, 8)),
        causal=causal,
        rotary=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        key_bias=draw(st.booleans()),
        dropout=draw(st.sampled_from([0.0, 0.0, 0.2])),
        window=draw(st.sampled_from([0, 1, 7, 32, 33, 100])) if causal else 0,
        scale=draw(st.sampled_from([1.0, 1.0, 8.0])),
    )


EVERYTHING = Case(
    (33, 0, 70, 1, 300, 20, 5), heads=4, head_dim=48, rotary=True, qkv_bias=True, key_bias=True, dropout=0.1, window=80
)
FULL = EVERYTHING._replace(causal=False, window=0, head_dim=32, scale=8.0)
CASES = [EVERYTHING, FULL, Case((16, 130, 64, 3))]


def error(got: Tensor, wanted: Tensor) -> float:
    """Norm of the difference, of one number on average."""
    return float((got.double() - wanted).square().mean().sqrt()) if wanted.numel() else 0.0


# Where a query sees one key alone, its gradients are zero but for rounding; those of a few numbers differ by chance.
LEAST = 1e-5


def compare(case: Case) -> None:
    """Plain tiles beside the kernel without tiles, against fp64."""
    inputs = case.inputs()
    with running("avx512_bf16"):
        wanted = attend(case, inputs.double(), case.lengths)
        present = attend(case, inputs, case.lengths)
    for name, a, b, exact in zip(NAMES, attend_by(library.PLAIN_TILES, case), present, wanted, strict=False):
        ours, theirs = error(a, exact), error(b, exact)
        assert ours <= 1.1 * theirs + LEAST, (name, ours, theirs)


@settings(deadline=None, max_examples=EXAMPLES)
@given(case=cases())
@example(case=EVERYTHING)
@example(case=FULL)
def test_tiles_err_no_more_than_the_kernel_without_them(case):
    compare(case)


@NO_AMX
@settings(deadline=None, max_examples=EXAMPLES)
@given(case=cases())
@example(case=EVERYTHING)
@example(case=FULL)
def test_instructions_give_the_bits_of_plain_tiles(case):
    for name, a, b in zip(NAMES, attend_by("avx512_amx", case), attend_by(library.PLAIN_TILES, case), strict=False):
        assert torch.equal(a, b), name


@pytest.fixture(params=[library.PLAIN_TILES, pytest.param("avx512_amx", marks=NO_AMX)])
def _tiles(request: pytest.FixtureRequest) -> Iterator[None]:
    """Kernels by tiles, in plain C++ and by instructions."""
    with running(request.param):
        yield


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize("case", CASES)
def test_packed_split_and_alone_have_the_same_bits(case):
    inputs, ends = case.inputs(), torch.tensor([0, *case.lengths]).cumsum(0).tolist()
    packed = attend(case, inputs, case.lengths)
    for cuts in ([0, 3, len(case.lengths)], range(len(case.lengths) + 1)):
        runs = [
            attend(case, inputs.part(ends[a], ends[b]), case.lengths[a:b], torch.tensor(ends[a:b]))
            for a, b in pairwise(cuts)
        ]
        for name, whole, *parts in zip(NAMES, packed, *runs, strict=False):
            tokens = 1 if name in ("log_z", "key bias") else 0  # which of a tensor's dimensions counts tokens
            assert torch.equal(torch.cat(parts, tokens), whole), name


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize("case", CASES)
def test_every_number_of_threads_gives_the_same_bits(case):
    inputs = case.inputs()
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(attend(case, inputs, case.lengths))
    for result in results[1:]:
        assert all(map(torch.equal, result, results[0]))


@pytest.mark.promise("llm.generation")
@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize("window", [0, 100])
def test_a_prompt_that_is_read_in_pieces_has_the_bits_of_one_that_is_read_at_once(window):
    """Also beside another one, whose held tokens are others."""
    case = Case((300,), heads=4, rotary=True, window=window, scale=3.0)  # some rows need a shift and others do not
    inputs = case.inputs()
    whole = attend(case, inputs, case.lengths)[0]
    buffers = [torch.empty(2, case.kv_heads, 300, case.head_dim).bfloat16() for _ in range(2)]
    cuts = [0, 1, 17, 49, 50, 130, 250, 300]
    for i, (start, stop) in enumerate(pairwise(cuts)):
        behind = cuts[i - 1] if i else 0, start  # a second row reads the piece before, until the first has all
        parts = [inputs.part(start, stop), inputs.part(*behind)]
        qkv, cos, sin = (torch.cat([getattr(part, name) for part in parts]) for name in ("qkv", "cos", "sin"))
        cu_seqlens = torch.tensor([0, stop - start, stop - start + behind[1] - behind[0]]).int()
        how = Attend(window=window or None, rotary=(cos, sin))
        out = piece_attention(qkv, cu_seqlens, buffers, [start, behind[0]], case.heads, how)
        assert torch.equal(out, torch.cat([whole[start:stop], whole[slice(*behind)]])), (start, stop)


@pytest.mark.usefixtures("_tiles")
def test_a_large_bias_of_all_keys_changes_no_gradient():
    """Queries that complete a panel see it too."""
    case = Case((5, 33), causal=False)
    plain = attend(case, case.inputs(), case.lengths)
    inputs = case.inputs()._replace(key_bias=torch.full((38,), 2.0**11))
    for name, a, b in zip(NAMES, attend(case._replace(key_bias=True), inputs, case.lengths), plain, strict=False):
        assert name == "log_z" or error(a, b.double()) < 1e-3, name


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
@pytest.mark.parametrize("body", ["plain", pytest.param("amx", marks=NO_AMX)])
def test_products_of_tiles_are_summed_in_the_order_of_their_definition(body, tmp_path):
    """Of one to three tiles in each direction, also where products and sums are denormal."""
    program, here = tmp_path / "tiles", Path(__file__)
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-w", f"-I{Path(library.__file__).parent}"]
    subprocess.run(["g++", *flags, str(here.with_name("tiles.cpp")), "-o", str(program)], check=True)
    done = subprocess.run([program, body], capture_output=True, text=True, check=False)
    assert done.stdout == "0 numbers differ\n", done


# In a process of its own, whose SIGILL the emulator takes.
EMULATED = """
import ctypes, sys, torch
from tests.helpers.targets import running
from tests.helpers.tile_cases import Case, attend, drawn
from unpad.nn.native import library

emulator, kernels = ctypes.CDLL(sys.argv[1]), library._load()[0].library
kernels.unpad_kernels_avx512_amx.restype = kernels.unpad_kernels_for.restype
emulator.emulate_amx()
torch.set_num_threads(2)
full = Case((70, 33), head_dim=32, causal=False)
many = Case((5, 41), 2, 1, 48, rotary=True, qkv_bias=True, key_bias=True, dropout=0.1, window=20, scale=8.0)

def computed():
    for case in (full, many):
        yield from attend(case, case.inputs(), case.lengths)
    yield from drawn(70, 48, 100, 0.1).solved()

with running("avx512_amx", kernels.unpad_kernels_avx512_amx().contents):
    emulated = list(computed())
with running(library.PLAIN_TILES):
    print(emulator.unreleased_tiles(), *map(torch.equal, emulated, computed()))
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
@pytest.mark.nightly
@pytest.mark.skipif(has("avx512_amx"), reason="the processor runs them")
def test_instructions_that_are_emulated_give_the_bits_of_plain_tiles(tmp_path):
    """By a second reading of their definition; tiles are used between their configuration and their release alone."""
    emulator, source = tmp_path / "emulator.so", Path(__file__).with_name("amx_emulator.cpp")
    flags = ["-std=c++17", "-O3", "-mavx2", "-mfma", "-ffp-contract=off", "-shared", "-fPIC"]
    subprocess.run(["g++", *flags, str(source), "-o", str(emulator)], check=True)
    command = [sys.executable, "-c", EMULATED, str(emulator)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0", *["True"] * (5 + 6 + 4)]


@NO_AMX
def test_products_of_torch_between_ours_keep_their_bits():
    """oneDNN configures tiles of its own, in the threads that ours were released in."""
    torch.manual_seed(0)
    a, b = torch.randn(300, 512).bfloat16(), torch.randn(512, 700).bfloat16()
    torch.set_num_threads(3)
    products = [a @ b]
    for _ in range(3):
        attend_by("avx512_amx", EVERYTHING)
        products.append(a @ b)
    assert all(torch.equal(product, products[0]) for product in products)


@pytest.mark.usefixtures("_tiles")
def test_the_certificate_passes():
    model = tiny_model(torch.float32, width=64, heads=2, blocks=1)  # heads of 32 channels
    certificate = prove(model, random_batch([9, 3, 40, 2]), precision="bf16")
    assert certificate.passed, [line.name for line in certificate.lines if line.passed is False]


def test_denormal_numbers_count_as_zero():
    """Weights of 2^-23 times values of 2^-115: without the first, the quotient of their sums would be 2^-115 again."""
    case = Case((3,), head_dim=16)
    inputs = case.inputs()
    queries, keys, values = inputs.qkv.split([case.heads, case.kv_heads, case.kv_heads], 1)
    queries.fill_(1), keys.fill_(-4), values.fill_(2.0**-115)
    with running(library.PLAIN_TILES):
        assert not attend(case, inputs, case.lengths)[0].any()
        values.fill_(2.0**-100)
        assert torch.equal(attend(case, inputs, case.lengths)[0], torch.full((3, 2, 16), 2.0**-100).bfloat16())
