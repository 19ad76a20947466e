"""kvtool compare: the command, its table and its picture."""
