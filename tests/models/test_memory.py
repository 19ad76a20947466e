"""Memory that this process may use."""

from __future__ import annotations

import pytest

from kvtool.system import cgroups, memory

MB = 10**6
VERSION_2 = ("memory.max", "memory.current", "inactive_file")
VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """Return a function that writes control groups: {path: (limit, used, reclaimable)}."""

    def write_limits(line, root, names, limits):
        (tmp_path / "cgroup").write_text(f"1:name=systemd:/x\n{line}\n")
        for path, (limit, used, reclaimable) in limits.items():
            folder = tmp_path / "groups" / root / path
            folder.mkdir(parents=True, exist_ok=True)
            (folder / names[0]).write_text(f"{limit}\n")
            (folder / names[1]).write_text(f"{used}\n")
            (folder / "memory.stat").write_text(f"anon 1\n{names[2]} {reclaimable}\n")

    monkeypatch.setattr(cgroups, "_OF_PROCESS", tmp_path / "cgroup")
    monkeypatch.setattr(cgroups, "_GROUPS", tmp_path / "groups")
    return write_limits


@pytest.mark.parametrize(
    ("line", "root", "names"), [("0::/a/b", ".", VERSION_2), ("4:memory:/a/b", "memory", VERSION_1)]
)
def test_the_tightest_control_group_limits_the_memory(groups, line, root, names):
    total = memory.total_bytes()
    groups(line, root, names, {"a/b": ("max", 3 * MB, 0), "a": (9 * MB, 5 * MB, 2 * MB), ".": ("max", MB, 0)})
    assert (memory.total_bytes(), memory.free_bytes()) == (9 * MB, 6 * MB)
    groups(line, root, names, {"a/b": (8 * MB, 7 * MB, 0)})
    assert (memory.total_bytes(), memory.free_bytes()) == (8 * MB, MB)
    groups(line, root, names, {"a/b": (2 * MB, 3 * MB, 0)})
    assert (memory.total_bytes(), memory.free_bytes()) == (2 * MB, 0)
    groups(line, root, names, {"a/b": (2 * total, MB, 0), "a": ("max", MB, 0)})
    assert memory.total_bytes() == total


def test_without_control_groups_the_machine_is_the_limit(groups):
    assert memory.total_bytes() > 2**30
    assert 0 < memory.free_bytes() <= memory.total_bytes()
