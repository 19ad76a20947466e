"""Rules of tool calls: for a call that the model must write, or for each call that it begins."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvtool.llama.grammar.constraint import Vocabulary
from kvtool.llama.grammar.rewriting import CONSTRAINING
from kvtool.llama.grammar.rules import Rules, literal
from kvtool.llama.grammar.schema import Enforced, json_texts
from kvtool.serve.api.errors import ApiError
from kvtool.serve.api.output_format import enforced_at, remarks_of
from kvtool.serve.tools.formats import HERMES, LLAMA, Format, Parameters
from kvtool.serve.tools.values import alternatives, resolved, types_of

_ANY_OBJECT = {"type": "object"}
_TEXT_KEYWORDS = {"pattern", "format", "minLength", "maxLength", "enum", "const", "allOf"}
_PLAIN_OBJECT = {
    *("type", "properties", "required", "additionalProperties", "$defs", "definitions"),
    *("title", "description", "$schema", "$id"),
}


_PARTS = {"properties", "items", "prefixItems"}
_REFERENCE = re.compile(r'"\$ref": "(?!#/(?:\$defs|definitions)/)')
"""A reference that cannot be resolved, because it does not point to a definition.

The rules of a parameter are made only from the parameter's schema and the definitions.
"""


class _NoSyntax(Exception):
    """Raised if a format cannot express the values of a schema."""


class CallRules:
    """Writes the rules of a tool call, in a syntax that `Parser` reads.

    The arguments must fit the tool's schema. Some formats cannot express every schema: a format that writes
    texts without quotes cannot express a pattern for a text. In this case, the rules are for a call in
    Hermes's format.

    Rules have the ids of control tokens, because text in a rule never matches a control token.

    plain: text that begins an answer, for a format whose calls take its place; see `Format.end_token`.
    places: path of each tool's schema in the request, for errors and remarks.

    `remarks` lists keywords of the tools' schemas that are not enforced.
    """

    def __init__(self, vocabulary: Vocabulary, format: Format, plain: str, places: Sequence[str]) -> None:
        self._format, self._plain, self._places = format, plain, places
        ids = {tag: vocabulary.tokens_of(tag.encode()) for tag in (*HERMES.tags, *format.tags)}
        self._control = {
            tag: tokens[0]
            for tag, tokens in ids.items()
            if len(tokens) == 1 and tokens[0] in vocabulary.control
        }
        self._tags = re.compile("|".join(map(re.escape, self._control)) or "(?!)")
        self._rules: list[str] = []
        # names of the rules of calls, by format
        self._calls: dict[Format, list[str]] = {}
        # True to refuse strict tools whose schemas cannot be enforced
        self._is_strict = True
        # True to allow several calls in a list
        self._repeats = False
        self.remarks: list[str] = []

    def required_call(self, tools: Sequence[Mapping[str, Any]], name: str | None = None) -> Rules:
        """Return the rules of a call.

        Raises ApiError if a tool is strict and its schema cannot be enforced.

        tools: the result of `check_tools`. name: the tool that must be called, or None for any of the tools.
        """
        for n, tool in enumerate(tools):
            if name in (None, tool["function"]["name"]):
                self._add_call(f"t{n}", tool["function"], self._places[n])
        texts = [self._of_format(format, calls) for format, calls in self._calls.items()]
        return Rules(" | ".join(texts), tuple(self._rules))

    def begun_call(self, tools: Sequence[Mapping[str, Any]], *, one_call: bool) -> Rules:
        """Return the rules of calls that the model begins; their triggers are the tags that open calls.

        If a strict tool's schema cannot be enforced, a part of it is.
        """
        self._add_tag()
        self._is_strict, self._repeats = False, not one_call
        rules = self.required_call(tools)
        return rules._replace(triggers=tuple({_opening(format): None for format in self._calls}))

    def call_or(self, tools: Sequence[Mapping[str, Any]], answer: Rules) -> Rules:
        """Return rules that allow a call of one of the tools, or an answer. Raises ApiError.

        See `required_call`.
        """
        self._add_tag()
        call, answer = self.required_call(tools), self.answer(answer)
        return answer._replace(start=f"{call.start} | ({answer.start})", more=(*call.more, *answer.more))

    def _add_tag(self) -> None:
        """Require the tag that opens calls. Llama's is optional, but JSON without it may be an answer."""
        if self._format is LLAMA:
            self._format = replace(LLAMA, open=LLAMA.tags[0])

    def answer(self, rules: Rules) -> Rules:
        """Return the rules of an answer, with the text that begins it."""
        return rules._replace(start=f"{self._literal(self._plain)} ({rules.start})") if self._plain else rules

    def _of_format(self, format: Format, calls: Sequence[str]) -> str:
        """Return the expression of calls in a format, of which each has one of these rules."""
        name = self._add(f"call_{format.name.replace('-', '_')}", " | ".join(calls))
        more = f"({self._literal(format.between)} {name})*" if self._repeats and format.close else ""
        return f"{self._literal(format.open)} {name} {more} {self._literal(format.close)}"

    def _add_call(self, name: str, function: Mapping[str, Any], where: str) -> None:
        """Add the rule of a call of a tool, with this name. where: field with the schema."""
        is_strict = self._is_strict and bool(function.get("strict"))
        try:
            parameters = enforced_at(
                function["parameters"], where, strict=is_strict, drops_integers=not is_strict
            )
        except ApiError as error:
            if is_strict:
                raise
            self.remarks.append(error.message)
            parameters = Enforced(_ANY_OBJECT, [])
        self.remarks += remarks_of(parameters, where)
        n_before = len(self._rules)
        try:
            self._call(name, self._format, function["name"], parameters.schema)
        except _NoSyntax:
            del self._rules[n_before:]
            self._call(name, HERMES, function["name"], parameters.schema)

    def _call(self, name: str, format: Format, tool: str, schema: Mapping[str, Any]) -> None:
        """Add the rule of a call in a format, without the format's `open` and `close`."""
        syntax = format.parameters
        arguments = json_texts(schema) if syntax is None else self._parameters(name, syntax, schema)
        start = self._literal(format.start + tool + format.middle)
        self._add(name, f"{start} {arguments} {self._literal(format.end)}")
        self._calls.setdefault(format, []).append(name)

    def _add(self, name: str, expression: str) -> str:
        self._rules.append(f"{name}: {expression}")
        return name.partition("[")[0]

    def _parameters(self, name: str, syntax: Parameters, schema: Mapping[str, Any]) -> str:
        """Add rules for arguments, and return the first rule's name. Arguments have the schema's order."""
        names = schema.get("properties")
        if (
            not isinstance(names, Mapping)
            or not schema.keys() <= _PLAIN_OBJECT
            or _REFERENCE.search(json.dumps(schema))
        ):
            raise _NoSyntax
        properties = {key: part for key, part in names.items() if part is not False}
        required = schema.get("required", ())
        for n, (key, part) in enumerate(properties.items()):
            if not re.fullmatch(r"[\w.$-]+", key):
                raise _NoSyntax
            value = self._value(f"{name}_text{n}", syntax, part, schema)
            item = self._add(
                f"{name}_item{n}", f"{self._literal(syntax.start + key + syntax.middle)} {value}"
            )
            # rules "first" apply while the call has no argument; rules "next" begin with a separator
            for rule, before in (("first", ""), ("next", self._literal(syntax.between))):
                skip = "" if key in required else f" | {name}_{rule}{n + 1}"
                self._add(f"{name}_{rule}{n}", f"{before} {item} {name}_next{n + 1}{skip}")
        for rule in ("first", "next"):
            self._add(f"{name}_{rule}{len(properties)}", '""')
        return f"{name}_first0"

    def _value(self, name: str, syntax: Parameters, schema: Any, root: Mapping[str, Any]) -> str:
        """Return the expression that matches a value, followed by the text `syntax.end`.

        name: name for an additional rule, if the expression needs one.
        """
        known = {} if schema is True else resolved(schema, root)
        types = types_of(known, root)
        if not isinstance(known, Mapping) or (syntax.quote and not types):
            raise _NoSyntax
        is_quoted = syntax.quotes or (syntax.quote and not _has_strings(known, root))
        if not is_quoted and types <= {"string", "null"} and "enum" in known:
            return self._choices(known["enum"], syntax)
        if not is_quoted and _is_free_text(known, root) and (not syntax.quote or types <= {"string", "null"}):
            return self._free_text(name, syntax, "null" in types)
        if not is_quoted and (syntax.quote or "string" in types or not (types or known.keys() & _PARTS)):
            raise _NoSyntax
        definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
        whole = {**schema, **definitions} if isinstance(schema, Mapping) else {}
        return f"{json_texts(whole)} {self._literal(syntax.end)}"

    def _choices(self, values: Sequence[object], syntax: Parameters) -> str:
        texts = [syntax.written(value) for value in values]
        if not syntax.quote and any(syntax.tag in text for text in texts):
            raise _NoSyntax
        return f"({' | '.join(self._literal(text + syntax.end) for text in texts)})"

    def _free_text(self, name: str, syntax: Parameters, may_be_null: bool) -> str:
        """Return the expression of any text, including the quote or the tag that ends the text."""
        tag = syntax.quote or syntax.tag
        _, _, after = syntax.end.rpartition(tag) if not syntax.quote else ("", "", syntax.end)
        if tag in self._control:
            text = f"/(?s:.*)/ {self._literal(tag + after)}"
        else:
            self._add(f"{name}[suffix={literal(tag)}]", "/(?s:.*)/")
            text = f"{name} {self._literal(after)}"
        if not syntax.quote:
            return text
        null = f" | {self._literal('null' + syntax.end)}" if may_be_null else ""
        return f"({self._literal(syntax.quote)} {text}{null})"

    def _literal(self, text: str) -> str:
        """Return the expression of a literal text, or "" if the text is empty."""
        parts, at = [], 0
        for tag in self._tags.finditer(text):
            parts += [literal(text[at : tag.start()]), f"<[{self._control[tag[0]]}]>"]
            at = tag.end()
        return " ".join(part for part in (*parts, literal(text[at:])) if part != '""')


def _opening(format: Format) -> str:
    """Return the tag that opens a call, or a longer beginning of a call if the tag also opens other texts."""
    text = format.open + format.start
    return format.tags[0] if text.startswith(format.tags[0]) else text


def _has_strings(schema: Any, root: Mapping[str, Any]) -> bool:
    """True if a value that fits a schema may contain strings or objects. Names in objects are strings."""
    types = types_of(schema, root)
    if "array" in types and isinstance(schema, Mapping):
        types = types - {"array"} | (types_of(schema.get("items"), root) or {"string"})
    return not types or bool(types & {"string", "object", "array"})


def _is_free_text(schema: object, root: Mapping[str, Any]) -> bool:
    """True if a schema accepts every text that is written without quotes."""
    types = types_of(schema, root)
    if not isinstance(schema, Mapping) or types & {"object", "array"}:
        return False
    parts = [resolved(part, root) for part in alternatives(schema)]
    if any(isinstance(part, Mapping) and part.keys() & _TEXT_KEYWORDS for part in [schema, *parts]):
        return False
    return "string" in types or not schema.keys() & CONSTRAINING
