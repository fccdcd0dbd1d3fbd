"""Losses of sets: distances between two sets of vectors, and divergences of a Gaussian from its prior.

Sets are runs of a flat tensor, and every loss has one value per set, or per set and dimension, which does not depend
on the rest of the batch. Distances between sets do not depend on the order of the members.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from unpad.batching.layout import Layout, LengthGroup
from unpad.nn.autograd import apply
from unpad.nn.precision import widened
from unpad.nn.segments import segment_mean

SHORTEST = 1e-3  # length below which the direction of a vector gradually fades; bounds the gradient of directions
BLOCK_CELLS = 1 << 20  # most pairs of members in memory at a time

# --------------------------------------------------------------------------- distances between sets


def chamfer(
    made: Tensor, target: Tensor, layout: Layout, *, cosine: float = 1.0, length: float = 1.0, distance: float = 3.0
) -> Tensor:
    """Chamfer distance of two sets of vectors, a sum over three costs c(r, t) of a pair of vectors:
    cosine * Ch(1 - cos(r, t)) + length * Ch(| |r| - |t| |) + distance * Ch(|r - t|^2), where
    Ch(c) = (mean_r min_t c(r, t) + mean_t min_r c(r, t)) / 2 (Barrow et al. 1977; Fan et al. 2017, arXiv 1612.00603).

    1 - cos is computed as |r / |r| - t / |t||^2 / 2, and vectors shorter than SHORTEST are divided by that: equal sets
    have distance 0, a zero vector costs 1/2 against any direction, and its gradient is finite. The search for partners
    has no gradient, only the costs of the chosen pairs have one: that is the gradient of the minimum, in memory that
    grows with the members and not with their pairs. Rounding may choose a partner that is as near up to rounding.

    Args:
        made: (num_members, width).
        target: (num_members, width); no gradient flows to it.
        layout: the members of every set, num_sets runs over num_members, of both.
        cosine, length, distance: weights of the three costs; a cost of weight 0 is not computed.

    Returns:
        (num_sets,) in fp32 or wider; 0 for a set without members.
    """
    made, target = widened(made), widened(target.detach())
    total = made.new_zeros(len(made))  # per member: from `made` to its nearest, and from `target` to its nearest
    if distance:
        total = total + distance * _to_nearest(made, target, layout, _squared)
    if cosine or length:
        lengths = [torch.linalg.vector_norm(x, dim=1, keepdim=True) for x in (made, target)]
        if cosine:
            scales = [size.clamp_min(SHORTEST).reciprocal() for size in lengths]
            total = total + cosine / 2 * _to_nearest(made * scales[0], target * scales[1], layout, _squared)
        if length:
            total = total + length * _to_nearest(lengths[0], lengths[1], layout, lambda gap: gap.abs().sum(1))
    return segment_mean(total, layout)


def _to_nearest(x: Tensor, y: Tensor, layout: Layout, cost: Callable[[Tensor], Tensor]) -> Tensor:
    """Mean cost of the i-th x with its nearest y and of the i-th y with its nearest x, (num_members,)."""
    nearest_y, nearest_x = nearest(x, y, layout)
    return (cost(x - y.index_select(0, nearest_y)) + cost(x.index_select(0, nearest_x) - y)) / 2


def _squared(gap: Tensor) -> Tensor:
    return gap.square().sum(1)


def _costs(x: Tensor, y: Tensor) -> Tensor:
    """Squared distances, up to the rounding of squared lengths.

    Args:
        x, y: (num_sets, rows, width), (num_sets, columns, width).

    Returns:
        (num_sets, rows, columns).
    """
    if x.shape[2] == 1:
        return (x - y.mT).square_()
    squares = [z.square().sum(2) for z in (x, y)]
    return torch.baddbmm(squares[1][:, None], x, y.mT, alpha=-2).add_(squares[0][:, :, None])


@torch.no_grad()
def nearest(x: Tensor, y: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """The nearest member, by Euclidean distance and up to rounding, of the same set in the other run; no gradient.

    Compares all pairs of a set, with at most BLOCK_CELLS of them in memory at a time, for sets of any size.

    Args:
        x, y: (num_members, width), the same dtype.
        layout: the members of every set, of both.

    Returns:
        For every x the member of y, and for every y the member of x, both (num_members,) int64.
    """
    x, y = widened(x), widened(y)
    sides = [[torch.arange(0, device=x.device)], [torch.arange(0, device=x.device)]]
    with torch.autocast(x.device.type, enabled=False):
        for ours, theirs, members, group in _rectangles(x, y, layout):
            for parts, columns in zip(sides, _nearest_columns(ours, theirs), strict=True):
                parts.append(group.tokens(members.gather(1, columns)))
    nearest_y, nearest_x = map(layout.grouped.restored, sides)
    return nearest_y, nearest_x


def _nearest_columns(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Column of the nearest y of every x, and of the nearest x of every y, both (num_sets, longest) int64.

    Cells past the end of a set repeat its last member, which changes no minimum.
    """
    nearest_y = []
    best = y.new_full(y.shape[:2], torch.inf)
    nearest_x = torch.zeros(y.shape[:2], dtype=torch.int64, device=y.device)
    rows = _rows_at_once(x)
    for first in range(0, x.shape[1], rows):
        costs = _costs(x[:, first : first + rows], y)  # (num_sets, rows, longest)
        nearest_y.append(costs.argmin(2))
        lowest, row = costs.min(1)
        closer = lowest < best
        best = torch.where(closer, lowest, best)
        nearest_x = torch.where(closer, row + first, nearest_x)
    return torch.cat(nearest_y, 1), nearest_x


# --------------------------------------------------------------------------- rectangles of sets of similar size


def _rectangles(x: Tensor, y: Tensor, layout: Layout) -> Iterator[tuple[Tensor, Tensor, Tensor, LengthGroup]]:
    """The length groups of two runs (num_members, width) of one layout, with rectangles of both, (num_sets, longest,
    width), and of the member in each cell; cells past the end of a set repeat its last member."""
    run = layout.grouped
    ordered = [run.ordered(values) for values in (x, y, torch.arange(len(x), device=x.device))]
    for group in run.groups:
        ours, theirs, members = map(group.rectangle, ordered)
        yield ours, theirs, members, group


def _rows_at_once(x: Tensor) -> int:
    """Rows of every set of (num_sets, longest, width) to compare at a time, as memory for their pairs allows."""
    return max(1, BLOCK_CELLS // (x.shape[0] * x.shape[1]))


# --------------------------------------------------------------------------- optimal transport


def sinkhorn(made: Tensor, target: Tensor, layout: Layout, *, epsilon: float = 0.1, iterations: int = 100) -> Tensor:
    """Entropic optimal transport between two sets of vectors, min_P <P, C> + epsilon KL(P | uniform), for the costs
    C = |r - t|^2 and plans P that take 1 / n from every r and bring 1 / n to every t (Cuturi 2013, arXiv 1306.0895).

    Solved by alternating updates of the two potentials in the log domain; returns the value of the dual. The gradient
    is that at the optimum, where it is the plan (Feydy et al. 2019, arXiv 1810.08278, section 3), so the backward pass
    stores no iteration. Costs far above epsilon take more iterations to converge. Unlike a Chamfer distance this
    counts members at a place, but the value for equal sets is only near 0.

    Args:
        made: (num_members, width).
        target: (num_members, width); no gradient flows to it.
        layout: the members of every set, num_sets runs over num_members, of both.
        epsilon: weight of the entropy, in the unit of the costs.
        iterations: updates of each of the potentials.

    Returns:
        (num_sets,) in fp32 or wider; 0 for a set without members.
    """
    return apply(_Transport, widened(made), widened(target.detach()), layout, epsilon, iterations)


class _Transport(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, made: Tensor, target: Tensor, layout: Layout, epsilon: float, iterations: int) -> Tensor:
        duals, grads = [made.new_zeros(0)], [made[:0]]
        scale = epsilon**-0.5  # of vectors; costs are then in units of epsilon
        with torch.autocast(made.device.type, enabled=False):
            for ours, theirs, _, group in _rectangles(made * scale, target * scale, layout):
                dual, grad = _solve(ours, theirs, group.key_mask, iterations)
                duals.append(group.tokens(dual))
                grads.append(group.tokens(grad))
        ctx.save_for_backward(layout.grouped.restored(grads) * (epsilon * scale))
        ctx.layout = layout
        return epsilon * segment_mean(layout.grouped.restored(duals), layout)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (by_member,) = ctx.saved_tensors
        return grad.index_select(0, ctx.layout.seq_of_token())[:, None] * by_member, None, None, None, None


def _solve(x: Tensor, y: Tensor, mask: Tensor | None, iterations: int) -> tuple[Tensor, Tensor]:
    """Potentials of transport with epsilon 1 between the sets of a rectangle.

    Args:
        x, y: (num_sets, longest, width).
        mask: (num_sets, longest) bool, True = real; None when all are.

    Returns:
        Sum of the two potentials of every member, (num_sets, longest): its mean over a set is the set's value; and the
        gradient of that value by x, (num_sets, longest, width).
    """
    real = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if mask is None else mask
    log_share = torch.where(real, -real.sum(1, keepdim=True).to(x.dtype).log(), -torch.inf)  # (num_sets, longest)
    rows = _rows_at_once(x)
    whole = _costs(x, y) if rows >= x.shape[1] else None

    def costs(u: Tensor, v: Tensor) -> Iterator[Tensor]:
        if whole is not None:
            yield whole if u is x else whole.mT
        else:
            yield from (_costs(part, v) for part in u.split(rows, 1))

    def best_response(u: Tensor, v: Tensor, potential: Tensor) -> Tensor:
        scores = (potential + log_share)[:, None]
        return -torch.cat([(scores - block).logsumexp(2) for block in costs(u, v)], 1)

    f, g = x.new_zeros(x.shape[:2]), x.new_zeros(x.shape[:2])
    for _ in range(iterations):
        f = best_response(x, y, g)
        g = best_response(y, x, f)
    taken, brought = [], []
    for block, at in zip(costs(x, y), (f + log_share).split(rows, 1), strict=True):
        plan = (at[:, :, None] + (g + log_share)[:, None] - block).exp()  # (num_sets, rows, longest)
        taken.append(plan.sum(2, keepdim=True))
        brought.append(plan @ y)
    return f + g, 2 * (torch.cat(taken, 1) * x - torch.cat(brought, 1))


# --------------------------------------------------------------------------- divergences


def gaussian_kl(
    mean: Tensor, log_var: Tensor, prior_mean: Tensor | None = None, prior_log_var: Tensor | None = None
) -> Tensor:
    """KL divergence of independent Gaussians from their priors, per dimension and in nats:
    (s^2 / p^2 + (m - m_p)^2 / p^2 - 1 - log(s^2 / p^2)) / 2.

    Args:
        mean, log_var: (..., dim), of the posterior.
        prior_mean, prior_log_var: moments of the prior, to broadcast against them; default 0, the standard normal.

    Returns:
        (..., dim) in fp32 or wider.
    """
    mean, ratio = widened(mean), widened(log_var)  # logarithm of the ratio of variances
    precision = None
    if prior_log_var is not None:
        ratio = ratio - widened(prior_log_var)
        precision = (-widened(prior_log_var)).exp()
    gap = (mean if prior_mean is None else mean - widened(prior_mean)).square()
    # expm1: near its prior a Gaussian differs by less than the digits of exp(ratio) - 1.
    return (ratio.expm1() - ratio + (gap if precision is None else gap * precision)) / 2


def free_bits(kl: Tensor, floor: float) -> Tensor:
    """max(kl, floor), for every dimension of every set by itself (Kingma et al. 2016, arXiv 1606.04934,
    who take the maximum of means over a batch, which makes a set depend on the others).

    A dimension below the floor has no gradient; a dimension above keeps its gradient, independent of the others.

    Args:
        kl: (..., dim) in nats, from `gaussian_kl`.
        floor: nats per dimension without cost.
    """
    return kl.clamp_min(floor)
