"""The engine: decode tokens into a cache, let a policy observe the signals, and apply its plans."""
