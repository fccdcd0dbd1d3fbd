"""Memory for a run: needs of a step and a checkpoint, against free and allowed memory."""

from __future__ import annotations

from unpad.drill.findings import finding
from unpad.drill.room import size_text
from unpad.machine.memory import MemoryLimit
from unpad.terminal.finding import Finding

NEARLY = 0.8  # of the free memory


def check_memory(needed: int, how: str, limit: MemoryLimit, unknown: str = "") -> Finding:
    """Compare the memory needs of a run with the available memory.

    Args:
        needed: bytes of the whole process.
        how: source of the number, such as "a step".
        unknown: why a step was not measured; a fitting recipe is then still a warning.
    """
    measured = f"{size_text(needed)} for {how}, {size_text(limit.num_bytes)} {limit.reason}"
    if needed > limit.num_bytes:
        return finding(
            "memory", "fault", measured, "it does not fit: lower plan.tokens_per_micro, or the model's sizes"
        )
    if unknown:
        return finding("memory", "warning", measured, f"a step was not measured: {unknown}; raise --minutes")
    if needed > NEARLY * limit.num_bytes:
        return finding("memory", "warning", measured, "little is left for other programs: lower plan.tokens_per_micro")
    return finding("memory", "ok", measured, "it fits")
