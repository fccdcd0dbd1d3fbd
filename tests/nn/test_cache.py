"""The cache's two paths, native and torch, against each other and against the forward pass without a cache."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.conftest import VOCAB, random_sequences, tiny_model
from unpad import recipe
from unpad.batch import from_sequences
from unpad.generate import advance, generate, prefill, stream
from unpad.models import build_model, model_config
from unpad.models.decoder import Decoder
from unpad.native import library
from unpad.nn import linear
from unpad.tokens.words import train_words

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
    settings = recipe.Generate(max_new_tokens=40, temperature=0.0)
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
        settings = recipe.Generate(max_new_tokens=3, temperature=0.0)
        generate(model, [[1, 2], [3]], settings, eos_id=NO_EOS, precision="bf16")
    names = {event.key: event.count for event in profile.key_averages()}
    assert names["unpad::decode_attention"] == 2 * 2  # blocks, steps after the first token
    assert names["unpad::small_linear"] == 3 * (2 * 4 + 1)


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
    settings = recipe.Generate(max_new_tokens=40, temperature=0.0)
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
    settings = recipe.Generate(max_new_tokens=6, temperature=0.0)
    if streaming:
        list(stream(model, tokenizer, [tokenizer.bos_id], settings, precision="bf16"))
    else:
        generate(model, [[tokenizer.bos_id]], settings, eos_id=NO_EOS, precision="bf16")
    assert len(made) == 2 * 4 + 1  # four matrices per block and the head
