"""Verdicts about ways to train: none is wrong."""

import pytest

import unpad
from tests.proof.foreign.hugging_face import build, quiet
from tests.proof.foreign.setups import TUNED_FAULTS, TUNED_SOUND, Pair
from unpad.proof.foreign.certificate import ForeignCertificate
from unpad.proof.foreign.judge import NO_ROUTER_LOSS

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and TRL
quiet()


def certificate_of(pair: Pair) -> ForeignCertificate:
    model = pair.change(build(pair.family, **(pair.fields or {})))
    return unpad.prove_callable(model, pair.collate, pair.rows, loss_masks=pair.masks)


@pytest.mark.slow
@pytest.mark.promise("proof.verdicts")
@pytest.mark.parametrize("name", TUNED_SOUND)
def test_a_sound_set_up_is_sound(name):
    certificate = certificate_of(TUNED_SOUND[name])
    assert certificate.verdict == "sound", str(certificate)
    assert (NO_ROUTER_LOSS in certificate.notes) == (name == "experts with a router loss")


@pytest.mark.promise("proof.verdicts")
@pytest.mark.parametrize("name", TUNED_FAULTS)
def test_a_fault_is_found(name):
    pair, verdict = TUNED_FAULTS[name]
    certificate = certificate_of(pair)
    assert certificate.verdict == verdict, str(certificate)
