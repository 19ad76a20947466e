"""A reply from its prompt on: its steps, and what the message and the cache keep of it.

Steps
-----
1. `Conversation.read_prompt` makes a `Reply`, and reads the prompt up to the end of `Header.kept`.
2. `Conversation.write` reads the lead and the given beginning of the reply. Then the model writes the rest.
3. The reply becomes a message: see `message_of`.
4. `Conversation.finish_reply` brings the reply in the cache to the form that later turns need.

In a chat, `read_turn` takes step 1, and `answer` takes the others. On a server, a slot takes them one by one.

Message
-------
- If the template reads the thought from a field, the content is the answer, and the field has the thought.
- If there is no such field, but a tag `Tags.plain`, the content is the answer. The thought is left out.
- With any other template, the content is the whole text, with the tags around its thought.

Cache
-----
In one of these cases the reply stays as the model wrote it:

- It has a thought, the template shows the thoughts of earlier replies, and no tag follows the answer.
- The template drops no thoughts, and its reply header has no lead (see `Header`).
- The engine cannot be rewound, or the prompt did not end with the reply header.

Otherwise the lead of an earlier reply and the answer stay. They are read again if the model wrote other text.
On a server, `Rendering.earlier_reply` finds the lead.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvtool.chats.template import Message, Template
from kvtool.chats.thinking import Splitter, apart
from kvtool.chats.undo import TurnEnd


@dataclass(slots=True)
class Reply:
    """The reply to the prompt that was read last.

    Attributes
    ----------
    lead
        Tokens i32[n] after `Header.kept`, which `Conversation.write` reads.
    has_header
        True if the prompt ends with the reply header. A prompt with a tool's result may end differently.
    begun
        Given beginning of the reply; "" if there is none.
    is_resumed
        True if the cache already has the lead and `begun`, as an earlier `Conversation.write` left them.
    pieces
        Text that the model has written after `begun`.
    before
        Position before the lead, to which `Conversation.finish_reply` rewinds. None if the reply must stay as
        the model wrote it.
    version
        `Conversation.version` at the end of `Conversation.write`. As long as it does not change, the cache
        has the reply as the model wrote it.
    """

    lead: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    has_header: bool = True
    begun: str = ""
    is_resumed: bool = False
    pieces: list[str] = field(default_factory=list)
    before: TurnEnd | None = None
    version: int = -1

    @property
    def text(self) -> str:
        return self.begun + "".join(self.pieces)

    def resumed(self, begun: str) -> Reply:
        """Return the continuation of this reply, whose text is in the cache. begun: its text so far."""
        return Reply(has_header=self.has_header, begun=begun, is_resumed=True, before=self.before)


def message_of(text: str, template: Template, splitter: Splitter, opening: str) -> Message:
    """Return a reply as a message: see the start of this module. It does not always hold the whole text.

    opening: text with which the reply header opens a thought. "" if it opens none.
    """
    if not (template.takes_thoughts or template.tags.plain):
        # a later change of the effort changes the reply header: the message itself needs both tags
        return {"role": "assistant", "content": opening + text if text else ""}
    thought, answer = apart(text, splitter)
    if template.opening and text.startswith(template.opening):
        # a given beginning has the text with which the header would open the thought
        thought = thought.removeprefix(template.opening.removeprefix(template.tags.start))
    more = {"reasoning_content": thought} if thought and template.takes_thoughts else {}
    return {"role": "assistant", "content": answer, **more}
