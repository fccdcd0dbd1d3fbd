"""`unpad prove --serve`: every line holds, and a fault of each kind makes one fail."""

import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.helpers.models import random_model
from tests.helpers.paths import needs_kernels, on
from unpad.errors import RecipeError, SourceError
from unpad.inference import engine as engine_module
from unpad.inference.engine import Engine, Request, watch
from unpad.inference.generate import grammar_of
from unpad.inference.loaded import load
from unpad.models import decoder
from unpad.models.decoder import Decoder
from unpad.models.vision_language.model import VisionLanguage
from unpad.nn import cache, linear
from unpad.nn.native import attention as native_decode
from unpad.proof.line import SAME_IDS, Line
from unpad.proof.serving import HTTP, NUM_NEW, Answering, OverHttp, _begun, _held, prompts_of, prove_serving
from unpad.recipes.training import GenerateSettings
from unpad.serving.over_http import streams
from unpad.serving.served import Served

VOCAB, CONTEXT = 300, 420


def subject() -> Answering:
    """A random model with a head that is not tied, and prompts of 1 to 390 tokens."""
    fields = {"width": 64, "blocks": 2, "heads": 4, "kv_heads": 2, "hidden": 64, "context": CONTEXT, "tied": False}
    model = random_model(fields, VOCAB, 0)
    draw = np.random.default_rng(0)
    prompts = [draw.integers(0, VOCAB, length).tolist() for length in (40, 1, 60, 3, 270, 390, 9, 33)]
    greedy = GenerateSettings(max_new_tokens=NUM_NEW)
    drawn = greedy.model_copy(update={"temperature": 1.0, "top_p": 0.95})
    requests = [Request(ids, (greedy, drawn)[i % 2], range(0, VOCAB, 40)) for i, ids in enumerate(prompts)]

    def make(**options: Any) -> Engine:
        return Engine(model.eval(), watch=watch, **options)

    return Answering(make, requests, "fp32", CONTEXT)


def proved(one: Answering) -> dict[str, Line]:
    return {name: check("here") for name, check in one.checks(one.alone())}


@pytest.mark.slow
@pytest.mark.parametrize("path", [pytest.param("native", marks=needs_kernels), "torch"])
def test_every_line_holds(path):
    with on(path):
        lines = proved(subject())
    assert len(lines) == 8
    assert all(line.passed for line in lines.values() if line.applies), lines
    assert all(line.measured == 0 for line in lines.values() if line.applies)


def wide_products(patch: pytest.MonkeyPatch) -> None:
    """Torch's product above 32 rows, whose rows depend on their number."""
    own = linear.product

    def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, weight, bias) if len(x) > 32 else own(x, weight, bias)

    patch.setattr(linear, "product", product)
    patch.setattr(decoder, "product", product)


def later_keys(patch: pytest.MonkeyPatch) -> None:
    """Attention of a prompt that depends on keys that come later, as a shift of scores by the largest key would."""
    own = native_decode.piece_attention

    def attention(qkv: Tensor, *others: Any) -> Tensor:
        return own(qkv, *others) * (1 + 1e-4 * float(qkv.abs().max()))

    patch.setattr(cache, "piece_attention", attention)


def one_sort(patch: pytest.MonkeyPatch) -> None:
    """Rows that are sorted whole as soon as one of them is flat."""

    def most_likely(probabilities: Tensor, share: float) -> tuple[Tensor, Tensor]:
        values, ids = probabilities.topk(16, -1)
        if bool((values.sum(-1) < share).any()):
            values, ids = probabilities.flip(-1).sort(dim=-1, descending=True, stable=True)
            ids = probabilities.shape[-1] - 1 - ids
        return values, ids

    patch.setattr(engine_module, "_most_likely", most_likely)
    own = Decoder.logits

    def logits(self: Decoder, hidden: Tensor) -> Tensor:
        """Scores with many ties; half of the rows are peaked."""
        scores = own(self, hidden)
        scores = (scores * 2 / scores.std(-1, keepdim=True)).round()
        return torch.where(hidden[:, :1] > 0, scores * 3, scores)

    patch.setattr(Decoder, "logits", logits)


def cuts_by_queue(patch: pytest.MonkeyPatch) -> None:
    """Prompts cut where the turn's room ends, without kernels that can."""
    patch.setattr(engine_module, "cut_step", lambda *of: 1)


def kept_replies(patch: pytest.MonkeyPatch) -> None:
    """Replies kept as if they had been read."""
    own, said = Engine._report, dict[int, list[int]]()

    def report(self: Engine, answer: Any, token: int, scores: Tensor) -> None:
        own(self, answer, token, scores)
        made = said.setdefault(id(answer), [])
        if answer.index in answer.ticket.open:
            made.append(token)
        elif self._beginnings is not None and len(made) > 1:
            ids = [*answer.ticket.ids, *made][: answer.row.length]
            self._beginnings.keep(ids, answer.row.copy(len(ids)), 1 << 30)

    patch.setattr(Engine, "_report", report)


def generators_of_slots(patch: pytest.MonkeyPatch) -> None:
    """Draws from the generator of a row's place."""
    own, generators = engine_module._draw, dict[int, np.random.Generator]()

    def draw(answers: list[Any], scores: Tensor, uniform: list[float]) -> list[int | None]:
        for place, answer in enumerate(answers):
            answer.generator = generators.setdefault(place, answer.generator)
        if len(answers) == 1:
            generators.clear()
        return own(answers, scores, uniform)

    patch.setattr(engine_module, "_draw", draw)


def penalties_of_others(patch: pytest.MonkeyPatch) -> None:
    """Penalties of the tokens of another row."""
    own = engine_module._draw

    def draw(answers: list[Any], scores: Tensor, uniform: list[float]) -> list[int | None]:
        counts = [answer.counts for answer in answers if answer.counts is not None]
        for answer, other in zip([one for one in answers if one.counts is not None], counts[::-1], strict=True):
            answer.counts = other
        return own(answers, scores, uniform)

    patch.setattr(engine_module, "_draw", draw)


def ends_early(patch: pytest.MonkeyPatch) -> None:
    """Answers that end when a request leaves beside them."""
    drop = Engine._drop

    def dropped(self: Engine) -> None:
        if any(ticket.cancelled for ticket in self.tickets()):
            self.close()
        drop(self)

    def close(self: Engine) -> None:
        for ticket in self.tickets():
            ticket.cancel()

    patch.setattr(Engine, "_drop", dropped)
    patch.setattr(Engine, "close", close)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "path", "where"),
    [
        pytest.param(wide_products, "native", "all at once", marks=needs_kernels),
        pytest.param(later_keys, "native", "pieces of 7", marks=needs_kernels),
        (one_sort, "torch", "all at once"),
        (cuts_by_queue, "torch", "pieces of 7 "),
        pytest.param(kept_replies, "native", "beginnings", marks=needs_kernels),
        (generators_of_slots, "torch", "some leave"),
        (penalties_of_others, "torch", "penalties"),
        pytest.param(ends_early, "native", "some leave", marks=needs_kernels),
    ],
)
def test_a_fault_makes_a_line_fail(plant, path, where, monkeypatch):
    plant(monkeypatch)
    with on(path):
        lines = proved(subject())
    failed = [name for name, line in lines.items() if line.passed is False]
    assert any(where in name for name in failed), lines
    assert all("rows of scores differ" in line.note for line in lines.values() if line.passed is False)


@needs_kernels
def test_questions_about_images_are_proved_and_a_fault_makes_every_line_fail(finished, monkeypatch):
    monkeypatch.setattr("unpad.proof.serving.MOST_PROMPTS", 6)
    run = load(finished("questions").run)
    lines = {line.name: line for line in prove_serving(run).lines if line.applies}
    assert lines.pop(HTTP).passed is None
    assert lines.pop(SAME_IDS).passed
    assert len(lines) == 6
    assert all(line.passed and "fp32" in line.kernel for line in lines.values()), lines  # as they are answered
    own = VisionLanguage.logits
    monkeypatch.setattr(VisionLanguage, "logits", lambda self, hidden: own(self, hidden) * (1 + len(hidden) * 2**-18))
    broken = {line.name: line for line in prove_serving(run).lines}
    assert all(broken[name].passed is False for name in lines), broken


def test_masks_of_other_rows_and_texts_beside_the_schema_fail_its_line(finished, monkeypatch):
    run = load(finished("text").run)
    one = Answering.of(run, prompts_of(run, None))
    assert _held(run, one, "here").passed
    with monkeypatch.context() as patch:
        other = GenerateSettings(json_schema={"enum": ["other"]})
        patch.setattr("unpad.proof.serving.grammar_of", lambda settings, *of: grammar_of(other, *of))
        assert "no value of its schema" in _held(run, one, "here").note
    own = engine_module.permitted
    monkeypatch.setattr(engine_module, "permitted", lambda scores, masks: own(scores, [*masks[1:], *masks[:1]]))
    with pytest.raises(RecipeError, match="satisfy the grammar"):  # which becomes a failing line
        _held(run, one, "here")
    monkeypatch.setitem(sys.modules, "llguidance", None)
    assert not _held(run, one, "here").applies


@pytest.mark.parametrize("kind", ["conversations", "text"])
def test_a_beginning_that_is_left_out_fails_the_line_of_begun_replies(finished, kind, monkeypatch):
    run = load(finished(kind).run)
    one = Answering.of(run, prompts_of(run, None)[:6])
    truth, over_http = one.alone(), OverHttp(streams, lambda *of: None)
    line = _begun(run, one, truth, over_http)
    assert (line.passed, line.measured, line.kernel) == (True, 0, "6 streams"), line
    assert _begun(run, one, truth, None).passed is None
    own = Served.chat
    monkeypatch.setattr(
        Served, "chat", lambda self, ask: own(self, ask.model_copy(update={"messages": ask.messages[:1]}))
    )
    assert "6 of 6 answers differ" in _begun(run, one, truth, over_http).note


def test_what_compares_nothing_is_not_proven():
    one = subject()
    lines = proved(Answering(one.make, one.requests[1:2], "fp32", CONTEXT))
    assert lines["all at once = alone"].passed is None
    assert lines["all at once = alone"].note == "fewer than two prompts"
    assert lines["prompts in pieces of 7 tokens = whole"].note == "no prompt is longer"
    assert lines["beginnings kept from others = read anew"].passed is None


def test_prompts_of_a_file_are_proved_as_they_are(finished, tmp_path):
    run, file = load(finished("text").run), tmp_path / "prompts.txt"
    file.write_text("小猫\n\n谁看见月亮\n", encoding="utf-8")
    assert prompts_of(run, file) == [run.prompt("小猫").ids, run.prompt("谁看见月亮").ids]
    for content, where, what in (
        (b"a\n\xff\n", ":2", "not UTF-8"),
        (b"a\n" + b"long " * 5000, ":2", "leave room"),
        (b"\n \n", "", "no prompts in it"),
    ):
        file.write_bytes(content)
        with pytest.raises(SourceError, match=what) as refused:
            prompts_of(run, file)
        assert refused.value.where == f"{file}{where}"
