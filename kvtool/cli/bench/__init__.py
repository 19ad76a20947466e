"""kvtool bench: the command and the table."""
