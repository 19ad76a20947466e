"""kvtool chat: the command, its terminal, and the file that it keeps."""
