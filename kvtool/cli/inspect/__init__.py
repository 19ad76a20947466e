"""kvtool inspect: the command, and its views in a terminal, a page and a picture."""
