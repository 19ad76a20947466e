"""The state of an engine after a run, as a record and as text for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvtool import policies
from kvtool.engine.loop import Engine
from kvtool.units import PLAIN, format_bytes, format_tokens


def report(engine: Engine, policy: str) -> dict[str, Any]:
    """Return the fields that every result has. They describe the policy, the budget and the memory.

    Without an archive, the fields from `archived` on are 0, None or "".

    policy: the policy's name as the user typed it.
    """
    archive = engine.context.archive
    return {
        "policy": policy,
        "budget": engine.policy.budget,
        "asked": engine.policy.n_asked,
        "params": policies.chosen(engine.policy),
        "model": str(engine.model.path),
        "lora": list(map(str, engine.model.adapters)),
        "cells": engine.mean_kv,
        "held": engine.mean_live,
        "kv_bytes": engine.cache_bytes,
        "state_bytes": engine.state_bytes,
        "archived": engine.n_archived,
        "archive_bytes": engine.archive_bytes,
        "archive_limit": archive.n_max if archive else None,
        "archive_file": archive.file if archive else None,
        "archive_type": engine.settings.archive_type.removeprefix(PLAIN) if archive else None,
        "resident": engine.residents.n_now,
        "repeated": engine.residents.n_repeated,
        "resident_refusal": engine.residents.refusal,
    }


def budget(record: Mapping[str, Any]) -> int:
    """Return the budget in a report, in cells per row.

    Normally, this is the maximum number of cells of a row. If rows or layers share a budget, it is the mean
    per row that the user requested.
    """
    is_shared = "adaptive" in (record["params"].get(name) for name in ("heads", "layers"))
    return int(record["asked"] if is_shared else record["budget"])


def line(record: Mapping[str, Any]) -> str:
    """Return the cells and bytes of a report as text for people."""
    n_recalled = round(record["cells"] - record["held"])
    recalled = f" ({n_recalled} recalled)" if n_recalled else ""
    parts = [
        f"{record['cells']:.0f}/{budget(record)} cells per row{recalled}",
        f"cache {format_bytes(record['kv_bytes'])}",
        f"policy state {format_bytes(record['state_bytes'])}",
    ]
    if record["archive_limit"]:
        parts.append(f"archive {archive_line(record)}")
    return ", ".join(parts)


def archive_line(record: Mapping[str, Any]) -> str:
    """Return the size of the archive in a report as text for people."""
    size = f"{format_bytes(record['archive_bytes'])} {_where(record['archive_file'])}"
    line = f"{record['archived']:,} of at most {record['archive_limit']:,} tokens, {size}"
    if record["resident"]:
        n = record["repeated"]
        line += f"; {record['resident']:,} resident per row, {n:,} step{'s' * (n != 1)} repeated"
    if record["resident_refusal"]:
        line += f"; no residents: {record['resident_refusal']}"
    return line


def archive_limit(engine: Engine, n_slot: int = 1, n_most: int | None = None) -> str | None:
    """Return a line that says where older text is archived, and how large the archive may become.

    None if nothing is archived. n_slot: number of caches, each of which has an archive. n_most: maximum
    length of a stream in tokens; None if there is no limit.
    """
    archive = engine.context.archive
    if not archive or (n_most is not None and n_most <= engine.policy.budget):
        return None
    n = archive.n_max if n_most is None else min(archive.n_max, n_most)
    place = f"{_on_disk(archive.file)}," if archive.file else "in host memory"
    slots = f" for each of {n_slot} parallel requests" if n_slot > 1 else ""
    most = f"{format_bytes(archive.bytes_of(n))} ({format_tokens(n)}){slots}"
    line = f"text that leaves the cache is kept {place} and still used: up to {most}"
    if resident := resident_cells(engine):
        line += f"; {resident}"
    return line


def resident_cells(engine: Engine) -> str | None:
    """Return a clause about archived tokens on the device (--resident) and their bytes, or None."""
    residents = engine.residents
    if not residents.n_token:
        return None
    tokens = f"{residents.n_token:,} archived tokens of each row are resident"
    return f"{tokens}, for which the cache takes at most {format_bytes(residents.n_bytes)} more"


def _where(file: str | None) -> str:
    return "of host memory" if file is None else _on_disk(file)


def _on_disk(file: str) -> str:
    return f"on disk ({file}), with an index in host memory"
