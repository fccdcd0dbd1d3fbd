"""Readings of the machine and of this process: memory, processor, and load. Nothing here needs torch."""
