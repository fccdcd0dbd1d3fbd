"""Random draws of a pass, the same for every cut of an update into micro-batches, parts and processes.

A random number is a hash of a seed, the place of its entry (`Layout.places`: the sequence's place in the update, and
the entry's in the sequence), and its column. Inside of `seeded` the n-th draw of a pass has the n-th seed of the
update; layers that some passes skip, as those of images, count theirs `apart`. Native kernels compute the same bits.

The hash is the finaliser of MurmurHash3 (Appleby 2011), as in native/simd.h.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b

import torch
from torch import Tensor

from unpad.nn.scope import Scope

Seed = int | Tensor  # of `draw`; within a compiled graph, where it must not be a constant, () int64
_LOW = 0xFFFFFFFF
_FACTORS = (0x85EBCA6B, 0xC2B2AE35)


@dataclass
class _Draws:
    """Draws of one pass; `counts` has the number of draws of every part of a model that counts apart."""

    update: int
    part: str = ""
    counts: Counter[str] = field(default_factory=Counter)


_draws: Scope[_Draws | None] = Scope(None)


@contextmanager
def seeded(update: int) -> Iterator[None]:
    """Compute a pass inside, with the seeds of an update."""
    with _draws.of(_Draws(update)):
        yield


@contextmanager
def apart(part: str) -> Iterator[None]:
    """Count draws inside by themselves, as of a part of the model that some passes skip."""
    draws = _draws.get()
    if draws is None:
        yield
        return
    before, draws.part = draws.part, part
    try:
        yield
    finally:
        draws.part = before


def draw() -> int:
    """Draw a seed in [0, 2^62): of the update inside of `seeded`, else by torch's generator."""
    draws = _draws.get()
    if draws is None:
        return int(torch.randint(1 << 62, ()))
    draws.counts[draws.part] += 1
    key = f"{draws.update},{draws.part},{draws.counts[draws.part]}"
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little") >> 2


def rows_of(x: Tensor, places: Tensor | None) -> Tensor:
    """Places of the rows of `x`, (num_rows,) int64; their numbers without `places`."""
    return torch.arange(len(x), device=x.device) if places is None else places


def uniform(x: Tensor, places: Tensor | None) -> Tensor:
    """Draw numbers between 0 and 1, both excluded, in the shape of `x`, fp32.

    Args:
        places: (num_rows,) int64, as `Layout.places`; None numbers the rows.
    """
    columns = torch.arange(x[:1].numel(), device=x.device)
    drawn = bits(draw(), rows_of(x, places)[:, None], columns)
    return ((drawn >> 9 & 0x7FFFFF).float() + 0.5).mul_(2.0**-23).view(x.shape)


def normal(x: Tensor, places: Tensor | None) -> Tensor:
    """Draw normal numbers in the shape and dtype of `x`; `places` as of `uniform`."""
    return (torch.erfinv(2 * uniform(x, places) - 1) * 2**0.5).to(x.dtype)


def bits(seed: Seed, rows: Tensor, columns: Tensor) -> Tensor:
    """Hash places of a matrix, int64 indices that broadcast against each other, to 32 bits, int32."""
    of_row = mix(mix(rows & _LOW) ^ (seed & _LOW))
    of_row = mix(of_row ^ (seed >> 32) ^ (rows >> 32 & _LOW))
    x = of_row.int() ^ (columns * 0x9E3779B9 & _LOW).int()
    # `mix` in place and in 32 bits: this is the one tensor of full size. A shift of a negative number fills with ones.
    x ^= x >> 16 & 0xFFFF
    x *= _FACTORS[0] - 2**32
    x ^= x >> 13 & 0x7FFFF
    x *= _FACTORS[1] - 2**32
    x ^= x >> 16 & 0xFFFF
    return x


def mix(x: Tensor) -> Tensor:
    """Hash 32 bits to 32 bits, both held in int64."""
    x = x ^ (x >> 16)
    x = x * _FACTORS[0] & _LOW
    x = x ^ (x >> 13)
    x = x * _FACTORS[1] & _LOW
    return x ^ (x >> 16)


def seed_generator(seed: int) -> None:
    """`torch.manual_seed`, without the stack trace (0.1 ms) that it records if there is no accelerator."""
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


# --------------------------------------------------------------------------- dropout


def dropout(x: Tensor, share: float, seed: Seed, places: Tensor | None = None) -> Tensor:
    """Set a share of (rows, columns) to zero and divide the rest by 1 - share (Srivastava et al. 2014, JMLR 15).

    Args:
        seed: from `draw`.
        places: (rows,) int64, as `Layout.places`; None numbers the rows.
    """
    if share == 0:
        return x
    columns = torch.arange(x.shape[1], device=x.device)
    return torch.where(kept(seed, rows_of(x, places)[:, None], columns, share), x / (1 - share), 0)


def kept(seed: Seed, rows: Tensor, columns: Tensor, share: float) -> Tensor:
    """Mask of the places of a matrix that dropout keeps.

    Args:
        rows, columns: int64 indices that broadcast against each other.

    Returns:
        bool of their broadcast shape.
    """
    # Compared as if unsigned.
    return bits(seed, rows, columns).bitwise_xor_(-(2**31)) >= int(share * 2**32) - 2**31
