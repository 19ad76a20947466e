"""Find and load policies: `--policy NAME` loads POLICY from kvtool/policies/NAME.py.

`--policy path/to/mine.py` loads POLICY from a user's file.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvtool import parameters
from kvtool.errors import UsageError, suggestion, where

if TYPE_CHECKING:
    from kvtool.policy import Policy

_COMMON = ("budget", "slack")


def names() -> list[str]:
    """Return the names of kvtool's built-in policies, sorted."""
    return sorted(p.stem for p in Path(__file__).parent.glob("*.py") if not p.stem.startswith("_"))


def load(name: str) -> type[Policy]:
    """Return the policy class for a name or file. Raises UsageError, which suggests similar names."""
    if name.endswith(".py"):
        return _load_file(Path(name))
    check_name(name)
    policy: type[Policy] = import_module(f"kvtool.policies.{name}").POLICY
    return policy


def check_name(name: str) -> None:
    """Raise UsageError if there is no policy with this name or file. The file is not executed."""
    if name.endswith(".py"):
        if not os.path.isfile(name):
            raise UsageError(f"no policy file {Path(name)}")
    elif name not in names():
        if os.path.exists(name) or os.path.basename(name) != name:
            raise UsageError(f"{name} is not a policy; the file of a policy ends in .py")
        raise UsageError(f"unknown policy {name!r}.{suggestion(name, names())} See `kvtool policies`.")


def file_sha256(name: str) -> str | None:
    """Return the SHA-256 of a policy's file, so that a change of the file can be noticed.

    None for built-in policies.
    """
    return hashlib.sha256(Path(name).read_bytes()).hexdigest() if name.endswith(".py") else None


@cache
def _load_file(path: Path) -> type[Policy]:
    # dataclasses and numba find a module by its name, so files of the same name in two folders need different
    # module names
    folder = hashlib.sha256(os.fsencode(path.resolve().parent)).hexdigest()[:12]
    name = f"kvtool_policy_{path.stem}_{folder}"
    check_name(str(path))
    spec = spec_from_file_location(name, path)
    assert spec
    assert spec.loader
    module = sys.modules[name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise UsageError(f"{path}: {where(error)}") from error
    if not hasattr(module, "POLICY"):
        raise UsageError(f"{path} defines no POLICY; add POLICY = NAME with the name of the policy's class")
    return _checked(module.POLICY, f"{path}: POLICY")


def _checked(policy: object, what: str) -> type[Policy]:
    from kvtool.policy import Policy, Ranked

    if not (isinstance(policy, type) and is_dataclass(policy) and issubclass(policy, Policy)):
        raise UsageError(f"{what} must be a dataclass that derives from kvtool.policy.Policy")
    declared = {field.name for field in fields(policy)}
    # accept a property instead of a field: a policy with its own `fit` may have one
    absent = [f"the field {name}" for name in _COMMON if name not in declared and not hasattr(policy, name)]
    method = "scores" if policy.plan is Ranked.plan else "plan"
    if getattr(policy, method) in (Policy.plan, Ranked.scores):
        absent.append(f"the method {method}")
    if absent:
        raise UsageError(f"{what} must define {' and '.join(absent)}")
    parameters.check_types(policy, what, but=_COMMON)
    return policy


def params(policy: type[Policy]) -> dict[str, object]:
    """Return the `-o` parameters with their defaults; None for a default that depends on the budget."""
    return parameters.defaults(policy, but=_COMMON)


def chosen(policy: Policy) -> dict[str, object]:
    """Return the parameters of a fitted policy, with their values."""
    return {name: getattr(policy, name) for name in params(type(policy))}


def required(policy: type[Policy]) -> list[str]:
    """Return the `-o` parameters without which the policy cannot be made. A policy's own `fit` needs none."""
    from kvtool.policy import Policy, Ranked

    if policy.fit.__func__ not in (Policy.fit.__func__, Ranked.fit.__func__):  # type: ignore[attr-defined]
        return []
    return [
        field.name
        for field in fields(policy)
        if field.default is field.default_factory is MISSING and field.name not in (*_COMMON, "window")
    ]


def parse_options(
    name: str, policy: type[Policy], options: Iterable[str], flag: str = "-o"
) -> dict[str, object]:
    """Parse ["window=64", ...] to the fields' types. Raises UsageError, which lists valid parameters.

    flag: the option with which the user set the parameters.
    """
    return parameters.parse(policy, options, flag, name, but=_COMMON)


Adapt = Callable[["Policy"], "Policy"]
"""Function that adapts a policy to a model (see `Policy.for_model`).

It raises ValueError if the budget is too small for the model.
"""


class PolicySpec(NamedTuple):
    """Requested policy, before its budget is known.

    Attributes
    ----------
    name
        Name or file as the user typed it.
    params
        Parameters that the user set, with their values.
    evict_every
        Number of tokens from one eviction to the next. None if the number depends on the budget; see `slack`.
    """

    name: str
    kind: type[Policy]
    params: dict[str, object]
    evict_every: int | None = None

    def slack(self, budget: int) -> int:
        """Return the number of tokens between two evictions: by default 16, or fewer in a small budget."""
        return self.evict_every or max(1, min(16, budget // 8))

    def fit(self, budget: int, adapt: Adapt = lambda policy: policy, *, more: str = "") -> Policy:
        """Return the policy for a budget in cells. Raises UsageError, with the smallest budget that works.

        more: follows the smallest budget in the error.
        """
        if self.evict_every and 1 < budget <= self.evict_every:
            raise UsageError(f"--evict-every must be less than the budget ({budget}), got {self.evict_every}")
        if missing := [name for name in required(self.kind) if name not in self.params]:
            raise UsageError(f"{self.name}: set it with {' '.join(f'-o {name}=...' for name in missing)}")
        try:
            fitted = self._fitted(budget)
            adapt(fitted)
            return fitted
        except ValueError as error:
            smallest = self._smallest_budget(budget, adapt=adapt)
            if smallest is None:
                raise UsageError(f"{self.name}: {error}") from None
            if self.params:
                message = f"{self.name}: {error}; with these parameters use a budget of at least {smallest}"
            else:
                # leave out the error, which would name parameters that the user did not set
                often = f" with --evict-every {self.evict_every}" if self.evict_every else ""
                message = f"a budget of {budget} is too small for {self.name}{often}; use at least {smallest}"
            raise UsageError(message + more) from None
        except Exception as error:
            raise UsageError(f"{self.name}: {where(error)}") from error

    def smallest_budget(
        self, n_held: int = 0, adapt: Adapt = lambda policy: policy, *, n_pinned: int = 0
    ) -> int:
        """Return the smallest budget, in cells, that works if n_held tokens are never evicted.

        n_pinned: number of first tokens that are to be pinned. Raises UsageError if no budget works.
        """
        # if no budget works, `fit` raises an error that gives the reason
        return self._smallest_budget(0, n_held, adapt, n_pinned) or self.fit(1).budget

    def _fitted(self, budget: int) -> Policy:
        fitted = self.kind.fit(budget, self.slack(budget), **self.params)
        if not isinstance(fitted, self.kind):
            kind, got = self.kind.__name__, type(fitted).__name__
            raise TypeError(f"fit must return an instance of {kind}, got {got}")
        return fitted

    def _smallest_budget(
        self, above: int, n_held: int = 0, adapt: Adapt = lambda policy: policy, n_pinned: int = 0
    ) -> int | None:
        def works(budget: int) -> bool:
            try:
                policy = adapt(self._fitted(budget))
                return policy.n_keep - max(policy.exempt[0], policy.pinnable(n_pinned) + 1) >= n_held
            except Exception:  # noqa: BLE001  (a user's policy may raise anything; `fit` reports it)
                return False

        least = max(above, 0) + 1
        largest = least + 999_999
        # if even the largest budget fails, the cause is not the budget
        return next(filter(works, range(least, largest + 1))) if works(largest) else None


def spec(
    name: str, evict_every: int | None = None, options: Iterable[str] = (), flag: str = "-o"
) -> PolicySpec:
    """Return the request for a policy by name or file, with options. Raises UsageError for unknown names.

    flag: the option with which the user set the parameters.
    """
    kind = load(name)
    return PolicySpec(name, kind, parse_options(name, kind, options, flag), evict_every)


def spec_of(
    policy: str | Path | type[Policy], evict_every: int | None, params: Mapping[str, object]
) -> PolicySpec:
    """Return the request for a policy by name, file or class, with values. Raises UsageError."""
    if isinstance(policy, type):
        name, kind = policy.__name__, _checked(policy, policy.__name__)
    else:
        name, kind = str(policy), load(str(policy))
    return PolicySpec(name, kind, parameters.check(kind, params, "-o", name, but=_COMMON), evict_every)


def fit(name: str, budget: int, evict_every: int | None = None, options: Iterable[str] = ()) -> Policy:
    """Return a named policy for a budget in cells. Raises UsageError, with the smallest budget that works."""
    return spec(name, evict_every, options).fit(budget)


def load_kernels(policy: Policy) -> None:
    """Load or compile a policy's kernels now, so that this does not delay its first plan."""
    # imported here, because not every command runs a policy
    from kvtool.kernels.kernel import of_module

    for kind in type(policy).__mro__:
        for kernel in of_module(sys.modules[kind.__module__]):
            # a user's kernel may be faulty; the first plan that calls it reports this
            with suppress(Exception):
                kernel.prepare()
