"""kvtool inspect: the command, and its output in a terminal, as a web page and as a picture."""
