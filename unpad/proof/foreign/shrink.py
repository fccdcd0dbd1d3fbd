"""Small models with the architecture of a transformers configuration.

A small configuration keeps what makes a difference between architectures: one block of each type, in their order,
grouped heads, a head size unlike width / heads, windows, soft caps, sinks, rotary kinds and parts, multipliers, tied
embeddings, experts and mixers. It lowers the sizes and turns off randomness in training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from unpad.proof.foreign import sizes
from unpad.proof.foreign.sizes import Fields

MOST_BLOCKS = 6


@dataclass(frozen=True)
class _Stack:
    """Blocks of a model, and the numbers of those that a small model keeps; `num` is 0 if no field counts them."""

    num: int
    kept: tuple[int, ...]


@dataclass(frozen=True)
class _Whole:
    """Sizes of the whole model that others are relative to.

    Args:
        heads: heads of queries; head_size: width / heads. 0 where a configuration has none.
    """

    stack: _Stack
    heads: int
    head_size: float


def shrink(full: Fields) -> Fields:
    """The fields of a small configuration.

    Args:
        full: fields of a configuration as its `to_dict` gives them, of the model and of its parts.
    """
    return _shrink(full, None)


def _shrink(full: Fields, outer: _Whole | None) -> Fields:
    whole = _measure(full, outer)
    family = sizes.FAMILIES.get(str(full.get("model_type")), {})
    small: Fields = {}
    for name, value in full.items():
        if name in family:
            small[name] = family[name]
        elif name not in sizes.LEFT_OUT:
            small[name] = _field(name, value, whole)
    _spread_special_ids(full, small)
    _derive(full, small, family)
    if isinstance(layers := full.get("per_layer_config"), dict):
        small["per_layer_config"] = _per_layer(layers, full, small, whole)
    if isinstance(rope := small.get("rope_parameters"), dict):
        small["rope_parameters"] = _rope(rope, small)
    return small


def _measure(full: Fields, outer: _Whole | None) -> _Whole:
    heads = _first_count(full, sizes.QUERY_HEADS)
    if not heads and outer is not None:
        return _Whole(_Stack(0, ()), outer.heads, outer.head_size)
    return _Whole(_stack(full), heads, _first_count(full, sizes.WIDTHS) / heads if heads else 0.0)


def _first_count(full: Fields, names: Iterable[str]) -> int:
    return next((value for name in names if (value := _count(full, name)) is not None), 0)


def _count(full: Fields, name: str) -> int | None:
    """A field that counts something; True and False count nothing."""
    value = full.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


# --------------------------------------------------------------------------- blocks


def _stack(full: Fields) -> _Stack:
    """Choose the first block of each type; types differ in any field that tells blocks apart."""
    named = (len(value) for name in sizes.BLOCK_TYPES if isinstance(value := full.get(name), list))
    num = _first_count(full, sizes.STACKS) or next(named, 0)
    types = [_type(full, num, index) for index in range(num)]
    kept: list[int] = []
    for index, kind in enumerate(types):
        twice = any(part in sizes.SHARING for part in kind)
        if sum(types[other] == kind for other in kept) <= twice:
            kept.append(index)
    kept = kept[:MOST_BLOCKS]
    kept += [index for index in range(num) if index not in kept][: max(_fewest(full, num) - len(kept), 0)]
    return _Stack(num, tuple(sorted(kept)))


def _type(full: Fields, num: int, index: int) -> tuple[object, ...]:
    """The marks of a block among others: its entries of lists, whether lists name it, and whether it is a first one."""
    entries = [
        str(value[index]) if name not in sizes.BLOCK_LISTS else index in value
        for name, value in full.items()
        if isinstance(value, list) and (len(value) == num or name in sizes.BLOCK_LISTS)
    ]
    first = [index >= limit for name in sizes.FIRST_BLOCKS if (limit := _count(full, name)) is not None]
    last = [index >= num - many for name in sizes.LAST_BLOCKS if (many := _count(full, name)) is not None]
    return (*entries, *first, *last)


def _fewest(full: Fields, num: int) -> int:
    """Fewest blocks that contain every type that recurs at a fixed interval."""
    lists = [value for value in full.values() if isinstance(value, list) and len(value) == num]
    cycles = [len(value) for name in sizes.CYCLES if isinstance(value := full.get(name), list)]
    periods = not lists and any((_count(full, name) or 0) > 1 for name in sizes.PERIODS)
    return max(2, 4 if periods else 0, *cycles)


# --------------------------------------------------------------------------- fields


def _field(name: str, value: object, whole: _Whole) -> object:
    if name in sizes.FIXED:
        return sizes.FIXED[name] if value is not None or name in ("pad_token_id", "is_decoder") else None
    if isinstance(value, list):
        return _list(name, value, whole)
    if isinstance(value, dict):
        return value if name in ("rope_parameters", "rope_scaling", "per_layer_config") else _shrink(value, whole)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    if any(part in name for part in sizes.SILENCED):
        return value * 0
    return value if isinstance(value, float) else _number(name, value, whole)


def _list(name: str, values: list[object], whole: _Whole) -> list[object]:
    stack = whole.stack
    if name in sizes.BLOCK_LISTS:
        return [stack.kept.index(index) for index in values if isinstance(index, int) and index in stack.kept]
    if len(values) == stack.num and name not in sizes.CYCLES:
        return [_field(name, values[index], whole) for index in stack.kept]
    return values


def _number(name: str, value: int, whole: _Whole) -> int:
    for names, rule in _RULES:
        if name in names:
            return rule(value, whole)
    return min(value, sizes.VOCABULARY if "vocab" in name else sizes.MOST.get(name, value))


def _blocks(value: int, whole: _Whole) -> int:
    return len(whole.stack.kept) if value == whole.stack.num else min(value, 2)


def _head_size(value: int, whole: _Whole) -> int:
    """Width / heads stays that; a larger size stays larger, and a smaller one smaller."""
    own = sizes.HEAD_SIZE if value == whole.head_size or not whole.heads else 0
    return min(value, own or (2 * sizes.HEAD_SIZE if value > whole.head_size else sizes.HEAD_SIZE // 2))


def _few_heads(num: int) -> int:
    """A power of two, since heads divide the width."""
    return 1 << (min(max(num, 1), sizes.HEADS).bit_length() - 1)


def _key_heads(num: int, whole: _Whole) -> int:
    """One per head of queries, one in all, or half as many: groups stay groups."""
    few = _few_heads(whole.heads)
    return few if num == whole.heads else 1 if num == 1 else max(few // 2, 1)


# The first rule whose names include a field's is its own; other fields have the sizes of `MOST`.
_RULES: tuple[tuple[Collection[str], Callable[[int, _Whole], int]], ...] = (
    (sizes.POSITIONS, lambda value, whole: sizes.CONTEXT),
    (sizes.VOCABULARIES, lambda value, whole: sizes.VOCABULARY),
    (sizes.STACKS, _blocks),
    (sizes.FIRST_BLOCKS, lambda value, whole: sum(index < value for index in whole.stack.kept)),
    (sizes.LAST_BLOCKS, lambda value, whole: sum(index >= whole.stack.num - value for index in whole.stack.kept)),
    (sizes.END_BLOCKS, lambda value, whole: len(whole.stack.kept) - 1),
    (sizes.PERIODS, lambda value, whole: min(value, 2)),
    (sizes.OFFSETS, lambda value, whole: min(value, 1)),
    (sizes.KEY_HEADS, _key_heads),
    (sizes.QUERY_HEADS, lambda value, whole: _few_heads(value)),
    (sizes.HEAD_SIZES, _head_size),
    (sizes.WINDOWS, lambda value, whole: min(value, sizes.WINDOW)),
)


def _spread_special_ids(full: Fields, small: Fields) -> None:
    """Give each special id of images, sounds and the like an id of its own from the end of the vocabulary."""
    free = sizes.VOCABULARY
    for name in full:
        special = name.endswith(("_token_id", "_token_index")) and name not in sizes.FIXED
        if special and name in small and isinstance(full[name], int):
            free -= 1
            small[name] = free


def _derive(full: Fields, small: Fields, family: Fields) -> None:
    """Keep the relations between fields that hold in the whole configuration."""
    relations = [(*one, sum) for one in sizes.SUMS] + [(*one, math.prod) for one in sizes.PRODUCTS]
    for name, parts, combine in relations:
        wholes = [_count(full, part) for part in parts]
        smalls = [_count(small, part) for part in parts]
        if name not in small or name in family or None in (*wholes, *smalls):
            continue
        if full[name] == combine(number for number in wholes if number is not None):
            small[name] = combine(number for number in smalls if number is not None)


def _per_layer(layers: Fields, full: Fields, small: Fields, whole: _Whole) -> Fields:
    """Fields of single blocks that differ from those of the model."""
    made: Fields = {}
    for index, fields in layers.items():
        if isinstance(fields, dict) and int(index) in whole.stack.kept:
            inner_full = {**full, **fields}
            inner = _Whole(whole.stack, _first_count(inner_full, sizes.QUERY_HEADS), whole.head_size)
            inner_small = {**small, **{name: _field(name, value, inner) for name, value in fields.items()}}
            _derive(inner_full, inner_small, {})
            differing = {name: value for name, value in inner_small.items() if name in fields or small[name] != value}
            made[str(whole.stack.kept.index(int(index)))] = differing
    return made


# --------------------------------------------------------------------------- rotary embedding


def _rope(rope: Fields, small: Fields) -> Fields:
    """Rotary fields with lists as long as the small head's rotated half; one set of them, or one per type of block."""
    if rope and all(isinstance(part, dict) for part in rope.values()):
        return {name: _rope(part, small) for name, part in rope.items() if isinstance(part, dict)}
    heads, width = _first_count(small, sizes.QUERY_HEADS), _first_count(small, sizes.WIDTHS)
    sized = _first_count(small, ("qk_rope_head_dim", "head_dim")) or width // max(heads, 1)
    factor = rope.get("partial_rotary_factor") or small.get("partial_rotary_factor") or 1
    half = int(sized * factor) // 2 if isinstance(factor, int | float) else sized // 2
    made = dict(rope)
    for name, value in rope.items():
        if isinstance(value, list) and name.endswith("_factor"):
            made[name] = (value * half)[:half]
        elif isinstance(value, list) and name == "mrope_section":
            made[name] = [half // len(value) + (place < half % len(value)) for place in range(len(value))]
        elif name in sizes.MOST and isinstance(value, int):
            made[name] = min(value, sizes.MOST[name])
    return made
