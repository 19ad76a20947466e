"""kvtool bench: the command, its table and its picture."""
