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


def whole_tensor(tensor: Tensor) -> Tensor:
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
        values = whole_tensor(tensor)
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
        values: of the same shape; returned as they are if they are divided already.
    """
    if not is_divided(held) or is_divided(values):
        return values
    return from_own_rows(held, own_part(held, values, 0))


def own_part(held: DTensor, values: Tensor, first: int) -> Tensor:
    """A copy of those of some rows that this process holds.

    Args:
        held: a tensor of the same rows as the whole that `values` is a part of.
        values: (rows, ...); first: number of the first of them.
    """
    start = first_row(held)
    stop = start + held.to_local().shape[0]
    return values[max(start - first, 0) : max(stop - first, 0)].clone()


def from_own_rows(held: DTensor, rows: Tensor) -> Tensor:
    """The tensor of which every process gives the rows that it holds, divided as `held` is."""
    from torch.distributed.tensor import DTensor

    local = rows.to(held.device).contiguous()
    return DTensor.from_local(
        local, held.device_mesh, held.placements, run_check=False, shape=held.shape, stride=held.stride()
    )


def total_norm(tensors: Iterable[Tensor]) -> Tensor:
    """L2 norm of all values of several tensors, a scalar; collective if they are divided."""
    return whole_tensor(nn.utils.get_total_norm(tensors))
