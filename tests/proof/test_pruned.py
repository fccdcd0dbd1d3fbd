"""The certificate covers what is left of visual tokens, and catches faults in how they are taken out."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.merging import merging
from tests.helpers.pruning import EARLY, METHODS, pruned
from tests.helpers.vision import Row, prepare
from unpad.batching.batch import RaggedBatch
from unpad.batching.layout import PaddedLayout
from unpad.models.vision_language import prune
from unpad.models.vision_language.model import TEACHING, VisionLanguage
from unpad.models.vision_language.prune_pass import PrunePass
from unpad.nn.block import Stream
from unpad.nn.native import library
from unpad.proof.certificate import certify, prove
from unpad.proof.line import Certificate
from unpad.proof.measure import Variant

pytestmark = pytest.mark.slow

ROWS: list[Row] = [
    ("1 5 <image> 7 8", [(3, 4)], "9 10"),
    ("2 3 4", [], "5 6"),
    ("7 <image> 8 9 11 <image> 4", [(2, 3), (1, 3)], "1"),
    ("<image> 3", [(2, 2)], "4 5 6 7 8 9 1 2"),
]


@pytest.fixture(scope="module")
def batch() -> RaggedBatch:
    return prepare(ROWS).batch


def failed(certificate: Certificate) -> list[str]:
    return [line.name for line in certificate.lines if line.passed is False]


def certificate_of(model: VisionLanguage, batch: RaggedBatch, precision: str = "fp32") -> Certificate:
    model.mode = None
    return prove(model.float(), batch, precision=precision)


@pytest.mark.promise("vqa.prune-layers")
@pytest.mark.parametrize(
    ("model", "precision"),
    [
        (lambda: pruned(), "bf16"),
        (lambda: pruned(**METHODS["attention"]), "fp32"),
        (lambda: pruned(**EARLY["learned"]), "bf16"),
        (lambda: pruned(**EARLY["relevance"]), "fp32"),
        (lambda: merging("slots", prune="learned"), "fp32"),
        (lambda: merging("simple"), "fp32"),
    ],
)
def test_correct_code_passes_in_every_mode(model, precision, batch):
    made = model()
    certificate = certificate_of(made, batch, precision)
    assert certificate.passed, "\n".join(certificate.text())
    names = [line.name for line in certificate.lines]
    for mode in made.modes[1:]:
        errors = [f"{precision} {what} against fp64" for what in ("outputs", "loss terms", "gradients")]
        mine = [name.partition(": ")[2] for name in names if name.startswith(f"{mode}: ")]
        assert [name.removesuffix(", terms and gradients") for name in mine] == [
            "packed = plain reference",
            "padded left = plain reference",
            "split into micro-batches, one empty = plain reference",
            *(["packed, torch alone = plain reference"] if library.enabled() else []),
            *(errors if mode in TEACHING and made.config.merge is None else []),
            f"{precision} sequences are isolated, bit for bit",
        ]
    assert "packed = alone" in names, "and the rest of it, with all visual tokens"
    assert made.mode == made.modes[-1], "the model is as it was"


@pytest.mark.promise("vqa.prune-layers")
def test_positions_counted_anew_after_a_removal_are_caught(batch, monkeypatch):
    model, keep = pruned(), Stream.keep

    def counted_anew(stream: Stream, kept: Tensor) -> Stream:
        left = keep(stream, kept)
        if isinstance(left.layout, PaddedLayout):
            return left
        places = torch.cat([torch.arange(n) for n in left.layout.lengths().tolist()])
        return Stream(left.x, left.delta, left.layout, model.decoder._rotary(places, left.x.dtype))

    monkeypatch.setattr(Stream, "keep", counted_anew)
    names = failed(certificate_of(model, batch))
    assert "hard: packed = plain reference" in names
    assert not any(name.startswith("soft") for name in names)


def test_a_mask_that_is_cut_off_from_its_gradient_is_caught(batch, monkeypatch):
    right = prune.cumulative_keep
    monkeypatch.setattr(prune, "cumulative_keep", lambda probabilities: right(probabilities).detach())
    assert "soft: packed = plain reference" in failed(certificate_of(pruned(), batch))


@pytest.mark.promise("vqa.hard-pruning")
def test_the_first_samples_choice_for_all_is_caught(batch, monkeypatch):
    choose = PrunePass._choose

    def first_for_all(own: PrunePass, *arguments: Any) -> Tensor:
        kept, layout = choose(own, *arguments), own.visual_layout
        first = kept[: int(layout.lengths()[0])]
        return torch.cat([first.repeat(n // max(len(first), 1) + 1)[:n] for n in layout.lengths().tolist()])

    monkeypatch.setattr(PrunePass, "_choose", first_for_all)
    model = pruned()
    for head in model.pruners.values():
        head.to_logit.weight.data.mul_(100)  # samples choose for reasons of their own, not by the noise they share
    assert "hard: packed = plain reference" in failed(certificate_of(model, batch))


@pytest.mark.nightly
def test_scaled_states_in_place_of_hidden_keys_are_caught(batch, monkeypatch):
    def scaled(own: PrunePass, index: int, entered: Stream, left: Stream) -> Stream:
        own.probabilities.append(torch.sigmoid(own._judge(index, entered, left)))
        factor = left.x.new_ones(len(left.x)).index_copy(0, own._visual, own.keep().to(left.x.dtype))[:, None]
        return replace(left, x=left.x * factor, delta=None if left.delta is None else left.delta * factor)

    monkeypatch.setattr(PrunePass, "_soften", scaled)
    assert "soft: packed = plain reference" in failed(certificate_of(pruned(), batch))


@pytest.mark.nightly
def test_images_of_another_sequence_are_caught(batch):
    """By a line of its own: without merging or removal, no result depends on whose an image is."""
    bad = replace(batch, media_seqs=batch.media_seqs.flip(0))
    model = pruned().float()
    alone, whole = [batch.select([i]) for i in range(4)], [[0, 1, 2, 3]]
    good, certificate = (certify(model, alone, [Variant("packed", [one], whole)]) for one in (batch, bad))
    assert "images stay within their sequence" not in failed(good)
    assert "images stay within their sequence" in failed(certificate)
