"""Requests to a slot of `kvtool serve` in the test's own process. A test can dictate the replies."""

from __future__ import annotations

import asyncio
from contextlib import closing, contextmanager

from kvtool import policies
from kvtool.chats.template import Template
from kvtool.chats.writer import Writer
from kvtool.engine.loop import Engine
from kvtool.engine.settings import Settings
from kvtool.llama.sampler import Sampler
from kvtool.serve import queue
from kvtool.serve.api import anthropic, requests, responses
from kvtool.serve.api.requests import Defaults
from kvtool.serve.batching import ComputeLock, StepBatcher
from kvtool.serve.queue import Job
from kvtool.serve.rendering import Renderings
from kvtool.serve.slot import Slot
from kvtool.serve.store.chats import ChatStore


def check_body(body, api="chat", defaults=None):
    """Check the body of a request. `api` is "chat", "messages" or "responses"."""
    defaults = defaults or Defaults()
    chat = {"chat": requests, "messages": anthropic, "responses": responses}[api].as_chat(body)
    return requests.check_chat(chat, defaults)


class DictatedSlot:
    """A slot of `kvtool serve` whose replies a test dictates. Dictated tokens need not fit the constraint.

    dictated: texts of the next replies. Markers in a text, like <|im_end|>, become special tokens. When no
    text is left, the model writes the reply.
    prompt: text of everything that the engine had read before the last dictated reply.
    prompt_tokens: tokens of this text.
    """

    def __init__(self, slot, defaults):
        self.slot, self.defaults = slot, defaults
        self.dictated, self.prompt, self.prompt_tokens, self._continues = [], "", [], False
        self._start, slot._start = slot._start, self._dictate

    def _dictate(self, *args, **kwargs):
        self._start(*args, **kwargs)
        if not self.dictated:
            return
        self.prompt = ""
        model, sampler = self.slot.model, self.slot.writer.sampler
        end = [] if self._continues else [next(iter(model.ends))]
        tokens = iter([*model.tokenize(self.dictated.pop(0), special=True).tolist(), *end])

        def sample(context):
            if not self.prompt:
                self.prompt, self.prompt_tokens = self.text, self.slot.writer.tokens.tolist()
            token = next(tokens, None)
            if token is None:
                return Sampler.sample(sampler, context)
            if sampler.constraint and self._continues:
                sampler.constraint.accept(token)
            sampler.recent.append(token)
            return token

        sampler.sample = sample

    def __call__(self, messages, reply=None, api="chat", *, continues=False, **more):
        """Ask, and return the last event.

        reply: the dictated reply, or None to let the model write it.
        continues: True to let the model write the rest of the reply.
        """
        self._continues = continues
        body = {"input" if api == "responses" else "messages": messages}
        body |= {"max_output_tokens" if api == "responses" else "max_tokens": 200}
        self.dictated = [] if reply is None else [reply]
        return asyncio.run(self._answered(check_body(body | more, api, self.defaults)))

    async def _answered(self, request):
        job = Job(request, "test")
        queue.answer(job, self.slot.answer)
        self.streamed = {}
        while (end := await job.next_event("read", "reading"))["kind"] == "piece":
            for delta in end["deltas"]:
                for name, text in delta.items():
                    if isinstance(text, str):
                        self.streamed[name] = self.streamed.get(name, "") + text
        if end["kind"] == "error":
            raise end["error"]
        return end

    @property
    def text(self):
        """Text of all tokens that the engine has read, with markers written out."""
        writer = self.slot.writer
        pieces = (self.slot.model.piece(token, special=True) for token in writer.tokens.tolist())
        return b"".join(pieces).decode(errors="replace")


def slot_of(engine, renderings, chats, batcher=None):
    """Return a slot of `kvtool serve`, without HTTP."""
    batcher = batcher or StepBatcher(ComputeLock(), 1)
    writer = Writer(engine, Sampler(engine.model))
    return Slot(writer, renderings, chats, "forget", lambda chat: {"fixed": {}}, batcher)


@contextmanager
def dictated_slot(model, source, folder, policy="full", budget=64, **defaults):
    """Open a slot for a model and a chat template (its source text). Yield the DictatedSlot."""
    recall = ["search=all"] if policy == "recall" else []
    fitted = policies.fit(policy, 4096 if policy == "full" else budget, None, recall)
    with closing(Engine(model, fitted, Settings(n_batch=32, n_threads=1))) as engine:
        renderings = Renderings(model, Template(source, "", "", model.markers))
        with closing(ChatStore(folder, 10**9, {})) as chats:
            yield DictatedSlot(slot_of(engine, renderings, chats), Defaults(**defaults))
