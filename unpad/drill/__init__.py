"""`unpad drill`: shows on the user's own machine and disk that a run is safe there.

A group of checks has a file: the disk (`mounts.py`, `files.py`, `names.py`), room on it (`room.py`), memory
(`memory.py`), the clock (`clock.py`), and kills of a real training (`kills.py`). `drill.py` makes one after the other
in a new folder (`place.py`), and `findings.py` has the table that comes of it. Trainings are in other processes
(`child.py`): one measures what the recipe needs (`probe.py`, `measure.py`), others train a short form of it
(`bounded.py`, `train.py`).
"""
