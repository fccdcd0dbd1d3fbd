"""The run that is served: how it is opened and proved, what it says of itself, and how the prompts of asks are made.

Prompts are those of `unpad generate` and `unpad chat`, so answers are theirs with the same settings and seed.
"""

import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from hashlib import blake2b
from importlib.metadata import version
from time import perf_counter
from typing import Any, Literal
from urllib.parse import quote

import numpy as np
import torch

from unpad.batching.batch import RaggedBatch
from unpad.data.rows import read_classes
from unpad.data.sources.example import Turn
from unpad.data.tokens.encode import encode_prompt
from unpad.data.tokens.lost import LostCharacters
from unpad.errors import ProofError, RecipeError, UnpadError
from unpad.inference import prompts
from unpad.inference.chat import fit, room_for_reply, speaker_stops
from unpad.inference.embed import predicts
from unpad.inference.engine import KEPT_BYTES, Engine, Request, watch
from unpad.inference.generate import Continuing, grammar_of
from unpad.inference.images import is_of_images
from unpad.inference.loaded import LoadedRun, generation_precision, load
from unpad.machine import available_memory, cores, full_processor_name, quota
from unpad.models.contract import Generates, PredictsSets
from unpad.models.vision_language.model import VisionLanguage
from unpad.nn.linear import has_tiles
from unpad.nn.native import library
from unpad.nn.precision import CPU, Precision
from unpad.proof.serving import hear, line_of
from unpad.recipes.training import GenerateSettings
from unpad.run.report.samples import newest_prompts
from unpad.serving.patients import Tables, answers_of
from unpad.serving.pictures import image_bytes, question_prompt, shows_patches
from unpad.serving.protocol import MOST_ANSWERS, SEEDS, ChatAsk, CompletionAsk, RequestError, TokensAsk, refusals
from unpad.terminal.table import number_of

Kind = Literal["chat", "text", "vqa", "images", "patients"]
TEXTS: tuple[Kind, ...] = ("chat", "text", "vqa")  # kinds that answer in tokens
CHAT, COMPLETIONS, CLASSIFY = "/v1/chat/completions", "/v1/completions", "/v1/classify"
PREDICT, EXPLAIN = "/v1/models/{id}:predict", "/v1/models/{id}:explain"
ROUTES: dict[Kind, tuple[str, ...]] = {  # that answer, the best suited first
    "chat": (CHAT, COMPLETIONS), "text": (COMPLETIONS, CHAT), "vqa": (CHAT,), "images": (CLASSIFY,),
    "patients": (PREDICT, EXPLAIN),
}  # fmt: skip
MOST_EXAMPLES, LONGEST_EXAMPLE = 3, 120  # questions that a page offers, and their characters
SMALL = 8_000_000  # parameters below which a second thread costs more than it computes
PROOF_LENGTHS, PROOF_NEW, PROOF_SEED = (3, 40, 9, 17), 6, 5  # of the prompts of the proof, and tokens of their answers


@dataclass(frozen=True)
class Notes:
    """Remarks on an answer: the field `unpad`.

    Args:
        left_out: messages of the history that did not fit into the context.
        unknown: characters of the prompt that the tokenizer lost.
        warnings: that `unpad chat`, `unpad generate` and `unpad infer` print.
    """

    left_out: int = 0
    unknown: int = 0
    warnings: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        counts = {"left_out_messages": self.left_out, "unknown_characters": self.unknown}
        return {**counts, "warnings": list(self.warnings)}

    def __add__(self, other: "Notes") -> "Notes":
        warnings = tuple(dict.fromkeys((*self.warnings, *other.warnings)))
        return Notes(self.left_out + other.left_out, self.unknown + other.unknown, warnings)


@dataclass(frozen=True)
class ModelPrompt:
    """A prompt as the model reads it, and how its answers are drawn.

    Args:
        request: its prompt is ids, or a batch of one sequence with an image among its tokens.
        stop: texts before which an answer ends.
        grid: rows and columns of patches of the image.
    """

    request: Request
    num_tokens: int
    stop: Sequence[str]
    notes: Notes = field(default_factory=Notes)
    grid: tuple[int, int] = (0, 0)

    @property
    def batch(self) -> RaggedBatch:
        """The prompt as a batch, of a question about an image."""
        assert isinstance(self.request.prompt, RaggedBatch), "only prompts with images are batches"
        return self.request.prompt


@dataclass(frozen=True)
class Served:
    """A run that is open for answers.

    Args:
        name: by which clients call it.
        created: seconds since 1970 of the run's weights.
        seed: of asks that give none; None draws one for each.
    """

    run: LoadedRun
    name: str
    kind: Kind
    precision: Precision
    created: int
    seed: int | None = None

    @cached_property
    def settings(self) -> GenerateSettings:
        """Settings of asks that give none; questions about images are answered greedily, as by `unpad infer`."""
        greedy = {"temperature": 0.0} if self.kind == "vqa" else {}
        return self.run.recipe.generate.model_copy(update={"beams": 1, **greedy})

    @cached_property
    def context(self) -> int:
        """Tokens that the model reads at most; 0 if it reads none."""
        return self.run.generator.config.longest if self.kind in TEXTS else 0

    @cached_property
    def most_bytes(self) -> int | None:
        """Bytes of the longest text that could fit into the context; None where tokens have no bytes of their own."""
        pieces = self.run.tokenizer.pieces
        return None if pieces is None else self.context * max(map(len, pieces))

    @cached_property
    def continuing(self) -> Continuing:
        """The way in which prompts are continued, with the settings of asks that give none."""
        return Continuing.of(self.run.generator, self.run.tokenizer, self.settings)

    @cached_property
    def reads_system(self) -> bool:
        """True if conversations may begin with a system text."""
        if self.kind not in ("chat", "text"):
            return False
        try:
            prompts.check_system(self.run.recipe, self.run.tokenizer, "?")
        except UnpadError:
            return False
        return True

    @cached_property
    def num_system(self) -> int | None:
        return self.run.num_system

    def to_json(self) -> dict[str, Any]:
        """The entry of the list of models."""
        return {"id": self.name, "object": "model", "created": self.created, "owned_by": "unpad", "unpad": self.facts}

    @cached_property
    def facts(self) -> dict[str, Any]:
        """Facts that a page has to know to offer the run."""
        facts: dict[str, Any] = {"kind": self.kind, "routes": self.routes}
        if self.kind in TEXTS:
            names = ("temperature", "top_p", "top_k", "repetition_penalty", "seed")
            settings = {name: getattr(self.settings, name) for name in names}
            facts |= {"context": self.context, "system": self.reads_system}
            facts["settings"] = {**settings, "max_tokens": self.settings.max_new_tokens}
        if self.kind == "chat":
            facts["examples"] = self._examples()
        if self.kind == "vqa":
            facts["kept_patches"] = shows_patches(self.run)
        if self.kind == "images":
            facts["classes"] = list(read_classes(self.run.files))
        if self.kind == "patients":
            facts |= {"columns": self.tables.columns, **answers_of(self.run)}
        return facts

    def _examples(self) -> list[str]:
        """Questions of one turn of the run's own data, for a page that offers them."""
        template, samples = self.run.recipe.data.template, newest_prompts(self.run.folder, 4 * MOST_EXAMPLES)
        asked = [text.removeprefix(template.user).removesuffix(template.assistant) for text in samples
                 if text.startswith(template.user)]  # fmt: skip
        single = [text.strip() for text in asked if template.user not in text and template.assistant not in text]
        return [text for text in single if len(text) <= LONGEST_EXAMPLE][:MOST_EXAMPLES]

    @cached_property
    def routes(self) -> list[str]:
        """Paths that answer, the best suited first; a run that was not trained to classify explains no probability."""
        explains = self.kind == "patients" and predicts(self.run)[0]
        routes = ROUTES[self.kind] if explains else [route for route in ROUTES[self.kind] if route != EXPLAIN]
        return [route.format(id=quote(self.name, safe="")) for route in routes]

    @cached_property
    def tables(self) -> Tables:
        """Forms of the tables of a run of patients."""
        return Tables.of(self.run)

    # ----------------------------------------------------------------------- prompts

    def check_model(self, name: str | None) -> None:
        """Refuse another model's name; None stands for the only one there is.

        Raises:
            RequestError: 404, with the name to use.
        """
        if name is not None and name != self.name:
            what = f"there is no such model here: use {self.name}"
            raise RequestError(what, "model", status=404, code="model_not_found")

    def check_route(self, route: str) -> None:
        """Refuse a route by which a run of this kind does not answer.

        Args:
            route: as in ROUTES.

        Raises:
            RequestError: 404, with the routes to use.
        """
        if route not in ROUTES[self.kind]:
            raise self.wrong_route(f"the run {self.name} is of kind {self.kind} and does not answer here")
        if route == EXPLAIN and len(self.routes) < len(ROUTES[self.kind]):
            what = "the run was not trained to classify, so it has no probability to explain"
            raise self.wrong_route(what, "no_probability")

    def wrong_route(self, what: str, code: str = "wrong_route") -> RequestError:
        """The error of a route that does not answer, with those that do."""
        return RequestError(f"{what}: use {' or '.join(self.routes)}", status=404, code=code)

    def chat(self, ask: ChatAsk) -> ModelPrompt:
        """The prompt of a conversation.

        Raises:
            RequestError: it does not fit into the context, or the run has no place for a part of it.
        """
        request = self.request_of(ask)
        if self.kind == "vqa":
            return self._question(ask, request)
        if ask.kept_patches:
            raise RequestError("this run reads no images: leave kept_patches out", "kept_patches")
        for _, param in ask.image_urls():
            raise RequestError("this run reads no images: leave the image out", param)
        run, turns = self.run, [Turn(message.role, message.text) for message in ask.messages]
        left_out = self._leave_out(turns) if ask.history == "trim" else 0
        self._check_bytes(sum(len(turn.content.encode()) for turn in turns), "messages")
        system = turns[0].content if turns[0].role == "system" else ""
        template, tokenizer = run.recipe.data.template, run.tokenizer
        begun = turns.pop().content if turns[-1].role == "assistant" else ""  # of the reply
        with refusals("messages"):
            prompts.check_system(run.recipe, tokenizer, system)
            if ask.history == "trim":
                reserve = room_for_reply(request.settings, self.context)
                ids, more = fit(turns, template, tokenizer, self.context, reserve)
                left_out += more
            else:
                ids = encode_prompt(turns, tokenizer, template)
        ids += tokenizer.encode_batch([begun])[0]
        advice = 'shorten it, or leave out the oldest turns by "history": "trim"'
        self._check_length(len(ids), "messages", "the conversation", advice)
        lost = prompts.lost_of(tokenizer, [turns[-1].content])
        notes = self._notes(lost, left_out, system, prompts.plain_note(run.recipe))
        # A schema alone says where its answer ends; its texts may hold any words.
        stop = (*ask.stop, *(speaker_stops(tokenizer, template) if request.grammar is None else ()))
        return ModelPrompt(replace(request, prompt=ids), len(ids), stop, notes)

    def _leave_out(self, turns: list[Turn]) -> int:
        """Remove the oldest turns that cannot fit into the context, before a tokenizer reads them; return their
        number."""
        sizes = [len(turn.content.encode()) for turn in turns]
        over = 0 if self.most_bytes is None else sum(sizes) - self.most_bytes
        first = start = int(turns[0].role == "system")
        last = max(place for place, turn in enumerate(turns) if turn.role == "user")
        while over > 0 and start < last:
            over -= sizes[start]
            start += 1
        while start > first and turns[start].role != "user":
            start += 1
        del turns[first:start]
        return start - first

    def completion(self, ask: CompletionAsk, request: Request, place: int) -> ModelPrompt:
        """One of the prompts, a text or token ids, of what `request_of` the ask is; raises as `chat`."""
        prompt, param = ask.prompt[place], "prompt" if len(ask.prompt) == 1 else f"prompt[{place}]"
        with refusals(param):
            if isinstance(prompt, str):
                self._check_bytes(len(prompt.encode()), param)
                encoded = prompts.encode(self.run.recipe, self.run.tokenizer, prompt)
                ids, notes = encoded.ids, self._notes(encoded.lost)
            else:
                self._check_ids(prompt, param, "the prompt")
                ids, notes = prompt, Notes()
        self._check_length(len(ids), param, "the prompt", "shorten it")
        return ModelPrompt(replace(request, prompt=ids), len(ids), ask.stop, notes)

    def request_of(self, ask: TokensAsk) -> Request:
        """What the engine is asked, but for a prompt.

        Raises:
            RequestError: the model has no such ids, or cannot be held to the schema.
        """
        request, bias = self.continuing.request([]), None
        if ask.logit_bias:
            self._check_ids(ask.logit_bias, "logit_bias", "logit_bias")
            bias = torch.zeros(self.run.generator.vocab_size)
            bias[list(ask.logit_bias)] = torch.tensor(list(ask.logit_bias.values()))
        banned = [*request.banned, *request.stop_ids] if ask.ignore_eos else request.banned
        seed = secrets.randbelow(SEEDS - MOST_ANSWERS) if self.seed is None else self.seed
        settings = self.settings.model_copy(update={"seed": seed, **ask.settings})
        if settings.json_schema is not None and ask.ignore_eos:
            raise RequestError("an answer of a schema ends with it: leave ignore_eos out", "ignore_eos")
        with refusals("response_format"):
            grammar = grammar_of(settings, self.run.tokenizer, self.run.generator.vocab_size)
        return replace(request, settings=settings, banned=banned, bias=bias, grammar=grammar)

    def _check_ids(self, ids: Iterable[int], param: str, what: str) -> None:
        largest, last = max(ids), self.run.generator.vocab_size - 1
        if largest > last:
            what = f"{what} has the id {largest}, the model knows 0 to {last}: use the ids of its tokenizer"
            raise RequestError(what, param)

    def _check_length(self, num_tokens: int, param: str, what: str, advice: str) -> None:
        if num_tokens > self.context:
            said = f"{what} makes a prompt of {number_of(num_tokens, 'tokens')}, the model's context is {self.context}"
            raise RequestError(f"{said}: {advice}", param, code="context_length_exceeded")

    def _check_bytes(self, num_bytes: int, param: str) -> None:
        """Refuse a text that cannot fit, before a tokenizer reads it."""
        if self.most_bytes is not None and num_bytes > self.most_bytes:
            what = f"{num_bytes:,} bytes of text cannot fit into the context of {self.context} tokens: shorten it"
            raise RequestError(what, param, code="context_length_exceeded")

    def _notes(self, lost: LostCharacters, left_out: int = 0, system: str = "", *remarks: str) -> Notes:
        said = (
            # The page has words of its own for a few unknown characters, in its reader's language.
            prompts.prompt_warning(lost).removeprefix("warning: ") if prompts.is_mostly_unknown(lost) else "",
            prompts.system_note(self.num_system) if system else "",
            *remarks,
        )
        return Notes(left_out, lost.lost, tuple(filter(None, said)))

    def _question(self, ask: ChatAsk, request: Request) -> ModelPrompt:
        """The prompt of one question about one image."""
        if ask.kept_patches and not shows_patches(self.run):
            what = "this run removes no patches one by one, so there are none to show: leave kept_patches out"
            raise RequestError(what, "kept_patches")
        if len(ask.messages) > 1 or len(ask.messages[0].images) != 1:
            what = "this run answers one question about one image: send one message with a text and an image_url"
            raise RequestError(what, "messages")
        message, ((url, param),) = ask.messages[0], tuple(ask.image_urls())
        if not message.text:
            raise RequestError("the message has no question about the image: add a text part", param)
        content = image_bytes(url, param)
        with refusals(param):
            batch, grid, remarks = question_prompt(self.run, content, message.text)
            lost = prompts.lost_of(self.run.tokenizer, [message.text])
        num_tokens = batch.total_tokens
        self._check_length(num_tokens, "messages", "the question with its image", "shorten it, or use a smaller image")
        notes = self._notes(lost, 0, "", *remarks)
        return ModelPrompt(replace(request, prompt=batch), num_tokens, ask.stop, notes, grid)


def opened(run: LoadedRun, name: str, created: int) -> Served:
    """A run for answers, with the precision that `unpad generate` would compute its own in.

    Raises:
        RecipeError: its model answers in no way that can be served.
    """
    model = run.model
    if isinstance(model, VisionLanguage):
        return Served(run, name, "vqa", "fp32", created)  # as `unpad infer`
    if isinstance(model, PredictsSets):
        return Served(run, name, "patients", "fp32", created)
    if is_of_images(run):
        return Served(run, name, "images", "fp32", created)
    if isinstance(model, Generates) and model.causal:
        kind: Kind = "chat" if prompts.reads_chat(run.recipe, run.tokenizer) else "text"
        return Served(run, name, kind, generation_precision(run.recipe.generate), created)
    what = f"a model of kind {model.config.kind} answers in no form that can be served"
    fix = "serve a run of texts, conversations, images, questions about images or patients"
    raise RecipeError(what, where=str(run.folder), fix=fix)


# --------------------------------------------------------------------------- before the first answer


@dataclass
class RunOpening:
    """Settings of how a run is opened.

    Args:
        name: by which clients call it; "" for that of its folder.
        rows: answers at once; memory: bytes of keys and values, None for half of what is free; piece: tokens of
            prompts that are read between two steps.
        threads: of products; None for 1 of a small model, and all cores that this process may use of others.
        seed: as of `Served`.
    """

    run: str | LoadedRun
    name: str = ""
    rows: int = 64
    memory: int | None = None
    piece: int = 256
    threads: int | None = None
    seed: int | None = None
    proof: str = field(default="", init=False)

    def load(self) -> tuple[Served, str, Callable[[], Engine] | None]:
        """The run, the fingerprint of what its answers depend on, and what makes its engine; for the model's thread.

        Raises:
            UnpadError: it cannot be loaded, or answers in no form that can be served.
            ProofError: prompts together do not get what each gets alone.
        """
        served = self.open()
        torch.set_num_threads(self.num_threads(served))
        loaded, name = served.run, fingerprint(served, self.piece)
        if served.kind not in TEXTS:
            return served, name, None
        make = partial(
            Engine, loaded.generator, precision=served.precision, piece=self.piece, rows=self.rows,
            memory=self.memory or available_memory() // 2, kept=self.memory or KEPT_BYTES,
        )  # fmt: skip
        self.proof = prove(served, make)
        return served, name, make

    def open(self) -> Served:
        """The run, before anything is computed; raises as `load`, but no ProofError."""
        loaded = self.run if isinstance(self.run, LoadedRun) else load(self.run, device=CPU)
        served = opened(loaded, self.name or loaded.folder.resolve().name, int(loaded.folder.stat().st_mtime))
        return replace(served, seed=self.seed)

    def num_threads(self, served: Served) -> int:
        """Threads that compute."""
        if self.threads is not None:
            return self.threads
        if sum(parameter.numel() for parameter in served.run.model.parameters()) < SMALL:
            return 1
        return max(1, min(torch.get_num_threads(), cores(), int(quota() or cores())))

    def lines(self, served: Served | None) -> list[str]:
        """Lines that are printed when the server is ready."""
        assert served is not None, "it is loaded"
        more = f" {self.proof}" if self.proof else ""
        lines = [f"model {served.name} ({served.kind}, {served.precision}).{more}"]
        if served.kind in TEXTS and served.run.recipe.generate.beams > 1:
            lines.append(f"answers are drawn without the {served.run.recipe.generate.beams} beams of the run's recipe")
        return lines


def fingerprint(served: Served, piece: int) -> str:
    """Digest of all that an answer depends on besides the request: equal ones give equal bytes.

    It is of the weights, the recipe, the files of the run, the precision, the kernels and this version; where torch's
    products run, also of its version, the processor and the number of threads.
    """
    run, native = served.run, library.enabled()
    of_torch = served.kind not in TEXTS or not native or (served.precision == "bf16" and has_tiles())
    digest = blake2b(digest_size=8)
    parts: list[Any] = [version("unpad"), served.precision, library.describe(), run.recipe.model_dump_json()]
    parts += [torch.__version__, torch.get_num_threads(), full_processor_name()] if of_torch else []
    parts += [] if native else [piece]
    for part in parts:
        digest.update(f"{part}\n".encode())
    add_contents(digest, run)
    return f"unpad-{digest.hexdigest()}"


def add_contents(digest: blake2b, run: LoadedRun) -> None:
    """Add the files and weights of a run to a digest."""
    for name, content in sorted(run.files.items()):
        digest.update(name.encode() + blake2b(content).digest())
    for name, tensor in sorted(run.model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())


def prove(served: Served, make: Callable[..., Engine]) -> str:
    """Compare four prompts together with each alone, token by token and score by score, bit for bit.

    Raises:
        ProofError: they differ.
    """
    began = perf_counter()
    draw = np.random.default_rng(PROOF_SEED)
    settings = served.settings.model_copy(update={"temperature": 1.0, "max_new_tokens": PROOF_NEW, "seed": PROOF_SEED})
    way = replace(served.continuing, settings=settings)
    usable = np.setdiff1d(np.arange(served.run.tokenizer.vocab_size), [*way.banned, *way.stops])
    lengths = [min(length, served.context) for length in PROOF_LENGTHS]
    requests = [way.request(draw.choice(usable, length).tolist()) for length in lengths]
    together = hear(make(watch=watch), requests)
    alone = [hear(make(watch=watch), [request])[0] for request in requests]
    if not line_of("together = alone", "", together, alone).passed:
        fix = "report this with the machine's processor and `unpad --version`; UNPAD_NATIVE=0 may help meanwhile"
        raise ProofError("four prompts together did not get what each gets alone", where=served.name, fix=fix)
    return f"Four prompts together equal each alone, bit for bit ({perf_counter() - began:.1f} s)."
