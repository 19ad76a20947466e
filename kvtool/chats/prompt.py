"""Prompts: a model's chat template, its BOS token, and the pinned prefix of a prompt."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import accumulate, takewhile
from typing import Any

import numpy as np

from kvtool.chats.shields import tokens_of
from kvtool.chats.template import GEMMA, RAW, Message, Template, TemplateError
from kvtool.engine.loop import Engine
from kvtool.errors import InputError, ModelError
from kvtool.llama.loaded.model import Model
from kvtool.system.texts import read_text

_PROBES = ("x", "y")
"""Two texts that begin with different characters.

At any place of a chat, at least one of these characters differs from the next character of the chat.
"""


def template_of(model: Model, file: str | None = None) -> Template:
    """Return the model's chat template, or Gemma's if the model has Gemma's markers and no template.

    file: file of another template, which is used instead. Raises ModelError if there is no template, or if
    the model's template is broken, and InputError if the file cannot be read or has a broken template.
    """
    if file:
        return _template_in(file, model)
    source = model.chat_template()
    if source is None and len(model.tokenize("<start_of_turn><end_of_turn>", special=True)) == 2:
        source = GEMMA
    if source is None:
        raise ModelError(f"{model.path.name} has no chat template; --chat-template FILE sets one, and {RAW}")
    return _of_source(source, model)


def _template_in(file: str, model: Model) -> Template:
    """Return the template in a file, after a check that it renders a chat."""
    try:
        template = _of_source(read_text(file), model)
        template.turn([{"role": "user", "content": "."}], ".")
    except TemplateError as error:
        why = str(error).removeprefix("the model's ").removesuffix(f"; {RAW}")
        raise InputError(f"{file}: the {why}; correct the file, or leave out --chat-template") from None
    return template


def _of_source(source: str, model: Model) -> Template:
    return Template(source, model.marker(model.bos), model.marker(model.eos), model.markers)


def wants_bos(model: Model, text: str) -> bool:
    """True if a rendered chat lacks the BOS marker, so that the tokenizer must add it."""
    bos = model.marker(model.bos)
    return not (bos and text.startswith(bos))


def system_prefix(template: Template, system: str, tools: list[Any] | None = None) -> str | None:
    """Return the common beginning of all chats with this system prompt.

    It ends with the prompt's last character. If there are tools, it ends where the user's text begins,
    because templates put tools after the system prompt. To find the end, chats with different system prompts
    or users' messages are rendered and compared. Returns None if the template cuts the prompt, or puts the
    prompt after the user's message. Raises ModelError.
    """

    def chat(system: str, user: str) -> str:
        first = [{"role": "system", "content": system}] if system else []
        return template.render([*first, {"role": "user", "content": user}], tools=tools)

    if tools:
        return os.path.commonprefix([chat(system, probe) for probe in _PROBES]) or None
    shown = chat(system, _PROBES[0])
    end = end_of(shown, system, lambda text: chat(text, _PROBES[0]))
    return shown[:end] if 0 < end <= _common(shown, chat(system, _PROBES[1])) else None


def request_prefix(template: Template, before: list[Message], request: str, text: str) -> str | None:
    """Render a chat whose last message is `request + text`, and return its text up to the end of `request`.

    Returns None if the end of `request` cannot be found. Raises ModelError.
    """

    def chat(content: str) -> str:
        return template.render([*before, {"role": "user", "content": content}])

    whole = chat(request + text)
    return whole[: end_of(whole, request, chat)] or None


def end_of(whole: str, text: str, render: Callable[[str], str]) -> int:
    """Return the index at which `text` ends in a rendered chat `whole`; 0 if it cannot be found.

    Searching `whole` for `text` would not work, because the template may change `text`. Instead, the chat is
    rendered again with each text of `_PROBES`, and compared with `whole`. If a probe is appended to `text`,
    the first difference is at the end of `text`. If a probe replaces `text`, the first difference is at its
    start.

    render: returns the rendered chat with another text in place of `text`.
    """
    end = min(_common(whole, render(text + probe)) for probe in _PROBES)
    start = min(_common(whole, render(probe)) for probe in _PROBES)
    return end if end > start else 0


def _common(*texts: str) -> int:
    """Number of characters that the texts share at their start."""
    return len(os.path.commonprefix(texts))


def pin_prefix(engine: Engine, text: str, n_pinned: int) -> np.ndarray:
    """Return the tokens i32[n] of a rendered chat. Pin its first `n_pinned` characters: see `Engine.pin`."""
    tokens, n = prefix_tokens(engine.model, text, n_pinned)
    engine.pin(n)
    return tokens


def prefix_tokens(model: Model, text: str, n_prefix: int) -> tuple[np.ndarray, int]:
    """Return the tokens i32[n] of a rendered chat, and how many cover its first `n_prefix` characters.

    The text is tokenized as a whole. A token that begins within these characters and ends after them is
    counted.
    """
    start = wants_bos(model, text)
    tokens = tokens_of(model, text, start=start)
    return tokens, _n_covering(model, tokens, text[:n_prefix], start) if n_prefix else 0


def _n_covering(model: Model, tokens: np.ndarray, prefix: str, start: bool) -> int:
    """Return how many of the tokens i32[n] cover the prefix of their text.

    The prefix is tokenized alone, and the bytes of its tokens are counted. Unlike the characters of the text,
    these bytes include a BOS token and spaces that the tokenizer inserts.
    """

    def size(token: int) -> int:
        return len(model.piece(token, special=True))

    n_bytes = sum(map(size, tokens_of(model, prefix, start=start).tolist()))
    before = accumulate(map(size, tokens.tolist()), initial=0)
    return min(sum(1 for _ in takewhile(lambda covered: covered < n_bytes, before)), len(tokens))
