"""Checks of images with a class each."""

from __future__ import annotations

from functools import partial

from unpad.data.images import ImageData
from unpad.doctor.any_family import check_originals, transfer
from unpad.doctor.data.alike import check_alike, check_near_pictures
from unpad.doctor.data.pictures import check_lost_colour, check_pictures, check_regions
from unpad.doctor.data.rows import check_inputs, is_one_vector
from unpad.doctor.data.sides import check_classes, check_sides, measure_pictures
from unpad.doctor.subject import Subject
from unpad.terminal.finding import Finding

__all__ = ["check_originals", "check_sequences", "transfer"]


def check_sequences(subject: Subject[ImageData]) -> list[Finding]:
    """Findings on the sequences of the stage."""
    return [
        *check_inputs(subject, is_one_vector),
        *check_alike(subject),
        *check_near_pictures(subject),
        *check_pictures(subject),
        *check_lost_colour(subject),
        *check_regions(subject),
        *check_classes(subject),
        *check_sides(subject, partial(measure_pictures, subject.data)),
    ]
