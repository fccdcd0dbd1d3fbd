"""What `serve.py`, `serving.py` and `serve_rude.py` measure: a run that is made, and servers in their own processes."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from serve_client import Address
from tokenizers import Tokenizer, models, pre_tokenizers

from unpad.interchange.families import FAMILIES
from unpad.interchange.folder import save_model
from unpad.interchange.runs import import_folder
from unpad.models import build_model, model_config
from unpad.models.decoder import Decoder

HERE = Path(__file__).parent
ROOT = HERE.parent
SIZES = {
    "norm": "rmsnorm", "activation": "swiglu", "positions": "rotary", "tied": False, "width": 512, "blocks": 6,
    "heads": 8, "hidden": 2048, "context": 2048,
}  # fmt: skip
VOCAB = 16_000
SPECIAL = ("<|pad|>", "<|bos|>", "<|eos|>")
EOS = 2
NAME = "random"
NEW_BY_DEFAULT = 8  # tokens of an answer to a request that does not say
END_SECONDS = 60  # until it has ended


class CannotStartError(Exception):
    """A server did not come up; with the last lines of its log."""


def make_run(folder: Path, library: Tokenizer | None = None, sizes: Mapping[str, Any] = SIZES) -> Path:
    """A run with random weights, that came from a folder of transformers.

    The scores of EOS are 0, so that a greedy answer, whose best score is above 0, never ends before its limit.

    Args:
        library: the tokenizer, whose first tokens are SPECIAL; by default a token is a number between spaces.
    """
    library = library or numbers()
    torch.manual_seed(0)
    model = build_model(model_config(dict(sizes)), library.get_vocab_size())
    assert isinstance(model, Decoder)
    assert model.head is not None
    with torch.no_grad():
        model.head.weight[EOS].zero_()
    theirs, run = folder / "transformers", folder / "run"
    save_model(model, theirs, FAMILIES["llama"], {})
    names = dict(zip(("pad_token", "bos_token", "eos_token"), SPECIAL, strict=True))
    (theirs / "tokenizer.json").write_text(library.to_str(), encoding="utf-8")
    (theirs / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **names}))
    import_folder(str(theirs), run)
    recipe = (run / "recipe.yaml").read_text(encoding="utf-8")
    short = re.sub(r"max_new_tokens: \d+", f"max_new_tokens: {NEW_BY_DEFAULT}", recipe)
    (run / "recipe.yaml").write_text(short, encoding="utf-8")
    return run


def numbers() -> Tokenizer:
    """A tokenizer for which a number between spaces is a token."""
    words = [*SPECIAL, *map(str, range(len(SPECIAL), VOCAB))]
    library = Tokenizer(models.WordLevel({word: id for id, word in enumerate(words)}, unk_token=SPECIAL[0]))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens(list(SPECIAL))
    return library


@dataclass(frozen=True)
class Side:
    """A server that answers.

    Args:
        model: by which clients call it.
        log: file of its standard error.
        clock: of the time inside its model, as `serve_clocked.py` writes it.
    """

    address: Address
    model: str
    pid: int
    log: Path
    clock: Path | None = None

    def processor_seconds(self) -> float:
        """User and system time of all its threads so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def model_seconds(self) -> float:
        """Processor time inside its model so far."""
        assert self.clock is not None, "the server has a clock"
        seconds: float = struct.unpack("d", self.clock.read_bytes())[0]
        return seconds

    def faults(self) -> list[str]:
        """Faults of the program in its log."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return [line for line in lines if line.startswith("fault ")]


@contextmanager
def ours(
    run: Path, log: Path, threads: int, *options: str, clock: Path | None = None
) -> Iterator[tuple[Side, subprocess.Popen[str]]]:
    """`unpad serve` of a run, until the context ends; with a clock around its model that is written to a file."""
    program = ["-m", "unpad"]
    if clock is not None:
        clock.write_bytes(bytes(8))
        program = [str(HERE / "serve_clocked.py"), str(clock)]
    command = [sys.executable, *program, "serve", str(run), "--port", "0", "--name", NAME, *options]
    with _process(command, log, threads, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None, "it is a pipe"
        url = process.stdout.readline().strip()  # the server prints it when it is ready
        if not url:
            raise CannotStartError(_last_lines(log))
        yield Side(Address("127.0.0.1", int(url.rpartition(":")[2])), NAME, process.pid, log, clock), process


@contextmanager
def _process(command: Sequence[str], log: Path, threads: int, stdout: int) -> Iterator[subprocess.Popen[str]]:
    """A process that is ended with the context, whatever happens."""
    variables = {
        **os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false", "NO_COLOR": "1",
    }  # fmt: skip
    with log.open("w") as errors:
        process = subprocess.Popen(command, cwd=log.parent, env=variables, stdout=stdout, stderr=errors, text=True)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _last_lines(log: Path) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-8:])
