"""`unpad drill`: shows on the user's own machine and disk that a run is safe there.

A group of checks has a file: the disk and room on it (`mounts.py`), what a run demands of it (`files.py`), the clock
(`clock.py`), and kills of a real training (`kills.py`). `drill.py` runs them in turn in a temporary folder, and
`findings.py` prints the table. Training runs in other processes (`child.py`): one measures the needs of the recipe
(`probe.py`, `measure.py`), others train it (`train.py`).
"""
