"""From --draft to guesses: where they come from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING

from kvtool.config.ahead import LOOKUP, OFF
from kvtool.config.run import WriteOptions
from kvtool.drafts.drafter import Drafter

if TYPE_CHECKING:
    from kvtool.config.run import RunOptions
    from kvtool.engine.loop import Engine
    from kvtool.llama.model import Model


class Drafts:
    """Makes the guesses of a run's engines. `opened` gives one.

    draft: the model that guesses where looking up finds nothing; None if there is none.
    """

    def __init__(self, draft: Model | None) -> None:
        self._draft = draft
        self._stack = ExitStack()

    def of(self, engine: Engine) -> Drafter | None:
        """What guesses for an engine; None where nothing is guessed."""
        if not engine.settings.n_ahead:
            return None
        from kvtool.drafts.lookup import Lookup

        if self._draft is None:
            return Drafter(Lookup())
        from kvtool.drafts.model import ModelDraft

        source = ModelDraft(self._draft, engine.settings.n_threads)
        return Drafter(Lookup(), self._stack.enter_context(closing(source)))

    def close(self) -> None:
        """Frees what the models' caches take."""
        self._stack.close()


@contextmanager
def opened(run: RunOptions, model: Model) -> Iterator[Drafts]:
    """Loads the model that guesses, if one does. Raises KvtoolError where it cannot."""
    draft_name = run.draft if isinstance(run, WriteOptions) else OFF
    if draft_name in (LOOKUP, OFF):
        yield Drafts(None)
        return
    from kvtool.config.opening import loaded, located
    from kvtool.drafts.model import check_vocabulary

    path, _ = located(draft_name)
    with loaded(path, run.gpu_layers, (), verbose=run.verbose > 1) as draft:
        check_vocabulary(model, draft)
        with closing(Drafts(draft)) as drafts:
            yield drafts
