"""The page of a server, one file with nothing from elsewhere, and what a browser may do for it (apart: no HTTP)."""

from __future__ import annotations

from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path

FILE = Path(__file__).with_name("page.html")


def page() -> str:
    """Text of the page."""
    return FILE.read_text(encoding="utf-8")


def content_security_policy(html: str) -> str:
    """Policy under which a browser runs the scripts and styles that stand in a page, as they are, and no others.

    The page asks its own server alone, shows pictures that it has itself, and cannot make markup of texts.
    """
    parts = _Inline()
    parts.feed(html)
    parts.close()
    return "; ".join(
        [
            "default-src 'none'",
            *(f"{tag}-src {' '.join(map(_source, texts))}" for tag, texts in parts.texts.items()),
            "img-src data: blob:",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        ]
    )


def _source(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


class _Inline(HTMLParser):
    """Texts of the elements `script` and `style`."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: dict[str, list[str]] = {"script": [], "style": []}
        self._open: list[str] | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open = self.texts.get(tag)
        if self._open is not None:
            self._open.append("")

    def handle_endtag(self, tag: str) -> None:
        self._open = None

    def handle_data(self, data: str) -> None:
        if self._open is not None:
            self._open[-1] += data
