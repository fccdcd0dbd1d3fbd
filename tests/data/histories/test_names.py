"""Pseudonyms of patients: nobody without the run's key can turn one back into an id."""

import hashlib

import pytest

from unpad.data.histories.tables import alias, named_by

IDS = [str(number) for number in range(10_000)]
KEYS = b"a" * 32, b"b" * 32


@pytest.mark.promise("patients.private")
def test_trying_every_number_does_not_find_the_patient():
    plain = {hashlib.sha256(one.encode()).hexdigest()[:10] for one in IDS}
    with named_by(KEYS[0]):
        assert not plain & {alias(one) for one in IDS}
    assert not plain & {alias(one) for one in IDS}


def test_a_name_is_the_same_within_a_run_and_another_in_every_other():
    with named_by(KEYS[0]):
        first = [alias(one) for one in IDS]
        assert first == [alias(one) for one in IDS] == [alias(one, KEYS[0]) for one in IDS]
        with named_by(KEYS[1]):
            other = [alias(one) for one in IDS]
        assert alias(IDS[0]) == first[0]
    assert not set(first) & set(other)
    assert not set(first) & {alias(one) for one in IDS}
    assert len(set(first)) == len(IDS)
