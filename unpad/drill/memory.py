"""Memory for a run: what a step and a checkpoint need, against what is free and allowed."""

from __future__ import annotations

from unpad.drill.findings import Finding
from unpad.drill.room import size_text
from unpad.machine.memory import MemoryLimit

NEARLY = 0.8  # of what is free


def check_memory(needed: int, how: str, limit: MemoryLimit) -> Finding:
    """Compare the memory that a run needs with what there is.

    Args:
        needed: bytes of the whole process.
        how: that was found out, such as "a step".
    """
    measured = f"{size_text(needed)} for {how}, {size_text(limit.num_bytes)} {limit.reason}"
    if needed > limit.num_bytes:
        return Finding(
            "memory", "fault", measured, "it does not fit: lower plan.tokens_per_micro, or the model's sizes"
        )
    if needed > NEARLY * limit.num_bytes:
        return Finding("memory", "warning", measured, "little is left for other programs: lower plan.tokens_per_micro")
    return Finding("memory", "ok", measured, "it fits")
