"""The JSON of a chat's session: the text, the options, and values that must not change.

`meta_of` and `Conversation.save` make the JSON. `is_chat` checks it. `difference` and `resumed` read it when
a chat is continued.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, TypeAlias

import kvtool
from kvtool import policies
from kvtool.config.run import RunOptions
from kvtool.options import declared
from kvtool.units import FEW_BITS, PLAIN

if TYPE_CHECKING:
    from kvtool.chats.template import Template
    from kvtool.engine.loop import Engine
    from kvtool.models.fetch import Progress

_CHAT: dict[str, Any] = {
    **dict.fromkeys(("kvtool", "saved"), str),
    **dict.fromkeys(("n_turn", "n_past", "n_reply", "cells", "kv_bytes"), (int, float)),
    "system": (str, NoneType),
    "messages": [{"role": str, "content": str}],
    "writer": {"seed": int, "recent": list, "unread": list},
    "options": {"model": str},
    "fixed": {
        **dict.fromkeys(("model_sha256", "policy"), str),
        "llama_cpp": object,
        "parameters": {"budget": int, "slack": int},
    },
}
"""Values that the JSON of every chat has, with their types. A list shows the type of each item."""

_MORE: dict[str, Any] = {
    **dict.fromkeys(("reasoning_content", "tool_call_id"), str),
    "tool_calls": [{"id": str, "function": {"name": str, "arguments": str}}],
}
"""Values that a message may also have, with their types."""

Hashing: TypeAlias = "Callable[[str], AbstractContextManager[Progress]]"
"""Function that takes the name of a file that is hashed, and yields a callback to show the progress."""

_ROTATED = "rotated "
"""A session's archive type has this prefix if the archive's numbers are multiplied by a Hadamard matrix."""

_FIELDS = {
    "model_sha256": "model",
    "lora": "lora",
    "chat_template": "chat_template",
    "policy": "policy",
    "budget": "budget",
    "slack": "evict_every",
    "positions": "positions",
    "context": "n_ctx",
    "key_type": "type_k",
    "value_type": "type_v",
    "archive_type": "archive_type",
    "llama_cpp": "",
}
"""For each value of `fixed_of`: the field of `RunOptions` that sets it.

Values without an entry are parameters of the policy. The field "options" sets them.
"""


def is_chat(meta: Any) -> bool:
    """True if JSON has all values that every chat has, with their types."""
    return _fits(meta, _CHAT)


def are_messages(value: Any) -> bool:
    """True if JSON is a list of messages, each with role and content."""
    return _fits(value, _CHAT["messages"]) and all(
        _fits(message[name], wanted) for message in value for name, wanted in _MORE.items() if name in message
    )


def _fits(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, dict):
        return isinstance(value, dict) and all(_fits(value.get(name), wanted[name]) for name in wanted)
    if isinstance(wanted, list):
        return isinstance(value, list) and all(_fits(each, wanted[0]) for each in value)
    return isinstance(value, wanted)


def meta_of(engine: Engine, n_turn: int, fixed: dict[str, Any], kept: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that a session stores in addition to those of `Conversation.save`.

    fixed: result of `fixed_of`. kept: values of the options that are saved in the session.
    """
    return {
        "kvtool": kvtool.__version__,
        "saved": time.strftime("%Y-%m-%d %H:%M:%S"),
        "n_turn": n_turn,
        "n_past": engine.n_past,
        "cells": engine.mean_live,
        "kv_bytes": engine.cache_bytes,
        "archived": engine.n_archived,
        "archive_bytes": engine.archive_bytes,
        "fixed": fixed,
        "options": {**kept, "model": os.path.abspath(engine.model.path), "policy": fixed["policy"]},
    }


def resumed(run: RunOptions, saved: dict[str, Any]) -> RunOptions:
    """Return the options of a chat that continues a session. Raises UsageError.

    The policy of the session is treated as if the user had typed it.

    A session of an old kvtool may have parameters that the policy no longer has. If the user did not type -o,
    these parameters are then dropped from the options. The session's adjustable parameters are also dropped:
    their default values are used, because they need not be the same when a chat is continued.
    """
    is_typed, run = "options" in run.typed, run.resumed(saved["options"])
    kind, parameters = policies.load(run.policy), saved["fixed"]["parameters"]
    if run.budget is None and kind.has_recall():
        # use the session's budget, because earlier versions of kvtool had another default budget
        run = replace(run, budget=str(parameters["budget"]))
    stored = saved["fixed"].get("archive_type")
    run = replace(run, is_plain=stored == run.archive_type and stored in FEW_BITS)
    if not is_typed and parameters.keys() - {"budget", "slack", *policies.params(kind)}:
        stay = policies.params(kind).keys() - set(kind.adjustable)
        run = replace(run, options=tuple(o for o in run.options if o.partition("=")[0] in stay))
    return run.changed(policy=run.policy)


def fixed_of(
    engine: Engine,
    run: RunOptions,
    template: Template | None,
    hashing: Hashing,
) -> dict[str, Any]:
    """Return the values that must be the same when a chat is continued."""
    from kvtool.llama.libllama.devices import library_info
    from kvtool.models.download import sha256

    path, settings, free = engine.model.path, engine.settings, engine.policy.adjustable
    policy = run.policy
    with hashing(path.name) as progress:
        digest = sha256(path, progress)
    lora = [f"{sha256(its.path)}:{its.scale!r}" for its in engine.model.adapters]
    return {
        "model_sha256": digest,
        "policy": str(Path(policy).resolve()) if policy.endswith(".py") else policy,
        "parameters": {name: value for name, value in asdict(engine.policy).items() if name not in free},
        "positions": settings.positions,
        "context": engine.n_ctx,
        "key_type": settings.type_k,
        "value_type": settings.type_v,
        "llama_cpp": library_info()["version"],
        **({"archive_type": _stored_type(settings.archive_type)} if engine.policy.recall else {}),
        **({"lora": lora} if lora else {}),
        **({"chat_template": template.sha256} if template and run.chat_template else {}),
    }


def _stored_type(name: str) -> str:
    """Return the name of an archive type in a session.

    Types of few bits are rotated: q4_1 is stored as "rotated q4_1". Old versions of kvtool did not rotate
    archives. A session of such a version has "q4_1" without the prefix.
    """
    return f"{_ROTATED}{name}" if name in FEW_BITS else name.removeprefix(PLAIN)


def completed(theirs: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a session, with defaults for parameters that its policy did not have yet.

    A policy of an older kvtool worked like the present one with these defaults. theirs, ours: results of
    `fixed_of` for the session and for the present run.
    """
    present, wanted = (fixed.get("parameters", {}) for fixed in (theirs, ours))
    absent = wanted.keys() - present.keys()
    if not absent or theirs.get("policy") != ours["policy"]:
        return theirs
    defaults = policies.params(policies.load(ours["policy"]))
    added = {name: default for name, default in defaults.items() if name in absent}
    return theirs | {"parameters": present | added}


def difference(
    theirs: dict[str, Any], ours: dict[str, Any], their_model: Path, model: Path, typed: Collection[str] = ()
) -> str | None:
    """Return a message that says why the present chat cannot continue a session. None if it can.

    The message has no end: the caller appends what else the user can do.

    theirs, ours: results of `fixed_of` for the session and for the chat. their_model, model: files of the
    models. typed: names of the typed options that the message may advise to leave out.
    """
    # put the policy's parameters among the other values
    theirs, ours = ({**fixed["parameters"], **fixed} for fixed in (completed(theirs, ours), ours))
    if not (names := _differing(theirs, ours)):
        return None
    models = their_model.name, model.name
    same = models[0] == models[1]
    before = " ".join(_typed(name, theirs.get(name), models[0], is_ambiguous=same) for name in names)
    now = " ".join(_typed(name, ours.get(name), models[1], is_ambiguous=same) for name in names)
    fields = dict.fromkeys(_FIELDS.get(name, "options") for name in names)
    flags = [_flag(field) for field in fields if field in typed]
    # a policy's parameter may differ even if the user did not type it: its default depends on other options
    can_continue = flags and all(field in typed or field == "options" for field in fields)
    instead = f"leave out {' and '.join(flags)} to continue it, or " if can_continue else ""
    return f"was started with {before}; it cannot continue with {now}; {instead}"


def _flag(field: str) -> str:
    """Return the option that sets a field of `RunOptions`, under the name that other messages use."""
    option = declared(RunOptions)[field]
    return option.flags[0] if field in ("model", "options") else option.name


def _differing(theirs: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """Return the names of the values that differ between a session and the present chat.

    Models, adapters, policies and budgets are compared first, in this order. If one of them differs, only the
    name of this value is returned. If the context limits the budget, as with `full`, the context takes the
    place of the budget.
    """
    # a chat without adapters has no value "lora", and one with the model's own template no "chat_template"
    every = dict.fromkeys([*ours, "lora", "chat_template"])
    names = [name for name in every if name != "parameters" and theirs.get(name) != ours.get(name)]
    size = "context" if ours.get("budget") == ours.get("context") else "budget"
    decisive: Iterable[str] = ("model_sha256", "lora", "policy", size, "budget")
    return [name for name in decisive if name in names][:1] or names


def _typed(name: str, value: object, model: str, *, is_ambiguous: bool) -> str:
    """Return a value of `fixed_of` as text. is_ambiguous: True to add the model's SHA-256 to its name."""
    if name == "model_sha256":
        return f"{model} of SHA-256 {value:.12}" if is_ambiguous else model
    if name == "chat_template":
        return f"--chat-template of SHA-256 {value:.12}" if value else "the model's chat template"
    text = "nothing" if value is None else str(value).removeprefix(_ROTATED)
    if isinstance(value, list):
        # show the first 12 digits of each adapter's SHA-256, and its scale
        text = ", ".join(f"{its[:12]}{its[64:]}" for its in value)
    if name not in _FIELDS:
        return f"-o {name}={text}"
    of_value = "llama.cpp" if name == "llama_cpp" else declared(RunOptions)[_FIELDS[name]].name
    return f"{of_value} {text}"
