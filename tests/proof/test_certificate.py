"""The certificate passes on correct code, and catches every planted fault."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conftest import random_batch, tiny_model
from tests.helpers.models import Own
from tests.helpers.paths import NATIVE_PRECISION, needs_kernels
from unpad.batching import batch as batch_module
from unpad.batching.batch import RaggedBatch
from unpad.models.decoder import Decoder
from unpad.nn import attention, block, losses
from unpad.nn.losses import Terms
from unpad.nn.native import library
from unpad.proof.certificate import prove
from unpad.proof.line import Certificate, Line

LENGTHS = [9, 3, 14, 2, 7, 11]


def failed(certificate: Certificate) -> list[str]:
    return [line.name for line in certificate.lines if line.passed is False]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"causal": False},
        {"norm": "layernorm", "positions": "learned", "kv_heads": 2},
        {"width": 64, "heads": 2},  # head size 32, which the native kernels take in bf16
    ],
)
def test_correct_code_passes(precision, fields):
    certificate = prove(tiny_model(torch.float32, dropout=0.1, **fields), random_batch(LENGTHS), precision=precision)
    assert certificate.passed, failed(certificate)
    shared = [
        line.name for line in certificate.lines if "torch" not in line.name
    ]  # of native kernels, if there are any
    assert shared == [
        "labels stay within their sequence",
        "the same batch twice is bit-equal (no dropout left on)",
        "packed = alone",
        "padded right = alone",
        "padded left = alone",
        "padded further = alone",
        "split into micro-batches, one empty = alone",
        "not sorted by length = alone",
        "no gradient crosses between sequences",
        "what padding holds is invisible",
        "a token never changes an earlier output",
        *(f"{precision} {what} against fp64" for what in ("outputs", "loss terms", "gradients")),
        f"{precision} sequences are isolated, bit for bit",
    ]
    applies = {line.name: line.applies for line in certificate.lines}
    assert applies["packed, torch alone = alone"] == library.enabled()
    assert applies["a token never changes an earlier output"] == fields.get("causal", True)


def test_a_module_without_our_base_class_is_proved():
    model = tiny_model(torch.float32)
    ours, certificate = (prove(one, random_batch(LENGTHS)) for one in (model, Own(model)))
    assert certificate.passed, failed(certificate)
    assert [line.name for line in certificate.lines] == [line.name for line in ours.lines]


@pytest.mark.promise("speed.model")
@needs_kernels
@pytest.mark.parametrize("scale", [1.001, 1.05])
def test_a_native_kernel_that_is_a_little_off_is_caught(scale, monkeypatch):
    right = attention.native_attention
    monkeypatch.setattr(attention, "native_attention", lambda *args, **options: scale * right(*args, **options))
    model = tiny_model(torch.float32, width=64, heads=2)
    names = failed(prove(model, random_batch(LENGTHS), precision=NATIVE_PRECISION))
    assert "packed = alone" in names
    assert "packed, torch alone = alone" not in names
    seen = scale > 1.01 or NATIVE_PRECISION == "fp32"  # 0.1 % is less than bf16's own error
    assert (f"{NATIVE_PRECISION} gradient error over that of torch's kernels" in names) == seen


@pytest.mark.promise("train.bf16-head")
@pytest.mark.parametrize("share", [losses.NEGLIGIBLE, 1.0])
def test_targets_that_are_wrongly_left_out_are_caught(share, monkeypatch):
    monkeypatch.setattr(losses, "LEAST_VOCAB", 1)
    monkeypatch.setattr(losses, "ROUND_ROWS", 1)
    monkeypatch.setattr(losses, "NEGLIGIBLE", share)
    certificate = prove(tiny_model(torch.float32), random_batch(LENGTHS), precision="bf16")
    name = "bf16 gradient error over that of all targets"
    assert (name in failed(certificate)) == (share == 1.0)
    assert (name in [line.name for line in certificate.lines]) == (share == 1.0), "none is left out by a new model"


def test_a_sequence_that_does_not_see_its_own_tokens_is_caught(monkeypatch):
    """Isolation from oneself: every comparison with the truth would hold."""
    right = Decoder._embed
    monkeypatch.setattr(Decoder, "_embed", lambda own, batch: right(own, batch) * 0)
    names = failed(prove(tiny_model(torch.float32, tied=False), random_batch(LENGTHS)))
    assert names == ["fp32 sequences are isolated, bit for bit"]


def test_counts_that_are_off_where_every_mean_is_right_are_caught(monkeypatch):
    losses, count_targets = Decoder.losses, Decoder.count_targets

    def times(batch: RaggedBatch) -> int:
        return 2 if batch.num_seqs > 1 else 1

    def twice(own: Decoder, batch: RaggedBatch, *rest: Any) -> Terms:
        return {name: (s * times(batch), n * times(batch)) for name, (s, n) in losses(own, batch, *rest).items()}

    def counted_twice(own: Decoder, batch: RaggedBatch) -> dict[str, int]:
        return {name: n * times(batch) for name, n in count_targets(own, batch).items()}

    monkeypatch.setattr(Decoder, "losses", twice)
    monkeypatch.setattr(Decoder, "count_targets", counted_twice)
    names = failed(prove(tiny_model(torch.float32), random_batch(LENGTHS)))
    assert {"packed = alone", "padded left = alone"} <= set(names)


# --------------------------------------------------------------------------- exceptions, and names of kernels


def line_of(certificate: Certificate, name: str) -> Line:
    return next(line for line in certificate.lines if line.name == name)


def test_an_exception_is_a_line_that_fails_with_its_message(monkeypatch):
    def off_by_one(*args: Any) -> Tensor:
        return right(*args)[:, 1:]

    right = batch_module._real_cells
    monkeypatch.setattr(batch_module, "_real_cells", off_by_one)
    certificate = prove(tiny_model(torch.float32), random_batch(LENGTHS))
    assert not certificate.passed
    for name in ("padded right = alone", "padded left = alone", "what padding holds is invisible"):
        line = line_of(certificate, name)
        assert line.passed is False
        assert "Error: " in line.note
        assert ".py:" in line.note
    assert line_of(certificate, "packed = alone").passed, "checks that do not pad go on"
    text = certificate.text()
    assert line_of(certificate, "padded left = alone").note in " ".join(" ".join(text).split())
    assert "FAILED" in text[-1]


def test_attention_dropout_left_on_is_caught(monkeypatch):
    """The truth, attention by definition, has no dropout, so nothing can be compared with it."""
    right = block.Attention.forward

    def left_on(own: block.Attention, *args: Any) -> Tensor:
        monkeypatch.setattr(own, "training", True)
        return right(own, *args)

    monkeypatch.setattr(block.Attention, "forward", left_on)
    certificate = prove(tiny_model(torch.float32, attention_dropout=0.3), random_batch(LENGTHS))
    assert failed(certificate) == ["each sequence alone", "the same batch twice is bit-equal (no dropout left on)"]
    assert "the definition has no dropout" in certificate.lines[0].note
