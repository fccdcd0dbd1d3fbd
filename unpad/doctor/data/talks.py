"""Questions and their replies: roles that are swapped, answers that stand in what comes before them, replies that
repeat their question, questions with two answers, and parts that every row repeats."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from unpad.data.sources.example import Example, Turn
from unpad.terminal.finding import Finding, Severity, Value

LEAST = 20  # conversations or texts
ASKS = re.compile(
    r"[?？]|[吗呢么]\s*$|^(?:请|谁|什么|为什么|怎么|怎样|如何|哪|几|多少|what|why|how|who|whom|whose|when|where|which|is|are|do|"
    r"does|did|can|could|would|will|should|please|write|explain|give|tell|list|describe|translate|name|summari[sz]e)\b",
    re.IGNORECASE,
)
MOSTLY, HARDLY = 0.6, 0.2  # shares of replies and of questions that ask
MANY, NEARLY_NONE = 0.4, 0.05  # of them, which say the same
SENTENCE = re.compile(r"[^.!?。！？\n]*[.!?。！？\n]?")
ALIKE, DIFFER = 0.05, 0.5  # different first messages and replies, as shares of the conversations
GREETINGS = 5  # different first messages
POOR, RICH, LONG_REPLY = 0.05, 0.5, 20  # different messages among trained and other ones, and characters of the former
LONG_WORD, ANSWERING = re.compile(r"\w{4,}"), 0.15  # words that are looked for, and least share of messages
GIVEN, BY_CHANCE = 0.8, 0.3  # shares of questions that hold their own answer, and that of another
GIVEN_BEFORE, OF_CONTEXT, LEAST_WORDS = 0.4, 0.3, 4  # of the rows; of what is their own in the message; of the reply
REPEATED, LEAST_QUESTION = 0.5, 15  # share of replies that hold their question, and its characters
OTHER_CHOICES = 0.5  # of the questions, that hold the answers of others, too, as texts to be read do
LONG_QUESTION, PASSAGE = 300, 3  # characters and sentences, from which on an answer may be looked up in its question
TWO_ANSWERS, MANY_TWO = 0.2, 0.5  # shares of the questions
FEW_ASKED, SAID_OFTEN = 20, 3  # different questions, and rows for each of their answers
ONE_REPLY = 0.9
MANY_REFUSALS, FIRST = 0.6, 120  # of the replies, and characters of a reply that are searched
REFUSES = re.compile(
    r"\bas an? (?:ai|large|language)\b|(?:sorry|apologi[sz]e|unfortunately).{0,40}\b(?:can(?:no|')?t|can not|unable)\b|"
    r"\bals (?:ki|sprachmodell)\b|leider .{0,30}\bnicht\b|désolé.{0,40} pas\b|lo siento.{0,30}\bno\b|"
    r"作为.{0,8}(?:AI|人工智能|语言模型)|(?:抱歉|对不起).{0,12}(?:无法|不能)",
    re.IGNORECASE | re.DOTALL,
)
SAME_REPLY, LEAST_REPLY, OTHER_REPLIES = 0.4, 8, 0.5  # share, characters, and share of different ones among the others
ALL = 0.9  # of the rows, which begin or end alike
LEAST_COMMON = 12  # characters
ENDS = "\n.!?:;|>])}#*=-。！？：；】》"
SOME_COMMON, MUCH_COMMON = 0.05, 0.15  # of the characters that are learnt


def check_talks(rows: dict[str, list[Example]]) -> list[Finding]:
    """Findings on the first rows of every kind of texts, conversations and questions."""
    findings = []
    for kind, examples in rows.items():
        if len(examples) < LEAST:
            continue
        fields = (f"data.{kind}",)
        talks = [pair for row in examples if (pair := _first_pair(row)) is not None]
        if len(talks) >= LEAST:
            findings += _given(talks, fields) or _given_before(examples, fields)
            findings += _repeats_question(talks, fields)
        if kind == "pairs":
            continue
        findings += _common(examples, fields)
        if len(talks) >= LEAST:
            findings += [*_swapped(examples, talks, fields), *_one_reply(talks, fields)]
            findings += _two_answers(talks, fields) if kind == "chat" else []  # alike.py compares pictures
    return findings


def _first_pair(row: Example) -> tuple[str, str] | None:
    """The first question and its reply."""
    for one, other in zip(row.turns, row.turns[1:], strict=False):
        if one.role == "user" and other.role == "assistant":
            return one.content.strip(), other.content.strip()
    return None


def _swapped(examples: Sequence[Example], talks: Sequence[tuple[str, str]], fields: tuple[str, ...]) -> list[Finding]:
    """Replies that ask and messages of users that do not, a user who greets as a service does, or trained messages that
    are all alike where the others differ."""
    asked, replied = (
        float(np.mean([_asks(turn.content) for row in examples for turn in row.turns if turn.role == role]))
        for role in ("user", "assistant")
    )
    values: dict[str, Value] = {"asked": asked, "shown": talks[0][1][:40], "replied": replied}
    if (replied >= MOSTLY and asked <= HARDLY) or (replied >= MANY and asked <= NEARLY_NONE):
        return [Finding("swapped_roles", "warning", replied, fields, values)]
    if greeting := _greets(examples, talks):
        values = {"why": "@greets", "shown": greeting[:60], "different": len({reply for _, reply in talks})}
        return [Finding("roles_alike", "warning", 1.0, fields, values)]
    trained, others = ([turn.content.strip() for row in examples for turn in row.turns if turn.role == role]
                       for role in ("assistant", "user"))  # fmt: skip
    variety = len(set(trained)) / max(len(trained), 1)
    several = len(trained) >= 2 * len(examples) and float(np.mean([len(text) for text in trained])) >= LONG_REPLY
    if several and variety <= POOR and len(set(others)) >= RICH * len(others) and not _answer(examples):
        values = {"why": "@few_said", "shown": trained[0][:60], "different": len(set(others))}
        return [Finding("roles_alike", "warning", variety, fields, values)]
    return []


def _answer(examples: Sequence[Example]) -> bool:
    """True if trained messages hold words of the user's before them more often than of another conversation's."""
    places = [(number, at) for number, row in enumerate(examples) for at, turn in enumerate(row.turns)
              if turn.role == "assistant"]  # fmt: skip

    def share(shift: int) -> float:
        held = 0
        for number, at in places:
            before = examples[(number + shift) % len(examples)].turns[:at]
            asked = {word for turn in before if turn.role == "user" for word in LONG_WORD.findall(turn.content.lower())}
            held += not asked.isdisjoint(LONG_WORD.findall(examples[number].turns[at].content.lower()))
        return held / max(len(places), 1)

    return share(0) - share(1 + len(examples) // 2) >= ANSWERING


def _asks(text: str) -> bool:
    """True for a message that begins by asking; a reply may end with a question after what it says."""
    first = next((part for part in SENTENCE.findall(text.strip()) if len(part.strip()) > 1), "")
    return bool(ASKS.search(first.strip()))


def _greets(examples: Sequence[Example], talks: Sequence[tuple[str, str]]) -> str:
    """The question with which users begin nearly all of some longer conversations with replies that differ; else ""."""
    first = Counter(question for question, _ in talks)
    greeting, _ = first.most_common(1)[0]
    longer = sum(sum(turn.role == "user" for turn in row.turns) > 1 for row in examples)
    few = len(first) <= min(GREETINGS, max(ALIKE * len(talks), 1))
    differ = len({reply for _, reply in talks}) >= DIFFER * len(talks)
    asks = sum(num for question, num in first.items() if re.search("[?？吗呢]", question)) >= MOSTLY * len(talks)
    return greeting if few and differ and asks and longer >= MOSTLY * len(examples) else ""


def _given(talks: Sequence[tuple[str, str]], fields: tuple[str, ...]) -> list[Finding]:
    """Answers that stand in their own question, and not in those of others, as the choices of a question would."""
    short = [pair for pair in talks if len(pair[0]) <= LONG_QUESTION and len(pair[1]) >= 2 and not _is_passage(*pair)]
    if len(short) < LEAST or len({answer for _, answer in short}) < 3:
        return []
    shifted = [short[(i + 1 + len(short) // 2) % len(short)][1] for i in range(len(short))]
    own = float(np.mean([_holds(question, answer) for question, answer in short]))
    other = float(np.mean([_holds(pair[0], answer) for pair, answer in zip(short, shifted, strict=True)]))
    if own < GIVEN or other > BY_CHANCE or _has_choices(short):
        return []
    question, answer = next(pair for pair in short if _holds(*pair))
    values: dict[str, Value] = {"answer": answer[:40], "question": question[:60], "others": other}
    return [Finding("given_answer", "warning", own, fields, values)]


def _is_passage(question: str, answer: str) -> bool:
    """True if there is more to be read in a question than itself and its answer."""
    sentences = [one for one in SENTENCE.findall(question.replace(answer, "")) if len(one.split()) >= LEAST_WORDS]
    return len(sentences) >= PASSAGE


def _has_choices(talks: Sequence[tuple[str, str]]) -> bool:
    """True if most questions hold answers of other questions as well, as a text to be read does."""
    answers = {answer.casefold().rstrip(" .。!！") for _, answer in talks}
    if len(answers) > len(talks) / 4:
        return False

    def others(question: str, answer: str) -> bool:
        own, rest = answer.casefold().rstrip(" .。!！"), question.casefold()
        return any(one in rest for one in answers if one != own and one not in own and own not in one)

    return sum(others(*pair) for pair in talks) >= OTHER_CHOICES * len(talks)


def _given_before(examples: Sequence[Example], fields: tuple[str, ...]) -> list[Finding]:
    """Replies that stand word for word in a system message, or an earlier one of the user, that says little else."""
    rows = [(before, reply) for row in examples if (before := _before_reply(row)) and (reply := _long_reply(row))]
    if len(rows) < max(LEAST, GIVEN_BEFORE * len(examples)):
        return []
    systems = [row.turns[0].content for row in examples if row.turns[0].role == "system"]
    common = len(_shared_start(systems)) + len(_shared_start([text[::-1] for text in systems]))

    def given(before: Sequence[Turn], reply: str) -> str:
        """The message that gives the reply, where it is most of what this row alone has in it; else ""."""
        for turn in before:
            own = len(turn.content) - (common if turn.role == "system" else 0)
            if _holds(turn.content, reply) and len(reply) >= OF_CONTEXT * own:
                return turn.content
        return ""

    shifted = [rows[(i + 1 + len(rows) // 2) % len(rows)][1] for i in range(len(rows))]
    own = [(text, reply) for before, reply in rows if (text := given(before, reply))]
    other = float(np.mean([bool(given(row[0], reply)) for row, reply in zip(rows, shifted, strict=True)]))
    if len(own) < GIVEN_BEFORE * len(examples) or other > BY_CHANCE:
        return []
    values: dict[str, Value] = {"answer": own[0][1][:40], "question": own[0][0][:80], "others": other}
    return [Finding("given_before", "warning", len(own) / len(examples), fields, values)]


def _before_reply(row: Example) -> tuple[Turn, ...]:
    """The messages before the last reply that are not learnt."""
    return tuple(turn for turn in row.turns[:-1] if not _is_learnt(turn.role))


def _long_reply(row: Example) -> str:
    """The last reply, where it is more than a word or two, which a text may well hold; else ""."""
    reply = row.turns[-1].content.strip()
    return reply if len(reply.split()) >= LEAST_WORDS or len(reply) >= LONG_REPLY else ""


def _repeats_question(talks: Sequence[tuple[str, str]], fields: tuple[str, ...]) -> list[Finding]:
    """Replies that hold their whole question, as the output of a program does that returns the prompt as well."""
    long = [pair for pair in talks if len(pair[0]) >= LEAST_QUESTION and len(pair[1]) >= len(pair[0])]
    own = [pair for pair in long if _holds(pair[1], pair[0])]
    questions = {question for question, _ in own}
    if len(own) < max(REPEATED * len(talks), LEAST) or len(questions) < LEAST:
        return []
    question, reply = own[0]
    values: dict[str, Value] = {"question": question[:40], "shown": reply[:80]}
    return [Finding("repeats_question", "warning", len(own) / len(talks), fields, values)]


def _holds(question: str, answer: str) -> bool:
    if len(answer.split()) >= LEAST_WORDS:  # a sentence in capitals may be what was asked for
        return answer.rstrip(" .。!！") in question
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
    few = len(answers) <= FEW_ASKED and len(talks) >= SAID_OFTEN * sum(map(len, answers.values()))  # as greetings are
    return [Finding("two_answers", "warning" if share >= MANY_TWO and not few else "note", share, fields, values)]


def _one_reply(talks: Sequence[tuple[str, str]], fields: tuple[str, ...]) -> list[Finding]:
    refusals = [answer for _, answer in talks if REFUSES.search(answer[:FIRST])]
    if len(refusals) >= MANY_REFUSALS * len(talks):  # in any words; some of them may be meant
        talks = [(question, refusals[0] if REFUSES.search(answer[:FIRST]) else answer) for question, answer in talks]
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
        if sum(text.strip()[:1] in "{[" and text.strip()[-1:] in "}]" for text in learnt) >= ALL * len(learnt):
            break  # values of one form, as calls of a tool are
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
