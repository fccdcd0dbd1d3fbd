"""What a GGUF file holds, and what llama.cpp's own server computes from it."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import torch
import xllamacpp

from unpad.batching.batch import from_sequences
from unpad.models.decoder import Decoder
from unpad.serving.llama import Open

NUM_TOP = 20  # tokens whose log probabilities are compared


class File:
    """A GGUF file: metadata, types, and tensors in fp64."""

    def __init__(self, path: Path) -> None:
        reader = gguf.GGUFReader(path)
        self.fields: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
        self.architecture: str = self.fields["general.architecture"]
        self.types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
        self.tensors = {
            tensor.name: torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy()).double()
            for tensor in reader.tensors
        }


@contextmanager
def llama_server(path: Path) -> Iterator[Callable[..., Any]]:
    """Requests to llama.cpp's own server of a file, in JSON; keys, values and attention are in fp32."""
    params = xllamacpp.CommonParams()
    params.model.path, params.port, params.n_ctx, params.verbosity = str(path), 0, 64, 0
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(params)
    yield lambda route, **fields: json.load(Open(server.listening_address).ask(route, fields))


def apart(model: Decoder, asked: Callable[..., Any], sequences: Sequence[Sequence[int]]) -> float:
    """Largest difference of the log probabilities of the likeliest next tokens there and here."""
    worst, num_compared = 0.0, 0
    for ids in sequences:
        # The answer is "a": one that ended at once, or within a character, would have no probabilities.
        answer = asked("/completion", prompt=ids, n_predict=1, n_probs=NUM_TOP, logit_bias=[["a", 1000]])
        with torch.no_grad():
            expected = model.logits(model(from_sequences([[*ids, 0]])))[-1].log_softmax(-1)
        for token in [token for made in answer.get("completion_probabilities", []) for token in made["top_logprobs"]]:
            worst = max(worst, abs(token["logprob"] - float(expected[token["id"]])))
            num_compared += 1
    assert num_compared >= NUM_TOP
    return worst
