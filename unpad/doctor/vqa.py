"""Findings on questions about images."""

from collections import Counter, defaultdict
from collections.abc import Sequence

from unpad.data.vqa import VqaData
from unpad.doctor.finding import Finding, Found, finding
from unpad.doctor.rows import Labelled, cut_short, label_fields, of_rows, sees_target, spelt_twice
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
    findings += [*spelt_twice([one.answer for one in examples], where), *without_picture(asked, where)]
    findings += [*cut_short(subject), *sees_target(subject)]
    return [*findings, *tokenizer(data.rows.lost)]


@finding("without_picture", explains={"labels_random"},
    en=("{number:.0%} of the answers follow from their question alone: {question!r} always has {answer!r}. Nobody "
        "needs the picture.", "ask each question of pictures with different answers"),
    zh=("{number:.0%} 的答案仅凭问题就能得出：{question!r} 总是 {answer!r}。不需要看图。",
        "让问题有不同答案"))  # fmt: skip
def without_picture(asked: Sequence[Labelled], fields: tuple[str, ...]) -> Found | None:
    """Questions that recur with one answer each, whatever their picture."""
    answers: dict[object, Counter[object]] = defaultdict(Counter)
    for row in asked:
        answers[row.asked][row.target] += 1
    often = {question: counts for question, counts in answers.items() if counts.total() >= 3}
    num = sum(counts.total() for counts in often.values())
    share = sum(counts.most_common(1)[0][1] for counts in often.values()) / max(num, 1)
    usual = {question: counts.most_common(1)[0][0] for question, counts in often.items()}
    if num < max(40, len(asked) / 2) or share < 0.98 or len(set(usual.values())) < 2:
        return None
    question, answer = next(iter(usual.items()))
    return Found(share, *fields, question=str(question)[:50], answer=str(answer)[:30])
