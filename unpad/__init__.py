"""Train transformers on ragged data without padding, with proof that batching changed nothing.

Public names are imported when they are first used: `import unpad` alone loads neither torch nor numpy.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__all__ = [
    "BatchSampler",
    "RaggedBatch",
    "batches",
    "load",
    "plan",
    "prove",
    "prove_callable",
    "prove_loop",
    "prove_trainer",
    "train",
    "train_monitored",
    "train_monitored_batch",
    "train_texts",
]

if TYPE_CHECKING:
    from unpad.api import batches, plan, train, train_monitored, train_monitored_batch, train_texts
    from unpad.batching.batch import RaggedBatch
    from unpad.batching.sampler import BatchSampler
    from unpad.hf.update import prove_trainer
    from unpad.inference.loaded import load
    from unpad.proof.certificate import prove
    from unpad.proof.foreign.loop import prove_loop
    from unpad.proof.foreign.pairs import prove_callable

    __version__: str
else:
    _MODULES = {
        "BatchSampler": "batching.sampler",
        "RaggedBatch": "batching.batch",
        "load": "inference.loaded",
        "prove": "proof.certificate",
        "prove_callable": "proof.foreign.pairs",
        "prove_loop": "proof.foreign.loop",
        "prove_trainer": "hf.update",
    }

    def __getattr__(name):
        """Import a public name from its module on first use (PEP 562)."""
        if name in __all__:
            value = getattr(import_module(f"unpad.{_MODULES.get(name, 'api')}"), name)
        elif name == "__version__":
            value = import_module("importlib.metadata").version("unpad")
        else:
            raise AttributeError(f"module 'unpad' has no attribute {name!r}")
        globals()[name] = value
        return value

    def __dir__():
        return sorted({*globals(), *__all__, "__version__"})
