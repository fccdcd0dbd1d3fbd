"""Differences between two recipes, and which of them a resumed run may adopt."""

from __future__ import annotations

from typing import Any

from unpad.recipes.recipe import Recipe

RESUMABLE = (
    "train.max_steps", "train.max_epochs", "train.log_every", "train.eval_every", "train.grad_norm_warning",
    "train.allocator", "train.threads", "train.sums", "train.shard", "train.pipeline_stages", "train.timeout",
    "images.cache_mib", "collapse.policy", "checkpoint.every", "checkpoint.every_seconds", "checkpoint.keep", "log",
    "generate",
)  # fmt: skip
STAGE_RESUMABLE = ("max_epochs", "eval_every", "grad_norm_warning")


def differences(old: Recipe, new: Recipe) -> dict[str, tuple[Any, Any]]:
    """Return {dotted key: (old, new)} of every field that differs."""
    before, after = _flatten(old.model_dump(mode="json")), _flatten(new.model_dump(mode="json"))
    keys = sorted(before.keys() | after.keys())
    return {key: (before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)}


def may_change_on_resume(key: str) -> bool:
    """True if a resumed run accepts a changed value of the dotted key."""
    parts = key.split(".")
    if parts[0] == "stages":
        return len(parts) == 4 and parts[2] == "train" and parts[3] in STAGE_RESUMABLE
    return key in RESUMABLE or parts[0] in RESUMABLE


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        items = {str(i): item for i, item in enumerate(value)}.items()
    else:
        return {prefix: value}
    return {k: v for key, item in items for k, v in _flatten(item, f"{prefix}.{key}" if prefix else str(key)).items()}
