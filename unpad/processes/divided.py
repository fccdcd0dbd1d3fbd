"""Tensors whose rows are divided among processes, as FSDP2 of torch holds them.

A plain tensor passes through every function as it is, so a process on its own imports nothing of torch.distributed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor, nn

from unpad.processes.group import Group, lost_connections

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

PLAIN = (Tensor, nn.Parameter, nn.Buffer)


def is_divided(tensor: Tensor) -> TypeGuard[DTensor]:
    """True if this process holds only some rows of the tensor."""
    if type(tensor) in PLAIN:
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def whole(tensor: Tensor) -> Tensor:
    """The tensor with the rows of all processes; collective if it is divided.

    Raises:
        LostProcessError: another process is gone, or silent.
    """
    if not is_divided(tensor):
        return tensor
    with lost_connections():
        gathered: Tensor = tensor.full_tensor()
    return gathered


def whole_tensors(tensors: Mapping[str, Tensor], group: Group) -> dict[str, Tensor]:
    """Whole tensors in the memory of the leading process, put together one by one, and none in others: collective."""
    found = {}
    for name, tensor in tensors.items():
        values = whole(tensor)
        if group.leads:
            found[name] = values.cpu()
    return found


def own_rows(tensor: Tensor) -> tuple[Tensor, int]:
    """The rows that this process holds, and the number of the first; (rows, 0) of a plain tensor, which all hold."""
    if not is_divided(tensor):
        return tensor, 0
    rows: Tensor = tensor.to_local()
    return rows, first_row(tensor)


def first_row(tensor: DTensor) -> int:
    """Number of the first row that this process holds: all but the last processes hold equally many."""
    mesh = tensor.device_mesh
    per_process = -(-tensor.shape[0] // mesh.size())
    return min(mesh.get_local_rank() * per_process, tensor.shape[0])


def divided_like(held: Tensor, values: Tensor) -> Tensor:
    """Whole values, divided as `held` is; nothing is sent, since every process has them.

    Args:
        held: divided or plain; its device and its rows are taken over.
        values: of the same shape.
    """
    if not is_divided(held):
        return values
    from torch.distributed.tensor import DTensor

    rows = held.to_local()
    start = first_row(held)
    own = values[start : start + len(rows)].to(rows.device, copy=True).contiguous()
    return DTensor.from_local(
        own, held.device_mesh, held.placements, run_check=False, shape=held.shape, stride=held.stride()
    )


def total_norm(tensors: Iterable[Tensor]) -> Tensor:
    """L2 norm of all values of several tensors, a scalar; collective if they are divided."""
    return whole(nn.utils.get_total_norm(tensors))
