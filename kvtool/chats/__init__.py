"""Chats: conversations in one cache, their chat templates, and their session files.

Order of writing
----------------
`kvtool chat` and `kvtool serve` write the same files, with `Conversation.save_to`, in this order:

1. The new segments are appended to FILE.archive, and synced. If another session shares that file, or if most
   of it is no longer in use, all segments are written to FILE.archive.next instead.
2. The session is written to a temporary file, synced, and renamed to FILE.
3. FILE.archive.next, if there is one, is renamed to FILE.archive.

If the process is killed before the rename in step 2, the old session stays. Its segments are unchanged, and
the next turn overwrites the bytes after them. If it is killed between steps 2 and 3, the new session is in
place and its archive is still FILE.archive.next: a reader tries both names and compares ids. An old session
that must be kept gets a second name before step 2. Tests kill a process before each call that changes a file.

Three ways to go back
---------------------
If the cache can be rewound, because it archives or keeps all tokens, an `undo.Mark` is enough, and no file is
needed. A mark holds the position between two turns, the sampler's state and the unread tokens. Undo goes back
to the mark before a turn. A server finds a chat by the digests in its marks. It rewinds to the first token
that differs from the request, also in the middle of a turn, because clients may edit any message.

All other policies lose the tokens that they evict. Each earlier state of the chat is then a separate file:

- `undo.Copy` is an open file without a name. It needs no session. Copies are a stack, and are lost when the
  process ends: the system then removes the files, even after kill -9.
- A server's `Snapshot` is a named file. A server finds it by a digest of its messages, even after a restart.
  When the files take too many bytes, the least recently used snapshots of all chats are deleted.

Both are session files, and both may share their archive with the newest session.

States are not appended to one log: each is as large as the cache, and a server deletes them in any order, so
that the log would be rewritten for each. Archived tokens never change, so only they are appended to a file,
which is rewritten when less than half of it would be in use.
"""
