"""Types shared by the engine and the policies.

A row is one (layer, KV head) pair. Rows are ordered by layer, then by head. Every row evicts independently.
The cells of a row are in no order: `View.pos[row, cell]` is the position in the stream of a cell's token.
"""

from kvtool.policy.base import Policy, State, split_budget
from kvtool.policy.checks import check_choice, check_kept, check_whole
from kvtool.policy.plan import Merge, Plan, true_cells
from kvtool.policy.ranked import FLOOR, Ranked, keep_ranked, protected, sum_rows
from kvtool.policy.view import (
    PER_CELL,
    SIGNALS,
    RecallSettings,
    ReconstructionPass,
    Signal,
    SignalRequest,
    View,
)

__all__ = [
    "FLOOR",
    "PER_CELL",
    "SIGNALS",
    "Merge",
    "Plan",
    "Policy",
    "Ranked",
    "RecallSettings",
    "ReconstructionPass",
    "SignalRequest",
    "Signal",
    "State",
    "View",
    "check_choice",
    "check_kept",
    "check_whole",
    "keep_ranked",
    "protected",
    "split_budget",
    "sum_rows",
    "true_cells",
]
