"""A Llama of Transformers with the sizes and the weights of a decoder of ours."""

from __future__ import annotations

from typing import Any

from unpad.interchange.decoders import LLAMA
from unpad.interchange.folder import their_tensors
from unpad.models.decoder import Decoder


def as_llama(model: Decoder, **fields: Any) -> Any:
    """Make a `LlamaForCausalLM`, in fp32.

    Args:
        fields: of its config that a decoder does not have.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    described = LLAMA.fields(model, {})
    theirs = LlamaForCausalLM(LlamaConfig(**described | fields))
    absent, unknown = theirs.load_state_dict(their_tensors(model, LLAMA, described), strict=False)
    assert not {*absent, *unknown} - {"lm_head.weight"}  # of a tied head
    return theirs
