"""Options of a run, and the way from them to an engine."""
