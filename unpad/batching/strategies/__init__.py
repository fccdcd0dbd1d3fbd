"""Batching strategies, one per file; `plan.strategy` in a recipe is the file's name, so there is no registry to edit.

A strategy file has one function, `group(lengths, settings, rng) -> Grouping`: given the tokens of every piece it says
in which micro-batch and step each piece goes. It never sees text. `grouping.py` has the cuts that strategies share.
"""
