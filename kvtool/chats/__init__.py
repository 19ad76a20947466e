"""Chats: turns through one cache, kept in a file."""
