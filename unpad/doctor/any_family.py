"""Checks of a family without a file of its own here."""

from __future__ import annotations

from unpad.doctor.data.alike import check_alike
from unpad.doctor.data.rows import check_inputs, is_one_vector
from unpad.doctor.data.sides import check_sides
from unpad.doctor.recipe.course import check_left_out
from unpad.doctor.subject import Subject
from unpad.doctor.trials.carry import Transfer, by_classes
from unpad.terminal.finding import Finding


def check_originals(subject: Subject) -> list[Finding]:
    """A finding on rows that were left out."""
    bad = len(subject.data.bad_rows)
    return check_left_out(subject, bad, bad + len(subject.data.table))


def check_sequences(subject: Subject) -> list[Finding]:
    """Findings on the sequences of the stage."""
    return [
        *check_inputs(subject, is_one_vector),
        *check_alike(subject),
        *check_sides(subject, lambda ids: {}),
    ]


def transfer(subject: Subject) -> Transfer | None:
    """The way to judge what the model overfit: by classes, where there are some."""
    return by_classes(subject)
