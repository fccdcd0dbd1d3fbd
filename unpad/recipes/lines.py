"""YAML of recipes: safe values only, numbers and booleans of YAML 1.2, each key once, and the line of every key.

PyYAML reads YAML 1.1, in which 1:30 is 90, 010 is 8, 1_000 is 1000, and yes, no, on and off are booleans. Here numbers
follow the core schema of YAML 1.2, 1e-3 included; a scalar that is a number only in 1.1 is refused, since its meaning
would change silently. Words and dates are text.
"""

import re
from typing import Any, ClassVar

import yaml

KEY_TAGS = ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge")
NUMBER_TAG = "tag:yaml.org,2002:int"
MAX_YAML_NODES = 20_000  # a bomb of aliases in 300 bytes expands to millions
MAX_WRITTEN_NODES = 5_000  # keys and values of a file, which take half a millisecond each
TOO_LARGE = "too large or too deeply nested for a recipe"
YAML_FAULTS = (yaml.YAMLError, ValueError, RecursionError)

_TAG = "tag:yaml.org,2002:"
_NUMBERS = (f"{_TAG}int", f"{_TAG}float")
OCTAL = re.compile(r"[-+]?0o[0-7]+$")  # of YAML 1.2
# Core schema of YAML 1.2.2, section 10.3.2; a merge key is of 1.1. Without 08, which is a text in 1.1 too.
_CORE = {
    "null": (re.compile(r"(?:~|null|Null|NULL|)$"), [*"~nN", ""]),
    "bool": (re.compile(r"(?:true|True|TRUE|false|False|FALSE)$"), [*"tTfF"]),
    "int": (re.compile(r"(?:[-+]?(?:0|[1-9][0-9]*)|0o[0-7]+|0x[0-9a-fA-F]+)$"), [*"-+0123456789"]),
    "float": (
        re.compile(
            r"(?:[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
            r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
        ),
        [*"-+.0123456789"],
    ),
    "merge": (re.compile(r"<<$"), ["<"]),
}
_YAML_1_1 = yaml.resolver.Resolver()
Lines = dict[tuple[str | int, ...], int]  # line of every key, by the keys and list indices that lead to it


class TwoReadingsError(yaml.MarkedYAMLError):
    """A scalar that is a number only in YAML 1.1; `fix` says what to write."""

    def __init__(self, node: yaml.ScalarNode, number: Any) -> None:
        text = node.value[:80]
        octal = re.fullmatch(r"([-+]?)0([0-7]+)", node.value)
        meant = str(number)
        if octal is None:
            readings = f"the number {number} (by YAML 1.1) or as a text (by YAML 1.2)"
        elif (decimal := int(node.value)) == number:
            readings = f"the number {number} or as a text with leading zeros"
        else:
            readings = f"the number {number} (octal, by YAML 1.1) or as {decimal} (by YAML 1.2)"
            meant = f"{decimal}, or {number}" if octal[1] else f"{decimal}, or 0o{octal[2]} for {number}"
        super().__init__(problem=f"{text} can be read as {readings}", problem_mark=node.start_mark)
        self.fix = f'write {meant}, or "{text}" in double quotes for the text'


class LineLoader(yaml.SafeLoader):
    """YAML loader that refuses duplicate keys and bombs of aliases, and records the line of every key."""

    yaml_implicit_resolvers: ClassVar[dict[str, list[tuple[str, re.Pattern[str]]]]] = {}

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lines: Lines = {}
        self._composed = 0

    def load(self) -> Any:
        node = self.get_single_node()
        if node is None:
            return {}
        self._walk(node, (), [0])
        return self.construct_document(node)

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose the next node; a file with too many nodes is refused early, since reading all takes minutes."""
        self._composed += 1
        if self._composed > MAX_WRITTEN_NODES:
            raise yaml.MarkedYAMLError(problem=TOO_LARGE, problem_mark=self.peek_event().start_mark)
        return super().compose_node(parent, index)

    def compose_scalar_node(self, anchor: Any) -> yaml.ScalarNode:
        """Compose a scalar: a plain one has no tag of its own."""
        is_plain = self.peek_event().implicit[0]
        node = super().compose_scalar_node(anchor)
        node.tag = self.scalar_tag(node, is_plain)
        return node

    def scalar_tag(self, node: yaml.ScalarNode, is_plain: bool) -> str:
        """The tag of a scalar by the rules of YAML 1.2.

        Raises:
            TwoReadingsError: it is a number only in YAML 1.1.
        """
        if is_plain:
            tag = _YAML_1_1.resolve(yaml.ScalarNode, node.value, (True, False))
            if tag in _NUMBERS and node.tag not in _NUMBERS:
                old = yaml.ScalarNode(tag, node.value, node.start_mark, node.end_mark)
                raise TwoReadingsError(node, self.construct_object(old))
        elif node.tag in _NUMBERS and not self._is_number(node):
            raise TwoReadingsError(node, self.construct_object(node))  # such as !!int 010
        return str(node.tag)

    def _is_number(self, node: yaml.ScalarNode) -> bool:
        return str(yaml.SafeLoader.resolve(self, yaml.ScalarNode, node.value, (True, False))) in _NUMBERS

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Build the value of a node.

        PyYAML does not convert errors of impossible values, such as a date of month 13 or `!!int` of a word.
        """
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError, TypeError) as error:
            kind = node.tag.rpartition(":")[2]
            why = f": {error}" if isinstance(error, ValueError) else ""
            problem = f'"{str(node.value)[:80]}" is no {kind}{why}'
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from None

    def _walk(self, node: yaml.Node, path: tuple[str | int, ...], visited: list[int]) -> None:
        visited[0] += 1
        if visited[0] > MAX_YAML_NODES or len(path) > 50:
            raise yaml.MarkedYAMLError(problem=TOO_LARGE, problem_mark=node.start_mark)
        self.lines[path] = node.start_mark.line + 1
        if isinstance(node, yaml.MappingNode):
            seen = set()
            for key, value in node.value:
                if key.tag == NUMBER_TAG:  # fields with numbers as keys, such as plan.grow, parse them from text
                    key.tag = KEY_TAGS[0]
                if key.tag not in KEY_TAGS or not isinstance(key, yaml.ScalarNode):  # YAML reads `on` as a boolean
                    raise yaml.MarkedYAMLError(problem="a key is not a name; quote it", problem_mark=key.start_mark)
                if key.value in seen:
                    raise yaml.MarkedYAMLError(
                        problem=f'the key "{key.value}" occurs twice', problem_mark=key.start_mark
                    )
                seen.add(key.value)
                self._walk(value, (*path, key.value), visited)
                self.lines[(*path, key.value)] = key.start_mark.line + 1
        elif isinstance(node, yaml.SequenceNode):
            for index, value in enumerate(node.value):
                self._walk(value, (*path, index), visited)


class _Dumper(yaml.SafeDumper):
    """Writer that quotes a text which YAML 1.1 or YAML 1.2 would read as something else."""


for _name, (_pattern, _first) in _CORE.items():
    LineLoader.add_implicit_resolver(_TAG + _name, _pattern, _first)
    _Dumper.add_implicit_resolver(_TAG + _name, _pattern, _first)


def to_yaml(values: Any) -> str:
    """Write values so that `LineLoader` reads them back, and readers of YAML 1.1 do too."""
    return yaml.dump(values, Dumper=_Dumper, allow_unicode=True, sort_keys=False)
