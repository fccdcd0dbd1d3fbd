"""Checks of patients."""

from __future__ import annotations

from functools import partial

from unpad.data.patients import EventData
from unpad.doctor.alike import check_alike
from unpad.doctor.carry import Transfer, by_classes
from unpad.doctor.finding import Finding
from unpad.doctor.histories import check_histories
from unpad.doctor.sides import check_sides, measure_patients
from unpad.doctor.subject import Subject
from unpad.doctor.values import check_values


def check_originals(subject: Subject[EventData]) -> list[Finding]:
    """No finding: the rows of the tables are no sequences."""
    return []


def check_sequences(subject: Subject[EventData]) -> list[Finding]:
    """Findings on the sequences of the stage."""
    return [
        *check_histories(subject),
        *check_alike(subject),
        *check_sides(subject, partial(measure_patients, subject.data)),
        *check_values(subject),
    ]


def transfer(subject: Subject[EventData]) -> Transfer | None:
    """The way to judge what the model learnt by heart."""
    return by_classes(subject)
