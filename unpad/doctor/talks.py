"""Questions and their replies: roles that are swapped, answers that stand in the question, questions with two answers,
and parts that every row repeats."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from unpad.data.sources.example import Example
from unpad.doctor.finding import Finding, Severity, Value

LEAST = 20  # conversations or texts
ASKS = re.compile(
    r"[?？]|[吗呢么]\s*$|^(?:请|谁|什么|为什么|怎么|怎样|如何|哪|几|多少|what|why|how|who|whom|whose|when|where|which|is|are|do|"
    r"does|did|can|could|would|will|should|please|write|explain|give|tell|list|describe|translate|name|summari[sz]e)\b",
    re.IGNORECASE,
)
MOSTLY, HARDLY = 0.6, 0.2  # shares of replies and of questions that ask
GIVEN, BY_CHANCE = 0.8, 0.3  # shares of questions that hold their own answer, and that of another
LONG_QUESTION = 300  # characters, from which on an answer may be looked up in its question
TWO_ANSWERS, MANY_TWO = 0.2, 0.5  # shares of the questions
ONE_REPLY = 0.9
SAME_REPLY, LEAST_REPLY, OTHER_REPLIES = 0.4, 8, 0.5  # share, characters, and share of different ones among the others
ALL = 0.9  # of the rows, which begin or end alike
LEAST_COMMON = 12  # characters
ENDS = "\n.!?:;|>])}#*=-。！？：；】》"
SOME_COMMON, MUCH_COMMON = 0.05, 0.15  # of the characters that are learnt


def check_talks(rows: dict[str, list[Example]]) -> list[Finding]:
    """Findings on the first rows of every kind of texts, conversations and questions."""
    findings = []
    for kind, examples in rows.items():
        if len(examples) < LEAST or kind == "pairs":
            continue
        fields = (f"data.{kind}",)
        findings += _common(examples, fields)
        talks = [pair for row in examples if (pair := _first_pair(row)) is not None]
        if len(talks) >= LEAST:
            findings += [*_swapped(talks, fields), *_given(talks, fields), *_one_reply(talks, fields)]
            findings += _two_answers(talks, fields) if kind == "chat" else []  # alike.py compares pictures
    return findings


def _first_pair(row: Example) -> tuple[str, str] | None:
    """The first question and its reply."""
    for one, other in zip(row.turns, row.turns[1:], strict=False):
        if one.role == "user" and other.role == "assistant":
            return one.content.strip(), other.content.strip()
    return None


def _swapped(talks: Sequence[tuple[str, str]], fields: tuple[str, ...]) -> list[Finding]:
    """Replies that ask, and questions that do not."""
    asked, replied = (float(np.mean([bool(ASKS.search(pair[i])) for pair in talks])) for i in (0, 1))
    if replied < MOSTLY or asked > HARDLY:
        return []
    values: dict[str, Value] = {"asked": asked, "shown": talks[0][1][:40]}
    return [Finding("swapped_roles", "warning", replied, fields, values)]


def _given(talks: Sequence[tuple[str, str]], fields: tuple[str, ...]) -> list[Finding]:
    """Answers that stand in their own question, and not in those of others, as the choices of a question would."""
    short = [pair for pair in talks if len(pair[0]) <= LONG_QUESTION and len(pair[1]) >= 2]
    if len(short) < LEAST or len({answer for _, answer in short}) < 3:
        return []
    shifted = [short[(i + 1 + len(short) // 2) % len(short)][1] for i in range(len(short))]
    own = float(np.mean([_holds(question, answer) for question, answer in short]))
    other = float(np.mean([_holds(pair[0], answer) for pair, answer in zip(short, shifted, strict=True)]))
    if own < GIVEN or other > BY_CHANCE:
        return []
    question, answer = next(pair for pair in short if _holds(*pair))
    values: dict[str, Value] = {"answer": answer[:40], "question": question[:60], "others": other}
    return [Finding("given_answer", "warning", own, fields, values)]


def _holds(question: str, answer: str) -> bool:
    return answer.casefold().rstrip(" .。!！") in question.casefold()


def _two_answers(talks: Sequence[tuple[str, str]], fields: tuple[str, ...]) -> list[Finding]:
    """Questions that occur again with another answer."""
    answers: dict[str, set[str]] = defaultdict(set)
    for question, answer in talks:
        answers[question].add(answer)
    share = sum(len(answers[question]) > 1 for question, _ in talks) / len(talks)
    if share < TWO_ANSWERS:
        return []
    question = next(question for question, _ in talks if len(answers[question]) > 1)
    first, second, *_ = sorted(answers[question])
    values: dict[str, Value] = {"question": question[:60], "first": first[:30], "second": second[:30]}
    return [Finding("two_answers", "warning" if share >= MANY_TWO else "note", share, fields, values)]


def _one_reply(talks: Sequence[tuple[str, str]], fields: tuple[str, ...]) -> list[Finding]:
    replies = Counter(answer for _, answer in talks)
    if len(replies) < 2:
        return []
    reply, num = replies.most_common(1)[0]
    values: dict[str, Value] = {"sequences": len(talks), "target": reply[:40]}
    if num >= ONE_REPLY * len(talks):
        return [Finding("imbalance", "warning", num / len(talks), fields, values)]
    # Classes and short answers repeat by their nature: a sentence beside replies that differ does not.
    questions = {question for question, answer in talks if answer == reply}
    differ = len(replies) - 1 >= OTHER_REPLIES * (len(talks) - num)
    if num < SAME_REPLY * len(talks) or len(reply) < LEAST_REPLY or not differ or len(questions) < num / 2:
        return []
    return [Finding("same_reply", "warning", num / len(talks), fields, values)]


def _common(rows: Sequence[Example], fields: tuple[str, ...]) -> list[Finding]:
    """Characters that nearly all learnt texts begin or end with."""
    learnt = [turn.content for row in rows for turn in row.turns if _is_learnt(turn.role)]
    findings = []
    for place, texts in (("@begin", learnt), ("@end", [text[::-1] for text in learnt])):
        common = _whole_part(_shared_start(texts))
        share = len(common) * len(texts) / max(sum(map(len, texts)), 1)
        if len(common) < LEAST_COMMON or share < SOME_COMMON:
            continue
        shown = common if place == "@begin" else common[::-1]
        values: dict[str, Value] = {"place": place, "shown": " ".join(shown.split())[:50], "characters": len(common)}
        severity: Severity = "warning" if share >= MUCH_COMMON else "note"
        findings.append(Finding("common_part", severity, share, fields, values))
    return findings[:1]


def _whole_part(common: str) -> str:
    """A common start up to the last mark that ends a part: sentences of one form begin alike, too."""
    return common[: max((place + 1 for place, letter in enumerate(common) if letter in ENDS), default=0)]


def _is_learnt(role: str) -> bool:
    return role not in ("user", "system")


def _shared_start(texts: Sequence[str]) -> str:
    """The longest start that nine of ten texts have, one character after the other."""
    left, found = list(texts), ""
    while left:
        letters = Counter(text[len(found)] for text in left if len(text) > len(found))
        if not letters:
            break
        letter, num = letters.most_common(1)[0]
        if num < ALL * len(texts):
            break
        found += letter
        left = [text for text in left if text.startswith(found)]
    return found
