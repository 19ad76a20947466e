"""The engine: decode tokens into a cache, let a policy observe attention statistics, and apply its plans."""
