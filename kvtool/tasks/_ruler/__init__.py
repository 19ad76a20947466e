"""What RULER's thirteen tasks are made of: one kind a file, and the texts that they share."""
