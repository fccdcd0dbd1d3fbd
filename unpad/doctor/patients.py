"""Checks of patients."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from unpad.data.patients import EventData
from unpad.doctor.any_family import transfer
from unpad.doctor.data.alike import check_alike
from unpad.doctor.data.columns import check_columns
from unpad.doctor.data.histories import check_histories
from unpad.doctor.data.sides import check_codes, check_sides, measure_patients
from unpad.doctor.data.values import check_values
from unpad.doctor.subject import Subject
from unpad.terminal.finding import Finding

__all__ = ["check_originals", "check_sequences", "transfer"]


def check_originals(subject: Subject[EventData]) -> list[Finding]:
    """No finding: the rows of the tables are no sequences."""
    return []


def check_sequences(subject: Subject[EventData]) -> list[Finding]:
    """Findings on the sequences of the stage, of a patient at several landmarks on the last, which holds the most."""
    last = np.flatnonzero(np.diff(subject.data.table.group, append=-1))
    train_ids, held_out_ids = (ids[np.isin(ids, last)] for ids in (subject.stage.train_ids, subject.stage.held_out_ids))
    subject = replace(subject, stage=replace(subject.stage, train_ids=train_ids, held_out_ids=held_out_ids))
    return [
        *check_histories(subject),
        *check_columns(subject),
        *check_alike(subject),
        *check_codes(subject),
        *check_sides(subject, partial(measure_patients, subject.data)),
        *check_values(subject),
    ]
