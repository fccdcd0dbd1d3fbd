"""Kinds of bad input as one table: files made here, and the code, place, exit code and rows that they must give."""
