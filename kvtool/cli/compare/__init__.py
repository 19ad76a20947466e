"""kvtool compare: the command, the table and the picture."""
