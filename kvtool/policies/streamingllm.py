"""StreamingLLM: keep the first and the newest tokens (Xiao et al. 2023, arXiv:2309.17453, section 3.2).

The paper's attention sinks are our sinks, and its rolling KV cache is our window.

Differs from the paper: an eviction makes room for `slack` tokens. The paper makes room for one token, as
--evict-every 1 does. Tokens keep their positions until the context is full. The paper renumbers them at every
eviction, as --positions in-cache does.
"""

from dataclasses import dataclass
from typing import ClassVar

from kvtool.policies.local import Local
from kvtool.policy import check_kept


@dataclass(frozen=True, slots=True)
class StreamingLLM(Local):
    """Keep sinks and window."""

    sinks: int = 4

    paper: ClassVar[str] = "arXiv:2309.17453"

    def __post_init__(self) -> None:
        # the budget must have room for the sinks and for at least the newest token
        check_kept(self.budget, self.slack, self.sinks, window=1, min_window=1)


POLICY = StreamingLLM
