"""Cached decoding equals the full forward, a batch of prompts equals each alone, and every way to choose a token."""

import itertools
import json
import math
import re
import sys
from contextlib import AbstractContextManager

import jsonschema
import numpy as np
import pytest
import torch
from torch import Tensor

from tests.conftest import VOCAB, random_batch, random_sequences, tiny_model
from tests.helpers.models import generate, learn_by_heart, random_model
from tests.helpers.tokenizers import byte_fallback, few_bytes, word_pieces, words
from unpad.batching.batch import from_sequences
from unpad.data.sources.example import Example, Turn
from unpad.data.tokens.encode import encode_examples
from unpad.data.tokens.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from unpad.data.tokens.words import WordTokenizer
from unpad.errors import NonFiniteError, RecipeError
from unpad.inference.engine import advance, control_ids, prefill, sample
from unpad.inference.generate import complete, grammar_of, stream
from unpad.models import model_config
from unpad.models.decoder import Decoder
from unpad.nn.precision import Precision, autocast
from unpad.nn.rope import position_table, sinusoidal_table
from unpad.recipes.data import Template, TokenizerSettings
from unpad.recipes.training import GenerateSettings

KINDS = {
    "llama": {},
    "gpt": {"norm": "layernorm", "activation": "relu", "positions": "sinusoidal", "bias": True, "tied": False},
    "learned": {"norm": "layernorm", "activation": "gelu", "positions": "learned"},
    "grouped": {"kv_heads": 2, "activation": "geglu", "tied": False},
    "one key head": {"kv_heads": 1, "norm": "layernorm"},
    "stretched": {"context": 16, "context_method": "ntk", "context_factor": 4},
    "qwen": {"head_width": 6, "qk_norm": True, "qkv_bias": True, "kv_heads": 2},
    "gemma": {
        "head_width": 16, "qk_norm": True, "branch_norms": True, "activation": "geglu_tanh", "embed_scale": 4.0,
        "sliding_window": 6, "sliding_blocks": [0], "sliding_rope_theta": 100.0,
    },
    "smollm": {"no_rope_blocks": [1], "activation": "gelu_tanh", "sliding_window": 20},
}  # fmt: skip
SMALLEST = {"width": 8, "blocks": 1, "heads": 2, "hidden": 8, "context": 16}
NO_EOS = -1
SENTENCE = "你好，世界"


def generate_settings(**fields: object) -> GenerateSettings:
    return GenerateSettings(**{"max_new_tokens": 12, **fields})


def full_logits(model: Decoder, sequence: list[int]) -> Tensor:
    """Scores after the last token, without a cache."""
    with torch.no_grad():
        return model.logits(model(from_sequences([[*sequence, 0]])))[-1]


@pytest.fixture(scope="module")
def parrot() -> tuple[Decoder, Tokenizer]:
    """A model that says SENTENCE and nothing else, with a tokenizer that has to spell it in bytes."""
    tokenizer = words(["a"])
    ids = encode_examples([Example("x", (Turn("text", SENTENCE),))], tokenizer, Template())[0]
    sizes = {"width": 32, "blocks": 2, "heads": 4, "hidden": 32, "context": 40}
    model = random_model(sizes, tokenizer.vocab_size, 0)
    learn_by_heart(model, [ids.tolist()], 60)
    return model, tokenizer


def test_products_are_computed_in_the_precision_that_is_asked_for(parrot, monkeypatch):
    model, tokenizer = parrot
    used: list[str] = []

    def noted(precision: Precision, device: torch.device) -> AbstractContextManager[None]:
        used.append(precision)
        return autocast(precision, device)

    monkeypatch.setattr("unpad.inference.engine.autocast", noted)
    settings, prompts = generate_settings(max_new_tokens=1), [[tokenizer.bos_id]]
    for chosen in ((), ("bf16",)):
        complete(model, tokenizer, prompts, settings, *chosen)
        list(stream(model, tokenizer, prompts[0], settings, *chosen))
        assert set(used) == set(chosen or ("fp32",))
        used.clear()


def test_rows_of_the_model_that_are_no_token_are_never_said(parrot: tuple[Decoder, Tokenizer]) -> None:
    tokenizer = parrot[1]
    sizes = {"width": 16, "blocks": 1, "heads": 2, "hidden": 16, "context": 32, "tied": False}
    model = random_model({**sizes, "vocab_size": tokenizer.vocab_size + 2}, tokenizer.vocab_size, 0)
    with torch.no_grad():
        state = prefill(model.eval(), [[tokenizer.bos_id]], most=2)[1][0]
        model.head.weight[-2:] = 100 * state  # by far the likeliest
    (made,) = complete(model, tokenizer, [[tokenizer.bos_id]], generate_settings(max_new_tokens=2))
    assert max(made.ids) < tokenizer.vocab_size
    assert list(stream(model, tokenizer, [tokenizer.bos_id], generate_settings(max_new_tokens=2)))


# --------------------------------------------------------------------------- the cache


@pytest.mark.promise("llm.generation")
@pytest.mark.parametrize("kind", KINDS)
def test_cached_decoding_equals_the_full_forward(kind: str) -> None:
    model = tiny_model(**KINDS[kind]).eval()
    sequences = random_sequences([3, 1, 9, 5])
    new = np.random.default_rng(1)
    with torch.inference_mode():
        cache, hidden = prefill(model, sequences, most=60)
        for step in range(30):  # past three sizes of the buffers
            expected = torch.stack([full_logits(model, s) for s in sequences])
            torch.testing.assert_close(model.logits(hidden), expected, rtol=1e-10, atol=1e-10)
            if step in (4, 9):  # sequences leave from the front and from the middle
                rows = [row for row in range(cache.num_rows) if row != (step != 4)]
                cache.reorder(torch.tensor(rows))
                sequences = [sequences[row] for row in rows]
            if step == 14:
                rows = [1, 1, 0]
                cache.reorder(torch.tensor(rows))
                sequences = [list(sequences[row]) for row in rows]
            tokens = new.integers(0, VOCAB, cache.num_rows)
            for sequence, token in zip(sequences, tokens.tolist(), strict=True):
                sequence.append(token)
            hidden = advance(model, cache, torch.from_numpy(tokens))


@pytest.mark.promise("llm.grouped")
def test_the_cache_of_grouped_heads_is_smaller_by_their_ratio() -> None:
    sizes = []
    for kv_heads in (4, 2, 1):
        with torch.inference_mode():
            cache, _ = prefill(tiny_model(kv_heads=kv_heads).eval(), [[1, 2, 3]], most=20)
        sizes.append(cache.num_bytes)
    assert sizes == [sizes[0], sizes[0] // 2, sizes[0] // 4]


# --------------------------------------------------------------------------- schemas

PET = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 4}, "age": {"enum": [1, 20]}},
       "required": ["name", "age"], "additionalProperties": False}  # fmt: skip


@pytest.mark.parametrize("kind", ["words", "bpe", "earlier words", "byte fallback"])
def test_replies_are_json_of_the_schema_and_end_with_it_for_every_tokenizer(kind: str) -> None:
    texts = ['{"name": "小猫", "age": 20}', "a cat is a cat"] * 9
    if kind == "earlier words":
        tokenizer: Tokenizer = WordTokenizer(["小猫", '": ', "name"], ["<|user|>"])
    elif kind == "byte fallback":
        tokenizer = load_tokenizer(byte_fallback('abcdefgmn{}:,0123456789"'))
    else:
        settings = TokenizerSettings(**{"kind": kind, "vocab_size": 300})
        tokenizer = train_tokenizer(settings, texts, ["<|user|>"])
    model = random_model({**SMALLEST, "context": 200}, tokenizer.vocab_size + 5, 0).eval()
    prompts, settings = (
        [[tokenizer.bos_id, 9 + i] for i in range(6)],
        generate_settings(max_new_tokens=150, json_schema=PET),
    )
    for temperature in (0.0, 1.0):
        chosen = settings.model_copy(update={"temperature": temperature})
        for reply in complete(model, tokenizer, prompts, chosen):
            assert reply.finished == "eos"
            jsonschema.validate(json.loads(reply.text), PET)
    assert [one.finished for one in complete(model, tokenizer, prompts[:1], generate_settings(json_schema=PET))] == [
        "length"
    ]


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "foo"}, "Invalid type: foo"), ({"not": {}}, 'Unimplemented keys: ["not"]'),
        ({"enum": ["x" * (64 << 10)]}, "at most 65,536 are read"), ({"$ref": "#/$defs/a"}, "does not exist"),
        ({"properties": {f"k{i}": {} for i in range(1500)}}, "grammar size"),
        ({"$defs": {"n": {"$ref": "#/$defs/n"}}, "$ref": "#/$defs/n"}, "cannot be used"),
        (json.loads('{"items":' * 140 + "{}" + "}" * 140), "recursion limit"),
    ],
)  # fmt: skip
def test_a_schema_that_cannot_be_followed_is_refused_by_name(schema, said):
    with pytest.raises(RecipeError, match=re.escape(said)):
        grammar_of(generate_settings(json_schema=schema), words(["cat"]), 300)


def test_what_cannot_be_held_to_a_schema_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    for file in (few_bytes(["cat"]), word_pieces("cat")):
        with pytest.raises(RecipeError, match="use a run"):
            grammar_of(generate_settings(json_schema=PET), load_tokenizer(file), 300)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RecipeError, match=re.escape("pip install 'unpad[schema]'")):
        grammar_of(generate_settings(json_schema=PET), words(["cat"]), 300)


# --------------------------------------------------------------------------- choosing a token


def drawn(probabilities: list[float], **fields: object) -> list[float]:
    """Share of each token over an even grid of draws, by default at temperature 1."""
    grid = (torch.arange(3000, dtype=torch.float64) + 0.5) / 3000
    logits = torch.tensor(probabilities, dtype=torch.float64).log().expand(3000, -1)
    tokens = sample(logits, [generate_settings(**{"temperature": 1.0, **fields})] * 3000, grid)
    return (torch.bincount(tokens, minlength=len(probabilities)) / 3000).tolist()


@pytest.mark.promise("llm.generation")
def test_draws_follow_temperature_top_k_and_top_p() -> None:
    p = [0.1, 0.4, 0.0, 0.3, 0.2]
    assert drawn(p) == pytest.approx(p, abs=1e-3)
    assert drawn(p, top_k=2) == pytest.approx([0, 4 / 7, 0, 3 / 7, 0], abs=1e-3)
    assert drawn(p, top_k=99) == pytest.approx(p, abs=1e-3)
    assert drawn(p, top_p=0.75) == pytest.approx([0, 4 / 9, 0, 3 / 9, 2 / 9], abs=1e-3)
    assert drawn(p, top_p=0.01) == [0, 1, 0, 0, 0]
    # top_k first: 0.4 and 0.3 of 0.9 reach 0.75 of what it leaves, though not 0.75 of all
    assert drawn(p, top_k=3, top_p=0.75) == pytest.approx([0, 4 / 7, 0, 3 / 7, 0], abs=1e-3)
    assert drawn(p, min_p=0.6) == pytest.approx([0, 4 / 7, 0, 3 / 7, 0], abs=1e-3)
    assert drawn(p, top_p=0.75, min_p=0.6) == pytest.approx([0, 4 / 7, 0, 3 / 7, 0], abs=1e-3)
    assert drawn([0.2, 0.8], temperature=0.5) == pytest.approx([1 / 17, 16 / 17], abs=1e-3)


def test_top_p_is_exact_when_it_keeps_most_of_a_large_vocabulary() -> None:
    shares = drawn([1 / 1000] * 1000, top_p=0.5)
    assert sum(share > 0 for share in shares) in (500, 501)


def test_a_draw_never_gives_a_token_of_probability_zero() -> None:
    logits = torch.tensor([[-math.inf, 0.0, 0.0, -math.inf]], dtype=torch.float64)
    for u in (0.0, np.nextafter(0.5, 0), 0.5, np.nextafter(1, 0)):
        uniform = torch.tensor([u], dtype=torch.float64)
        for fields in ({}, {"top_k": 3}, {"top_p": 0.999}):
            assert int(sample(logits, [generate_settings(temperature=1.0, **fields)], uniform)) in (1, 2)


@pytest.mark.parametrize("prompt", random_sequences([4, 9, 30, 50]))
def test_the_repetition_penalty_counts_prompt_and_new_tokens(prompt: list[int]) -> None:
    model, penalty = tiny_model().eval(), 2.5
    ids = generate(model, [prompt], generate_settings(repetition_penalty=penalty), eos_id=NO_EOS)[0]
    for i, token in enumerate(ids):
        assert token == int(penalised_logits(model, [*prompt, *ids[:i]], penalty).argmax())
    assert ids != generate(model, [prompt], generate_settings(), eos_id=NO_EOS)[0]


def penalised_logits(model: Decoder, sequence: list[int], penalty: float) -> Tensor:
    logits = full_logits(model, sequence)
    for used in set(sequence):
        logits[used] = logits[used] / penalty if logits[used] > 0 else logits[used] * penalty
    return logits


class Negative(Decoder):
    """A decoder all of whose scores are below zero, where division would raise the penalised ones."""

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden) - 40


class Huge(Decoder):
    """A decoder whose scores are finite until the penalty divides them."""

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden).abs() + 5e36


@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0}, {"beams": 2}])
def test_scores_that_are_not_finite_or_made_infinite_by_the_penalty_stop_generation(fields: dict[str, float]) -> None:
    huge, broken = tiny_model().eval().float(), tiny_model()
    huge.__class__ = Huge
    broken.norm.weight.data[0] = math.nan
    for model, penalty in ((huge, 0.01), (broken, 1.0)):
        with pytest.raises(NonFiniteError, match="not finite"):
            generate(model, [[3, 1, 4]], generate_settings(repetition_penalty=penalty, **fields), eos_id=NO_EOS)


def test_the_repetition_penalty_lowers_negative_scores() -> None:
    model = tiny_model().eval()
    model.__class__ = Negative
    prompt, settings = [3, 1, 4], generate_settings(repetition_penalty=1.2, max_new_tokens=20)
    assert float(full_logits(model, prompt).max()) < 0
    ids = generate(model, [prompt], settings, eos_id=NO_EOS)[0]
    for i, token in enumerate(ids):
        assert token == int(penalised_logits(model, [*prompt, *ids[:i]], 1.2).argmax())
    assert len({*prompt, *ids}) == 23, "at this penalty nothing comes twice"


@pytest.mark.parametrize("fields", [{}, {"temperature": 5.0}, {"beams": 3}])
def test_banned_ids_are_never_proposed(fields: dict[str, float]) -> None:
    model = tiny_model()
    settings = generate_settings(max_new_tokens=40, **fields)
    usual = set(generate(model, [[1, 2]], settings, eos_id=NO_EOS)[0])
    banned = sorted(usual)[:5]
    assert usual.isdisjoint(banned) is False
    assert set(generate(model, [[1, 2]], settings, eos_id=NO_EOS, banned=banned)[0]).isdisjoint(banned)


@pytest.mark.parametrize("fields", [{}, {"temperature": 2.0}, {"beams": 3, "max_new_tokens": 12}])
def test_bytes_that_cannot_continue_a_character_are_never_drawn(fields: dict[str, float]) -> None:
    """An untrained model of bytes draws any id; an answer may end in a part of a character by its length alone."""
    tokenizer, settings = words(["好"]), generate_settings(**{"max_new_tokens": 50, **fields})
    model = random_model({"width": 16, "blocks": 1, "heads": 2, "hidden": 16, "context": 64}, 270, 0)
    prompts = tokenizer.encode_batch(["a", "好", "é\n", "龘😀"])
    made = complete(model, tokenizer, prompts, settings)
    assert made == [complete(model, tokenizer, [prompt], settings)[0] for prompt in prompts]
    assert not any("\ufffd" in (one.text[:-1] if one.finished == "length" else one.text) for one in made)
    by_scores = generate(model, prompts, settings, eos_id=NO_EOS, banned=range(261, 270))
    assert any("\ufffd" in tokenizer.decode(ids)[:-1] for ids in by_scores)


# --------------------------------------------------------------------------- beams


def score(model: Decoder, prompt: list[int], text: tuple[int, ...], penalty: float = 1.0) -> float:
    """Log probability per token of a continuation."""
    total = 0.0
    for i, token in enumerate(text):
        total += float(penalised_logits(model, [*prompt, *text[:i]], penalty).log_softmax(-1)[token])
    return total / len(text)


@pytest.mark.promise("llm.generation")
@pytest.mark.parametrize(("seed", "penalty"), [(0, 1.0), (1, 1.6), (2, 1.0), (3, 1.6)])
def test_beams_find_what_exhaustive_search_finds(seed: int, penalty: float) -> None:
    eos_id, most = 3, 3
    model = random_model(SMALLEST, 4, 1.0, seed).double().eval()
    texts = [t for n in range(1, most + 1) for t in itertools.product(range(4), repeat=n) if eos_id not in t[:-1]]
    prompts = [[0, 1], [2], [1, 1, 2]]
    settings = generate_settings(beams=16, max_new_tokens=most, repetition_penalty=penalty)
    for prompt, ids in zip(prompts, generate(model, prompts, settings, eos_id=eos_id), strict=True):
        best = max(
            (t for t in texts if t[-1] == eos_id or len(t) == most), key=lambda t: score(model, prompt, t, penalty)
        )
        assert ids == [token for token in best if token != eos_id]


def plain_beams(model: Decoder, prompt: list[int], width: int, most: int, eos_id: int) -> list[int]:
    """Beam search written down: `width` unfinished texts go on from all continuations of theirs."""
    live: list[tuple[float, list[int]]] = [(0.0, [])]
    best: tuple[float, list[int]] = (-math.inf, [])
    for step in range(1, most + 1):
        log_probs = [full_logits(model, [*prompt, *text]).log_softmax(-1).tolist() for _, text in live]
        every = [
            (total + lp, [*text, token])
            for (total, text), row in zip(live, log_probs, strict=True)
            for token, lp in enumerate(row)
        ]
        every.sort(key=lambda one: -one[0])
        ended = [(total / step, text[:-1]) for total, text in every if text[-1] == eos_id]
        best = max([best, *ended[:1]], key=lambda one: one[0])
        live = [one for one in every if one[1][-1] != eos_id][:width]
        if step == most:
            best = max([best, (live[0][0] / step, live[0][1])], key=lambda one: one[0])
        if best[0] >= live[0][0] / most:
            break
    return best[1]


@pytest.mark.parametrize("width", [2, 3])
def test_beams_go_on_beside_texts_that_end(width: int) -> None:
    eos_id, most, ended_early = 3, 6, 0
    for seed in range(12):
        model = random_model(SMALLEST, 6, 0.6, seed).double().eval()
        prompts = [[0, 1], [2], [1, 1, 2]]
        settings = generate_settings(beams=width, max_new_tokens=most)
        found = generate(model, prompts, settings, eos_id=eos_id)
        assert found == [plain_beams(model, prompt, width, most, eos_id) for prompt in prompts], seed
        ended_early += sum(len(ids) < most for ids in found)
    assert ended_early > 3


def test_beams_are_the_same_alone_and_in_a_batch_and_never_worse_than_greedy() -> None:
    model = tiny_model().eval()
    prompts = random_sequences([7, 1, 20, 3])
    settings = generate_settings(beams=4, max_new_tokens=8)
    together = generate(model, prompts, settings, eos_id=NO_EOS)
    assert together == [generate(model, [p], settings, eos_id=NO_EOS)[0] for p in prompts]
    greedy = generate(model, prompts, generate_settings(max_new_tokens=8), eos_id=NO_EOS)
    better = [
        score(model, p, tuple(b)) - score(model, p, tuple(g)) for p, b, g in zip(prompts, together, greedy, strict=True)
    ]
    assert min(better) >= -1e-12
    assert max(better) > 0


# --------------------------------------------------------------------------- context and bad input


def test_a_prompt_longer_than_the_context_is_refused_with_both_lengths() -> None:
    with pytest.raises(RecipeError, match=r"65 tokens.*context is 64") as caught:
        generate(tiny_model(), [[1], [1] * 65], generate_settings(), eos_id=NO_EOS)
    assert caught.value.where == "prompt 1"


@pytest.mark.parametrize(
    ("positions", "advice"),
    [("rotary", "model.context_method and model.context_factor"), ("learned", "train with a larger model.context")],
)
def test_the_advice_on_a_long_prompt_fits_the_positions(positions: str, advice: str) -> None:
    for run in (
        lambda: generate(tiny_model(positions=positions), [[1] * 65], generate_settings(), eos_id=NO_EOS),
        lambda: tiny_model(positions=positions)(from_sequences([[1] * 66])),
    ):
        with pytest.raises(RecipeError) as caught:
            run()
        assert caught.value.fix.startswith("shorten it")
        assert caught.value.fix.endswith(advice)
    whole = model_config({"kind": "vision_language", "vision": {}, "language": {"positions": positions}})
    assert "model.c" not in whole.advice_beyond


@pytest.mark.parametrize("fields", [{}, {"beams": 2}])
def test_generation_ends_where_the_context_ends(fields: dict[str, int]) -> None:
    prompts = [[1] * 64, [1] * 60, [1] * 10]
    lengths = [len(ids) for ids in generate(tiny_model(), prompts, generate_settings(**fields), eos_id=NO_EOS)]
    assert lengths == [1, 5, 12]  # the last position of the context predicts one more token


@pytest.mark.promise("llm.context")
def test_ntk_generates_at_four_times_the_trained_context_and_none_refuses() -> None:
    long = [random_sequences([60])[0]]
    stretched = tiny_model(context=16, context_method="ntk", context_factor=4)
    assert len(generate(stretched, long, generate_settings(max_new_tokens=4), eos_id=NO_EOS)[0]) == 4
    with pytest.raises(RecipeError, match=r"60 tokens.*context is 16"):
        generate(tiny_model(context=16), long, generate_settings(), eos_id=NO_EOS)


@pytest.mark.parametrize(
    ("prompt", "fields", "said"),
    [
        ([], {}, "no tokens"), ([1, VOCAB], {}, "the model knows"), ([-1], {}, "the model knows"),
        ([1], {"beams": 2, "temperature": 0.5}, "beams=2"),
    ],
)  # fmt: skip
def test_a_prompt_that_cannot_be_continued_is_refused(prompt: list[int], fields: dict[str, float], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        generate(tiny_model(), [[1], prompt], generate_settings(**fields), eos_id=NO_EOS)
    with pytest.raises(RecipeError, match="causal"):
        generate(tiny_model(causal=False), [[1]], generate_settings(), eos_id=NO_EOS)
    assert generate(tiny_model(), [], generate_settings(), eos_id=NO_EOS) == []


# --------------------------------------------------------------------------- text, streaming, and what is left behind


def test_a_completion_says_why_it_ended(parrot: tuple[Decoder, object]) -> None:
    model, tokenizer = parrot
    bos = [tokenizer.bos_id]
    assert complete(model, tokenizer, [bos], generate_settings(max_new_tokens=30))[0].finished == "eos"
    cut = complete(model, tokenizer, [bos], generate_settings(max_new_tokens=6))[0]
    assert (cut.text, cut.finished, len(cut.ids)) == ("你好", "length", 6)
    whole = complete(model, tokenizer, [bos, bos * 40], generate_settings(max_new_tokens=30, beams=2))
    assert (whole[0].text, whole[0].finished) == (SENTENCE, "eos")
    assert whole[1].finished in ("context", "eos")
    assert len(whole[1].ids) <= 1


def test_a_stream_gives_whole_characters_as_they_appear(parrot: tuple[Decoder, object]) -> None:
    model, tokenizer = parrot
    pieces = []
    for piece in stream(model, tokenizer, [tokenizer.bos_id], generate_settings(max_new_tokens=30)):
        assert not torch.is_inference_mode_enabled()
        pieces.append(piece)
    assert pieces == list(SENTENCE)


@pytest.mark.parametrize("fields", [{"temperature": 1.5}, {"beams": 3}, {"max_new_tokens": 7}])
def test_the_pieces_of_a_stream_join_to_the_completion(parrot, fields):
    model, tokenizer = parrot
    settings = generate_settings(**{"max_new_tokens": 25, **fields})
    prompt = [tokenizer.bos_id]
    assert "".join(stream(model, tokenizer, prompt, settings)) == complete(model, tokenizer, [prompt], settings)[0].text


def test_pad_and_bos_are_control_ids_and_eos_never_is(parrot: tuple[Decoder, object]) -> None:
    tokenizer = parrot[1]
    assert control_ids(tokenizer) == [tokenizer.pad_id, tokenizer.bos_id]


@pytest.mark.parametrize("training", [True, False])
def test_generation_has_no_dropout_and_leaves_the_model_as_it_was(training: bool) -> None:
    sinusoidal_table.cache_clear()
    position_table.cache_clear()
    model = tiny_model(positions="sinusoidal", dropout=0.5).train(training)
    first, second = (generate(model, [[1, 2, 3]], generate_settings(), eos_id=NO_EOS) for _ in range(2))
    assert first == second
    assert model.training is training
    model.losses(random_batch([9, 5]))["cross_entropy"][0].backward()  # tables made meanwhile serve training too
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
