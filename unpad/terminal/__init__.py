"""What a terminal of 80 columns shows: tables, and a line of progress."""
