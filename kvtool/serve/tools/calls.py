"""Calls of tools in what a model writes, told from its text piece by piece."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvtool.chats.stops import n_begun
from kvtool.serve.tools import formats
from kvtool.serve.tools.formats import Format
from kvtool.serve.tools.values import Broken, calls_in_json, calls_in_python, dumped, json_of_marked, typed

Tools = Mapping[str, Mapping[str, Any]]
"""The schema of each tool's parameters, by the tool's name."""

Calls = list[tuple[str, str]]
"""Each call's name, and its arguments as the JSON text of an object."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call.

    Attributes
    ----------
    index
        Its number among the calls of a reply, from 0.
    id, name
        Its own, and the tool's.
    arguments
        The JSON text of an object.
    """

    index: int
    id: str
    name: str
    arguments: str


Event = str | Call
"""What a reply says, or a call in it."""


class Parser:
    """Tells the calls of a reply from its text, however the reply is cut into pieces.

    The reply without its calls is its text: where there is no call, the texts joined are the reply, character
    by character. A call takes its tags and the white space on both sides with it. What only looks like a call
    is text: one that is broken, is cut off before its end, or names a tool that is not there. The search
    goes on right behind its tag. A list of calls is one thing: if one of them is no call, all are text.

    Every format's parser also reads Hermes's tags, since a model may be forced to write them. Where the
    format's calls are JSON objects, calls are also Markdown's blocks of such, what stands in the tags around
    the list of tools, and a reply that is nothing else: models mistake the tags. Feed it what follows a
    thought, as `Splitter` tells it. It needs the text of the format's control tokens: see `shown_tokens`.

    Parameters
    ----------
    tools
        What the model may call, as `check_tools` returns them.
    holds
        What rules make of the reply: a "call", a call "or" an answer, or "" for any text. A call that is cut
        off before its end is then left out, and is not text.

    Attributes
    ----------
    has_left_out
        True if a call was cut off and left out.
    """

    def __init__(
        self, format: Format, tools: Sequence[Mapping[str, Any]], holds: Literal["", "call", "or"] = ""
    ) -> None:
        self._holds = holds
        self.has_left_out = False
        self._tools: Tools = {
            tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in tools
        }
        self._readers: dict[str, _Reader] = {"<tool_call>": _tagged, **_READERS.get(format.name, {})}
        # what a reply without a tag may be
        self._bare: _Reader | None = None
        # JSON without a tag may be an answer
        if format.is_json and holds != "or":
            self._bare = _json if format is formats.LLAMA else _nothing_else
            self._readers |= {"```json": _wrapped("```"), "<tools>": _wrapped("</tools>")}
        self._rest = ""
        # white space before a tag: it goes with a call, and is text otherwise
        self._space = ""
        self._source: _Source | None = None
        self._n = 0
        # where a reply may be a call without a tag
        self._is_start = True
        self._follows_call = False

    def feed(self, piece: str) -> Iterator[Event]:
        """Yields what this piece makes certain. What may be the start of a call waits for the next one."""
        if self._source:
            self._source.text += piece
        else:
            self._rest += piece
        yield from self._go(False)

    def end(self) -> Iterator[Event]:
        """Yields what has waited: the reply is over."""
        yield from self._go(True)

    def _go(self, ended: bool) -> Iterator[Event]:
        while True:
            if not self._source:
                yield from self._plain(ended)
                if not self._source:
                    return
            source = self._source
            source.ended = ended
            try:
                next(self._reading)
                return
            except StopIteration as done:
                yield from self._made(done.value)
                self._rest = source.text[source.at :]
                self._follows_call = self._is_start = True
            except Broken:
                if ended and self._holds:
                    self._leave_out()
                    return
                yield self._space + self._tag
                self._rest = source.text[len(self._tag) :]
                self._follows_call = self._is_start = False
            self._source, self._space = None, ""

    def _plain(self, ended: bool) -> Iterator[Event]:
        """Yields the text up to what may be a call, and begins to read that."""
        text = self._rest
        if self._follows_call:
            text = text.lstrip()
        bare = text.lstrip()
        if self._is_start and bare:
            # before a later one of Llama's there may be a mark
            opens = "{" if not self._follows_call else "{;" if self._bare is _json else ""
            if self._bare and bare[0] in opens:
                self._begin(text, len(text) - len(bare), bare[0], self._bare)
                return
            self._is_start = False
        if bare:
            self._follows_call = False
        places = {at: tag for tag in self._readers if (at := text.find(tag)) >= 0}
        if places:
            at = min(places)
            said = text[:at].rstrip()
            self._begin(text[len(said) :], at - len(said), places[at], self._readers[places[at]])
        else:
            n = max(n_begun(text, tag) for tag in self._readers)
            if ended and self._holds and n and n == len(bare):
                self._leave_out()
                return
            said = text if ended else text[: len(text) - n].rstrip()
            self._rest = text[len(said) :]
        if said:
            yield said

    def _leave_out(self) -> None:
        self._source, self._rest, self.has_left_out = None, "", True

    def _begin(self, text: str, at: int, tag: str, reader: _Reader) -> None:
        self._rest = ""
        self._space, self._tag = text[:at], tag
        # a brace is a part of the call
        self._source = _Source(text[at:], 0 if tag == "{" else len(tag))
        self._reading = reader(self._source, self._tools)

    def _made(self, calls: Calls) -> Iterator[Event]:
        for name, arguments in calls:
            yield Call(self._n, f"call_{secrets.token_hex(12)}", name, arguments)
            self._n += 1


class _Source:
    """A text that grows, read from its front.

    The methods are generators: they yield where only more text, or its end, can tell how to go on. So what
    they decide does not depend on how the text is cut. They raise Broken.
    """

    def __init__(self, text: str, at: int) -> None:
        self.text = text
        self.at = at
        self.ended = False

    def take(self, *options: str) -> Generator[None, None, str]:
        """Passes the option that comes next; "" if none does. No option may begin another."""
        while True:
            for option in options:
                if self.text.startswith(option, self.at):
                    self.at += len(option)
                    return option
            rest = self.text[self.at : self.at + max(map(len, options))]
            if self.ended or not any(option.startswith(rest) for option in options):
                return ""
            yield

    def need(self, *options: str) -> Generator[None, None, str]:
        """Passes the option that comes next; there must be one."""
        return (yield from self.take(*options)) or _broken()

    def space(self) -> Generator[None, None, str]:
        """Passes white space. Returns the character after it, or "" at the end."""
        while True:
            while self.text[self.at : self.at + 1].isspace():
                self.at += 1
            if self.at < len(self.text) or self.ended:
                return self.text[self.at : self.at + 1]
            yield

    def name(self, tools: Tools) -> Generator[None, None, str]:
        """Passes the name of a tool."""
        while True:
            after = _AFTER_NAME.search(self.text, self.at)
            if after or self.ended:
                end = after.start() if after else len(self.text)
                name, self.at = self.text[self.at : end], end
                return name if name in tools else _broken()
            yield

    def until(self, tag: str) -> Generator[None, None, str]:
        """Passes the text up to a tag, and the tag; all there is if it never comes. Returns the text."""
        start = looked = self.at
        while (found := self.text.find(tag, looked)) < 0:
            if self.ended:
                self.at = len(self.text)
                return self.text[start:]
            looked = max(start, len(self.text) - len(tag) + 1)
            yield
        self.at = found + len(tag)
        return self.text[start:found]

    def json(self) -> Generator[None, None, str]:
        """Passes a JSON object or list, and the white space before it. Returns its text."""
        if (yield from self.space()) not in ("{", "["):
            _broken()
        start = at = self.at
        depth, in_string = 0, False
        while depth or at == start:
            found = (_IN_STRING if in_string else _OUTSIDE).search(self.text, at)
            # an escaped character counts as seen before it is there
            at = found.end() if found else max(at, len(self.text))
            if not found:
                if self.ended:
                    _broken()
                yield
            elif found[0] == "\\":
                at += 1
            elif found[0] == '"':
                in_string = not in_string
            else:
                depth += 1 if found[0] in "{[" else -1
        self.at = at
        return self.text[start:at]


_Reader = Callable[[_Source, Tools], Generator[None, None, Calls]]

_AFTER_NAME = re.compile(r"[^a-zA-Z0-9_-]")
_OUTSIDE = re.compile(r'[\[\]{}"]')
_IN_STRING = re.compile(r'["\\]')


def _broken() -> Any:
    raise Broken


def _json(source: _Source, tools: Tools) -> Generator[None, None, Calls]:
    return calls_in_json((yield from source.json()), tools)


def _objects(source: _Source, tools: Tools) -> Generator[None, None, Calls]:
    """Calls in JSON, or lists of them, up to something else.

    Their names come first, so that no text waits for long.
    """
    calls: Calls = []
    while (yield from source.space()) in ("{", "["):
        start = source.at
        yield from source.take("[")
        for part in ("{", '"name"', ":", '"'):
            yield from source.space()
            yield from source.need(part)
        yield from source.name(tools)
        yield from source.need('"')
        source.at = start
        calls += calls_in_json((yield from source.json()), tools, strictly=True)
    return calls or _broken()


def _wrapped(close: str) -> _Reader:
    """Reads calls in JSON up to this."""

    def read(source: _Source, tools: Tools) -> Generator[None, None, Calls]:
        calls = yield from _objects(source, tools)
        # models end without it
        if (yield from source.space()):
            yield from source.need(close)
        return calls

    return read


def _nothing_else(source: _Source, tools: Tools) -> Generator[None, None, Calls]:
    calls = yield from _objects(source, tools)
    return calls if source.ended and source.at == len(source.text) else _broken()


def _tagged(source: _Source, tools: Tools) -> Generator[None, None, Calls]:
    """Between <tool_call> and </tool_call>: JSON, <function=...>, or a name and GLM's tags."""
    after = yield from source.space()
    if after in ("{", "["):
        calls = yield from _json(source, tools)
    elif after == "<":
        return (yield from _inner_function(source, tools))
    else:
        return (yield from _glm(source, tools))
    # models end without it
    yield from source.space()
    yield from source.take("</tool_call>")
    return calls


def _inner_function(source: _Source, tools: Tools) -> Generator[None, None, Calls]:
    yield from source.space()
    yield from source.need("<function=")
    return (yield from _function(source, tools))


def _function(source: _Source, tools: Tools) -> Generator[None, None, Calls]:
    name = yield from source.name(tools)
    yield from source.need(">")
    tags = "<parameter=", ">", "</function>"
    arguments = yield from _parameters(source, tools[name], *tags, is_padded=True)
    yield from source.space()
    yield from source.take("</tool_call>", "</seed:tool_call>")
    return [(name, arguments)]


def _parameters(
    source: _Source, tool: Mapping[str, Any], start: str, middle: str, end: str, *, is_padded: bool
) -> Generator[None, None, str]:
    """The JSON of parameters, start KEY middle VALUE </parameter>, up to the end of the call.

    is_padded: values stand between line breaks that are no part of them.
    """
    arguments: dict[str, object] = {}
    while True:
        yield from source.space()
        if (yield from source.need(start, end)) == end:
            return dumped(arguments)
        key = yield from source.until(middle)
        value = yield from source.until("</parameter>")
        if is_padded:
            value = value.removeprefix("\n").removesuffix("\n")
        arguments[key] = typed(value, key, tool)


def _minimax(source: _Source, tools: Tools) -> Generator[None, None, Calls]:
    calls: Calls = []
    while True:
        yield from source.space()
        if calls and (yield from source.take("</minimax:tool_call>")):
            return calls
        yield from source.need('<invoke name="')
        name = yield from source.name(tools)
        yield from source.need('">')
        tags = '<parameter name="', '">', "</invoke>"
        calls.append((name, (yield from _parameters(source, tools[name], *tags, is_padded=False))))


def _glm(source: _Source, tools: Tools) -> Generator[None, None, Calls]:
    name = yield from source.name(tools)
    arguments: dict[str, object] = {}
    while True:
        yield from source.space()
        if (yield from source.need("<arg_key>", "</tool_call>")) == "</tool_call>":
            return [(name, dumped(arguments))]
        key = yield from source.until("</arg_key>")
        yield from source.space()
        yield from source.need("<arg_value>")
        value = yield from source.until("</arg_value>")
        arguments[key] = typed(value, key, tools[name])


def _mistral(source: _Source, tools: Tools) -> Generator[None, None, Calls]:
    if (yield from source.space()) in ("[", "{"):
        return (yield from _json(source, tools))
    name = yield from source.name(tools)
    if (yield from source.need("[CALL_ID]", "[ARGS]")) == "[CALL_ID]":
        yield from source.until("[ARGS]")
    return calls_in_json(f'{{"name": "{name}", "arguments": {(yield from source.json())}}}', tools)


def _closed(close: str) -> _Reader:
    """Reads JSON that a tag may follow."""

    def read(source: _Source, tools: Tools) -> Generator[None, None, Calls]:
        calls = yield from _json(source, tools)
        yield from source.space()
        yield from source.take(close)
        return calls

    return read


def _python(source: _Source, tools: Tools) -> Generator[None, None, Calls]:
    if (yield from source.space()) != "[":
        _broken()
    return calls_in_python((yield from source.until("<|tool_call_end|>")), tools)


def _gemma(source: _Source, tools: Tools) -> Generator[None, None, Calls]:
    yield from source.space()
    yield from source.need("call:")
    name = yield from source.name(tools)
    yield from source.need("{")
    mark, end = '<|"|>', "<tool_call|>"
    inside = "{" + (yield from source.until(end))
    while inside.count(mark) % 2 and not (source.ended and source.at == len(source.text)):
        # that was in a string
        inside += end + (yield from source.until(end))
    return calls_in_json(f'{{"name": "{name}", "arguments": {json_of_marked(inside, mark)}}}', tools)


_READERS: dict[str, dict[str, _Reader]] = {
    formats.XML.name: {"<function=": _function},
    formats.MISTRAL.name: {"[TOOL_CALLS]": _mistral},
    formats.MISTRAL_ARGS.name: {"[TOOL_CALLS]": _mistral},
    formats.GRANITE.name: {"<|tool_call|>": _json},
    formats.NEMOTRON.name: {"<TOOLCALL>": _closed("</TOOLCALL>")},
    formats.LLAMA.name: {"<|python_tag|>": _json},
    formats.LFM2.name: {"<|tool_call_start|>": _python},
    formats.SEED.name: {"<seed:tool_call>": _inner_function, "<function=": _function},
    formats.APRIEL.name: {"<tool_calls>": _closed("</tool_calls>")},
    formats.COHERE.name: {"<|START_ACTION|>": _closed("<|END_ACTION|>")},
    formats.MINIMAX.name: {"<minimax:tool_call>": _minimax},
    formats.GEMMA.name: {"<|tool_call>": _gemma},
}
"""What may open a call besides <tool_call>, by the format's name."""
