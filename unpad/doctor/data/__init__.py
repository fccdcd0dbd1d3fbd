"""Checks of the rows and sequences that training reads."""
