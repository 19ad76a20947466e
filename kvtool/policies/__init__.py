"""The policies, found by file name: kvtool/policies/NAME.py with a POLICY in it is `--policy NAME`.

A file of one's own is `--policy path/to/it.py`, and looks the same.
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import is_dataclass
from functools import cache
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING

from kvtool import parameters
from kvtool.errors import UsageError, where

if TYPE_CHECKING:
    from kvtool.policy import Policy

_COMMON = ("budget", "slack")


def names() -> list[str]:
    """Every policy's name, sorted."""
    return sorted(p.stem for p in Path(__file__).parent.glob("*.py") if not p.stem.startswith("_"))


def load(name: str) -> type[Policy]:
    """The policy class of that name or file. Raises UsageError with the names that there are."""
    if name.endswith(".py"):
        return _load_file(Path(name))
    if name not in names():
        raise UsageError(f"no policy {name!r}; there are: {', '.join(names())}")
    policy: type[Policy] = import_module(f"kvtool.policies.{name}").POLICY
    return policy


def file_sha256(name: str) -> str | None:
    """Of a file of one's own, which may change under its name; None for a policy of kvtool's."""
    return hashlib.sha256(Path(name).read_bytes()).hexdigest() if name.endswith(".py") else None


@cache
def _load_file(path: Path) -> type[Policy]:
    from kvtool.policy import Policy

    # a name of its own, under which dataclasses and numba find it again
    name = f"kvtool_policy_{path.stem}"
    spec = spec_from_file_location(name, path)
    if not (path.is_file() and spec and spec.loader):
        raise UsageError(f"no policy file {path}")
    module = sys.modules[name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UsageError(f"{path}: {where(error)}") from error
    policy = getattr(module, "POLICY", None)
    if not (isinstance(policy, type) and is_dataclass(policy) and issubclass(policy, Policy)):
        raise UsageError(f"{path}: POLICY must be a dataclass that derives from kvtool.policy.Policy")
    return policy


def params(policy: type[Policy]) -> dict[str, object]:
    """The parameters that `-o name=value` sets, with their defaults; None where the budget decides."""
    return parameters.defaults(policy, but=_COMMON)


def chosen(policy: Policy) -> dict[str, object]:
    """The parameters of a policy that is fitted, with their values."""
    return {name: getattr(policy, name) for name in params(type(policy))}


def parse_options(policy: type[Policy], options: list[str]) -> dict[str, object]:
    """["window=64", ...] to values of the fields' types. Raises UsageError naming what would be right."""
    return parameters.parse(policy, options, "-o", but=_COMMON)


def default_slack(budget: int) -> int:
    """How many tokens apart evictions are unless asked: 16, less for a small budget."""
    return max(1, min(16, budget // 8))


def fit(name: str, budget: int, evict_every: int | None = None, options: list[str] | None = None) -> Policy:
    """The named policy for a budget in cells. Raises UsageError, with the smallest budget that works."""
    policy = load(name)
    given = parse_options(policy, options or [])
    try:
        return policy.fit(budget, evict_every or default_slack(budget), **given)
    except ValueError as error:
        smallest = _smallest_budget(policy, budget, evict_every, given)
        if smallest is None:
            raise UsageError(f"{name}: {error}") from None
        raise UsageError(
            f"{name}: {error}; the smallest budget that works with these parameters is {smallest}"
        ) from None


def smallest_budget(
    name: str, evict_every: int | None = None, options: list[str] | None = None, n_held: int = 0
) -> int:
    """The fewest cells that the named policy works with where n_held of them may never go.

    Raises UsageError where no budget will do.
    """
    policy = load(name)
    given = parse_options(policy, options or [])
    smallest = _smallest_budget(policy, 0, evict_every, given, n_held)
    # where there is none, fit says why
    return smallest or fit(name, 1, evict_every, options).budget


def _smallest_budget(
    policy: type[Policy], above: int, evict_every: int | None, given: dict[str, object], n_held: int = 0
) -> int | None:
    def works(budget: int) -> bool:
        try:
            fitted = policy.fit(budget, evict_every or default_slack(budget), **given)
        except ValueError:
            return False
        return budget - fitted.slack > n_held

    largest = max(above, 0) + 1_000_000
    # what even this budget does not mend is no matter of the budget
    if not works(largest):
        return None
    return next(filter(works, range(max(above, 0) + 1, largest + 1)))
