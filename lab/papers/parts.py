"""Choose the numbers that lab/papers/records keeps: an item's scores, and a few means of each map."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvtool.measure import records

Parts = Iterator[tuple[str, str, float]]
"""For each mean of a map: its column and row in the table of the map, and its value."""


def _share(record: records.Record) -> Parts:
    """Yield the mean share of important keys in the first two layers, and in all other layers."""
    share, first = np.array(record["share"]), np.array(record["layer"]) < 2
    yield "important keys", "the first two layers", share[first].mean()
    yield "important keys", "all other layers", share[~first].mean()


def _overlap(record: records.Record) -> Parts:
    for name, label in (("similar", "the most similar query"), ("previous", "the query before")):
        yield "overlap", label, record["mean"][name]
    yield "overlap", "a random query", record["mean"]["random"]


def _near(record: records.Record) -> Parts:
    for n in (1, 16, 256):
        yield f"within {n}", "the most similar query", record["mean"][f"within_{n}"]
        yield f"within {n}", "by chance", record["chance"][f"within_{n}"]


def _ranks(record: records.Record) -> Parts:
    """Yield the mean rank of the heads' keys and values, divided by the head size."""
    for name, label in (("keys_before", "keys before RoPE"), ("keys", "keys"), ("values", "values")):
        n_dim = len(record[name]["normalised"])
        yield "rank", label, float(np.mean(record[name]["rank"])) / n_dim


PARTS = {"share": _share, "attention": _overlap, "queries": _near, "values": _ranks}


def item_scores(record: records.Record) -> dict[str, float]:
    """An item's scores, and the number of cells that its cache held.

    For `choice`, the scores include the log-probability of the right choice among all choices, in nats.
    """
    scores = dict(record["scores"])
    if scores and "cells" in record:
        scores["cells_held"] = record["cells"]
    if scores and record["task"] == "choice":
        logp = np.array(record["logp"])
        right = record["choices"].index(record["references"][0])
        scores["right"] = float(logp[right] - np.logaddexp.reduce(logp))
    return scores
