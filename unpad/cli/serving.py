"""The verb that puts a run behind HTTP."""

from collections.abc import Collection
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Literal

import typer

from unpad.cli.options import Debug, Engine, RunArgument, check_run
from unpad.storage.paths import user_path

verbs = typer.Typer()
NEEDED = ("starlette", "uvicorn", "prometheus_client")  # of the extra `serve`
# Arguments that llama.cpp's server has too.
OF_LLAMA = {"run", "host", "port", "name", "rows", "token_file", "no_token", "threads", "engine", "weights", "debug"}


@verbs.command(epilog="Example: unpad serve demo    then open http://127.0.0.1:8000")
def serve(
    context: typer.Context,
    run: RunArgument,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for a free one.")] = 8000,
    name: Annotated[str, typer.Option(help="Name of the model for clients; default that of the run's folder.")] = "",
    rows: Annotated[int, typer.Option(min=1, max=4096, help="Most answers at once.")] = 64,
    waiting: Annotated[int, typer.Option(min=0, help="Most further answers that wait.")] = 256,
    memory: Annotated[
        int | None, typer.Option(min=1, help="MiB of keys and values, of live rows and kept beginnings.")
    ] = None,
    piece: Annotated[int, typer.Option(min=1, help="Tokens of prompts that are read between two steps.")] = 256,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds of a request, waiting included.")] = 300,
    drain: Annotated[float, typer.Option(min=0, help="Seconds that open answers may go on after a signal.")] = 30,
    max_body: Annotated[
        int | None, typer.Option(min=1, help="MiB of a request's body; default 4, or 20 for images.")
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(parser=user_path, help="File with tokens, one a line; clients have to send one.")
    ] = None,
    no_token: Annotated[
        bool, typer.Option("--no-token", help="Let anyone ask who reaches --host, without a token.")
    ] = False,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="A further name of this server; may be repeated.")
    ] = None,
    allow_origin: Annotated[
        list[str] | None, typer.Option(help="Origin of a page that may ask, such as https://a.org; may be repeated.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of products; default 1 for small models, else all cores.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**31 - 1, help="Of requests that give none; default a new one for each.")
    ] = None,
    engine: Engine = "unpad",
    weights: Annotated[
        Literal["f32", "f16", "q8_0", "q4_0"], typer.Option(help="Type of the matrices for llama.cpp.")
    ] = "f16",
    no_page: Annotated[bool, typer.Option("--no-page", help="Show no page at /.")] = False,
    debug: Debug = False,
) -> None:
    """Serve a run: a page to talk to it, and OpenAI's protocol for programs. Ctrl-C ends it after open answers."""
    refuse_given(context, ("weights",) if engine == "unpad" else set(context.params) - OF_LLAMA, engine)
    require_serve()
    from unpad.serving.limits import MIB, Limits, bound, check_origins, check_reach, read_tokens

    tokens = read_tokens(token_file) if token_file is not None else ()
    check_reach(host, tokens, no_token)
    check_origins(allow_origin or ())
    most, hosts, origins = max_body and max_body * MIB, tuple(allow_host or ()), tuple(allow_origin or ())
    limits = Limits(host, rows, waiting, timeout, max_body=most, tokens=tokens, hosts=hosts, origins=origins)
    with bound(host, port) if engine == "unpad" else nullcontext() as place:
        check_run(run)  # which imports torch, in seconds
        from unpad.serving.served import RunOpening

        opening = RunOpening(run, name, rows, memory and memory * MIB, piece, threads, seed)
        if place is None:
            from unpad.serving.llama import Llama, serve_llama

            serve_llama(Llama(engine, weights), opening, limits, port)
        else:
            from unpad.serving.server import Listening
            from unpad.serving.server import serve as serve_run

            serve_run(opening, limits, Listening(drain, not no_page), place)


def refuse_given(context: typer.Context, names: Collection[str], engine: str) -> None:
    """Refuse options on the command line that an engine does not have.

    Raises:
        RecipeError: names the first.
    """
    from unpad.errors import RecipeError

    for name in names:
        if (source := context.get_parameter_source(name)) is not None and source.name == "COMMANDLINE":
            option = f"--{name.replace('_', '-')}"
            raise RecipeError(f"the engine {engine} has no {option}", where=option, fix="leave it out, or --engine")


def missing_for_serve() -> list[str]:
    """Libraries of the extra that are not installed."""
    from importlib.util import find_spec

    return [name for name in NEEDED if find_spec(name) is None]


def require_serve() -> None:
    """Refuse to serve without the libraries of the extra.

    Raises:
        RecipeError: one is missing.
    """
    from unpad.errors import RecipeError

    if missing := missing_for_serve():
        what = f"{' and '.join(missing)} cannot be imported, and a server needs it"
        raise RecipeError(what, where="unpad serve", fix="pip install 'unpad[serve]'")
