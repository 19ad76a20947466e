"""Stored chats: files on disk, and how a request continues one."""
