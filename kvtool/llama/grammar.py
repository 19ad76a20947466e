"""llama.cpp's own grammars (GBNF), and grammars from JSON schemas."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kvtool.errors import UsageError
from kvtool.llama.bindings import module
from kvtool.llama.candidates import apply, candidates
from kvtool.llama.crash import crash_means
from kvtool.llama.library import api
from kvtool.llama.log import because, log_tail
from kvtool.llama.model import Model

# the package's own lets line breaks into strings, which JSON does not
_CHAR = r'[^"\\\x7F\x00-\x1F] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4})'

_HELD = {
    *("type", "properties", "required", "additionalProperties", "enum", "const", "anyOf", "oneOf", "allOf"),
    *("items", "prefixItems", "minItems", "maxItems", "minLength", "maxLength", "pattern", "format", "$ref"),
}
_LENGTHS = ("minItems", "maxItems", "minLength", "maxLength")
SAYS_WHAT = _HELD - {"required"}
"""Keywords that say which values fit a JSON schema."""

MOST_REPEATED = 1000
"""The most repetitions that llama.cpp's grammars hold in reasonable memory."""

_MOST_NESTED = 10_000
"""The most that repetitions inside repetitions may multiply to: each step takes as long."""

_ANY = {"type": ["object", "array", "string", "number", "boolean", "null"]}
_REMARKS = {
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
    *("$schema", "$id", "$comment", "$defs", "definitions"),
}
_OF_NAMES = ("properties", "$defs", "definitions")
"""Keywords whose value has a schema for each name."""


def schema_grammar(schema: str) -> str:
    """The grammar of the JSON texts that fit a JSON schema, by llama-cpp-python's converter.

    Maximum lengths beyond `MOST_REPEATED` are not held. Raises UsageError for a text that is not JSON, or not
    a schema that the converter knows, and for minimum lengths and repetitions in patterns beyond.
    """
    if TYPE_CHECKING:
        from kvtool_llama import llama_grammar as package
    else:
        package = module("llama_grammar")

    class Converter(package.SchemaConverter):
        """With mistakes mended: texts that were not JSON, and rules of two things under one name."""

        def _format_literal(self, literal: str) -> str:
            text = json.dumps(json.loads(literal), ensure_ascii=False)
            escaped = text.replace("\\", "\\\\").replace('"', '\\"')
            return f'"{escaped}"'

        def _add_primitive(self, name: str, rule: Any) -> Any:
            if rule is package.PRIMITIVE_RULES["char"]:
                rule = package.BuiltinRule(_CHAR)
            return super()._add_primitive(name, rule)

        def _resolve_ref(self, ref: str) -> Any:
            # a definition may have the name of a property, or of another definition elsewhere
            name = f"definition-{list(self._refs).index(ref)}-"
            if name not in self._rules and ref not in self._refs_being_resolved:
                self._refs_being_resolved.add(ref)
                name = super().visit(self._refs[ref], name)  # type: ignore[no-untyped-call]
                self._refs_being_resolved.remove(ref)
            return name

    try:
        parsed = json.loads(schema)
        if not isinstance(parsed, dict):
            raise UsageError(f"the JSON schema must be an object {{...}}, got {schema.strip()[:40]}")
        make: Any = Converter
        converter = make(prop_order={}, allow_fetch=False, dotall=False, raw_pattern=False)
        converter.visit(converter.resolve_refs(_mended(parsed), "stdin"), "")
        grammar: str = converter.format_grammar()
        grammar.encode()
    except json.JSONDecodeError as error:
        raise UsageError(f"the JSON schema is not JSON: {error}") from None
    except RecursionError:
        raise UsageError("the JSON schema is nested too deeply") from None
    except (AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
        # the converter says it in these ways
        why = " ".join(str(error).split())[:200] or type(error).__name__
        raise UsageError(f"the JSON schema cannot be turned into a grammar: {why}") from None
    return grammar


def _mended(schema: Any) -> Any:
    """The schema with what the converter does not know said in other words.

    A schema that says nothing is any value; one of several types, or with types and an enum, keeps the rest
    of what it says; no length is too great.
    """
    if schema is True:
        return dict(_ANY)
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _OF_NAMES and isinstance(value, dict):
            found[key] = {name: _mended(part) for name, part in value.items()}
        elif key in ("anyOf", "oneOf", "allOf", "prefixItems") and isinstance(value, list):
            found[key] = [_mended(part) for part in value]
        elif key == "items" or (key == "additionalProperties" and isinstance(value, dict)):
            found[key] = _mended(value)
        elif key not in _LENGTHS:
            found[key] = value
        elif (n := _length(key, value)) <= MOST_REPEATED:
            found[key] = n
    if isinstance(found.get("pattern"), str):
        _check_pattern(found["pattern"])
    types = found.get("type")
    if "enum" in found or "const" in found:
        found.pop("type", None)
    elif isinstance(types, list):
        rest = {key: value for key, value in found.items() if key != "type"}
        return {"anyOf": [{**rest, "type": kind} for kind in types]}
    return found if found.keys() & SAYS_WHAT else {**found, **_ANY}


def _length(key: str, value: object) -> int:
    number = value if isinstance(value, (int, float)) and not isinstance(value, bool) else -1
    if not 0 <= number < inf or number != int(number):
        raise UsageError(f"{key} in the JSON schema must be a whole number, 0 or more, got {value!r:.40}")
    if number > MOST_REPEATED and key.startswith("min"):
        raise UsageError(f"{key} in the JSON schema must be at most {MOST_REPEATED}, got {number}")
    return int(number)


def _check_pattern(pattern: str) -> None:
    """Raises UsageError for repetitions that take llama.cpp too much memory or time."""
    groups: list[int] = []
    most = last = 1
    for part in _PATTERN.finditer(pattern):
        counts = [int(count) for count in part.groups() if count]
        if counts:
            last *= max(counts)
            most = max(most, last)
            if max(counts) > MOST_REPEATED or most > _MOST_NESTED:
                raise UsageError(f"a pattern in the JSON schema repeats too much: {part[0][:40]}")
        elif part[0] == "(":
            groups.append(most)
            most = 1
        elif part[0] == ")" and groups:
            last, most = most, max(most, groups.pop())
        else:
            last = 1


_PATTERN = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|\{(\d*),?(\d*)\}|.", re.S)


def not_held(schema: str) -> list[str]:
    """The keywords of a JSON schema that its grammar does not hold a text to, sorted."""
    found: set[str] = set()

    def visit(part: object) -> None:
        if isinstance(part, list):
            for each in part:
                visit(each)
        elif isinstance(part, dict):
            found.update(part.keys() - _HELD - _REMARKS)
            found.update(name for name in ("maxItems", "maxLength") if part.get(name, 0) > MOST_REPEATED)
            for name, value in part.items():
                if name in _OF_NAMES and isinstance(value, dict):
                    visit(list(value.values()))
                elif name not in ("enum", "const", "default", "examples"):
                    visit(value)

    visit(json.loads(schema))
    return sorted(found)


class Constraint(Protocol):
    """What tells which tokens may follow a text."""

    def take(self, token: int) -> bool:
        """Goes on by this token if it fits, and returns whether it does."""

    def fitting(self) -> np.ndarray:
        """b1[n_vocab]: the tokens that fit."""

    def close(self) -> None:
        """Frees it."""


class Grammar(Constraint):
    """A grammar in GBNF, at the start of a text. Raises UsageError for one that does not parse."""

    def __init__(self, model: Model, grammar: str) -> None:
        self._tokens = np.arange(model.n_vocab, dtype=np.int32)
        self._sampler = grammar_sampler(model, grammar)

    def take(self, token: int) -> bool:
        if not self._fits(self._tokens[token : token + 1])[0]:
            return False
        api.llama_sampler_accept(self._sampler, token)
        return True

    def fitting(self) -> np.ndarray:
        return self._fits(self._tokens)

    def _fits(self, tokens: np.ndarray) -> np.ndarray:
        found = candidates(tokens, np.zeros(len(tokens), np.float32))
        apply(self._sampler, found)
        return np.asarray(found["logit"] == 0)

    def close(self) -> None:
        if self._sampler:
            api.llama_sampler_free(self._sampler)
        self._sampler = None


def grammar_sampler(model: Model, grammar: str) -> Any:
    """llama.cpp's sampler of a grammar at its start. Raises UsageError for one that does not parse."""
    if not grammar.strip():
        # llama.cpp would take it for none
        raise UsageError("the grammar is empty")
    log_tail.clear()
    with crash_means(UsageError("llama.cpp has crashed on the grammar; simplify it")), _stderr() as said:
        sampler = api.llama_sampler_init_grammar(model.vocab, grammar.encode(), b"root")
    if not sampler:
        raise UsageError(f"the grammar does not parse{_why(grammar, ''.join(said))}")
    return sampler


def _why(grammar: str, said: str) -> str:
    """The reason, for the end of a message. said: what llama.cpp wrote to stderr."""
    _, found, rest = said.partition("error parsing grammar: ")
    if not found:
        return because()
    # it says where by the rest of the grammar, and then prints the whole
    reason = rest.removesuffix(f"\n\n{grammar}\n")
    what, at, left = reason.partition(" at ")
    if not at or not grammar.endswith(left):
        return f": {reason.splitlines()[0][:200]}"
    before = grammar[: len(grammar) - len(left)]
    here = (left.splitlines() or [""])[0].strip()[:40]
    place = f"before `{here}`" if here else "at its end"
    return f": {what} in line {len(before.splitlines()) or 1}, {place}"


@contextmanager
def _stderr() -> Iterator[list[str]]:
    """What C writes to stderr inside the block, in a list after it: the parser says why in no other way."""
    said: list[str] = []
    try:
        own = os.dup(2)
    except OSError:
        # closed
        yield said
        return
    try:
        with tempfile.TemporaryFile() as file:
            os.dup2(file.fileno(), 2)
            try:
                yield said
            finally:
                os.dup2(own, 2)
                file.seek(0)
                said.append(file.read().decode("utf-8", "replace"))
    finally:
        os.close(own)
