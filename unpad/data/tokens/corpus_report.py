"""Report on the corpus of a recipe: rows, documents, tokens, lost characters and near-duplicates."""

from __future__ import annotations

from dataclasses import dataclass

from unpad.data.sources.bad_rows import fault_lines
from unpad.data.sources.example import BadRow
from unpad.data.sources.leaks import LeakReport
from unpad.data.tokens.lost import LostCharacters
from unpad.terminal.table import number_of


@dataclass(frozen=True)
class CorpusReport:
    """Report of a corpus: rows read, used and quarantined, documents encoded, and leaks once it is compared.

    Args:
        rows_read: rows_used + rows_quarantined.
        encoded_documents: documents encoded this time, augmented copies included.
        tokens, characters: counts of all documents, copies included; lost: the characters that the tokenizer lost.
        may_lose: whether the tokenizer is one of a file, which may lack characters.
        lossy_template: strings of the conversations' template that lose characters in it.
        num_followed: rows without a split that are of the test part, as a row of their group or a copy declares it.
        held_groups: named groups with a document of valid; shared_groups: those also with one of train.
        num_system: system turns of training conversations.
        leaks: None without held-out documents, and until they are compared with training.
        leak_places: places of the worst leaks of the report, in its order, and of their training documents.
        test_leaks: None without documents of the test part; test_leak_places likewise.
        events: damaged files that were rebuilt.
        seconds: per stage; the stages add up to the whole.
    """

    rows_read: int
    rows_used: int
    rows_quarantined: int
    num_files: int
    num_train: int
    num_holdout: int
    num_test: int
    num_followed: int
    held_groups: int
    shared_groups: int
    num_copies: int
    tokens: int
    characters: int
    lost: LostCharacters
    may_lose: bool
    lossy_template: tuple[str, ...]
    num_system: int
    cache_hits: int
    cache_misses: int
    encoded_documents: int
    bad_rows: list[BadRow]
    leaks: LeakReport | None
    leak_places: list[tuple[str, str]]
    test_leaks: LeakReport | None
    test_leak_places: list[tuple[str, str]]
    events: list[str]
    seconds: dict[str, float]

    def lines(self) -> list[str]:
        """The report as text."""
        copies = f" and {number_of(self.num_copies, 'augmented copies')}" if self.num_copies else ""
        lines = [
            f"{number_of(self.num_files, 'files')}: {number_of(self.rows_read, 'rows')} read = {self.rows_used:,} used"
            f" + {self.rows_quarantined:,} quarantined",
            f"{self._parts(copies)}; {number_of(self.tokens, 'tokens')},"
            f" {self.characters / max(self.tokens, 1):.2f} characters each",
            f"cache: {number_of(self.cache_hits, 'hits')}, {self.cache_misses:,} missed,"
            f" {number_of(self.encoded_documents, 'documents')} encoded, {sum(self.seconds.values()):.2f} s",
        ]
        if self.num_followed:
            lines.append(f"  {describe_followed(self.num_followed)}")
        if self.lost.lost or self.may_lose:
            lines += self.lost.lines()
        if self.lossy_template:
            names = ", ".join(f'"{text}"' for text in self.lossy_template)
            what = f"warning: the tokenizer loses characters of the template, so that roles may look alike: {names}"
            lines.append(f"{what}; set data.template to strings that it can spell")
        return [
            *lines,
            *self.group_lines(),
            *self.leak_lines(),
            *self.events,
            *fault_lines(self.bad_rows, "  quarantined: "),
        ]

    def group_lines(self) -> list[str]:
        """Remark on a valid part that is made of whole groups, such as facts, that training never saw."""
        if not self.held_groups or self.shared_groups:
            return []
        groups = "1 group" if self.held_groups == 1 else f"{self.held_groups:,} groups"
        what = f"held out {groups} absent from training: this measures other facts than those that are learnt"
        return [f'{what}; to measure other phrasings of the same facts, declare "split" in rows of each group']

    def leak_lines(self) -> list[str]:
        """The leaks of every part as text; empty where nothing was compared."""
        reports = (self.leaks, self.leak_places), (self.test_leaks, self.test_leak_places)
        return [line for leaks, places in reports if leaks is not None for line in leaks.lines(places)]

    def _parts(self, copies: str) -> str:
        if self.num_test and not self.num_train + self.num_holdout:  # new data
            return f"{number_of(self.num_test, 'documents')} to evaluate"
        test = f", {self.num_test:,} of the test part for `unpad eval` alone" if self.num_test else ""
        return f"{number_of(self.num_train, 'training documents')}{copies}, {self.num_holdout:,} held out{test}"


def describe_followed(number: int) -> str:
    """Describe rows that are of the test part for another row's sake, with the remedy."""
    are = "is" if number == 1 else "are"
    return (
        f"{number_of(number, 'rows')} without a split {are} of the test part, since a row of their group or a copy "
        "declares it; "
        'declare "split": "train" in those to train on'
    )
