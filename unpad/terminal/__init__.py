"""Output for a terminal of 80 columns: tables, and a line of progress."""
