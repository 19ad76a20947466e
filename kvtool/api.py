"""Functions for Python programs: load a model or a policy by name, chat, and continue a text.

Import these functions from `kvtool`. They raise KvtoolError if something goes wrong.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvtool import policies
from kvtool.chats.conversation import Conversation
from kvtool.chats.prompt import template_of, wants_bos
from kvtool.chats.writer import Writer, checked_limit
from kvtool.engine.loop import Engine
from kvtool.errors import UsageError, suggestion
from kvtool.llama.loaded.model import Model
from kvtool.llama.sampler import Sampler
from kvtool.llama.sampling import Sampling
from kvtool.models.fetch import Progress
from kvtool.models.resolve import check, resolve
from kvtool.options import declared
from kvtool.policy import Policy
from kvtool.policy.checks import check_whole


def load_model(
    name: str | Path | None = None, *, n_gpu_layers: int | None = None, progress: Progress | None = None
) -> Model:
    """Load a model. It is downloaded if necessary.

    name: path of a GGUF file, name in models.txt, repository ("hf:OWNER/REPO:QUANT") or URL. Defaults to
    $KVTOOL_MODEL.
    n_gpu_layers: number of layers on a GPU. By default, all layers.
    progress: called during a download with the bytes so far and the size of the file, or None if it is
    unknown.

    Raises ModelError if the model does not exist, is damaged, or cannot run in kvtool.
    """
    path = resolve(None if name is None else str(name), progress)
    check(path)
    return Model(path, n_gpu_layers=n_gpu_layers)


def load_policy(
    name: str | Path | type[Policy], budget: int, *, evict_every: int | None = None, **params: object
) -> Policy:
    """Make a policy.

    name: name of a policy that `kvtool policies` lists, path of your own file ("./mine.py"), or your own
    class.
    budget: maximum number of tokens per row.
    evict_every: number of tokens from one eviction to the next. By default 16, or fewer for a small budget.
    params: parameters of the policy, which `kvtool policies NAME` lists.

    Raises UsageError if a value is invalid. The error names valid values.
    """
    check_whole("budget, a number of tokens,", budget, UsageError)
    if evict_every is not None:
        check_whole("evict_every", evict_every, UsageError)
        if evict_every < 1:
            raise UsageError(f"evict_every must be at least 1, got {evict_every}")
    return policies.spec_of(name, evict_every, params).fit(budget)


def chat(engine: Engine, system: str | None = None, **sampling: Any) -> Conversation:
    """Empty the engine's cache, and start a chat. The chat's `reply(text)` yields an answer in pieces.

    system: system prompt. No policy forgets it; recall may archive the part beyond half of the budget.
    sampling: fields of `Sampling`, and `seed`, for all replies. By default, the most likely token is chosen.
    Raises ModelError if the model has no chat template.
    """
    return Conversation(Writer(engine, _sampler(engine.model, sampling)), template_of(engine.model), system)


def generate(engine: Engine, prompt: str, n_max: int | None = None, **sampling: Any) -> Iterator[str]:
    """Append the prompt to the text that the engine has read, and yield the model's continuation in pieces.

    n_max: maximum number of tokens of the continuation. None and -1 mean no limit. sampling: as in `chat`.

    Raises UsageError if n_max is invalid, or if there is nothing to continue. Raises StreamEnd if the cache
    is full and the policy never evicts.
    """
    model, n_max = engine.model, checked_limit(n_max)
    writer = Writer(engine, _sampler(model, sampling))
    writer.read(model.tokenize(prompt, special=True, start=writer.is_new and wants_bos(model, prompt)))
    yield from writer.write(n_max)


def _sampler(model: Model, settings: dict[str, Any]) -> Sampler:
    seed, stop = settings.pop("seed", None), settings.pop("stop", ())
    if unknown := settings.keys() - declared(Sampling).keys():
        name = min(unknown)
        raise UsageError(f"there is no setting {name}.{suggestion(name, declared(Sampling))}")
    schema = settings.get("json_schema")
    if not isinstance(schema, str | None):
        settings["json_schema"] = json.dumps(schema)
    # do not call tuple() for a single text, because it would split the text into characters
    settings["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    return Sampler(model, Sampling(**settings), seed=seed)
