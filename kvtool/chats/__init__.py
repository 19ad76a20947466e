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

Two ways to go back
-------------------
Turns need no file: an `undo.Mark` holds the position between two turns, the sampler's state and the unread
tokens. Undo rewinds the engine to the mark before a turn. A server finds a chat by the digests in its marks.
It rewinds to the first token that differs from the request, also in the middle of a turn, because clients may
edit any message.

If the engine cannot be rewound exactly there, it is rewound to the newest checkpoint before, or emptied, and
reads the tokens of the stream again. Checkpoints are parts of FILE.archive. Policies that forget need copies
of the whole cache. Each is as large as the session, and the file is rewritten when less than half of it is in
use, so a session of a large cache keeps only three. The session always has its own state, so that FILE
continues without FILE.archive if nothing is archived.

Commands that replace a chat need an `undo.Copy`: an open session file without a name. Copies are a stack, and
are lost when the process ends: the system then removes the files, even after kill -9.
"""
