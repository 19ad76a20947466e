"""What a Python program needs besides the classes: load a model and a policy by name, chat, continue a text.

`from kvtool import ...` gives these and the classes. All of them raise KvtoolError for what can go wrong.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvtool import policies
from kvtool.chats.conversation import Conversation
from kvtool.chats.prompt import template_of, wants_bos
from kvtool.chats.writer import Writer
from kvtool.engine.loop import Engine
from kvtool.errors import UsageError, suggestion
from kvtool.llama.model import Model
from kvtool.llama.sampler import Sampler
from kvtool.llama.sampling import Sampling
from kvtool.models.fetch import Progress
from kvtool.models.resolve import check, resolve
from kvtool.options import declared
from kvtool.policy import Policy


def load_model(
    name: str | Path | None = None, *, n_gpu_layers: int | None = None, progress: Progress | None = None
) -> Model:
    """Loads a model.

    Parameters
    ----------
    name
        A path to a GGUF file, or what is downloaded if it is not here: a name of models.txt, a repository
        ("hf:OWNER/REPO:QUANT") or a URL. Defaults to $KVTOOL_MODEL.
    n_gpu_layers
        How many of its layers go to a GPU; all if not given.
    progress
        Called with the bytes downloaded.

    Raises
    ------
    ModelError
        If there is no such model, or it is damaged, or kvtool cannot run it.
    """
    path = resolve(None if name is None else str(name), progress)
    check(path)
    return Model(path, n_gpu_layers=n_gpu_layers)


def load_policy(name: str, budget: int, *, evict_every: int | None = None, **params: object) -> Policy:
    """Makes a policy.

    Parameters
    ----------
    name
        A name of `kvtool policies`, or a file of your own ("./mine.py").
    budget
        The most tokens per row.
    evict_every
        Tokens from one eviction to the next; 16 if not given, less for a small budget.
    params
        Those that `kvtool policies NAME` lists.

    Raises
    ------
    UsageError
        For values that cannot work; names some that do.
    """
    return policies.fit(name, budget, evict_every, [f"{key}={value}" for key, value in params.items()])


def chat(engine: Engine, system: str | None = None, **sampling: Any) -> Conversation:
    """Starts a chat in the engine's cache, which is emptied. Its `reply(text)` yields the answer in pieces.

    system: a system prompt, which is never evicted. sampling: the fields of `Sampling`, and seed;
    without any, the likeliest token is taken. Raises ModelError if the model has no chat template.
    """
    return Conversation(Writer(engine, _sampler(engine.model, sampling)), template_of(engine.model), system)


def generate(engine: Engine, prompt: str, n_max: int | None = None, **sampling: Any) -> Iterator[str]:
    """Yields the text that follows what the engine has read so far and this prompt, in pieces.

    It ends where the model ends it, or after n_max tokens. Raises UsageError if there is nothing to follow,
    and StreamEnd if the cache is full and the policy keeps everything.
    """
    model = engine.model
    writer = Writer(engine, _sampler(model, sampling))
    writer.read(model.tokenize(prompt, special=True, start=writer.is_new and wants_bos(model, prompt)))
    yield from writer.write(n_max)


def _sampler(model: Model, its: dict[str, Any]) -> Sampler:
    """The sampler of the fields of `Sampling`, and of `seed`. Raises UsageError."""
    seed, stop = its.pop("seed", None), its.pop("stop", ())
    if unknown := its.keys() - declared(Sampling).keys():
        name = min(unknown)
        raise UsageError(f"there is no setting {name}.{suggestion(name, declared(Sampling))}")
    schema = its.get("json_schema")
    if not isinstance(schema, str | None):
        its["json_schema"] = json.dumps(schema)
    # a text alone is a sequence of its characters
    its["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    return Sampler(model, Sampling(**its), seed=seed)
