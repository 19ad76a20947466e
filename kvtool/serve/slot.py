"""A slot is an engine that answers requests. If the beginning of a chat is stored, only the rest is read."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from math import inf
from typing import Any, Literal, NamedTuple

import numpy as np

from kvtool.chats import session
from kvtool.chats.conversation import Conversation
from kvtool.chats.logprobs import Offsets, logprobs, unknown
from kvtool.chats.template import RAW, TemplateError
from kvtool.chats.thinking import without_thought
from kvtool.chats.writer import Writer
from kvtool.engine.loop import Engine
from kvtool.errors import InputError, KvtoolError, StreamEnd, UsageError
from kvtool.llama.grammar.rules import Rules
from kvtool.llama.loaded.model import Model
from kvtool.llama.sampler import Sampler
from kvtool.measure import holdings
from kvtool.measure.holdings import n_forgotten
from kvtool.serve import text_prompts
from kvtool.serve.api.errors import ApiError
from kvtool.serve.api.requests import ChatRequest, Request, TextRequest, of_usage
from kvtool.serve.api.thinking import ThinkingOptions
from kvtool.serve.batching import StepBatcher
from kvtool.serve.events import PromptRead, Reading, Written
from kvtool.serve.queue import Job
from kvtool.serve.rendering import Rendering, Renderings
from kvtool.serve.reply import Delta, Reply
from kvtool.serve.store.chats import ChatStore
from kvtool.serve.store.history import History
from kvtool.serve.store.resumer import Resumer
from kvtool.serve.tools.calls import Parser
from kvtool.serve.tools.formats import shown_tokens

Pieces = Generator[str, None, None]

N_OUTPUT = 16
"""Maximum number of tokens of a step that computes logits for all its tokens, to score a prompt."""


class _ChatPrompt(NamedTuple):
    """The prepared prompt of a chat: see `Slot.prepare`. remarks: see `Renderings.of`."""

    rendering: Rendering
    remarks: list[str]
    history: History


class Slot:
    """An engine that answers requests, one after the other.

    renderings: None if the model has no chat template; then chats are refused.
    overflow: "forget" to let the policy evict. "error" to refuse chats that are longer than the context.
    meta: returns values for a session's JSON, which are saved in addition to those of `Conversation.save`.
    """

    def __init__(
        self,
        writer: Writer,
        renderings: Renderings | None,
        chats: ChatStore,
        overflow: str,
        meta: Callable[[Conversation], session.Meta],
        batcher: StepBatcher,
    ) -> None:
        self.writer = writer
        self.engine = writer.engine
        self.model = writer.engine.model
        self.chats = chats
        self.overflow = overflow
        self.template = renderings.template if renderings else None
        self._batcher = batcher
        # number of prompt tokens of the request that is being answered
        self._n_request = 0
        # seconds for which this request has waited while other requests computed
        self._waited_s = 0.0
        self._resumer: Resumer | None = None
        if renderings:
            self._renderings = renderings
            conversation = Conversation(writer, renderings.template)
            rendering, _ = renderings.of(ThinkingOptions())
            self._resumer = Resumer(conversation, rendering, chats, meta)
        self._logprobs: list[dict[str, Any]] = []
        self._offsets = Offsets()
        # remarks on fields of the request that kvtool cannot apply exactly; the answer lists these remarks
        self._remarks: list[str] = []

    def prepare(self, job: Job) -> None:
        """Render and tokenize the prompt of a job. Any thread may call this. Raises ApiError.

        The server calls this before a slot is free, because a long text takes seconds. If it was not called,
        `n_shared` or `answer` call it. The results do not depend on the slot or its engine.
        """
        if job.prompt is not None:
            return
        with self._api_errors():
            request = job.request
            if not isinstance(request, ChatRequest):
                job.prompt = text_prompts.tokens_of(self.model, request.prompt)
                return
            resumer, tools = self._chats_resumer(), _tools_in_prompt(request)
            rendering, remarks = self._rendering(request)
            history = rendering.history(request.name, request.messages, tools)
            if request.reuses:
                resumer.prepare(rendering, request.messages, tools, history)
            rendering.whole(request.messages, tools)
            job.prompt = _ChatPrompt(rendering, remarks, history)

    def answer(self, job: Job) -> None:
        """Answer the request of a job, and emit the events of the answer. Raises ApiError."""
        self.prepare(job)
        with self._api_errors():
            if isinstance(job.request, ChatRequest):
                self._chat(job, job.request)
            else:
                self._text(job, job.request)

    def n_shared(self, job: Job) -> int:
        """Return how many tokens at the start of a request need not be read, because the engine has them."""
        request = job.request
        try:
            self.prepare(job)
            if isinstance(request, TextRequest):
                return text_prompts.n_reused(self.writer, request, job.prompt)
            if not (self._resumer and request.reuses):
                return 0
            self._resumer.use(job.prompt.rendering)
            return self._resumer.n_shared(request.messages, _tools_in_prompt(request))
        except (ApiError, KvtoolError, RecursionError):
            # ignore the error here, because the answer will report it
            return 0
        except Exception as error:  # noqa: BLE001
            # this is a bug in kvtool, which must not end the thread that chooses slots for all requests
            traceback.print_exception(error)
            return 0

    def count(self, request: ChatRequest) -> int:
        """Return the number of tokens of a chat's prompt. Any thread may call this. Raises ApiError."""
        with self._api_errors():
            self._chats_resumer()
            rendering, _ = self._rendering(request)
            tokens, _ = rendering.whole(request.messages, _tools_in_prompt(request))
            return len(tokens) - rendering.header.n_left_out

    def _rendering(self, request: ChatRequest) -> tuple[Rendering, list[str]]:
        """Return the rendering of a request, and remarks on options that the template does not support."""
        rendering, remarks = self._renderings.of(request.thinking)
        return rendering.for_request(request.begun), remarks

    @contextmanager
    def _api_errors(self) -> Iterator[None]:
        """Turn errors that are raised in the block into ApiError."""
        try:
            yield
        except UsageError as error:
            raise of_usage(error) from None
        except StreamEnd as error:
            raise _too_long(self.engine, self._n_request, str(error)) from None
        except InputError as error:
            raise ApiError(str(error)) from None
        except TemplateError as error:
            raise ApiError(str(error).removesuffix(f"; {RAW}"), code="chat_template") from None
        except RecursionError:
            raise ApiError("the request is nested too deeply") from None
        except KvtoolError as error:
            raise ApiError(str(error), status=500, kind="server_error") from None

    def _chat(self, job: Job, request: ChatRequest) -> None:
        resumer = self._chats_resumer()
        conversation, tools = resumer.conversation, _tools_in_prompt(request)
        rendering, remarks, history = job.prompt
        rules, unenforced = rendering.rules(request)
        self._remarks = [*remarks, *unenforced]
        resumer.use(rendering)
        conversation.thought_budget = request.thinking.budget
        conversation.call_replaces_answer = rendering.call_replaces_answer(request)
        callable_tools = [] if request.choice.kind == "none" else request.tools
        tags = shown_tokens(self.model, rendering.format) if callable_tools else frozenset()
        conversation.call_opening = rendering.format.opening if callable_tools else ""
        self._start(job, request, conversation.shown | tags, rules)
        if request.begun:
            # call this before the prompt is read: it raises an error if a grammar forbids the text with which
            # the client begins the reply
            conversation.start_sampling()
        prompt = self._read_chat(job, request, resumer, tools, history)
        if not prompt:
            return
        conversation.set_messages(request.messages)
        parser = _parser(rendering, request, callable_tools)
        reply = Reply(conversation.splitter_after_begun(), parser)
        pieces = conversation.write(self._most_tokens(request), may_change=rendering.template.has_thoughts)
        job.emit({"kind": "read"})
        written = self._write(job, request, pieces, reply)
        # the message in the form in which the client will send it back
        message = dict(reply.message)
        message["content"] = without_thought(request.begun, conversation.splitter()) + message["content"]
        if not request.sends_thoughts:
            message.pop("reasoning_content", None)
        if parser and parser.has_left_out:
            # the client did not get all of the stream, so later requests cannot continue it
            resumer.forget_chat()
        else:
            resumer.store_reply(history, request.messages, message, tools)
        self._end(job, request, reply, prompt, written)

    def _read_chat(
        self, job: Job, request: ChatRequest, resumer: Resumer, tools: list[dict[str, Any]], history: History
    ) -> PromptRead | None:
        """Read the part of a chat that is not cached. Return None if reading was stopped."""
        started, conversation = self._clock(), resumer.conversation
        tokens = resumer.begin(request.messages, tools, history, reuses=request.reuses)
        conversation.hold_header()
        n_all = resumer.n_cached + len(tokens)
        self._check_length(n_all)
        n_prompt = n_all - conversation.header.n_left_out
        job.prompt_counts = {"n_prompt": n_prompt, "n_cached": resumer.n_cached}
        tokens = resumer.read_system_prompt(tokens, request.messages, history)
        if not self.writer.stop:
            keeps_thought = bool(tools) and request.sends_thoughts and resumer.rendering.template.has_thoughts
            tokens = resumer.read_prompt(tokens, request.messages, keeps_thought=keeps_thought)
        if self.writer.stop or not conversation.read_prompt(tokens):
            return None
        if self.engine.checkpoints.are_small:
            # keep the state before the reply, because the client may send back another reply
            self.engine.checkpoints.take()
        return {**job.prompt_counts, "read_s": self._clock() - started}

    def _clock(self) -> float:
        """Return the time in seconds. This clock stands still while other requests compute."""
        return time.perf_counter() - self._waited_s

    def _chats_resumer(self) -> Resumer:
        if not self._resumer:
            why = "the model has no chat template; use /v1/completions, or serve with --chat-template FILE"
            raise ApiError(why, code="no_chat_template")
        return self._resumer

    def _text(self, job: Job, request: TextRequest) -> None:
        rules, self._remarks = request.output_format.rules() if request.output_format else (None, [])
        self._start(job, request, rules=rules)
        started = self._clock()
        if self._resumer:
            self._resumer.forget_chat()
        tokens = job.prompt
        self._check_length(len(tokens))
        n_cached = text_prompts.rewind(self.writer, request, tokens)
        job.prompt_counts = {"n_prompt": len(tokens), "n_cached": n_cached}
        prompt = request.prompt
        text = prompt if isinstance(prompt, str) else text_of(self.model, prompt)
        after_step = self._scoring(tokens, text, request) if request.is_scored else None
        if not text_prompts.read(self.writer, request, tokens[n_cached:], after_step):
            return
        prompt_read: PromptRead = {**job.prompt_counts, "read_s": self._clock() - started}
        # the penalties count the prompt
        self.writer.sampler.resume(tokens.tolist(), self.writer.sampler.seed)
        self.writer.sampler.start(0)
        reply = Reply()
        job.emit({"kind": "read"})
        if request.echo:
            self._emit_piece(job, reply.repeat(text))
        written = self._write(job, request, self._continued(request), reply)
        self._end(job, request, reply, prompt_read, written)

    def _scoring(self, tokens: np.ndarray, text: str, request: TextRequest) -> Callable[[slice], None]:
        """Return a function that lists the log-probabilities of a step's tokens. Call it after each step.

        tokens: i32[n], the tokens of the prompt.
        """
        model = self.model
        # offset 0 is the start of the client's text; the tokenizer may add a BOS token or a space before it
        self._offsets = Offsets(len(text) - len(text_of(model, tokens.tolist())))
        for token in tokens[:1].tolist():
            self._add_logprobs(unknown(model, token), special=True)

        def after_step(part: slice) -> None:
            following = tokens[part.start + 1 : part.stop + 1].tolist()
            for logits, token in zip(self.engine.context.logits(), following, strict=False):
                self._add_logprobs(logprobs(model, logits, token, request.logprobs or 0), special=True)

        return after_step

    def _continued(self, request: TextRequest) -> Pieces:
        yield from self.writer.write(self._most_tokens(request))
        if request.is_scored and (token := self.writer.ending) is not None:
            # also list the end token: programs that score a prompt expect an answer of one token, and
            # therefore drop the last entry
            logits = self.engine.context.next_logits
            self._add_logprobs(logprobs(self.model, logits, token, request.logprobs or 0))

    def _add_logprobs(self, record: dict[str, Any], *, special: bool = False) -> None:
        """Append a token's entry to `_logprobs`. special: True if control tokens are part of the text."""
        piece = self.model.piece(record["id"], special=special)
        self._logprobs.append(record | {"text_offset": self._offsets.next(piece)})

    def _write(self, job: Job, request: Request, pieces: Pieces, reply: Reply) -> Written:
        """Write the reply, and emit an event for each piece."""
        started, is_cut = self._clock(), False
        before = self.writer.n_drafted, self.writer.n_accepted
        try:
            with self._batcher.writing(self.engine), closing(pieces):
                for piece in pieces:
                    self._emit_piece(job, reply.feed(piece, self.writer.n_written))
                    if reply.is_done:
                        break
        except StreamEnd:
            # the answer ends here, because the cache is full
            if not self.writer.n_written:
                raise
            is_cut = True
        is_cut = is_cut or self.writer.is_cut
        # `_most_tokens` also limits an answer to the rest of the context
        is_full = is_cut and self.writer.n_written != request.n_max
        if is_full:
            remark = f"the answer was cut: the context of {self.engine.n_ctx} tokens is full"
            self._remarks = [*self._remarks, remark]
        if self.writer.stopped_by:
            # the tokens since the last piece belong to the stop string
            self._logprobs.clear()
        self._emit_piece(job, reply.end(self.writer.n_written))
        return {
            "finish": reply.finish(is_cut),
            "is_full": is_full,
            "stopped_by": self.writer.stopped_by,
            "n_written": self.writer.n_written,
            "n_thought": reply.n_thought,
            "write_s": self._clock() - started,
            "n_drafted": self.writer.n_drafted - before[0],
            "n_accepted": self.writer.n_accepted - before[1],
        }

    def _start(
        self, job: Job, request: Request, shown: frozenset[int] = frozenset(), rules: Rules | None = None
    ) -> None:
        """Prepare the writer for a request. If the client leaves, the writer stops. Raises ApiError.

        shown: see `Writer.shown`. rules: rules for the answer, or None for the server's grammar or schema.
        """
        settings = request.sampling
        if rules and not rules.triggers and request.ignores_end:
            raise ApiError("an answer that must fit something ends; leave out ignore_eos", param="ignore_eos")
        if banned := _banned(self.model, request):
            bans = ((token, -inf) for token in banned)
            settings = replace(settings, logit_bias=(*settings.logit_bias, *bans))
        try:
            sampler = Sampler(self.model, settings, seed=request.seed, rules=rules)
        except UsageError as error:
            where = request.output_format.where if request.output_format and rules else None
            raise ApiError(f"{where}: {error}", param=where) if where else of_usage(error) from None
        if self._resumer:
            # this answer must not report that an earlier chat could not be stored
            self._resumer.unsaved = None
        n_top, self._logprobs, self._offsets = request.logprobs, [], Offsets()
        began, self._waited_s = time.perf_counter(), 0.0

        def stop_if_cancelled() -> None:
            if job.is_cancelled:
                self.writer.stop = True

        def after_sampling(token: int) -> None:
            stop_if_cancelled()
            if n_top is not None:
                self._add_logprobs(logprobs(self.model, self.engine.context.next_logits, token, n_top))

        def while_reading(n_read: int, n_all: int) -> None:
            stop_if_cancelled()
            if not self.writer.stop:
                asked = time.perf_counter()
                self._batcher.step(self.engine, n_all - n_read if n_all > 1 else 0)
                self._waited_s += time.perf_counter() - asked
                stop_if_cancelled()
            if n_all > 1:
                seconds, n_past = time.perf_counter() - began, self.engine.n_past
                job.emit(Reading(kind="reading", n_read=n_read, n_all=n_all, n_past=n_past, seconds=seconds))

        self.writer.begin(sampler, shown, after_sampling, while_reading, frozenset(request.stop_tokens))
        stop_if_cancelled()

    def _emit_piece(self, job: Job, deltas: list[Delta]) -> None:
        """Emit deltas, and the entries that were appended to `_logprobs` since the last piece."""
        records, self._logprobs = self._logprobs, []
        job.emit({"kind": "piece", "deltas": deltas, "logprobs": records})

    def _check_length(self, n: int) -> None:
        self._n_request = n
        if self._is_bounded and n >= self.engine.n_ctx:
            raise _too_long(self.engine, n)

    def _most_tokens(self, request: Request) -> int | None:
        """Return the maximum number of tokens of the answer, or None if there is no limit."""
        n_left = self.engine.n_ctx - self._n_request if self._is_bounded else None
        return min((n for n in (request.n_max, n_left) if n is not None), default=None)

    @property
    def _is_bounded(self) -> bool:
        """True if a request and its answer must fit in the context."""
        return self.overflow == "error" or not self.engine.policy.evicts

    def _end(self, job: Job, request: Request, reply: Reply, prompt: PromptRead, written: Written) -> None:
        unsaved = self._resumer and self._resumer.unsaved
        notes = {"unsaved": unsaved, "ignored": request.ignored, "remarks": self._remarks}
        kvtool = _cache_numbers(self.writer, request.n_share)
        kvtool |= {name: note for name, note in notes.items() if note}
        job.emit({"kind": "end", "message": reply.message, "kvtool": kvtool, **prompt, **written})


def _banned(model: Model, request: Request) -> set[int]:
    """Return the tokens that the answer must not have.

    Raises ApiError if the vocabulary does not have a token of `stop_tokens`.
    """
    if max(request.stop_tokens, default=0) >= model.n_vocab:
        raise ApiError.at("stop_token_ids", f"must have tokens in 0..{model.n_vocab - 1}")
    return {*model.ends} if request.ignores_end else set()


def _parser(rendering: Rendering, request: ChatRequest, tools: list[dict[str, Any]]) -> Parser | None:
    """Return a parser for calls of tools, or None if there are no tools."""
    is_formatted = request.output_format and request.output_format.kind != "grammar"
    rules: Literal["", "call", "or"]
    rules = "call" if request.choice.kind == "required" else "or" if is_formatted else ""
    # the rules allow only one call
    one_call = request.choice.one_call and not rules
    return Parser(rendering.format, tools, rules, one_call=one_call) if tools else None


def _tools_in_prompt(request: ChatRequest) -> list[dict[str, Any]]:
    """Return the tools that the prompt lists. Deferred tools are not listed, but may still be called."""
    tools = request.tools if request.choice.kind != "none" else []
    return [tool for tool in tools if "defer_loading" not in tool]


def text_of(model: Model, tokens: list[int]) -> str:
    """Return the text of tokens, including control tokens."""
    return b"".join(model.piece(token, special=True) for token in tokens).decode("utf-8", "replace")


def _too_long(engine: Engine, n: int, why: str | None = None) -> ApiError:
    """Return the error for a request of n tokens that does not fit in the context. why: the message."""
    return ApiError(
        # litellm recognizes the error by these words, which are llama-server's
        why or f"the request exceeds the available context size: {n} tokens in a context of {engine.n_ctx}",
        kind="exceed_context_size_error",
        code="context_length_exceeded",
        more={"n_prompt_tokens": n, "n_ctx": engine.n_ctx},
    )


def _cache_numbers(writer: Writer, n_share: int) -> dict[str, Any]:
    """Return numbers about the cache, such as the tokens in the cache, in the archive and in neither.

    If n_share is not 0, also list the texts of the last n_share tokens. For each token, list the share of
    rows that hold it, and whether the archive has it. There is one row for each KV head of each layer.
    """
    engine = writer.engine
    numbers: dict[str, Any] = {
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
        numbers["share"] = {
            "text": holdings.texts(engine.model, tokens),
            "held": engine.cells().share()[first:].round(3).tolist(),
            "archived": holdings.is_archived(engine)[first:].tolist(),
        }
    return numbers
