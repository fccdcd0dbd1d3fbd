"""Scores of prompts decoded together are those of each prompt alone, bit by bit."""

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.grid import pairs
from tests.helpers.models import generate, random_model
from tests.helpers.paths import PATHS, on
from tests.helpers.quantized import quantized
from unpad.inference.engine import Engine, sample
from unpad.models.decoder import Decoder
from unpad.nn import linear
from unpad.nn.linear import FIXED_ROWS, independent_rows, product, reading
from unpad.nn.native import library
from unpad.recipes.training import GenerateSettings

pytestmark = pytest.mark.promise("llm.generation")

VOCAB, NUM_PROMPTS = 500, 32
STOPS = list(range(0, VOCAB, 9))  # about one row in nine ends in every step
SIZES = {"width": 64, "blocks": 2, "heads": 4, "hidden": 100, "context": 400, "tied": False}
KINDS = {
    "llama": {"activation": "swiglu"},
    "gpt": {"norm": "layernorm", "activation": "gelu", "positions": "learned", "bias": True, "kv_heads": 2},
    # Heads that no native kernel takes, a window that only some rows fill, and an activation of torch.
    "gemma": {"head_width": 24, "qk_norm": True, "activation": "geglu_tanh", "sliding_window": 50},
    "windowed": {"activation": "gelu_tanh", "sliding_window": 50, "sliding_blocks": [1]},
}
GREEDY = GenerateSettings(max_new_tokens=6, temperature=0.0)
DRAWN = GenerateSettings(max_new_tokens=6, temperature=1.0, top_p=0.9)


def decoder_of(kind: str) -> Decoder:
    return random_model({**SIZES, **KINDS[kind]}, VOCAB, 0).eval()


def unlike_prompts() -> list[list[int]]:
    """Random prompts, every other one long."""
    draw = np.random.default_rng(0)
    lengths = [int(draw.integers(60, 300) if i % 2 else draw.integers(1, 60)) for i in range(NUM_PROMPTS)]
    return [draw.integers(0, VOCAB, length).tolist() for length in lengths]


Scores = dict[tuple[int, ...], list[bytes]]


@pytest.fixture
def scores(monkeypatch: pytest.MonkeyPatch) -> Scores:
    """The scores of every step from now on, by prompt."""
    found: Scores = defaultdict(list)
    report = Engine._report

    def noted(self: Engine, answer: Any, token: int, logits: torch.Tensor) -> None:
        found[tuple(answer.ticket.ids)].append(logits.numpy().tobytes())
        report(self, answer, token, logits)

    monkeypatch.setattr(Engine, "_report", noted)
    return found


def taken(scores: Scores) -> Scores:
    """The scores noted so far."""
    found = dict(scores)
    scores.clear()
    return found


@pytest.mark.parametrize(
    ("asked", "precision", "path"),
    pairs([("llama", DRAWN), *((kind, GREEDY) for kind in KINDS)], ["fp32", "bf16"], PATHS),
)
def test_scores_of_prompts_together_are_those_of_each_alone(asked, precision, path, scores):
    kind, settings = asked
    model, prompts = decoder_of(kind), unlike_prompts()
    with on(path):
        texts = [generate(model, [prompt], settings, eos_id=STOPS, precision=precision)[0] for prompt in prompts]
        alone = taken(scores)
        assert len({len(steps) for steps in alone.values()}) > 3, "rows end at different times"
        for num in (3, 32):
            for start in range(0, NUM_PROMPTS, num):
                here = slice(start, start + num)
                assert generate(model, prompts[here], settings, eos_id=STOPS, precision=precision) == texts[here]
            assert taken(scores) == alone


@pytest.mark.promise("models.quantized")
@pytest.mark.parametrize(("precision", "path"), pairs(["fp32", "bf16"], PATHS))
def test_scores_of_quantized_weights_are_those_of_each_prompt_alone(precision, path, scores):
    model, prompts = quantized(decoder_of("gpt")), unlike_prompts()[:12]
    with on(path):
        for prompt in prompts:
            generate(model, [prompt], GREEDY, eos_id=STOPS, precision=precision)
        alone = taken(scores)
        generate(model, prompts, GREEDY, eos_id=STOPS, precision=precision)
        assert taken(scores) == alone


@pytest.mark.skipif(not library.enabled(), reason=library.describe())
def test_two_threads_give_native_scores_the_same_bits(scores: Scores) -> None:
    model, prompts, found = decoder_of("llama"), unlike_prompts(), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        generate(model, prompts, GREEDY, eos_id=STOPS)
        found.append(taken(scores))
    assert found[0] == found[1]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_without_kernels_every_number_of_rows_gives_the_rows_of_the_most(dtype: torch.dtype, threads: int) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(300, 70).to(dtype), torch.randn(37, 70).to(dtype), torch.randn(37).to(dtype)
    torch.set_num_threads(threads)
    with torch.inference_mode(), library.switched_off(), independent_rows():
        most = product(x, weight, bias)
        torch.testing.assert_close(most, x @ weight.T + bias, rtol=0.02, atol=0.1)
        for num_rows in (*range(1, 2 * FIXED_ROWS + 2), 100, 128, 299):
            assert torch.equal(product(x[:num_rows], weight, bias), most[:num_rows]), num_rows
        assert product(x[:0], weight, bias).shape == (0, 37)
        order = torch.randperm(300)
        assert torch.equal(product(x[order], weight, bias), most[order])


@pytest.mark.parametrize("tiles", [False, True], ids=["no tiles", "AMX"])
def test_prompts_in_bf16_on_amx_are_read_by_torch_in_blocks_of_one_size(tiles, monkeypatch):
    """On a stand-in for such a processor: which product runs, and that no number of rows changes a row."""
    torch.manual_seed(0)
    x, weight = torch.randn(300, 70).bfloat16(), torch.randn(37, 70).bfloat16()
    sizes: list[int] = []

    def noted(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        sizes.append(len(x))
        return x @ weight.T

    monkeypatch.setattr(linear, "has_tiles", lambda: tiles)
    torchs = FIXED_ROWS if not library.computes(torch.bfloat16) else 0
    with torch.inference_mode(), independent_rows():
        step = product(x, weight)
        with reading():
            most = product(x, weight)
            for num_rows in range(1, 301):
                assert torch.equal(product(x[:num_rows], weight), most[:num_rows]), num_rows
            assert torch.equal(product(x[200:], weight), most[200:])
            monkeypatch.setattr(linear.F, "linear", noted)
            product(x, weight)
            product(x.float(), weight.float())
        product(x, weight)
    wide = [FIXED_ROWS] * 10 if not library.enabled() else []
    narrow = [torchs] * 10 if torchs else []
    assert sizes == [*([linear.TILED_ROWS] * 3 if tiles else narrow), *wide, *narrow]
    torch.testing.assert_close(most, step, rtol=0.02, atol=0.1)


def test_a_draw_and_its_ties_do_not_depend_on_the_other_rows() -> None:
    torch.manual_seed(0)
    settings, flat = GenerateSettings(temperature=1.0, top_p=0.9), torch.zeros(1, 8000, dtype=torch.float64)
    for _ in range(100):
        row = (torch.randn(1, 8000) * 2.5).bfloat16().double()  # scores of bf16 have many ties
        row[0, :20] += 6
        place = torch.rand(1, dtype=torch.float64)
        alone = sample(row, [settings], place)
        both = [settings, settings.model_copy(update={"temperature": 0.7, "top_p": 0.3})]
        assert sample(torch.cat([row, flat]), both, torch.cat([place, place]))[0] == alone[0]
        three = sample(torch.cat([flat, row, row]), [both[1], *[settings] * 2], torch.cat([place] * 3))
        assert three.tolist()[1:] == [int(alone[0])] * 2
