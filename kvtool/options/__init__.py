"""Every option, declared once: as a field of a dataclass that commands, files, requests and sessions read."""
