"""YAML of recipes: safe values only, each key once, and the line of every key."""

from __future__ import annotations

from typing import Any

import yaml

KEY_TAGS = ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge")
NUMBER_TAG = "tag:yaml.org,2002:int"
MAX_YAML_NODES = 20_000  # a bomb of aliases in 300 bytes expands to millions
YAML_FAULTS = (yaml.YAMLError, ValueError, RecursionError)


class LineLoader(yaml.SafeLoader):
    """YAML loader that refuses duplicate keys and bombs of aliases, and records the line of every key."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lines: dict[tuple[str | int, ...], int] = {}

    def load(self) -> Any:
        node = self.get_single_node()
        if node is None:
            return {}
        self._walk(node, (), [0])
        return self.construct_document(node)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Build the value of a node.

        PyYAML lets the errors of impossible values through as they are: a date of month 13, or `!!int` of no number.
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
            raise yaml.MarkedYAMLError(
                problem="too large or too deeply nested for a recipe", problem_mark=node.start_mark
            )
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
