"""llama.cpp's server in front of a run: its answers beside ours, what it is started with, and what is refused."""

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.helpers.families import Finished
from unpad.cli.main import app
from unpad.errors import RecipeError, UnpadError
from unpad.inference.chat import Conversation
from unpad.inference.loaded import load
from unpad.serving.limits import Limits
from unpad.serving.llama import FOLDER, Llama, Open, compared, most_rows
from unpad.serving.served import CHAT, COMPLETIONS, RunOpening

pytestmark = pytest.mark.promise("serving.llama")
WHOLE = Llama(weights="f32")


@pytest.fixture
def folder(finished: Finished, tmp_path: Path) -> Path:
    """A copy of a tiny run of conversations, into which files may be written."""
    return Path(shutil.copytree(finished("conversations").run, tmp_path / "demo"))


def test_greedy_answers_are_those_of_our_engine_and_a_token_is_asked_for(folder):
    served, limits = RunOpening(str(folder)).open(), Limits(rows=2, tokens=("secret",))
    with WHOLE.serving(served, limits, 0, 1) as server:
        assert "its greedy answer is that of unpad's engine" in compared(served, server)
        with pytest.raises(RecipeError, match="Invalid API Key"):
            Open(server.address).ask(COMPLETIONS, {"prompt": "小猫"})
        form = {"type": "json_schema", "json_schema": {"schema": {"enum": ["火车"]}}}
        asked = {"messages": [{"role": "user", "content": "小猫"}], "response_format": form, "max_tokens": 40}
        with server.ask(CHAT, asked) as response:
            said = json.load(response)
            assert response.headers["Access-Control-Allow-Origin"] == ""
        assert (said["model"], json.loads(said["choices"][0]["message"]["content"])) == ("demo", "火车")
        with server.ask(CHAT, {**asked, "response_format": None, "ignore_eos": True, "max_tokens": 999}) as response:
            assert json.load(response)["usage"]["total_tokens"] == served.context
        with server.ask("/v1/embeddings", {"input": ["小猫", "火车"]}) as response:
            first, other = (np.array(one["embedding"]) for one in json.load(response)["data"])
        assert abs(first @ other) < 1 - 1e-3
        assert np.allclose([first @ first, other @ other], 1)
        for parameter in served.run.model.parameters():
            parameter.data.neg_()
        assert "leaves that of unpad's engine after" in compared(served, server)
    with pytest.raises(RecipeError, match="does not answer"):
        server.ask("/health", {})


def test_the_file_is_written_once_and_settings_that_nobody_gave_suit_the_run(folder):
    served = RunOpening(str(folder)).open()
    file = WHOLE.file(served)
    written = file.stat().st_mtime_ns
    assert (WHOLE.file(served), file.stat().st_mtime_ns) == (file, written)
    assert list((folder / FOLDER).glob("*.gguf")) == [file]
    assert [RunOpening(str(folder), threads=asked).num_threads(served) for asked in (None, 3)] == [1, 3]
    model = served.run.model
    row = 4 * sum(block.attention.to_qkv.out_features - model.config.width for block in model.blocks) // 2
    assert [most_rows(model, 2 * row * served.context * number) for number in (0, 3)] == [1, 3]


def test_a_conversation_is_continued_by_it(folder):
    run = load(str(folder))
    with WHOLE.conversing(run) as answer:
        talks = [
            Conversation(run.generator, run.tokenizer, run.recipe.data.template, run.recipe.generate, answer=one)
            for one in (None, answer)
        ]
        for text in ("小猫喜欢热茶。", "老师", "那么呢？"):
            said = []
            for talk in talks:
                with closing(talk.reply(text)) as pieces:
                    said.append("".join(pieces))
            assert said[0] == said[1]


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Path]:
    """A llama-server that notes its options and answers that it is well."""
    path = tmp_path / "llama-server"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$0.py" "$@"\n')  # no first line names a path with blanks
    (tmp_path / "llama-server.py").write_text(
        "import http.server, json, os, sys\n"
        "options = {**dict(zip(sys.argv[1::2], sys.argv[2::2])), 'key': os.environ.get('LLAMA_API_KEY')}\n"
        f"open({str(tmp_path / 'options.json')!r}, 'w').write(json.dumps(options))\n"
        "class Health(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n        self.send_response(200); self.end_headers()\n"
        "    def log_message(self, *words):\n        pass\n"
        "http.server.HTTPServer(('127.0.0.1', int(sys.argv[sys.argv.index('--port') + 1])), Health).serve_forever()\n"
    )
    path.chmod(0o755)
    return path


def test_a_program_gets_the_options_and_ends_with_the_server(folder, program, tmp_path):
    served = RunOpening(str(folder), "name").open()
    asked = {"min_p": 0.1, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    vars(served)["settings"] = served.settings.model_copy(update=asked)
    with Llama(str(program), "q8_0").serving(served, Limits(rows=3, tokens=("a", "b")), 0, 2) as server:
        options = json.loads((tmp_path / "options.json").read_text())
    assert options.pop("--model").endswith("-q8_0.gguf")
    assert options == {
        "--alias": "name", "--host": "127.0.0.1", "--port": server.address.rpartition(":")[2], "--parallel": "3",
        "--ctx-size": str(3 * served.context), "--threads": "2", "key": "a,b", "--temp": "0.0", "--top-k": "0",
        "--top-p": "1.0", "--min-p": "0.1", "--presence-penalty": "0.5", "--frequency-penalty": "0.25",
        "--repeat-penalty": "1.0", "--repeat-last-n": "-1",
    }  # fmt: skip
    assert server.has_ended()
    program.write_text("#!/bin/sh\nexit 3\n")
    with (
        pytest.raises(RecipeError, match="does not answer as llama-server"),
        Llama(str(program)).serving(served, Limits(), 0, 1),
    ):
        pass


def test_what_it_does_not_run_is_refused_before_anything_is_written(finished, folder, tmp_path, monkeypatch):
    patients = RunOpening(str(finished("patients").run)).open()
    with pytest.raises(RecipeError, match="this one is of kind patients"), WHOLE.serving(patients, Limits(), 0, 1):
        pass
    with pytest.raises(UnpadError, match="there is no engine lama"):
        Llama("lama").check()
    for engine, option in (("llama.cpp", "--drain=3"), ("unpad", "--weights=f32")):
        said = CliRunner().invoke(app, ["serve", str(folder), "--engine", engine, option])
        assert f"the engine {engine} has no {option.partition('=')[0]}" in str(said.exception)
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    with pytest.raises(RecipeError, match="needs the package xllamacpp") as caught:
        WHOLE.check()
    assert caught.value.fix == "pip install 'unpad[llama]'"
    assert not (folder / FOLDER).exists()
