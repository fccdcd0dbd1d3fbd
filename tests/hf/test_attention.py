"""Attention "unpad" inside models of transformers: a batch gives the gradient of one sequence at a time."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from transformers import masking_utils

import unpad.hf  # noqa: F401 - registers the attention
from tests.hf.families import IGNORED, distance, make_model, make_rows, make_sequences, take_gradient, targets_of, truth
from unpad.batching.layout import build_layout
from unpad.errors import PlanError, RecipeError
from unpad.hf.attention import find_sequences, hand, make_mask
from unpad.nn.native import library

SEQUENCES = make_sequences()
ROWS = make_rows(SEQUENCES)
ATTENTION_ALONE = ["llama", "mistral", "qwen3", "gemma2", "gemma3", "gpt2", "opt", "granite", "gpt_oss", "deepseek_v3"]


def flattened(rows: Sequence[dict[str, list[int]]], bounds: bool) -> dict[str, Any]:
    """One row without padding, its boundaries by `cu_seq_lens_q` or by restarting positions alone."""
    lengths = [len(row["input_ids"]) for row in rows]
    batch = {
        "input_ids": torch.cat([torch.tensor(row["input_ids"]) for row in rows])[None],
        "labels": torch.cat([torch.tensor([IGNORED, *row["labels"][1:]]) for row in rows])[None],
        "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
    }
    ends = torch.from_numpy(np.cumsum([0, *lengths]).astype(np.int32))
    return batch | ({"cu_seq_lens_q": ends, "cu_seq_lens_k": ends} if bounds else {})


def padded(rows: Sequence[dict[str, list[int]]], left: bool) -> dict[str, Any]:
    longest = max(len(row["input_ids"]) for row in rows)

    def pad(values: Sequence[int], fill: int) -> list[int]:
        filler = [fill] * (longest - len(values))
        return [*filler, *values] if left else [*values, *filler]

    return {
        "input_ids": torch.tensor([pad(row["input_ids"], 0) for row in rows]),
        "labels": torch.tensor([pad([IGNORED, *row["labels"][1:]], IGNORED) for row in rows]),
        "attention_mask": torch.tensor([pad([1] * len(row["input_ids"]), 0) for row in rows]),
    }


BATCHES = {
    "cu_seq_lens_q": flattened(ROWS, bounds=True),
    "positions": flattened(ROWS, bounds=False),
    "padded right": padded(ROWS, left=False),
    "padded left": padded(ROWS, left=True),
}


def gradient(model: torch.nn.Module, batch: dict[str, Any], **options: Any) -> dict[str, Tensor]:
    model(**batch, num_items_in_batch=torch.tensor(targets_of(ROWS)), **options).loss.backward()
    return take_gradient(model)


@pytest.mark.slow
@pytest.mark.parametrize("family", ATTENTION_ALONE)
def test_every_form_of_batch_has_the_gradient_of_one_sequence_at_a_time(family):
    model = make_model(family)
    _, wanted = truth(model, ROWS)
    model.set_attn_implementation("unpad")
    for name, batch in BATCHES.items():
        if family in ("gpt2", "opt") and name == "padded left":  # counts its positions from the padding, if told none
            continue
        if family == "opt" and name == "positions":  # reads positions neither in its mask nor in its attention
            continue
        assert distance(gradient(model, batch, use_cache=False), wanted) < 1e-5, name
    assert distance(gradient(model, BATCHES["cu_seq_lens_q"]), wanted) < 1e-5, "with a cache"


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss"])
def test_generation_from_prompts_padded_left_is_that_of_eager_attention(family):
    batch = {k: v for k, v in padded(ROWS[:4], left=True).items() if k != "labels"}
    written = [
        make_model(family, attention).eval().generate(**batch, max_new_tokens=12, do_sample=False, pad_token_id=0)
        for attention in ("eager", "unpad")
    ]
    assert torch.equal(*written)


def test_under_autocast_queries_take_the_type_of_values():
    model = make_model("qwen3", "unpad")
    wanted = gradient(model, BATCHES["cu_seq_lens_q"])
    with torch.autocast("cpu", torch.bfloat16):
        got = gradient(model, BATCHES["cu_seq_lens_q"])
    assert distance(got, wanted) < 5e-2


# --------------------------------------------------------------------------- masks

PLAIN = masking_utils.causal_mask_function


def chunked(size: int) -> Any:
    return masking_utils.chunked_causal_mask_function(size, torch.zeros(1, dtype=torch.long))


def packed(function: Any, lengths: list[int]) -> Any:
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    owners = torch.repeat_interleave(torch.tensor(lengths))[None]
    return masking_utils.packed_sequence_compatibility_function(function, positions, owners)


@pytest.mark.parametrize(
    ("function", "local_size", "dense"),
    [
        (PLAIN, None, False),
        (packed(PLAIN, [5, 4, 3]), None, False),
        (masking_utils.bidirectional_mask_function, None, False),
        (masking_utils.sliding_window_causal_mask_function(4), 4, False),
        (packed(masking_utils.sliding_window_causal_mask_function(4), [2, 7, 3]), 4, False),
        (packed(masking_utils.sliding_window_causal_mask_function(4), [3, 3, 3, 3]), 4, False),
        (chunked(4), 4, True),
        (packed(chunked(4), [2, 7, 3]), 4, True),
        (packed(chunked(4), [3, 3, 3, 3]), 4, False),
        (
            masking_utils.or_masks(PLAIN, masking_utils.blockwise_overlay(torch.tensor([[-1] * 8 + [1] * 4]))),
            None,
            True,
        ),
        (masking_utils.sliding_window_bidirectional_mask_function(4), 4, True),
    ],
)
def test_a_mask_is_dense_only_where_boundaries_cannot_say_it(function, local_size, dense):
    mask = make_mask(1, 12, 12, mask_function=function, local_size=local_size, device=torch.device("cpu"))
    assert (mask is not None and mask.dtype == torch.bool) == dense
    if mask is not None and dense:
        place = torch.arange(12)
        expected = function(torch.zeros(1, 1, dtype=torch.long), 0, place[:, None], place[None])
        assert torch.equal(mask[0, 0], expected.expand(12, 12))


# --------------------------------------------------------------------------- boundaries


def test_boundaries_come_from_whatever_the_batch_has():
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0]])
    found = find_sequences(2, 4, mask.bool(), {})
    assert found.layout.lengths().tolist() == [3, 2]
    assert found.real is not None
    assert found.real.tolist() == [1, 2, 3, 4, 5]
    bounds = torch.tensor([0, 3, 8], dtype=torch.int32)
    assert find_sequences(1, 8, None, {"cu_seq_lens_q": bounds}).layout.lengths().tolist() == [3, 5]
    handed = hand(build_layout(np.array([3, 4, 1])))
    assert find_sequences(1, 8, handed, {}).layout.lengths().tolist() == [3, 4, 1]
    assert find_sequences(1, 8, handed, {"cu_seq_lens_q": bounds}).layout.lengths().tolist() == [3, 5]
    positions = torch.tensor([[0, 1, 0, 1], [0, 1, 2, 3]])
    assert find_sequences(2, 4, None, {"position_ids": positions}).layout.lengths().tolist() == [2, 2, 4]
    assert find_sequences(3, 2, None, {"position_ids": torch.arange(2)[None]}).layout.lengths().tolist() == [2, 2, 2]
    assert find_sequences(3, 2, None, {}).layout.lengths().tolist() == [2, 2, 2]


def test_boundaries_of_another_batch_are_refused():
    with pytest.raises(PlanError, match="cu_seq_lens_q ends at 8, the batch at 9"):
        find_sequences(1, 9, None, {"cu_seq_lens_q": torch.tensor([0, 3, 8], dtype=torch.int32)})
    flat = torch.arange(9).expand(3, 1, 9)
    assert find_sequences(1, 9, None, {"position_ids": flat}).layout.num_seqs == 1
    with pytest.raises(PlanError, match="positions of 3 axes"):
        find_sequences(1, 9, None, {"position_ids": flat * torch.tensor([0, 1, 1])[:, None, None]})


@pytest.mark.parametrize("kind", ["bloom", "codegen", "doge", "megatron-bert"])
def test_models_that_compute_attention_by_themselves_are_refused(kind):
    sizes = {"vocab_size": 99, "num_hidden_layers": 1, "num_attention_heads": 4, "is_decoder": True}
    sizes |= {"hidden_size": 32, "n_layer": 1, "n_head": 4, "rotary_dim": 4, "n_positions": 64}
    config = transformers.AutoConfig.for_model(kind, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="unpad")
    with pytest.raises(PlanError, match="compute attention by themselves"):
        model(input_ids=torch.tensor([[3, 4, 5, 6]]))


def test_a_second_derivative_is_refused_by_name():
    if not library.enabled():
        pytest.skip("torch's own attention has one")
    model = make_model("qwen3", attention="unpad")
    loss = model(**flattened(ROWS, bounds=True)).loss
    with pytest.raises(RecipeError, match="attention has no second derivative"):
        torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
