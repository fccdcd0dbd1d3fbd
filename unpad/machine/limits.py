"""Limits that `ulimit` sets for a process."""

from __future__ import annotations


def limit_of(name: str) -> int | None:
    """Soft limit of this process, by its name after RLIMIT_, such as AS; None without one."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    limit: int = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[0]
    return None if limit == resource.RLIM_INFINITY else limit
