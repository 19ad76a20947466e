"""Answers to chats and texts: continues from the stored prefix, and decodes only new tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from math import inf
from typing import Any, Literal

import numpy as np

from kvtool.chats import session
from kvtool.chats.conversation import Conversation
from kvtool.chats.logprobs import Offsets, logprobs, unknown
from kvtool.chats.prompt import wants_bos
from kvtool.chats.template import RAW, Template
from kvtool.chats.thinking import Splitter, without_thought
from kvtool.chats.writer import Writer
from kvtool.engine.loop import Engine
from kvtool.errors import InputError, KvtoolError, ModelError, StreamEnd, UsageError
from kvtool.llama.model import Model
from kvtool.llama.rules import Rules
from kvtool.llama.sampler import Sampler
from kvtool.measure import holdings
from kvtool.measure.holdings import n_forgotten
from kvtool.serve.api.errors import ApiError
from kvtool.serve.api.requests import ChatRequest, Request, TextRequest, of_usage
from kvtool.serve.api.thinking import Wish
from kvtool.serve.batching import Crew
from kvtool.serve.queue import Job
from kvtool.serve.rendering import Rendering, Renderings
from kvtool.serve.reply import Reply
from kvtool.serve.store.chats import ChatStore
from kvtool.serve.store.resumer import Resumer
from kvtool.serve.tools.calls import Parser
from kvtool.serve.tools.formats import shown_tokens

N_OUTPUT = 16
"""The most tokens of a step where a request asks for its prompt's log-probabilities."""


class Talk:
    """Answers requests, one after another.

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
    meta
        What a session says of a chat, besides what `Conversation.save` has.
    pins
        Whether a chat's system prompt and tools are pinned, also where an archive keeps them.
    crew
        Those that write answers beside it, and who takes turns with them; None where there is nobody else.
    """

    def __init__(
        self,
        writer: Writer,
        template: Template | None,
        chats: ChatStore,
        overflow: str,
        meta: Callable[[Conversation], session.Meta],
        pins: bool = True,
        crew: Crew | None = None,
    ) -> None:
        self.writer = writer
        self.engine = writer.engine
        self.model = writer.engine.model
        self.chats = chats
        self.overflow = overflow
        self.template = template
        self._crew = crew
        # tokens of the request that is answered
        self._n_asked = 0
        self._resumer: Resumer | None = None
        if template:
            self._renderings = Renderings(self.model, template)
            own = Conversation(writer, template), self._renderings.of(Wish())[0]
            self._resumer = Resumer(*own, chats, meta, pins or not self.engine.policy.recall)
        self._listed: list[dict[str, Any]] = []
        self._offsets = Offsets()
        # what the answer says of fields that were not taken exactly
        self._remarks: list[str] = []

    def answer(self, job: Job) -> None:
        """Answers a request by the job's events. Raises ApiError."""
        with self._told():
            if isinstance(job.request, ChatRequest):
                self._chat(job, job.request)
            else:
                self._text(job, job.request)

    def n_shared(self, request: Request) -> int:
        """The tokens of a request that its stream begins with, as far as it can go on from there."""
        if not (self._resumer and isinstance(request, ChatRequest)):
            return 0
        try:
            self._resumer.use(self._rendering(request)[0])
            return self._resumer.n_shared(request.messages, _offered(request), request.name)
        except (ApiError, KvtoolError, RecursionError):
            # its answer will say so
            return 0

    def count(self, request: ChatRequest) -> int:
        """The tokens of a chat's prompt. For any thread: the engine is not asked. Raises ApiError."""
        with self._told():
            self._chats_resumer()
            rendering, _ = self._rendering(request)
            tokens, _ = rendering.whole(request.messages, _offered(request))
            return len(tokens) - rendering.header.n_left_out

    def _rendering(self, request: ChatRequest) -> tuple[Rendering, list[str]]:
        """The rendering of a request, and remarks on parts of it that the template does not take."""
        rendering, remarks = self._renderings.of(request.wish)
        return rendering.with_begun(request.begun) if request.begun else rendering, remarks

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Turns what is raised inside into ApiError."""
        try:
            yield
        except UsageError as error:
            raise of_usage(error) from None
        except StreamEnd as error:
            raise _too_long(self.engine, self._n_asked, str(error)) from None
        except InputError as error:
            raise ApiError(str(error)) from None
        except ModelError as error:
            # messages that the template does not take
            raise ApiError(str(error).removesuffix(f"; {RAW}"), code="chat_template") from None
        except RecursionError:
            raise ApiError("the request is nested too deeply") from None
        except KvtoolError as error:
            raise ApiError(str(error), status=500, kind="server_error") from None

    def _chat(self, job: Job, request: ChatRequest) -> None:
        """Answers a chat."""
        resumer = self._chats_resumer()
        talk, tools = resumer.conversation, _offered(request)
        rendering, remarks = self._rendering(request)
        rules, unenforced = rendering.rules(request)
        self._remarks = [*map(request.names.of_text, [*remarks, *unenforced])]
        resumer.use(rendering)
        talk.thought_budget = request.wish.budget
        history = rendering.history(request.name, request.messages, tools)
        callable_tools = [] if request.choice.kind == "none" else request.tools
        marks = shown_tokens(self.model, rendering.format) if callable_tools else frozenset()
        self._draw(job, request, talk.shown | marks, rules)
        if request.begun:
            # it must fit a grammar
            talk.start_sampling()
        started = time.perf_counter()
        tokens = resumer.begin(request.messages, tools, history)
        talk.hold_header()
        self._check_length(resumer.n_cached + len(tokens))
        n_prompt = resumer.n_cached + len(self.writer.unread) + len(tokens) - talk.header.n_left_out
        job.counts = {"n_prompt": n_prompt, "n_cached": resumer.n_cached}
        tokens = resumer.read_start(tokens, request.messages, history)
        if not self.writer.stop:
            keeps_thought = bool(tools) and request.sends_thoughts and rendering.template.has_thoughts
            tokens = resumer.read_prompt(tokens, request.messages, history, keeps_thought=keeps_thought)
        if self.writer.stop or not talk.read_prompt(tokens):
            return
        counts = {
            "n_prompt": n_prompt,
            "n_cached": max(resumer.n_cached - self.writer.n_reread, 0),
            "read_s": time.perf_counter() - started,
        }
        talk.set_messages(request.messages)
        parser = _parser(rendering, request, callable_tools)
        begun = request.begun
        splitter = Splitter.behind(talk.template.tags, begun) if begun else talk.splitter()
        reply = Reply(splitter, parser)
        pieces = talk.write(self._room(request), may_change=rendering.template.has_thoughts)
        finish = self._write(job, request, pieces, reply, counts)
        # its calls are apart from its text
        said = dict(reply.message)
        said["content"] = without_thought(begun, talk.splitter()) + said["content"]
        if not request.sends_thoughts:
            said.pop("reasoning_content", None)
        if parser and parser.has_left_out:
            # the engine has more than the client
            resumer.leave()
        else:
            resumer.keep(history, request.messages, said, tools)
        self._end(job, request, reply, finish, counts)

    def _chats_resumer(self) -> Resumer:
        if not self._resumer:
            raise ApiError("the model has no chat template; use /v1/completions", code="no_chat_template")
        return self._resumer

    def _text(self, job: Job, request: TextRequest) -> None:
        """Continues a text."""
        rules, self._remarks = request.shape.rules() if request.shape else (None, [])
        self._draw(job, request, rules=rules)
        started = time.perf_counter()
        if self._resumer:
            self._resumer.leave()
        self.writer.reset()
        tokens = _tokens(self.model, request.prompt)
        self._check_length(len(tokens))
        job.counts = {"n_prompt": len(tokens), "n_cached": 0}
        is_scored = request.echo and request.logprobs is not None
        prompt = request.prompt
        text = prompt if isinstance(prompt, str) else text_of(self.model, prompt)
        if not self.writer.read(tokens, self._scoring(tokens, text, request) if is_scored else None):
            return
        counts = {"n_prompt": len(tokens), "n_cached": 0, "read_s": time.perf_counter() - started}
        self.writer.sampler.start(0)
        reply = Reply()
        if request.echo:
            job.emit("piece", deltas=reply.repeat(text), listed=self._take_listed())
        finish = self._write(job, request, self._continued(request, is_scored), reply, counts)
        self._end(job, request, reply, finish, counts)

    def _scoring(self, tokens: np.ndarray, text: str, request: TextRequest) -> Callable[[slice], None]:
        """Lists the log-probabilities of a prompt's tokens i32[n] after each step that reads some of them."""
        model = self.model
        # a BOS token, or a blank before the first word, need not be in the text
        self._offsets = Offsets(len(text) - len(text_of(model, tokens.tolist())))
        for token in tokens[:1].tolist():
            self._list(unknown(model, token), special=True)

        def after_step(part: slice) -> None:
            following = tokens[part.start + 1 : part.stop + 1].tolist()
            for logits, token in zip(self.engine.context.logits(), following, strict=False):
                self._list(logprobs(model, logits, token, request.logprobs or 0), special=True)

        return after_step

    def _continued(self, request: TextRequest, is_scored: bool) -> Iterator[str]:
        yield from self.writer.write(self._room(request))
        if is_scored and (token := self.writer.ending) is not None:
            # who scores a prompt takes the last of the list for the answer's
            self._list(logprobs(self.model, self.engine.context.next_logits, token, request.logprobs or 0))

    def _list(self, record: dict[str, Any], *, special: bool = False) -> None:
        """Lists a token's log-probability. special: whether the text has a control token written out."""
        piece = self.model.piece(record["id"], special=special)
        self._listed.append(record | {"text_offset": self._offsets.next(piece)})

    def _write(
        self, job: Job, request: Request, pieces: Iterator[str], reply: Reply, counts: dict[str, Any]
    ) -> str:
        """Writes the reply, and tells the client of each piece. Returns why it ended, in OpenAI's words."""
        started, is_full = time.perf_counter(), False
        before = self.writer.n_drafted, self.writer.n_accepted
        job.emit("read", **counts)
        try:
            with self._crew.writing(self.engine) if self._crew else nullcontext():
                for piece in pieces:
                    job.emit("piece", deltas=reply.feed(piece), listed=self._take_listed())
        except StreamEnd:
            # the cache is full: what is written so far is the answer
            if not self.writer.n_written:
                raise
            is_full = True
        counts |= {
            "n_written": self.writer.n_written,
            "write_s": time.perf_counter() - started,
            "n_drafted": self.writer.n_drafted - before[0],
            "n_accepted": self.writer.n_accepted - before[1],
        }
        job.emit("piece", deltas=reply.end(), listed=self._take_listed())
        return reply.finish(is_full or self.writer.is_cut)

    def _draw(
        self, job: Job, request: Request, shown: frozenset[int] = frozenset(), rules: Rules | None = None
    ) -> None:
        """Takes the request's sampler, and stops where nobody waits any more. Raises ApiError.

        shown: as in `Writer`. rules: what the answer must fit, if not what the server was started with.
        """
        settings = request.sampling
        if rules and request.ignores_end:
            raise ApiError("an answer that must fit something ends; leave out ignore_eos", param="ignore_eos")
        if banned := _banned(self.model, request):
            bans = ((token, -inf) for token in banned)
            settings = replace(settings, logit_bias=(*settings.logit_bias, *bans))
        try:
            sampler = Sampler(self.model, settings, seed=request.seed, rules=rules)
        except UsageError as error:
            where = request.shape.where if request.shape and rules else None
            raise ApiError(f"{where}: {error}", param=where) if where else of_usage(error) from None
        n, self._listed, self._offsets = request.logprobs, [], Offsets()
        began = time.perf_counter()

        def unless_gone() -> None:
            if job.is_cancelled:
                self.writer.stop = True

        def after_sampling(token: int) -> None:
            unless_gone()
            if n is not None:
                self._list(logprobs(self.model, self.engine.context.next_logits, token, n))

        def while_reading(n_read: int, n_all: int) -> None:
            unless_gone()
            if self._crew and not self.writer.stop:
                self._crew.step(self.engine, n_all - n_read if n_all > 1 else 0)
                unless_gone()
            if n_all > 1:
                now = {"n_past": self.engine.n_past, "seconds": time.perf_counter() - began}
                job.emit("reading", n_read=n_read, n_all=n_all, **now)

        self.writer.begin(sampler, shown, after_sampling, while_reading, frozenset(request.stop_tokens))
        unless_gone()

    def _take_listed(self) -> list[dict[str, Any]]:
        """The log-probabilities that came since the last call."""
        found, self._listed = self._listed, []
        return found

    def _check_length(self, n: int) -> None:
        self._n_asked = n
        if self._ends and n >= self.engine.n_ctx:
            raise _too_long(self.engine, n)

    def _room(self, request: Request) -> int | None:
        """The most tokens of the answer; None is no limit."""
        n_left = self.engine.n_ctx - self._n_asked if self._ends else None
        return min((n for n in (request.n_max, n_left) if n is not None), default=None)

    @property
    def _ends(self) -> bool:
        """Whether a chat ends with the context."""
        return self.overflow == "error" or not self.engine.policy.slack

    def _end(self, job: Job, request: Request, reply: Reply, finish: str, counts: dict[str, Any]) -> None:
        """Tells a client that its answer is over, and what is left of the stream."""
        unsaved = self._resumer and self._resumer.unsaved
        told = {"unsaved": unsaved, "ignored": request.ignored, "remarks": self._remarks}
        held = _held(self.writer, request.n_share) | {name: each for name, each in told.items() if each}
        stop = self.writer.stopped_by
        job.emit("end", message=reply.message, finish=finish, stopped_by=stop, held=held, **counts)


def _banned(model: Model, request: Request) -> set[int]:
    """The tokens that the answer must not have. Raises ApiError for tokens that there are not."""
    for name, tokens in (("stop_token_ids", request.stop_tokens), ("allowed_token_ids", request.allowed)):
        if max(tokens, default=0) >= model.n_vocab:
            raise ApiError(f"{name} must have tokens in 0..{model.n_vocab - 1}", param=name)
    banned = set(range(model.n_vocab)) - {*request.allowed} if request.allowed else set()
    return banned | {*model.ends} if request.ignores_end else banned


def _parser(rendering: Rendering, request: ChatRequest, tools: list[dict[str, Any]]) -> Parser | None:
    """Tells the calls of these tools from a reply; None without tools."""
    holds: Literal["", "call", "or"] = "or" if request.shape and request.shape.kind != "grammar" else ""
    holds = "call" if request.choice.kind == "required" else holds
    return Parser(rendering.format, tools, holds) if tools else None


def _offered(request: ChatRequest) -> list[dict[str, Any]]:
    """The tools in the prompt: all but the deferred, which the model may also call."""
    tools = request.tools if request.choice.kind != "none" else []
    return [tool for tool in tools if "defer_loading" not in tool]


def _tokens(model: Model, prompt: str | list[int]) -> np.ndarray:
    """The tokens i32[n] of a prompt. Raises ApiError for tokens that there are not."""
    if isinstance(prompt, str):
        return model.tokenize(prompt, special=True, start=wants_bos(model, prompt))
    if not prompt or min(prompt) < 0 or max(prompt) >= model.n_vocab:
        raise ApiError(f"prompt must have tokens in 0..{model.n_vocab - 1}", param="prompt")
    return np.array(prompt, np.int32)


def text_of(model: Model, tokens: list[int]) -> str:
    """The text of tokens, with markers written out."""
    return b"".join(model.piece(token, special=True) for token in tokens).decode("utf-8", "replace")


def _too_long(engine: Engine, n: int, why: str | None = None) -> ApiError:
    """What a request of n tokens gets that does not fit."""
    return ApiError(
        why or f"the request has {n} tokens, and the context is {engine.n_ctx}",
        kind="exceed_context_size_error",
        code="context_length_exceeded",
        more={"n_prompt_tokens": n, "n_ctx": engine.n_ctx},
    )


def _held(writer: Writer, n_share: int) -> dict[str, Any]:
    """What is left of a stream; of its last n_share tokens which share of the rows holds each."""
    engine = writer.engine
    held: dict[str, Any] = {
        "tokens": engine.n_past,
        "held": round(engine.mean_live, 1),
        "archived": engine.n_archived,
        "forgotten": n_forgotten(engine),
        "cache_bytes": engine.cache_bytes,
        "archive_bytes": engine.archive_bytes,
        "budget": engine.policy.budget,
        "asked": engine.policy.n_asked,
    }
    if n_share:
        tokens = writer.tokens[-n_share:]
        first = engine.n_past - len(tokens)
        held["share"] = {
            "text": holdings.texts(engine.model, tokens),
            "held": engine.cells().share()[first:].round(3).tolist(),
            "archived": holdings.is_archived(engine)[first:].tolist(),
        }
    return held
