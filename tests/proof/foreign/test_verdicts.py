"""Verdicts about ways to train: none is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

import unpad
from tests.proof.foreign import held_out
from tests.proof.foreign.hugging_face import build, quiet
from tests.proof.foreign.setups import TUNED_FAULTS, TUNED_SOUND, Pair
from unpad.proof.foreign.certificate import ForeignCertificate
from unpad.proof.foreign.judge import NO_ROUTER_LOSS, OWN_LOSS

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and TRL
quiet()


def certificate_of(pair: Pair) -> ForeignCertificate:
    model = pair.change(build(pair.family, **(pair.fields or {})))
    return unpad.prove_callable(model, pair.collate, pair.rows, loss_masks=pair.masks)


@pytest.mark.promise("proof.verdicts")
@pytest.mark.parametrize("name", TUNED_SOUND)
def test_a_sound_set_up_is_sound(name: str) -> None:
    certificate = certificate_of(TUNED_SOUND[name])
    assert certificate.verdict == "sound", str(certificate)
    assert (OWN_LOSS in certificate.notes) == (name == "a loss function of its own")
    assert (NO_ROUTER_LOSS in certificate.notes) == (name == "experts with a router loss")


@pytest.mark.promise("proof.verdicts")
@pytest.mark.parametrize("name", TUNED_FAULTS)
def test_a_fault_is_found(name: str) -> None:
    pair, verdict = TUNED_FAULTS[name]
    certificate = certificate_of(pair)
    assert certificate.verdict == verdict, str(certificate)


def held_out_certificate_of(way: held_out.Way) -> ForeignCertificate:
    model = way.change(held_out.small(way.kind))
    return unpad.prove_callable(model, way.collate, way.rows, loss_masks=way.masks)


@pytest.mark.nightly
@pytest.mark.promise("proof.verdicts")
@pytest.mark.parametrize("name", held_out.SOUND)
def test_a_sound_set_up_that_was_held_out_is_sound(name: str) -> None:
    certificate = held_out_certificate_of(held_out.SOUND[name])
    assert certificate.verdict == "sound", str(certificate)


@pytest.mark.nightly
@pytest.mark.promise("proof.verdicts")
@pytest.mark.parametrize("name", held_out.FAULTS)
def test_a_fault_that_was_held_out_is_found(name: str) -> None:
    way, verdict = held_out.FAULTS[name]
    certificate = held_out_certificate_of(way)
    assert certificate.verdict == verdict, str(certificate)


@pytest.mark.nightly
@pytest.mark.promise("proof.verdicts")
@pytest.mark.parametrize("name", held_out.TRAINERS_SOUND)
def test_a_sound_trainer_that_was_held_out_is_sound(name: str, tmp_path: Path) -> None:
    certificate = unpad.prove_trainer(held_out.TRAINERS_SOUND[name](tmp_path))
    assert certificate.verdict == "sound", str(certificate)


@pytest.mark.nightly
@pytest.mark.promise("proof.verdicts")
@pytest.mark.parametrize("name", held_out.TRAINERS_FAULTY)
def test_a_faulty_trainer_that_was_held_out_is_found(name: str, tmp_path: Path) -> None:
    make, verdict = held_out.TRAINERS_FAULTY[name]
    certificate = unpad.prove_trainer(make(tmp_path))
    assert certificate.verdict == verdict, str(certificate)
