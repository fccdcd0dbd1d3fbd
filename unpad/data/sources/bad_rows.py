"""Unusable rows: how they are listed, and the policy to refuse the data or to skip them up to a stated share."""

import shlex
from collections import Counter
from collections.abc import Sequence
from itertools import islice

from unpad.data.sources.example import BadRow, count_bad, place_of
from unpad.data.sources.fields import setting
from unpad.data.sources.files import SourceFile
from unpad.errors import SourceError
from unpad.recipes.data import DataSettings
from unpad.terminal.table import number_of

MAX_SHOWN = 3  # faults of a kind that are listed
MAX_KINDS = 10  # kinds of faults that are listed
MOSTLY_BAD = 0.5  # of the rows: from here on the layout of the file is wrong, and not some of its rows
LAYOUT = (
    "; most rows fail, and without them little would be left: mend what they share, often columns or keys that have "
    "other names than the recipe expects (docs/internals/file_formats.md)"
)


def fault_lines(bad: Sequence[BadRow], prefix: str = "  ") -> list[str]:
    """List the first faults of every kind by place, code and message, and count the others.

    Args:
        prefix: beginning of every line.
    """
    return [prefix + line for line in _listed(bad)]


def faults_with_fixes(bad: Sequence[BadRow]) -> list[str]:
    """List the first faults of every kind with what was found there, count the others, and give the fix of each kind;
    then count all faults by their codes, if they are of several kinds or many."""
    counts = Counter(row.code for row in bad).most_common()
    total = [f"faults: {', '.join(f'{number:,} {code}' for code, number in counts)}"]
    return _listed(bad, fixes=True) + total * (len({(row.code, row.fix) for row in bad}) > 1 or len(bad) > MAX_SHOWN)


def _listed(bad: Sequence[BadRow], *, fixes: bool = False) -> list[str]:
    """The lines of both; faults of one code and one fix are a kind."""
    kinds: dict[tuple[str, str], list[BadRow]] = {}
    for row in bad:
        kinds.setdefault((row.code, row.fix), []).append(row)
    lines, indent, where = list[str](), "  " * fixes, "; all are in --json" * fixes
    for (code, fix), faults in islice(kinds.items(), MAX_KINDS):
        for row in faults[:MAX_SHOWN]:
            lines += [f"{row.where}: {code} {row.what}", *[f"  found: {row.excerpt}"] * (fixes and bool(row.excerpt))]
        if len(faults) > MAX_SHOWN:
            lines.append(f"{indent}... and {len(faults) - MAX_SHOWN:,} more {code}{where}")
        lines += [f"  do: {fix}"] * fixes
    others = list(kinds.values())[MAX_KINDS:]
    return lines + [f"... and {sum(map(len, others)):,} faults of {len(others):,} other kinds{where}"] * bool(others)


def are_allowed(bad: Sequence[BadRow], num_rows: int, data: DataSettings) -> bool:
    """True if training goes on without these of the rows, good and bad; a fault of unknown extent is never allowed."""
    known = all(row.num_rows is not None for row in bad)
    few = known and count_bad(bad) / max(num_rows, 1) <= data.max_bad
    return not bad or (data.on_bad_row == "quarantine" and few)


def apply_policy(
    bad: list[BadRow], num_rows: int, data: DataSettings, checked: str = "", files: Sequence[SourceFile] = ()
) -> None:
    """Refuse bad rows unless the recipe says that they are quarantined.

    Args:
        num_rows: rows of the data, good and bad, those that could not be read included.
        checked: argument of `unpad data check` in the fix; default the source of the first bad row, or its file.
        files: that were read.

    Raises:
        SourceError: the policy is `stop` and there is a bad row, more than `data.max_bad` of the rows are bad,
            or a fault takes along an unknown number of rows.
    """
    if are_allowed(bad, num_rows, data):
        return
    num_bad = count_bad(bad)
    share = num_bad / max(num_rows, 1)
    unknown = next((row for row in bad if row.num_rows is None), None)
    source = next((file for file in files if bad[0].where.startswith(str(file.path))), None)
    path = checked or (source.named if source is not None and source.named else place_of(bad[0].where).file)
    named = None if checked or source is None or not (source.fields or source.ignore) else source
    arguments = _as_overrides(named, data) if named else shlex.quote(path)
    lines = fault_lines(bad)
    fix = f"`unpad data check {arguments}` shows the fix of each kind, and with --json every row"
    only = bad[0].fix if len({row.fix for row in bad}) == 1 else ""
    if unknown is not None:
        lines.append(f"  {unknown.where}: how many rows follow is unknown, so the fault is never quarantined")
        fix = only or f"{fix}; mend the file, or leave it out"
    elif only and num_bad == num_rows:
        fix = only  # going on without them would leave nothing
    elif data.on_bad_row == "stop":
        limit = f", with data.max_bad={share + 0.0005:.3f}, as they are {share:.1%} of all" * (share > data.max_bad)
        # Where most are bad, their layout is to blame, and little would be left.
        fix += LAYOUT if share >= MOSTLY_BAD else f"; data.on_bad_row=quarantine goes on without them{limit}"
    else:
        lines.append(f"  that is {share:.2%}, more than data.max_bad={data.max_bad:.2%}")
        fix += LAYOUT if share >= MOSTLY_BAD else "; or raise data.max_bad"
    what = f"{num_bad:,} of {number_of(num_rows, 'rows')} cannot be used:"
    raise SourceError(what, where=bad[0].where, fix=fix, details=lines)


def _as_overrides(source: SourceFile, data: DataSettings) -> str:
    """Arguments of `unpad data check` for a source that names or ignores fields."""
    for kind, recipe in (("chat", "chat"), ("text", "small")):
        if any(source.named.endswith(one.path) for one in getattr(data, kind)):
            fields = source.fields | ({} if source.by_ending else {"format": source.format})
            ignored = {"ignore": source.ignore} if source.ignore else {}
            return f"{recipe} {setting(kind, source.named, **fields, **ignored)}"
    return "RECIPE.yaml"


def refuse_empty(num_examples: int, kind: str, files: Sequence[SourceFile]) -> None:
    """Refuse a corpus without any example.

    Raises:
        SourceError: `num_examples` is 0.
    """
    if num_examples == 0:
        if not files:
            raise SourceError(f"data.{kind} names no file", where=f"data.{kind}", fix=f"set data.{kind}=FILE")
        names = ", ".join(str(file.path) for file in files[:3]) + (", ..." if len(files) > 3 else "")
        what = f"no usable {kind} example in {number_of(len(files), 'files')}"
        raise SourceError(what, where=names, fix=f"see `unpad data check`, or set data.{kind}")
