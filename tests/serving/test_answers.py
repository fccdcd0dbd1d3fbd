"""Answers through HTTP: those of `unpad generate` and `unpad chat`, alone or beside others, streamed or not."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from openai import NotFoundError, OpenAI

from tests.helpers.families import Finished
from tests.helpers.serving import Running, running
from unpad.data.sources.example import Turn
from unpad.inference.chat import Conversation
from unpad.inference.loaded import LoadedRun, generation_precision, load

DRAWN: dict[str, Any] = {"temperature": 1.0, "seed": 5, "max_tokens": 12}
PETS = {"type": "json_schema", "json_schema": {"name": "pet", "schema": {"enum": ["猫", 12, None]}, "strict": True}}
PENALISED = {"presence_penalty": 1, "logit_bias": {"9": 2}, "extra_body": {"min_p": 0.01, "ignore_eos": True}}
MORE: list[dict[str, Any]] = [{}, {"response_format": PETS}, PENALISED]
ASKS = [("小猫", 1), ("老师看见一座桥。", 2), ("3、月亮走过很远的山。爷爷想起热茶。", 3), ("x", 4)]


@pytest.fixture(scope="module")
def run(finished: Finished) -> LoadedRun:
    return load(finished("conversations").run)


@pytest.fixture(scope="module")
def client(chats: Running) -> OpenAI:
    return OpenAI(base_url=f"{chats.url}/v1", api_key="none", max_retries=0)


def said_by_chat(run: LoadedRun, turns: list[str], **settings: Any) -> str:
    """The last reply of `unpad chat` to messages, of which it gave every other one."""
    chosen = run.recipe.generate.model_copy(update=settings)
    talk = Conversation(
        run.generator, run.tokenizer, run.recipe.data.template, chosen,
        precision=generation_precision(chosen), advance_seed=False,
    )  # fmt: skip
    reply = ""
    for text in turns:
        reply = "".join(talk.reply(text))
    return reply


# --------------------------------------------------------------------------- equal to the commands, and to alone


@pytest.mark.promise("serving.commands")
@pytest.mark.parametrize(("text", "seed"), ASKS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_is_that_of_chat_with_the_same_settings_and_seed(chats, run, text, seed, temperature):
    told = said_by_chat(run, [text], temperature=temperature, seed=seed, max_new_tokens=12)
    assert chats.texts(text=text, temperature=temperature, seed=seed, max_tokens=12) == [told]


def test_a_conversation_goes_on_as_in_chat(chats, run):
    first = said_by_chat(run, ["小猫"], max_new_tokens=4)
    second = said_by_chat(run, ["小猫", "为什么"], max_new_tokens=4)
    messages = [("user", "小猫"), ("assistant", first), ("user", "为什么")]
    body = {"messages": [{"role": role, "content": said} for role, said in messages], "max_tokens": 4}
    assert chats.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"] == second


def test_a_reply_that_has_begun_is_continued(chats, run):
    asked = {"role": "user", "content": "小猫"}
    whole = chats.post("/v1/chat/completions", {"messages": [asked], "max_tokens": 8}).json()["choices"][0]
    said = whole["message"]["content"]
    begun = run.tokenizer.decode(run.tokenizer.encode_batch([said])[0][:2])
    body = {"messages": [asked, {"role": "assistant", "content": begun}], "max_tokens": 6}
    assert begun + chats.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"] == said


def test_a_request_without_a_seed_draws_anew_and_its_answer_tells_the_seed(chats, finished):
    body = {"messages": [{"role": "user", "content": "小猫"}], "temperature": 1.0, "max_tokens": 12}
    first, second = (chats.post("/v1/chat/completions", body).json() for _ in range(2))
    assert first["unpad"]["seed"] != second["unpad"]["seed"]
    again = chats.post("/v1/chat/completions", {**body, "seed": first["unpad"]["seed"]}).json()
    assert again["choices"] == first["choices"]
    with running(finished("conversations").run, seed=5) as made:
        assert [made.post("/v1/chat/completions", body).json()["unpad"]["seed"] for _ in range(2)] == [5, 5]


@pytest.mark.promise("serving.commands")
def test_completions_are_those_of_generate(chats, run):
    texts = [text for text, _ in ASKS]
    told = run.generate(texts, temperature=1.0, seed=5, max_new_tokens=12)
    answer = chats.post("/v1/completions", {"prompt": texts, **DRAWN}).json()
    assert [choice["text"] for choice in answer["choices"]] == told
    ids = [run.prompt_ids(text) for text in texts]
    assert [
        choice["text"] for choice in chats.post("/v1/completions", {"prompt": ids, **DRAWN}).json()["choices"]
    ] == told
    assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))


def test_answer_i_of_n_draws_with_the_seed_after_it(chats):
    three = chats.texts(n=3, temperature=1.0, seed=7, max_tokens=12)
    assert three == [text for seed in (7, 8, 9) for text in chats.texts(temperature=1.0, seed=seed, max_tokens=12)]
    assert len(set(three)) == 3


def one(client: OpenAI, number: int, streamed: bool) -> tuple[str, list[tuple[str, float]]]:
    """Text, tokens and scores of an answer by the official client."""
    text = "老师看见一座桥。" * (1 + number % 4) + str(number)
    fields: dict[str, Any] = {
        "model": "demo", "messages": [{"role": "user", "content": text}], "seed": number, "max_tokens": 8,
        "temperature": number % 2, "logprobs": True, "top_logprobs": 2, **MORE[number % 3],
    }  # fmt: skip
    if not streamed:
        choice = client.chat.completions.create(**fields).choices[0]
        return choice.message.content or "", [(token.token, token.logprob) for token in choice.logprobs.content]
    said, scores = "", []
    for chunk in client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            said += choice.delta.content or ""
            scores += [(token.token, token.logprob) for token in choice.logprobs.content] if choice.logprobs else []
    return said, scores


@pytest.mark.promise("serving.alone")
def test_many_at_once_equal_each_alone_text_and_scores_streamed_or_not(client):
    numbers = range(12)
    alone = [one(client, number, streamed=False) for number in numbers]
    assert len({text for text, _ in alone}) > 4
    assert {json.loads(text) for text, _ in alone[1::3]} <= set(PETS["json_schema"]["schema"]["enum"])
    for streamed in (False, True):
        with ThreadPoolExecutor(12) as pool:
            together = list(pool.map(lambda number, s=streamed: one(client, number, s), numbers))
        assert together == alone


def test_formats_biases_and_the_end_are_honoured_or_refused_by_name(chats):
    body = {"prompt": ["小猫", "x"], "max_tokens": 40, "temperature": 1, "response_format": PETS}
    answers = chats.post("/v1/completions", body).json()["choices"]
    assert {json.loads(choice["text"]) for choice in answers} <= {"猫", 12, None}
    assert {choice["finish_reason"] for choice in answers} == {"stop"}
    said = chats.chat(response_format={"type": "json_object"}, max_tokens=1).json()["choices"][0]
    assert (said["message"]["content"][0], said["finish_reason"]) == ("{", "length")
    assert chats.chat(ignore_eos=True, max_tokens=50).json()["usage"]["completion_tokens"] == 50
    id = chats.service.served.run.tokenizer.encode_batch(["猫"])[0][0]
    assert set(chats.texts(logit_bias={str(id): 100}, max_tokens=3)[0]) == {"猫"}
    unknown = {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}
    for field, fields in (
        ("response_format", {"response_format": unknown}), ("logit_bias", {"logit_bias": {"99999": 1}}),
        ("ignore_eos", {"response_format": PETS, "ignore_eos": True}),
    ):  # fmt: skip
        refused = chats.chat(**fields)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)


# --------------------------------------------------------------------------- the protocol's forms


def test_the_official_client_reads_models_answers_and_errors(client):
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").owned_by == "unpad"
    with pytest.raises(NotFoundError, match="use demo") as caught:
        client.chat.completions.create(model="gpt-4o", messages=[{"role": "user", "content": "x"}])
    assert caught.value.code == "model_not_found"
    answer = client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "小猫"}], **DRAWN)
    assert answer.object == "chat.completion"
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_equal_requests_have_equal_bytes_but_for_id_and_time(chats):
    one, other = (chats.chat(**DRAWN, logprobs=True).json() for _ in range(2))
    for answer in (one, other):
        del answer["id"], answer["created"], answer["usage"]["prompt_tokens_details"]
    assert json.dumps(one) == json.dumps(other)
    assert one["system_fingerprint"].startswith("unpad-")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_the_events_of_a_stream_are_the_whole_answer(chats, path):
    is_chat = "chat" in path
    asked = {"messages": [{"role": "user", "content": "小猫"}]} if is_chat else {"prompt": "小猫"}
    body = {**asked, **DRAWN, "n": 2, "logprobs": True if is_chat else 1, "stream_options": {"include_usage": True}}
    whole = chats.post(path, body).json()
    events = chats.events(path, body)
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    for index, choice in enumerate(whole["choices"]):
        mine = [one for event in events for one in event["choices"] if one["index"] == index]
        said = [one["delta"].get("content", "") if is_chat else one["text"] for one in mine]
        assert "".join(said) == (choice["message"]["content"] if is_chat else choice["text"])
        assert [one["finish_reason"] for one in mine if one["finish_reason"]] == [choice["finish_reason"]]
        reported = [one["logprobs"] for one in mine if one["logprobs"]]
        key = "content" if is_chat else "token_logprobs"
        assert [token for part in reported for token in part[key]] == choice["logprobs"][key]
        if is_chat:
            assert mine[0]["delta"] == {"role": "assistant", "content": ""}
    assert [event["unpad"] for event in events if "unpad" in event] == [whole["unpad"]]


def test_a_text_is_scored_as_the_model_scores_it(chats, run):
    """What evaluation harnesses send: `echo`, `logprobs`, and no new token or one."""

    from unpad.batching.batch import from_prompts
    from unpad.inference.engine import running

    ids = run.tokenizer.encode_batch(["小猫喜欢红色的花。"])[0]
    body = {"prompt": [run.tokenizer.bos_id, *ids], "echo": True, "logprobs": 5, "temperature": 0}
    scored = [chats.post("/v1/completions", {**body, "max_tokens": num}).json() for num in (0, 1)]
    found = scored[0]["choices"][0]
    assert found["text"] == "小猫喜欢红色的花。"
    assert scored[0]["usage"]["completion_tokens"] == 0
    logprobs = found["logprobs"]
    assert logprobs["token_logprobs"][0] is None
    precision = generation_precision(run.recipe.generate)
    with running(run.generator, precision):
        hidden = run.generator(from_prompts([[run.tokenizer.bos_id, *ids]]))
        expected = run.generator.logits(hidden).double().log_softmax(-1)
    wanted = [float(expected[place, id]) for place, id in enumerate(ids)]
    assert logprobs["token_logprobs"][1:] == pytest.approx(wanted, abs=0.05 if precision == "bf16" else 1e-5)
    for top, place in zip(logprobs["top_logprobs"][1:], range(len(ids)), strict=True):
        assert max(top.values()) == pytest.approx(float(expected[place].max()), abs=0.05)
    told = [found["text"][at:] for at in logprobs["text_offset"]]
    assert all(rest.startswith(token) for rest, token in zip(told[1:], logprobs["tokens"][1:], strict=True)
               if not token.startswith(("bytes:", "<|")))  # fmt: skip
    one_more = scored[1]["choices"][0]
    assert one_more["text"].startswith(found["text"])
    assert one_more["logprobs"]["token_logprobs"][: len(ids) + 1] == logprobs["token_logprobs"]


def test_log_probabilities_have_the_bytes_of_tokens_and_as_many_likeliest_ones_as_asked(chats):
    answer = chats.chat("小猫", **DRAWN, logprobs=True, top_logprobs=3).json()["choices"][0]
    tokens = answer["logprobs"]["content"]
    spelled = bytes(byte for token in tokens for byte in token["bytes"] or [])
    assert spelled.decode(errors="replace") == answer["message"]["content"]
    for token in tokens:
        likeliest = [one["logprob"] for one in token["top_logprobs"]]
        assert len(likeliest) == 3
        assert likeliest == sorted(likeliest, reverse=True)
        assert token["logprob"] <= likeliest[0] + 1e-9 <= 1e-6
    assert np.exp([token["logprob"] for token in tokens]).max() < 1


# --------------------------------------------------------------------------- where an answer ends


def test_an_answer_ends_before_a_stop_text_also_across_tokens(chats):
    whole = chats.texts(text="小猫", **{**DRAWN, "max_tokens": 30})[0]
    stop = whole[len(whole) // 2 : len(whole) // 2 + 3]
    assert len(stop) == 3
    before = whole.partition(stop)[0]
    for fields in ({"stop": stop}, {"stop": ["不在", stop]}):
        answer = chats.chat("小猫", **{**DRAWN, "max_tokens": 30}, **fields, logprobs=True).json()["choices"][0]
        assert (answer["message"]["content"], answer["finish_reason"]) == (before, "stop")
        spelled = b"".join(bytes(token["bytes"] or []) for token in answer["logprobs"]["content"])
        assert spelled.decode(errors="replace").startswith(before)
        body = {"messages": [{"role": "user", "content": "小猫"}], **DRAWN, "max_tokens": 30, **fields}
        events = chats.events("/v1/chat/completions", body)
        assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == before


def test_an_answer_ends_with_the_context(chats, run):
    answer = chats.chat("小猫", temperature=0, max_tokens=10_000).json()
    room = run.generator.config.longest - answer["usage"]["prompt_tokens"] + 1
    assert answer["choices"][0]["finish_reason"] in ("length", "stop")
    assert answer["usage"]["completion_tokens"] <= room


def test_a_long_conversation_is_refused_or_trimmed_as_chat_does(chats):
    turns = [("user", "小猫喜欢红色的花。"), ("assistant", "小猫看见一座桥。")] * 6 + [("user", "为什么")]
    body = {"messages": [{"role": role, "content": said} for role, said in turns], "max_tokens": 4}
    refused = chats.post("/v1/chat/completions", body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    trimmed = chats.post("/v1/chat/completions", {**body, "history": "trim"}).json()
    assert 0 < trimmed["unpad"]["left_out_messages"] < 12
    left = turns[trimmed["unpad"]["left_out_messages"] :]
    shorter = {"messages": [{"role": role, "content": said} for role, said in left], "max_tokens": 4}
    assert chats.post("/v1/chat/completions", shorter).json()["choices"] == trimmed["choices"]


@pytest.mark.promise("serving.commands")
@pytest.mark.parametrize("most", [1, 16, 500])
def test_the_turns_that_are_left_out_are_those_that_chat_leaves_out(chats, run, most):
    said = [
        turn for number in range(9) for turn in (Turn("user", f"小猫{number}"), Turn("assistant", "小猫看见一座桥。"))
    ]
    settings = run.recipe.generate.model_copy(update={"max_new_tokens": most})
    precision = generation_precision(settings)
    talk = Conversation(run.generator, run.tokenizer, run.recipe.data.template, settings, precision=precision)
    talk.history = list(said)
    replied = "".join(talk.reply("为什么"))
    messages = [{"role": turn.role, "content": turn.content} for turn in [*said, Turn("user", "为什么")]]
    answer = chats.post("/v1/chat/completions", {"messages": messages, "max_tokens": most, "history": "trim"}).json()
    assert answer["unpad"]["left_out_messages"] == talk.num_forgotten > 0
    assert answer["choices"][0]["message"]["content"] == replied
