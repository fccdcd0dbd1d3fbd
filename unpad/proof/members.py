"""Protocols that are read off other people's objects (apart: the same for every version of Python).

From Python 3.12 on `isinstance` of a protocol no longer asks an object for its members, but looks them up in its
`__dict__` and in its class. What `__getattr__` returns is not found there: the submodules of a torch module, the model
within a compiled one, and the special tokens of a tokenizer.
"""

from __future__ import annotations

from typing import Protocol

from typing_extensions import get_protocol_members, is_protocol


class _Asking(type(Protocol)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: object) -> bool:
        if not is_protocol(cls):
            return bool(super().__instancecheck__(instance))
        return all(hasattr(instance, name) for name in get_protocol_members(cls))


class HasMembers(Protocol, metaclass=_Asking):
    """Base of protocols that every object with their members follows, wherever it has them from."""
