"""What there is to say of an engine after it has read or written: as a record, and in a line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvtool import policies
from kvtool.engine.loop import Engine
from kvtool.units import format_bytes


def report(engine: Engine, policy: str) -> dict[str, Any]:
    """The part of every result that says what held, and what it took. policy: as it was named.

    Of the archive 0, 0, None and None without one: tokens and bytes now, the most tokens, its file.
    """
    archive = engine.context.archive
    return {
        "policy": policy,
        "budget": engine.policy.budget,
        "asked": engine.policy.n_asked,
        "params": policies.chosen(engine.policy),
        "model": str(engine.model.path),
        "cells": engine.mean_kv,
        "kv_bytes": engine.cache_bytes,
        "state_bytes": engine.state_bytes,
        "archived": engine.n_archived,
        "archive_bytes": engine.archive_bytes,
        "archive_limit": archive.n_max if archive else None,
        "archive_file": archive.file if archive else None,
    }


def budget(said: Mapping[str, Any]) -> int:
    """The cells that a report's rows may hold; in the mean, if rows or layers share them."""
    is_shared = "adaptive" in (said["params"].get(name) for name in ("heads", "layers"))
    return int(said["asked"] if is_shared else said["budget"])


def line(said: Mapping[str, Any]) -> str:
    """A report for people: cells and bytes."""
    parts = [
        f"{said['cells']:.0f}/{budget(said)} cells per row",
        f"cache {format_bytes(said['kv_bytes'])}",
        f"policy state {format_bytes(said['state_bytes'])}",
    ]
    if said["archive_limit"]:
        parts.append(f"archive {archive_line(said)}")
    return ", ".join(parts)


def archive_line(said: Mapping[str, Any]) -> str:
    """The archive of a report for people."""
    size = f"{format_bytes(said['archive_bytes'])} {_where(said['archive_file'])}"
    return f"{said['archived']:,} of at most {said['archive_limit']:,} tokens, {size}"


def archive_limit(engine: Engine, n_slot: int = 1, *, brief: bool = False) -> str | None:
    """Where text goes that leaves the cache, and how much that can take; None without an archive.

    n_slot: how many caches have one. brief: without the number of tokens.
    """
    archive = engine.context.archive
    if not archive:
        return None
    where = f"to disk ({archive.file}) and, for clusters, to" if archive.file else "to"
    newest = "" if brief else f" (the newest {archive.n_max:,} token{'s' * (archive.n_max != 1)})"
    slots = f" for each of {n_slot} requests at once" if n_slot > 1 else ""
    most = f"{format_bytes(archive.max_bytes)}{newest}{slots}"
    return f"older text goes {where} host memory, at most {most}, and is still used"


def _where(file: str | None) -> str:
    return "of host memory" if file is None else f"on disk ({file}) and, for clusters, in host memory"
