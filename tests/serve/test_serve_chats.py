"""A server with a small random model: stored chats, pinned texts, token counts, and refused requests."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import stat
import sys
import threading
import time
from contextlib import closing
from io import BytesIO
from types import SimpleNamespace

import numpy as np
import pytest

from kvtool.chats import session
from kvtool.chats.archive_file import ArchiveFile
from kvtool.errors import SessionError
from kvtool.serve import opening
from kvtool.serve.api.errors import ApiError
from kvtool.serve.http.app import Site
from kvtool.serve.queue import Job, JobQueue
from kvtool.serve.store.chats import ChatStore, StoredChat, lock_folder
from kvtool.system.files import locked
from tests.blocking_policy import TIMEOUT_S
from tests.serve import http_requests
from tests.serve.http_requests import message, request
from tests.serve.in_process_server import InProcessServer, serve_in_process
from tests.serve.subprocess_server import start_server

SYSTEM = message("system", "Be kind. " * 4)


@pytest.fixture(scope="module")
def url(chat_model, tmp_path_factory):
    keys = tmp_path_factory.mktemp("keys") / "keys.txt"
    keys.write_text("first-key\nsecond-key\n")
    options = ("--policy", "h2o", "--budget", "96", "--temp", "0")
    with start_server(chat_model, *options, "--api-key-file", str(keys)) as server:
        yield server.url


KEY = {"Authorization": "Bearer first-key"}


def ask(url, messages, headers=(), n_max=8, **more):
    return http_requests.ask(url, messages, {**KEY, **dict(headers)}, max_tokens=n_max, **more)


def test_session_name_separates_a_chat_from_all_others(url):
    messages = [SYSTEM, message("user", "Two.")]
    answer = ask(url, messages, {"X-Session-Id": "one"})
    messages += [answer.reply, message("user", "And?")]
    assert ask(url, messages, {"X-Session-Id": "two"}).n_cached == 0
    assert ask(url, messages).n_cached == 0
    assert ask(url, messages, prompt_cache_key="one").n_cached == answer.n_all


def test_edited_chat_continues_from_the_turn_before_the_edit(url):
    messages, answers = [SYSTEM, message("user", "Three.")], []
    for n in range(3):
        answers.append(ask(url, messages))
        messages += [answers[n].reply, message("user", f"More {n}.")]
    for n in (1, 0, 1):
        edited = messages[: 2 * n + 3]
        assert ask(url, [*edited, message("user", f"Other {n}.")]).n_cached == answers[n].n_all
    edited_answer = ask(url, messages[:4])
    assert (edited_answer.text, edited_answer.n_cached) == (answers[1].text, answers[0].n_all)
    assert ask(url, [SYSTEM, message("user", "No other.")]).n_cached == 0


def test_system_prompt_stays_in_the_cache(url):
    messages = [SYSTEM]
    for n in range(3):
        messages.append(message("user", f"{n}: the river is long. " * 4))
        answer = ask(url, messages, kvtool={"share": 10**6})
        messages.append(answer.reply)
    assert answer.stats["forgotten"] > 0
    n_system = len(SYSTEM["content"].rstrip())
    shares, texts = answer.stats["share"]["held"], answer.stats["share"]["text"]
    assert len(shares) == answer.n_all
    n = next(n for n in range(len(texts)) if "".join(texts[:n]).endswith("kind. Be kind"))
    assert n > n_system / 4
    assert min(shares[:n]) == 1


def test_request_without_a_complete_api_key_is_refused(url):
    body = {"messages": [message("user", "x")], "max_tokens": 1}
    for key in ("", "f", "first-ke", "first-key2", "second"):
        assert request(url, body, {"Authorization": f"Bearer {key}"})[0] == 401
    assert request(url, body)[0] == 401
    for headers in (KEY, {"x-api-key": "second-key"}):
        assert request(url, body, headers)[0] == 200


def test_requests_for_free_slots_do_not_count_as_waiting():
    async def fill():
        waiting = JobQueue(1, n_slots=2)
        jobs = [Job(None, f"{n}") for n in range(5)]
        for job in jobs[:3]:
            waiting.put(job)
        with pytest.raises(ApiError, match=r"the queue is full \(1 waiting\)"):
            waiting.put(jobs[3])
        # jobs that were taken out of the queue take the slots
        assert [waiting.get(), waiting.get()] == jobs[:2]
        with pytest.raises(ApiError, match="the queue is full"):
            waiting.put(jobs[3])
        # the client has its answer, but the slot is not free yet
        jobs[0].end = {"kind": "end"}
        waiting.put(jobs[3])
        waiting.done(jobs[0])
        with pytest.raises(ApiError, match="the queue is full"):
            waiting.put(jobs[4])

    asyncio.run(fill())


def test_store_keeps_archives_of_moved_chats_and_removes_partial_files(tmp_path):
    moved, killed = "0123456789abcdef.kv", "fedcba9876543210.kv"
    for name in (f"{moved}.archive", f"{killed}.archive.next", f"{killed}.kvtool.part", f"{killed}.part"):
        (tmp_path / name).write_bytes(b"kvtool archive 1 ")
    with closing(ChatStore(tmp_path, 10**9, {})) as chats:
        assert [entry.name for entry in tmp_path.iterdir()] == [f"{moved}.archive"]
        # n_unusable counts the archive, because the server cannot use it without its session file
        assert chats.n_unusable == 1


def test_newest_file_of_earlier_turns_takes_the_place_of_a_missing_session(tmp_path):
    """Earlier versions of kvtool kept a chat's earlier turns in FILE.1, FILE.2, ..."""
    messages = [message("user", "one"), message("assistant", "two"), message("user", "three")]

    def stored(name, messages):
        meta = {"digest": name[0] * 4, "messages": messages, "fixed": {}, "marks": []}
        session.write(tmp_path / name, meta, [("tokens", np.arange(3, dtype=np.int32))])

    one, two, damaged = (f"{letter * 16}.kv" for letter in "abc")
    stored(one, messages)
    stored(f"{one}.1", messages[:1])
    for n in (1, 2, 10):
        stored(f"{two}.{n}", messages[: n % 8])
    stored(f"{damaged}.1", messages)
    (tmp_path / damaged).write_bytes(b"x")
    for _ in range(2):
        with closing(ChatStore(tmp_path, 10**9, {})) as chats:
            assert sorted(chat.path.name for chat in chats.chats) == [one, two]
            assert chats.n_unusable == 2
        assert session.read_meta(tmp_path / two)["messages"] == messages[:2]
        names = sorted(path.name for path in tmp_path.iterdir())
        assert names == [one, f"{one}.1", two, f"{two}.1", f"{two}.2", damaged, f"{damaged}.1"]


@pytest.mark.parametrize("messages", [None, 5, ["x"], [{"content": "x"}]])
def test_store_leaves_sessions_without_valid_messages_unchanged(tmp_path, messages):
    meta = {"digest": "abcd", "fixed": {}} | ({} if messages is None else {"messages": messages})
    for name in ("0123456789abcdef.kv", "0123456789abcdef.kv.1"):
        session.write(tmp_path / name, meta, [("tokens", np.arange(3, dtype=np.int32))])
    with closing(ChatStore(tmp_path, 10**9, {})) as chats:
        assert (len(chats), chats.n_unusable) == (0, 2)
    assert len([*tmp_path.iterdir()]) == 2


TOKENS = np.arange(100, dtype=np.int32)


def stored(store, tokens, role="user", before=None):
    """Store a chat with these tokens in a session of about 4,000 bytes. Return the chat."""
    meta = {"fixed": store.fixed, "padding": "x" * 3500}

    def save_to(path, _, fields):
        session.write(path, meta | fields | {"messages": messages}, [("tokens", tokens)])
        return ()

    messages = [message(role, "Hello.")]
    engine = SimpleNamespace(checkpoints=SimpleNamespace(to_save=list))
    writer = SimpleNamespace(engine=engine, stream=tokens)
    chat = SimpleNamespace(writer=writer, messages=messages, save_to=save_to)
    return store.add(before, os.urandom(8), chat, {}, turn_ends=[])


def with_end(n, value):
    """Return TOKENS with another end from token n on."""
    return np.concatenate([TOKENS[:n], np.full(len(TOKENS) - n, value, np.int32)])


@pytest.mark.parametrize("n", [50, 99])
def test_full_store_deletes_variants_of_a_chat_before_other_chats(tmp_path, n):
    with closing(ChatStore(tmp_path, 20_000, {})) as store:
        other = stored(store, TOKENS + 1000)
        variants = [stored(store, with_end(n, -value)) for value in range(1, 11)]
        assert store.chats == [other, *variants[-len(store) + 1 :]]
        assert len(store) > 3
        assert sorted(chat.path for chat in store.chats) == sorted(tmp_path.iterdir())


def test_without_variants_the_least_recently_used_chats_are_deleted(tmp_path):
    with closing(ChatStore(tmp_path, 20_000, {})) as store:
        # less than half of the tokens are equal
        chats = [stored(store, with_end(49, -value)) for value in range(1, 11)]
        assert store.chats == chats[-len(store) :]
        assert len(store) > 3


@pytest.fixture
def small_disk(tmp_path, monkeypatch):
    """Pretend that the disk of tmp_path has 20,000 bytes, which is enough for four sessions of `stored`."""
    n_all, write = 20_000, session.write

    def n_free(_=None):
        return n_all - sum(path.stat().st_size for path in tmp_path.iterdir())

    def limited(path, meta, arrays):
        file = BytesIO()
        session.dump(file, meta, arrays)
        if len(file.getvalue()) > n_free():
            raise session.cannot("write", path, OSError(errno.ENOSPC, "No space left on device"))
        write(path, meta, arrays)

    monkeypatch.setattr(session, "write", limited)
    monkeypatch.setattr("kvtool.serve.store.chats.free_disk_bytes", n_free)


@pytest.fixture
def full_store(tmp_path, small_disk):
    """Return a store that has filled the disk with chats, and the chats in the order of their last use."""
    with closing(ChatStore(tmp_path, 10**9, {})) as store:
        listed = [stored(store, TOKENS + 1000 * n) for n in range(4)]
        assert all(chat.path.exists() for chat in listed)
        yield store, listed


def test_full_disk_lets_the_least_recently_used_chat_be_deleted(full_store):
    store, (oldest, *others) = full_store
    new = stored(store, TOKENS + 9000)
    assert store.chats == [*others, new]
    assert [chat.path.exists() for chat in (oldest, *others, new)] == [False, True, True, True, True]


def test_full_disk_does_not_let_chats_in_use_or_the_stored_chat_be_deleted(full_store):
    store, listed = full_store
    store.in_use.append(lambda: {listed[1]})
    new = stored(store, TOKENS + 9000, before=listed[0])
    # the new chat has replaced the first one
    assert (store.chats, new.path) == ([listed[1], listed[3], new], listed[0].path)
    store.in_use.append(lambda: set(store.chats))
    stored(store, TOKENS + 8000)
    before = [*store.chats]
    with pytest.raises(SessionError, match="No space left on device"):
        stored(store, TOKENS + 7000)
    assert store.chats == before
    assert all(chat.path.exists() for chat in before)


def test_full_disk_stops_deletions_that_free_no_space(full_store, monkeypatch):
    store, listed = full_store
    monkeypatch.setattr("kvtool.serve.store.chats.free_disk_bytes", lambda path: 0)
    monkeypatch.setattr(session, "dump", lambda file, *arguments: file.write(b"x" * 10**6))
    with pytest.raises(SessionError, match="No space left on device"):
        stored(store, TOKENS + 9000)
    assert store.chats == listed[1:]


def test_other_errors_while_storing_let_no_chat_be_deleted(full_store, monkeypatch):
    store, listed = full_store

    def fails(path, *arguments):
        raise session.cannot("write", path, OSError(errno.EIO, "Input/output error"))

    monkeypatch.setattr(session, "write", fails)
    with pytest.raises(SessionError, match="Input/output error"):
        stored(store, TOKENS + 9000)
    assert store.chats == listed


def test_chats_are_stored_on_a_full_disk_and_slots_keep_theirs(talker, tmp_path, monkeypatch):
    with serve_in_process(talker, tmp_path, policy="h2o", budget="96") as server:
        store = server.pool.slots[0].chats
        server.chat([message("user", "0")])
        # from now on, the disk has room for two chats of this size
        n_all, write = 5 * store.n_bytes // 2, session.write

        def n_free(_=None):
            return n_all - sum(path.stat().st_size for path in tmp_path.iterdir())

        def limited(path, *arguments):
            write(path, *arguments)
            if n_free() < 0:
                path.unlink()
                raise session.cannot("write", path, OSError(errno.ENOSPC, "No space left on device"))

        monkeypatch.setattr(session, "write", limited)
        monkeypatch.setattr("kvtool.serve.store.chats.free_disk_bytes", n_free)
        for n in range(1, 6):
            answer = server.ask(
                "/v1/chat/completions", {"messages": [message("user", f"{n}")], "max_tokens": 6}
            )
            assert "unsaved" not in answer.json()["kvtool"]
            (in_use,) = (used for slot_chats in store.in_use if (used := slot_chats()))
            assert in_use == {store.chats[-1]}
        assert 0 < len(store) < 5


def test_only_the_answer_of_a_chat_that_cannot_be_stored_says_so(talker, tmp_path, monkeypatch):
    def full(path, *arguments):
        raise session.cannot("write", path, OSError(errno.ENOSPC, "No space left on device"))

    with serve_in_process(talker, tmp_path, policy="h2o", budget="96") as server:
        monkeypatch.setattr(session, "write", full)
        asked = {"messages": [message("user", "Hello.")], "max_tokens": 6}
        assert "No space left" in server.ask("/v1/chat/completions", asked).json()["kvtool"]["unsaved"]
        answer = server.ask("/v1/completions", {"prompt": "Hello", "max_tokens": 6}).json()
        assert "unsaved" not in answer["kvtool"]
        assert server.site.counts.unsaved == 1


@pytest.mark.parametrize("policy", ["full", "h2o"])
def test_chat_does_not_replace_an_equal_chat_of_another_name(talker, tmp_path, policy):
    with serve_in_process(talker, tmp_path, policy=policy, budget="512") as server:
        store = server.pool.slots[0].chats
        first = [message("user", "Hello you. " * 8)]
        first.append(server.chat(first, prompt_cache_key="one")[0])
        (path,) = (chat.path for chat in store.chats)
        for n, name in enumerate(("two", None), 2):
            # this chat continues the first one
            chat = [*first, message("user", f"{n}")]
            chat.append(server.chat(chat, prompt_cache_key=name)[0])
            assert len(store) == n
            # its next turn replaces only the chat itself
            server.chat([*chat, message("user", "And?")], prompt_cache_key=name)
            assert len(store) == n
        server.chat([*first, message("user", "1")], prompt_cache_key="one")
        assert len(store) == 3
        assert store.chats[-1].path == path
        # this name cannot be written to a file as it is
        body = json.dumps({"messages": first, "max_tokens": 6, "prompt_cache_key": "\ud800"})
        assert "unsaved" not in server.ask("/v1/chat/completions", content=body).json()["kvtool"]
        assert len(store) == 4
    with closing(ChatStore(tmp_path, 10**9, store.fixed)) as again:
        assert {chat.path: chat.name for chat in again.chats} == {
            chat.path: chat.name for chat in store.chats
        }


def test_log_has_a_line_about_a_damaged_chat_that_is_deleted(tmp_path):
    lines = []
    with closing(ChatStore(tmp_path, 10**9, {}, lines.append)) as store:
        chat = stored(store, TOKENS)
        os.truncate(chat.path, 1000)
        with pytest.raises(SessionError, match="truncated"):
            store.load(chat)
    assert lines == [f"{chat.path} is damaged or missing: this stored chat was deleted"]
    assert not chat.path.exists()


def test_system_prompt_is_not_a_variant_of_its_chats(tmp_path):
    with closing(ChatStore(tmp_path, 20_000, {})) as store:
        other = stored(store, TOKENS + 1000)
        system = stored(store, TOKENS[:30], role="system")
        for value in range(1, 11):
            stored(store, with_end(30, -value))
            system.used = time.monotonic()
        assert system in store.chats
        assert other not in store.chats


def filled(folder, streams):
    """Return a store of chats with these streams, which were used in this order."""
    store = ChatStore(folder, 0, {})
    for i, tokens in enumerate(streams):
        chat = StoredChat(folder / f"{i}.kv", ArchiveFile(), b"", 1, False, [], [], used=float(i))
        chat.token_bytes = np.array(tokens, np.int32).tobytes()
        store.chats.append(chat)
    return store


def test_chats_are_deleted_in_the_order_of_the_definition(tmp_path):
    random = np.random.default_rng(0)
    n_variant = 0
    for _ in range(200):
        streams = [random.integers(0, 2, random.integers(0, 7)).tolist() for _ in range(12)]
        begun = [stream[: (len(stream) + 1) // 2] for stream in streams]
        is_variant = [
            bool(half) and any(later[: len(half)] == half for later in streams[i + 1 :])
            for i, half in enumerate(begun)
        ]
        n_variant += sum(is_variant)
        order = sorted(range(11), key=lambda i: (not is_variant[i], i))
        for n in (1, 5, 11):
            with closing(filled(tmp_path, streams)) as store:
                store.max_bytes = 12 - n
                chats = [*store.chats]
                store._shrink(keep=chats[-1])
                assert {i for i, chat in enumerate(chats) if chat not in store.chats} == {*order[:n]}
    assert 100 < n_variant < 2000


def test_choice_of_a_chat_to_delete_takes_time_in_proportion_to_the_chats(tmp_path):
    def n_calls(n):
        calls = 0

        def count(frame, event, _):
            nonlocal calls
            calls += event in ("call", "c_call")

        with closing(filled(tmp_path, ([i] * 9 for i in range(n)))) as store:
            store.max_bytes = n - 1
            sys.setprofile(count)
            try:
                store._shrink(keep=store.chats[-1])
            finally:
                sys.setprofile(None)
            assert len(store) == n - 1
        return calls

    assert n_calls(400) < 2.5 * n_calls(200)


def test_chat_of_a_policy_that_had_no_such_parameter_yet_is_found(tmp_path):
    parameters = {"budget": 64, "history": 400}
    with closing(ChatStore(tmp_path, 10**9, {"policy": "scissorhands", "parameters": parameters})) as store:
        stored(store, TOKENS)
    for t, n in (("stream", 1), ("cells", 0)):
        fixed = {"policy": "scissorhands", "parameters": parameters | {"t": t}}
        with closing(ChatStore(tmp_path, 10**9, fixed)) as store:
            assert (len(store), len(store.others)) == (n, 1 - n)


def test_chats_of_other_models_count_towards_the_limit(tmp_path):
    with closing(ChatStore(tmp_path, 20_000, {"model": "a"})) as store:
        old = [stored(store, TOKENS + 1000 * n).path for n in range(3)]
    for i, path in enumerate(old):
        os.utime(path, (1000 + i, 1000 + i))
    other_files = [
        tmp_path / name for name in ("mine.kv", "0123456789abcdef.kv", "fedcba9876543210.kv.archive")
    ]
    for path in other_files:
        path.write_bytes(b"\0" * 30_000)
    other_files.append(tmp_path / "00112233aabbccdd.kv")
    session.write(other_files[-1], {"fixed": {"model": "b"}, "messages": []}, [])
    with closing(ChatStore(tmp_path, 20_000, {"model": "b"})) as store:
        assert (len(store), len(store.others), store.n_unusable, store.n_foreign) == (0, 3, 2, 1)
        assert [line.rpartition(f" in {tmp_path}: ")[::2] for line in opening._notes(store)] == [
            ("chats of another model, policy or options", "3; they count towards --sessions-bytes"),
            ("damaged files and archives without a chat", "2; they stay"),
            ("chats of `kvtool chat`", "1; they stay"),
        ]
        # the metrics count all chats, whose bytes they show
        site = Site("m", "h2o", JobQueue(1), has_metrics=True)
        site.pool = SimpleNamespace(slots=[SimpleNamespace(chats=store)], cache_bytes=0)
        with closing(InProcessServer(site, site.pool)) as server:
            text = server.ask("/metrics", method="GET").text
        assert "\nkvtool_stored_chats 3\n" in text
        assert f"\nkvtool_stored_bytes {store.n_bytes}\n" in text
        new = [stored(store, TOKENS + 1000 * n).path for n in range(2)]
        # five chats have more than 20,000 bytes, so the oldest is deleted
        assert [path.exists() for path in old] == [False, True, True]
        assert store.n_bytes == sum(path.stat().st_size for path in [*old[1:], *new])
        new += [stored(store, TOKENS + 1000 * n).path for n in range(2, 4)]
        assert sorted(tmp_path.iterdir()) == sorted([*other_files, *new])


def test_server_removes_folders_of_killed_servers(tmp_path, monkeypatch):
    monkeypatch.setenv("KVTOOL_CACHE", str(tmp_path))
    killed, alive = tmp_path / "serve-killed", tmp_path / "serve-alive"
    for folder in (killed, alive):
        folder.mkdir()
        (folder / "0123456789abcdef.kv").write_bytes(b"\0")
    with locked(alive / session.LOCK):
        with lock_folder(None) as current:
            assert current.parent == tmp_path
            assert (killed.exists(), alive.exists()) == (False, True)
        assert list(tmp_path.iterdir()) == [alive]


def test_server_does_not_remove_the_folder_of_a_server_that_starts(tmp_path, monkeypatch):
    monkeypatch.setenv("KVTOOL_CACHE", str(tmp_path))
    folders = []

    def start():
        with lock_folder(None) as folder:
            folders.append((folder, folder.exists()))

    second = threading.Thread(target=start)

    def locked_late(path, **how):
        """Before the first server locks its folder, start a second server."""
        if path.parent != tmp_path and not second.ident:
            second.start()
            # the second server waits; without the wait, it would end here
            second.join(0.5)
            assert path.parent.exists()
        return locked(path, **how)

    monkeypatch.setattr("kvtool.serve.store.chats.locked", locked_late)
    with lock_folder(None) as first:
        second.join(TIMEOUT_S)
        assert first.exists()
        ((other, was_there),) = folders
        assert was_there
        assert other != first


def test_two_servers_cannot_use_one_folder(tmp_path):
    raises_in_use = pytest.raises(SessionError, match="is in use by another server; name another folder")
    with lock_folder(tmp_path), raises_in_use, lock_folder(tmp_path):
        pass


def test_only_its_user_can_read_a_folder_that_the_server_creates(tmp_path):
    new, existing = tmp_path / "above" / "new", tmp_path / "mine"
    existing.mkdir()
    existing.chmod(0o755)
    for folder, mode in ((new, 0o700), (existing, 0o755)):
        # the second server finds a folder that exists
        for _ in range(2):
            with lock_folder(folder):
                assert stat.S_IMODE(folder.stat().st_mode) == mode
