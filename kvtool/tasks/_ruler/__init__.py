"""Parts of RULER's thirteen tasks: one kind a file, and the texts that they share."""
