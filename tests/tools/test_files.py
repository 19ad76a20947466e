"""Locks, and files that are either written completely or not at all."""

from __future__ import annotations

import multiprocessing
import os
import re
import resource
import stat
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread

import pytest

from kvtool.system import files
from tests import fork_server
from tests.blocking_policy import TIMEOUT_S


@contextmanager
def limited(kind, most):
    """Lower a limit of this process to `most` bytes. kind: a limit such as resource.RLIMIT_AS."""
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


def full_after(n_bytes):
    """Imitate a full disk: files cannot grow beyond n_bytes."""
    return limited(resource.RLIMIT_FSIZE, n_bytes)


def test_a_full_disk_cannot_be_written_to(tmp_path):
    assert files.can_write(tmp_path / "new")
    with full_after(0):
        assert not files.can_write(tmp_path / "new")


@pytest.mark.parametrize("old", [None, b"old"])
def test_a_full_disk_leaves_the_old_file_or_none(tmp_path, old):
    path = tmp_path / "page.html"
    if old is not None:
        path.write_bytes(old)
    with full_after(1000), pytest.raises(OSError, match="File too large"):
        files.write(path, b"x" * 5000)
    assert [entry.read_bytes() for entry in tmp_path.iterdir()] == [old][old is None :]
    files.write(path, b"new")
    assert [entry.read_bytes() for entry in tmp_path.iterdir()] == [b"new"]


def test_a_file_keeps_its_permissions_and_a_link_its_target(tmp_path):
    path, link = tmp_path / "file", tmp_path / "link"
    path.touch(mode=0o600)
    link.symlink_to(path)
    files.write(link, b"new")
    assert link.is_symlink()
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("fails", [False, True])
def test_two_writers_of_a_file_do_not_mix_their_data(tmp_path, fails):
    path = tmp_path / "file"
    other = Thread(target=files.write, args=(path, b"b" * 10))
    with suppress(ValueError), files.replacing(path) as file:
        file.write(b"a" * 100)
        file.flush()
        other.start()
        # the other writer waits
        other.join(0.2)
        file.write(b"a" * 100)
        file.flush()
        assert path.with_name(f"file{files.PART}").read_bytes() == b"a" * 200
        if fails:
            raise ValueError
    other.join()
    assert [entry.read_bytes() for entry in tmp_path.iterdir()] == [b"b" * 10]


def test_a_device_and_a_pipe_are_written_to(tmp_path):
    files.write(Path("/dev/null"), b"x")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE)
    files.write(pipe, b"through")
    assert reader.communicate(timeout=TIMEOUT_S)[0] == b"through"
    assert [entry.name for entry in tmp_path.iterdir()] == ["pipe"]


def test_user_files_are_written_only_by_system_files():
    # these files are exceptions: they write only to temporary folders or to the folder of downloaded models
    other_files = {"link.py", "sources.py", "eval.py", "download.py", "fetch.py", "web.py"}
    for path in Path(files.__file__).parent.parent.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        calls = re.findall(r"\.write_(?:bytes|text)\(|open\(\"w|savefig\(.*", text)
        if path.name not in {*other_files, "files.py"}:
            assert all(call.startswith("savefig(out,") for call in calls), (path, calls)


def test_log_contains_only_complete_entries(tmp_path):
    path = tmp_path / "said.txt"
    path.write_text("before\n")
    log = files.Log(path)
    log.append("one caf\u00e9 \udce9\n")
    with full_after(100):
        with pytest.raises(OSError, match="File too large"):
            log.append("two " * 100)
        # no part of the failed entry is in the file, so a shorter entry still fits
        log.append("three\n")
        with pytest.raises(OSError, match="File too large"):
            log.append("four " * 100, "three\n")
        assert path.read_text(encoding="utf-8") == "before\none caf\u00e9 ?\nthree\n"
    log.append("four \u00e9\n", "three\n")
    # only the last entry is replaced
    log.append("five\n", "one caf\u00e9 \udce9\n")
    log.append("six\n")
    log.append("6\n", "six\n")
    with path.open("a") as other:
        other.write("seven\n")
    log.append("eight\n", "6\n")
    log.close()
    text = "before\none caf\u00e9 ?\nfour \u00e9\nfive\n6\nseven\neight\n"
    assert path.read_text(encoding="utf-8") == text


@pytest.mark.parametrize("links", [True, False])
def test_set_aside_uses_the_first_free_name(tmp_path, monkeypatch, links):
    path = tmp_path / "chat.kv"
    (tmp_path / "chat.kv.1").write_text("mine")
    (tmp_path / "chat.kv.2").symlink_to("nowhere")
    if not links:
        monkeypatch.setattr(os, "link", _no_links)
    for n in (3, 4):
        path.write_text(f"chat {n}")
        spare = files.set_aside(path)
        assert spare.name == f"chat.kv.{n}"
        files.write(path, b"another")
        assert spare.read_text() == f"chat {n}"
    assert (tmp_path / "chat.kv.1").read_text() == "mine"


@pytest.mark.parametrize("links", [True, False])
def test_session_and_archive_files_are_set_aside_together_or_not_at_all(tmp_path, monkeypatch, links):
    path, archive = tmp_path / "chat.kv", tmp_path / "chat.kv.archive"
    path.write_bytes(bytes(2000))
    archive.write_text("archive")
    (tmp_path / "chat.kv.1.archive").write_text("mine")
    if not links:
        monkeypatch.setattr(os, "link", _no_links)
        names = sorted(os.listdir(tmp_path))
        with full_after(1000), pytest.raises(OSError, match="File too large"):
            files.set_aside(path, ".archive", "")
        assert sorted(os.listdir(tmp_path)) == names
    spare = files.set_aside(path, ".archive", "")
    assert spare.name == "chat.kv.2"
    assert spare.read_bytes() == bytes(2000)
    assert (tmp_path / "chat.kv.2.archive").read_text() == "archive"
    assert (tmp_path / "chat.kv.1.archive").read_text() == "mine"
    archive.unlink()
    assert files.set_aside(path, ".archive", "").name == "chat.kv.3"
    assert not (tmp_path / "chat.kv.3.archive").exists()
    # now there is an archive file without a session file, so only the archive file is set aside
    archive.write_text("another")
    assert files.set_aside(path, ".archive").name == "chat.kv.4"
    assert (tmp_path / "chat.kv.4.archive").read_text() == "another"
    assert not (tmp_path / "chat.kv.4").exists()


def test_part_and_lock_files_of_others_are_not_touched(tmp_path):
    (tmp_path / "chat.kv.part").write_text("a download")
    files.write(tmp_path / "chat.kv", b"chat")
    assert (tmp_path / "chat.kv.part").read_text() == "a download"
    (lock := tmp_path / "chat.kv.lock").write_text("a key")
    with pytest.raises(OSError, match=r"chat.kv.lock is not a lock of kvtool; rename it"), files.locked(lock):
        pass
    assert lock.read_text() == "a key"
    assert len(list(tmp_path.iterdir())) == 3


def _no_links(*_):
    raise PermissionError("no hard links here")


def test_held_lock_raises_without_wait_and_blocks_with_wait(tmp_path):
    lock = tmp_path / "x.lock"
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom kvtool.system.files import locked\n"
        "with locked(Path(sys.argv[1])):\n    print('held', flush=True)\n    sys.stdin.read()\n"
    )
    pipe = subprocess.PIPE
    holder = subprocess.Popen([sys.executable, "-c", code, lock], stdin=pipe, stdout=pipe, text=True)
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(BlockingIOError), files.locked(lock, wait=False):
        pass
    holder.stdin.close()
    with files.locked(lock):
        assert holder.wait(TIMEOUT_S) == 0
    holder.stdout.close()
    assert not lock.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="a folder that cannot hold files, also for root")
def test_lock_in_an_unwritable_folder_raises_file_not_found():
    with pytest.raises(FileNotFoundError), files.locked(Path("/proc/x.lock"), wait=False):
        pass


def test_a_lock_of_a_killed_process_is_free(tmp_path):
    lock = tmp_path / "x.lock"
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom kvtool.system.files import locked\n"
        "with locked(Path(sys.argv[1])): os.kill(os.getpid(), 9)\n"
    )
    assert fork_server.run_python("-c", code, lock).returncode == -9
    with files.locked(lock, wait=False):
        pass
    assert not lock.exists()


def test_lock_does_not_create_missing_folders(tmp_path):
    with pytest.raises(FileNotFoundError), files.locked(tmp_path / "no" / "x.lock"):
        pass
    assert not list(tmp_path.iterdir())


def _count(folder):
    for _ in range(25):
        with files.locked(folder / "x.lock"):
            n = int((folder / "n").read_text())
            (folder / "n").write_text(str(n + 1))


def test_lock_excludes_other_processes_and_its_file_is_deleted(tmp_path):
    (tmp_path / "n").write_text("0")
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_count, args=(tmp_path,)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert (tmp_path / "n").read_text() == "100"
    assert not (tmp_path / "x.lock").exists()
