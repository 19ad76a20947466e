"""The syntaxes in which models write calls of tools.

A format is a table of texts. A reply's calls are

    open  start NAME middle ARGUMENTS end  between  start NAME ...  close

where the arguments are one JSON object, or one text after another as `Parameters` has it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvtool.chats.template import Template
from kvtool.llama.model import Model


class Parameters(NamedTuple):
    """Arguments that are not one JSON object: start KEY middle VALUE end, with `between` between two.

    quotes: whether strings are quoted; where they are not, other values are still JSON. mark: what stands
    around strings instead of a quote; names of objects then have nothing around them.
    """

    start: str
    middle: str
    end: str
    between: str = ""
    quotes: bool = False
    mark: str = ""

    def written(self, value: object) -> str:
        """The text of a value."""
        if isinstance(value, str) and not self.quotes:
            return f"{self.mark}{value}{self.mark}"
        if self.mark and isinstance(value, Mapping):
            return "{" + ",".join(f"{key}:{self.written(part)}" for key, part in value.items()) + "}"
        if self.mark and isinstance(value, list):
            return "[" + ",".join(map(self.written, value)) + "]"
        return json.dumps(value, ensure_ascii=False)

    @property
    def tag(self) -> str:
        """What ends a value that is not quoted."""
        return self.end.strip()


@dataclass(frozen=True, slots=True)
class Format:
    """A syntax of calls.

    Attributes
    ----------
    name
        What it is called here.
    tags
        What may open a call, and its other marks; a vocabulary may have a control token for each.
    open, start, middle, end, between, close
        What stands around and between calls, as above.
    parameters
        How arguments are written; None: as one JSON object.
    holds_results
        Whether templates show results in the reply that has the calls.
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

    @property
    def is_json(self) -> bool:
        """Whether a call is a JSON object with its name and arguments."""
        return self.start.endswith('"') and '{"' in self.start

    @classmethod
    def native(cls, template: Template) -> Format | None:
        """The syntax that a chat template asks for, by what its source names.

        None where the template shows no tools, or asks for a syntax that is not known here: then render it
        without tools, and ask for Hermes by `tools_text`.
        """
        source = template.source
        if not template.has_tools:
            return None
        return next((format for signs, format in _SIGNS if any(sign in source for sign in signs)), None)

    @classmethod
    def of(cls, template: Template) -> Format:
        """The syntax in which a model writes calls: the native one, or else Hermes."""
        return cls.native(template) or HERMES

    def written(self, calls: Sequence[tuple[str, object]]) -> str:
        """The text of calls (name, arguments), for templates that leave calls out.

        Arguments that are no object stand in Hermes syntax as they are.
        """
        own = self.parameters
        if own and not all(isinstance(arguments, Mapping) for _, arguments in calls):
            return HERMES.written(calls)
        parts = [self.start + name + self.middle + self._written(of) + self.end for name, of in calls]
        return self.open + self.between.join(parts) + self.close

    def _written(self, arguments: object) -> str:
        own = self.parameters
        if own is None or not isinstance(arguments, Mapping):
            return json.dumps(arguments, ensure_ascii=False)
        parts = (
            own.start + key + own.middle + own.written(value) + own.end for key, value in arguments.items()
        )
        return own.between.join(parts)


def shown_tokens(model: Model, format: Format) -> frozenset[int]:
    """The tokens whose text the parser needs, though they may be control tokens.

    A writer must print these, with Model.piece(token, special=True), and no other control token.
    """
    pieces = [model.tokenize(tag, special=True).tolist() for tag in (*HERMES.tags, *format.tags)]
    return frozenset(piece[0] for piece in pieces if len(piece) == 1)


HERMES = Format(
    "hermes",
    ("<tool_call>", "</tool_call>"),
    *('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"),
    between="\n",
)
"""One JSON object a call, between tags: Hermes, Qwen, Granite 4, Falcon H1. Every parser reads it."""

XML = Format(
    "xml",
    ("<tool_call>", "</tool_call>", "<function="),
    *("<tool_call>\n<function=", ">\n", "</function>\n</tool_call>"),
    between="\n",
    parameters=Parameters("<parameter=", ">\n", "\n</parameter>\n"),
)
"""Qwen3-Coder, Qwen3.5, Nemotron 3. A value loses one line break at each side."""

GLM = Format(
    "glm",
    ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *("<tool_call>", "\n", "</tool_call>"),
    between="\n",
    parameters=Parameters("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
)


def _json_list(name: str, *tags: str) -> Format:
    """Calls in a JSON list behind a tag, and before another if there are two."""
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

LLAMA = Format("llama", ("<|python_tag|>",), '{"name": "', '", "parameters": ', "}", between="; ")
"""Llama 3: a reply that starts with a call's JSON, or has it after the tag."""

LFM2 = Format(
    "lfm2",
    ("<|tool_call_start|>", "<|tool_call_end|>"),
    *("", "(", ")"),
    open="<|tool_call_start|>[",
    between=", ",
    close="]<|tool_call_end|>",
    parameters=Parameters("", "=", "", ", ", quotes=True),
)
"""Calls as in Python; values may be Python's or JSON's."""

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
    parameters=Parameters("", ":", "", ",", mark='<|"|>'),
    holds_results=True,
)
"""Gemma 4. Its results stand in the reply, behind the calls."""

# the first that fits: a template may also name the tags of another format
_SIGNS: tuple[tuple[tuple[str, ...], Format | None], ...] = (
    (("<|tool_call>call:",), GEMMA),
    (("<seed:tool_call>",), SEED),
    (("<tool_calls>[",), APRIEL),
    (("<|START_ACTION|>",), COHERE),
    (("<minimax:tool_call>",), MINIMAX),
    # formats that kvtool does not know, though their templates also name tags below
    (("<invoke", "<tool_calls>\\n{"), None),
    (("<|tool_call_start|>", "<|tool_list_start|>", "List of tools: ["), LFM2),
    (("[ARGS]",), MISTRAL_ARGS),
    (("[TOOL_CALLS]",), MISTRAL),
    (("<arg_key>",), GLM),
    (("<parameter=",), XML),
    (("<tool_call>",), HERMES),
    (("<|tool_call|>",), GRANITE),
    (("<TOOLCALL>",), NEMOTRON),
    (("<|python_tag|>", '{"name": function name, "parameters": '), LLAMA),
)
"""What a template's source names, and the format that this means."""
