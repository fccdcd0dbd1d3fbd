"""Clients of other people in front of `unpad serve`, by both engines: which answers reach them, as a table.

    python benchmarks/clients.py

The model is tiny and has learnt to call a tool whatever it is asked, as what is looked at is the form of answers alone.
Clients that are not installed are left out.
"""

import json
import os
import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.helpers.chat_folder import byte_level

ENGINES = ("unpad", "llama.cpp")
KINDS = ("plain", "stream", "structured", "tools")
MOST = 200  # tokens of an answer
TEMPLATE = """\
{%- if tools %}{{- '<|im_start|>system\\n<tools>\\n' }}{% for tool in tools %}{{- (tool | tojson) + '\\n' }}{% endfor %}
{{- '</tools><|im_end|>\\n' }}{% endif %}
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}{% endfor %}{{- '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
CALL = '<tool_call>\n{"name": "say", "arguments": {"answer": "yes"}}\n</tool_call>'
ASKED = "Is it so?"
Tries = tuple[Callable[[], Any] | None, ...]  # one a kind; each returns what has to be there


class Answer(BaseModel):
    """The answer."""

    answer: Literal["yes", "no"]


SCHEMA = Answer.model_json_schema() | {"additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "say", "description": "Say it.", "parameters": SCHEMA}}
FORM = {"type": "json_schema", "json_schema": {"name": "Answer", "schema": SCHEMA, "strict": True}}


def unpad(*words: str | Path) -> None:
    subprocess.run([sys.executable, "-m", "unpad", *words], check=True, stdout=subprocess.DEVNULL)


def make_run(folder: Path) -> Path:
    """The run of the model."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level([CALL] * 5), eos_token="<|im_end|>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "hf")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Qwen2Config(vocab_size=320, num_key_value_heads=4, max_position_embeddings=4096, **sizes)
    Qwen2ForCausalLM(config).save_pretrained(folder / "hf")
    talks = []
    for number in range(120):  # half of them below a system text as long as one of tools
        above = f"<tools>\n{json.dumps(TOOL)[number:]}\n</tools>" if number % 2 else "Say it."
        said = {"system": above, "user": f"{ASKED} {number}"[: 9 + number % 5], "assistant": CALL}
        talks.append([{"role": role, "content": text} for role, text in said.items()][number % 3 == 0 :])
    (folder / "talks.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    unpad("import", folder / "hf", "--out", folder / "random")
    settings = ("optim.lr=5e-3", "train.threads=1", "train.max_steps=250", "train.max_epochs=100")
    data = f"data.chat={folder / 'talks.jsonl'}", "plan.tokens_per_step=512"
    unpad("train", folder / "random" / "recipe.yaml", *data, *settings, "--out", folder / "tiny")
    return folder / "tiny"


@contextmanager
def served(run: Path, engine: str) -> Iterator[str]:
    """The address of a server of a run."""
    command = [sys.executable, "-m", "unpad", "serve", str(run), "--port", "0", "--engine", engine]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None, "it is a pipe"
        try:
            yield f"{process.stdout.readline().strip()}/v1"
        finally:
            process.terminate()


def of_openai(ask: Callable[..., Any]) -> Tries:
    """Tries of what takes OpenAI's fields and answers in its objects."""

    def message(**fields: Any) -> Any:
        said = ask(messages=[{"role": "user", "content": ASKED}], max_tokens=MOST, **fields)
        return said if fields.get("stream") else said.choices[0].message

    return (
        lambda: message().content,
        lambda: "".join(event.choices[0].delta.content or "" for event in message(stream=True) if event.choices),
        lambda: Answer.model_validate_json(message(response_format=FORM).content),
        lambda: json.loads(message(tools=[TOOL], tool_choice="required").tool_calls[0].function.arguments),
    )


def by_openai(url: str) -> Tries:
    from openai import OpenAI

    return of_openai(partial(OpenAI(base_url=url, api_key="none").chat.completions.create, model="tiny"))


def by_curl(url: str) -> Tries:
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

    def ask(**fields: Any) -> Any:
        command = ["curl", "-sfN", f"{url}/chat/completions", "--json", json.dumps(fields)]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        events = [json.loads(line.removeprefix("data: ")) for line in said.splitlines() if "{" in line]
        if fields.get("stream"):
            return [ChatCompletionChunk.construct(**event) for event in events]
        return ChatCompletion.construct(**events[0])

    return of_openai(ask)


def by_huggingface_hub(url: str) -> Tries:
    from huggingface_hub import InferenceClient

    return of_openai(partial(InferenceClient(base_url=url, api_key="none").chat_completion, model="tiny"))


def by_litellm(url: str) -> Tries:
    import litellm

    return of_openai(partial(litellm.completion, "openai/tiny", base_url=url, api_key="none"))


def by_langchain(url: str) -> Tries:
    from langchain_openai import ChatOpenAI

    chat: Any = ChatOpenAI(base_url=url, api_key="none", model="tiny", max_tokens=MOST)
    return (
        lambda: chat.invoke(ASKED).content,
        lambda: "".join(one.content for one in chat.stream(ASKED)),
        lambda: chat.with_structured_output(Answer, method="json_schema").invoke(ASKED),
        lambda: chat.bind_tools([Answer], tool_choice="required").invoke(ASKED).tool_calls,
    )


def by_llama_index(url: str) -> Tries:
    from llama_index.llms.openai_like import OpenAILike

    chat: Any = OpenAILike(model="tiny", api_base=url, api_key="none", max_tokens=MOST, is_chat_model=True)
    return lambda: str(chat.complete(ASKED)), lambda: "".join(one.delta for one in chat.stream_complete(ASKED))


def by_pydantic_ai(url: str) -> Tries:
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    def ask(**fields: Any) -> Any:
        model = OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=url, api_key="none"))
        return Agent(model, model_settings={"max_tokens": MOST}, **fields)

    return (
        lambda: ask().run_sync(ASKED).output,
        lambda: ask().run_stream_sync(ASKED).get_output(),
        lambda: ask(output_type=NativeOutput(Answer)).run_sync(ASKED).output,
        lambda: ask(output_type=Answer).run_sync(ASKED).output,
    )


def by_instructor(url: str) -> Tries:
    import instructor
    from openai import OpenAI

    def ask(mode: Any) -> Any:
        client = instructor.from_openai(OpenAI(base_url=url, api_key="none"), mode=mode)
        asked: Any = [{"role": "user", "content": ASKED}]
        return client.create(response_model=Answer, messages=asked, model="tiny", max_tokens=MOST, max_retries=0)

    return None, None, lambda: ask(instructor.Mode.JSON_SCHEMA), lambda: ask(instructor.Mode.TOOLS)


def by_llm(url: str) -> Tries:
    import llm  # noqa: F401

    def ask(*options: str) -> str:
        with tempfile.TemporaryDirectory() as folder:
            said = f"- {{model_id: tiny, model_name: tiny, api_base: '{url}', supports_schema: true}}\n"
            (Path(folder) / "extra-openai-models.yaml").write_text(said)
            command = [sys.executable, "-m", "llm", "-m", "tiny", ASKED, "--key", "none", *options]
            settings = {**os.environ, "LLM_USER_PATH": folder}
            return subprocess.run(command, check=True, capture_output=True, text=True, env=settings).stdout

    return partial(ask, "--no-stream"), ask, lambda: Answer(**json.loads(ask("--schema", json.dumps(SCHEMA))))


def answered(client: Callable[[str], Tries], url: str) -> list[str]:
    """What came of each kind: "yes", or the kind of the error; raises ImportError without the client."""
    found = []
    for kind, work in zip(KINDS, (*client(url), None, None), strict=False):
        try:
            found.append("–" if work is None else "yes" if work() else "empty")
        except Exception as error:
            print(f"{client.__name__} {kind}: {error!r}"[:400], file=sys.stderr)
            found.append("no")
    return found


def main() -> None:
    ArgumentParser(description=__doc__).parse_args()
    rows: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        run = make_run(Path(folder))
        for engine in ENGINES:
            with served(run, engine) as url:
                for client in [function for name, function in globals().items() if name.startswith("by_")]:
                    try:
                        rows.setdefault(client.__name__.removeprefix("by_"), []).extend(answered(client, url))
                    except ImportError as error:
                        print(f"{client.__name__}: {error}", file=sys.stderr)
    heads = [f"{kind}, {engine}" for engine in ENGINES for kind in KINDS]
    print("| client |", " | ".join(heads), "|\n" + "|---" * (len(heads) + 1) + "|")
    for name, row in rows.items():
        if row:
            print(f"| {name} |", " | ".join(row), "|")


if __name__ == "__main__":
    main()
