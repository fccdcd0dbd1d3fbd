"""Findings on questions about images."""

from unpad.data.vqa import VqaData
from unpad.doctor.finding import Finding
from unpad.doctor.rows import Labelled, cut_short, label_fields, of_rows, sees_target
from unpad.doctor.subject import Subject
from unpad.doctor.text import cut_alike, garbled, given_answer, tokenizer


def look(subject: Subject[VqaData]) -> list[Finding]:
    """Findings on the rows as the files have them, and on the sequences of the stage."""
    data, where = subject.data, label_fields(subject)
    examples = [data.examples[seq] for seq in subject.stage.train_ids.tolist()]
    shown = [tuple(data.album.images[image].sha256 for image in one.images) for one in examples]
    pairs = zip(shown, examples, strict=True)
    rows = [Labelled((images, one.question), one.answer, one.where) for images, one in pairs]
    asked = [Labelled(one.question, one.answer, one.where) for one in examples if one.question]
    texts = [(f"{one.question}\n{one.answer}", one.where) for one in examples[:2000]]
    findings = [*of_rows(subject, rows), *garbled(texts, where), *given_answer(asked, where)]
    findings += cut_alike([(one.answer, one.where) for one in examples], where)
    findings += [*cut_short(subject), *sees_target(subject)]
    return [*findings, *tokenizer(data.rows.lost)]
