"""Bodies of requests in OpenAI's form, read into checked asks; pure functions without HTTP.

Every value is checked for its type before anything else reads it. A field without effect here is named, one that this
server cannot honour is taken at its neutral value alone, and any other name is refused with the nearest known one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from unpad.data.sources.chat import ROLES, Role, out_of_turn
from unpad.errors import UnpadError, nearest

DEEPEST = 64  # objects and lists inside one another
MOST_ANSWERS = 16  # of one prompt, and stop texts
MOST_STOPPED = 1000  # characters of all stop texts
MOST_PROMPTS = 256  # of one request
TOP_CLASSES = 5  # as `unpad infer` shows
MOST_LIKELIEST_CHAT, MOST_LIKELIEST_TEXT = 20, 5
MOST_NEW = 2**31 - 1
LARGEST_SEED = 2**31 - 1  # as for `unpad generate`
SHOWN = 60  # characters of a refused value in a message

Value = TypeVar("Value")
Read = Callable[[Any, str], Any]  # value and name of a field -> what it means, or a RequestError


class RequestError(Exception):
    """A request that gets an error of the protocol instead of what it asked for.

    Args:
        message: what is wrong and what to do, without paths and without text of others.
        param: the field that is wrong.
        status: of HTTP; kind and code: OpenAI's names of the error.
        headers: of the answer.
    """

    def __init__(
        self,
        message: str,
        param: str | None = None,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.param, self.status, self.kind, self.code = message, param, status, kind, code
        self.headers = dict(headers or {})

    def to_json(self) -> dict[str, Any]:
        """The body of the answer."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class Message:
    """A message of a conversation; `images` are the data URLs of its parts."""

    role: Role
    text: str
    images: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sampling:
    """Settings by which answers are drawn and sent.

    Args:
        settings: fields of the recipe's `generate` section that the request gives.
        reads_only: no token is wanted, only what is known about the prompt's.
        stop: texts before which an answer ends.
        n: answers per prompt.
        top: likeliest tokens to report beside each token's log probability; None reports nothing.
        include_usage: whether a stream ends with the numbers of tokens.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    reads_only: bool = False
    stop: tuple[str, ...] = ()
    n: int = 1
    top: int | None = None
    stream: bool = False
    include_usage: bool = False


@dataclass(frozen=True)
class ChatAsk:
    """A conversation to continue.

    Args:
        trims: leave out the oldest turns of a conversation that is too long, instead of refusing it.
        kept_patches: report the patches that entered each block.
    """

    model: str | None
    messages: tuple[Message, ...]
    sampling: Sampling
    trims: bool = False
    kept_patches: bool = False


@dataclass(frozen=True)
class CompletionAsk:
    """Texts to continue, each a text or token ids; `echo`: whether answers begin with them."""

    model: str | None
    prompts: tuple[str | tuple[int, ...], ...]
    sampling: Sampling
    echo: bool = False


def read_chat(body: Mapping[str, Any]) -> ChatAsk:
    """Read the body of /v1/chat/completions.

    Raises:
        RequestError: a field is unknown, or has a type or value that cannot be honoured.
    """
    values = _fields(body, CHAT)
    if "messages" not in values:
        raise RequestError("the request has no messages: give the conversation as a list of them", "messages")
    if values.get("top_logprobs") and not values.get("logprobs"):
        raise RequestError("top_logprobs needs logprobs: true", "top_logprobs")
    top = values.get("top_logprobs", 0) if values.get("logprobs") else None
    trims, kept = values.get("history") == "trim", values.get("kept_patches", False)
    return ChatAsk(values.get("model"), values["messages"], _sampling(values, top), trims, kept)


def read_completion(body: Mapping[str, Any]) -> CompletionAsk:
    """Read the body of /v1/completions; raises as `read_chat`."""
    values = _fields(body, COMPLETION)
    if "prompt" not in values:
        raise RequestError("the request has no prompt: give a text, texts, token ids or lists of them", "prompt")
    sampling = _sampling(values, values.get("logprobs"))
    return CompletionAsk(values.get("model"), values["prompt"], sampling, values.get("echo", False))


@dataclass(frozen=True)
class ClassifyAsk:
    """Images to classify, in base64; `is_list`: whether they came in a list, and are answered with one."""

    inputs: tuple[str, ...]
    is_list: bool
    top: int


@dataclass(frozen=True)
class Instance:
    """A patient of a request: the id to answer with, and rows of events by their columns."""

    id: str | int
    events: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class PatientsAsk:
    """Patients to predict for; `vectors`: whether their embeddings are wanted too."""

    instances: tuple[Instance, ...]
    vectors: bool = False


def read_classify(body: Mapping[str, Any]) -> ClassifyAsk:
    """Read the JSON of /v1/classify; raises as `read_chat`."""
    values = _fields(body, CLASSIFY)
    if "inputs" not in values:
        raise RequestError("the request has no inputs: give an image in base64, or a list of them", "inputs")
    inputs = values["inputs"]
    top = values.get("parameters", {}).get("top_k", TOP_CLASSES)
    return ClassifyAsk((inputs,) if type(inputs) is str else tuple(inputs), type(inputs) is list, top)


def read_patients(body: Mapping[str, Any]) -> PatientsAsk:
    """Read the body of KServe's :predict and :explain; raises as `read_chat`."""
    values = _fields(body, PATIENTS)
    if "instances" not in values:
        raise RequestError("the request has no instances: give a list of patients with their events", "instances")
    return PatientsAsk(values["instances"], "vector" in values.get("outputs", ()))


def _sampling(values: Mapping[str, Any], top: int | None) -> Sampling:
    settings = {name: values[name] for name in ("temperature", "top_p", "top_k", "repetition_penalty", "seed")
                if name in values}  # fmt: skip
    limits = [values[name] for name in ("max_completion_tokens", "max_tokens") if name in values]
    if len(set(limits)) > 1:
        raise RequestError("max_tokens and max_completion_tokens differ: give one of them", "max_tokens")
    if limits:
        settings["max_new_tokens"] = max(limits[0], 1)
    return Sampling(
        settings=settings,
        reads_only=limits[:1] == [0],
        stop=values.get("stop", ()),
        n=values.get("n", 1),
        top=top,
        stream=values.get("stream", False),
        include_usage=values.get("stream_options", {}).get("include_usage", False),
    )


# --------------------------------------------------------------------------- JSON


class _Unreadable:
    """Stands for a number that JSON spells and no field can take, until the name of its field is known."""

    def __init__(self, what: str) -> None:
        self.what = what


def parse_body(body: bytes) -> dict[str, Any]:
    """Parse a body of JSON whose values are safe to read: finite numbers of 64 bits, texts that are valid Unicode,
    bounded depth, no name twice.

    Raises:
        RequestError: with the field.
    """
    try:
        parsed = json.loads(
            body.decode("utf-8"),
            parse_constant=lambda name: _Unreadable(f"{name} is not a number that can be used"),
            parse_int=_whole_number,
            parse_float=_fraction,
            object_pairs_hook=_object,
        )
    except UnicodeDecodeError:
        raise RequestError("the body is not UTF-8: send JSON in UTF-8") from None
    except RecursionError:
        raise RequestError(f"the body nests deeper than {DEEPEST} lists and objects: flatten it") from None
    except ValueError as error:
        place = f" (line {error.lineno}, column {error.colno})" if isinstance(error, json.JSONDecodeError) else ""
        raise RequestError(f"the body is not JSON{place}: send one JSON object") from None
    if type(parsed) is not dict:
        raise RequestError(f"the body is {_kind_of(parsed)}, expected an object with the fields of the request")
    for name, value in parsed.items():
        _check_text(name, None)
        _check_values(value, name[:SHOWN])
    return parsed


def _whole_number(digits: str) -> int | _Unreadable:
    if len(digits) > 20 or not -(2**63) <= (number := int(digits)) < 2**63:
        return _Unreadable("a whole number needs more than 64 bits: give a smaller one")
    return number


def _fraction(digits: str) -> float | _Unreadable:
    number = float(digits)
    return number if math.isfinite(number) else _Unreadable("a number is too large: give a smaller one")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any] | _Unreadable:
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    return _Unreadable("an object has one name twice: give each field once")


def _check_values(value: Any, param: str) -> None:
    """Refuse what no field takes, anywhere inside a value; without recursion, as the depth is the sender's."""
    level = [value]
    for _ in range(DEEPEST):
        inside: list[Any] = []
        for one in level:
            if isinstance(one, _Unreadable):
                raise RequestError(one.what, param)
            if type(one) is str:
                _check_text(one, param)
            elif type(one) is list:
                inside += one
            elif type(one) is dict:
                inside += one.values()
                for name in one:
                    _check_text(name, param)
        if not inside:
            return
        level = inside
    raise RequestError(f"the value nests deeper than {DEEPEST} lists and objects: flatten it", param)


def _check_text(text: str, param: str | None) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError("a text has half of a surrogate pair, which is no character: remove it", param) from None


_KINDS = {bool: "a truth value", int: "a whole number", float: "a number", str: "a text", list: "a list",
          dict: "an object", type(None): "null", _Unreadable: "an object with one name twice"}  # fmt: skip


def _kind_of(value: Any) -> str:
    return _KINDS[type(value)]


def _shown(value: Any) -> str:
    """A value in a message: short ones as JSON, others by their kind."""
    text = json.dumps(value, ensure_ascii=False) if type(value) is not dict and type(value) is not list else ""
    return text if 0 < len(text) <= SHOWN else _kind_of(value)


# --------------------------------------------------------------------------- fields


def _fields(body: Mapping[str, Any], known: Mapping[str, Read], prefix: str = "") -> dict[str, Any]:
    """Values of the fields by name; null stands for a field that is not given.

    Raises:
        RequestError: a name is unknown, or a value does not fit.
    """
    for name in body:
        if name not in known:
            hint = nearest(name[:SHOWN], sorted(known))
            raise RequestError(f"unknown field {_shown(name)}: {hint}", (prefix + name)[:SHOWN])
    return {name: known[name](value, prefix + name) for name, value in body.items() if value is not None}


def _typed(value: Any, kind: type[Value], param: str) -> Value:
    if type(value) is not kind:
        raise RequestError(f"{param} is {_shown(value)}, expected {_KINDS[kind]}", param)
    return value


def _text(value: Any, param: str) -> str:
    return _typed(value, str, param)


def _truth(value: Any, param: str) -> bool:
    return _typed(value, bool, param)


def _whole(least: int, most: int) -> Read:
    def read(value: Any, param: str) -> int:
        if type(value) is not int or not least <= value <= most:
            raise RequestError(f"{param} is {_shown(value)}, expected a whole number from {least} to {most}", param)
        return value

    return read


def _number(least: float, most: float, above: bool = False) -> Read:
    """A number from least to most; `above`: without the least itself."""

    def read(value: Any, param: str) -> float:
        is_number = type(value) is int or type(value) is float
        if not is_number or not least <= value <= most or (above and value == least):
            least_said = f"above {least:g} and up to" if above else f"from {least:g} to"
            raise RequestError(f"{param} is {_shown(value)}, expected a number {least_said} {most:g}", param)
        return float(value)

    return read


def _one_of(*names: str) -> Read:
    def read(value: Any, param: str) -> str:
        if type(value) is not str or value not in names:
            raise RequestError(f"{param} is {_shown(value)}, expected {' or '.join(map(json.dumps, names))}", param)
        return value

    return read


def _neutral(neutral: Any, advice: str = "leave it out") -> Read:
    """A field that is taken at its neutral value alone, as clients send that unasked."""

    def read(value: Any, param: str) -> Any:
        is_number = type(value) in (int, float) and type(neutral) in (int, float)
        if (type(value) is not type(neutral) and not is_number) or value != neutral:
            said = json.dumps(neutral)
            what = f"this server does not support {param}, other than as {said}: {advice}"
            raise RequestError(what, param, code="unsupported_parameter")
        return neutral

    return read


def _unsupported(value: Any, param: str) -> Any:
    """A field that clients send as null, and that is refused otherwise."""
    raise RequestError(f"this server does not support {param}: leave it out", param, code="unsupported_parameter")


def _top_k(value: Any, param: str) -> int:
    """Other servers spell "off" as -1, too."""
    number: int = _whole(-1, MOST_NEW)(value, param)
    return max(number, 0)


def _stop(value: Any, param: str) -> tuple[str, ...]:
    texts = [value] if type(value) is str else _typed(value, list, param)
    if len(texts) > MOST_ANSWERS:
        raise RequestError(f"{param} has {len(texts)} texts: give at most {MOST_ANSWERS}", param)
    for text in texts:
        if not _text(text, param):
            raise RequestError(f"{param} has an empty text, before which every answer would end", param)
    if (num := sum(map(len, texts))) > MOST_STOPPED:
        raise RequestError(f"{param} has {num:,} characters: give at most {MOST_STOPPED:,}, all texts together", param)
    return tuple(texts)


def _object_of(known: Mapping[str, Read]) -> Read:
    return lambda value, param: _fields(_typed(value, dict, param), known, f"{param}.")


def _ignored(kind: type[Any]) -> Read:
    return lambda value, param: _typed(value, kind, param)


SAMPLING: dict[str, Read] = {
    "model": _text,
    "temperature": _number(0, 100),
    "top_p": _number(0, 1, above=True),
    "top_k": _top_k,
    "repetition_penalty": _number(0.01, 100),
    "seed": _whole(0, LARGEST_SEED),
    "stop": _stop,
    "n": _whole(1, MOST_ANSWERS),
    "stream": _truth,
    "stream_options": _object_of({"include_usage": _truth, "include_obfuscation": _neutral(False)}),
}
# Nothing is promised by them, so they are taken without effect.
WITHOUT_EFFECT: dict[str, Read] = {
    "user": _text,
    "metadata": _ignored(dict),
    "store": _neutral(False, "nothing is stored"),
    "service_tier": _text,
    "safety_identifier": _text,
    "prompt_cache_key": _text,
    "parallel_tool_calls": _truth,
    "tool_choice": _one_of("none"),
    "function_call": _one_of("none"),
    "reasoning_effort": _one_of("none"),
    "verbosity": _text,
}
NEUTRAL: dict[str, Read] = {
    "presence_penalty": _neutral(0, "repetition_penalty is supported"),
    "frequency_penalty": _neutral(0, "repetition_penalty is supported"),
    "logit_bias": _neutral({}),
    "best_of": _neutral(1, "n is supported"),
    "suffix": _neutral(""),
    "tools": _neutral([]),
    "functions": _neutral([]),
    "response_format": _neutral({"type": "text"}),
    "modalities": _neutral(["text"]),
}
SHARED = SAMPLING | WITHOUT_EFFECT | NEUTRAL


# --------------------------------------------------------------------------- messages and prompts


def _messages(value: Any, param: str) -> tuple[Message, ...]:
    """A system text, if there is one, then user and assistant in turn; the user is last."""
    messages = [_message(one, f"{param}[{index}]") for index, one in enumerate(_typed(value, list, param))]
    if not messages:
        raise RequestError(f"{param} is empty: give at least the user's message", param)
    if (wrong := out_of_turn([message.role for message in messages])) is not None:
        place, expected = f"{param}[{wrong[0]}]", wrong[1]
        what = f"{place} is of the {messages[wrong[0]].role}, expected the {expected}: after a system text, if there "
        raise RequestError(what + "is one, user and assistant take turns", f"{place}.role")
    if messages[-1].role != "user":
        raise RequestError(f"the last message is of the {messages[-1].role}: end with the user's", param)
    return tuple(messages)


def _message(value: Any, place: str) -> Message:
    values = _fields(_typed(value, dict, place), MESSAGE, f"{place}.")
    for name in ("role", "content"):
        if name not in values:
            raise RequestError(f"{place} has no {name}", f"{place}.{name}")
    role, (text, images) = values["role"], values["content"]
    if images and role != "user":
        raise RequestError(f"{place} is of the {role} and has an image: images are the user's", f"{place}.content")
    if not text and not images:
        raise RequestError(f"{place} is empty: write a text, or leave the message out", f"{place}.content")
    return Message(role, text, images)


def _role(value: Any, param: str) -> str:
    role = ROLES.get(_text(value, param))
    if role is None:
        known = ", ".join(name for name in ROLES if name not in ("human", "gpt"))
        raise RequestError(f"{param} is {_shown(value)}, expected one of {known}", param)
    return role


def _content(value: Any, param: str) -> tuple[str, tuple[str, ...]]:
    """Text and images of a message: a text, or a list of parts."""
    if type(value) is str:
        return value, ()
    if type(value) is not list:
        raise RequestError(f"{param} is {_shown(value)}, expected a text or a list of parts", param)
    parts = [_part(part, f"{param}[{index}]") for index, part in enumerate(value)]
    return "".join(text for kind, text in parts if kind == "text"), tuple(
        url for kind, url in parts if kind == "image_url"
    )


def _part(value: Any, place: str) -> tuple[str, str]:
    values = _fields(_typed(value, dict, place), PART, f"{place}.")
    kind = values.get("type")
    if kind is None or kind not in values:
        raise RequestError(f"{place} is no part: write its type, and a field of that name", f"{place}.type")
    if len(values) > 2:
        raise RequestError(f"{place} has text and an image: give each a part of its own", place)
    return kind, values[kind] if kind == "text" else values[kind].get("url", "")


MESSAGE: dict[str, Read] = {
    "role": _role,
    "content": _content,
    "name": _ignored(str),
    # What the official client sends back of an earlier answer.
    "tool_calls": _neutral([]),
    "annotations": _neutral([]),
    **dict.fromkeys(("refusal", "audio", "function_call", "reasoning_content"), _unsupported),
}
PART: dict[str, Read] = {
    "type": _one_of("text", "image_url"),
    "text": _text,
    "image_url": _object_of({"url": _text, "detail": _one_of("auto", "low", "high")}),
}


def _prompts(value: Any, param: str) -> tuple[str | tuple[int, ...], ...]:
    """A text, texts, token ids or lists of token ids."""
    if type(value) is str:
        return (value,)
    if type(value) is not list:
        raise RequestError(f"{param} is {_shown(value)}, expected a text, texts, token ids or lists of them", param)
    if not value:
        raise RequestError(f"{param} is empty: give at least one text", param)
    if type(value[0]) is int:
        return (_ids(value, param),)
    if len(value) > MOST_PROMPTS:
        raise RequestError(f"{param} has {len(value)} prompts: give at most {MOST_PROMPTS} in one request", param)
    if type(value[0]) is str:
        return tuple(_text(one, f"{param}[{index}]") for index, one in enumerate(value))
    return tuple(_ids(one, f"{param}[{index}]") for index, one in enumerate(value))


def _ids(value: Any, param: str) -> tuple[int, ...]:
    ids = _typed(value, list, param)
    if not ids:
        raise RequestError(f"{param} has no tokens: begin a prompt with the id of BOS at least", param)
    for one in ids:
        if type(one) is not int or one < 0:
            raise RequestError(f"{param} has {_shown(one)} among token ids, which are whole numbers from 0", param)
    return tuple(ids)


def _inputs(value: Any, param: str) -> str | list[str]:
    if type(value) is str:
        return value
    if type(value) is not list or not 0 < len(value) <= MOST_PROMPTS:
        what = f"{param} is {_shown(value)}, expected an image in base64, or a list of 1 to {MOST_PROMPTS}"
        raise RequestError(what, param)
    return [_text(one, f"{param}[{index}]") for index, one in enumerate(value)]


def _instances(value: Any, param: str) -> tuple[Instance, ...]:
    if type(value) is not list or not 0 < len(value) <= MOST_PROMPTS:
        raise RequestError(f"{param} is {_shown(value)}, expected a list of 1 to {MOST_PROMPTS} patients", param)
    return tuple(_instance(one, f"{param}[{index}]") for index, one in enumerate(value))


def _instance(value: Any, place: str) -> Instance:
    values = _fields(_typed(value, dict, place), INSTANCE, f"{place}.")
    for name in INSTANCE:
        if name not in values:
            raise RequestError(f"{place} has no {name}", f"{place}.{name}")
    return Instance(values["id"], values["events"])


def _id(value: Any, param: str) -> str | int:
    if type(value) is not int and type(value) is not str:
        raise RequestError(f"{param} is {_shown(value)}, expected a text or a whole number", param)
    return value


def _events(value: Any, param: str) -> tuple[Mapping[str, Any], ...]:
    rows = _typed(value, list, param)
    for index, row in enumerate(rows):
        place = f"{param}[{index}]"
        for name, cell in _typed(row, dict, place).items():
            if cell is not None and type(cell) not in (str, int, float):
                what = f"{place} has {_shown(cell)} as {_shown(name)}, expected a text, a number or null"
                raise RequestError(what, place)
    return tuple(rows)


def _outputs(value: Any, param: str) -> tuple[str, ...]:
    known = _one_of("vector", "prediction")
    return tuple(known(one, f"{param}[{index}]") for index, one in enumerate(_typed(value, list, param)))


CLASSIFY: dict[str, Read] = {
    "inputs": _inputs,
    "parameters": _object_of({"top_k": _whole(1, MOST_NEW), "function_to_apply": _one_of("softmax")}),
}
INSTANCE: dict[str, Read] = {"id": _id, "events": _events}
PATIENTS: dict[str, Read] = {"instances": _instances, "outputs": _outputs}
CHAT: dict[str, Read] = SHARED | {
    "messages": _messages,
    "max_tokens": _whole(1, MOST_NEW),
    "max_completion_tokens": _whole(1, MOST_NEW),
    "logprobs": _truth,
    "top_logprobs": _whole(0, MOST_LIKELIEST_CHAT),
    "history": _one_of("refuse", "trim"),
    "kept_patches": _truth,
}
COMPLETION: dict[str, Read] = SHARED | {
    "prompt": _prompts,
    "max_tokens": _whole(0, MOST_NEW),
    "logprobs": _whole(0, MOST_LIKELIEST_TEXT),
    "echo": _truth,
}


@contextmanager
def refusals(param: str | None) -> Iterator[None]:
    """Turn an error of a user into an answer that names the field: what is wrong and what to do, without its place."""
    try:
        yield
    except UnpadError as error:
        said = f"{error.what}: {error.fix}" if error.fix else error.what
        raise RequestError(said, param, code=getattr(error, "code", None)) from error


def images_of(messages: tuple[Message, ...]) -> Iterator[tuple[str, str]]:
    """Every image of a conversation, with the field that it is in."""
    for index, message in enumerate(messages):
        for url in message.images:
            yield url, f"messages[{index}].content"
