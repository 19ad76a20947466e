"""Chats: conversations in one cache, their chat templates, and their session files."""
