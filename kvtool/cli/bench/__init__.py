"""kvtool bench: the command, the table and the picture."""
