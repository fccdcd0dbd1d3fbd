"""Bodies of requests: what is taken, what is refused and by which words; and that no body does anything else."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unpad.serving.protocol import Body, ChatAsk, CompletionAsk, RequestError, parse_body

HELLO = [{"role": "user", "content": "你好"}]


def chat(**fields: Any) -> ChatAsk:
    """The ask of a body that went through JSON."""
    return ChatAsk.read(parse_body(json.dumps({"messages": HELLO, **fields}).encode()))


def text(**fields: Any) -> CompletionAsk:
    return CompletionAsk.read(parse_body(json.dumps({"prompt": "你好", **fields}).encode()))


def refused(body: dict[str, Any] | bytes, kind: type[Body] = ChatAsk) -> RequestError:
    content = body if isinstance(body, bytes) else json.dumps({"messages": HELLO, **body}).encode()
    with pytest.raises(RequestError) as caught:
        kind.read(parse_body(content))
    return caught.value


# --------------------------------------------------------------------------- taken


def test_a_conversation_is_read_with_what_it_says_about_sampling():
    messages = [
        {"role": "developer", "content": "简短。"},
        {"role": "user", "content": [{"type": "text", "text": "你"}, {"type": "text", "text": "好"}]},
        {"role": "assistant", "content": "好", "refusal": None, "tool_calls": [], "annotations": []},
        {"role": "user", "content": "x", "name": "anna"},
    ]
    ask = chat(
        model="demo", messages=messages, temperature=1, top_p=0.5, top_k=-1, repetition_penalty=1.5, seed=7,
        max_completion_tokens=9, stop=["a", "b"], n=2, stream=True, stream_options={"include_usage": True},
        logprobs=True, top_logprobs=3, history="trim",
    )  # fmt: skip
    assert [(one.role, one.text) for one in ask.messages] == [
        ("system", "简短。"), ("user", "你好"), ("assistant", "好"), ("user", "x"),
    ]  # fmt: skip
    assert ask.settings == {
        "temperature": 1.0, "top_p": 0.5, "top_k": 0, "repetition_penalty": 1.5, "seed": 7, "max_new_tokens": 9
    }  # fmt: skip
    assert (ask.model, ask.stop, ask.n, ask.top, ask.stream, ask.history) == ("demo", ["a", "b"], 2, 3, True, "trim")
    assert ask.stream_options.include_usage


def test_an_image_is_a_part_of_the_users_message():
    url = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA==", "detail": "auto"}}
    parts = [{"type": "text", "text": "什么？"}, url]
    [message] = chat(messages=[{"role": "user", "content": parts}]).messages
    assert (message.text, message.images) == ("什么？", ["data:image/png;base64,AA=="])
    assert refused({"messages": [{"role": "system", "content": parts}, *HELLO]}).param == "messages[0].content"


@pytest.mark.parametrize(
    ("prompt", "read"),
    [("a", ["a"]), ("", [""]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_prompts_are_texts_or_token_ids(prompt, read):
    assert text(prompt=prompt).prompt == read


def test_no_new_token_is_wanted_where_a_text_is_only_scored():
    ask = text(max_tokens=0, echo=True, logprobs=0)
    assert (ask.most_new, ask.top, ask.echo) == (0, 0, True)
    assert (text(max_tokens=1).most_new, text().most_new, text().top) == (1, None, None)


NEUTRAL = {
    "user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "safety_identifier": "x",
    "prompt_cache_key": "x", "parallel_tool_calls": True, "tool_choice": "none", "reasoning_effort": "none",
    "verbosity": "low", "logit_bias": {}, "ignore_eos": False, "tools": [],
    "functions": [], "response_format": {"type": "text"}, "best_of": 1, "suffix": "", "modalities": ["text"],
}  # fmt: skip


@pytest.mark.promise("serving.bodies")
def test_neutral_values_and_null_change_nothing():
    assert chat(**NEUTRAL) == chat()
    assert text(**NEUTRAL) == text()
    assert chat(**dict.fromkeys(ChatAsk.model_fields.keys() - {"messages"})) == chat()
    assert text(**dict.fromkeys(CompletionAsk.model_fields.keys() - {"prompt"})) == text()


# --------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{}]), ("functions", [{}]), ("best_of", 2), ("best_of", True),
        ("suffix", "x"), ("modalities", ["text", "audio"]), ("store", True), ("store", 0),
        ("tool_choice", "required"), ("reasoning_effort", "high"), ("tools", {}),
    ],
)  # fmt: skip
def test_any_other_value_of_a_field_that_cannot_be_honoured_is_refused(field, value):
    error = refused({field: value})
    assert (error.status, error.param) == (400, field)
    assert field in error.message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "1"), ("temperature", True), ("temperature", -0.1), ("temperature", 101), ("top_p", 0),
        ("top_p", 1.5), ("top_k", 1.5), ("top_k", -2), ("seed", -2), ("seed", 1.0), ("n", 0),
        ("n", 17), ("n", True), ("max_tokens", 0), ("max_tokens", "9"), ("max_completion_tokens", 1.5), ("stop", 5),
        ("stop", ["a"] * 17), ("stop", [""]), ("stop", [None]), ("stream", 1), ("stream_options", []),
        ("stop", ["a" * 500, "b" * 501]), ("repetition_penalty", 1e-38),
        ("presence_penalty", 101), ("frequency_penalty", "1"), ("min_p", 1.1), ("logit_bias", {"a": 1}),
        ("logit_bias", {"5": 101}), ("logit_bias", []), ("ignore_eos", 1), ("response_format", "json"),
        ("response_format", {"type": "json_schema"}), ("response_format", {"type": "xml"}), ("presence_penalty", False),
        ("logprobs", 1), ("top_logprobs", 21), ("messages", {}), ("messages", "hi"), ("model", 3), ("user", 5),
        ("metadata", "x"), ("history", "cut"), ("kept_patches", "yes"), ("repetition_penalty", 0),
    ],
)  # fmt: skip
def test_types_and_ranges_are_checked_and_the_field_is_named(field, value):
    error = refused({field: value, **({"logprobs": True} if field == "top_logprobs" else {})})
    assert (error.status, error.param) == (400, field)
    assert any(word in error.message for word in ("should", "expected", "give", "empty"))


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"temprature": 1}, "temprature", "did you mean temperature?"),
        ({"stream_options": {"include_usge": True}}, "stream_options.include_usge", "did you mean include_usage"),
        ({"messages": []}, "messages", "no message of the user"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "messages", "no message of the user"),
        ({"messages": [*HELLO, {"role": "system", "content": "x"}]}, "messages[1].role", "is the first message"),
        ({"messages": [{"role": "tools", "content": "x"}]}, "messages[0].role", "expected one of"),
        ({"messages": [{"role": "tool", "tool_call_id": "a", "content": "x"}]}, "messages[0].role", "is tool: tools, "),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "no content"),
        ({"messages": [{"role": "user", "content": ""}]}, "messages[0].content", "empty"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "expected a text or a list"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "messages[0].content[0].type", "should be"),
        ({"messages": [{"role": "user", "content": "x", "nam": "y"}]}, "messages[0].nam", "unknown field"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        ({"tools": [{}], "tool_choice": "required"}, "tools", "start the server with --engine llama.cpp"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "differ"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(body, param, said):
    error = refused(body)
    assert (error.status, error.param) == (400, param)
    assert said in error.message


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        (b"", None, "not JSON"),
        (b"{", None, "not JSON"),
        (b"\xff{}", None, "not UTF-8"),
        (b"[]", None, "a list, expected an object"),
        (b'"x"', None, "a text, expected an object"),
        (b"[" * 10_000, None, "nested deeper"),
        (b'{"stop": %s}' % (b"[" * 10_000 + b"]" * 10_000), None, "nested deeper"),
        (b'{"stop": %s}' % (b"[" * 600 + b"]" * 600), None, "nested deeper"),
        (b'{"temperature": NaN}', None, "NaN"),
        (b'{"temperature": -Infinity}', None, "Infinity"),
        (b'{"temperature": 1e999}', None, "too large"),
        (b'{"seed": %s}' % (b"9" * 5000), None, "64 bits"),
        (b'{"stop": "\\ud800"}', None, "half of a character"),
        (b'{"metadata": {"\\udfff": 1}}', None, "half of a character"),
        (b'{"metadata": {"a": 1, "a": 2}}', None, "twice"),
        (b'{"seed": 1, "seed": 2}', None, "twice"),
    ],
)
def test_what_json_may_spell_and_no_field_can_take_is_refused(body, param, said):
    error = refused(body)
    assert (error.status, error.param, said in error.message) == (400, param, True), error.message
    assert len(error.message) < 300


def test_what_has_one_meaning_is_read():
    roles = [("system", ""), ("assistant", "Hi!"), ("user", "a"), ("user", "b"), ("assistant", "So")]
    ask = ChatAsk.read({
        "messages": [{"role": role, "content": text} for role, text in roles],
        "seed": 2**40 + 3, "max_tokens": -1, "tools": [], "tool_choice": "auto", "min_p": 0,
    })  # fmt: skip
    assert [(one.role, one.text) for one in ask.messages] == [
        ("assistant", "Hi!"), ("user", "a\n\nb"), ("assistant", "So"),
    ]  # fmt: skip
    assert (ask.seed, ask.most_new, ChatAsk.read({"messages": HELLO, "seed": -1}).seed) == (3, None, None)
    form = {"type": "json_object", "value": {"enum": ["yes"]}}  # as clients of Hugging Face write it
    assert ChatAsk.read({"messages": HELLO, "response_format": form}).response_format == form["value"]


@pytest.mark.parametrize(
    ("prompt", "param"),
    [([], "prompt"), ([[]], "prompt[0]"), ([1, "a"], "prompt"), (["a", 1], "prompt[1]"), ([True], "prompt[0]"),
     ([-1], "prompt"), ({}, "prompt"), (5, "prompt"), (["a"] * 257, "prompt"), (None, "prompt")],
)  # fmt: skip
def test_prompts_of_another_form_are_refused(prompt, param):
    with pytest.raises(RequestError) as caught:
        text(prompt=prompt)
    assert caught.value.param == param


def test_a_field_of_the_other_route_is_unknown_here():
    assert refused({"echo": True}).param == "echo"
    with pytest.raises(RequestError, match="unknown field"):
        text(messages=HELLO)


# --------------------------------------------------------------------------- any body

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=9),
    st.sampled_from(["user", "text", "none"]), st.sampled_from([2**31, 2**63, -1, 0, 1, -0.0, 1e308, "data:", "\x00"]),
)  # fmt: skip
INSIDE = st.sampled_from(["role", "content", "type", "text", "image_url", "url", "include_usage", "x"])
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(INSIDE, inner, max_size=3)),
    max_leaves=8,
)
NAMES = st.one_of(st.sampled_from(sorted(ChatAsk.model_fields | CompletionAsk.model_fields)), st.text(max_size=6))
BODIES = st.one_of(
    st.binary(max_size=40),
    st.dictionaries(NAMES, VALUES, max_size=4).map(lambda fields: json.dumps(fields).encode()),
    st.dictionaries(NAMES, VALUES, max_size=3).map(
        lambda fields: json.dumps({"messages": HELLO, "prompt": [1], **fields}).encode()
    ),
)


def outcome(body: bytes, kind: type[ChatAsk | CompletionAsk]) -> ChatAsk | CompletionAsk | RequestError:
    try:
        return kind.read(parse_body(body))
    except RequestError as error:
        return error


@pytest.mark.promise("serving.bodies")
@given(BODIES)
@settings(deadline=None, max_examples=150)
def test_any_body_is_a_checked_ask_or_an_error_of_the_protocol(body):
    for kind in (ChatAsk, CompletionAsk):
        found = outcome(body, kind)
        if isinstance(found, RequestError):
            assert (found.status, len(found.message) < 600) == (400, True)
            json.dumps(found.to_json(), ensure_ascii=False).encode()
        else:
            assert 1 <= found.n <= 16
