"""Checks of images with a class each."""

from __future__ import annotations

from functools import partial

from unpad.data.images import ImageData
from unpad.doctor.alike import check_alike, check_near_pictures
from unpad.doctor.carry import Transfer, by_classes
from unpad.doctor.course import check_left_out
from unpad.doctor.finding import Finding
from unpad.doctor.pictures import check_pictures
from unpad.doctor.regions import check_regions
from unpad.doctor.rows import check_inputs, is_one_colour
from unpad.doctor.sides import check_classes, check_sides, measure_pictures
from unpad.doctor.subject import Subject


def check_originals(subject: Subject[ImageData]) -> list[Finding]:
    """A finding on the rows as the data files have them."""
    bad = len(subject.data.bad_rows)
    return check_left_out(subject, bad, bad + len(subject.data.table))


def check_sequences(subject: Subject[ImageData]) -> list[Finding]:
    """Findings on the sequences of the stage."""
    return [
        *check_inputs(subject, is_one_colour),
        *check_alike(subject),
        *check_near_pictures(subject),
        *check_pictures(subject),
        *check_regions(subject),
        *check_classes(subject),
        *check_sides(subject, partial(measure_pictures, subject.data)),
    ]


def transfer(subject: Subject[ImageData]) -> Transfer | None:
    """The way to judge what the model learnt by heart."""
    return by_classes(subject)
