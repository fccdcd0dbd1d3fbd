"""`unpad prove --serve`: an answer has the tokens and every score, bit by bit, of the answer to its request alone.

The truth is each request in an engine of its own that reads the prompt whole and keeps nothing. Texts of a trained
model hide most differences of its scores, so the scores are compared.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np

from unpad.batching.batch import RaggedBatch
from unpad.data.sources.example import Turn
from unpad.data.tokens.encode import encode_prompt
from unpad.errors import RecipeError, SourceError
from unpad.evaluation.family import HeldOutInputs, Numbers, Prompt, measures_of
from unpad.inference.engine import Collected, Engine, Request, token_lists, watch
from unpad.inference.generate import Continuing, grammar_of
from unpad.inference.images import is_of_images
from unpad.inference.loaded import LoadedRun, generation_precision
from unpad.models.contract import PredictsSets
from unpad.models.vision_language.model import VisionLanguage
from unpad.nn.cache import PLACES
from unpad.nn.native import library
from unpad.nn.precision import Precision
from unpad.proof.line import SAME_IDS, Certificate, Line, Lines, ids_line, not_applicable
from unpad.proof.passes import prove_passes
from unpad.storage.reading import read_file
from unpad.terminal.progress import progress

MOST_PROMPTS = 32
NUM_NEW = 24  # tokens of an answer
NUM_ANSWERS = 3  # to one prompt
LONGEST = 1500  # tokens of a prompt that is joined of others
PIECES = (7, 32, PLACES)
FEW_ROWS = 5  # so that requests wait, and rows join while others run
HTTP = "through HTTP, by concurrent streams = alone"
BEGUN = "begun replies, through HTTP = alone"
BEGIN = 12  # characters of the question of such a conversation; a half of them begins its reply
NO_EXTRA = "the extra is not installed: pip install 'unpad[serve]'"
WITHOUT, AT_ONCE = "without native kernels: all at once = alone", "all at once = alone"
COMINGS = "in another order, some leave early = alone"
MOST_CHANGED = 12  # requests of the lines of penalties and schemas, of which every second is changed
PENALISED = "with penalties, among others = alone"
PENALTIES = {"min_p": 0.02, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5}
HELD = "held to schemas, among others = alone, JSON"
VALUES: tuple[tuple[Any, ...], ...] = (("yes", "no"), (7, 20, None), ({"known": ["no"]},))  # of the schemas


def hear(engine: Engine, requests: Sequence[Request]) -> list[Collected]:
    """The answers to requests that come at once.

    Raises:
        UnpadError: one failed.
    """
    heard = [Collected() for _ in requests]
    for request, listener in zip(requests, heard, strict=True):
        engine.submit(request, listener)
    engine.run()
    for error in [error for listener in heard for error in listener.errors.values()]:
        raise error
    return heard


@dataclass(frozen=True)
class OverHttp:
    """Lines of a real server, against what each request gets alone.

    Args:
        streams: of answers in tokens, with a name and conversations where these are asked; numbers: of classes and
            predictions.
    """

    streams: Callable[..., Line]
    numbers: Callable[[LoadedRun, HeldOutInputs, Sequence[Numbers]], Line]


def prove_serving(run: LoadedRun, prompts: Path | None = None, over_http: OverHttp | None = None) -> Certificate:
    """Prove that a run's answers do not depend on what runs beside them.

    Args:
        prompts: a file with a prompt on each line; None for held-out data of the run.
        over_http: None where the extra is not installed.

    Raises:
        RecipeError: the run answers in no form that is served, or not to the prompts of a file.
        SourceError: there are no prompts.
    """
    if isinstance(run.model, PredictsSets) or is_of_images(run):
        if prompts is not None:
            fix = "leave --prompts out; the run's held-out data is used"
            raise RecipeError("the run reads no prompts", where=str(run.folder), fix=fix)
        return prove_passes(run, None if over_http is None else over_http.numbers, NO_EXTRA)
    if prompts is not None and isinstance(run.model, VisionLanguage):
        fix = "leave --prompts out; the run's held-out questions are used"
        raise RecipeError("questions of this run are about images", where=str(run.folder), fix=fix)
    subject = Answering.of(run, prompts_of(run, prompts))
    lines = Lines()
    lines.add(SAME_IDS, lambda: ids_line(run.tokenizer, map(token_ids, subject.requests)))
    with progress("answering each request alone"):
        truth = lines.value("each request alone", subject.alone)
    if truth is None:
        return lines.certificate()
    here = "native" if library.enabled() else "torch"
    for name, check in subject.checks(truth):
        lines.add_shown(name, partial(check, f"{here}, {subject.precision}"))
    lines.add_shown(HELD, lambda: _held(run, subject, f"{here}, {subject.precision}"))
    lines.add_shown(WITHOUT, partial(_without_kernels, subject))
    unproven = Line(HTTP, "", None, None, None, NO_EXTRA)
    lines.add_shown(HTTP, lambda: unproven if over_http is None else over_http.streams(run, subject.requests, truth))
    lines.add_shown(BEGUN, lambda: _begun(run, subject, truth, over_http))
    return lines.certificate()


def prompts_of(run: LoadedRun, path: Path | None) -> list[Prompt]:
    """Prompts of a file or of held-out data, of lengths as unlike as there are, and long ones joined of them."""
    room = run.generator.config.longest - NUM_NEW
    if path is not None:
        return _of_file(run, path, room)
    room = min(room, LONGEST)
    data = run.data()
    found = measures_of(data.family).held_out_prompts(data, MOST_PROMPTS)
    if any(isinstance(prompt, RaggedBatch) for prompt in found):
        return found
    texts = [list(ids[:room]) for ids in found if not isinstance(ids, RaggedBatch) and ids]
    if not texts:
        what, fix = "the run holds no prompts out to prove with", "give a file of them with --prompts"
        raise SourceError(what, where=str(run.folder), fix=fix)
    long = [token for ids in islice(cycle(texts), room) for token in ids]
    joined = [long[:room], long[1 : room // 2 + 1]]
    return [*texts[: MOST_PROMPTS - len(joined)], *(ids for ids in joined if ids)]


def _of_file(run: LoadedRun, path: Path, room: int) -> list[Prompt]:
    """Every prompt of a file, as it is."""
    try:
        lines = read_file(path, SourceError, fix="give a file of prompts, one on each line").decode()
    except UnicodeDecodeError as error:
        place = error.object[: error.start].count(b"\n") + 1
        raise SourceError("the line is not UTF-8", where=f"{path}:{place}", fix="save the file as UTF-8") from None
    found: list[Prompt] = []
    for number, line in enumerate(lines.splitlines(), 1):
        ids = run.prompt(line).ids if line.strip() else []
        if len(ids) > room:
            what = f"the prompt has {len(ids)} tokens, and {room} leave room for {NUM_NEW} new ones"
            raise SourceError(what, where=f"{path}:{number}", fix="shorten it")
        found += [ids] if ids else []
    if not found:
        raise SourceError("there are no prompts in it", where=str(path), fix="write one on each line")
    return found


@dataclass(frozen=True)
class Answering:
    """A model, and the requests that it is proved with: greedy and drawn in turn.

    Args:
        make: makes an engine with these options.
    """

    make: Callable[..., Engine]
    requests: list[Request]
    precision: Precision
    longest: int

    @classmethod
    def of(cls, run: LoadedRun, prompts: Sequence[Prompt]) -> "Answering":
        model, settings = run.generator, run.recipe.generate
        precision = "fp32" if isinstance(run.model, VisionLanguage) else generation_precision(settings)
        greedy = settings.model_copy(update={"max_new_tokens": NUM_NEW, "temperature": 0.0, "beams": 1})
        drawn = greedy.model_copy(update={"temperature": 1.0, "top_p": 0.95})
        ways = [Continuing.of(model, run.tokenizer, one) for one in (greedy, drawn)]
        requests = [ways[i % 2].request(prompt) for i, prompt in enumerate(prompts)]
        make = partial(Engine, model, precision=precision, watch=watch)
        return cls(make, requests, precision, model.config.longest)

    def alone(self, requests: Sequence[Request] | None = None) -> list[Collected]:
        """The answer to each request, by default to all of its own, in an engine of its own."""
        requests = self.requests if requests is None else requests
        return [heard for request in requests for heard in self.together([request], keeps=False, piece=1 << 20)]

    def together(self, requests: Sequence[Request], **options: object) -> list[Collected]:
        """The answers to requests that come at once."""
        return hear(self.make(**options), requests)

    def checks(self, truth: Sequence[Collected]) -> Iterator[tuple[str, Callable[[str], Line]]]:
        """Names and checks of the engine, given what runs here."""
        few = "fewer than two prompts" if len(self.requests) < 2 else ""
        decoded = max(len(steps) for heard in truth for steps in heard.scores.values())
        few = few or ("no answer has two tokens" if decoded < 2 else "")

        together = partial(self.together, self.requests)
        yield AT_ONCE, lambda here: line_of(AT_ONCE, here, together(), truth).unless(few)
        yield COMINGS, lambda here: self._comings(here, truth).unless(few)
        yield from self._pieces(truth)
        name = "beginnings kept from others = read anew"
        yield name, partial(self._beginnings, name)
        name = f"as one of {NUM_ANSWERS} answers = alone with its seed"
        yield name, partial(self._answers, name)
        penalised = [_changed(one, PENALTIES) for one in self.requests]
        yield PENALISED, lambda here: self.among(PENALISED, here, penalised)[0]

    def among(self, name: str, here: str, changed: Sequence[Request]) -> tuple[Line, list[Collected]]:
        """The line of requests of which every second is changed, and their answers."""
        asked = [(one, other)[place % 2] for place, (one, other) in enumerate(zip(self.requests, changed, strict=True))]
        asked = asked[:MOST_CHANGED]
        found = self.together(asked)
        truth = self.alone(asked)
        return line_of(name, here, found, truth).unless("" if len(asked) > 1 else "fewer than two prompts"), found

    def _comings(self, here: str, truth: Sequence[Collected]) -> Line:
        """Requests come one by one while others run; every third leaves, or is cancelled, after two tokens."""
        engine = self.make(rows=FEW_ROWS)
        order = np.random.default_rng(0).permutation(len(self.requests)).tolist()
        heard = []
        for place, index in enumerate(order):
            heard.append(Collected(leave=2 if place % 3 == 1 else None))
            ticket = engine.submit(self.requests[index], heard[-1])
            engine.turn()
            if place % 3 == 2:
                engine.turn()
                ticket.cancel()
        engine.run()
        expected = [
            truth[index] if place % 3 == 0 else _up_to(heard[place], truth[index]) for place, index in enumerate(order)
        ]
        return line_of(COMINGS, here, heard, expected)

    def _pieces(self, truth: Sequence[Collected]) -> Iterator[tuple[str, Callable[[str], Line]]]:
        texts = [len(request.prompt) for request in self.requests if not isinstance(request.prompt, RaggedBatch)]
        room = self.longest - NUM_NEW
        for piece in PIECES:
            reason, gap = "", "" if max(texts, default=0) > piece else "no prompt is longer"
            if not texts:
                reason = "prompts with images are read whole"
            elif room <= piece:
                reason = f"no prompt has more: the context is {self.longest}"
            elif not library.enabled() and room <= PLACES:
                reason = f"without native kernels prompts are cut every {PLACES} tokens; the context is {self.longest}"
            name = f"prompts in pieces of {piece} tokens = whole"
            yield name, partial(self._in_pieces, name, piece, truth, reason, gap)

    def _in_pieces(self, name: str, piece: int, truth: Sequence[Collected], reason: str, gap: str, here: str) -> Line:
        if reason:
            return not_applicable(name, reason)
        return line_of(name, here, self.together(self.requests, piece=piece, keeps=False), truth).unless(gap)

    def _beginnings(self, name: str, here: str) -> Line:
        """Each prompt, and then one that goes on from its answer, as a conversation does, in an engine that keeps
        beginnings; alone it reads all anew."""
        texts = [request for request in self.requests if not isinstance(request.prompt, RaggedBatch)]
        if not texts:
            return not_applicable(name, "prompts with images are not kept")
        if not library.enabled() and self.longest - NUM_NEW <= PLACES:
            why = f"without native kernels beginnings of {PLACES} tokens are kept; the context is {self.longest}"
            return not_applicable(name, why)
        engine, heard, later = self.make(), [], []
        for first, other in zip(texts, [*texts[1:], *texts[:1]], strict=True):
            answer = Collected()
            engine.submit(first, answer)
            engine.run()
            ids = [*token_ids(first), *answer.tokens(), *token_ids(other)]
            later.append(replace(first, prompt=ids[: self.longest - NUM_NEW]))
            heard.append(Collected())
            engine.submit(later[-1], heard[-1])
            engine.run()
        truth = self.alone(later)
        gap = "" if any(listener.cached for listener in heard) else "no prompt begins with enough tokens of another"
        return line_of(name, here, heard, truth).unless(gap)

    def _answers(self, name: str, here: str) -> Line:
        drawn = [request for request in self.requests if request.settings.temperature][:4]
        found = self.together([replace(request, n=NUM_ANSWERS) for request in drawn])
        seeded = [
            replace(request, settings=request.settings.model_copy(update={"seed": request.settings.seed + answer}))
            for request in drawn
            for answer in range(NUM_ANSWERS)
        ]
        truth = self.alone(seeded)
        apart = [
            Collected(steps={0: one.steps[i]}, scores={0: one.scores[i]}, reasons={0: one.reasons[i]})
            for one in found
            for i in range(NUM_ANSWERS)
        ]
        return line_of(name, here, apart, truth).unless("" if drawn else "no prompt is drawn")


def _changed(request: Request, fields: Mapping[str, Any]) -> Request:
    return replace(request, settings=request.settings.model_copy(update=fields))


def _held(run: LoadedRun, subject: Answering, here: str) -> Line:
    """Schemas of a few values each, with which answers that are not cut are compared, too."""
    changed = []
    for place, request in enumerate(subject.requests):
        one = _changed(request, {"json_schema": {"enum": list(VALUES[place % len(VALUES)])}})
        try:
            changed.append(replace(one, grammar=grammar_of(one.settings, run.tokenizer, run.generator.vocab_size)))
        except RecipeError as error:
            return not_applicable(HELD, error.what)
    line, heard = subject.among(HELD, here, changed)
    ended = [place for place, one in enumerate(heard) if place % 2 and one.finished() == "eos"]
    said = {place: json.loads(run.tokenizer.decode(heard[place].tokens())) for place in ended}
    if line.passed and any(value not in VALUES[place % len(VALUES)] for place, value in said.items()):
        return replace(line, measured=float("inf"), passed=False, note="an answer is no value of its schema")
    return line.unless("" if said else "no answer came to its end")


def _begun(run: LoadedRun, subject: Answering, truth: Sequence[Collected], over_http: OverHttp | None) -> Line:
    """Conversations whose reply has begun; their texts are of what the requests got."""
    if isinstance(run.model, VisionLanguage):
        return not_applicable(BEGUN, "questions about images are of one message")
    tokenizer, template = run.tokenizer, run.recipe.data.template
    talks, requests = [], []
    for request, heard in zip(subject.requests, truth, strict=True):
        if said := tokenizer.decode(heard.tokens())[:BEGIN].strip():
            turns = [Turn("user", said), Turn("assistant", said[: len(said) // 2 + 1])]
            ids = encode_prompt(turns[:1], tokenizer, template) + tokenizer.encode_batch([turns[1].content])[0]
            talks.append([{"role": turn.role, "content": turn.content} for turn in turns])
            requests.append(replace(request, prompt=ids))
    if over_http is None or not talks:
        return Line(BEGUN, "", None, None, None, NO_EXTRA if over_http is None else "no answer has a text")
    return over_http.streams(run, requests, subject.alone(requests), BEGUN, talks)


def _up_to(left: Collected, truth: Collected) -> Collected:
    """As much of the truth as an answer has that may have been left."""
    steps, scores = truth.steps[0][: len(left.steps[0])], truth.scores[0][: len(left.scores[0])]
    return Collected(steps={0: steps}, scores={0: scores}, reasons=left.reasons)


def token_ids(request: Request) -> Sequence[int]:
    """Tokens of a prompt; images as their placeholders."""
    prompt = request.prompt
    return token_lists(prompt)[0] if isinstance(prompt, RaggedBatch) else prompt


def _without_kernels(subject: Answering) -> Line:
    if not library.enabled():
        return not_applicable(WITHOUT, "all lines are without them")
    with library.switched_off():
        return line_of(WITHOUT, f"torch, {subject.precision}", subject.together(subject.requests), subject.alone())


def line_of(name: str, here: str, found: Sequence[Collected], truth: Sequence[Collected]) -> Line:
    """Compare the tokens, scores and ends of answers with the truth."""
    other, largest, differ = 0, 0.0, 0
    for one, expected in zip(found, truth, strict=True):
        for answer, scores in expected.scores.items():
            made, tokens = one.tokens(answer), expected.tokens(answer)
            other += made != tokens or one.reasons.get(answer) != expected.reasons[answer]
            for mine, theirs in zip(one.scores[answer], scores, strict=False):  # other tokens may end elsewhere
                if mine.numpy().tobytes() != theirs.numpy().tobytes():
                    differ += 1
                    apart = float((mine.double() - theirs.double()).abs().max())
                    largest = max(largest, apart if apart == apart else float("inf"))
    note = f"{differ} rows of scores differ, and {other} answers" if other or differ else ""
    measured = largest if largest or not (other or differ) else float("inf")
    return Line(name, here, measured, 0.0, not other and not differ, note)
