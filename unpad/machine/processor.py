"""Name and instructions of the processor, as reported by the system."""

from __future__ import annotations

import platform

from unpad.machine.files import lines_of, system_file


def processor_fields() -> dict[str, str]:
    """Fields of the last processor of /proc/cpuinfo by name; empty without that file."""
    lines = lines_of(system_file("proc/cpuinfo"))
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}


def processor_name() -> str:
    """Model of the processor, or its architecture if the system gives no name."""
    return processor_fields().get("model name") or platform.processor() or platform.machine()


def full_processor_name() -> str:
    """Name with family and model, which distinguish processors with equal names in clouds."""
    fields, name = processor_fields(), processor_name()
    return f"{name} (family {fields['cpu family']}, model {fields['model']})" if "cpu family" in fields else name
