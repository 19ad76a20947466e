"""Text in, text out, through one cache: only what is new is decoded, whatever the policy forgot."""

from __future__ import annotations

import codecs
from collections.abc import Iterator

import numpy as np

from kvtool.engine import Engine
from kvtool.errors import ModelError
from kvtool.llama import Model, Sampler
from kvtool.template import GEMMA, Message, Template


class Writer:
    """Reads tokens and writes text. stop: set it, from a signal handler too, and both end at once.

    What was not read before a stop is read first the next time.
    """

    def __init__(self, engine: Engine, sampler: Sampler) -> None:
        self.engine = engine
        self.sampler = sampler
        self.stop = False
        self.n_written = 0
        self._unread = np.empty(0, np.int32)

    def reset(self) -> None:
        self.engine.reset()
        self._unread = np.empty(0, np.int32)

    @property
    def is_new(self) -> bool:
        """Whether nothing was read since the reset."""
        return self.engine.n_past == 0 and not len(self._unread)

    def read(self, tokens: np.ndarray) -> bool:
        """Decodes i32[n] tokens, as many steps as it takes; False when it was stopped before their end."""
        self._unread = np.concatenate([self._unread, tokens])
        n = self.engine.read(self._unread, lambda: self.stop)
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
        raise ModelError(f"{model.path.name} has no chat template; use kvtool generate --raw")
    return Template(source, model.marker(model.bos), model.marker(model.eos))


def pin_prefix(engine: Engine, text: str, n_pinned: int) -> np.ndarray:
    """The tokens of a rendered chat, its first n_pinned characters pinned. Raises as Engine.pin does."""
    model = engine.model
    bos = model.marker(model.bos)
    start = not (bos and text.startswith(bos))
    pinned = model.tokenize(text[:n_pinned], special=True, start=start) if n_pinned else np.empty(0, np.int32)
    engine.pin(len(pinned))
    return np.concatenate(
        [pinned, model.tokenize(text[n_pinned:], special=True, start=start and not n_pinned)]
    )


class Conversation:
    """Turns of one user and the model. A reply that is stopped stays in the chat as far as it went."""

    def __init__(self, writer: Writer, template: Template, system: str | None = None) -> None:
        self.writer = writer
        self.template = template
        self.reset(system)

    def reset(self, system: str | None = None) -> None:
        """Starts over with an empty cache under this system prompt, which is never evicted."""
        self.writer.reset()
        self.system = system.strip() if system else None
        self.messages: list[Message] = []
        if self.system:
            self.messages.append({"role": "system", "content": self.system})

    def reply(self, text: str, n_max: int | None = None) -> Iterator[str]:
        """The model's answer, piece by piece. Raises as Writer.write and Engine.pin do."""
        self.writer.stop = False
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

    def _tokens_of_turn(self, text: str) -> np.ndarray:
        engine = self.writer.engine
        if not self.writer.is_new:
            return engine.model.tokenize(self.template.turn(self.messages[:-1], text), special=True)
        whole = self.template.render([*self.messages, {"role": "user", "content": text}])
        at = whole.find(self.system) if self.system else -1
        return pin_prefix(engine, whole, at + len(self.system) if at >= 0 else 0)
