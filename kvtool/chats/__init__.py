"""Chats: conversations in one cache, their chat templates, and their session files.

Order of writing
----------------
`kvtool chat` and `kvtool serve` write the same files, with `Conversation.save_to`, in this order:

1. The new parts (archived tokens, their clusters, checkpoints) are appended to FILE.archive, and the file is
   synced. If another session shares FILE.archive, or if most of FILE.archive is not in use any more, all
   parts are written to a new file FILE.archive.next instead.
2. The session is written to a temporary file, synced, and renamed to FILE.
3. FILE.archive.next, if there is one, is renamed to FILE.archive.

If the process is killed before the rename in step 2, the old session stays. Its parts are unchanged, and the
next turn overwrites the bytes after them. If the process is killed between steps 2 and 3, FILE is the new
session, but its archive still has the name FILE.archive.next. A reader therefore tries both names and uses
the file whose id the session stores. Tests kill a process before each call that changes a file.

If the old session must be kept, it gets a second name (a hard link) before step 2.

Two ways to go back
-------------------
No file is needed to undo a turn: an `undo.TurnEnd` holds the position between two turns, the sampler's state
and the tokens that the engine has not read yet. Undo rewinds the engine to the end of the previous turn. On a
server, a `TurnEnd` also holds a digest of the messages before it, by which the server finds a stored chat.
The server rewinds to the first token that differs from the request. This token may be in the middle of a
turn, because clients may edit any message.

Some engines cannot be rewound to every token. Such an engine goes back to the newest checkpoint before the
token, or is emptied if there is no checkpoint. Then it reads the following tokens of the stream again.
Checkpoints are saved in FILE.archive. If the policy does not archive the tokens that it evicts, a checkpoint
is a copy of the whole cache. Such a copy is as large as FILE, and often has to be written again, because
FILE.archive is rewritten when less than half of it is in use. Therefore a session of a large cache keeps only
three checkpoints. The present state is always in FILE itself: if no tokens are archived, a chat can continue
from FILE without FILE.archive.

A command that replaces the chat can be undone only with an `undo.Copy`, which keeps a session file open. The
file is a temporary file without a name, or the session's own file, which loses its name at the next save.
Copies form a stack. They are lost when the process ends, because the system then removes files without a
name, even after kill -9.
"""
