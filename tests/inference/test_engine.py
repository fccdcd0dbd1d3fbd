"""Rows that join and leave: every answer has the tokens and scores, bit by bit, of the request alone."""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch

from tests.helpers.models import generate, random_model
from tests.helpers.paths import PATHS, Path, on
from tests.helpers.served import alone, everything
from unpad.batching.batch import from_prompts
from unpad.data.tokens.words import WordTokenizer
from unpad.errors import NonFiniteError, OutOfMemoryError, RecipeError
from unpad.inference import engine as engine_file
from unpad.inference.engine import Collected, Engine, Request, watch
from unpad.inference.generate import grammar_of
from unpad.models.decoder import Decoder
from unpad.nn.cache import PLACES, CachedRow
from unpad.nn.native import library
from unpad.nn.precision import Precision
from unpad.recipes.training import GenerateSettings

VOCAB = 300
SIZES = {"width": 64, "blocks": 2, "heads": 4, "kv_heads": 2, "hidden": 96, "context": 700, "tied": False}
STOPS = list(range(0, VOCAB, 19))
GREEDY = GenerateSettings(max_new_tokens=9)
DRAWN = GenerateSettings(max_new_tokens=9, temperature=1.0, top_p=0.95, repetition_penalty=1.2)


@lru_cache
def model(**fields: Any) -> Decoder:
    """Random, with a head that is not tied: a trained model hides differences of scores."""
    return random_model({**SIZES, **fields}, VOCAB, 0).eval()


def prompt(length: int, seed: int = 0) -> list[int]:
    drawn: list[int] = np.random.default_rng([length, seed]).integers(0, VOCAB, length).tolist()
    return drawn


def requests() -> list[Request]:
    """Unlike lengths, greedy and drawn, of one answer and of three; some begin with another one's tokens."""
    lengths = [3, 40, 300, 17, 1, 600, 90, 33]
    made = [
        Request(prompt(length), DRAWN if i % 2 else GREEDY, STOPS, banned=[5, 7] if i % 3 else [], n=3 if i == 3 else 1)
        for i, length in enumerate(lengths)
    ]
    shared = prompt(300)
    return [*made, replace(made[0], prompt=[*shared, *prompt(20, 1)]), replace(made[1], prompt=[*shared[:280], 9, 9])]


SCHEMAS = [{"enum": ["red", "green"]}, None, {"type": "array", "items": {"type": "boolean"}, "minItems": 2}]


def constrained() -> list[Request]:
    """With and without schemas, penalties and biases."""
    words = WordTokenizer([f"w{i}" for i in range(VOCAB - 260)])
    greedy, drawn = (one.model_copy(update={"max_new_tokens": 40}) for one in (GREEDY, DRAWN))
    penalised = greedy.model_copy(update={"presence_penalty": 0.2, "frequency_penalty": -0.1})
    made = []
    for i in range(9):
        settings = (greedy, penalised, drawn.model_copy(update={"min_p": 0.01 * i}))[i // 3]
        settings = settings.model_copy(update={"json_schema": SCHEMAS[i % 3]})
        grammar, bias = grammar_of(settings, words, VOCAB), torch.linspace(-1, 1, VOCAB)
        made.append(Request(prompt(9 + i), settings, [3], n=1 + i % 2, bias=bias if i % 4 else None, grammar=grammar))
    return made


def engine(precision: Precision = "fp32", **options: Any) -> Engine:
    return Engine(model(), precision=precision, watch=watch, **options)


@lru_cache
def truths(precision: Precision, path: Path) -> list[Any]:
    """Each request in an engine of its own."""
    return [everything(alone(engine(precision, keeps=False, piece=1 << 20), request)) for request in requests()]


def together(one: Engine, asked: list[Request], order: list[int]) -> list[Collected]:
    """Requests that come a few at a time, while earlier ones run."""
    heard = [Collected() for _ in asked]
    for place, index in enumerate(order):
        one.submit(asked[index], heard[index])
        if place % 3 == 2:
            one.turn()
            one.turn()
    one.run()
    assert (len(one._live), len(one._waiting)) == (0, 0)
    return heard


@pytest.mark.promise("llm.generation")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("piece", [32, 256, 1 << 20])
def test_answers_of_requests_that_come_and_go_are_those_of_each_alone(precision, piece, path):
    asked = requests()
    with on(path):
        for order in ([*range(10)], [*range(9, -1, -1)]):
            for keeps in (False, True):
                one = engine(precision, piece=piece, rows=5, keeps=keeps)
                found = [everything(heard) for heard in together(one, asked, order)]
                assert found == truths(precision, path)
                assert (one.tokens_reused > 0) == keeps
    assert {reason for truth in truths(precision, path) for reason in truth[2].values()} == {"eos", "length"}
    assert min(len(tokens) for truth in truths(precision, path) for tokens in truth[0].values()) < 9


@pytest.mark.promise("llm.generation")
def test_rows_of_schemas_penalties_and_biases_have_the_bits_that_each_has_alone():
    truths = [everything(alone(engine(keeps=False), request)) for request in constrained()]
    for order in ([*range(9)], [*range(8, -1, -1)]):
        asked = constrained()
        found = [everything(heard) for heard in together(engine(rows=6), asked, order)]
        assert found == truths
    for i, (tokens, _, reasons) in enumerate(truths):
        for answer in [answer for answer, reason in reasons.items() if reason == "eos"]:
            jsonschema.validate(json.loads(bytes(id - 4 for id in tokens[answer])), SCHEMAS[i % 3])
    counts, (tokens, scores, _) = torch.zeros(VOCAB), truths[4]
    for id, score in zip(tokens[0], scores[0], strict=True):
        wanted = torch.frombuffer(bytearray(score), dtype=torch.float32) + 0.1 * counts - 0.2 * (counts > 0)
        assert int(wanted.argmax()) == id
        counts[id] += 1
    assert {reason for truth in truths[::3] for reason in truth[2].values()} == {"eos"}


def test_an_answer_draws_with_the_seed_after_that_of_the_one_before() -> None:
    settings = DRAWN.model_copy(update={"seed": 5})
    heard = alone(engine(), Request(prompt(30), settings, STOPS, n=3))
    for answer in range(3):
        seeded = settings.model_copy(update={"seed": 5 + answer})
        assert [heard.tokens(answer)] == generate(model(), [prompt(30)], seeded, eos_id=STOPS)
    assert len({tuple(heard.tokens(answer)) for answer in range(3)}) == 3


def test_a_beginning_is_read_once_and_the_scores_stay() -> None:
    one = engine()
    first = alone(one, Request(prompt(100), GREEDY, STOPS))
    assert first.cached == 0
    again = alone(one, Request(prompt(100), GREEDY, STOPS))
    assert again.cached == 99
    assert everything(again) == everything(first)
    longer = Request([*prompt(100), *first.tokens(), *prompt(20, 3)], GREEDY, STOPS)
    assert alone(one, longer).cached == 100  # of what was read: the reply is read again
    assert everything(alone(one, longer)) == everything(alone(engine(keeps=False), longer))
    assert alone(one, Request([1, *prompt(100)], GREEDY, STOPS)).cached == 0
    assert one.tokens_read + one.tokens_reused == 100 + 100 + 2 * (100 + len(first.tokens()) + 20) + 101


def test_a_beginning_is_found_by_its_owner_and_without_comparing_all(monkeypatch: pytest.MonkeyPatch) -> None:
    one, shared, compared = engine(), engine_file._shared, list[int]()
    monkeypatch.setattr(engine_file, "_shared", lambda *both: (compared.append(1), shared(*both))[1])
    asked = [[*prompt(20), *prompt(20, number)] for number in range(30)]
    for ids in asked:
        alone(one, Request(ids, GREEDY, STOPS))
    compared.clear()
    assert alone(one, Request(asked[7], GREEDY, STOPS)).cached == 39
    assert len(compared) <= 4, "not with each of thirty"
    assert alone(one, Request(asked[7], GREEDY, STOPS, owner="b")).cached == 0
    assert alone(one, Request(asked[3], GREEDY, STOPS, owner="b")).cached == 20 + shared(*np.array(asked)[[3, 7], 20:])
    one._beginnings.shrink(one._beginnings.num_bytes // 31)
    assert len(one._beginnings._kept) == 1
    assert alone(one, Request(asked[5], GREEDY, STOPS)).cached == 0
    assert alone(one, Request(asked[5], GREEDY, STOPS, owner="b")).cached >= 20, "of the one that was used last"


def test_without_kernels_prompts_are_cut_at_fixed_places() -> None:
    with library.switched_off():
        one = engine(piece=PLACES + 50)
        heard = [Collected(), Collected()]
        one.submit(Request(prompt(PLACES - 100), GREEDY, STOPS), heard[0])
        ticket = one.submit(Request(prompt(2 * PLACES + 60), GREEDY, STOPS), heard[1])
        lengths = []
        while one.turn():
            lengths.append(ticket.row.length if ticket.row else None)
        assert [length for length in lengths if length] == [PLACES, 2 * PLACES]  # not what the first left of a turn
        assert alone(one, Request(prompt(2 * PLACES + 60), GREEDY, STOPS)).cached == 2 * PLACES


def test_a_turn_reads_a_piece_and_then_a_token_of_every_row() -> None:
    one = engine(piece=50)
    short, long = Collected(), Collected()
    one.submit(Request(prompt(4), GREEDY.model_copy(update={"max_new_tokens": 20}), []), short)
    one.turn()
    one.submit(Request(prompt(200), GREEDY, []), long)
    before = len(short.tokens())
    for turn in range(1, 5):
        one.turn()
        assert len(short.tokens()) == before + turn, "the long prompt stops the others"
    assert one.tokens_read == 204
    one.run()


def test_rows_are_at_most_as_many_as_allowed() -> None:
    one = engine(rows=2)
    for i in range(5):
        one.submit(Request(prompt(10, i), GREEDY, []), Collected())
    one.turn()
    assert (len(one._live), len(one._waiting)) == (2, 3)
    one.run()
    assert one.tokens_made == 45


def test_a_request_of_more_answers_than_rows_runs_alone() -> None:
    one, heard = engine(rows=2), Collected()
    other = Collected()
    one.submit(Request(prompt(10), GREEDY, []), other)
    one.submit(Request(prompt(10, 1), DRAWN, [], n=4), heard)
    one.run()
    assert set(heard.reasons) == {0, 1, 2, 3}


def test_a_beginning_goes_whose_first_tokens_were_those_of_one_that_a_longer_replaced() -> None:
    per_token = 2 * 2 * 2 * 16 * 4
    one, longer = engine(kept=100 * per_token), [*prompt(20), *prompt(60, 2)]
    for ids in ([*prompt(20), *prompt(20, 1)], longer[:40], longer):
        assert alone(one, Request(ids, GREEDY, [])).reasons == {0: "length"}
    assert one._beginnings.num_bytes == 80 * per_token, "the first has no room beside it"
    assert alone(one, Request(longer, GREEDY, [])).cached == 79


def test_memory_bounds_rows_and_beginnings() -> None:
    per_token = 2 * 2 * 2 * 16 * 4  # keys and values, blocks, heads, width of a head, bytes
    one = engine(memory=290 * per_token)
    heard = [Collected() for _ in range(4)]
    alone(one, Request(prompt(60), GREEDY, []))
    assert one._beginnings.num_bytes == 60 * per_token
    for i, each in enumerate(heard):
        one.submit(Request(prompt(90, i + 1), GREEDY, []), each)
    most = 0
    while one.turn():
        rows = [ticket.row for tickets in one._reading for ticket in tickets] + [answer.row for answer in one._live]
        assert one._beginnings.num_bytes + sum(row.num_bytes for row in rows) <= 290 * per_token
        most = max(most, len(one._live))
    assert most == 2
    assert all(each.reasons == {0: "length"} for each in heard)
    assert 0 < one._beginnings.num_bytes <= 290 * per_token
    large = alone(one, Request(prompt(400), GREEDY, []))
    assert large.reasons == {0: "failed"}
    assert isinstance(large.errors[0], OutOfMemoryError)
    assert "400" not in str(large.errors[0])  # MiB, not tokens


@pytest.mark.parametrize("when", ["waiting", "reading", "live"])
def test_what_is_cancelled_ends_before_the_next_step_and_the_others_go_on(when: str) -> None:
    one = engine(rows=1 if when == "waiting" else 8, piece=64)
    gone, other = Collected(), Collected()
    one.submit(Request(prompt(20), GREEDY, []), other)
    ticket = one.submit(Request(prompt(10 if when == "live" else 300), GREEDY, []), gone)
    one.turn()
    assert (len(one._waiting) == 1) == (when == "waiting")
    assert (len(one._live) == 2) == (when == "live")
    made = len(gone.tokens())
    ticket.cancel()
    one.turn()
    assert gone.reasons == {0: "cancelled"}
    assert len(gone.tokens()) == made
    assert len(one._live) == 1
    one.run()
    assert everything(other) == everything(alone(engine(), Request(prompt(20), GREEDY, [])))


def test_one_of_several_answers_can_leave() -> None:
    one, heard = engine(), Collected()
    ticket = one.submit(Request(prompt(20), DRAWN, [], n=3), heard)
    one.turn()
    ticket.cancel(1)
    one.run()
    assert heard.reasons == {0: "length", 1: "cancelled", 2: "length"}
    assert len(heard.tokens(1)) < 9
    whole = alone(engine(), Request(prompt(20), DRAWN, [], n=3))
    assert (heard.tokens(0), heard.tokens(2)) == (whole.tokens(0), whole.tokens(2))


def test_one_of_several_prompts_that_are_read_together_can_leave() -> None:
    asked = [Request(prompt(length), GREEDY, []) for length in (20, 30, 40)]
    for gone in range(3):
        one, heard = engine(), [Collected(), Collected(), Collected()]
        tickets = one.submit_together(from_prompts([prompt(20), prompt(30), prompt(40)]), asked, heard)
        tickets[gone].cancel()
        one.run()
        assert (len(one._live), len(one._waiting)) == (0, 0)
        for place, (request, each) in enumerate(zip(asked, heard, strict=True)):
            if place == gone:
                assert (each.reasons, each.cached) == ({0: "cancelled"}, None)
            else:
                assert everything(each) == everything(alone(engine(), request))


def test_a_listener_ends_its_answer() -> None:
    heard = alone(engine(), Request(prompt(20), GREEDY, []), leave=4)
    assert heard.reasons == {0: "stop"}
    assert len(heard.tokens()) == 4


def test_late_requests_end() -> None:
    one, late, waits, other = engine(rows=2), Collected(), Collected(), Collected()
    soon = time.monotonic() + 0.05
    endless = GREEDY.model_copy(update={"max_new_tokens": 600})
    one.submit(Request(prompt(3), endless, [], deadline=soon, n=2), late)
    one.submit(Request(prompt(4), GREEDY, [], deadline=soon), waits)
    one.submit(Request(prompt(5), GREEDY, []), other)
    one.turn()
    time.sleep(0.06)
    one.run()
    assert late.reasons == {0: "deadline", 1: "deadline"}
    assert waits.reasons == {0: "deadline"}
    assert (waits.cached, other.reasons) == (None, {0: "length"})


def test_scores_that_are_not_finite_end_one_request_alone() -> None:
    broken = random_model(SIZES, VOCAB, 0)
    with torch.no_grad():
        broken.embed.weight[7] = torch.nan
    one, bad, good = Engine(broken, watch=watch), Collected(), Collected()
    one.submit(Request([1, 2, 7], GREEDY, []), bad)
    one.submit(Request([1, 2, 3], GREEDY, [], banned=[7]), good)
    one.run()
    assert bad.reasons == {0: "failed"}
    assert isinstance(bad.errors[0], NonFiniteError)
    assert good.reasons == {0: "length"}
    with pytest.raises(NonFiniteError):
        generate(broken, [[1, 2, 7]], GREEDY, eos_id=[])


def test_who_asks_for_memory_that_is_not_there_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(at: int) -> Callable[..., None]:
        make_room = CachedRow._make_room

        def refused(self: CachedRow, one: Any, new: int, later: int) -> None:
            if self.length + new > at and self.most > 300:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
            make_room(self, one, new, later)

        return refused

    for at in (100, 302):  # while the prompt is read, and while its reply is made
        with monkeypatch.context() as patch:
            patch.setattr(CachedRow, "_make_room", refuse(at))
            one, bad, good = engine(piece=64, keeps=False), Collected(), Collected()
            one.submit(Request(prompt(20), GREEDY, STOPS), good)
            one.submit(Request(prompt(300), GREEDY, []), bad)
            one.run()
        assert bad.reasons == {0: "failed"}
        assert isinstance(bad.errors[0], OutOfMemoryError)
        assert everything(good) == everything(alone(engine(), Request(prompt(20), GREEDY, STOPS)))


@pytest.mark.parametrize("piece", [7, 1 << 20])
def test_log_probabilities_are_those_of_the_model(piece: int) -> None:
    ids = prompt(25)
    heard = alone(engine(piece=piece), Request(ids, DRAWN, [], banned=[3], top=4, echo=True))
    whole = [*ids, *heard.tokens()]
    with torch.no_grad():
        truth = model().logits(model()(from_prompts([whole]))).double().log_softmax(-1)
    steps = [*heard.echoed, *heard.steps[0]]
    assert [step.token for step in steps] == whole
    assert (steps[0].logprob, steps[0].top) == (None, ())
    for place, step in enumerate(steps[1:], 1):
        assert step.logprob == pytest.approx(float(truth[place - 1, whole[place]]), abs=1e-4)
        values, order = truth[place - 1].topk(4)
        assert [token for token, _ in step.top] == order.tolist()
        assert [value for _, value in step.top] == pytest.approx(values.tolist(), abs=1e-4)


@pytest.mark.parametrize("ids", [[], [VOCAB], prompt(701)], ids=["empty", "unknown", "too long"])
def test_a_request_that_can_never_run_is_refused(ids: list[int]) -> None:
    with pytest.raises(RecipeError):
        engine().submit(Request(ids, GREEDY, []), Collected())


def test_close_ends_everything() -> None:
    one, heard = engine(rows=2, piece=50), [Collected() for _ in range(4)]
    for i, each in enumerate(heard):
        one.submit(Request(prompt(40 + 100 * i), GREEDY, []), each)
    one.turn()
    one.close()
    assert (len(one._live), len(one._waiting), one.turn()) == (0, 0, False)
    assert all(each.reasons == {0: "cancelled"} for each in heard)
