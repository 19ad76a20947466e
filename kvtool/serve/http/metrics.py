"""Metrics of the server in Prometheus's format: counters since the server's start, and gauges."""

from __future__ import annotations

from dataclasses import dataclass

from kvtool.serve.events import End


@dataclass(slots=True)
class Counts:
    """Counters since the server's start: requests, tokens, and seconds of reading and of writing."""

    answered: int = 0
    refused: int = 0
    abandoned: int = 0
    unsaved: int = 0
    cached: int = 0
    read: int = 0
    written: int = 0
    read_s: float = 0.0
    write_s: float = 0.0

    def add(self, end: End) -> None:
        """Add an answer."""
        self.answered += 1
        self.unsaved += "unsaved" in end["kvtool"]
        self.cached += end["n_cached"]
        self.read += end["n_prompt"] - end["n_cached"]
        self.written += end["n_written"]
        self.read_s += end["read_s"]
        self.write_s += end["write_s"]


def text(counts: Counts, n_running: int, n_waiting: int, stored: tuple[int, int], cache_bytes: int) -> str:
    """Return the text for Prometheus. stored: number of stored chats, and number of their bytes."""
    n_stored, stored_bytes = stored
    rows: list[tuple[str, str, str, float]] = [
        ("requests_answered_total", "counter", "Requests for text that were answered.", counts.answered),
        ("requests_refused_total", "counter", "Requests for text that got an error.", counts.refused),
        ("requests_abandoned_total", "counter", "Requests for text whose client left.", counts.abandoned),
        ("chats_unsaved_total", "counter", "Answers whose chat could not be stored.", counts.unsaved),
        ("cached_tokens_total", "counter", "Tokens of prompts that were in the cache.", counts.cached),
        ("prompt_tokens_total", "counter", "Tokens of prompts that were read.", counts.read),
        ("prompt_seconds_total", "counter", "Seconds of reading, without waiting for turns.", counts.read_s),
        ("predicted_tokens_total", "counter", "Tokens that were written.", counts.written),
        ("predicted_seconds_total", "counter", "Seconds of writing, summed over answers.", counts.write_s),
        ("requests_running", "gauge", "Requests that are being answered.", n_running),
        ("requests_waiting", "gauge", "Requests that wait.", n_waiting),
        ("stored_chats", "gauge", "Chats that are stored, also those of other models or budgets.", n_stored),
        ("stored_bytes", "gauge", "Bytes of these chats.", stored_bytes),
        ("cache_bytes", "gauge", "Bytes of the caches.", cache_bytes),
    ]
    return "".join(
        f"# HELP kvtool_{name} {help_text}\n# TYPE kvtool_{name} {kind}\nkvtool_{name} {value:.10g}\n"
        for name, kind, help_text, value in rows
    )
