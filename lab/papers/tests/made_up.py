"""Made-up records."""

from __future__ import annotations

VERSIONS = {"model": "m.gguf", "kvtool": "1", "llama_cpp_python": "2", "patch": "3"}


def lines(**scores):
    """A line for each keyword: the policy ("h2o__64" for a budget of 64) and its scores by name."""
    stored = []
    for number, (name, of_items) in enumerate(scores.items()):
        label, _, budget = name.partition("__")
        items = [f"i{i}" for i in range(len(next(iter(of_items.values()))))]
        about = {
            "label": label,
            "budget": budget or None,
            "of": "file",
            "items": items,
            "seconds": 60 + number,
        }
        stored.append(about | {"scores": of_items} | VERSIONS)
    return stored


def compared(policy, params, budget, nll, **more):
    return {
        "policy": policy,
        "params": params,
        "budget": budget,
        "text": "t.txt",
        "tokens": 65,
        "n_scored": 64,
        "nll_blocks": [2 * value for value in nll],
        "cells": 13.0,
        "type_k": "f16",
        "kv_bytes": 2**20,
        "archive_bytes": 0,
        "cpu_s": 0.65,
        "seconds": 5.0,
        **VERSIONS,
        "model": "/somewhere/m.gguf",
        **more,
    }


def answered(policy, options, budget, number, scores, **more):
    return {
        "task": "qa",
        "policy": policy,
        "options": options,
        "budget": budget,
        "id": f"i{number}",
        "file": "qa.jsonl",
        "scores": scores,
        "seconds": 2.0,
        "output": "of a data set",
        "budget_cells": 12,
        **VERSIONS,
        **more,
    }


def ruled(policy, number, score, removed=0.0, budget=0, type_kv="f16", question="after", **more):
    return {
        **{"task": "ruler", "question": question, "policy": policy, "removed": removed, "budget": budget},
        **{"type_kv": type_kv, "id": f"vt-4096-{number}", "part": "vt", "length": 4096},
        **{"scores": {"string_match": score}, "kv_bytes": 2**20, "archive_bytes": 2**21 * bool(budget)},
        **{"output": "of a data set", "seconds": 2.0, **VERSIONS, **more},
    }
