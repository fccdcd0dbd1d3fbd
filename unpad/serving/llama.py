"""llama.cpp's server in front of a run of texts: for what clients want and our own server does not answer."""

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from unpad.errors import RecipeError
from unpad.inference.chat import Answer
from unpad.inference.loaded import LoadedRun
from unpad.interchange.gguf_file import missing_bos
from unpad.interchange.runs import export_gguf
from unpad.machine import available_memory
from unpad.models.decoder import Decoder
from unpad.run.folder import run_recipe
from unpad.run.report.samples import newest_prompts
from unpad.serving.limits import Limits, bound
from unpad.serving.served import CHAT, COMPLETIONS, RunOpening, Served, add_contents
from unpad.serving.server import SIGNALS, address_of, show
from unpad.terminal.progress import progress

ENGINE = "llama.cpp"  # that of the package xllamacpp
FOLDER = "gguf"  # of a run, with its files for llama.cpp
NUM_COMPARED = 24  # tokens of the answer that is compared
START = 120  # seconds in which a program has to answer
ELSE = "Hello"  # is asked where a run keeps no prompts
PROMISES = "Answers may differ in the last bits with company; equal bits are a promise of unpad's own engine alone."


@dataclass(frozen=True)
class Open:
    """A server that answers.

    Args:
        tokens: of which it asks for one.
        process: that it runs in; None for this one.
    """

    address: str
    tokens: Sequence[str] = ()
    process: "subprocess.Popen[bytes] | None" = None

    def ask(self, path: str, fields: Mapping[str, Any]) -> Any:
        """The open response to a request in JSON.

        Raises:
            RecipeError: the request is refused, or the server has ended.
        """
        asked = Request(f"{self.address}{path}", json.dumps(fields).encode(), {"Content-Type": "application/json"})
        for token in self.tokens[:1]:
            asked.add_header("Authorization", f"Bearer {token}")
        try:
            return urlopen(asked)
        except HTTPError as error:
            raise RecipeError(f"llama.cpp refuses: {error.read(1000).decode(errors='replace')}", where=path) from None
        except URLError as error:
            raise RecipeError(f"llama.cpp does not answer: {error.reason}", where=self.address) from None

    def continued(self, most: int, ids: Sequence[int], seed: int) -> Generator[str, None, None]:
        """The continuation of token ids by at most so many, piece by piece, with the settings of the run."""
        asked = {"prompt": list(ids), "n_predict": most, "seed": seed, "stream": True}
        with self.ask("/completion", asked) as response:
            for line in response:
                if line.startswith(b"data: "):
                    yield json.loads(line[6:])["content"]

    def has_ended(self) -> bool:
        return self.process is not None and self.process.poll() is not None


@dataclass(frozen=True)
class Llama:
    """llama.cpp, and how it computes.

    Args:
        engine: "llama.cpp", or the path of a llama-server.
        weights: type of the matrices, as of `export_gguf`.
    """

    engine: str = ENGINE
    weights: str = "f16"

    def check(self) -> None:
        """Refuse an engine that is not there.

        Raises:
            RecipeError: the package is not installed, or there is no such program.
        """
        if self.engine == ENGINE and find_spec("xllamacpp") is None:
            what = "the engine llama.cpp needs the package xllamacpp, which is not installed"
            raise RecipeError(what, where="--engine", fix="pip install 'unpad[llama]'")
        if self.engine != ENGINE and which(self.engine) is None:
            what = f"there is no engine {self.engine}"
            raise RecipeError(what, where="--engine", fix="use unpad, llama.cpp, or the path of a llama-server")

    @contextmanager
    def serving(self, served: Served, limits: Limits, port: int, threads: int) -> Iterator[Open]:
        """Run a server until the context ends.

        Raises:
            RecipeError: the engine or the address cannot be used, or the run is not one of texts, or has a schema.
            CheckpointError: llama.cpp does not compute the model.
        """
        self.check()
        model, settings = served.run.model, served.settings
        if not isinstance(model, Decoder):
            what = f"llama.cpp answers for runs of texts, and this one is of kind {served.kind}"
            raise RecipeError(what, where=served.name, fix="leave --engine out")
        if settings.json_schema is not None:
            what = "llama.cpp takes the schema of a request, and none of the run"
            raise RecipeError(what, where="generate.json_schema", fix="leave it out, or --engine")
        with bound(limits.host, port) as place:
            address, port = address_of(place), place.getsockname()[1]
        rows = min(limits.rows, most_rows(model, available_memory()))
        options: dict[str, Any] = {
            "model": str(self.file(served)), "alias": served.name, "host": limits.host, "port": port, "parallel": rows,
            "ctx-size": rows * served.context, "threads": threads, "temp": settings.temperature,
            "top-k": settings.top_k, "top-p": settings.top_p, "min-p": settings.min_p,
            "presence-penalty": settings.presence_penalty, "frequency-penalty": settings.frequency_penalty,
            "repeat-penalty": settings.repetition_penalty, "repeat-last-n": -1,
        }  # fmt: skip
        if self.weights == "f32":  # as near to our engine as it can
            options |= {"cache-type-k": "f32", "cache-type-v": "f32", "flash-attn": "off"}
        start = self._inside if self.engine == ENGINE else self._program
        with start(options, Open(address, limits.tokens)) as server:
            yield server

    @contextmanager
    def conversing(self, run: LoadedRun) -> Iterator[Answer]:
        """What continues prompts of a run by a server of its own; raises as `serving`, and for changes of the model."""
        if run.recipe.model != run_recipe(run.folder).model:
            what = "llama.cpp reads the model as it was trained"
            raise RecipeError(what, where=str(run.folder), fix="leave the fields of the model out")
        opening = RunOpening(run)
        served = opening.open()
        with self.serving(served, Limits(rows=1), 0, opening.num_threads(served)) as server:
            yield partial(server.continued, served.settings.max_new_tokens)

    def file(self, served: Served) -> Path:
        """The run's file for llama.cpp, written once for the same weights and the same form of conversations."""
        made_by = f"{version('unpad')} {served.run.recipe.data.template.model_dump_json()}"
        digest = blake2b(made_by.encode(), digest_size=8)
        add_contents(digest, served.run)
        path = served.run.folder / FOLDER / f"{digest.hexdigest()}-{self.weights}.gguf"
        if not path.exists():
            with progress(f"writing {path}"):
                export_gguf(str(served.run.folder), path, None, self.weights)
        return path

    @contextmanager
    def _inside(self, options: Mapping[str, Any], server: Open) -> Iterator[Open]:
        """The server of the package, in threads of this process."""
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path, params.model_alias = options["model"], {options["alias"]}
        params.api_keys = list(server.tokens)
        params.hostnames, params.port = [options["host"]], options["port"]
        params.n_parallel, params.n_ctx, params.fit_params = options["parallel"], options["ctx-size"], False
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options["threads"]
        params.cors_origins, params.verbosity = "", 0  # no page of another site reads an answer
        # Of all tokens, normalised; an older program would then answer nothing else, so it is not asked for them.
        params.embedding, params.pooling_type = True, xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_MEAN
        if options.get("flash-attn") == "off":
            params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
            params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        drawn = params.sampling
        drawn.temp, drawn.top_k, drawn.top_p = options["temp"], options["top-k"], options["top-p"]
        drawn.min_p, drawn.penalty_repeat = options["min-p"], options["repeat-penalty"]
        drawn.penalty_present, drawn.penalty_freq = options["presence-penalty"], options["frequency-penalty"]
        drawn.penalty_last_n = options["repeat-last-n"]
        try:
            inside = xllamacpp.Server(params)
        except RuntimeError as error:
            raise RecipeError(f"llama.cpp's server does not start: {error}", where=options["model"]) from None
        try:
            yield server
        finally:
            del inside  # ends it

    @contextmanager
    def _program(self, options: Mapping[str, Any], server: Open) -> Iterator[Open]:
        """A program with the options of llama-server."""
        command = [self.engine, *(part for name, value in options.items() for part in (f"--{name}", str(value)))]
        # Tokens are not on the command line, which other users of the machine read.
        secret = {"LLAMA_API_KEY": ",".join(server.tokens)} if server.tokens else {}
        with subprocess.Popen(command, env={**os.environ, **secret}) as process:
            try:
                yield _answering(Open(server.address, server.tokens, process))
            finally:
                process.terminate()


def most_rows(model: Decoder, memory: int) -> int:
    """Answers at once whose keys and values, in fp16 and as long as the context, take half of so many bytes."""
    config = model.config
    row = 2 * 2 * config.blocks * config.num_kv_heads * config.head_dim * config.longest
    return max(1, memory // 2 // row)


def _answering(server: Open) -> Open:
    """A server, once it answers.

    Raises:
        RecipeError: it ends before, or takes too long.
    """
    until = time.monotonic() + START
    while not server.has_ended() and time.monotonic() < until:
        with suppress(URLError, ConnectionError), urlopen(f"{server.address}/health", timeout=START):
            return server
        time.sleep(0.1)
    raise RecipeError("the program does not answer as llama-server", where=server.address, fix="see its messages")


def serve_llama(llama: Llama, opening: RunOpening, limits: Limits, port: int) -> None:
    """Serve a run by llama.cpp until a signal ends it; raises as `Llama.serving`, and if a program ends by itself."""
    served, ended = opening.open(), threading.Event()
    for number in SIGNALS:
        signal.signal(number, lambda number, frame: ended.set())
    with llama.serving(served, limits, port, opening.num_threads(served)) as server:
        model = f"model {served.name} ({served.kind}, {llama.engine}, {llama.weights})"
        show([server.address, model, compared(served, server), PROMISES])
        while not ended.wait(1):
            if server.has_ended():
                raise RecipeError("the program has ended", where=llama.engine, fix="see its messages")


def compared(served: Served, server: Open) -> str:
    """One greedy answer of a server beside ours, in a line."""
    asked = [*served.facts.get("examples", []), *newest_prompts(served.run.folder, 1), ELSE][0]
    own = served.run.replies(
        [served.run.prompt(asked)], max_new_tokens=NUM_COMPARED, temperature=0, repetition_penalty=1, beams=1
    )[0].text.strip()
    fields: dict[str, Any] = {"max_tokens": NUM_COMPARED, "temperature": 0, "repeat_penalty": 1}
    if served.kind == "chat":
        path, fields["messages"] = CHAT, [{"role": "user", "content": asked}]
    else:
        path, fields["prompt"] = COMPLETIONS, missing_bos(served.run.tokenizer, converses=False) + asked
    with server.ask(path, fields) as response:
        choice = json.load(response)["choices"][0]
    theirs = (choice["message"]["content"] if served.kind == "chat" else choice["text"]).strip()
    if theirs == own:
        return f'"{asked}": its greedy answer is that of unpad\'s engine, {len(own)} characters'
    same = next((at for at, pair in enumerate(zip(own, theirs, strict=False)) if pair[0] != pair[1]), len(theirs))
    return f'"{asked}": its greedy answer leaves that of unpad\'s engine after {same} of {len(own)} characters'
