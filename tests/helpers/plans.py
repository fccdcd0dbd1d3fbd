"""Comparison of plans."""

from unpad.batching.plan import Plan


def contents(plan: Plan) -> tuple[object, ...]:
    """Everything in a plan that affects a run; equal for equal plans."""
    pieces = plan.pieces
    arrays = (
        pieces.seq_ids, pieces.starts, pieces.stops, pieces.first_target,
        plan.order, plan.micro_offsets, plan.step_offsets, plan.pad_to, plan.fill_to,
    )  # fmt: skip
    return (plan.strategy, *(tuple(array.tolist()) for array in arrays))
