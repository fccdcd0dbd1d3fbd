"""Checks of texts, conversations and pairs of replies."""

from __future__ import annotations

from functools import partial

from unpad.data.text import TextData
from unpad.doctor.data.alike import check_alike, check_near_texts, check_unlike
from unpad.doctor.data.joins import check_joins
from unpad.doctor.data.preferences import check_preferences
from unpad.doctor.data.residue import check_residue
from unpad.doctor.data.rows import check_inputs, is_one_token
from unpad.doctor.data.sides import check_sides, measure_texts
from unpad.doctor.data.talks import check_talks
from unpad.doctor.data.texts import check_texts, originals
from unpad.doctor.data.tokens import check_tokens
from unpad.doctor.data.unread import check_unread
from unpad.doctor.data.writing import check_writing
from unpad.doctor.recipe.course import check_left_out
from unpad.doctor.subject import Subject
from unpad.terminal.finding import Finding


def check_originals(subject: Subject[TextData]) -> list[Finding]:
    """Findings on the rows as the data files have them."""
    rows, report, template = originals(subject), subject.data.report, subject.setup.recipe.data.template
    return [
        *check_texts(rows),
        *check_talks(rows),
        *check_writing(rows, (template.system, template.user, template.assistant)),
        *check_residue(rows),
        *check_joins(rows),
        *check_preferences(subject, rows),
        *check_left_out(subject, report.rows_quarantined, report.rows_read),
    ]


def check_sequences(subject: Subject[TextData]) -> list[Finding]:
    """Findings on the sequences of the stage."""
    return [
        *check_inputs(subject, is_one_token),
        *check_tokens(subject, subject.data.report.lost),
        *check_alike(subject),
        *check_near_texts(subject),
        *check_unlike(subject),
        *check_unread(subject),
        *check_sides(subject, partial(measure_texts, subject.data)),
    ]


def transfer(subject: Subject[TextData]) -> None:
    """None, as texts have no labels."""
    return None
