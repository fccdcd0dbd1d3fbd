"""Tensors sharded by rows among processes, as torch's FSDP2 holds them.

Every function returns a plain tensor unchanged, so a single process imports nothing of torch.distributed.
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
    """Whole tensors in the memory of the leading process, gathered one by one; other processes get none. Collective."""
    found = {}
    for name, tensor in tensors.items():
        values = whole_tensor(tensor)
        if group.leads:
            found[name] = values.cpu()
    return found


def own_rows(tensor: Tensor) -> tuple[Tensor, int]:
    """The rows that this process holds, and the index of the first; all rows and 0 for a plain tensor."""
    if not is_divided(tensor):
        return tensor, 0
    rows: Tensor = tensor.to_local()
    return rows, first_row(tensor)


def first_row(tensor: DTensor) -> int:
    """Index of the first row that this process holds; all processes but the last ones hold equally many."""
    mesh = tensor.device_mesh
    per_process = -(-tensor.shape[0] // mesh.size())
    return min(mesh.get_local_rank() * per_process, tensor.shape[0])


def divided_like(held: Tensor, values: Tensor) -> Tensor:
    """Shard whole values like `held`; nothing is sent, since every process has them.

    Args:
        held: sharded or plain; the result has its device and row distribution.
        values: tensor of the same shape; returned unchanged if already sharded.
    """
    if not is_divided(held) or is_divided(values):
        return values
    return from_own_rows(held, own_part(held, values, 0))


def own_part(held: DTensor, values: Tensor, first: int) -> Tensor:
    """Copy those rows of `values` that this process holds.

    Args:
        held: a tensor sharded like the whole tensor that contains `values`.
        values: (rows, ...); first: index of the first of them.
    """
    start = first_row(held)
    stop = start + held.to_local().shape[0]
    return values[max(start - first, 0) : max(stop - first, 0)].clone()


def from_own_rows(held: DTensor, rows: Tensor) -> Tensor:
    """Build a tensor sharded like `held` from the rows of each process."""
    from torch.distributed.tensor import DTensor

    local = rows.to(held.device).contiguous()
    return DTensor.from_local(
        local, held.device_mesh, held.placements, run_check=False, shape=held.shape, stride=held.stride()
    )


def total_norm(tensors: Iterable[Tensor]) -> Tensor:
    """L2 norm of all values of several tensors, a scalar; collective if they are sharded."""
    return whole_tensor(nn.utils.get_total_norm(tensors))
