"""Our attention and batches for models and trainers of transformers and TRL.

    import unpad.hf
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="unpad")

Importing this registers the attention. It needs the extra `hf`; no recipe imports it.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from unpad.errors import RecipeError

if find_spec("transformers") is None:
    raise RecipeError("unpad.hf needs transformers, which is not installed", fix="pip install unpad[hf]")

from unpad.hf.attention import register
from unpad.hf.loader import Collator, Examples, collate, steps
from unpad.hf.prepare import prepare

if TYPE_CHECKING:
    from unpad.hf.padding import without_padding
    from unpad.hf.trainer import attach

__all__ = ["Collator", "Examples", "attach", "collate", "prepare", "steps", "without_padding"]
OF_TRAINERS = {"attach": "unpad.hf.trainer", "without_padding": "unpad.hf.padding"}


def __getattr__(name: str) -> object:
    """Import what trainers need on first use (PEP 562)."""
    if name not in OF_TRAINERS:
        raise AttributeError(f"module 'unpad.hf' has no attribute {name!r}")
    if find_spec("accelerate") is None:
        raise RecipeError("trainers need accelerate, which is not installed", fix="pip install unpad[hf]")
    value: object = getattr(import_module(OF_TRAINERS[name]), name)
    globals()[name] = value
    return value


register()
