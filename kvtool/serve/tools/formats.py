"""The syntaxes in which models write tool calls.

A format is a table of texts. In a reply, calls are written as

    open  start NAME middle ARGUMENTS end  between  start NAME ...  close

The arguments are one JSON object, or a text for each argument. See `Parameters`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvtool.chats.template import Template
from kvtool.llama.loaded.model import Model


class Parameters(NamedTuple):
    """The syntax of arguments that are not one JSON object.

    The arguments are written as: start KEY middle VALUE end between start KEY ...

    Attributes
    ----------
    quotes
        True if strings are written as in JSON. Values other than strings are always JSON.
    quote
        Text that is written before and after a string. Names in objects are then written without quotes.
    """

    start: str
    middle: str
    end: str
    between: str = ""
    quotes: bool = False
    quote: str = ""

    def written(self, value: object) -> str:
        """Return the text of a value."""
        if isinstance(value, str) and not self.quotes:
            return f"{self.quote}{value}{self.quote}"
        if self.quote and isinstance(value, Mapping):
            return "{" + ",".join(f"{key}:{self.written(part)}" for key, part in value.items()) + "}"
        if self.quote and isinstance(value, list):
            return "[" + ",".join(map(self.written, value)) + "]"
        return json.dumps(value, ensure_ascii=False)

    @property
    def tag(self) -> str:
        """The text `end` without white space. This tag ends a value that has no quotes."""
        return self.end.strip()


@dataclass(frozen=True, slots=True)
class Format:
    """A syntax of tool calls. The texts around and between calls are explained at the top of this file.

    Attributes
    ----------
    tags
        Texts that may open a call, and other tags in a call. A vocabulary may have control tokens for them.
    parameters
        Syntax of arguments. None if they are one JSON object.
    holds_results
        True if templates show the results of calls inside the reply that has the calls.
    shows_one_call
        True if templates show only one call of a reply.
    end_token
        End-of-generation token that ends a call and the reply. After a thought, such a call takes the place
        of `Tags.plain` and the answer. "" for formats in which calls are in the answer.
    """

    name: str
    tags: tuple[str, ...]
    start: str
    middle: str
    end: str
    open: str = ""
    between: str = ""
    close: str = ""
    parameters: Parameters | None = None
    holds_results: bool = False
    shows_one_call: bool = False
    end_token: str = ""

    @property
    def is_json(self) -> bool:
        """True if a call is a JSON object with its name and arguments."""
        return self.start.endswith('"') and '{"' in self.start

    @property
    def opening(self) -> str:
        """Text with which calls begin. "" if it begins with no tag, so that other text may begin like it."""
        text = self.open + self.start
        return text if text.startswith(self.tags) else ""

    @classmethod
    def native(cls, template: Template) -> Format | None:
        """Return the format in which a chat template tells the model to write calls.

        The format is recognized by texts in the template's source. None if the template shows no tools, or if
        the format is unknown. In these cases the template is rendered without tools, and `tools_text` asks
        for Hermes's format.
        """
        source = template.source
        if not template.has_tools:
            return None
        return next((format for signs, format in _SIGNS if any(sign in source for sign in signs)), None)

    @classmethod
    def of(cls, template: Template) -> Format:
        """Return the format in which a model writes calls: the native format, or else Hermes's format."""
        return cls.native(template) or HERMES

    def written(self, calls: Sequence[tuple[str, object]]) -> str:
        """Return the text of calls, for templates that leave calls out. calls: pairs (name, arguments).

        If a format cannot write arguments that are not an object, all calls are written in Hermes's format.
        """
        if self.parameters and not all(isinstance(arguments, Mapping) for _, arguments in calls):
            return HERMES.written(calls)
        parts = [
            self.start + name + self.middle + self._written(arguments) + self.end for name, arguments in calls
        ]
        return self.open + self.between.join(parts) + self.close

    def _written(self, arguments: object) -> str:
        syntax = self.parameters
        if syntax is None or not isinstance(arguments, Mapping):
            return json.dumps(arguments, ensure_ascii=False)
        parts = (
            syntax.start + key + syntax.middle + syntax.written(value) + syntax.end
            for key, value in arguments.items()
        )
        return syntax.between.join(parts)


def shown_tokens(model: Model, format: Format) -> frozenset[int]:
    """Return the ids of a format's tags that are single tokens.

    The text of a reply includes these tokens even if they are control tokens, because `Parser` needs them.
    """
    tags = [model.tokenize(tag, special=True).tolist() for tag in (*HERMES.tags, *format.tags)]
    return frozenset(tokens[0] for tokens in tags if len(tokens) == 1)


HERMES = Format(
    "hermes",
    ("<tool_call>", "</tool_call>"),
    *('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"),
    between="\n",
)
"""Format of Hermes, Qwen, Granite 4 and Falcon H1: each call is a JSON object between tags."""

XML = Format(
    "xml",
    ("<tool_call>", "</tool_call>", "<function="),
    *("<tool_call>\n<function=", ">\n", "</function>\n</tool_call>"),
    between="\n",
    parameters=Parameters("<parameter=", ">\n", "\n</parameter>\n"),
)
"""Qwen3-Coder, Qwen3.5, Nemotron 3. The line breaks directly before and after a value do not belong to it."""

GLM = Format(
    "glm",
    ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *("<tool_call>", "\n", "</tool_call>"),
    between="\n",
    parameters=Parameters("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
)


def _json_list(name: str, *tags: str) -> Format:
    """Return a format for JSON lists of calls. tags: the opening tag, and the closing tag if there is one."""
    start, end = (*tags, "")[:2]
    json = '{"name": "', '", "arguments": ', "}"
    return Format(name, tags, *json, open=f"{start}[", between=", ", close=f"]{end}")


MISTRAL = _json_list("mistral", "[TOOL_CALLS]")
"""Mistral 7B v0.3, Nemo."""

MISTRAL_ARGS = Format("mistral-args", ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"), "[TOOL_CALLS]", "[ARGS]", "")
"""Mistral's newer models, such as Ministral 3."""

GRANITE = _json_list("granite", "<|tool_call|>")
"""Granite 3."""

NEMOTRON = _json_list("nemotron", "<TOOLCALL>", "</TOOLCALL>")
"""Nemotron Nano 2."""

LLAMA = Format(
    "llama",
    ("<|python_tag|>",),
    *('{"name": "', '", "parameters": ', "}"),
    between="; ",
    shows_one_call=True,
)
"""Llama 3. The JSON of a call is at the start of the reply, or it follows the tag."""

FUNCTIONARY = Format("functionary", ("<function=", "</function>"), "<function=", ">", "</function>")
"""Functionary 3.1. The arguments between the tags are JSON."""

LFM2 = Format(
    "lfm2",
    ("<|tool_call_start|>", "<|tool_call_end|>"),
    *("", "(", ")"),
    open="<|tool_call_start|>[",
    between=", ",
    close="]<|tool_call_end|>",
    parameters=Parameters("", "=", "", ", ", quotes=True),
)
"""LFM2. Calls are written as in Python. Values may have the syntax of Python or of JSON."""

SEED = Format(
    "seed",
    ("<seed:tool_call>", "</seed:tool_call>", "<function="),
    *("<seed:tool_call>\n<function=", ">\n", "</function>\n</seed:tool_call>"),
    between="\n",
    parameters=Parameters("<parameter=", ">", "</parameter>\n"),
)
"""Seed-OSS."""

APRIEL = _json_list("apriel", "<tool_calls>", "</tool_calls>")

COHERE = Format(
    "cohere",
    ("<|START_ACTION|>", "<|END_ACTION|>"),
    *('{"tool_call_id": "0", "tool_name": "', '", "parameters": ', "}"),
    open="<|START_ACTION|>[\n    ",
    between=",\n    ",
    close="\n]<|END_ACTION|>",
)
"""Command R7B and A, North."""

MINIMAX = Format(
    "minimax",
    ("<minimax:tool_call>", "</minimax:tool_call>"),
    *('<invoke name="', '">\n', "</invoke>\n"),
    open="<minimax:tool_call>\n",
    close="</minimax:tool_call>",
    parameters=Parameters('<parameter name="', '">', "</parameter>\n"),
)
"""MiniMax M2."""

GEMMA = Format(
    "gemma",
    ("<|tool_call>", "<tool_call|>", '<|"|>'),
    *("<|tool_call>call:", "{", "}<tool_call|>"),
    parameters=Parameters("", ":", "", ",", quote='<|"|>'),
    holds_results=True,
)
"""Gemma 4. The results of calls are in the reply, after the calls."""

HARMONY = Format(
    "harmony",
    ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|call|>", "<|end|>"),
    *("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", ""),
    between="<|call|><|start|>assistant",
    shows_one_call=True,
    end_token="<|call|>",
)
"""gpt-oss. A reply has several messages. Each has a header, and the header of a call names the tool."""

# the first match is used; the order matters, because a template may also name the tags of another format
_SIGNS: tuple[tuple[tuple[str, ...], Format | None], ...] = (
    (("<|tool_call>call:",), GEMMA),
    (("<|channel|>commentary",), HARMONY),
    (("<seed:tool_call>",), SEED),
    (("<tool_calls>[",), APRIEL),
    (("<|START_ACTION|>",), COHERE),
    (("<minimax:tool_call>",), MINIMAX),
    # kvtool does not know the format of templates with one of these two texts. These templates also have
    # texts of the entries below, so this entry must come before them
    (("<invoke", "<tool_calls>\\n{"), None),
    (("<|tool_call_start|>", "<|tool_list_start|>", "List of tools: ["), LFM2),
    (("[ARGS]",), MISTRAL_ARGS),
    (("[TOOL_CALLS]",), MISTRAL),
    (("<arg_key>",), GLM),
    (("<parameter=",), XML),
    (("<tool_call>",), HERMES),
    (("<|tool_call|>",), GRANITE),
    (("<TOOLCALL>",), NEMOTRON),
    # this entry must come after XML's, whose templates have the same text
    (("<function=example_function_name>",), FUNCTIONARY),
    (("<|python_tag|>", '{"name": function name, "parameters": '), LLAMA),
)
"""Pairs (texts, format). A template has the format if one of the texts is in its source.

The format is None if kvtool does not know it.
"""
