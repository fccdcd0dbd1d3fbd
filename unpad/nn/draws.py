"""Random draws of a micro-batch, including one that is computed in parts.

Layers ask here for seeds and random numbers. In one piece a micro-batch draws from torch's generator, in the order of
its layers. In parts, as memory may demand, every part gets the draws that its entries have in the whole: seeds are
those of the whole, with the places of the part's entries there, and random numbers are drawn in the shape of the whole.

Parts are consecutive sequences, computed in order. So the entries of a part at a draw follow those of the parts before
it, whatever they are: tokens, sets, images, or what a merger has left of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from unpad.nn.scope import Scope


@dataclass(frozen=True)
class Draw:
    """A seed, and the places of entries in the run that it is drawn for.

    Args:
        seed: in [0, 2^62); a resumed step draws the same one.
        first: place of the first row; first_key: of the first key, where attention reads another run.
        repeats: number of equal runs that the rows consist of; their first rows lie `apart` places from each other.
    """

    seed: int
    first: int = 0
    first_key: int = 0
    repeats: int = 1
    apart: int = 0

    def rows(self, num: int, device: torch.device) -> Tensor:
        """Places of `num` rows, (num,) int64."""
        if self.repeats == 1:
            return torch.arange(self.first, self.first + num, device=device)
        runs = self.first + self.apart * torch.arange(self.repeats, device=device)
        return (runs[:, None] + torch.arange(num // self.repeats, device=device)).flatten()


class UnmeasuredError(Exception):
    """A draw needs to know the entries of parts that come later: `SplitDraws.measure` all of them first."""


_split: Scope[SplitDraws | None] = Scope(None)
_repeats: Scope[int] = Scope(1)


def draw(num_rows: int, num_keys: int = 0) -> Draw:
    """Draw a seed from torch's generator.

    Args:
        num_rows, num_keys: entries of the runs; the seed comes with their places.
    """
    split = _split.get()
    return Draw(_seed()) if split is None else split.seed(num_rows, num_keys)


def random_like(x: Tensor, fill: Callable[[Tensor], Tensor]) -> Tensor:
    """Draw random numbers in the shape of `x`; the rows of `x` are entries of one run.

    Args:
        fill: draws for a tensor in its shape, such as `torch.randn_like`; does not read it.
    """
    split = _split.get()
    return fill(x) if split is None else split.numbers(x, fill)


def in_parts() -> bool:
    """True where a part of a micro-batch computes."""
    return _split.get() is not None


@contextmanager
def repeated(times: int) -> Iterator[None]:
    """Declare that runs inside consist of `times` equal ones."""
    with _repeats.of(times):
        yield


def _seed() -> int:
    return int(torch.randint(1 << 62, ()))


class GeneratorState:
    """State of torch's generators, of the processor and of the device that computes, to draw the same again."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._state = device, torch.get_rng_state()
        self._of_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore(self) -> None:
        """Put the generators back into this state."""
        torch.set_rng_state(self._state)
        if self._of_device is not None:
            torch.cuda.set_rng_state(self._of_device, self._device)


@dataclass
class SplitDraws:
    """Draws of one micro-batch that is computed in parts; every part gets the draws that it has in the whole.

    For a seed a part needs to know only the parts before it. Random numbers are drawn in the shape of the whole, and
    need the entries of all: these are measured by a pass over each.

    Every part, the first one first, is computed inside of `part`; before, where needed, inside of `measure`.
    """

    _counts: list[list[tuple[int, int]]] = field(default_factory=list)  # entries at every draw, part by part
    _measured: list[list[tuple[int, int]]] = field(default_factory=list)  # the same of all parts
    _is_measuring: bool = False

    @contextmanager
    def part(self) -> Iterator[None]:
        """Compute the next part, with the generator in the state from before the micro-batch.

        Raises:
            UnmeasuredError: the parts are to be measured first.
        """
        self._counts.append([])
        with _split.of(self):
            yield
        assert len(self._counts[-1]) == len(self._counts[0]), "a part draws more or less often than another"

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Measure the next part: compute it without gradient, and with any draws."""
        self._is_measuring = True
        try:
            with self.part():
                yield
        finally:
            self._is_measuring = False
        self._measured.append(self._counts.pop())

    def seed(self, num_rows: int, num_keys: int) -> Draw:
        """As `draw`, for this part."""
        repeats = _repeats.get()
        (first, first_key), num = self._visit(num_rows // repeats, num_keys)
        return Draw(_seed(), first, first_key) if repeats == 1 else Draw(_seed(), first, 0, repeats, self._all(num))

    def numbers(self, x: Tensor, fill: Callable[[Tensor], Tensor]) -> Tensor:
        """As `random_like`, for this part."""
        repeats = _repeats.get()
        (first, _), num = self._visit(len(x) // repeats, 0)
        total = self._all(num)
        rows = Draw(0, first, 0, repeats, total).rows(len(x), x.device)
        return fill(x.new_empty(total * repeats, *x.shape[1:])).index_select(0, rows)

    def _visit(self, num_rows: int, num_keys: int) -> tuple[tuple[int, int], int]:
        """Come to the next draw of this part; return the places of its first entries, and the number of the draw."""
        *before, own = self._counts
        num = len(own)
        own.append((num_rows, num_keys))
        assert all(num < len(counts) for counts in before), "a part draws more often than another"
        return (sum(counts[num][0] for counts in before), sum(counts[num][1] for counts in before)), num

    def _all(self, num: int) -> int:
        """Rows of all parts at a draw."""
        if self._is_measuring:
            return self._counts[-1][num][0]
        if not self._measured:
            raise UnmeasuredError
        return sum(counts[num][0] for counts in self._measured)
