"""A session's archive file: each turn appends its new segments, and a session always has all its segments."""

from __future__ import annotations

import os
import shutil
import stat
import tracemalloc
import warnings
from contextlib import closing

import numpy as np
import pytest

from kvtool.chats import archive_file, session
from kvtool.chats.archive_file import ArchiveFile, archive_path
from kvtool.errors import SessionError
from kvtool.llama.cache.segment import CLUSTERS, TABLE, Clusters, Segment, clusters_name, listed, pieces
from kvtool.system import files
from tests.serve.killed_turns import KILLED, die_at_call
from tests.tools.test_files import full_after

pytestmark = pytest.mark.skipif(os.name != "posix", reason="limits, links and processes of Unix")

LAYERS = [3, 5]
N_BYTES = sum(LAYERS)


class Archive:
    """Stand-in for kvtool.llama.cache.archive.Archive that has the tokens `begin` to `end` - 1.

    stream: seed of the tokens' bytes.
    """

    n_block, membership_bytes = 8, 3

    is_clustered = False
    """True if all complete blocks have clusters. Blocks before the last 20 tokens count as far away."""

    def __init__(self, stream, end, begin=0):
        self.stream, self.begin, self.end = stream, begin, end
        self.segments, self.clusters = [], []
        self.layer_bytes, self.token_bytes = LAYERS, N_BYTES

    @property
    def span(self):
        return range(self.begin, self.end)

    def layer(self, layer, begin, end):
        rng = np.random.default_rng([self.stream, layer])
        return rng.integers(0, 256, (1000, LAYERS[layer]), np.uint8)[begin:end].reshape(-1)

    def read(self, begin, end):
        assert self.begin <= begin <= end <= self.end
        return np.concatenate([self.layer(layer, begin, end) for layer in range(len(LAYERS))])

    @property
    def clustered(self):
        begin = self.begin // self.n_block * self.n_block if self.is_clustered else self.end
        blocks = range(begin, self.end - self.n_block + 1, self.n_block)
        return [(block, block + self.n_block <= self.end - 20) for block in blocks]

    def read_clusters(self, begin, end, is_far):
        assert all((block, is_far) in self.clustered for block in range(begin, end, self.n_block))
        rng = np.random.default_rng([self.stream, 9, is_far])
        data = rng.integers(0, 256, (200, self.membership_bytes), np.uint8)
        return data[begin // self.n_block : end // self.n_block].reshape(-1)

    def restore(self, saved):
        self.segments = list(listed(saved, Segment))
        self.clusters = list(listed(saved, Clusters))
        return self


def save(path, archive, store=None):
    """Write a session of this archive, as `ChatFiles` does."""
    file = store or ArchiveFile(path)
    try:
        with file.write(archive) as listed:
            table = np.array([archive.begin, archive.end, 0], np.int64)
            session.write(path, {"n": archive.end}, [(TABLE, table), *listed])
    finally:
        if not store:
            file.close()


def load(path):
    return session.read(path)[1]


def holds(path, archive):
    """Return True if the session at `path` has exactly the bytes of this archive."""
    saved = load(path)
    assert saved[TABLE][:2].tolist() == [archive.begin, archive.end]
    listed, n = {}, archive.n_block
    for i, (begin, end, is_far, *_) in enumerate(saved.get(CLUSTERS, [])):
        blocks = saved[clusters_name(i)].reshape(-1, archive.membership_bytes)
        listed |= {
            (block, bool(is_far)): data for block, data in zip(range(begin, end, n), blocks, strict=True)
        }
    assert all(
        (listed[each] == archive.read_clusters(each[0], each[0] + n, each[1])).all()
        for each in archive.clustered
    )
    return all(
        (saved[f"archive.{layer}"] == archive.layer(layer, archive.begin, archive.end)).all()
        for layer in range(len(LAYERS))
    )


@pytest.fixture
def path(tmp_path):
    return tmp_path / "talk.kv"


@pytest.fixture
def store(path):
    store = ArchiveFile(path)
    yield store
    store.close()


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Limit segments to 12 tokens."""
    monkeypatch.setattr(archive_file, "_PIECE", 12 * N_BYTES)


@pytest.fixture(params=[False, True], ids=["tokens", "clusters"])
def both(request, monkeypatch):
    """Run a test twice: without clusters and with clusters."""
    monkeypatch.setattr(Archive, "is_clustered", request.param)


with_clusters = pytest.mark.usefixtures("both")


def test_turn_appends_only_its_newly_archived_tokens(path, store):
    archive = Archive(1, 0)
    save(path, archive, store)
    assert os.listdir(path.parent) == ["talk.kv"]
    before, n_before = b"", 0
    for end in (5, 5, 30, 100, 101):
        archive.end = end
        save(path, archive, store)
        now = archive_path(path).read_bytes()
        first = archive_file._N_FIRST if not before else 0
        assert len(now) - len(before) == (end - n_before) * N_BYTES + first
        assert now.startswith(before)
        assert holds(path, archive)
        before, n_before = now, end
    assert sorted(os.listdir(path.parent)) == ["talk.kv", "talk.kv.archive"]
    assert session.size(path) == len(before) + path.stat().st_size


def test_another_process_continues_the_archive_file(path):
    save(path, Archive(1, 50))
    before = archive_path(path).read_bytes()
    # append 500 bytes, like a process that was killed while it was writing
    archive_path(path).write_bytes(before + bytes(500))
    archive, store = Archive(1, 60).restore(load(path)), ArchiveFile(path)
    store.adopt(load(path))
    save(path, archive, store)
    store.close()
    after = archive_path(path).read_bytes()
    assert (len(after), after[: len(before)]) == (len(before) + 10 * N_BYTES, before)
    assert holds(path, archive)


def test_turn_appends_clusters_of_new_and_newly_far_blocks(path, store, monkeypatch):
    monkeypatch.setattr(Archive, "is_clustered", True)
    archive, clusters = Archive(1, 0), set()
    for end in (30, 31, 32, 44, 300):
        archive.end = end
        save(path, archive, store)
        assert holds(path, archive)
        clusters |= set(archive.clustered)
        size = archive_file._N_FIRST + end * N_BYTES + len(clusters) * archive.membership_bytes
        assert archive_path(path).stat().st_size == size
        # data that no block needs any more is not listed
        current = dict(archive.clustered)
        for begin, end, is_far, *_ in load(path)[CLUSTERS].tolist():
            assert any(current.get(block) == bool(is_far) for block in range(begin, end, archive.n_block))


@with_clusters
def test_segments_can_lose_their_oldest_tokens(path, store):
    archive = Archive(1, 60)
    save(path, archive, store)
    for begin, end in ((5, 61), (11, 62), (12, 63), (35, 64)):
        archive.begin, archive.end = begin, end
        save(path, archive, store)
        assert holds(path, archive)
    # the archive has lost the first tokens of a segment. It can still be written to a new file
    save(path.with_name("other.kv"), archive)
    assert holds(path.with_name("other.kv"), archive)
    save(path, archive, store)
    assert holds(path, archive)


@with_clusters
@pytest.mark.parametrize("n_kept", [15, 40, 200])
def test_a_full_archive_can_be_saved_after_every_turn(path, store, n_kept):
    archive, rng = Archive(1, 0), np.random.default_rng(n_kept)
    while archive.end < 900:
        archive.end += int(rng.integers(1, 25))
        # the archive forgets old tokens, so it may lack the first tokens of a segment when the file is
        # rewritten
        archive.begin = max(archive.begin, archive.end - n_kept)
        save(path, archive, store)
        assert holds(path, archive)


def test_segments_are_read_without_copying(path, store):
    for end in (40, 90):
        save(path, Archive(0, end), store)
    saved = load(path)
    save(path, archive := Archive(0, 100, 17).restore(saved), store)
    saved = load(path)
    for layer in range(len(LAYERS)):
        begins, parts = zip(*pieces(saved, layer), strict=True)
        assert begins[0] == 17
        assert len(begins) > 2
        assert not any(part.flags.owndata for part in parts)
        assert (np.concatenate(parts) == archive.layer(layer, 17, 100)).all()
        assert [len(part) // LAYERS[layer] for part in parts] == np.diff((*begins, 100)).tolist()


def test_unused_data_takes_no_more_than_about_half_of_the_file(path, store):
    archive = Archive(1, 0)
    sizes = []
    for end in range(10, 900, 10):
        archive.begin, archive.end = max(end - 100, 0), end
        save(path, archive, store)
        assert holds(path, archive)
        sizes.append(archive_path(path).stat().st_size)
    assert 1.5 * 100 * N_BYTES < max(sizes) < 2.5 * 100 * N_BYTES
    assert sorted(os.listdir(path.parent)) == ["talk.kv", "talk.kv.archive"]


@with_clusters
def test_open_files_of_a_session_survive_later_turns(path, store):
    # keep both files of the first session open, as /undo does. Later turns store other tokens at the same
    # positions, but the open files must not change
    archive = Archive(1, 40)
    save(path, archive, store)
    with path.open("rb") as file, store.reopen() as shared:
        for stream, end in ((1, 90), (2, 60), (3, 300)):
            archive = Archive(stream, end)
            save(path, archive, store)
            assert holds(path, archive)
        assert not os.fstat(shared.fileno()).st_nlink
        saved = session.load(file, "the copy", shared)[1]
        before = Archive(1, 40)
        assert (saved["archive.1"] == before.layer(1, 0, 40)).all()
        save(path, before.restore(saved), store)
        assert holds(path, before)


@with_clusters
@pytest.mark.parametrize(("n", "n_next"), [(70, 30), (30, 100)])
def test_a_chat_that_is_set_aside_keeps_its_archive(path, store, n, n_next):
    first, second = Archive(1, n), Archive(2, n_next)
    save(path, first, store)
    aside = session.set_aside(path)
    save(path, second, store)
    assert holds(aside, first)
    assert holds(path, second)
    # neither chat writes into the file of the other
    for folder, stream, end in ((aside, 1, 120), (path, 2, 140)):
        turn(folder, Archive(stream, end))
    assert holds(path, Archive(2, 140))
    assert holds(aside, Archive(1, 120))
    session.delete(aside)
    assert sorted(os.listdir(path.parent)) == ["talk.kv", "talk.kv.archive"]
    # set_aside does not take a name that a session or an archive already has
    archive_path(aside).write_text("mine")
    assert session.set_aside(path).name == "talk.kv.2"


@with_clusters
def test_older_copy_of_a_chat_does_not_damage_the_newer_one(path, store):
    save(path, Archive(1, 50), store)
    older = path.read_bytes()
    save(path, Archive(1, 100).restore(load(path)), store)
    aside = session.set_aside(path)
    path.unlink()
    path.write_bytes(older)
    with closing(ArchiveFile(path)) as file:
        file.adopt(load(path))
        with pytest.raises(SessionError, match="no room"), file.write(Archive(1, 50).restore(load(path))):
            raise SessionError("no room")
    assert holds(aside, Archive(1, 100))
    turn(path, Archive(1, 60))
    assert holds(path, Archive(1, 60))
    assert holds(aside, Archive(1, 100))


def test_session_without_archived_tokens_has_no_archive_file(path, store):
    for archive in (Archive(1, 0), None):
        save(path, Archive(1, 30), store)
        assert archive_path(path).exists()
        if archive:
            save(path, archive, store)
            assert holds(path, archive)
        else:
            with store.write(None) as listed:
                session.write(path, {}, listed)
        assert os.listdir(path.parent) == ["talk.kv"]


@with_clusters
@pytest.mark.parametrize(("stream", "end"), [(1, 31), (2, 5)], ids=["appended", "anew"])
def test_failed_save_leaves_the_previous_session(path, store, stream, end):
    archive = Archive(1, 30)
    save(path, archive, store)
    before = path.read_bytes(), archive_path(path).read_bytes()
    later = Archive(stream, end)
    with pytest.raises(SessionError, match="no room"), store.write(later):
        raise SessionError("no room")
    assert (path.read_bytes(), archive_path(path).read_bytes()) == before
    assert sorted(os.listdir(path.parent)) == ["talk.kv", "talk.kv.archive"]
    assert holds(path, archive)
    save(path, later, store)
    assert holds(path, later)


@with_clusters
@pytest.mark.parametrize(("stream", "end"), [(1, 31), (2, 5), (2, 0)], ids=["appended", "anew", "none"])
def test_interrupt_right_after_replacing_the_session_loses_nothing(path, store, stream, end):
    save(path, Archive(1, 30), store)
    later = Archive(stream, end)
    table = np.array([0, end, 0], np.int64)

    def interrupted():
        with store.write(later) as listed:
            session.write(path, {"n": end}, [(TABLE, table), *listed])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert holds(path, later)
    save(path, later, store)
    assert holds(path, later)


@with_clusters
@pytest.mark.parametrize("end", [31, 100])
def test_full_disk_during_an_append_leaves_both_files_unchanged(path, store, end):
    archive = Archive(1, 30)
    save(path, archive, store)
    before = path.read_bytes(), archive_path(path).read_bytes()
    archive.end = end
    # the disk has room for the first 3 bytes of the new segment
    with full_after(len(before[1]) + 3), pytest.raises(OSError, match="File too large"):
        save(path, archive, store)
    assert (path.read_bytes(), archive_path(path).read_bytes()) == before
    save(path, archive, store)
    assert holds(path, archive)


def test_full_disk_at_the_first_save_leaves_no_files(path, store):
    with full_after(20), pytest.raises(OSError, match="File too large"):
        save(path, Archive(1, 30), store)
    assert os.listdir(path.parent) == []


@with_clusters
def test_damaged_and_truncated_archive_files_are_refused(path):
    save(path, Archive(1, 7))
    save(path, Archive(1, 20).restore(load(path)))
    whole = archive_path(path).read_bytes()
    for offset in range(len(whole)):
        damaged = bytearray(whole)
        damaged[offset] ^= 1
        archive_path(path).write_bytes(damaged)
        # if the first bytes are damaged, the file is not recognized as an archive
        is_foreign = offset < len(archive_file._START)
        words = (
            "is not an archive of kvtool;" if is_foreign else "(is damaged|belongs to another session), and"
        )
        with pytest.raises(SessionError, match=f"talk.kv.archive {words}"):
            load(path)
        archive_path(path).write_bytes(whole[:offset])
        words = "is not an archive of kvtool;" if offset and is_foreign else "is damaged, and"
        with pytest.raises(SessionError, match=f"talk.kv.archive {words}"):
            load(path)
    assert session.read_meta(path) == {"n": 20}


def test_foreign_and_missing_archive_files_are_refused(path, tmp_path):
    save(path, Archive(1, 20))
    save(tmp_path / "other.kv", Archive(1, 20))
    shutil.copy(tmp_path / "other.kv.archive", archive_path(path))
    with pytest.raises(SessionError, match=r"talk.kv.archive belongs to another session, and the chat in"):
        load(path)
    archive_path(path).unlink()
    with pytest.raises(SessionError, match=r"talk.kv.archive is missing, and the chat in") as error:
        load(path)
    assert str(error.value).count("\n") == 0
    assert "`kvtool chat --reread" in str(error.value)


def test_save_and_load_hold_no_second_copy_in_memory(path, monkeypatch):
    class Large(Archive):
        def read(self, begin, end):
            return np.zeros((end - begin) * sum(self.layer_bytes), np.uint8)

    archive = Large(1, 400)
    archive.layer_bytes = [2**10] * 32
    monkeypatch.setattr(archive_file, "_PIECE", 2**20)
    largest = []
    for work in (
        lambda: save(path, archive),
        lambda: [len(load(path)[f"archive.{layer}"]) for layer in range(32)],
    ):
        tracemalloc.start()
        work()
        largest.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert archive_path(path).stat().st_size > 12 * 2**20
    assert max(largest) < 3 * 2**20


@with_clusters
def test_removed_archive_file_is_written_again(path, store):
    archive = Archive(1, 30)
    save(path, archive, store)
    archive_path(path).unlink()
    archive.end = 31
    save(path, archive, store)
    assert holds(path, archive)


def test_a_file_that_is_not_an_archive_is_neither_replaced_nor_removed(path):
    archive_path(path).write_text("my own")
    with pytest.raises(SessionError, match=r"talk.kv.archive is not an archive of kvtool; rename it"):
        save(path, Archive(1, 30))
    assert not path.exists()
    save(path, Archive(1, 0))
    assert archive_path(path).read_text() == "my own"


@pytest.mark.parametrize("left", ["nothing", "an empty file", "a chat without an archive"])
@pytest.mark.parametrize("end", [0, 50], ids=["archives nothing", "archives"])
def test_archive_file_without_its_session_is_moved_and_not_deleted(path, left, end):
    save(path, Archive(1, 30))
    before = archive_path(path).read_bytes()
    path.with_name("talk.kv.1").write_text("mine")
    path.rename(path.with_name("moved.kv"))
    if left == "an empty file":
        path.touch()
    elif left == "a chat without an archive":
        session.write(path, {"n": 0}, [(TABLE, np.zeros(3, np.int64))])
    archive = Archive(2, end)
    with closing(ArchiveFile(path)) as store:
        if left == "a chat without an archive":
            store.adopt(load(path))
        save(path, archive, store)
        assert store.moved == path.with_name("talk.kv.2.archive")
        assert store.moved.read_bytes() == before
        assert holds(path, archive)
        assert path.with_name("talk.kv.1").read_text() == "mine"
        # the next turn moves nothing, because it finds its own archive
        archive.end += 10
        save(path, archive, store)
        assert store.moved is None
    # if the moved session gets the name of the moved archive, the two belong together again
    path.with_name("moved.kv").rename(path.with_name("talk.kv.2"))
    assert holds(path.with_name("talk.kv.2"), Archive(1, 30))


def test_replacing_a_session_replaces_its_archive_file(path):
    save(path, Archive(1, 30))
    with closing(ArchiveFile(path, session.archive_id(path))) as store:
        save(path, Archive(2, 50), store)
        assert store.moved is None
    assert holds(path, Archive(2, 50))
    assert sorted(os.listdir(path.parent)) == ["talk.kv", "talk.kv.archive"]
    # a damaged session does not tell which archive belongs to it
    path.write_bytes(path.read_bytes()[:-1])
    assert session.archive_id(path) is None


def test_archive_file_has_the_mode_and_folder_of_its_session(path, tmp_path):
    save(path, Archive(1, 0))
    path.chmod(0o600)
    (tmp_path / "link.kv").symlink_to(path)
    save(tmp_path / "link.kv", Archive(1, 30))
    assert stat.S_IMODE(archive_path(path).stat().st_mode) == 0o600
    assert holds(tmp_path / "link.kv", Archive(1, 30))
    assert sorted(os.listdir(tmp_path)) == ["link.kv", "talk.kv", "talk.kv.archive"]


# the process is killed at each call that changes a file


def die_at_change(n):
    """Make this process exit at its n-th call that changes a file, as kill -9 does.

    If this call writes data, it first writes half of the data.
    """
    n_left, write_all = die_at_call(n), files.write_all

    def counted(file, data):
        n_left[0] -= 1
        if not n_left[0]:
            file.write(data[: len(data) // 2])
            os._exit(KILLED)
        write_all(file, data)

    files.write_all = archive_file.write_all = counted


def turn(path, archive):
    """Load the session and save a turn, as a new process does."""
    with closing(ArchiveFile(path)) as store:
        if path.exists():
            saved = load(path)
            store.adopt(saved)
            archive.restore(saved)
        save(path, archive, store)


def undone(path, archive):
    """Save a turn after /undo: its tokens are new, so most of the file becomes useless."""
    with closing(ArchiveFile(path)) as store:
        store.adopt(load(path))
        save(path, archive, store)


def other_chat(path, archive):
    """Save a turn after /reset: the earlier chat is set aside."""
    with closing(ArchiveFile(path)) as store:
        store.adopt(load(path))
        store.open()
        session.set_aside(path)
        save(path, archive, store)


@pytest.mark.share(1, "both")
@with_clusters
@pytest.mark.parametrize(
    ("change", "before", "after"),
    [
        (turn, (1, 0), (1, 30)),
        (turn, (1, 30), (1, 70)),
        (undone, (1, 70), (2, 40)),
        (undone, (1, 70), (2, 0)),
        (other_chat, (1, 70), (2, 40)),
        (other_chat, (1, 70), (2, 0)),
    ],
)
def test_process_killed_at_any_step_leaves_a_complete_session(tmp_path, change, before, after):
    for n in range(1, 1000):
        path = tmp_path / str(n) / "talk.kv"
        path.parent.mkdir()
        save(path, Archive(*before))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if not child:
            die_at_change(n)
            change(path, Archive(*after))
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, KILLED)
        saved = after if session.read_meta(path)["n"] == after[1] else before
        assert holds(path, Archive(*saved))
        if change is other_chat and saved is after:
            assert holds(path.with_name("talk.kv.1"), Archive(*before))
        # after the next turn, every file belongs to a session
        turn(path, Archive(saved[0], 80))
        assert holds(path, Archive(saved[0], 80))
        names = {entry.name for entry in path.parent.iterdir()} - {"talk.kv.1", "talk.kv.1.archive"}
        assert names == {"talk.kv", "talk.kv.archive"}
        if not code:
            break
    assert saved == after
    assert n > 4
