"""From lengths to a plan of steps and micro-batches, and from the plan to batches.

Planning is pure functions of (lengths, settings, seed, epoch): `pieces.py` cuts, `ledger.py` accounts, `strategies/`
groups, `plan.py` joins them. `loader.py` gathers the planned batches (`batch.py`), ahead of the step.
"""
