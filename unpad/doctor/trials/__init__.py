"""Checks of the model and its steps: copies that are trained for a while, and what they take of the machine."""
