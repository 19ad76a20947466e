"""Run Python programs as forks of a process that has already imported kvtool.

Starting Python takes half a second of CPU before kvtool does anything; a fork takes a tenth of that. The
`Popen` and `run` of this file work like subprocess.Popen and subprocess.run for `python -m MODULE ...` and
`python -c CODE ...`. The fork is a child of the test process. It has its own arguments, streams, folder,
environment and signals, and it ends like any other process. Calls that a fork cannot serve start a new
Python. All forks load compiled kernels from the $KVTOOL_CACHE of the process that forks, even if their own
$KVTOOL_CACHE differs.

Tests of start-up, of imports and of memory use `run_python`, which always starts a new Python.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import io
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import threading
from importlib import import_module
from itertools import chain
from pathlib import Path
from types import ModuleType

from typer.main import get_command

from kvtool import cli
from tests.blocking_policy import TIMEOUT_S

ROOT = Path(__file__).resolve().parents[1]

IMPORTED = """
    filelock gguf jinja2 markdown_it numpy.ctypeslib prompt_toolkit.input.defaults prompt_toolkit.patch_stdout
    prompt_toolkit.shortcuts pytest rich.live rich.progress rich.status rich.table
    kvtool.api kvtool.build.kernels kvtool.build.wheel kvtool.config.opening kvtool.llama.sampler
    kvtool.measure.statistics kvtool.models.hub kvtool.models.stored kvtool.policies.h2o
    kvtool.policies.recall kvtool.serve.http.server kvtool.tasks.longbench
    kvtool.cli.chat.command kvtool.cli.chat.input kvtool.cli.chat.reply kvtool.cli.chat.terminal
    kvtool.cli.compare.command kvtool.cli.config kvtool.cli.doctor kvtool.cli.eval.command kvtool.cli.explain
    kvtool.cli.generate kvtool.cli.inspect.command kvtool.cli.models kvtool.cli.perplexity
    kvtool.cli.policies kvtool.cli.serve kvtool.cli.session kvtool.cli.texts kvtool.cli.worker
""".split()  # noqa: SIM905

READ_AT_RUN_TIME = (
    *("COLORFGBG", "COLUMNS", "COMP_", "EDITOR", "HF_", "HOME", "KVTOOL_", "LINES", "NO_COLOR", "PATH"),
    *("PROMPT_TOOLKIT_", "PYTEST_", "SHELL", "TEMP", "TERM", "TMP", "VISUAL", "XDG_"),
    *("_KVTOOL_", "_TYPER_"),
)
"""Prefixes of environment variables that no module reads at import, so forks may have other values."""

OPTIONS = {
    *("args", "stdin", "stdout", "stderr", "bufsize", "text", "encoding", "errors", "cwd", "env"),
    *("preexec_fn", "start_new_session"),
}
"""Options of subprocess.Popen that a fork supports."""

SUBREAPER = 36
"""Linux's PR_SET_CHILD_SUBREAPER: the process that sets it becomes the parent of its orphaned descendants."""

MAX_REQUEST = 100_000
"""Maximum size of a request in bytes. A request must fit into one message."""


class Popen(subprocess.Popen):
    """A subprocess.Popen that starts a fork if it can. Otherwise it starts a new Python.

    is_forked: True if the process is a fork.
    preexec_fn: a function that pickle can find by its name. With any other function, a new Python is started.
    """

    is_forked = False

    def __init__(self, args, **options):
        self._can_fork = OPTIONS.issuperset(options)
        self._in_session = options.get("start_new_session", False)
        super().__init__(args, **options)

    def _execute_child(self, *arguments):
        # subprocess passes these arguments by position: Python 3.10 to 3.14 have the same order
        args, _, preexec_fn, _, _, folder, environment = arguments[:7]
        stdin, _, _, stdout, _, stderr = ends = arguments[10:16]
        pid = None
        if self._can_fork:
            pid = self._fork(args, preexec_fn, folder, environment, (stdin, stdout, stderr))
        if pid is None:
            super()._execute_child(*arguments)
            return
        self.pid, self._child_created, self.is_forked = pid, True, True
        self._close_pipe_fds(*ends)

    def _fork(self, args, preexec_fn, folder, environment, streams):
        """Return the process id of a fork that runs this program; None if no fork can run it."""
        words = [os.fsdecode(word) for word in args] if isinstance(args, list) else []
        if words[:1] != [sys.executable] or words[1:2] not in (["-m"], ["-c"]):
            return None
        environment = dict(os.environ if environment is None else environment)
        folder = os.path.abspath(folder or ".")
        request = words, folder, environment, self._in_session, preexec_fn
        try:
            message = pickle.dumps(request)
        except (AttributeError, TypeError, pickle.PicklingError):
            return None
        if len(message) > MAX_REQUEST or not os.path.isdir(folder):
            return None
        streams = [i if stream == -1 else stream for i, stream in enumerate(streams)]
        with _lock:
            source = _source(environment)
            return source and source.fork(message, streams)


def run(args, *, input=None, timeout=TIMEOUT_S, check=False, popen=Popen, **options):
    """subprocess.run with the Popen of this file. It captures text, unless `options` say otherwise.

    args: list of arguments. Bytes are passed unchanged. All other types are converted to strings.
    """
    pipe = subprocess.PIPE
    options = {"stdout": pipe, "stderr": pipe, "text": True} | options
    if input is not None:
        options["stdin"] = pipe
    words = [word if isinstance(word, bytes) else str(word) for word in args]
    with popen(words, **options) as process:
        try:
            outputs = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(args, process.returncode, *outputs)
    if check:
        done.check_returncode()
    return done


def run_python(*args, **options):
    """`run` with a new Python, never a fork: for tests of start-up, of imports and of memory."""
    return run([sys.executable, *args], popen=subprocess.Popen, **options)


def ignore_sighup():
    """Ignore SIGHUP, so that closing the terminal does not end the process. For preexec_fn."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


class Source:
    """A process that has imported kvtool and forks on request. Raises OSError if forks would not work."""

    def __init__(self, environment):
        if not sys.platform.startswith("linux"):
            raise OSError("only Linux gives a process its children's orphans")
        self._libc = ctypes.CDLL(None)
        self._socket, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "tests.fork_server", str(child_end.fileno())]
        with child_end:
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, pass_fds=[child_end.fileno()]
            )
        reply = self._socket.recv(16)
        assert reply, "the process that forks does not start"
        if reply != b"ready":
            self.close()
            raise OSError("it has threads, which its forks would lack")

    def fork(self, message, streams):
        """Return the process id of a new fork, which is a child of this process."""
        self._libc.prctl(SUBREAPER, 1, 0, 0, 0)
        try:
            socket.send_fds(self._socket, [message], streams)
            answer = self._socket.recv(16)
        finally:
            self._libc.prctl(SUBREAPER, 0, 0, 0, 0)
        assert answer, "the process that forks has ended"
        return int(answer)

    def close(self):
        self._socket.close()
        self._process.wait()


_lock = threading.Lock()
_sources: dict[frozenset[tuple[str, str]], list[Source | None]] = {}


def _source(environment):
    """Return the Source for this environment. Return None if forks would not work.

    The first call for an environment also returns None: starting a Source pays off only from the second
    program on.
    """
    key = frozenset(item for item in environment.items() if not item[0].startswith(READ_AT_RUN_TIME))
    if key not in _sources:
        _sources[key] = []
        return None
    if not _sources[key]:
        try:
            source = Source(environment)
        except OSError:
            source = None
        _sources[key].append(source)
    return _sources[key][0]


@atexit.register
def _close():
    for source in filter(None, chain(*_sources.values())):
        source.close()


# the functions below run in the process that forks, or in a fork


def _main(number):
    """Fork once per request.

    Return the request in the fork; in this process, return None when requests end.
    """
    sys.path[0] = str(ROOT)
    # a terminal also sends Ctrl-C to this process, which ignores it and ends with the tests
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    at_start = dict(os.environ)
    for name in IMPORTED:
        import_module(name)
    # build all commands, and keep them
    list(import_module("kvtool.cli.settings").all_commands(get_command(cli.app)))
    imported = {name: value for name, value in os.environ.items() if at_start.get(name) != value}
    gc.collect()
    gc.freeze()
    requests = socket.socket(fileno=number)
    requests.send(b"ready" if len(os.listdir("/proc/self/task")) == 1 else b"threads")
    while True:
        message, streams, _, _ = socket.recv_fds(requests, MAX_REQUEST, 3)
        if not message:
            return None
        pipe_read, pipe_write = os.pipe()
        if not (between := os.fork()):
            if child := os.fork():
                os.write(pipe_write, str(child).encode())
                os._exit(0)
            for descriptor in (pipe_read, pipe_write):
                os.close(descriptor)
            requests.close()
            return message, streams, imported
        os.close(pipe_write)
        child = os.read(pipe_read, 16)
        # the process `between` ends at once, so `child` becomes a child of the test process (the subreaper)
        os.waitpid(between, 0)
        for descriptor in (pipe_read, *streams):
            os.close(descriptor)
        requests.send(child)


def _set_up_fork(message, streams, imported):
    """Set up this fork like a newly started process. Return ("-m" or "-c", module or code)."""
    words, folder, environment, in_session, preexec_fn = pickle.loads(message)
    if in_session:
        os.setsid()
    for i, stream in enumerate(streams):
        os.dup2(stream, i)
        os.close(stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment | imported)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # if the tests run under nohup, forks would otherwise ignore SIGHUP
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if preexec_fn:
        preexec_fn()
    for i, name in enumerate(("stdin", "stdout", "stderr")):
        stream = _stream(i, getattr(sys, name), f"<{name}>")
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.orig_argv = words
    _, kind, program, *arguments = words
    sys.path[0] = "" if kind == "-c" else folder
    sys.argv = [kind, *arguments]
    return kind, program


def _stream(number, stream_at_start, name):
    """Open a standard stream as Python does at start-up, with this process's encoding and buffering."""
    # True if $PYTHONUNBUFFERED is set
    writes_through = stream_at_start.write_through
    if number and writes_through:
        raw = buffer = open(number, "wb", 0, closefd=False)  # noqa: SIM115
    else:
        buffer = open(number, "wb" if number else "rb", closefd=False)  # noqa: SIM115
        raw = buffer.raw
    raw.name = name
    is_line_buffered = (number == 2 or raw.isatty()) and not writes_through
    buffering = {"line_buffering": is_line_buffered, "write_through": writes_through}
    stream = io.TextIOWrapper(
        buffer, stream_at_start.encoding, stream_at_start.errors, "\n" if number else None, **buffering
    )
    stream.mode = "w" if number else "r"
    return stream


def _run(kind, program):
    """Run a module or code as Python does. Return the program's exit code, or 0."""
    try:
        if kind == "-m":
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            main_modules.append(sys.modules["__main__"])
            sys.modules["__main__"] = ModuleType("__main__")
            exec(compile(program, "<string>", "exec"), vars(sys.modules["__main__"]))
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        return end.code or 0
    return 0


main_modules: list[ModuleType] = []


def _end(code):
    """End like Python, but do not clear the modules: that would take 50 ms of CPU."""
    threading._shutdown()
    atexit._run_exitfuncs()
    try:
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
    except (OSError, ValueError):
        # a stream cannot be flushed: let Python report the error at its exit
        sys.exit(code)
    ctypes.CDLL(None).exit(code & 0xFF)


if __name__ == "__main__" and (request := _main(int(sys.argv[1]))):
    _end(_run(*_set_up_fork(*request)))
