"""Our attention and batches for models and trainers of transformers and TRL.

    import unpad.hf
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="unpad")

Importing this registers the attention. It needs the extra `hf`; no recipe imports it.
"""

from importlib.util import find_spec

from unpad.errors import RecipeError

if find_spec("transformers") is None:
    raise RecipeError("unpad.hf needs transformers, which is not installed", fix="pip install unpad[hf]")

from unpad.hf.attention import register
from unpad.hf.loader import collate, steps
from unpad.hf.prepare import prepare

__all__ = ["collate", "prepare", "steps"]

register()
