"""The one loop: decode, read signals, plan, apply."""
