"""The web page of kvtool inspect --html."""

from __future__ import annotations

import base64
import json
import zlib
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from kvtool.cli.inspect.terminal import BOUNDS, visible
from kvtool.config.report import budget
from kvtool.measure.holdings import Holdings


def page(result: dict[str, Any], held: Holdings, texts: list[str], last: int) -> bytes:
    """Return the web page, with all its data, for the last `last` tokens of the text."""
    first = max(len(texts) - last, 0)
    data = {
        "about": {
            **{key: result[key] for key in ("policy", "params", "tokens", "rows", "cells")},
            "budget": budget(result),
        },
        "model": Path(result["model"]).name,
        "first": first,
        "bounds": BOUNDS,
        "texts": [visible(text) for text in texts[first:]],
        **{name: getattr(held, name).tolist() for name in ("layer", "head", "ends", "archived")},
        "until": _deflated(held.until[:, first:]),
        "attended": None,
    }
    if attended := held.attended:
        unit = float(attended.attn.max()) / 65535
        data["attended"] = {
            "attn": _deflated((attended.attn[:, first:] / unit).round().astype("<u2")),
            # total attention of each row, in multiples of `unit` as in `attn`. For each query, a head's
            # attention sums to 1, so the total is the number of heads times the number of queries
            "whole": (attended.n_head * (attended.n_query / unit)).tolist(),
            "query": attended.query[first:].tolist(),
            "share": attended.query_share[first:].round(6).tolist(),
        }
    # escape "<", because "</" in a text could end the script element that holds the data
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    page = files("kvtool.cli.inspect").joinpath("page.html").read_text(encoding="utf-8")
    return page.replace("{{data}}", text).encode()


def _deflated(array: np.ndarray) -> str:
    """Compress the bytes of an array (in row order) with zlib, and return them in base64."""
    return base64.b64encode(zlib.compress(array.tobytes(), 9)).decode()
