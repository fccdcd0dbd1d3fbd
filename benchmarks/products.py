"""The matrix products of our updates and nothing in between: what no way of doing the rest could pass."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import torch
from measure import Work
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from workloads import Ours, Workload

aten = torch.ops.aten
# How linear layers and the head multiply, in every precision: `F.linear` of a flat run becomes mm or, with a bias,
# addmm; the head writes into given memory (out).
PRODUCTS = (aten.mm.default, aten.mm.out, aten.addmm.default, aten.addmm.out)
# Products of layers that no step of ours makes today. If one did, the products alone would be too few and look too
# fast. Batches of products (bmm) are attention's where it has no kernel; they are left out with it.
OTHERS = (
    "linear",
    "_linear_pointwise",
    "_mkl_linear",
    "mkldnn_linear",
    "_addmm_activation",
    "_scaled_mm",
    "mv",
    "addmv",
)


class RecordProducts(TorchDispatchMode):
    """Notes the operands of every matrix product inside, each (rows, depth) and (depth, columns).

    Raises:
        NotImplementedError: a product that it cannot repeat.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operands: list[tuple[Tensor, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in PRODUCTS:
            self.operands.append(tuple(x.detach() for x in args[-2:]))
        elif func._schema.name.partition("::")[2] in OTHERS:
            raise NotImplementedError(f"{func} is a product that the products alone would leave out: record it too")
        return func(*args, **(kwargs or {}))


class ProductsAlone:
    """The products that our updates make, in the same precision, sizes and order.

    Args:
        precision: as of `Ours`.
    """

    NUM_STEPS = 4  # updates that are noted; their products come again and again
    LIMIT_BYTES = 1 << 30  # of operands; no further update is noted beyond it, the first one always is

    def __init__(self, workload: Workload, *, precision: str = "auto") -> None:
        ours = Ours(workload, precision=precision)
        self.precision, self.losses = ours.precision, list[float]()
        outputs: dict[tuple[int, int], Tensor] = {}  # written over and over: nobody reads them
        self._steps: list[tuple[Work, list[tuple[Tensor, Tensor, Tensor]]]] = []
        storages: dict[int, int] = {}  # address -> bytes
        while len(self._steps) < self.NUM_STEPS and sum(storages.values()) < self.LIMIT_BYTES:
            with RecordProducts() as recorded:
                work = ours.step()
            products = []
            for a, b in recorded.operands:
                storages |= {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in (a, b)}
                out = outputs.setdefault((len(a), b.shape[1]), a.new_empty(len(a), b.shape[1]))
                products.append((a, b, out))
            self._steps.append((work, products))
        self._next = cycle(self._steps)

    @property
    def operations_per_needed(self) -> float:
        """Operations of these products over those that the updates need; what is missing to 1 is mostly attention's."""
        made = sum(2 * a.numel() * b.shape[1] for _, products in self._steps for a, b, _ in products)
        return made / sum(work.operations for work, _ in self._steps)

    @torch.no_grad()
    def step(self) -> Work:
        work, products = next(self._next)
        for a, b, out in products:
            torch.mm(a, b, out=out)
        return work
