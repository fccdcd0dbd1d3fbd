"""Limits on who may ask, and how much: hosts, origins, tokens, and sizes and times of bodies."""

import asyncio
import hmac
import ipaddress
import re
import socket
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from starlette.requests import Request

from unpad.errors import RecipeError, SourceError
from unpad.serving.protocol import RequestError
from unpad.storage.reading import read_file

MIB = 1 << 20
MOST_TOKEN_FILE = 1 << 16  # bytes
OPEN_PATHS = ("/", "/health")  # the page asks for the token itself
LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(?:[a-z0-9_.-]+|\[[0-9a-f:.]+\])(?::[0-9]{1,5})?")
_USUAL_PORTS = {"http": ":80", "https": ":443"}


@dataclass(frozen=True)
class Limits:
    """Limits of a server.

    Args:
        host: address that it listens on.
        rows: answers at once; waiting: further ones that wait.
        timeout: seconds of a request, from its arrival to its last token.
        arrival: seconds in which headers, and then a body, have to arrive.
        max_body: bytes of a body; None for a size that suits the run.
        tokens: of which a client has to send one; none: anyone may ask.
        hosts: further names by which clients call the server; origins: of pages that may ask.
    """

    host: str = "127.0.0.1"
    rows: int = 64
    waiting: int = 256
    timeout: float = 300
    arrival: float = 30
    max_body: int | None = None
    tokens: tuple[str, ...] = field(default=(), repr=False)
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()


def is_loopback(host: str) -> bool:
    """True for an address that only this machine reaches."""
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host.strip("[]")).is_loopback)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


def read_tokens(path: Path) -> tuple[str, ...]:
    """Tokens of a file, one a line.

    Raises:
        SourceError: it cannot be read, or has no token, or one that no header can hold.
    """
    content = read_file(path, SourceError, MOST_TOKEN_FILE, "name a file with one token a line in --token-file")
    tokens = tuple(line.strip() for line in content.decode("utf-8", "replace").splitlines() if line.strip())
    if not tokens or not all(token.isascii() and token.isprintable() and " " not in token for token in tokens):
        what = "the file has no token, or one with spaces or other letters than those of ASCII"
        raise SourceError(what, where=str(path), fix="write one token a line: openssl rand -hex 32 > FILE")
    return tokens


def check_reach(host: str, tokens: Sequence[str], no_token: bool) -> None:
    """Refuse to serve a network without a token by oversight.

    Raises:
        RecipeError: the address is reached from other machines, and no token is asked for.
    """
    if not is_loopback(host) and not tokens and not no_token:
        what = f"--host {host} is reached from other machines, and anyone there could ask"
        fix = "give --token-file FILE, with one token a line; or --no-token if anyone may"
        raise RecipeError(what, where="--host", fix=fix)


def check_origins(origins: Sequence[str]) -> None:
    """Refuse what no browser sends as the origin of a page.

    Raises:
        RecipeError: names the first, and how it is written.
    """
    for origin in origins:
        scheme, _, rest = origin.strip().lower().rpartition("://")
        meant = f"{scheme or 'https'}://{rest.partition('/')[0].removesuffix(_USUAL_PORTS.get(scheme or 'https', ''))}"
        if origin != meant or not _ORIGIN.fullmatch(origin):
            written = meant if _ORIGIN.fullmatch(meant) and origin != "null" else "https://a.org"
            what = f'"{origin}" is no origin, which has a scheme and a host, and a port if it is not the usual one'
            raise RecipeError(what, where="--allow-origin", fix=f"write it as browsers send it, such as {written}")


@contextmanager
def bound(host: str, port: int) -> Iterator[socket.socket]:
    """A socket that listens at an address, on which clients may wait before anything can answer.

    Raises:
        RecipeError: the address is in use, or not of this machine.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        place = socket.create_server(address[:2], family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        fix = "choose another --port, or an address of this machine as --host"
        raise RecipeError(f"cannot listen: {reason}", where=f"{host}:{port}", fix=fix) from None
    with place:
        yield place


# --------------------------------------------------------------------------- before a route


def check_headers(headers: Mapping[str, str], path: str, limits: Limits) -> None:
    """Refuse requests of pages of other sites, of names that were rebound to this address, and without a token.

    Raises:
        RequestError: 403 or 401.
    """
    host = headers.get("host", "")
    if not _is_own_host(host, limits):
        what = "this server is not called by that name: use its address, or start it with --allow-host NAME"
        raise RequestError(what, status=403, code="host_not_allowed")
    if (origin := headers.get("origin")) is not None and not is_own_origin(origin, host, limits.origins):
        what = "a page of that origin may not ask here: start the server with --allow-origin ORIGIN if it may"
        raise RequestError(what, status=403, code="origin_not_allowed")
    if limits.tokens and path not in OPEN_PATHS:
        _check_token(headers.get("authorization", ""), limits.tokens)


def _is_own_host(header: str, limits: Limits) -> bool:
    """True for a name of the server, with any port, as that may be forwarded from another."""
    name = header.rpartition(":")[0] if header.rpartition(":")[2].isdecimal() and ":" in header else header
    name = name.lower().rstrip(".")
    names = {one.lower() for one in (limits.host, f"[{limits.host}]", *limits.hosts, *LOCAL_NAMES)}
    is_any = _is_address(limits.host) and ipaddress.ip_address(limits.host).is_unspecified
    # A name can be rebound to this machine's address, and an address cannot.
    return name in names or (is_any and _is_address(name))


def is_own_origin(origin: str, host: str, allowed: Collection[str]) -> bool:
    """True for a page that this server sent, or of an allowed origin."""
    own = origin.partition("://")[0] in ("http", "https") and origin.partition("://")[2].lower() == host.lower()
    return own or origin in allowed


def _check_token(header: str, tokens: Sequence[str]) -> None:
    scheme, _, given = header.partition(" ")
    # Every token is compared, each in constant time.
    valid = [hmac.compare_digest(given.strip().encode(), token.encode()) for token in tokens]
    if scheme.lower() != "bearer" or not any(valid):
        what = "the request has no valid token: send it as Authorization: Bearer TOKEN"
        headers = {"WWW-Authenticate": "Bearer"}
        raise RequestError(what, status=401, kind="authentication_error", code="invalid_api_key", headers=headers)


# --------------------------------------------------------------------------- bodies


def check_type(http: Request, *, takes_files: bool = False) -> bool:
    """True for JSON, False for a file where those are taken.

    Raises:
        RequestError: 415, for types that a page of another site could send unasked.
    """
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json":
        return True
    if takes_files and (kind.startswith("image/") or kind == "application/octet-stream"):
        return False
    files = ", or send a file as image/png or application/octet-stream" if takes_files else ""
    what = f"the content type is not application/json: send JSON with that type{files}"
    raise RequestError(what, status=415, code="unsupported_media_type")


async def read_body(http: Request, limits: Limits, most: int, count: Callable[[int], None]) -> bytes:
    """The body of a request, of at most so many bytes; `count` hears how many came so far, and may refuse more.

    Raises:
        RequestError: 413 if it is too large, 408 if it does not arrive in time, 400 if it has two lengths, as proxies
            may take the other one; the connection is closed after each.
        ClientDisconnect: the client left.
    """
    given = http.headers.get("content-length", "")
    if given and "transfer-encoding" in http.headers:
        what = "the body has a Content-Length and chunks: send one of them"
        raise RequestError(what, headers={"Connection": "close"})
    if given.isdecimal() and int(given) > most:
        raise _too_large(most)
    content = bytearray()
    try:
        async with asyncio.timeout(limits.arrival):
            async for part in http.stream():
                content += part
                if len(content) > most:
                    raise _too_large(most)
                count(len(content))
    except TimeoutError:
        what = f"the body did not arrive in {limits.arrival:g} seconds: send it again"
        raise RequestError(what, status=408, code="timeout", headers={"Connection": "close"}) from None
    return bytes(content)


def _too_large(most: int) -> RequestError:
    what = f"the body is larger than {most:,} bytes: send less, or start the server with a larger --max-body"
    return RequestError(what, status=413, code="request_too_large", headers={"Connection": "close"})
