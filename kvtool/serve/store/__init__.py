"""Stored chats: their files on disk, and how requests continue them."""
