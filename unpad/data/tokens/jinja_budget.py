"""Cost of rendering a chat template: its budget, and the marks in the template's tree that spend it.

A template comes with a model of somebody else, so neither its time nor its memory may depend on what it says. Every
block of its statements spends what its nodes cost when it begins, and every operation that looks at a whole value, or
makes one, spends by the value's size before it does so: a product of loops, a recursion and a single call that would
fill the memory all end alike. Statements and nodes that are not listed here are refused when the template is read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.runtime import LoopContext, Undefined
from jinja2.utils import Namespace

# In units of one character.
NODE, ELEMENT, CALL = 10, 20, 50
BASE, PER_MESSAGE, PER_CHARACTER = 20_000_000, 100_000, 100  # PER_CHARACTER and once more for every message
MOST_NESTED = 100  # lists in each other, and nodes of the tree
MOST_NODES = 20_000  # of the tree; those of released models have up to 5,000
MOST_CALLS = 40  # macros in each other
LARGEST_NUMBER = 1 << 63
TICK, WEIGHED, SEARCHED, MADE, JOINED = "(tick)", "(weighed)", "(searched)", "(made)", "(joined)"  # filters of the tree

_STATEMENTS = (
    *(nodes.Template, nodes.Output, nodes.For, nodes.If, nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.With),
    *(nodes.Assign, nodes.AssignBlock, nodes.ExprStmt, nodes.Break, nodes.Continue),
)
_EXPRESSIONS = (
    *(nodes.BinExpr, nodes.UnaryExpr, nodes.Name, nodes.NSRef, nodes.Literal, nodes.Pair, nodes.Keyword),
    *(nodes.CondExpr, nodes.Filter, nodes.Test, nodes.Call, nodes.Getitem, nodes.Getattr, nodes.Slice),
    *(nodes.Concat, nodes.Compare, nodes.Operand, nodes.ExtensionAttribute),
)


class ExcessError(TemplateError):
    """A template costs more than a conversation of its size may."""

    def __init__(self, what: str = "it goes on without end, or makes too much text") -> None:
        super().__init__(what)


class Budget:
    """Units that are left to spend in a rendering; of one at a time."""

    def __init__(self) -> None:
        self.left = self.calls = 0

    def begin(self, num_messages: int, num_characters: int) -> None:
        """Begin the rendering of a conversation."""
        self.calls = 0
        self.left = BASE + PER_MESSAGE * num_messages + num_characters * (PER_CHARACTER + num_messages)

    def spend(self, units: int) -> None:
        """Spend units.

        Raises:
            ExcessError: there are not as many left.
        """
        self.left -= units
        if self.left < 0:
            raise ExcessError

    def tick(self, units: int) -> bool:
        """Spend units; True, for the test of a loop."""
        self.left -= units
        if self.left < 0:
            raise ExcessError
        return True

    def look(self, value: Any) -> Any:
        """Spend what it costs to look at every part of a value; return it. What occurs twice is looked at twice."""
        if type(value) is str:
            self.left -= len(value)
            if self.left < 0:
                raise ExcessError
            return value
        level: list[Any] = [value]
        for _ in range(MOST_NESTED):
            inner = list[Any]()
            for item in level:
                parts = _parts(item)
                self.spend(len(item) if isinstance(item, str) else ELEMENT * (1 + len(parts)))
                inner += parts
            if not inner:
                return value
            level = inner
        raise ExcessError("it nests lists too deeply")

    def count(self, value: Any) -> Any:
        """Spend what it costs to pass over the elements of a value, without a look into them; return the value."""
        self.spend(ELEMENT * (1 + (0 if isinstance(value, Undefined | LoopContext) else _length(value))))
        return value

    def made(self, value: Any) -> Any:
        """Spend the size of a result, and return it; a list in place of an iterator."""
        if isinstance(value, str):
            self.spend(len(value))
        elif isinstance(value, Iterator) and not isinstance(value, LoopContext):
            items = list[Any]()
            for item in value:
                self.spend(ELEMENT)
                items.append(item)
            return items
        elif isinstance(value, list | tuple | dict):
            self.spend(ELEMENT * len(value))
        else:
            return number(value)
        return value

    def joined(self, pieces: Iterable[str]) -> str:
        """Join pieces of text, after their characters are spent. The pieces are few: whatever makes one has spent more
        than its place in the list."""
        parts = list(pieces)
        self.spend(sum(map(len, parts)))
        return "".join(parts)


def number(value: Any) -> Any:
    """Return a value unless it is a number so large that arithmetic with it takes long."""
    if isinstance(value, int) and not -LARGEST_NUMBER < value < LARGEST_NUMBER:
        raise ExcessError("it makes a number beyond 64 bits")
    return value


def _length(value: Any) -> int:
    return len(value) if hasattr(value, "__len__") else 0


def _parts(value: Any) -> list[Any]:
    """Elements of a list, a range, a mapping or their views; [] for other values."""
    if isinstance(value, str | int | float) or value is None:
        return []
    if isinstance(value, Namespace):
        value = object.__getattribute__(value, "_Namespace__attrs")
    if isinstance(value, dict):
        return [*chain.from_iterable(value.items())]
    # Views of a mapping have no type of their own to ask for.
    is_view = type(value).__name__ in ("dict_items", "dict_keys", "dict_values")
    return list(value) if is_view or isinstance(value, list | tuple | range) else []


# --------------------------------------------------------------------------- the tree


def metered(template: nodes.Template) -> nodes.Template:
    """Put the marks into the tree of a template.

    Raises:
        TemplateError: it is too long or nested too deeply, or has a statement or a constant that is not covered.
    """
    level: list[nodes.Node] = [template]
    total = 0
    for _ in range(MOST_NESTED):
        total += len(level)
        if total > MOST_NODES:
            raise TemplateError("it has too many statements and expressions")
        for node in level:
            _refuse(node)
        level = [child for node in level for child in node.iter_child_nodes()]
        if not level:
            break
    else:
        raise TemplateError("its statements or expressions are nested too deeply")
    _meter(template)
    return template


def _refuse(node: nodes.Node) -> None:
    if not isinstance(node, (*_STATEMENTS, *_EXPRESSIONS)) or (isinstance(node, nodes.For) and node.recursive):
        kind = "recursive loop" if isinstance(node, nodes.For) else type(node).__name__
        raise TemplateError(f"a statement of kind {kind} in line {node.lineno} is not covered")
    if isinstance(node, nodes.Const):
        number(node.value)
        if isinstance(node.value, float) and not math.isfinite(node.value):
            raise TemplateError(f"the number in line {node.lineno} is too large")


def _meter(node: nodes.Node) -> int:
    """Put marks into a node, and return how many nodes it has outside of blocks of statements."""
    total = 1
    for name, value in list(node.iter_fields()):
        if isinstance(value, list) and (name in ("body", "else_") or (name == "elif_" and value)):
            if name == "elif_":  # each is an If of its own
                total += sum(map(_meter, value))
            else:
                setattr(node, name, _block(value, node.lineno) if value or name == "body" else value)
        elif isinstance(value, list):
            inner = [child for child in value if isinstance(child, nodes.Node)]
            total += sum(map(_meter, inner))
            setattr(node, name, [_marked(child) if isinstance(child, nodes.Node) else child for child in value])
        elif isinstance(value, nodes.Node):
            total += _meter(value)
            setattr(node, name, _marked(value))
    _mark_inside(node, total)
    return total


def _block(body: list[nodes.Node], line: int) -> list[nodes.Node]:
    """Statements that spend the cost of their own nodes first; also where there are none, as of an empty loop."""
    total = 1 + sum(map(_meter, body))
    return [nodes.ExprStmt(_filter(TICK, nodes.Const(NODE * total), line), lineno=line), *body]


def _marked(node: nodes.Node) -> nodes.Node:
    """A node, within what spends the cost of its result where only the whole node can."""
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _filter(MADE, node, node.lineno)
    if isinstance(node, nodes.Concat):
        return _filter(JOINED, nodes.Tuple(node.nodes, "load", lineno=node.lineno), node.lineno)
    return node


def _mark_inside(node: nodes.Node, total: int) -> None:
    """Let operands of comparisons, lists of arguments, keys of mappings and tests of loops spend their cost."""
    if isinstance(node, nodes.Compare):
        searches = any(operand.op in ("in", "notin") for operand in node.ops)
        sides = [node.expr, *(operand.expr for operand in node.ops)]
        if len(sides) == 2 and not searches and any(isinstance(side, nodes.Const) for side in sides):
            return  # no longer than the constant
        for operand in node.ops:
            operand.expr = _filter(SEARCHED if operand.op in ("in", "notin") else WEIGHED, operand.expr, node.lineno)
        if not isinstance(node.expr, nodes.Const):
            node.expr = _filter(WEIGHED, node.expr, node.lineno)
    elif isinstance(node, nodes.Call | nodes.Filter | nodes.Test):
        if node.dyn_args is not None:
            node.dyn_args = _filter("list", node.dyn_args, node.lineno)
        if node.dyn_kwargs is not None:
            node.dyn_kwargs = _filter(WEIGHED, node.dyn_kwargs, node.lineno)
    elif isinstance(node, nodes.Pair) and not isinstance(node.key, nodes.Const):
        node.key = _filter(WEIGHED, node.key, node.lineno)
    elif isinstance(node, nodes.For) and node.test is not None:
        node.test = nodes.And(_filter(TICK, nodes.Const(NODE * total), node.lineno), node.test, lineno=node.lineno)


def _filter(name: str, value: nodes.Node, line: int) -> nodes.Filter:
    return nodes.Filter(value, name, [], [], None, None, lineno=line)
