"""kvtool eval: the command and the tables."""
