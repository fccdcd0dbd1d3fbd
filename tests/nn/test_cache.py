"""The cache's two paths, native and torch, against each other and against the forward pass without a cache."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.conftest import VOCAB, random_sequences, tiny_model
from tests.helpers.paths import NATIVE_PRECISION
from unpad.batching.batch import from_sequences
from unpad.batching.layout import Layout, build_layout
from unpad.data.tokens.words import train_words
from unpad.inference.generate import advance, generate, prefill, stream
from unpad.models import build_model, model_config
from unpad.models.decoder import Decoder
from unpad.nn import linear
from unpad.nn.attention import reference_attention, self_attention
from unpad.nn.cache import KeyValueCache
from unpad.nn.native import library
from unpad.recipes.training import GenerateSettings

pytestmark = pytest.mark.slow

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
                cache.keep(live)
            hidden = advance(model, cache, torch.from_numpy(draw.integers(0, VOCAB, cache.num_rows)))
    return states


@pytest.mark.parametrize("kind", SIZES)
def test_native_and_torch_give_the_same_hidden_states(kind: str) -> None:
    model = tiny_model(**SIZES[kind]).eval()
    native, plain = (hidden_states(model, path()) for path in PATHS.values())
    for a, b in zip(native, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@both_paths
@pytest.mark.parametrize("kind", SIZES)
def test_greedy_tokens_are_those_of_the_forward_without_a_cache(
    kind: str, path: type[AbstractContextManager[object]]
) -> None:
    model, prompts = tiny_model(**SIZES[kind]).eval(), random_sequences(RAGGED)
    settings = GenerateSettings(max_new_tokens=40, temperature=0.0)
    with path():
        continued = generate(model, prompts, settings, eos_id=NO_EOS)
    assert [len(ids) for ids in continued] == [min(40, 128 - n + 1) for n in RAGGED]  # some end with the context
    for prompt, ids in zip(prompts, continued, strict=True):
        sequence = list(prompt)
        for token in ids:
            with torch.inference_mode():
                assert token == int(model.logits(without_cache(model, sequence)[None]).argmax())
            sequence.append(token)


@pytest.mark.skipif(not library.enabled(), reason=library.describe())
def test_the_native_kernels_are_what_decoding_runs() -> None:
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
            out.append(reference_attention(q, k, v, build_layout(np.array([len(row)])), True)[-1])
        return torch.stack(out)


@both_paths
def test_layers_may_hold_fewer_tokens_than_those_before(path: type[AbstractContextManager[object]]) -> None:
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
        cache, held = KeyValueCache(full, most), []
        for index, layout in enumerate(layouts):
            qkv = tokens(int(layout.cu_seqlens[-1]))
            held.append(Held(qkv, layout, heads))
            out = cache.attend(index, qkv, layout, heads, None)
            torch.testing.assert_close(out, self_attention(qkv, layout, heads, True), rtol=0, atol=1e-12)
        row = 5 * 2 * kv_heads * head_dim * 8  # bytes of one token per row and layer
        assert cache.num_bytes == row * sum(layout.max_seqlen + 30 for layout in layouts)  # 60 for the first
        for step in range(40):  # past the buffers' first size
            if step in (4, 20):
                live = np.ones(cache.num_rows, bool)
                live[[1, -1][step // 20]] = False
                order = cache.keep(live).tolist()
            elif step == 9:
                order = [3, 1, 1, 0]
                cache.reorder(torch.tensor(order))
            else:
                order = list(range(cache.num_rows))
            cache.begin_step()
            for index, one in enumerate(held):
                one.rows = [one.rows[i] for i in order]
                qkv = tokens(cache.num_rows)
                out = cache.attend(index, qkv, build_layout(np.ones(cache.num_rows)), heads, None)
                torch.testing.assert_close(out, one.attend(qkv), rtol=0, atol=1e-12)
            cache.end_step()
            assert cache.lengths.tolist() == [len(tokens) for tokens in held[0].rows]


@pytest.mark.parametrize("most", [11, 12, 23, 25, 47, 100])
def test_buffers_double_when_they_are_full_and_stay_within_what_was_announced(most: int) -> None:
    layout, heads, held = build_layout(np.array([5, 6])), 2, list[int]()
    with torch.inference_mode():
        cache = KeyValueCache(layout, most)
        cache.attend(0, torch.randn(11, heads + 2, 16), layout, heads, None)
        for _ in range(6, most):
            cache.begin_step()
            held.append(cache.num_bytes // (2 * 2 * 16 * 4))  # tokens of one row: keys and values of two rows
            cache.end_step()
        with pytest.raises(AssertionError, match="exceeds the length"):
            cache.begin_step()
    assert held == [min(next(size for size in (12, 24, 48, 96, 192) if size > read), most) for read in range(6, most)]


def test_layers_that_read_the_same_tokens_share_their_lengths() -> None:
    with torch.inference_mode():
        cache, _ = prefill(tiny_model(blocks=3).eval(), [[1, 2, 3], [4]], most=20)
    assert len(cache._rows) == 1


def test_prompts_lie_row_by_row_and_what_lies_behind_them_is_finite() -> None:
    layout, heads = build_layout(np.array([0, 3, 1, 0, 5])), 2
    qkv = torch.randn(9, heads + 2, 16, dtype=torch.float64)
    cache = KeyValueCache(layout, most=7)
    cache.attend(0, qkv, layout, heads, None)
    keys, values = (cache._layers[0].buffers[name] for name in ("keys", "values"))
    assert keys.shape == (5, 1, 7, 16)
    for row, part in enumerate(qkv.split([0, 3, 1, 0, 5])):
        assert torch.equal(keys[row, 0, : len(part)], part[:, heads])
        assert torch.equal(values[row, 0, : len(part)], part[:, heads + 1])
    assert torch.cat([keys, values]).isfinite().all()


# --------------------------------------------------------------------------- bf16


@pytest.fixture(scope="module")
def reciter() -> tuple[Decoder, list[list[int]]]:
    """A model that knows eight texts by heart, so that its best token is never a near tie; and the texts."""
    texts = [[first, *text] for first, text in enumerate(random_sequences([70] * 8, seed=3))]
    torch.manual_seed(0)
    sizes = {"width": 64, "blocks": 2, "heads": 2, "kv_heads": 1, "hidden": 128, "context": 128, "tied": False}
    model = build_model(model_config(sizes), VOCAB)
    assert isinstance(model, Decoder)
    optimizer, batch = torch.optim.Adam(model.parameters(), lr=5e-3), from_sequences(texts)
    for _ in range(150):
        optimizer.zero_grad()
        loss, count = model.losses(batch)["cross_entropy"]
        (loss / count).backward()
        optimizer.step()
    assert float(loss.detach()) / count < 0.05
    return model.eval(), texts


@both_paths
def test_in_bf16_greedy_tokens_are_those_of_fp64(
    reciter: tuple[Decoder, list[list[int]]], path: type[AbstractContextManager[object]]
) -> None:
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


@pytest.mark.skipif(not library.enabled(), reason=library.describe())
def test_in_bf16_native_scores_are_no_further_from_fp64_than_those_of_torch(
    reciter: tuple[Decoder, list[list[int]]],
) -> None:
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
def test_a_generation_casts_each_weight_once(streaming: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class Counted(linear._Copy):
        def __init__(self, value: Tensor, version: int) -> None:
            super().__init__(value, version)
            made.append(value)

    monkeypatch.setattr(linear, "_Copy", Counted)
    tokenizer = train_words(["a"], 300, 1, [])
    torch.manual_seed(0)
    model = build_model(model_config({"width": 32, "blocks": 2, "heads": 2, "hidden": 32, "context": 40}), 300)
    assert isinstance(model, Decoder)
    settings = GenerateSettings(max_new_tokens=6, temperature=0.0)
    if streaming:
        list(stream(model, tokenizer, [tokenizer.bos_id], settings, precision="bf16"))
    else:
        generate(model, [[tokenizer.bos_id]], settings, eos_id=NO_EOS, precision="bf16")
    assert len(made) == 2 * 4 + 1  # four matrices per block and the head
