"""The engine: one loop (decode, observe, plan, apply) over a cache under a policy."""
