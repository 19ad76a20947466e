"""What a Python program needs besides the classes: a model and a policy by name, a chat, a text that goes on.

`from kvtool import ...` gives these and the classes; all of them raise KvtoolError for what can go wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from kvtool import policies
from kvtool.chats.conversation import Conversation
from kvtool.chats.prompt import template_of, wants_bos
from kvtool.chats.writer import Writer
from kvtool.engine.loop import Engine
from kvtool.llama.model import Model
from kvtool.llama.sampler import Sampler
from kvtool.models.download import Progress
from kvtool.models.resolve import check, resolve
from kvtool.policy import Policy

if TYPE_CHECKING:
    from typing import Unpack


class Sampling(TypedDict, total=False):
    """How tokens are drawn, as Sampler takes it; the likeliest unless temp says otherwise."""

    temp: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    seed: int | None


def load_model(
    name: str | Path | None = None,
    *,
    n_gpu_layers: int | None = None,
    progress: Progress | None = None,
) -> Model:
    """A model of models.txt, downloaded where it is not there, or a GGUF file; $KVTOOL_MODEL unless given.

    n_gpu_layers: how many of its layers are a GPU's, all unless given. progress: told of bytes downloaded.
    Raises ModelError for no such model, a damaged one, or one that kvtool cannot run.
    """
    path = resolve(None if name is None else str(name), progress)
    check(path)
    return Model(path, n_gpu_layers=n_gpu_layers)


def load_policy(name: str, budget: int, *, evict_every: int | None = None, **params: object) -> Policy:
    """The policy of that name, or of a file of one's own, with a budget in cells.

    evict_every: tokens from one eviction to the next; 16 unless given, less for a small budget. params: those
    that `kvtool policies NAME` lists. Raises UsageError for what cannot work, with what would.
    """
    return policies.fit(name, budget, evict_every, [f"{key}={value}" for key, value in params.items()])


def chat(engine: Engine, system: str | None = None, **sampling: Unpack[Sampling]) -> Conversation:
    """A chat through the engine's emptied cache: its `reply(text)` gives the answer piece by piece.

    system: a prompt that is never evicted. Raises ModelError where the model has no chat template.
    """
    writer = Writer(engine, Sampler(engine.model.n_vocab, **sampling))
    return Conversation(writer, template_of(engine.model), system)


def generate(
    engine: Engine, prompt: str, n_max: int | None = None, **sampling: Unpack[Sampling]
) -> Iterator[str]:
    """The text that follows what the engine has read so far and this prompt, piece by piece.

    At most n_max tokens, or up to the model's own end. Raises StreamEnd where the engine has no more room.
    """
    model = engine.model
    writer = Writer(engine, Sampler(model.n_vocab, **sampling))
    writer.read(model.tokenize(prompt, special=True, start=writer.is_new and wants_bos(model, prompt)))
    yield from writer.write(n_max)
