"""The cache's two paths, native and torch, against each other and against the forward pass without a cache."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.conftest import VOCAB, random_sequences, tiny_model
from tests.helpers.grid import pairs
from tests.helpers.models import generate, learn_by_heart, random_model
from tests.helpers.paths import NATIVE_PRECISION, needs_kernels
from tests.helpers.tokenizers import words
from unpad.batching.batch import from_prompts, from_sequences
from unpad.batching.layout import Layout, build_layout
from unpad.inference.engine import advance, prefill
from unpad.inference.generate import stream
from unpad.models import build_model, model_config
from unpad.models.decoder import Decoder
from unpad.nn import linear
from unpad.nn.attend import Attend
from unpad.nn.attention import reference_attention, self_attention
from unpad.nn.cache import PLACES, CachedRow, KeyValueCache, cut_step
from unpad.nn.linear import independent_rows, reading
from unpad.nn.native import library
from unpad.nn.precision import DTYPES, autocast
from unpad.recipes.training import GenerateSettings

RAGGED = [1, 100, 17, 2, 64, 33, 5, 90]
NO_EOS = -1
PATHS = {"native": nullcontext, "torch": library.switched_off}
SIZES = {
    "llama": {"width": 64, "heads": 4, "tied": False, "context": 128},
    "grouped": {"width": 64, "heads": 4, "kv_heads": 2, "context": 128},
    "gpt": {"width": 64, "heads": 4, "positions": "sinusoidal", "norm": "layernorm", "bias": True, "context": 128},
}
both_paths = pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)


def without_cache(model: Decoder, sequence: list[int]) -> Tensor:
    """Hidden state of the last token, computed through torch."""
    with torch.inference_mode(), library.switched_off():
        return model(from_sequences([[*sequence, 0]]))[-1]


def hidden_states(model: Decoder, path: AbstractContextManager[object]) -> list[Tensor]:
    """Hidden states of every step while rows leave from the front, the middle and the end."""
    sequences, draw = random_sequences(RAGGED), np.random.default_rng(1)
    states = []
    with torch.inference_mode(), path:
        cache, hidden = prefill(model, sequences, most=128)
        for step in range(20):
            states.append(hidden)
            if step in (3, 7, 12):
                live = np.ones(cache.num_rows, bool)
                live[[0, cache.num_rows // 2, -1][step % 3]] = False
                cache.reorder(torch.from_numpy(live).nonzero().flatten())
            hidden = advance(model, cache, torch.from_numpy(draw.integers(0, VOCAB, cache.num_rows)))
    return states


@pytest.mark.parametrize("kind", SIZES)
def test_native_and_torch_give_the_same_hidden_states(kind):
    model = tiny_model(**SIZES[kind]).eval()
    native, plain = (hidden_states(model, path()) for path in PATHS.values())
    torch.testing.assert_close(native, plain, rtol=1e-10, atol=1e-10)


@both_paths
@pytest.mark.parametrize("kind", SIZES)
def test_greedy_tokens_are_those_of_the_forward_without_a_cache(kind, path):
    model, prompts = tiny_model(**SIZES[kind]).eval(), random_sequences(RAGGED)
    settings = GenerateSettings(max_new_tokens=40, temperature=0.0)
    with path():
        continued = generate(model, prompts, settings, eos_id=NO_EOS)
    assert [len(ids) for ids in continued] == [min(40, 128 - n + 1) for n in RAGGED]  # some end with the context
    for prompt, ids in zip(prompts, continued, strict=True):
        with torch.inference_mode(), library.switched_off():
            hidden = model(from_sequences([[*prompt, *ids]]))
            assert model.logits(hidden[len(prompt) - 1 :]).argmax(1).tolist() == ids


@needs_kernels
def test_the_native_kernels_are_what_decoding_runs():
    model = tiny_model(torch.float32, **SIZES["grouped"]).eval()
    with torch.profiler.profile() as profile:
        settings = GenerateSettings(max_new_tokens=3, temperature=0.0)
        generate(model, [[1, 2], [3]], settings, eos_id=NO_EOS, precision=NATIVE_PRECISION)
    names = {event.key: event.count for event in profile.key_averages()}
    assert names["unpad::decode_attention"] == 2 * 2  # blocks, steps after the first token
    assert names["unpad::rowwise_linear"] == 3 * (2 * 4 + 1)


# --------------------------------------------------------------------------- layers of different lengths


class Held:
    """What one layer should hold: per row its keys and values so far, (num_tokens, kv_heads, head_dim) each."""

    def __init__(self, qkv: Tensor, layout: Layout, heads: int) -> None:
        self.heads, self.rows = heads, list(qkv.split(layout.lengths().tolist()))

    def attend(self, qkv: Tensor) -> Tensor:
        """Append one token per row; what the last token of each row attends to, (num_rows, heads, head_dim)."""
        self.rows = [torch.cat([row, new[None]]) for row, new in zip(self.rows, qkv, strict=True)]
        kv_heads, out = (qkv.shape[1] - self.heads) // 2, []
        for row in self.rows:
            q, k, v = row.split([self.heads, kv_heads, kv_heads], 1)
            out.append(reference_attention(q, k, v, build_layout(np.array([len(row)])), Attend())[-1])
        return torch.stack(out)


@both_paths
def test_layers_may_hold_fewer_tokens_than_those_before(path):
    heads, kv_heads, head_dim, most = 4, 2, 16, 100
    torch.manual_seed(0)
    full = build_layout(np.array([9, 1, 30, 4, 12]))
    stays = torch.rand(56) < 0.4
    stays[full.cu_seqlens[1:].long() - 1] = True
    layouts = [full, full, full.keep(stays)]
    layouts += [layouts[2], layouts[2].keep(torch.arange(int(stays.sum())) % 2 == 0)]

    def tokens(num: int) -> Tensor:
        return torch.randn(num, heads + 2 * kv_heads, head_dim, dtype=torch.float64)

    with torch.inference_mode(), path():
        cache, held = KeyValueCache([CachedRow(most) for _ in range(full.num_seqs)]), []
        cache.begin(full.lengths().tolist())
        for index, layout in enumerate(layouts):
            qkv = tokens(int(layout.cu_seqlens[-1]))
            held.append(Held(qkv, layout, heads))
            out = cache.attend(index, qkv, layout, heads, Attend())
            torch.testing.assert_close(out, self_attention(qkv, layout, heads, Attend()), rtol=0, atol=1e-12)
        token = 2 * kv_heads * head_dim * 8  # bytes of one token per layer
        assert cache.num_bytes == token * 2 * sum(int(layout.cu_seqlens[-1]) for layout in layouts)
        for step in range(40):  # past the buffers' first size
            if step in (4, 20):
                live = np.ones(cache.num_rows, bool)
                live[[1, -1][step // 20]] = False
                order = np.flatnonzero(live).tolist()
                cache.reorder(torch.tensor(order))
            elif step == 9:
                order = [3, 1, 1, 0]
                cache.reorder(torch.tensor(order))
            else:
                order = list(range(cache.num_rows))
            cache.begin(None)
            for index, one in enumerate(held):
                one.rows = [one.rows[i] for i in order]
                qkv = tokens(cache.num_rows)
                out = cache.attend(index, qkv, build_layout(np.ones(cache.num_rows)), heads, Attend())
                torch.testing.assert_close(out, one.attend(qkv), rtol=0, atol=1e-12)
            assert cache.lengths.tolist() == [len(tokens) for tokens in held[0].rows]


def filled(lengths: list[int], most: int) -> tuple[KeyValueCache, Tensor]:
    """A cache of one layer that has read prompts of these lengths, of one key head; and their qkv."""
    cache, layout = KeyValueCache([CachedRow(most) for _ in lengths]), build_layout(np.array(lengths))
    qkv = torch.randn(sum(lengths), 2 + 2, 16, dtype=torch.float64)
    cache.begin(lengths)
    cache.attend(0, qkv, layout, 2, Attend())
    return cache, qkv


@pytest.mark.parametrize("most", [11, 12, 23, 25, 47, 100])
def test_the_buffers_of_a_row_double_when_they_are_full_and_stay_within_what_was_announced(most):
    held = list[int]()
    with torch.inference_mode():
        cache, _ = filled([6], most)
        for length in range(7, most + 1):
            cache.begin(None)
            cache.attend(0, torch.randn(1, 4, 16, dtype=torch.float64), build_layout(np.ones(1)), 2, Attend())
            held.append(cache.num_bytes // (2 * 16 * 8))
            assert length <= held[-1] <= max(most, 12)
        with pytest.raises(AssertionError, match="exceeds the length"):
            cache.begin(None)
    assert held == [min(next(size for size in (12, 26, 54, 110) if size >= n), most) for n in range(7, most + 1)]


def test_a_long_row_makes_no_other_row_longer():
    with torch.inference_mode():
        cache, _ = filled([3, 500, 7], 1000)
        assert [row.num_bytes for row in cache.rows] == [2 * length * 2 * 16 * 8 for length in (3, 500, 7)]
        short = [row._layers[0].buffer for row in (cache.rows[0], cache.rows[2])]
        for _ in range(3):
            cache.begin(None)
            cache.attend(0, torch.randn(3, 4, 16, dtype=torch.float64), build_layout(np.ones(3)), 2, Attend())
        assert short == [row._layers[0].buffer for row in (cache.rows[0], cache.rows[2])]


def test_copies_of_a_row_share_no_memory_with_it():
    with torch.inference_mode():
        cache, _ = filled([9], 20)
        cache.reorder(torch.tensor([0, 0]))
        first, second = cache.rows
        begun = first.copy(5, most=30)
        assert (begun.length, begun.most, begun.num_bytes) == (5, 30, 5 * 2 * 16 * 8)
        before = [row._layers[0].buffer.clone() for row in (second, begun)]
        first._layers[0].buffer.fill_(7)
        for row, held in zip((second, begun), before, strict=True):
            assert torch.equal(row._layers[0].buffer[:, :, : row.length], held[:, :, : row.length])


@both_paths
def test_prompts_lie_row_by_row(path):
    lengths, heads = [0, 3, 1, 0, 5], 3
    with torch.inference_mode(), path():
        cache, layout = KeyValueCache([CachedRow(7) for _ in lengths]), build_layout(np.array(lengths))
        qkv = torch.randn(9, heads + 2, 16, dtype=torch.float64)
        cache.begin(lengths)
        cache.attend(0, qkv, layout, heads, Attend())
    for row, part in zip(cache.rows, qkv.split(lengths), strict=True):
        buffer = row._layers[0].buffer
        assert buffer.shape == (2, 1, min(2 * len(part), 7), 16)
        assert torch.equal(buffer[0, 0, : len(part)], part[:, heads])
        assert torch.equal(buffer[1, 0, : len(part)], part[:, heads + 1])


# --------------------------------------------------------------------------- pieces of prompts

PIECES = {
    "llama": {"activation": "swiglu"},
    "gpt": {"norm": "layernorm", "activation": "gelu", "positions": "learned", "bias": True, "kv_heads": 2},
    "gemma": {"head_width": 24, "qk_norm": True, "activation": "geglu_tanh", "sliding_window": 50},  # torch attends
    "windowed": {"activation": "gelu_tanh", "sliding_window": 50, "sliding_blocks": [1]},
}


def read_in_pieces(
    model: Decoder, prompt: list[int], cuts: list[int], beside: list[list[int]]
) -> tuple[Tensor, CachedRow]:
    """Hidden state of the last token of a prompt read in pieces, each beside other prompts; and its row."""
    row = CachedRow(len(prompt) + 1)
    with reading():
        for first, stop in pairwise([0, *cuts, len(prompt)]):
            others = [CachedRow(len(one)) for one in beside]
            parts = [*beside[:1], prompt[first:stop], *beside[1:]]
            cache = KeyValueCache([*others[:1], row, *others[1:]])
            begun = cache.lengths
            cache.begin([len(part) for part in parts])
            batch = from_prompts(parts)
            shift = begun.repeat_interleave(batch.layout.lengths())
            hidden = model.last_hidden(replace(batch, position_ids=batch.position_ids + shift), cache)
    return hidden[min(1, len(beside))], row


@pytest.mark.parametrize(("kind", "path", "precision"), pairs(PIECES, PATHS.values(), ["fp32", "bf16"]))
def test_a_prompt_read_in_pieces_gets_the_bits_of_the_whole(kind, path, precision):
    sizes = {"width": 64, "blocks": 2, "heads": 4, "hidden": 100, "context": 800, "tied": False}
    model, step = random_model({**sizes, **PIECES[kind]}, VOCAB, 0), 1
    prompt, *beside = random_sequences([700, 30, 90])
    dtype = DTYPES[precision]
    with torch.inference_mode(), path(), autocast(precision, torch.device("cpu")), independent_rows():
        whole, row = read_in_pieces(model.eval(), prompt, [], [])
        step = cut_step(dtype, torch.device("cpu"), model.config.head_dim)
        assert step == (1 if path is nullcontext and library.computes(dtype) and kind != "gemma" else PLACES)
        ways = [[1], [47], [48], [257], [32 * n for n in range(1, 22)], [699], [3, 4, 5, 400]]
        for cuts in [[256], [512], [256, 512], *(ways if step == 1 else [])]:
            hidden, other = read_in_pieces(model, prompt, cuts, beside if len(cuts) % 2 else [])
            assert torch.equal(hidden, whole), cuts
            for a, b in zip(row._layers, other._layers, strict=True):
                assert torch.equal(a.buffer[:, :, :700], b.buffer[:, :, :700]), cuts


@needs_kernels
@pytest.mark.parametrize(
    ("dtype", "scale", "window"), pairs([torch.float32, torch.bfloat16], [1.0, 2.7, 40.0], [None, 50])
)
def test_every_cut_of_a_sequence_gives_its_attention_the_bits_of_the_whole(dtype, scale, window):
    """Also where scores are so large that some queries of a block need a shift."""
    if not library.computes(dtype):
        pytest.skip("no native kernels for bf16 here")
    torch.manual_seed(0)
    length, heads = 310, 2
    qkv = (torch.randn(length, heads + 2, 32) * scale).to(dtype)
    with torch.inference_mode():

        def pieces(cuts: list[int]) -> tuple[Tensor, Tensor]:
            cache, out = KeyValueCache([CachedRow(length)]), []
            for part in qkv.tensor_split(cuts):
                cache.begin([len(part)])
                out.append(cache.attend(0, part, build_layout(np.array([len(part)])), heads, Attend(window=window)))
            return torch.cat(out), cache.rows[0]._layers[0].buffer[:, :, :length]

        whole, held = pieces([])
        assert whole.isfinite().all()
        layout = build_layout(np.array([length]))
        assert torch.equal(whole, self_attention(qkv, layout, heads, Attend(window=window)))
        for cut in range(1, length):
            out, kept = pieces([cut])
            assert torch.equal(out, whole), cut
            assert torch.equal(kept, held), cut


# --------------------------------------------------------------------------- bf16


@pytest.fixture(scope="module")
def reciter() -> tuple[Decoder, list[list[int]]]:
    """A model that knows eight texts by heart, so that its best token is never a near tie; and the texts."""
    texts = [[first, *text] for first, text in enumerate(random_sequences([70] * 8, seed=3))]
    sizes = {"width": 64, "blocks": 2, "heads": 2, "kv_heads": 1, "hidden": 128, "context": 128, "tied": False}
    model = random_model(sizes, VOCAB, 0)
    assert learn_by_heart(model, texts, 150, 5e-3) < 0.05
    return model.eval(), texts


@both_paths
def test_in_bf16_greedy_tokens_are_those_of_fp64(reciter, path):
    model, texts = reciter
    prompts = [text[: 1 + 4 * n] for n, text in enumerate(texts)]
    settings = GenerateSettings(max_new_tokens=40, temperature=0.0)
    with path():
        continued = generate(model, prompts, settings, eos_id=NO_EOS, precision="bf16")
        assert continued == [generate(model, [p], settings, eos_id=NO_EOS, precision="bf16")[0] for p in prompts]
    assert continued == [text[len(p) : len(p) + 40] for p, text in zip(prompts, texts, strict=True)]
    double = build_model(model.config, VOCAB).double()
    double.load_state_dict(model.state_dict())
    with library.switched_off():
        assert continued == generate(double, prompts, settings, eos_id=NO_EOS)


@needs_kernels
def test_in_bf16_native_scores_are_no_further_from_fp64_than_those_of_torch(reciter):
    model, texts = reciter
    prompts = [text[: 5 + 7 * n] for n, text in enumerate(texts)]
    tokens = torch.tensor([text[len(p)] for p, text in zip(prompts, texts, strict=True)])
    exact = torch.stack([
        model.logits(without_cache(model, [*p, t])[None])[0] for p, t in zip(prompts, tokens.tolist(), strict=True)
    ])  # fmt: skip
    errors = {}
    for name, path in PATHS.items():
        with torch.inference_mode(), path(), torch.autocast("cpu", dtype=torch.bfloat16):
            cache, _ = prefill(model, prompts, most=128)
            errors[name] = float((model.logits(advance(model, cache, tokens)) - exact).norm() / exact.norm())
    assert errors["native"] < 1.2 * errors["torch"] < 0.05


# --------------------------------------------------------------------------- weights in low precision


@pytest.mark.parametrize("streaming", [False, True])
def test_a_generation_casts_each_weight_once(streaming, monkeypatch):
    made = []

    class Counted(linear._Copy):
        def __init__(self, value: Tensor, version: int) -> None:
            super().__init__(value, version)
            made.append(value)

    monkeypatch.setattr(linear, "_Copy", Counted)
    tokenizer = words(["a"])
    torch.manual_seed(0)
    model = build_model(model_config({"width": 32, "blocks": 2, "heads": 2, "hidden": 32, "context": 40}), 300)
    settings = GenerateSettings(max_new_tokens=6, temperature=0.0)
    if streaming:
        list(stream(model, tokenizer, [tokenizer.bos_id], settings, precision="bf16"))
    else:
        generate(model, [[tokenizer.bos_id]], settings, eos_id=NO_EOS, precision="bf16")
    assert len(made) == 2 * 4 + 1  # four matrices per block and the head
