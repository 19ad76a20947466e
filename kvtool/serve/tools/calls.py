"""Parse tool calls in the text of a reply. The text arrives piece by piece."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvtool.chats.thinking import n_begun
from kvtool.serve.tools import formats
from kvtool.serve.tools.fitting import fits
from kvtool.serve.tools.formats import Format
from kvtool.serve.tools.values import (
    NoCall,
    arguments_in_json,
    calls_in_json,
    calls_in_python,
    dumped,
    json_of_quoted,
    typed,
)

Tools = Mapping[str, Mapping[str, Any]]
"""Schema of each tool's parameters, by the tool's name."""

Calls = list[tuple[str, str]]
"""Pairs (name, arguments), one for each call. The arguments are the JSON text of an object."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call. `index` counts the calls of a reply from 0. `arguments` is the JSON text of an object."""

    index: int
    id: str
    name: str
    arguments: str


TextOrCall = str | Call
"""A part of the reply's text, or a call."""


class Parser:
    """Separates the calls of a reply from its text. The reply may be cut into pieces anywhere.

    The text is the reply without its calls. If there are no calls, the joined texts are equal to the reply. A
    call includes its tags and the white space around it.

    A call counts as text if it is malformed or incomplete, if its tool is unknown, or if its arguments do not
    fit the tool's schema. The search for calls then continues after the opening tag. If one call of a list
    counts as text, the whole list does.

    Each parser also accepts Hermes's tags, because a grammar may force a model to write them. If the calls of
    a format are JSON objects, models often write other tags or no tags. For such formats, the parser also
    accepts calls in Markdown code blocks, calls in <tools> tags, and a reply that has only calls without
    tags.

    The input is the part of a reply after its thought, which `Splitter` separates. It includes the texts of
    the format's control tokens. See `shown_tokens`.

    Parameters
    ----------
    tools
        The result of `check_tools`.
    rules
        "call" if a grammar forces the model to write a call. "or" if a grammar allows a call or an answer. ""
        if there is no grammar for calls. With such a grammar, all arguments fit, and an incomplete call is
        left out instead of counting as text.

    Attributes
    ----------
    is_done
        True after the first call if `one_call` is True. The reply then ends: later text is left out.
    has_left_out
        True if a call was incomplete, or if anything after the only call was left out.
    """

    def __init__(
        self,
        format: Format,
        tools: Sequence[Mapping[str, Any]],
        rules: Literal["", "call", "or"] = "",
        *,
        one_call: bool = False,
    ) -> None:
        self._format = format
        self._rules = rules
        self._one_call = one_call
        self.is_done = self.has_left_out = False
        self._tools: Tools = {
            tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in tools
        }
        self._readers: dict[str, _Reader] = {"<tool_call>": _tagged, **_READERS.get(format.name, {})}
        # reads calls that have no tag; None if each call must have a tag
        self._bare_reader: _Reader | None = None
        # if the rules allow an answer, JSON without a tag is an answer and not a call
        if format.is_json and rules != "or":
            self._bare_reader = _json if format is formats.LLAMA else _nothing_else
            self._readers |= {"```json": _wrapped("```"), "<tools>": _wrapped("</tools>")}
        self._rest = ""
        # white space before a tag; it belongs to the call, or to the text if there is no call
        self._space = ""
        self._source: _GrowingText | None = None
        self._n = 0
        # True if a call without a tag may begin here
        self._is_start = True
        self._follows_call = False

    def feed(self, piece: str) -> Iterator[TextOrCall]:
        """Yield the texts and calls that a piece completes. Text that may belong to a call is held back."""
        if self.is_done:
            self.has_left_out |= bool(piece.strip())
        elif self._source:
            self._source.text += piece
        else:
            self._rest += piece
        yield from self._parts(False)

    def end(self) -> Iterator[TextOrCall]:
        """End the reply, and yield the text or the calls that were held back."""
        yield from self._parts(True)

    def _parts(self, has_ended: bool) -> Iterator[TextOrCall]:
        while True:
            if not self._source:
                yield from self._text_parts(has_ended)
                if not self._source:
                    return
            source = self._source
            source.has_ended = has_ended
            try:
                next(self._reading)
                return
            except StopIteration as done:
                calls, rest = done.value, source.text[source.at :]
                if self._one_call and calls:
                    self.is_done = True
                    self.has_left_out = len(calls) > 1 or bool(rest.strip())
                    calls, rest = calls[:1], ""
                yield from self._numbered(calls)
                self._rest = rest
                self._follows_call = self._is_start = True
            except NoCall:
                if has_ended and self._rules:
                    self._leave_out()
                    return
                yield self._space + self._tag
                self._rest = source.text[len(self._tag) :]
                self._follows_call = self._is_start = False
            self._source, self._space = None, ""

    def _text_parts(self, has_ended: bool) -> Iterator[TextOrCall]:
        """Yield the text up to a possible call, and begin to read the call."""
        text = self._rest
        if self._follows_call:
            text = text.lstrip()
        bare = text.lstrip()
        if self._is_start and bare:
            # a list of calls begins with "[{"; "[" may also begin a tag
            first = f"[{bare[1:].lstrip()[:1]}" if bare[0] == "[" else bare[0]
            opens: tuple[str, ...] = ("{", "[{")
            if self._follows_call:
                # Llama writes ";" between calls
                opens = ("{", ";") if self._bare_reader is _json else ()
            if self._bare_reader and first in opens:
                self._begin(text, len(text) - len(bare), bare[0], self._bare_reader)
                return
            if self._bare_reader and first == "[" and not (self._follows_call or has_ended):
                return
            self._is_start = False
        if bare:
            self._follows_call = False
        places = {at: tag for tag in self._readers if (at := text.find(tag)) >= 0}
        if places:
            at = min(places)
            before = text[:at].rstrip()
            self._begin(text[len(before) :], at - len(before), places[at], self._readers[places[at]])
        else:
            n_held = max(n_begun(text, tag) for tag in self._readers)
            if has_ended and self._rules and n_held and n_held == len(bare):
                self._leave_out()
                return
            before = text if has_ended else text[: len(text) - n_held].rstrip()
            self._rest = text[len(before) :]
        if before:
            yield before

    def _leave_out(self) -> None:
        self._source, self._rest, self.has_left_out = None, "", True

    def _begin(self, text: str, at: int, tag: str, reader: _Reader) -> None:
        self._rest = ""
        self._space, self._tag = text[:at], tag
        # skip the tag, but not a brace or bracket, because it is part of the call
        self._source = _GrowingText(text[at:], 0 if tag in ("{", "[") else len(tag), self._one_call)
        self._reading = self._fitting(reader(self._source, self._tools))

    def _fitting(self, reading: _Read) -> _Read:
        """Return the calls that a reader reads. Raises NoCall if a call does not fit its tool's schema."""
        calls = yield from reading
        if not (self._rules or all(fits(arguments, self._tools[name]) for name, arguments in calls)):
            raise NoCall
        return calls

    def _numbered(self, calls: Calls) -> Iterator[TextOrCall]:
        for name, arguments in calls:
            yield Call(self._n, f"call_{secrets.token_hex(12)}", name, arguments)
            self._n += 1


_Text = Generator[None, None, str]


class _GrowingText:
    """The text of a reply, starting at a possible call. The text grows while it is read.

    The methods that read are generators. A method yields if it needs more text to decide. When the text has
    ended, a method decides without more text. Results therefore do not depend on how the reply is cut into
    pieces. The methods raise NoCall if the text is not a call.

    one_call: True if the reply ends after its first call. A reader may then leave further calls unread.
    """

    def __init__(self, text: str, at: int, one_call: bool) -> None:
        self.text = text
        self.at = at
        self.one_call = one_call
        self.has_ended = False

    def accept(self, *options: str) -> _Text:
        """If one of the texts `options` comes next, skip it and return it. Otherwise return "".

        No option may be a prefix of another option.
        """
        while True:
            for option in options:
                if self.text.startswith(option, self.at):
                    self.at += len(option)
                    return option
            rest = self.text[self.at : self.at + max(map(len, options))]
            if self.has_ended or not any(option.startswith(rest) for option in options):
                return ""
            yield

    def expect(self, *options: str) -> _Text:
        """Skip the option that comes next, and return it. Raises NoCall if no option comes next."""
        return (yield from self.accept(*options)) or _no_call()

    def skip_space(self) -> _Text:
        """Skip white space, and return the character after it, or "" at the end of the text."""
        while True:
            while self.text[self.at : self.at + 1].isspace():
                self.at += 1
            if self.at < len(self.text) or self.has_ended:
                return self.text[self.at : self.at + 1]
            yield

    def accept_spaced(self, *options: str) -> _Text:
        yield from self.skip_space()
        return (yield from self.accept(*options))

    def expect_spaced(self, *options: str) -> _Text:
        yield from self.skip_space()
        return (yield from self.expect(*options))

    def name(self, tools: Tools) -> _Text:
        while True:
            after = _AFTER_NAME.search(self.text, self.at)
            if after or self.has_ended:
                end = after.start() if after else len(self.text)
                name, self.at = self.text[self.at : end], end
                return name if name in tools else _no_call()
            yield

    def until(self, tag: str) -> _Text:
        """Read the text before a tag, and skip the tag. Returns all text if it ends without the tag."""
        start = searched = self.at
        while (end := self.text.find(tag, searched)) < 0:
            if self.has_ended:
                self.at = len(self.text)
                return self.text[start:]
            searched = max(start, len(self.text) - len(tag) + 1)
            yield
        self.at = end + len(tag)
        return self.text[start:end]

    def json(self) -> _Text:
        """Skip white space, and read the text of a JSON object or list."""
        if (yield from self.skip_space()) not in ("{", "["):
            _no_call()
        start = at = self.at
        depth, in_string = 0, False
        while depth or at == start:
            match = (_IN_STRING if in_string else _OUTSIDE).search(self.text, at)
            # `at` may be beyond the end of the text: the character after a backslash is skipped even if it is
            # in the next piece
            at = match.end() if match else max(at, len(self.text))
            if not match:
                if self.has_ended:
                    _no_call()
                yield
            elif match[0] == "\\":
                at += 1
            elif match[0] == '"':
                in_string = not in_string
            else:
                depth += 1 if match[0] in "{[" else -1
        self.at = at
        return self.text[start:at]


_Read = Generator[None, None, Calls]
_Reader = Callable[[_GrowingText, Tools], _Read]

_ENDS = ("", "{", "[")
"""Characters that may follow the calls of `_objects`: "" (end of the reply), or the start of a call."""


_AFTER_NAME = re.compile(r"[^a-zA-Z0-9_-]")
_OUTSIDE = re.compile(r'[\[\]{}"]')
_IN_STRING = re.compile(r'["\\]')


def _no_call() -> Any:
    raise NoCall


def _json(source: _GrowingText, tools: Tools) -> _Read:
    return calls_in_json((yield from source.json()), tools)


def _objects(source: _GrowingText, tools: Tools) -> _Read:
    """Read JSON objects and lists of JSON objects, which must be calls. Stop before other text.

    The first member of a call must be its name, so that other JSON is soon recognized as text. In a list,
    only the first call is checked for this. If the reply has only one call, stop before a second object.
    """
    calls: Calls = []
    while (yield from source.skip_space()) in ("{", "["):
        start = source.at
        yield from source.accept("[")
        yield from source.expect_spaced("{")
        yield from source.accept("{")
        for part in ('"name"', ":", '"'):
            yield from source.expect_spaced(part)
        yield from source.name(tools)
        yield from source.expect('"')
        source.at = start
        if calls and source.one_call:
            return calls
        calls += calls_in_json((yield from source.json()), tools, strictly=True)
    return calls or _no_call()


def _wrapped(close: str) -> _Reader:
    """Return a reader for calls in JSON up to a closing tag."""

    def read(source: _GrowingText, tools: Tools) -> _Read:
        calls = yield from _objects(source, tools)
        # the tag may be missing at the end of the reply, because some models do not write it
        if (yield from source.skip_space()) not in _ENDS:
            yield from source.expect(close)
        return calls

    return read


def _nothing_else(source: _GrowingText, tools: Tools) -> _Read:
    calls = yield from _objects(source, tools)
    return calls if (yield from source.skip_space()) in _ENDS else _no_call()


def _closed(close: str) -> _Reader:
    """Return a reader for calls in JSON. A closing tag may follow."""

    def read(source: _GrowingText, tools: Tools) -> _Read:
        calls = yield from _json(source, tools)
        yield from source.accept_spaced(close)
        return calls

    return read


def _tagged(source: _GrowingText, tools: Tools) -> _Read:
    """Read the text after <tool_call>: JSON, <function=...>, or a name and GLM's tags."""
    after = yield from source.skip_space()
    reader = _closed("</tool_call>") if after in ("{", "[") else _inner_function if after == "<" else _glm
    return (yield from reader(source, tools))


def _inner_function(source: _GrowingText, tools: Tools) -> _Read:
    yield from source.expect_spaced("<function=")
    return (yield from _function(source, tools))


def _function(source: _GrowingText, tools: Tools) -> _Read:
    name = yield from source.name(tools)
    yield from source.expect(">")
    tags = "<parameter=", (">",), "</parameter>", "</function>"
    arguments = yield from _parameters(source, tools[name], *tags, is_padded=True)
    yield from source.accept_spaced("</tool_call>", "</seed:tool_call>")
    return [(name, arguments)]


def _json_function(source: _GrowingText, tools: Tools) -> _Read:
    name = yield from source.name(tools)
    yield from source.expect(">")
    arguments = arguments_in_json((yield from source.json()))
    yield from source.accept_spaced("</function>")
    return [(name, arguments)]


def _parameters(
    source: _GrowingText,
    tool: Mapping[str, Any],
    start: str,
    middle: Sequence[str],
    stop: str,
    end: str,
    is_padded: bool = False,
) -> _Text:
    """Read parameters up to the tag `end`. Each is written as `start KEY middle VALUE stop`.

    Returns the parameters as the JSON text of an object.

    middle: tags, which may have white space between them. is_padded: True if there is a line break before and
    after each value.
    """
    arguments: dict[str, object] = {}
    while (yield from source.expect_spaced(start, end)) == start:
        key = yield from source.until(middle[0])
        for tag in middle[1:]:
            yield from source.expect_spaced(tag)
        value = yield from source.until(stop)
        if is_padded:
            value = value.removeprefix("\n").removesuffix("\n")
        arguments[key] = typed(value, key, tool)
    return dumped(arguments)


def _minimax(source: _GrowingText, tools: Tools) -> _Read:
    calls: Calls = []
    while not (calls and (yield from source.accept_spaced("</minimax:tool_call>"))):
        yield from source.expect_spaced('<invoke name="')
        name = yield from source.name(tools)
        yield from source.expect('">')
        tags = '<parameter name="', ('">',), "</parameter>", "</invoke>"
        calls.append((name, (yield from _parameters(source, tools[name], *tags))))
    return calls


def _glm(source: _GrowingText, tools: Tools) -> _Read:
    name = yield from source.name(tools)
    tags = "<arg_key>", ("</arg_key>", "<arg_value>"), "</arg_value>", "</tool_call>"
    return [(name, (yield from _parameters(source, tools[name], *tags)))]


def _mistral(source: _GrowingText, tools: Tools) -> _Read:
    if (yield from source.skip_space()) in ("[", "{"):
        return (yield from _json(source, tools))
    name = yield from source.name(tools)
    if (yield from source.expect("[CALL_ID]", "[ARGS]")) == "[CALL_ID]":
        yield from source.until("[ARGS]")
    return [(name, arguments_in_json((yield from source.json())))]


def _python(source: _GrowingText, tools: Tools) -> _Read:
    if (yield from source.skip_space()) != "[":
        _no_call()
    return calls_in_python((yield from source.until("<|tool_call_end|>")), tools)


def _gemma(source: _GrowingText, tools: Tools) -> _Read:
    yield from source.expect_spaced("call:")
    name = yield from source.name(tools)
    yield from source.expect("{")
    quote, end = '<|"|>', "<tool_call|>"
    arguments = "{" + (yield from source.until(end))
    while arguments.count(quote) % 2 and not (source.has_ended and source.at == len(source.text)):
        # the number of quotes is odd, so this end tag is inside a string: read up to the next end tag
        arguments += end + (yield from source.until(end))
    return [(name, arguments_in_json(json_of_quoted(arguments, quote)))]


def _harmony(source: _GrowingText, tools: Tools) -> _Read:
    """Read a message to a tool: its header and the arguments. `Splitter` reads all other headers.

    The reply header has the beginning of the first message's header. Therefore any tag may come first.
    """
    source.at = 0
    yield from source.accept("<|start|>")
    yield from source.accept("assistant")
    # the recipient is in the first or in the second part of the header
    name = ""
    if (yield from source.accept_spaced(_RECIPIENT)):
        name = yield from source.name(tools)
    yield from source.expect("<|channel|>")
    _, is_call, recipient = (yield from source.until("<|message|>")).partition(_RECIPIENT)
    if not source.text.endswith("<|message|>", 0, source.at):
        _no_call()
    if is_call:
        name = _AFTER_NAME.split(recipient, 1)[0]
    if name not in tools:
        _no_call()
    arguments = arguments_in_json((yield from source.json()))
    yield from source.accept("<|call|>")
    return [(name, arguments)]


_RECIPIENT = "to=functions."

_READERS: dict[str, dict[str, _Reader]] = {
    formats.XML.name: {"<function=": _function},
    formats.MISTRAL.name: {"[TOOL_CALLS]": _mistral},
    formats.MISTRAL_ARGS.name: {"[TOOL_CALLS]": _mistral},
    formats.GRANITE.name: {"<|tool_call|>": _json},
    formats.NEMOTRON.name: {"<TOOLCALL>": _closed("</TOOLCALL>")},
    formats.LLAMA.name: {"<|python_tag|>": _json},
    formats.LFM2.name: {"<|tool_call_start|>": _python},
    formats.FUNCTIONARY.name: {"<function=": _json_function},
    formats.SEED.name: {"<seed:tool_call>": _inner_function, "<function=": _function},
    formats.APRIEL.name: {"<tool_calls>": _closed("</tool_calls>")},
    formats.COHERE.name: {"<|START_ACTION|>": _closed("<|END_ACTION|>")},
    formats.MINIMAX.name: {"<minimax:tool_call>": _minimax},
    formats.GEMMA.name: {"<|tool_call>": _gemma},
    formats.HARMONY.name: dict.fromkeys(("<|start|>", "<|channel|>", _RECIPIENT), _harmony),
}
"""For each format, the reader of each opening tag. <tool_call>, which all formats have, is not listed."""
