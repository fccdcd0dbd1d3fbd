"""Findings on texts, conversations and pairs of replies: garbled characters, cuts, answers given away, tokens."""

import re
from collections.abc import Iterable, Sequence
from itertools import islice, pairwise

import numpy as np

from unpad.data.sources.example import Example
from unpad.data.sources.reader import TEXT_KINDS, read_rows
from unpad.data.text import TextData
from unpad.data.tokens.corpus_files import list_files
from unpad.data.tokens.lost import LostCharacters
from unpad.doctor import rows
from unpad.doctor.finding import Finding, Found, Words, finding, level
from unpad.doctor.rows import Labelled
from unpad.doctor.subject import Subject


def look(subject: Subject[TextData]) -> list[Finding]:
    """Findings on the rows as the files have them, and on the sequences of the stage."""
    recipe, findings, originals = subject.setup.recipe, list[Finding](), dict[str, list[Example]]()
    kinds = {kind for stage in subject.setup.stages if stage.recipe.train.max_epochs != 0 for kind in stage.kinds}
    for file in list_files(recipe, [kind for kind in TEXT_KINDS if kind in kinds]):
        sound = (row for row in read_rows(file.kind, file.file, recipe.data) if isinstance(row, Example))
        originals.setdefault(file.kind, []).extend(islice(sound, 2000))
    for kind, examples in originals.items():
        where = (f"data.{kind}",)
        findings += garbled([("\n".join(turn.content for turn in row.turns), row.where) for row in examples], where)
        findings += cut_alike([(row.turns[-1].content, row.where) for row in examples if row.turns], where)
        talks = talks_of(examples)
        findings += given_answer(talks, where)
        if kind == "pairs":
            sides = [Labelled((row.turns[:-1], turn.content), side, row.where) for row in examples
                     for turn, side in ((row.turns[-1], "chosen"), (row.rejected, "rejected")) if turn]  # fmt: skip
            findings += rows.clashing_labels(sides, where)
        elif len(talks) < 3 * len({row[:2] for row in talks}):  # greetings recur, with many replies
            single = talks_of(row for row in examples if sum(turn.role == "user" for turn in row.turns) == 1)
            findings += [] if reworded(single) else rows.clashing_labels(single, where, 0.5)
            findings += rows.constant_labels(talks, where)
    if not subject.stage.of_pairs:  # the replies of a pair share their prompt
        findings += [*rows.same_rows(subject), *rows.near_rows(subject)]
        findings += [*rows.cut_short(subject), *tokenizer(subject.data.report.lost, words_once(subject))]
        findings += rows.sees_target(subject)
    return findings


def talks_of(examples: Iterable[Example]) -> list[Labelled]:
    """The first question of conversations, and its reply."""
    both = ("user", "assistant")
    pairs = ((row, [two for two in pairwise(row.turns) if (two[0].role, two[1].role) == both]) for row in examples)
    return [Labelled(twos[0][0].content.strip(), twos[0][1].content.strip(), row.where) for row, twos in pairs if twos]


def reworded(talks: Sequence[Labelled]) -> bool:
    """True if replies to one question say the same in other words: they share more pairs of letters than others do."""
    pairs = [set(pairwise(str(row.target).casefold())) for row in talks]
    order = sorted(range(len(talks)), key=lambda number: str(talks[number].asked))
    shared: dict[bool, list[float]] = {True: [], False: []}  # of equal questions, and of neighbours in the files
    for one, other in [*pairwise(order), *pairwise(range(len(talks)))]:
        if talks[one].target != talks[other].target and (both := pairs[one] | pairs[other]):
            shared[talks[one].asked == talks[other].asked].append(len(pairs[one] & pairs[other]) / len(both))
    return bool(shared[True]) and float(np.mean(shared[True])) > 1.5 * float(np.mean(shared[False] or [1.0]))


HTML: Words = ("HTML tags or entities, markup that would be learnt", "会被学到的 HTML 标签或实体")
STRIP: Words = ("strip the tags and decode the entities: pandoc -t plain, or Python's html.unescape once tags are gone",
                "去掉标签并还原实体：pandoc -t plain，或去掉标签后用 Python 的 html.unescape")  # fmt: skip
GARBLED: Words = ("garbled", "是乱码")
DECODE: Words = ("write the file again from its source, decoded, as plain text in UTF-8; find its encoding first",
                 "查明编码，以 UTF-8 纯文本重新写出")  # fmt: skip
# Traces of programs in text, in both languages: a pattern, and the least share of the characters.
TRACES: list[tuple[Words, re.Pattern[str], float]] = [
    (("bytes of another encoding, read as Latin-1 letters", "被当成 Latin-1 字母的其他编码的字节"),
     re.compile("[\u0080-\u00ff]{4,}"), 0.05),
    (("U+FFFD, in place of bytes that were lost when the text was decoded", "解码时丢失的字节留下的 U+FFFD"),
     re.compile("\ufffd"), 0.002),
    (("control characters or marks without width", "控制字符或零宽字符"),
     re.compile("[\u0000-\u0008\u000b\u000e-\u001f\u007f-\u009f\u200b\u2060\ufeff]"), 0.005),
    (HTML, re.compile(
        r"</?(?:p|br|div|span|a|td|tr|th|table|li|ul|ol|b|i|em|strong|h[1-6]|img|html|body|script|font|su[bp])"
        r"(?:\s[^<>]*)?/?>|&(?:[a-z]{2,8}|#x?[0-9a-f]{2,6});", re.IGNORECASE), 0.08),
    (("base64 that was not decoded", "没有解码的 base64"), re.compile(
        r"(?<!\S)(?=\S*\d)(?=\S*[a-z])(?=\S*[A-Z])[A-Za-z0-9+/]{40,}={0,2}(?!\S)"), 0.03),
    (("escapes with a backslash that were not decoded", "没有解码的反斜杠转义"),
     re.compile(r"\\(?:u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2})"), 0.03),
]  # fmt: skip


@finding("garbled", "fault", explains={"cut_alike", "tokenizer"},
    en=("The text is {state}: in {number:.0%} of the {unit} there are {what}, such as {shown!r} at {where}.",
        "{remedy}"),
    zh=("文本{state}：{number:.0%} 的{unit}是{what}，例如 {where} 的 {shown!r}。", "{remedy}"))  # fmt: skip
def garbled(texts: Sequence[tuple[str, str]], fields: tuple[str, ...]) -> Found | None:
    """Text in a wrong encoding, escaped, or full of what programs write."""
    whole = "\n".join(text for text, _ in texts)[:400_000]
    if len(whole) < 200:
        return None
    judged = [(mistaken_encoding(text), text, where) for text, where in texts if sum(c > "\x7f" for c in text) >= 4]
    wrong = [item for item in judged if item[0]]
    if len(wrong) >= max(0.2 * len(judged), 5):
        name, text, where = wrong[0]
        what = (f"characters of UTF-8 that was read (decoded) in the encoding {name}", f"被当作 {name} 读取的 UTF-8")
        return Found(len(wrong) / len(judged), *fields, unit=("rows", "行"), what=what, shown=text[:30], where=where,
                     state=GARBLED, remedy=DECODE)  # fmt: skip
    plain = re.sub(r"```.*?```", "", whole, flags=re.DOTALL)  # code between fences is to be written
    for what, pattern, least in TRACES:
        share = sum(len(match.group()) for match in pattern.finditer(plain)) / len(whole)
        matches = [(match, where) for text, where in texts if (match := pattern.search(text))]
        if share and (share >= least or (share >= least / 4 and len(matches) >= 0.9 * len(texts))):
            match, where = matches[len(matches) // 2]
            shown = match.string[max(match.start() - 5, 0) : match.start() + 25]
            severity, unit = level(pattern is TRACES[0][1]), ("characters", "字符")
            state, remedy = (("not plain", "不是纯文本"), STRIP) if what == HTML else (GARBLED, DECODE)
            return Found(share, *fields, severity=severity, unit=unit, what=what, shown=shown, where=where,
                         state=state, remedy=remedy)  # fmt: skip
    return None


def mistaken_encoding(text: str) -> str:
    """The encoding in which UTF-8 was read to give a text; "" for sound text.

    Bytes of UTF-8 that another encoding has made into characters are UTF-8 again in that encoding. Sound text is not:
    its bytes in an older encoding do not follow the rule of leading and continuing bytes.
    """
    best, result, others = 0.8, "", sum(c > "\x7f" for c in text)
    for name in ("cp1252", "latin-1", "gb18030", "big5", "shift_jis", "euc_kr", "cp1251", "cp437", "mac_roman"):
        raw = text.encode(name, errors="ignore")
        if sum(c > "\x7f" for c in raw.decode(name, errors="ignore")) < 0.9 * others:
            continue
        decoded = raw.decode("utf-8", errors="ignore")
        sound = sum(len(c.encode()) for c in decoded if c > "\x7f") / max(sum(byte > 0x7F for byte in raw), 1)
        if sound > best:
            best, result = sound, name
    return result


@finding("cut_alike",
    en=("{number:.0%} of the texts are cut after exactly {most} {unit}, the largest length, and end without a mark, "
        "such as {shown!r} at {where}.", "look for a column or program that cuts, and write the whole texts"),
    zh=("{number:.0%} 的文本恰好在 {most} {unit}处截断，结尾没有标点，例如 {where} 的 {shown!r}。",
        "查找截断的列或程序"))  # fmt: skip
def cut_alike(ends: Sequence[tuple[str, str]], fields: tuple[str, ...]) -> Found | None:
    """Texts or replies that often have just the largest length there is, and no end.

    Rows that also begin inside a sentence are pieces of longer texts, where nothing is lost.
    """
    ends, marks = [end for end in ends if end[0].strip()], ",.;:!?，。；：！？、…\"'”’)]}）》」』`"
    measures: list[tuple[Words, list[int], float]] = [
        (("characters", "个字符"), [len(text) for text, _ in ends], 0.15),
        (("bytes", "个字节"), [len(text.encode()) for text, _ in ends], 0.15),
        (("words", "个词"), [len(text.split()) for text, _ in ends], 0.3),
    ]
    inner = {word for text, _ in ends for word in text.split()[:-1]}  # a form ends with what is nowhere else
    for unit, sizes, final in measures:
        most = max(sizes, default=0)
        cut = [end for end, size in zip(ends, sizes, strict=True) if size == most]
        if unit[0] == "words":
            cut = [end for end in cut if end[0].split()[-1] in inner]
        if most < 20 or len(cut) < max(len(ends) / 4, 20):
            continue
        texts = [text for text, _ in cut]
        begun = np.mean([text[0].islower() or text[0].isspace() or text[0] in marks for text in texts])
        inside = np.mean([any(c in marks for c in text[1:-1]) for text in texts])
        if np.mean([text[-1] in marks for text in texts]) <= final and inside >= 0.3 and begun <= 0.3:
            text, where = cut[0]
            return Found(len(cut) / len(ends), *fields, most=most, unit=unit, shown=text[-30:], where=where)
    return None


@finding("given_answer", explains={"near_rows"},
    en=("{number:.0%} of the questions hold their own answer, such as {answer!r} in {question!r}, and {others:.0%} "
        "that of another: the model only has to copy it.", "take the answer out"),
    zh=("{number:.0%} 的问题含有自己的答案，例如 {question!r} 中的 {answer!r}，含别的答案的有 {others:.0%}。",
        "去掉答案"))  # fmt: skip
def given_answer(talks: Sequence[Labelled], fields: tuple[str, ...]) -> Found | None:
    """Answers that stand in their own question, and not in those of others, as choices or a text to be read would."""
    pairs = [(str(row.asked).casefold(), str(row.target).casefold().rstrip(" .。!！")) for row in talks]
    pairs = [(question, answer) for question, answer in pairs if len(question) <= 300 and len(answer) >= 2]
    answers = {answer for _, answer in pairs}
    if len(pairs) < 20 or len(answers) < 3:
        return None
    holding = [pair for pair in pairs if pair[1] in pair[0]]
    share = len(holding) / len(pairs)
    others = np.mean([pairs[(i + 1 + len(pairs) // 2) % len(pairs)][1] in pairs[i][0] for i in range(len(pairs))])
    if share < 0.8 or others > 0.3:
        return None
    choices = [any(other in question and other not in answer and answer not in other for other in answers)
               for question, answer in holding] if len(answers) <= len(pairs) / 4 else [False]  # fmt: skip
    long = np.mean([len(re.findall(r"[^.!?。！？\n]{12,}[.!?。！？\n]", q.replace(a, ""))) >= 3 for q, a in holding])
    if np.mean(choices) >= 0.5 or long >= 0.5:
        return None
    question, answer = holding[0]
    return Found(share, *fields, answer=answer[:40], question=question[:60], others=float(others))


@finding("tokenizer",
    en=("{number:.1%} of the {what}, such as {common}.", "set {fix}"),
    zh=("{number:.1%} 的{what}，例如 {common}。", "设 {fix}"))  # fmt: skip
def tokenizer(lost: LostCharacters, once: Found | None = None) -> Found | None:
    """Characters that the tokenizer cannot spell, or else what `words_once` found."""
    if lost.share < 0.01:
        return once
    return Found(
        lost.share, "tokenizer.path", "tokenizer.kind", severity=level(lost.share >= 0.1),
        common=" ".join(lost.common[:3]),
        what=("characters are lost to unknown tokens, as the tokenizer has no others", "字符无法表示，成了未知词元"),
        fix=("tokenizer.kind=bpe and tokenizer.path=null, or a file made from such text",
             "tokenizer.kind=bpe、tokenizer.path=null"),
    )  # fmt: skip


def words_once(subject: Subject[TextData]) -> Found | None:
    """Words of a vocabulary made from texts that occur once in them; a large text fills it with others.

    Conversations are not judged, as such words were not measured there.
    """
    data, settings, files = subject.data, subject.setup.recipe.tokenizer, subject.setup.recipe.data
    own = data.tokenizer.kind == "words" and not (settings.path or subject.recipe.train.init_from)
    if not own or settings.min_count > 1 or files.chat or files.pairs or data.table.positions.sum() > 5_000_000:
        return None
    tokens = np.concatenate([data.tokens_of(seq) for seq in subject.stage.train_ids.tolist()])
    counts = np.bincount(tokens, minlength=data.tokenizer.vocab_size)
    words = {id: word for id in range(len(counts)) if len(word := data.tokenizer.decode([id])) > 1}
    once = [word for id, word in words.items() if counts[id] == 1]
    if len(once) < 500 or len(once) < 0.15 * len(words):
        return None
    what = "vocabulary's words stand once in the training texts, and are learnt there alone", "词在训练文本中只出现一次"
    share, field = len(once) / len(words), "tokenizer.min_count"
    return Found(share, field, what=what, common=" ".join(once[:3]), fix=f"{field}=2")
