"""kvtool inspect: the command, and the views of what the rows hold."""
