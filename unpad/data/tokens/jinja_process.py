"""Chat templates in a child process, which a template of somebody else can neither keep busy nor fill with text.

The child renders in the sandbox of Jinja. The kernel ends it where one rendering takes more than MOST_SECONDS of the
processor, whatever it is at, and gives it no more than MOST_MEMORY; the next rendering starts another child. On Windows
this process ends it by the clock, and nothing limits its memory. This file is the program of the child too, and imports
nothing of the package.
"""

import atexit
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import date
from functools import lru_cache, partial
from threading import Lock, Timer
from typing import Any, BinaryIO

import jinja2
from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MOST_SECONDS = 5.0  # of the processor for one rendering; conversations of hundreds of messages take some hundredths
MOST_MEMORY = 512 << 20
TODAY = date(2024, 7, 26)  # which Llama's templates write where they have no clock
OPEN, CLOSE = "\ufdd0", "\ufdd1"  # characters that no text may have, around what {% generation %} encloses
GLOBALS = ("range", "dict", "namespace")  # the others of Jinja draw texts, or keep what another conversation left
TEXT, NO_TEMPLATE, REFUSED, FAILED, EXCESS = range(5)  # kinds of replies
ENDLESS = "it goes on without end, or makes too much text"


class _Generation(Extension):
    """The tag {% generation %} ... {% endgeneration %}, which marks what the model is to say."""

    tags = {"generation"}  # noqa: RUF012 - as Extension declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_enclose"), [], [], body).set_lineno(line)

    def _enclose(self, caller: Callable[[], str]) -> str:
        return OPEN + caller() + CLOSE


def _raise(message: str) -> None:
    raise TemplateError(message)


@lru_cache(maxsize=64)
def _compiled(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[_Generation, loopcontrols]
    )
    environment.globals = {name: environment.globals[name] for name in GLOBALS}
    environment.globals |= {"raise_exception": _raise, "strftime_now": TODAY.strftime}
    # As transformers has it, without the escapes for web pages.
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    del environment.filters["random"]
    return environment.from_string(source)


def _reply(source: str, values: dict[str, Any], most: int) -> tuple[int, str]:
    """Kind and text of a rendering, or the reason why there is none."""
    kind = NO_TEMPLATE
    try:
        template = _compiled(source)
        kind = FAILED
        text = template.render(values)
        return (TEXT, text) if len(text) <= most else (EXCESS, ENDLESS)
    except (MemoryError, RecursionError):
        return (kind, "it nests too deeply") if kind == NO_TEMPLATE else (EXCESS, ENDLESS)
    except Exception as error:  # Jinja parses, Python compiles, and the template computes: they end in many ways
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        return REFUSED if kind == FAILED and isinstance(error, TemplateError) else kind, reason


def serve(lines: Iterable[bytes], out: BinaryIO) -> None:
    """Answer requests, a line each, until they end."""
    import signal

    warnings.simplefilter("ignore")  # of Python, about what Jinja made of a template
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to end
    with suppress(ValueError, OSError):  # macOS
        if sys.platform != "win32":
            import resource

            resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    for line in lines:
        source, values, most, seconds = json.loads(line)
        if sys.platform != "win32":
            signal.setitimer(signal.ITIMER_PROF, seconds)  # SIGPROF ends the process
        reply = json.dumps(_reply(source, values, most))
        if sys.platform != "win32":
            signal.setitimer(signal.ITIMER_PROF, 0)
        out.write(reply.encode() + b"\n")
        out.flush()


_lock = Lock()
_child: subprocess.Popen[bytes] | None = None


def render(source: str, values: dict[str, Any], most: int) -> tuple[int, str]:
    """Render a template.

    Args:
        values: by the names that the template calls them by.
        most: characters that the text may have.

    Returns:
        A kind of reply; the text, or the reason why there is none.
    """
    global _child
    with _lock:
        if _child is None:
            command = [sys.executable, "-P", __file__]
            pipe = subprocess.PIPE
            _child = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        assert _child.stdin is not None
        assert _child.stdout is not None
        line, timer = b"", Timer(2 * MOST_SECONDS, _child.kill)
        if sys.platform == "win32":
            timer.start()
        try:
            _child.stdin.write(json.dumps([source, values, most, MOST_SECONDS]).encode() + b"\n")
            _child.stdin.flush()
            line = _child.stdout.readline()
        except OSError:  # a broken pipe
            pass
        finally:  # an interrupted request would leave its reply to the next one
            timer.cancel()
            if not line.endswith(b"\n"):
                _end()
        kind, text = json.loads(line) if line.endswith(b"\n") else (EXCESS, ENDLESS)
        return kind, text


@atexit.register
def _end() -> None:
    global _child
    if _child is not None:
        _child.kill()
        _child.communicate()
        _child = None


def _forget() -> None:
    """Leave the child to the parent of a forked process."""
    global _child, _lock
    if _child is not None:
        _child.returncode = 0
    _child, _lock = None, Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)

if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
