"""Checks of questions about images."""

from __future__ import annotations

from unpad.data.sources.example import Example, Turn
from unpad.data.vqa import VqaData
from unpad.doctor import any_family
from unpad.doctor.data.alike import check_alike, check_near_pictures
from unpad.doctor.data.joins import check_joined_pictures, show_their_colours
from unpad.doctor.data.pictures import check_lost_pictures, check_pictures
from unpad.doctor.data.rows import check_inputs, is_one_vector
from unpad.doctor.data.sides import check_answers, check_sides, measure_pictures, measure_texts
from unpad.doctor.data.talks import check_talks
from unpad.doctor.data.texts import MOST_READ, check_texts
from unpad.doctor.data.tokens import check_tokens
from unpad.doctor.data.writing import check_writing
from unpad.doctor.subject import Subject
from unpad.doctor.trials.carry import Transfer, by_pictures
from unpad.terminal.finding import Finding


def check_originals(subject: Subject[VqaData]) -> list[Finding]:
    """Findings on the rows as the data files have them."""
    data, template = subject.data, subject.setup.recipe.data.template
    asked = [one for one in data.examples[:MOST_READ] if one.question]
    turns = [(Turn("user", one.question), Turn("assistant", one.answer)) for one in asked]
    rows = {"vqa": [Example(one.where, pair) for one, pair in zip(asked, turns, strict=True)]}
    return [
        *check_texts(rows),
        *check_talks(rows),
        *check_writing(rows, (template.system, template.user, template.assistant)),
        *check_lost_pictures(data),
        *check_joined_pictures(data),
        *any_family.check_originals(subject),
    ]


def check_sequences(subject: Subject[VqaData]) -> list[Finding]:
    """Findings on the sequences of the stage."""
    data = subject.data

    def asked(seq_id: int) -> tuple[object, object]:
        """Pictures and question of a sequence, and its answer."""
        one = data.examples[seq_id]
        return (tuple(data.album.images[image].sha256 for image in one.images), one.question), one.answer

    return [
        *check_inputs(subject, is_one_vector),
        *check_tokens(subject, data.rows.lost),
        *check_alike(subject, asked),
        *check_near_pictures(subject),
        *check_pictures(subject),
        *check_answers(subject),
        *check_sides(subject, lambda ids: {**measure_pictures(data, ids), **measure_texts(data, ids)}),
    ]


def transfer(subject: Subject[VqaData]) -> Transfer | None:
    """The way to judge what the model overfit; None where colours already show that pictures are the own ones,
    as a small model may learn too little of them."""
    return None if show_their_colours(subject.data) else by_pictures(subject.data)
