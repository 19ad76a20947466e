"""Fixtures that several test files share: small models, and one thread for everything."""

from __future__ import annotations

import gc
import os
from contextlib import ExitStack
from functools import partial
from zlib import crc32

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
    os.environ.setdefault(name, "1")
# Some libraries start more threads in spite of these limits. Waiting threads must not occupy a core.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# the developer's own settings must not reach the tests
os.environ["KVTOOL_CONFIG"] = os.devnull
# nor may the tests add to the developer's history of chats, which each chat reads when it starts
os.environ["XDG_STATE_HOME"] = os.devnull
for name in [name for name in os.environ if name.startswith("KVTOOL_")]:
    if name not in ("KVTOOL_CACHE", "KVTOOL_CONFIG", "KVTOOL_WHEELS"):
        del os.environ[name]
# without bytecode files, each of hundreds of processes would compile the package again
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# pytest-xdist sets COLUMNS and LINES, but tests of terminals set their own sizes
for name in ("COLUMNS", "LINES"):
    os.environ.pop(name, None)

# with Python's threshold of 700 objects, the search for garbage would take up to a quarter of the time
gc.set_threshold(20_000, 20, 20)

import pytest  # noqa: E402
from filelock import FileLock  # noqa: E402

from tests import tiny, tiny_kinds  # noqa: E402

LONGEST = (
    *("exactness", "policies", "kinds", "serve_clients", "serve_faults", "serve", "chat_session"),
    *("chat_terminal", "cli", "help", "archive", "constraint", "encodings", "sliding", "tasks"),
    *("recall", "kvzip", "faults", "serve_forced", "prefill"),
)
"""The test files that take longest. They run first, so that all workers end at about the same time."""

SIZES = ("budget", "evict_every", "seed", "pinned", "shape", "group", "held", "n_value")
"""Test parameters that change only the size of a case."""


def pytest_addoption(parser):
    parser.addoption(
        "--small",
        action="store_true",
        help="run each case once, at its first size, and no test marked large: for slow kernels",
    )
    parser.addoption(
        "--long", action="store_true", help="every size, kill and random call, not a share of them"
    )


def _cases(items, sizes):
    """Group items into lists. The items of a list differ only in the parameters `sizes(item)`."""
    cases = {}
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        values = (str(value) for name, value in params.items() if name not in sizes(item))
        cases.setdefault((item.path, item.originalname, *values), []).append(item)
    return cases.values()


def _shared(items):
    """Return the items to run without --long: all unmarked items, and some items that have a `share` mark.

    The mark share(n, *names) chooses n items of each case. A case consists of the items that differ only in
    the parameters `names` (default: SIZES). The choice starts at an item that depends on the case's name: the
    cases together try all sizes, and a new case does not change what other cases run. share(0): only --long
    runs the test.
    """
    marks = {item: mark for item in items if (mark := item.get_closest_marker("share"))}
    selected = set(items) - set(marks)
    for case in _cases(marks, lambda item: marks[item].args[1:] or SIZES):
        n, turn = marks[case[0]].args[0], crc32(case[0].name.encode())
        selected.update(case[(turn + i * len(case) // n) % len(case)] for i in range(n))
    return selected


def pytest_collection_modifyitems(config, items):
    first = {f"test_{name}.py": i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: first.get(item.path.name, len(first)))
    if config.getoption("--small"):
        small = [case[0] for case in _cases(items, lambda item: SIZES)]
        selected = {item for item in small if not item.get_closest_marker("large")}
    elif config.getoption("--long"):
        return
    else:
        selected = _shared(items)
    config.hook.pytest_deselected(items=[item for item in items if item not in selected])
    items[:] = [item for item in items if item in selected]


@pytest.fixture(scope="session")
def share_of(request):
    """Return share_of(n, n_all), which returns n_all with --long, else n.

    It is for checks that are slow and rarely fail.
    """
    return lambda n, n_all: n_all if request.config.getoption("--long") else n


@pytest.fixture(scope="session")
def smollm2():
    """Path of the real small model, downloaded if necessary."""
    from kvtool.models.resolve import resolve

    return resolve("smollm2-135m")


def _for_all_workers(tmp_path_factory, name, write):
    """Return the path of a file that all pytest workers share. The first worker writes it."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    with FileLock(f"{path}.lock"):
        if not path.exists():
            write(path.with_suffix(".part"))
            path.with_suffix(".part").rename(path)
    return path


@pytest.fixture(scope="session")
def smol(smollm2, tmp_path_factory):
    """A small random model with SmolLM2's file name, chat template and trained context.

    It has the first sixth of SmolLM2's tokens, so it takes a tenth of the time to load or to apply a grammar.
    """
    return _for_all_workers(tmp_path_factory, "smollm2-135m.gguf", partial(tiny.write_like, smollm2))


@pytest.fixture(scope="session")
def smol_whole(smollm2, tmp_path_factory):
    """Like `smol`, but with all tokens of SmolLM2, so texts have as many tokens as with SmolLM2."""
    write = partial(tiny.write_like, smollm2, n_vocab=None)
    return _for_all_workers(tmp_path_factory, "whole/smollm2-135m.gguf", write)


@pytest.fixture(scope="session")
def smollm2_f32(smollm2, tmp_path_factory):
    """The real SmolLM2 in F32, so that the order of sums changes results very little.

    All workers share this 540 MB file.
    """
    return _for_all_workers(tmp_path_factory, "smollm2-f32.gguf", partial(tiny.dequantize, smollm2))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """tiny_model(arch="lfm2", n_conv=3, ...) returns the path of a small random model.

    Each model is written only once.
    """
    folder = tmp_path_factory.mktemp("tiny")

    def make(arch="llama", **shape):
        path = folder / ("-".join([arch, *(f"{k}{v}" for k, v in sorted(shape.items()))]) + ".gguf")
        if not path.exists():
            tiny_kinds.write(arch, path, **shape)
        return path

    return make


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory):
    """A small random model that chats, trained for 512 tokens."""
    path = tmp_path_factory.mktemp("chat") / "chat.gguf"
    tiny.write_llama(path, chat_template=tiny.CHAT_TEMPLATE, n_ctx_train=512)
    return path


@pytest.fixture(scope="session")
def talker(tmp_path_factory):
    """A small random model that chats.

    Its replies have only letters and blanks, so they have no line breaks.
    """
    path = tmp_path_factory.mktemp("talker") / "talker.gguf"
    tiny.write_llama(path, letters=True, chat_template=tiny.CHAT_TEMPLATE, n_ctx_train=8192)
    return path


@pytest.fixture(scope="session")
def hybrid_talker(tmp_path_factory):
    """A small random chat model with recurrent layers."""
    path = tmp_path_factory.mktemp("hybrid") / "hybrid.gguf"
    tiny_kinds.write_lfm2(path, chat_template=tiny.CHAT_TEMPLATE, n_ctx_train=8192)
    return path


@pytest.fixture
def default_talker(talker, monkeypatch):
    """Make `talker` the default model of commands, and return it."""
    monkeypatch.setenv("KVTOOL_MODEL", str(talker))
    return talker


@pytest.fixture
def connect():
    """Return a function that makes OpenAI clients for a URL. They are closed at the end."""
    from tests.serve.client_packages import openai

    with ExitStack() as stack:

        def connected(url, key="none"):
            return stack.enter_context(openai.OpenAI(base_url=url, api_key=key, max_retries=0))

        yield connected
