"""Translate grammars in GBNF, llama.cpp's notation, to llguidance's Lark.

llguidance's own converter is not used, because it has faults. It rejects a rule named `start`, names that
differ only in case, and names that begin with a digit. It misreads \\u escapes. It takes minutes for a few
thousand rules. It also makes each character of the first rule a lexeme, and so rejects texts that fit the
grammar.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NoReturn

from kvtool.errors import UsageError
from kvtool.llama.grammar.rules import Rules, literal, token_rule

MAX_CHARACTERS = 2**18
"""Maximum characters of a grammar."""

_PART = re.compile(
    r"""(?P<space>[ \t]+|\#[^\r\n]*)|(?P<line>[\r\n]+)|(?P<name>[A-Za-z0-9_-]+)(?P<defined>[ \t]*::=)?"""
    r"""|"(?P<text>(?:\\.|[^"\\])*)"|\[(?P<set>\^?(?:\\.|[^\]\\])*)\]|(?P<token>!?<[^>\s]+>)"""
    r"""|(?P<times>[*+?]|\{[ ]*(?P<least>\d+)[ ]*(?:,[ ]*(?P<most>\d*)[ ]*)?\})|(?P<sign>[.()|])""",
    re.S,
)
_CHAR = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([nrt\\\"\[\]-]))|([^\\])", re.S
)
_MAX_DIGITS = 10
"""Maximum digits of a number of repetitions. llguidance takes 32-bit numbers."""

_NAMED = {"n": "\n", "r": "\r", "t": "\t"}


@dataclass
class _Rule:
    """A rule, or a group in parentheses, which becomes an unnamed rule.

    Attributes
    ----------
    is_defined
        False for a rule that other rules refer to, until its definition is read.
    options
        Alternatives. Each is a list of parts. A part is Lark text, or the number of a rule.
    has_token
        True if the rule refers to a token of the model. Such a token cannot be part of a lexeme.
    """

    is_defined: bool = True
    options: list[list[str | int]] = field(default_factory=lambda: [[]])
    has_token: bool = False


def rules_of(grammar: str) -> Rules:
    """Translate a grammar in GBNF. Raises UsageError if it does not parse."""
    try:
        grammar.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"the grammar is not Unicode: character {error.start} is half of a pair") from None
    if not grammar.strip():
        raise UsageError("the grammar is empty")
    if len(grammar) > MAX_CHARACTERS:
        raise UsageError(f"the grammar has {len(grammar):,} characters; at most {MAX_CHARACTERS:,} are taken")
    return _Parser(grammar).rules()


class _Parser:
    """Parser of one grammar. Rules are numbered in the order in which their names appear."""

    def __init__(self, grammar: str) -> None:
        self._grammar, self._at = grammar, 0
        self._all: list[_Rule] = []
        self._named: dict[str, int] = {}
        # numbers of the tokens that the grammar names by their text
        self._tokens: dict[str, int] = {}
        # numbers of the current rule and of its open groups
        self._open: list[int] = []
        # True if the current rule may continue on the next line
        self._continues = True
        while self._at < len(grammar):
            part = _PART.match(grammar, self._at)
            if not part:
                self._fail("unexpected text")
            self._read(part)
            self._at = part.end()
        if len(self._open) > 1:
            self._fail("expecting )")

    def _fail(self, what: str) -> NoReturn:
        here = (self._grammar[self._at :].splitlines() or [""])[0].strip()[:40]
        place = f"before `{here}`" if here else "at its end"
        line = self._grammar.count("\n", 0, self._at) + 1
        raise UsageError(f"the grammar does not parse: {what} in line {line}, {place}")

    def _read(self, part: re.Match[str]) -> None:
        if part["space"]:
            return
        if part["line"]:
            if len(self._open) == 1 and not self._continues:
                self._open = []
            return
        self._continues = bool(part["defined"]) or part["sign"] == "|"
        if part["defined"]:
            self._define(part["name"])
        elif not self._open:
            self._fail("expecting a rule's name and ::=")
        elif part["sign"] == "(":
            group = self._new()
            self._add(group)
            self._open.append(group)
        elif part["sign"] == ")":
            if len(self._open) < 2:
                self._fail("unexpected )")
            self._open.pop()
        elif part["sign"] == "|":
            self._rule.options.append([])
        elif part["times"]:
            if max(len(part["least"] or ""), len(part["most"] or "")) > _MAX_DIGITS:
                self._fail(f"a number of more than {_MAX_DIGITS} digits")
            most = part["least"] if part["most"] is None else part["most"]
            if most and int(most) < int(part["least"]):
                self._fail(f"{part['times']} is empty")
            # llguidance refuses a repetition of at most 0 times
            self._repeat("".join(part["times"].split()), is_empty=bool(most) and int(most) == 0)
        elif part["name"]:
            self._add(self._number(part["name"]))
        else:
            self._rule.has_token |= bool(part["token"])
            self._add(self._lark(part))

    def _define(self, name: str) -> None:
        if len(self._open) > 1:
            self._fail("expecting )")
        number = self._number(name)
        # if a name is defined twice, use the last definition, as llama.cpp does
        self._all[number] = _Rule()
        self._open = [number]

    def _number(self, name: str) -> int:
        if name not in self._named:
            self._named[name] = self._new(is_defined=False)
        return self._named[name]

    def _new(self, *, is_defined: bool = True) -> int:
        self._all.append(_Rule(is_defined))
        return len(self._all) - 1

    @property
    def _rule(self) -> _Rule:
        return self._all[self._open[-1]]

    def _add(self, part: str | int) -> None:
        self._rule.options[-1].append(part)

    def _repeat(self, times: str, *, is_empty: bool) -> None:
        """Replace the last part by a new rule that repeats it, so that a repeated lexeme stays one lexeme.

        is_empty: True to replace it by the empty text.
        """
        option = self._rule.options[-1]
        if not option:
            self._fail(f"nothing stands before {times}")
        number = self._new()
        last = option.pop()
        self._all[number].options = [[] if is_empty else [last, times]]
        self._all[number].has_token = isinstance(last, str) and not last.startswith(('"', "/"))
        option.append(number)

    def _lark(self, part: re.Match[str]) -> str:
        """Translate a literal, a character set or a token."""
        if part["token"]:
            token = part["token"]
            if token.startswith(("<[", "!<[")):
                return token.replace("!<[", "<[^")
            return token_rule(self._tokens.setdefault(token, len(self._tokens)))
        if part["sign"]:
            return "/(?s:.)/"
        if part["set"] is None:
            return literal("".join(char for char, _ in self._chars(part["text"])))
        is_negated = part["set"].startswith("^")
        chars = self._set(part["set"][is_negated:])
        if not chars:
            self._fail("an empty set of characters")
        return f"/[{'^' * is_negated}{chars}]/"

    def _set(self, text: str) -> str:
        """Translate the inside of a character set to the syntax of regular expressions."""
        chars, expression, n = [*self._chars(text)], "", 0
        while n < len(chars):
            # a hyphen makes a range unless it is escaped, or at the start or end of the set
            is_range = n + 2 < len(chars) and chars[n + 1] == ("-", False)
            first, last = chars[n][0], chars[n + 2 * is_range][0]
            if last < first:
                self._fail(f"the range {first}-{last} is empty")
            expression += f"\\u{{{ord(first):x}}}-\\u{{{ord(last):x}}}"
            n += 3 if is_range else 1
        return expression

    def _chars(self, text: str) -> Iterator[tuple[str, bool]]:
        """Yield (character, is escaped) for each character of a literal or a set."""
        at = 0
        while at < len(text):
            char = _CHAR.match(text, at)
            if not char:
                self._fail(f"unknown escape {text[at : at + 2]}")
            code = int(char[1] or char[2] or char[3] or "0", 16)
            if code > 0x10FFFF or 0xD800 <= code < 0xE000:
                self._fail(f"{char[0]} is no character")
            yield _NAMED.get(char[4], char[4]) or char[5] or chr(code), not char[5]
            at = char.end()

    def rules(self) -> Rules:
        """Return the translated grammar. Raises UsageError if a rule is missing."""
        missing = [name for name, number in self._named.items() if not self._all[number].is_defined]
        if missing:
            raise UsageError(f"the grammar does not parse: no rule defines {missing[0]}")
        if "root" not in self._named:
            raise UsageError("the grammar does not parse: it has no rule named root")
        lexemes = self._lexemes()

        def written(part: str | int) -> str:
            return part if isinstance(part, str) else f"R{part}" if part in lexemes else f"r{part}"

        lines = []
        for number, rule in enumerate(self._all):
            options = ("".join(f" {written(part)}" for part in option) or ' ""' for option in rule.options)
            lines.append(f"{written(number)}:{' |'.join(options)}")
        return Rules(written(self._named["root"]), tuple(lines), tokens=tuple(self._tokens))

    def _lexemes(self) -> set[int]:
        """Return the numbers of the rules that can be lexemes, because they are regular expressions.

        Such a rule refers to no token of the model, and not to itself, directly or through other rules.
        """
        users: list[list[int]] = [[] for _ in self._all]
        n_open = [0] * len(self._all)
        for number, rule in enumerate(self._all):
            inside = {part for option in rule.options for part in option if isinstance(part, int)}
            n_open[number] = len(inside) + rule.has_token
            for part in inside:
                users[part].append(number)
        lexemes = [number for number, n in enumerate(n_open) if not n]
        # the list grows while the loop reads it
        for number in lexemes:
            for user in users[number]:
                n_open[user] -= 1
                if not n_open[user]:
                    lexemes.append(user)
        return set(lexemes)
