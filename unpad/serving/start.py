"""Work before the first answer: the run is loaded, named by what its answers depend on, and proved on four
prompts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from importlib.metadata import version
from time import perf_counter
from typing import Any

import numpy as np
import torch

from unpad.errors import ProofError
from unpad.inference.engine import Engine, Request, watch
from unpad.inference.loaded import LoadedRun, load
from unpad.machine.load import full_processor_name
from unpad.nn.linear import has_tiles
from unpad.nn.native import library
from unpad.proof.serving import hear, line_of
from unpad.serving.served import TEXTS, Served, opened

LENGTHS = (3, 40, 9, 17)  # of the prompts of the proof
NUM_NEW = 6
SEED = 5


@dataclass
class RunOpening:
    """Settings of how a run is opened.

    Args:
        name: by which clients call it; "" for that of its folder.
        rows: answers at once; memory: bytes of keys and values, None for the engine's own choice; piece: tokens of
            prompts that are read between two steps.
    """

    run: str | LoadedRun
    name: str = ""
    rows: int = 64
    memory: int | None = None
    piece: int = 256
    proof: str = field(default="", init=False)

    def load(self) -> tuple[Served, str, Callable[[], Engine] | None]:
        """The run, the fingerprint of what its answers depend on, and what makes its engine; for the model's thread.

        Raises:
            UnpadError: it cannot be loaded, or answers in no form that can be served.
            ProofError: prompts together do not get what each gets alone.
        """
        loaded = self.run if isinstance(self.run, LoadedRun) else load(self.run)
        folder = loaded.folder
        created = int(folder.stat().st_mtime)
        served = opened(loaded, self.name or folder.resolve().name, created)
        name = fingerprint(served, self.piece)
        if served.kind not in TEXTS:
            return served, name, None
        make = partial(
            Engine, loaded.generator, precision=served.precision, piece=self.piece, rows=self.rows, memory=self.memory
        )
        self.proof = prove(served, make)
        return served, name, make

    def lines(self, served: Served | None) -> list[str]:
        """Lines that are printed when the server is ready."""
        assert served is not None, "it is loaded"
        more = f" {self.proof}" if self.proof else ""
        lines = [f"model {served.name} ({served.kind}, {served.precision}).{more}"]
        if served.kind in TEXTS and served.run.recipe.generate.beams > 1:
            lines.append(f"answers are drawn without the {served.run.recipe.generate.beams} beams of the run's recipe")
        return lines


def fingerprint(served: Served, piece: int) -> str:
    """Digest of all that an answer depends on besides the request: equal ones give equal bytes.

    It is of the weights, the recipe, the files of the run, the precision, the kernels and this version; where torch's
    products run, also of its version, the processor and the number of threads.
    """
    run, native = served.run, library.enabled()
    of_torch = served.kind not in TEXTS or not native or (served.precision == "bf16" and has_tiles())
    digest = blake2b(digest_size=8)
    parts: list[Any] = [version("unpad"), served.precision, library.describe(), run.recipe.model_dump_json()]
    parts += [torch.__version__, torch.get_num_threads(), full_processor_name()] if of_torch else []
    parts += [] if native else [piece]
    for part in parts:
        digest.update(f"{part}\n".encode())
    for name, content in sorted(run.files.items()):
        digest.update(name.encode() + blake2b(content).digest())
    for name, tensor in sorted(run.model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return f"unpad-{digest.hexdigest()}"


def prove(served: Served, make: Callable[..., Engine]) -> str:
    """Compare four prompts together with each alone, token by token and score by score, bit for bit.

    Raises:
        ProofError: they differ.
    """
    began = perf_counter()
    draw = np.random.default_rng(SEED)
    usable = np.setdiff1d(np.arange(served.run.tokenizer.vocab_size), [*served.banned, *served.stop_ids])
    prompts = [draw.choice(usable, min(length, served.context)).tolist() for length in LENGTHS]
    settings = served.settings.model_copy(update={"temperature": 1.0, "max_new_tokens": NUM_NEW, "seed": SEED})
    requests = [Request(ids, settings, served.stop_ids, served.banned) for ids in prompts]
    together = hear(make(watch=watch), requests)
    alone = [hear(make(watch=watch), [request])[0] for request in requests]
    if not line_of("together = alone", "", together, alone).passed:
        fix = "report this with the machine's processor and `unpad --version`; UNPAD_NATIVE=0 may help meanwhile"
        raise ProofError("four prompts together did not get what each gets alone", where=served.name, fix=fix)
    return f"Four prompts together equal each alone, bit for bit ({perf_counter() - began:.1f} s)."
