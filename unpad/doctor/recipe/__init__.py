"""Checks of the fields of a recipe."""
