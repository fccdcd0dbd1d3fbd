"""Bodies of requests and answers in OpenAI's form, as checked models and pure functions without HTTP.

Every value is checked for its type before anything else reads it. A field without effect here is named, one that this
server cannot honour is taken at its neutral value alone, and any other name is refused with the nearest known one.
Events of a stream are `data:` lines of JSON; equal answers have equal bytes, but for their id and the time.
"""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, PlainValidator, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from unpad.data.sources.chat import ROLES, Role
from unpad.data.sources.faults import RowFault
from unpad.data.sources.json_rows import StrictDecoder
from unpad.errors import UnpadError, nearest

MOST_ANSWERS = 16  # of one prompt, and stop texts
MOST_STOPPED = 1000  # characters of all stop texts
MOST_PROMPTS = 256  # of one request
MOST_BIASES = 1000  # of ids
SAMPLING = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed")
TOP_CLASSES = 5  # as `unpad infer` shows
MOST_LIKELIEST_CHAT, MOST_LIKELIEST_TEXT = 20, 5
MOST_NEW = 2**31 - 1
SEEDS = 2**31  # as for `unpad generate`; larger ones of clients are taken modulo it
OTHER_ENGINE = "start the server with --engine llama.cpp, which supports it"
SHOWN = 60  # characters of a refused value in a message
DONE = b"data: [DONE]\n\n"
# Reasons of the engine, as clients know them.
FINISHED = {"eos": "stop", "stop": "stop", "length": "length", "context": "length"}

Fields = Mapping[str, Any]  # of an object in JSON
Asked = TypeVar("Asked", bound="Body")


@dataclass(eq=False)
class RequestError(Exception):
    """A request that gets an error of the protocol instead of what it asked for.

    Args:
        message: what is wrong and what to do, without paths and without text of others.
        param: the field that is wrong.
        status: of HTTP; kind and code: OpenAI's names of the error.
        headers: of the answer.
    """

    message: str
    param: str | None = None
    status: int = 400
    kind: str = "invalid_request_error"
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.message

    def to_json(self) -> dict[str, Any]:
        """The body of the answer."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


@contextmanager
def refusals(param: str | None) -> Iterator[None]:
    """Turn an error of a user into an answer that names the field: what is wrong and what to do, without its place."""
    try:
        yield
    except UnpadError as error:
        raise RequestError(message_of(error), param, code=getattr(error, "code", None)) from error


def message_of(error: UnpadError) -> str:
    """An error of a user without its place."""
    return f"{error.what}: {error.fix}" if error.fix else error.what


def later(seconds: int) -> dict[str, str]:
    """Header of an answer to a client that may ask again then."""
    return {"Retry-After": str(seconds)}


def unavailable(message: str, *, code: str, seconds: int = 5) -> RequestError:
    """The answer of a server that cannot answer for now."""
    return RequestError(message, status=503, kind="server_error", code=code, headers=later(seconds))


# --------------------------------------------------------------------------- JSON


def parse_body(body: bytes) -> dict[str, Any]:
    """Parse a body of JSON as strictly as files of data.

    Raises:
        RequestError: says what is wrong, and where.
    """
    try:
        parsed = StrictDecoder().whole(body.decode("utf-8"))
    except UnicodeDecodeError:
        raise RequestError("the body is not UTF-8: send JSON in UTF-8") from None
    except RowFault as fault:
        raise RequestError(f"the body cannot be used: {fault.what}") from None
    except ValueError as error:
        place = f" (line {error.lineno}, column {error.colno})" if isinstance(error, json.JSONDecodeError) else ""
        raise RequestError(f"the body is not JSON{place}: send one JSON object") from None
    if type(parsed) is not dict:
        raise RequestError(f"the body is {_KINDS[type(parsed)]}, expected an object with the fields of the request")
    return parsed


_KINDS = {bool: "a truth value", int: "a whole number", float: "a number", str: "a text", list: "a list",
          dict: "an object", type(None): "null"}  # fmt: skip


def _shown(value: Any) -> str:
    """A value in a message: short ones as JSON, others by their kind."""
    text = json.dumps(value, ensure_ascii=False) if type(value) is not dict and type(value) is not list else ""
    return text if 0 < len(text) <= SHOWN else _KINDS[type(value)]


# --------------------------------------------------------------------------- fields


def refusal(what: str, at: str = "", code: str = "") -> PydanticCustomError:
    """The error of a field.

    Args:
        what: its message, behind the name of the field.
        at: the place inside of what is validated: a field of it, or an element such as "[2].role".
        code: of the answer; "" for none.
    """
    return PydanticCustomError(code or "refused", "{what}", {"what": what, "at": at})


class Body(BaseModel, strict=True, extra="forbid", frozen=True):
    """An object of a request; null stands for a field that is not given."""

    @model_validator(mode="before")
    @classmethod
    def _given(cls, value: Any) -> Any:
        """The given fields, all of which have a name that this object knows."""
        for name in value if type(value) is dict else ():
            if name not in cls.model_fields:
                hint = nearest(name[:SHOWN], sorted(cls.model_fields))
                raise refusal(f"has the unknown field {_shown(name)}: {hint}", name[:SHOWN])
        return {name: given for name, given in value.items() if given is not None} if type(value) is dict else value

    @classmethod
    def read(cls: type[Asked], body: Mapping[str, Any]) -> Asked:
        """Read the body of a request.

        Raises:
            RequestError: a field is missing or unknown, or has a type or value that cannot be honoured.
        """
        try:
            return cls.model_validate(body)
        except ValidationError as error:
            raise _refused(error.errors(include_url=False)[0]) from None


def _refused(fault: ErrorDetails) -> RequestError:
    """The answer to a fault of a body, at its place, such as `messages[0].content`."""
    loc, kind, context = fault["loc"], fault["type"], fault.get("ctx", {})
    at = str(loc[-1]) if kind == "missing" else context.get("at", "")
    parts = loc[:-1] if kind == "missing" else loc
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).removeprefix(".")
    if at.startswith("["):
        place, at = place + at, ""
    if kind == "missing":
        what, code = f"has no {at}: give it", None
    elif "what" in context:
        what, code = context["what"], None if kind == "refused" else kind
    else:
        expected = fault["msg"].partition(" or instance of")[0].replace("Input", "it").replace("List", "it")
        what, code = f"is {_shown(fault['input'])}: {expected}", None
    return RequestError(f"{place or 'the request'} {what}", ".".join(filter(None, [place, at])) or None, code=code)


def neutral(value: Any, advice: str = "leave it out") -> PlainValidator:
    """A field that is taken at its neutral value alone, as clients send that unasked; it is not kept."""

    def read(given: Any) -> None:
        is_number = type(given) in (int, float) and type(value) in (int, float)
        if (type(given) is not type(value) and not is_number) or given != value:
            what = f"is not supported by this server, other than as {json.dumps(value)}: {advice}"
            raise refusal(what, code="unsupported_parameter")

    return PlainValidator(read)


def _minus_one(value: Any) -> Any:
    """Null for -1, as other programs write "any"."""
    return None if value == -1 and type(value) is int else value


# Nothing is promised by fields of these kinds, so they are not kept.
DROPPED = AfterValidator(lambda value: None)
AnyText = Annotated[str | None, DROPPED]
OnlyNone = Annotated[Literal["none"] | None, DROPPED]
NoTools = Annotated[Literal["none", "auto"] | None, DROPPED]
Seed = Annotated[int, Field(ge=0, lt=2**64), AfterValidator(lambda seed: seed % SEEDS)]
Number = Annotated[Annotated[int, Field(ge=1, le=MOST_NEW)] | None, BeforeValidator(_minus_one)]
Null = Annotated[None, neutral(None)]


# --------------------------------------------------------------------------- texts to continue


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: Annotated[None, neutral(False)] = None


def _as_list(value: Any) -> Any:
    """A text alone stands for a list of one."""
    return [value] if type(value) is str else value


def _stops(texts: list[Any]) -> list[str]:
    if not all(type(text) is str and text for text in texts):
        raise refusal("has something that is no text, or an empty text, before which every answer would end")
    if (num := sum(map(len, texts))) > MOST_STOPPED:
        raise refusal(f"has {num:,} characters: give at most {MOST_STOPPED:,}, all texts together")
    return texts


def _biases(value: Any) -> dict[int, float]:
    """Numbers by ids, which are texts in JSON."""
    if type(value) is not dict or len(value) > MOST_BIASES:
        raise refusal(f"is {_shown(value)}, expected an object of at most {MOST_BIASES} ids with a number each")
    for id, bias in value.items():
        if not re.fullmatch("[0-9]{1,9}", id) or type(bias) not in (int, float) or not abs(bias) <= 100:
            raise refusal(f"has {_shown(bias)} for {_shown(id)}, expected -100 to 100 for an id")
    return {int(id): float(bias) for id, bias in value.items()}


def _schema(value: Any) -> dict[str, Any] | None:
    """The JSON Schema of a format; None for that of a text."""
    kind = value.get("type") if type(value) is dict else None
    if kind == "text":
        return None
    if kind not in ("json_object", "json_schema"):
        raise refusal("is no format: give a json_schema with its schema, a json_object or a text as its type")
    if kind == "json_object":
        schema = value.get("schema", value.get("value", {"type": "object"}))  # `value`: clients of Hugging Face
    else:
        schema = holder.get("schema") if type(holder := value.get("json_schema")) is dict else None
    if type(schema) is not dict:
        raise refusal("has no schema: give it as an object in json_schema.schema")
    return schema


class TokensAsk(Body):
    """Fields by which answers in tokens are drawn and sent.

    Args:
        stop: texts before which an answer ends.
        n: answers per prompt.
        logit_bias: added to the scores of ids.
        response_format: JSON Schema of the answers; None for any text.
    """

    model: str | None = None
    temperature: Annotated[float | None, Field(ge=0, le=100)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=-1, le=MOST_NEW)] = None
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    repetition_penalty: Annotated[float | None, Field(ge=0.01, le=100)] = None
    presence_penalty: Annotated[float | None, Field(ge=-100, le=100)] = None
    frequency_penalty: Annotated[float | None, Field(ge=-100, le=100)] = None
    logit_bias: Annotated[dict[int, float], PlainValidator(_biases)] = {}
    ignore_eos: bool = False
    response_format: Annotated[dict[str, Any] | None, PlainValidator(_schema)] = None
    seed: Annotated[Seed | None, BeforeValidator(_minus_one)] = None
    stop: Annotated[list[Any], Field(max_length=MOST_ANSWERS), BeforeValidator(_as_list), AfterValidator(_stops)] = []
    n: Annotated[int, Field(ge=1, le=MOST_ANSWERS)] = 1
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    tools: Annotated[None, neutral([], OTHER_ENGINE)] = None  # named before a choice among them
    # without effect
    user: AnyText = None
    metadata: Annotated[dict[str, Any] | None, DROPPED] = None
    store: Annotated[None, neutral(False, "nothing is stored")] = None
    service_tier: AnyText = None
    safety_identifier: AnyText = None
    prompt_cache_key: AnyText = None
    parallel_tool_calls: Annotated[bool | None, DROPPED] = None
    tool_choice: NoTools = None
    function_call: OnlyNone = None
    reasoning_effort: OnlyNone = None
    verbosity: AnyText = None
    # not supported
    best_of: Annotated[None, neutral(1, "n is supported")] = None
    suffix: Annotated[None, neutral("")] = None
    functions: Annotated[None, neutral([], OTHER_ENGINE)] = None
    modalities: Annotated[None, neutral(["text"])] = None

    @property
    @abstractmethod
    def most_new(self) -> int | None:
        """Most new tokens of an answer; 0 if only the prompts are to be read; None for the run's own number."""

    @property
    @abstractmethod
    def top(self) -> int | None:
        """Likeliest tokens to report beside each token's log probability; None reports nothing."""

    @property
    def settings(self) -> dict[str, Any]:
        """Fields of the recipe's `generate` section that the request gives."""
        given = {name: getattr(self, name) for name in SAMPLING}
        given["json_schema"] = self.response_format
        given["top_k"] = self.top_k and max(self.top_k, 0)  # other servers spell "off" as -1, too
        given["max_new_tokens"] = self.most_new if self.most_new is None else max(self.most_new, 1)
        return {name: value for name, value in given.items() if value is not None}


class ImageUrl(Body):
    url: str = ""
    detail: Annotated[Literal["auto", "low", "high"] | None, DROPPED] = None


class Part(Body):
    """A part of a message: a text, or an image."""

    type: Literal["text", "image_url"] | None = None
    text: str | None = None
    image_url: ImageUrl | None = None

    @model_validator(mode="after")
    def _is_one(self) -> Part:
        if self.type is None or getattr(self, self.type) is None:
            raise refusal("is no part: write its type, and a field of that name", "type")
        if self.text is not None and self.image_url is not None:
            raise refusal("has text and an image: give each a part of its own")
        return self


def _role(value: Any) -> Any:
    if type(value) is str and value not in ROLES:
        names = ", ".join(name for name in ROLES if name not in ("human", "gpt"))
        raise refusal(f"is {_shown(value)}, expected one of {names}")
    return ROLES[value] if type(value) is str else value


def _parts(value: Any) -> Any:
    """The parts of a message, of which a text is one."""
    if type(value) not in (str, list):
        raise refusal(f"is {_shown(value)}, expected a text or a list of parts")
    return [{"type": "text", "text": value}] if type(value) is str else value


class Message(Body):
    """A message of a conversation."""

    role: Annotated[Role, BeforeValidator(_role)]
    content: Annotated[list[Part], BeforeValidator(_parts)]
    name: AnyText = None
    # what the official client sends back of an earlier answer
    tool_calls: Annotated[None, neutral([])] = None
    annotations: Annotated[None, neutral([])] = None
    refusal: Null = None
    audio: Null = None
    function_call: Null = None
    reasoning_content: Null = None

    @property
    def text(self) -> str:
        return "".join(part.text or "" for part in self.content)

    @property
    def images(self) -> list[str]:
        """Its images, as URLs."""
        return [part.image_url.url for part in self.content if part.image_url is not None]

    @model_validator(mode="before")
    @classmethod
    def _of_no_tool(cls, value: Any) -> Any:
        if type(value) is dict and value.get("role") in ("tool", "function"):
            raise refusal(f"is {value['role']}: tools, their calls and their messages are not supported", "role")
        return value

    @model_validator(mode="after")
    def _is_whole(self) -> Message:
        if self.images and self.role != "user":
            raise refusal(f"is of the {self.role} and has an image: images are the user's", "content")
        if not self.text and not self.images and self.role != "system":
            raise refusal("is empty: write a text, or leave the message out", "content")
        return self


def _as_turns(messages: list[Message]) -> list[Message]:
    """Messages in turn: those of one role in a row are one, with an empty line between, and an empty system text none.

    The first may be the assistant's, a greeting; the last too, which is how the reply begins.
    """
    turns = list[Message]()
    for place, message in enumerate(messages):
        if message.role == "system" and place:
            raise refusal("is system: a system text is the first message", f"[{place}].role")
        if turns and turns[-1].role == message.role:
            content = [*turns[-1].content, Part(type="text", text="\n\n"), *message.content]
            turns[-1] = message.model_copy(update={"content": content})
        elif message.text or message.images:
            turns.append(message)
    if not any(message.role == "user" for message in turns):
        raise refusal("has no message of the user: give one")
    return turns


class ChatAsk(TokensAsk):
    """Body of /v1/chat/completions: a conversation to continue.

    Args:
        history: "trim" leaves out the oldest turns of a conversation that is too long, instead of refusing it.
        kept_patches: report the patches that entered each block.
    """

    messages: Annotated[list[Message], AfterValidator(_as_turns)]
    max_tokens: Number = None
    max_completion_tokens: Number = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LIKELIEST_CHAT)] = 0
    history: Literal["refuse", "trim"] = "refuse"
    kept_patches: bool = False

    @model_validator(mode="after")
    def _agree(self) -> ChatAsk:
        if self.top_logprobs and not self.logprobs:
            raise refusal("needs logprobs: true for top_logprobs", "top_logprobs")
        if len({self.max_tokens, self.max_completion_tokens} - {None}) > 1:
            raise refusal("has max_tokens and max_completion_tokens that differ: give one of them", "max_tokens")
        return self

    @property
    def most_new(self) -> int | None:
        return self.max_tokens or self.max_completion_tokens

    @property
    def top(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    def image_urls(self) -> Iterator[tuple[str, str]]:
        """Every image of the conversation, with the field that it is in."""
        for index, message in enumerate(self.messages):
            for url in message.images:
                yield url, f"messages[{index}].content"


def _prompts(value: Any) -> list[str | list[int]]:
    """A text, texts, token ids or lists of token ids."""
    several = type(value) is list and bool(value) and type(value[0]) is not int
    prompts = value if several else [value]
    if len(prompts) > MOST_PROMPTS:
        raise refusal(f"has {len(prompts)} prompts: give at most {MOST_PROMPTS} in one request")
    for index, prompt in enumerate(prompts):
        at = f"[{index}]" if several else ""
        if type(prompt) is not type(prompts[0]) or type(prompt) not in (str, list):
            raise refusal(f"is {_shown(prompt)}, expected a text, texts, token ids or lists of them", at)
        if prompt == []:
            raise refusal("has no tokens: begin a prompt with the id of BOS at least", at)
        for id in prompt if type(prompt) is list else []:
            if type(id) is not int or id < 0:
                raise refusal(f"has {_shown(id)} among token ids, which are whole numbers from 0", at)
    return prompts


class CompletionAsk(TokensAsk):
    """Body of /v1/completions: texts to continue, each a text or token ids; `echo`: whether answers begin with them."""

    prompt: Annotated[list[str | list[int]], PlainValidator(_prompts)]
    max_tokens: Annotated[Annotated[int, Field(ge=0, le=MOST_NEW)] | None, BeforeValidator(_minus_one)] = None
    logprobs: Annotated[int | None, Field(ge=0, le=MOST_LIKELIEST_TEXT)] = None
    echo: bool = False

    @property
    def most_new(self) -> int | None:
        return self.max_tokens

    @property
    def top(self) -> int | None:
        return self.logprobs


# --------------------------------------------------------------------------- images and patients


class Parameters(Body):
    top_k: Annotated[int, Field(ge=1, le=MOST_NEW)] = TOP_CLASSES
    function_to_apply: Annotated[Literal["softmax"] | None, DROPPED] = None


class ClassifyAsk(Body):
    """Body of /v1/classify: images in base64."""

    inputs: Annotated[list[str], Field(min_length=1, max_length=MOST_PROMPTS), BeforeValidator(_as_list)]
    parameters: Parameters = Parameters()


def _identity(value: Any) -> Any:
    if type(value) not in (int, str):
        raise refusal(f"is {_shown(value)}, expected a text or a whole number")
    return value


def _row(row: dict[str, Any]) -> dict[str, Any]:
    for name, cell in row.items():
        if cell is not None and (type(cell) not in (str, int, float) or (type(cell) is int and abs(cell) >= 2**63)):
            raise refusal(f"has {_shown(cell)} as {_shown(name)}, expected a text, a number or null")
    return row


class Instance(Body):
    """A patient of a request: the id to answer with, and rows of events by their columns."""

    id: Annotated[str | int, PlainValidator(_identity)]
    events: list[Annotated[dict[str, Any], AfterValidator(_row)]]


class PatientsAsk(Body):
    """Body of KServe's :predict and :explain."""

    instances: Annotated[list[Instance], Field(min_length=1, max_length=MOST_PROMPTS)]
    outputs: list[Literal["vector", "prediction"]] = []


# --------------------------------------------------------------------------- answers


@dataclass(frozen=True)
class Head:
    """Fields that every part of one answer begins with; `kind` is "chat" or "text"."""

    id: str
    created: int
    model: str
    fingerprint: str
    kind: str

    def to_json(self, *, streamed: bool) -> dict[str, Any]:
        of_chat = "chat.completion.chunk" if streamed else "chat.completion"
        return {
            "id": self.id,
            "object": of_chat if self.kind == "chat" else "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


@dataclass(frozen=True)
class Spelled:
    """A token with its log probability; `spelling` are its bytes, `offset` its first character in the answer.

    Args:
        logprob: None for the first token of a text, before which nothing predicts it.
        top: the likeliest tokens with their log probabilities, descending.
    """

    name: str
    spelling: bytes
    logprob: float | None
    top: tuple[Spelled, ...] = ()
    offset: int = 0


@dataclass(frozen=True)
class TextPiece:
    """The next part of one answer: text and tokens; `finished` is the reason why it ended, on its last piece."""

    index: int
    text: str = ""
    tokens: tuple[Spelled, ...] = ()
    finished: str | None = None


def spelling(name: str, text: bytes) -> str:
    """A token as a text: its own if it has whole characters, otherwise `bytes:\\xe4\\xbd`; its name if it has none."""
    if not text:
        return name
    try:
        return text.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in text)


def usage(num_read: int, num_cached: int, num_made: int) -> dict[str, Any]:
    """Numbers of tokens: of prompts, of these that were kept from earlier requests, and of answers."""
    return {
        "prompt_tokens": num_read,
        "completion_tokens": num_made,
        "total_tokens": num_read + num_made,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


def whole(
    head: Head, answers: Sequence[Sequence[TextPiece]], counts: Fields, notes: Fields, *, with_tokens: bool
) -> dict[str, Any]:
    """An answer that is not streamed.

    Args:
        answers: the pieces of each, all of them.
        counts: of `usage`.
        notes: the field `unpad`.
        with_tokens: whether log probabilities were asked for.
    """
    choices = []
    for index, pieces in enumerate(answers):
        text, tokens = "".join(one.text for one in pieces), [token for one in pieces for token in one.tokens]
        message = {"role": "assistant", "content": text, "refusal": None}
        said = {"message": message} if head.kind == "chat" else {"text": text}
        reported = logprobs(head.kind, tokens) if with_tokens else None
        choices.append({"index": index, **said, "logprobs": reported, "finish_reason": pieces[-1].finished})
    return {**head.to_json(streamed=False), "choices": choices, "usage": dict(counts), "unpad": dict(notes)}


def logprobs(kind: str, tokens: Sequence[Spelled]) -> dict[str, Any]:
    """Log probabilities in the form of chats, or in that of completions."""
    if kind == "chat":
        content = [{**_entry(one), "top_logprobs": [_entry(other) for other in one.top]} for one in tokens]
        return {"content": content, "refusal": None}
    return {
        "tokens": [spelling(one.name, one.spelling) for one in tokens],
        "token_logprobs": [one.logprob for one in tokens],
        "top_logprobs": [None if one.logprob is None else _likeliest(one) for one in tokens],
        "text_offset": [one.offset for one in tokens],
    }


def _entry(token: Spelled) -> dict[str, Any]:
    name = spelling(token.name, token.spelling)
    return {"token": name, "logprob": token.logprob, "bytes": list(token.spelling) or None}


def _likeliest(token: Spelled) -> dict[str, float | None]:
    """The likeliest tokens by their text; of several with one text, the likeliest."""
    likeliest: dict[str, float | None] = {}
    for one in token.top:
        likeliest.setdefault(spelling(one.name, one.spelling), one.logprob)
    return likeliest


# --------------------------------------------------------------------------- streams


def event(value: Fields) -> bytes:
    """One event of a stream."""
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def opening(head: Head, index: int) -> bytes:
    """The first event of a chat's answer, which names its role."""
    choice = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    return event({**head.to_json(streamed=True), "choices": [choice]})


def chunk(head: Head, piece: TextPiece, *, with_tokens: bool, notes: Fields | None = None) -> bytes:
    """The event of a piece of an answer; `notes` are added as the field `unpad`."""
    said = {"delta": {"content": piece.text} if piece.text else {}} if head.kind == "chat" else {"text": piece.text}
    reported = logprobs(head.kind, piece.tokens) if with_tokens and piece.tokens else None
    choice = {"index": piece.index, **said, "logprobs": reported, "finish_reason": piece.finished}
    more = {} if notes is None else {"unpad": dict(notes)}
    return event({**head.to_json(streamed=True), "choices": [choice], **more})


def closing(head: Head, counts: Fields) -> bytes:
    """The event with the numbers of tokens, which has no choices."""
    return event({**head.to_json(streamed=True), "choices": [], "usage": dict(counts)})


def failure(error: RequestError) -> bytes:
    """The event that ends a stream which cannot go on."""
    return event(error.to_json())
