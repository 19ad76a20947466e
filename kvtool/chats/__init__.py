"""Chats: conversations in one cache, their chat templates, and their session files.

Order of writing
----------------
`kvtool chat` and `kvtool serve` write the same files, with `Conversation.save_to`, in this order:

1. The new segments are appended to FILE.archive, and synced. If another session shares that file, or if most
   of it is no longer in use, all segments are written to FILE.archive.next instead.
2. The session is written to a temporary file, synced, and renamed to FILE.
3. FILE.archive.next, if there is one, is renamed to FILE.archive.

Killed before the rename in 2, a process leaves the old session. Its segments are unchanged, and the next turn
overwrites the bytes after them. Killed between 2 and 3, it leaves the new session and an archive under its
temporary name, where a reader finds it by its id. Before 2, an old session that must stay gets a second name.
Tests kill a process before each of these calls.

Three ways to go back
---------------------
If the cache can be rewound, because it archives or keeps all tokens, an `undo.Mark` is enough, and no file is
needed. It is the position between two turns, with the sampler's state and the unread tokens. Undo goes back
to the mark before a turn. A server finds a chat by the digest in each mark, and rewinds to any token after
the last common mark, because clients edit any message.

All other policies lose the tokens that they evict. Each earlier state of the chat is then a separate file:

- `undo.Copy` is an open file without a name. Undo works without a session, in the order of a stack, and ends
  with the process. The system removes the file, even after kill -9.
- A server's `Snapshot` is a named file. Later servers find it by a digest of its messages, and delete the
  least recently used one of all chats.

Both are session files, and both may share their archive with the newest session.

States and marks are not records of one log. A state is as large as the cache, and a server deletes the least
recently used one of all chats: a log would be rewritten for each. Archived tokens never change, so only they
are appended to a file, which is rewritten when less than half of it would be in use.
"""
