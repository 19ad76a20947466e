"""Text in, text out, through one cache: only what is new is decoded, whatever the policy forgot."""

from __future__ import annotations

import codecs
import tempfile
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from itertools import chain
from typing import Any, BinaryIO

import numpy as np

from kvtool.chats import session
from kvtool.chats.template import GEMMA, RAW, Message, Template
from kvtool.engine.loop import Engine
from kvtool.errors import ModelError
from kvtool.llama.model import Model
from kvtool.llama.sampler import Sampler


class Writer:
    """Reads tokens and writes text. stop: set it, from a signal handler too, and both end at once.

    What was not read before a stop is read first the next time. before_reading: called with the number of
    tokens of each text before it is read.
    """

    def __init__(self, engine: Engine, sampler: Sampler) -> None:
        self.engine = engine
        self.sampler = sampler
        self.stop = False
        self.n_written = 0
        self.before_reading: Callable[[int], None] = lambda n: None
        self._unread = np.empty(0, np.int32)
        self._decoded = array("i")

    def reset(self) -> None:
        self.engine.reset()
        self._unread = np.empty(0, np.int32)
        self._decoded = array("i")

    @property
    def tokens(self) -> np.ndarray:
        """i32[n_past]: the tokens decoded since the reset."""
        return np.array(self._decoded, np.int32)

    def save(self) -> dict[str, Any]:
        """What a later writer needs besides the engine, as JSON has it."""
        return {
            "seed": self.sampler.seed,
            "recent": list(self.sampler.recent),
            "unread": self._unread.tolist(),
        }

    def restore(self, saved: Mapping[str, Any], tokens: np.ndarray) -> None:
        """Goes on after tokens i32[n_past], from what `save` gave."""
        self.sampler.seed = saved["seed"]
        self.sampler.recent.clear()
        self.sampler.recent.extend(saved["recent"])
        self._unread = np.array(saved["unread"], np.int32)
        self._decoded = array("i", tokens.tobytes())

    @property
    def is_new(self) -> bool:
        """Whether nothing was read since the reset."""
        return self.engine.n_past == 0 and not len(self._unread)

    def read(self, tokens: np.ndarray) -> bool:
        """Decodes i32[n] tokens, as many steps as it takes; False when it was stopped before their end."""
        self._unread = np.concatenate([self._unread, tokens])
        if len(tokens):
            self.before_reading(len(self._unread))
        before = self.engine.n_past
        try:
            self.engine.read(self._unread, lambda: self.stop)
        finally:
            # an error in between loses nothing of what was decoded before it
            n = self.engine.n_past - before
            self._decoded.frombytes(self._unread[:n].tobytes())
            self._unread = self._unread[n:]
        return not len(self._unread)

    def write(self, n_max: int | None = None) -> Iterator[str]:
        """Samples after what was read until the model ends its turn, n_max tokens, or a stop.

        No piece ends in half a character. Raises StreamEnd where cache or positions have no more room.
        """
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        model = self.engine.model
        self.n_written = 0
        while not self.stop and self.n_written != n_max:
            token = self.sampler.sample(self.engine.context)
            if model.ends_turn(token):
                break
            self.n_written += 1
            # not lost when the one who asked stops asking here
            self._unread = np.array([token], np.int32)
            if piece := decoder.decode(model.piece(token)):
                yield piece
            self.read(self._unread[:0])
        if rest := decoder.decode(b"", final=True):
            yield rest


def template_of(model: Model) -> Template:
    """The model's chat template, or Gemma's by its markers. Raises ModelError for none or a broken one."""
    source = model.chat_template()
    if source is None and len(model.tokenize("<start_of_turn><end_of_turn>", special=True)) == 2:
        source = GEMMA
    if source is None:
        raise ModelError(f"{model.path.name} has no chat template; {RAW}")
    return Template(source, model.marker(model.bos), model.marker(model.eos))


def wants_bos(model: Model, text: str) -> bool:
    """Whether a rendered chat lacks a BOS marker of its own."""
    bos = model.marker(model.bos)
    return not (bos and text.startswith(bos))


def pin_prefix(engine: Engine, text: str, n_pinned: int) -> np.ndarray:
    """The tokens of a rendered chat, its first n_pinned characters pinned. Raises as Engine.pin does."""
    model = engine.model
    start = wants_bos(model, text)
    pinned = model.tokenize(text[:n_pinned], special=True, start=start) if n_pinned else np.empty(0, np.int32)
    engine.pin(len(pinned))
    return np.concatenate(
        [pinned, model.tokenize(text[n_pinned:], special=True, start=start and not n_pinned)]
    )


def transcript(messages: list[Message]) -> str:
    """A chat as plain text: what the person said after "> ", then the reply, an empty line after each."""
    start = {"user": "> ", "system": "# "}
    return "".join(f"{start.get(m['role'], '')}{m['content']}\n\n" for m in messages)


class Conversation:
    """Turns of one user and the model. A reply that is stopped stays in the chat as far as it went.

    undoable: the last turn can be taken back, from a copy of the cache on disk. kept: opens one that is there
    already, or gives None. n_reply: replies begun, those taken back included, so that another try is another
    draw.
    """

    def __init__(
        self, writer: Writer, template: Template, system: str | None = None, *, undoable: bool = False
    ) -> None:
        self.writer = writer
        self.template = template
        self.undoable = undoable
        self.kept: Callable[[], BinaryIO | None] = lambda: None
        self.n_reply = 0
        self._n_held = len(writer.engine.model.tokenize(template.reply_start(), special=True))
        self._before: BinaryIO | None = None
        self.reset(system)

    @property
    def n_turn(self) -> int:
        """How often the person has said something."""
        return sum(message["role"] == "user" for message in self.messages)

    def reset(self, system: str | None = None) -> None:
        """Starts over with an empty cache under this system prompt, which is never evicted."""
        self.writer.reset()
        self.close()
        self.system = system.strip() if system else None
        self.messages: list[Message] = []
        if self.system:
            self.messages.append({"role": "system", "content": self.system})

    def pin_system(self) -> None:
        """Pins the system prompt of a new chat as its first turn will. Raises as Engine.pin does."""
        self._tokens_of_turn("")

    def reply(self, text: str, n_max: int | None = None) -> Iterator[str]:
        """The model's answer, piece by piece. Raises as Writer.write and Engine.pin do."""
        self.writer.stop = False
        if self.undoable:
            self._remember()
        self.writer.sampler.start(self.n_reply)
        self.n_reply += 1
        tokens = self._tokens_of_turn(text)
        self.messages.append({"role": "user", "content": text})
        said: list[str] = []
        try:
            if self.writer.read(tokens):
                for piece in self.writer.write(n_max):
                    said.append(piece)
                    yield piece
        finally:
            self.messages.append({"role": "assistant", "content": "".join(said)})

    def save(self) -> tuple[session.Meta, Iterator[tuple[str, np.ndarray]]]:
        """All of the chat: what JSON can hold, and arrays, one at a time."""
        arrays = chain([("tokens", self.writer.tokens)], self.writer.engine.save())
        return {
            "system": self.system,
            "messages": self.messages,
            "n_reply": self.n_reply,
            "writer": self.writer.save(),
        }, arrays

    def restore(self, meta: session.Meta, arrays: session.Arrays) -> None:
        """Goes on from what `save` gave. Raises SessionError, with the chat as it was, if it does not fit."""
        self.writer.engine.restore(arrays)
        self.writer.restore(meta["writer"], arrays["tokens"])
        self.system, self.messages, self.n_reply = meta["system"], meta["messages"], meta["n_reply"]
        self.close()

    def undo(self) -> bool:
        """Takes the last turn back; False where there is none, or it cannot be."""
        if self._before is None:
            return False
        n_reply = self.n_reply
        self.restore(*session.load(self._before, "what was before the last turn"))
        self.n_reply = n_reply
        return True

    def close(self) -> None:
        """Gives the copy of what was before the last turn back."""
        if self._before:
            self._before.close()
            self._before = None

    def _remember(self) -> None:
        self.close()
        # a chat goes on where there is no room for a copy
        with suppress(OSError), ExitStack() as stack:
            self._before = self.kept()
            if self._before:
                return
            copy = stack.enter_context(tempfile.TemporaryFile())
            session.dump(copy, *self.save())
            copy.flush()
            stack.pop_all()
            self._before = copy

    def _tokens_of_turn(self, text: str) -> np.ndarray:
        engine = self.writer.engine
        if not self.writer.is_new:
            return engine.model.tokenize(self.template.turn(self.messages[:-1], text), special=True)
        whole = self.template.render([*self.messages, {"role": "user", "content": text}])
        system = self.system or ""
        at = whole.find(system)
        tokens = pin_prefix(engine, whole, at + len(system) if at >= 0 else 0)
        engine.hold(self._n_held)
        return tokens
