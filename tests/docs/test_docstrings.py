"""Docstrings name the thing first."""

from __future__ import annotations
