"""kvtool chat: the command, its terminal, and the files of a chat."""
