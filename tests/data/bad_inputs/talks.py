"""T: conversations, and questions about pictures."""

import os
from pathlib import Path

from tests.data.bad_inputs.case import Bad, row
from tests.data.bad_inputs.pictures import PNG


def said(*turns: tuple[str, str]) -> dict[str, object]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


GOOD = row(**said(("user", "hi there"), ("assistant", "hello you")))


def talk(kind: str, fields: dict[str, object], code: str = "") -> Bad:
    """A conversation between two good ones."""
    files = {"a.jsonl": GOOD + row(**fields) + GOOD}
    return Bad(
        kind, files, "chat", code, "a.jsonl:2" if code else "", 2 if code else 3, 1 if code else 0, 3 if code else 0
    )


def asked(kind: str, code: str = "", make: object = None, **fields: object) -> Bad:
    """A question about a picture between two good ones."""
    good = {"image": "a.png", "question": "what?", "answer": "a dog"}
    files = {"a.jsonl": row(**good) + row(**{**good, **fields}) + row(**good), "a.png": PNG}
    counts = (2, 1, 3) if code else (3, 0, 0)
    return Bad(kind, files, "vqa", code, "a.jsonl:2" if code else "", *counts, make=make)


def outside(root: Path) -> None:
    (root.parent / "outside.png").write_bytes(PNG)
    os.symlink(root.parent / "outside.png", root / "link.png")


TALKS = [
    talk("T-01", said(("assistant", "a"), ("user", "b")), "E_ROLE"),
    talk("T-01 unknown", said(("user", "a"), ("bot", "b")), "E_ROLE"),
    talk("T-01 capitals", said(("User", "a"), ("GPT", "b"))),
    talk("T-02", said(("user", "a"), ("assistant", "")), "E_EMPTY"),
    talk("T-02 none", {"messages": []}, "E_EMPTY"),
    talk("T-03", said(("user", "a")), "E_NO_TARGET"),
    talk("T-04", said(("user", "<|eos|><|pad|>"), ("assistant", "<|endoftext|> 助手："))),
    asked("T-05", question="<image><image> what?"),
    asked("T-06", "E_PATH", image="../outside.png"),
    asked("T-06 absolute", "E_PATH", image="/etc/passwd"),
    asked("T-06 drive", "E_PATH", image="C:a.png"),
    asked("T-06 address", "E_PATH", image="http://example.org/a.png"),
    asked("T-06 file address", "E_PATH", image="file:///etc/passwd"),
    asked("T-06 link", "E_PATH", outside, image="link.png"),
    asked("T-06 pipe", "E_MISSING", lambda root: os.mkfifo(root / "pipe.png"), image="pipe.png"),
    asked("T-06 long", "E_MISSING", image="a" * 5000),
    talk("T-07", said(("user", "a " * 3000), ("assistant", "b " * 3000))),
    talk("T-08", said(("user", "a"), ("assistant", " \u200b\ufeff ")), "E_EMPTY"),
    talk("T-12", {"Messages": [{"Role": "Human", "Content": "a"}, {"Role": "ASSISTANT", "Content": "b"}]}),
    talk("T-12 input", {"input": "a", "output": "b"}),
    talk("T-12 text", {"Text": "USER: a ASSISTANT: User: b"}),
    talk("T-09", said(("user", "e\u0301" * 5000 + "\u202e\u200d"), ("assistant", "\u0301" * 10000))),
]
