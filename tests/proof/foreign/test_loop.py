"""Proofs of training loops of one's own: what goes wrong in them is found, and nothing is left changed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F

from tests.hf.families import make_model, make_rows, make_sequences, targets_of
from unpad import prove_loop
from unpad.errors import ProofError
from unpad.hf import collate, prepare

ROWS = make_rows(make_sequences(9, high=24))
NUM = "num_items_in_batch"


def batches() -> list[dict[str, Any]]:
    """Those of one update, each with the targets of the update over its number of batches."""
    made = [collate(ROWS[:6]), collate(ROWS[6:])]
    return [{**one, NUM: targets_of(ROWS) / 2} for one in made]


def loop(model: nn.Module, *leave_out: str, share: float = 0.5) -> Callable[[dict[str, Any]], None]:
    def step(batch: dict[str, Any]) -> None:
        (model(**{name: value for name, value in batch.items() if name not in leave_out}).loss * share).backward()

    return step


@pytest.mark.parametrize(
    ("family", "is_prepared", "leave_out", "share", "verdict", "failed"),
    [
        ("opt", True, (), 0.5, "sound", ""),
        ("opt", False, (), 0.5, "leaking", "isolation"),
        ("qwen3", True, (NUM,), 0.5, "wrong loss", "loss"),  # a mean of means
        ("qwen3", True, (), 1.0, "wrong loss", "loss"),  # not divided by the two batches
        ("qwen3", True, ("position_ids", "cu_seq_lens_q", "cu_seq_lens_k"), 0.5, "leaking", "isolation"),
        pytest.param("gpt_oss", False, (), 0.5, "leaking", "isolation", marks=pytest.mark.nightly),
        pytest.param("gpt_oss", True, (), 0.5, "sound", "", marks=pytest.mark.nightly),
    ],
)
def test_faults_of_a_loop_are_found(family, is_prepared, leave_out, share, verdict, failed):
    model = make_model(family)
    if is_prepared:
        prepare(model)
    certificate = prove_loop(loop(model, *leave_out, share=share), batches())
    assert certificate.verdict == verdict, str(certificate)
    assert not failed or failed in {finding.kind for finding in certificate.failed}
    if share == 1.0:
        assert "the loss is 2 times the mean over targets: not divided by the 2" in certificate.cause


def test_a_loop_of_accelerate_with_its_own_loss_is_proved_and_everything_is_as_before():
    model = prepare(make_model("qwen3")).model.train()
    accelerator = Accelerator(gradient_accumulation_steps=2)
    wrapped = accelerator.prepare(model)

    def step(batch):
        with accelerator.accumulate(wrapped):
            labels, num = batch.pop("labels"), batch.pop(NUM)
            logits = wrapped(**batch).logits[0, :-1]
            accelerator.backward(F.cross_entropy(logits.double(), labels[0, 1:], reduction="sum") / num)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(wrapped.parameters(), 1e9)

    model.get_input_embeddings().weight.grad = torch.ones_like(model.get_input_embeddings().weight)
    before = torch.get_rng_state()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    certificate = prove_loop(lambda batch: step(dict(batch)), batches())
    assert certificate.passed, str(certificate)
    assert certificate.num_sequences == len(ROWS)
    assert accelerator.step % 2 == 0  # whole updates: the next batch is the first of one
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training
    assert [name for name, one in model.named_parameters() if one.grad is not None] == ["model.embed_tokens.weight"]
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_padded_rows_of_a_loop_are_told_by_their_mask():
    model = make_model("qwen3")
    ids = torch.tensor([[5, 6, 7, 8, 9], [4, 3, 2, 0, 0]])
    mask = torch.tensor([[1] * 5, [1, 1, 1, 0, 0]])
    batch = {"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask > 0, ids, -100)}
    certificate = prove_loop(lambda batch: model(**batch).loss.backward(), [batch])
    assert certificate.passed, str(certificate)
    assert certificate.num_tokens == 8
    faulty = {**batch, "labels": ids}
    assert not prove_loop(lambda _: model(**faulty).loss.backward(), [batch]).passed


def test_what_is_no_step_of_an_update_is_refused_by_name():
    model = make_model("qwen3")
    step, optimizer = loop(model), torch.optim.SGD(model.parameters())
    with pytest.raises(ProofError, match="the step updates weights"):
        prove_loop(lambda batch: (step(batch), optimizer.step()), batches())
    with pytest.raises(ProofError, match="calls Qwen3ForCausalLM 2 times"):
        prove_loop(lambda batch: (step(batch), step(batch)), batches())
    with pytest.raises(ProofError, match="pictures or sounds"):
        prove_loop(step, [one | {"pixel_values": torch.ones(2, 3, 4, 4)} for one in batches()])
    with pytest.raises(ProofError, match="calls no model with input_ids"):
        prove_loop(lambda batch: None, batches())
    refused = prove_loop(lambda batch: model(input_ids=batch["input_ids"], labels=0), batches())
    assert refused.verdict == "refused"
