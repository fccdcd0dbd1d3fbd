"""Lengths -> which sequences go into which batch. Pure functions of (lengths, settings, seed, epoch)."""
