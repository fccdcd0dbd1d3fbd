"""Batching strategies, one per file; `plan.strategy` in a recipe is the file's name, without a registry.

A strategy file has one function, `group(lengths, settings, rng) -> Grouping`: given the tokens of every piece, it
assigns each piece to a micro-batch and a step. It never sees text. `grouping.py` has the cuts that strategies share.
"""
