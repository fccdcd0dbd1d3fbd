"""The verb: what it needs, what it refuses, and a process that loads, answers and ends."""

import asyncio
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.serving import running, wait_for
from unpad.errors import NOT_PROVED, CheckpointError, ProofError, RecipeError
from unpad.inference import engine
from unpad.serving.limits import Limits, bound
from unpad.serving.served import RunOpening, fingerprint, prove
from unpad.serving.server import Listening, Server, run
from unpad.serving.service import Service

ROOT = Path(__file__).parents[2]


def test_without_the_extra_three_lines_say_what_to_install(unpad, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "uvicorn" else found(name, *rest)
    )
    told = unpad("serve", "any")
    assert (told.code, told.out) == (2, "")
    lines = told.err.splitlines()
    assert len(lines) == 3
    assert "uvicorn" in lines[0]
    assert lines[2] == "  do: pip install 'unpad[serve]'"


def test_nothing_of_the_extra_is_imported_by_the_package_or_the_help():
    script = (
        "import sys, unpad, unpad.cli, unpad.cli.serving\n"
        "try:\n    unpad.cli.app(['serve', '--help'], prog_name='unpad')\nexcept SystemExit:\n    pass\n"
        "print({'starlette', 'uvicorn', 'prometheus_client', 'h11', 'torch'} & sys.modules.keys() or 'none')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert "--token-file" in done.stdout
    assert done.stdout.splitlines()[-1] == "none"


def test_a_network_and_a_run_that_is_not_there_are_refused_at_the_start(unpad):
    told = unpad("serve", "any", "--host", "0.0.0.0")
    assert (told.code, "--token-file" in told.err, "--no-token" in told.err) == (2, True, True)
    told = unpad("serve", "any", "--token-file", "absent", code=3)
    told = unpad("serve", "any")
    assert (told.code, 'there is no run "any"' in told.err) == (2, True)


def test_an_address_in_use_is_refused_at_once(chats, finished):
    with pytest.raises(RecipeError, match="cannot listen") as caught, bound("127.0.0.1", chats.port):
        pass
    assert "--port" in caught.value.fix
    with pytest.raises(RecipeError, match="cannot listen"), bound("203.0.113.7", 0):
        pass
    words = ["unpad", "serve", str(finished("conversations").run), "--port", str(chats.port)]
    script = (
        f"import sys\nfrom unpad.cli.main import main\nsys.argv = {words!r}\ntry:\n    main()\n"
        "except SystemExit as end:\n    print(end.code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "2 False\n", "before torch is imported"


def test_a_run_whose_answers_depend_on_others_is_not_served(chats, monkeypatch):
    assert chats.service.served is not None
    make: Any = chats.service._worker._make
    assert "equal each alone" in prove(chats.service.served, make)
    inner = engine.advance

    def mixed(model: Any, cache: Any, tokens: Any) -> Any:
        hidden = inner(model, cache, tokens)
        return hidden + 1e-3 * (len(tokens) - 1)  # what the number of rows must not do

    monkeypatch.setattr(engine, "advance", mixed)
    with pytest.raises(ProofError, match="did not get what each gets alone") as caught:
        prove(chats.service.served, make)
    assert caught.value.exit_code == NOT_PROVED


def test_the_fingerprint_is_of_what_answers_depend_on(chats, finished, monkeypatch):
    served = chats.service.served
    assert fingerprint(served, 256) == chats.service.fingerprint
    weight = next(served.run.model.parameters())
    before = weight.data.view(-1)[0].item()
    weight.data.view(-1)[0] += 1
    assert fingerprint(served, 256) != chats.service.fingerprint
    weight.data.view(-1)[0] = before
    assert fingerprint(served, 256) == chats.service.fingerprint
    with running(finished("conversations").run, name="other") as again:
        assert again.service.fingerprint == chats.service.fingerprint
    monkeypatch.setattr("unpad.nn.native.library.enabled", lambda: False)
    assert fingerprint(served, 256) != fingerprint(served, 32)


def test_a_run_that_cannot_be_loaded_ends_the_server_with_its_error(finished, tmp_path):
    folder = Path(shutil.copytree(finished("conversations").run, tmp_path / "run"))
    for path in (folder / "checkpoints").rglob("*.safetensors"):
        path.write_bytes(b"broken")
    service = Service(Limits())
    with bound("127.0.0.1", 0) as place, pytest.raises(CheckpointError):
        asyncio.run(run(service, Server(service, Listening()), RunOpening(str(folder)), place, print))


@pytest.mark.slow
def test_a_process_tells_its_address_and_ends_with_0_when_it_is_told_to(finished, tmp_path):
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "unpad", "serve", str(finished("conversations").run), "--port", "0", "--name", "x"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=tmp_path, env=variables, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        url = process.stdout.readline().strip()
        assert "model x (chat" in process.stdout.readline()
        assert httpx.get(f"{url}/health").json() == {"status": "ready"}
        body = {"messages": [{"role": "user", "content": "小猫"}], "temperature": 1, "max_tokens": 50, "stream": True}
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            process.send_signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
    assert "POST /v1/chat/completions 200 " in (tmp_path / "log").read_text("utf-8")


def test_a_second_signal_ends_the_process_at_once(monkeypatch):
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    server = Server(Service(Limits()), Listening())
    for _ in range(2):
        assert ended == []
        server.handle_exit(signal.SIGTERM, None)
    assert (server.should_exit, ended) == (True, [128 + signal.SIGTERM])


def test_the_server_says_that_it_loads(finished, monkeypatch):
    go_on, inner = threading.Event(), RunOpening.load
    monkeypatch.setattr(RunOpening, "load", lambda opening: (go_on.wait(60), inner(opening))[1])
    with running(finished("conversations").run, until="loading") as made:
        answer = made.get("/health")
        assert (answer.status_code, answer.json()) == (503, {"status": "loading"})
        refused = made.post("/v1/chat/completions", {"messages": []})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "loading")
        assert refused.headers["retry-after"]
        assert made.get("/metrics").status_code == 200
        go_on.set()
        wait_for(lambda: made.get("/health").json() == {"status": "ready"})
