"""Answers to chats and texts: what is stored is gone on with, and only what is new is read."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from kvtool.chats import session
from kvtool.chats.conversation import Conversation
from kvtool.chats.logprobs import logprobs
from kvtool.chats.segments import Listing
from kvtool.chats.template import RAW, Template
from kvtool.chats.writer import Writer
from kvtool.errors import InputError, KvtoolError, ModelError, SessionError, StreamEnd, UsageError
from kvtool.llama.sampler import Sampler
from kvtool.measure import holdings
from kvtool.measure.holdings import n_forgotten
from kvtool.serve.calls import Parser
from kvtool.serve.errors import ApiError
from kvtool.serve.formats import shown_tokens
from kvtool.serve.grammars import Grammars
from kvtool.serve.jobs import Job
from kvtool.serve.messages import History, Message
from kvtool.serve.rendering import Rendering
from kvtool.serve.reply import Reply
from kvtool.serve.requests import ChatRequest, Request, TextRequest, of_usage
from kvtool.serve.store import Chats, Snapshot

_LEAST_START = 256
"""Tokens of a system prompt that are worth a snapshot of their own."""


class Talk:
    """Answers requests, one after another, in the engine's thread.

    Parameters
    ----------
    writer
        Has the engine.
    template
        The model's, or None: then no chat is answered.
    chats
        What is stored.
    overflow
        "forget", as the policy does, or "error": a chat longer than the context is refused.

    Attributes
    ----------
    unsaved
        Why the last turn could not be stored, or None.
    """

    def __init__(self, writer: Writer, template: Template | None, chats: Chats, overflow: str) -> None:
        self.writer = writer
        self.engine = writer.engine
        self.model = writer.engine.model
        self.chats = chats
        self.overflow = overflow
        self._conversation = Conversation(writer, template) if template else None
        self._rendering = Rendering(self.model, template) if template else None
        self._grammars = Grammars(self.model.path)
        # the snapshot that the engine is at
        self._at: Snapshot | None = None
        self._listed: list[dict[str, Any]] = []
        self.unsaved: str | None = None

    def answer(self, job: Job) -> None:
        """Answers a request by the job's events. Raises ApiError."""
        at, self._at = self._at, None
        try:
            if isinstance(job.request, ChatRequest):
                self._at = self._chat(job, job.request, at)
            else:
                self._text(job, job.request)
        except UsageError as error:
            raise of_usage(error) from None
        except StreamEnd as error:
            raise self._too_long(self.engine.n_past, str(error)) from None
        except InputError as error:
            raise ApiError(str(error)) from None
        except ModelError as error:
            # messages that the template does not take
            raise ApiError(str(error).removesuffix(f"; {RAW}"), code="chat_template") from None
        except RecursionError:
            raise ApiError("the request is nested too deeply") from None
        except KvtoolError as error:
            raise ApiError(str(error), status=500, kind="server_error") from None

    @property
    def template(self) -> Template | None:
        """The model's, if it has one."""
        return self._conversation.template if self._conversation else None

    # chats

    def _chat(self, job: Job, request: ChatRequest, at: Snapshot | None) -> Snapshot | None:
        """Answers a chat. Returns the snapshot that the engine is at then."""
        if not self._conversation or not self._rendering:
            raise ApiError("the model has no chat template; use /v1/completions", code="no_chat_template")
        talk = self._conversation
        tools = request.tools if request.choice.kind != "none" else []
        history = History(request.name, tools, request.messages)
        form = self._rendering.format
        self._draw(job, request, self._rendering.forced(request))
        self.writer.shown = talk.shown | (shown_tokens(self.model, form) if tools else frozenset())
        clock = _Clock()
        before, tokens = self._begin(request.messages, tools, history, at)
        n_cached = self.engine.n_past
        self._check_length(n_cached + len(tokens))
        if not before:
            tokens = self._read_start(tokens, request.messages, history)
        if self.writer.stop or not talk.take(tokens):
            return None
        counts = {"n_prompt": self.engine.n_past, "n_cached": n_cached, "read_s": clock.lap()}
        talk.messages = [*map(dict, request.messages)]
        talk.n_reply = sum(message["role"] == "assistant" for message in request.messages)
        reply = Reply(talk.splitter(), Parser(form, tools) if tools else None)
        self._write(job, request, talk.answer(request.n_max), reply, counts)
        talk.messages[-1] = {
            name: value for name, value in reply.message.items() if name != "reasoning_content"
        }
        history.add(talk.messages[-1])
        snapshot = self._keep(before, history.now)
        self._end(job, request, reply, counts)
        return snapshot

    def _begin(
        self, messages: list[Message], tools: list[Any], history: History, at: Snapshot | None
    ) -> tuple[Snapshot | None, np.ndarray]:
        """Brings the engine to the longest stored beginning, and returns that and the tokens that follow."""
        digests = history.digests[:-1]
        while found := self.chats.find(digests):
            i, snapshot = found
            try:
                if snapshot is not at:
                    self._go_to(snapshot)
                at = None
                return snapshot, self._following(messages, i, tools)
            except (SessionError, ModelError):
                # damaged, or the template cannot say what follows
                at, digests = None, digests[:i]
        return None, self._start(messages, tools)

    def _go_to(self, snapshot: Snapshot) -> None:
        """Raises SessionError for a damaged snapshot."""
        assert self._conversation
        assert self._rendering
        seed = self.writer.sampler.seed
        self._conversation.restore(*self.chats.load(snapshot))
        # a request has a seed of its own
        self.writer.sampler.seed = seed

    def _following(self, messages: list[Message], i: int, tools: list[Any]) -> np.ndarray:
        """The tokens behind the first i messages, which the cache has. Raises ModelError."""
        assert self._conversation
        assert self._rendering
        if messages[i - 1]["role"] != "assistant":
            # the beginning of a system prompt
            whole, _ = self._rendering.whole(messages, tools)
            n = self.engine.n_past
            if not np.array_equal(whole[:n], self.writer.tokens):
                raise ModelError("the template has changed the system prompt")
            return whole[n:]
        return self._rendering.following(messages, i, tools)

    def _start(self, messages: list[Message], tools: list[Any]) -> np.ndarray:
        """Empties the cache, and returns the tokens of the chat; pins the system prompt and the tools."""
        assert self._conversation
        assert self._rendering
        self.writer.reset()
        tokens, n_pinned = self._rendering.whole(messages, tools)
        self.engine.pin(n_pinned)
        self.engine.hold(self._conversation.n_held)
        return tokens

    def _read_start(self, tokens: np.ndarray, messages: list[Message], history: History) -> np.ndarray:
        """Reads whole batches of the pinned tokens and stores them; returns what is left to be read.

        The batches are those in which the whole chat would be read: what follows does not depend on it.
        """
        n_batch = self.engine.n_batch
        n = self.engine.n_pinned // n_batch * n_batch
        is_system = messages[0]["role"] == "system"
        if n < _LEAST_START or not is_system or self.engine.reads_whole(len(tokens)):
            return tokens
        if self.writer.read(tokens[:n]):
            assert self._conversation
            # not those of the chat before
            self._conversation.messages = [dict(messages[0])]
            self._keep(None, history.digests[1])
            return tokens[n:]
        return tokens[:0]

    def _keep(self, before: Snapshot | None, digest: bytes) -> Snapshot | None:
        """Stores the chat; None where there is no room for it."""
        talk = self._conversation
        assert talk

        def saved(listed: Listing) -> tuple[session.Meta, Iterator[tuple[str, np.ndarray]]]:
            meta, arrays = talk.save(listed)
            return meta | {"n_turn": talk.n_turn, "n_past": self.engine.n_past}, arrays

        self.unsaved = None
        try:
            return self.chats.put(before, digest, talk.archive, saved)
        except SessionError as error:
            self.unsaved = str(error)
            return None

    # texts

    def _text(self, job: Job, request: TextRequest) -> None:
        self._draw(job, request)
        clock = _Clock()
        self.writer.reset()
        self.engine.pin(0)
        tokens = self._tokens(request.prompt)
        self._check_length(len(tokens))
        if not self.writer.read(tokens):
            return
        counts = {"n_prompt": len(tokens), "n_cached": 0, "read_s": clock.lap()}
        self.writer.sampler.start(0)
        self.writer.shown = frozenset()
        reply = Reply()
        self._write(job, request, self.writer.write(request.n_max), reply, counts)
        self._end(job, request, reply, counts)

    def _tokens(self, prompt: str | list[int]) -> np.ndarray:
        if isinstance(prompt, str):
            return self.model.tokenize(prompt, start=True)
        if not prompt or min(prompt) < 0 or max(prompt) >= self.model.n_vocab:
            raise ApiError(f"prompt must have tokens in 0..{self.model.n_vocab - 1}", param="prompt")
        return np.array(prompt, np.int32)

    # both

    def _write(
        self, job: Job, request: Request, pieces: Iterator[str], reply: Reply, counts: dict[str, Any]
    ) -> None:
        """Writes the reply, and tells the client of each piece."""
        clock = _Clock()
        job.emit("read", **counts)
        for piece in pieces:
            job.emit("piece", deltas=reply.feed(piece), listed=self._take_listed())
        counts |= {"n_written": self.writer.n_written, "write_s": clock.lap()}
        job.emit("piece", deltas=reply.end(), listed=self._take_listed())

    def _draw(self, job: Job, request: Request, forced: str | None = None) -> None:
        """Takes the request's sampler, and stops where nobody waits any more. Raises ApiError.

        forced: a grammar beside the request's own.
        """
        settings = replace(request.sampling, grammar=forced) if forced else request.sampling
        try:
            if request.schema is not None:
                settings = replace(settings, grammar=self._grammars.of_schema(request.schema))
            sampler = Sampler(self.model, settings, seed=request.seed, grammar=self._grammars.begin)
        except UsageError as error:
            param = "response_format" if request.schema is not None else None
            raise ApiError(str(of_usage(error)), param=param) from None
        self.writer.sampler.close()
        self.writer.sampler = sampler
        self.writer.stop = job.is_cancelled
        n, self._listed = request.logprobs, []

        def after_sampling(token: int) -> None:
            self.writer.stop = job.is_cancelled
            if n is not None:
                self._listed.append(logprobs(self.model, self.engine.context.logits()[-1], token, n))

        def while_reading(n_read: int, n_all: int) -> None:
            self.writer.stop = job.is_cancelled
            if n_all > 1:
                job.emit("reading", n_read=n_read, n_all=n_all)

        self.writer.after_sampling = after_sampling
        self.writer.while_reading = while_reading

    def _take_listed(self) -> list[dict[str, Any]]:
        """The log-probabilities that came since the last call."""
        found, self._listed = self._listed, []
        return found

    def _check_length(self, n: int) -> None:
        if self.overflow == "error" and n >= self.engine.n_ctx:
            raise self._too_long(n)

    def _too_long(self, n: int, why: str | None = None) -> ApiError:
        return ApiError(
            why or f"the request has {n} tokens, and the context is {self.engine.n_ctx}",
            kind="exceed_context_size_error",
            code="context_length_exceeded",
            more={"n_prompt_tokens": n, "n_ctx": self.engine.n_ctx},
        )

    def _end(self, job: Job, request: Request, reply: Reply, counts: dict[str, Any]) -> None:
        """Tells a client that its answer is over, and what is left of the stream."""
        engine, n_share = self.engine, request.n_share
        held: dict[str, Any] = {
            "tokens": engine.n_past,
            "held": round(engine.mean_kv, 1),
            "archived": engine.n_archived,
            "forgotten": n_forgotten(engine),
            "cache_bytes": engine.cache_bytes,
            "archive_bytes": engine.archive_bytes,
            "budget": engine.policy.budget,
        }
        if self.unsaved:
            held["unsaved"] = self.unsaved
        if n_share:
            tokens = self.writer.tokens[-n_share:]
            first = engine.n_past - len(tokens)
            held["share"] = {
                "text": holdings.texts(self.model, tokens),
                "held": engine.cells().share()[first:].round(3).tolist(),
                "archived": holdings.is_archived(engine)[first:].tolist(),
            }
        finish = reply.finish(self.writer.is_cut)
        job.emit("end", message=reply.message, finish=finish, held=held, **counts)


class _Clock:
    """Tells how many seconds each part of an answer took."""

    def __init__(self) -> None:
        self._at = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last call."""
        before, self._at = self._at, time.perf_counter()
        return self._at - before
