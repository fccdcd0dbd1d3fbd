"""`unpad drill`: shows on the user's own machine and disk that a run is safe there.

A group of checks has a file: the disk (`mounts.py`, `files.py`, `names.py`), room on it (`room.py`), memory
(`memory.py`), the clock (`clock.py`), and kills of a real training (`kills.py`). `drill.py` runs them in turn in a new
folder (`place.py`), and `findings.py` prints the table. Training runs in other processes (`child.py`): one measures the
needs of the recipe (`probe.py`, `measure.py`), others train a short form of it (`bounded.py`, `train.py`).
"""
