"""Faults: a crash of compiled code, Ctrl-C, lack of memory, or a closed terminal.

After each fault, the process writes at most one line and ends with the right exit code.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import signal
import struct
import subprocess
import sys
import termios

import pytest

from kvtool.chats import session as sessions
from tests import fork_server
from tests.blocking_policy import TIMEOUT_S, BlockingPolicy, until
from tests.cli.in_process_command import CUT_LINE, RECALL_LINE, assert_one_line
from tests.cli.terminal import ROOT, RUN, Terminal
from tests.engine import rpc_server

pytestmark = pytest.mark.engine
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="as Linux does it")

WRITE = ("generate", "--raw", "-p", "Hello, hello.", "--temp", "0", "-t", "1", "-n", "20")


def python(code, *arguments, **options):
    options = {"stdin": subprocess.DEVNULL} | options
    return fork_server.run([sys.executable, "-c", code, *arguments], cwd=ROOT, **options)


def start(code, *arguments, **options):
    pipe = subprocess.PIPE
    options = {"stdin": subprocess.DEVNULL, "stdout": pipe, "stderr": pipe, "text": True} | options
    return fork_server.Popen([sys.executable, "-c", code, *map(str, arguments)], cwd=ROOT, **options)


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model(n_ctx_train=8192)


CRASHES = {
    "a bad address": "ctypes.string_at(0)",
    "an abort": "os.abort()",
    "a bad number": "os.kill(os.getpid(), signal.SIGFPE)",
    "an abort of ggml": "lib.ggml_abort(b'ggml.c', 1, b'its own words')",
    "an abort of ggml in a thread": "in_thread(lambda: lib.ggml_abort(b'ggml.c', 1, b'words'))",
    "an exception that nobody catches": "ctypes.CDLL('libstdc++.so.6')._ZSt9terminatev()",
}
GUARDED = """
import ctypes, os, signal, sys, threading
from kvtool.llama.libllama.library import lib
from kvtool.llama.libllama.crash import crash_means, damaged, guard
from kvtool.llama.libllama.log import set_verbose

def in_thread(what):
    thread = threading.Thread(target=what)
    thread.start()
    thread.join()
"""


@linux
@pytest.mark.parametrize("crash", CRASHES.values(), ids=CRASHES.keys())
def test_crash_gets_one_line(crash):
    assert_one_line(python(f"{GUARDED}\nguard()\n{crash}"), 4, "llama.cpp has crashed (too little memory, ")


@linux
def test_crash_on_a_model_reports_a_damaged_file():
    code = f"{GUARDED}\nguard()\nwith crash_means(damaged('some.gguf')): os.abort()"
    assert_one_line(python(code), 3, "some.gguf seems to be damaged")


@linux
def test_verbose_crash_shows_the_message_of_ggml():
    code = f"{GUARDED}\nset_verbose(True)\nguard()\n{CRASHES['an abort of ggml']}"
    done = python(code)
    assert done.returncode == 4
    assert "ggml.c:1: its own words\nkvtool: llama.cpp has crashed" in done.stderr


def test_crash_without_the_guard_ends_by_its_signal():
    done = python(f"{GUARDED}\nguard()\nlib.llama_kvtool_guard(None, 0, False)\nos.abort()")
    assert done.returncode == -signal.SIGABRT
    assert done.stderr == ""


DYING_SERVER = """
import os, signal, sys
import numpy as np
from kvtool.llama.cache.context import Context
from kvtool.llama.libllama.crash import guard
from kvtool.llama.loaded.model import Model
from kvtool.llama.libllama.workers import add_rpc

add_rpc(sys.argv[1])
guard()
context = Context(Model(sys.argv[2], n_gpu_layers=99), 256, 8, n_threads=1)
context.decode(np.full(3, 5, np.int32), 0, 1)
os.kill(int(sys.argv[3]), signal.SIGKILL)
context.decode(np.full(3, 5, np.int32), 3, 1)
context.logits()
"""


def test_lost_rpc_worker_gets_one_line(model):
    from kvtool.llama.libllama.library import library_path

    if not (library_path().parent / "libggml-rpc.so").exists():
        pytest.skip("the library is built without RPC")
    with rpc_server.running() as endpoint:
        done = python(DYING_SERVER, endpoint, model, endpoint.process.pid)
    assert_one_line(done, 4, f"the worker at {endpoint} does not answer; restart it")


LIMITED = """
import resource, sys
from kvtool import engine, llama, policies
from kvtool.cli import main

policies.load("streamingllm")
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + int(sys.argv.pop(1)) * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
main()
"""


def limited(megabytes, *options):
    """Run `kvtool generate`. After the library is loaded, its address space may grow by `megabytes`."""
    done = python(LIMITED, megabytes, *WRITE, *options, popen=subprocess.Popen)
    # on CPUs with AMX, ggml writes a line to stderr directly and not to its log
    done.stderr = re.sub(r"^ggml_backend_amx_\w+: failed to allocate .*\n", "", done.stderr)
    return done


# Where memory runs out depends on the CPU: with 40 MB at the file; with 130 MB at the weights, or at the
# cells and buffers; with 160 MB at the weights, or at the graph. llama.cpp then returns an error, throws or
# aborts.
@linux
@pytest.mark.parametrize("megabytes", [40, 130, 160])
def test_lack_of_memory_gets_one_line(megabytes, smollm2):
    done = limited(megabytes, "-m", smollm2)
    # on some CPUs, 130 MB are enough for the weights; 40 MB never are
    for_weights = smollm2.name in done.stderr
    assert_one_line(done, 8, "; choose a smaller model\n" if for_weights else "; choose a smaller --budget, ")
    assert for_weights or megabytes > 40


@linux
def test_lack_of_memory_for_the_cache_gets_one_line(smollm2):
    lines = []
    # the amount that is enough for the weights, but too small for the cells, differs between CPUs
    for megabytes in range(250, 400, 25):
        done = limited(megabytes, "-m", smollm2, "--policy", "full")
        assert_one_line(done, 8)
        lines.append(done.stderr)
        if "no memory for a cache of 8192 cells" in done.stderr:
            return
    pytest.fail("".join(lines))


def test_memory_error_of_python_gets_one_line(model):
    fails = "from kvtool.engine.policy_cache import PolicyCache\ndef fail(*_): raise MemoryError"
    code = f"{fails}\nPolicyCache.reset = fail\n{RUN}"
    assert_one_line(python(code, *WRITE, "-m", model), 8, "out of memory; choose a smaller --budget")


@pytest.mark.parametrize("share", [0.001, 0.2, 0.9])
def test_truncated_model_gets_one_line(share, model, tmp_path):
    data = model.read_bytes()
    (tmp_path / "cut.gguf").write_bytes(data[: int(share * len(data))])
    assert_one_line(python(RUN, *WRITE, "-m", tmp_path / "cut.gguf"), 3, "; download it again")


@linux
@pytest.mark.parametrize(
    "command", [("policies",), ("models", "list", "--json"), ("--help",), ("chat", "--help")]
)
def test_full_disk_at_stdout_gets_one_line(command):
    with open("/dev/full", "w") as full:
        done = python(RUN, *command, stdout=full)
    assert_one_line(done, 1, "cannot write: No space left on device")


@linux
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_short_write_of_stdout_gets_one_line(tmp_path, unbuffered):
    # the file may have one block, so the system writes only the first part of the text
    shell = f"ulimit -f 1; exec {shlex.quote(sys.executable)} -m kvtool policies --json > out"
    env = os.environ | {"PYTHONUNBUFFERED": unbuffered, "PYTHONPATH": str(ROOT)}
    # the limit must not cut Python's compiled files
    env["PYTHONDONTWRITEBYTECODE"] = "1"
    done = subprocess.run(["sh", "-c", shell], stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=env)
    done.stdout = ""
    assert_one_line(done, 1, "cannot write: File too large")


@pytest.mark.parametrize(
    ("command", "exit_code", "words"),
    [
        ("policies --json >&-", 1, "cannot write: Bad file descriptor"),
        ("--help >&-", 1, "cannot write: Bad file descriptor"),
        ("perplexity - <&-", 5, "stdin is empty"),
    ],
)
def test_closed_stdin_or_stdout_gets_one_line(command, exit_code, words):
    shell = f"{shlex.quote(sys.executable)} -m kvtool {command}"
    assert_one_line(subprocess.run(["sh", "-c", shell], stderr=subprocess.PIPE, text=True), exit_code, words)


@linux
@pytest.mark.parametrize("stderr", ["closed", "full"])
@pytest.mark.parametrize("command", ["generate", "perplexity", "compare"])
def test_notes_that_cannot_be_written_cost_no_result(model, tmp_path, command, stderr):
    (tmp_path / "text").write_text("Hello, hello. " * 20)
    # stderr gets a note about the cut answer, a note about the text, or a line for each run
    options = {
        "generate": ("-f", tmp_path / "text", "--raw", "-n", 5, "--json"),
        "perplexity": (tmp_path / "text",),
        "compare": (tmp_path / "text", "--policies", "local", "--budgets", 64, "--json"),
    }[command]

    def run(*words):
        words = [sys.executable, "-m", "kvtool", command, *map(str, words)]
        if stderr == "full":
            with open("/dev/full", "w") as full:
                return fork_server.run(words, stderr=full, cwd=ROOT)
        return subprocess.run(["sh", "-c", f"{shlex.join(words)} 2>&-"], stdout=subprocess.PIPE, cwd=ROOT)

    done = run(*options, "-m", model, "-t", "1")
    assert done.returncode == 0
    assert json.loads(done.stdout)
    # errors keep their exit codes
    assert run(*["-f"] * (command == "generate"), "no such file").returncode == 5


def test_all_streams_closed_exits_1():
    shell = f"{shlex.quote(sys.executable)} -m kvtool policies <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", shell], check=False).returncode == 1


@pytest.mark.parametrize("command", [("policies", "--json"), ("models", "list"), ("doctor",)])
def test_closed_pipe_ends_the_command_quietly(command):
    read, write = os.pipe()
    os.close(read)
    done = python(RUN, *command, stdout=write)
    os.close(write)
    assert done.returncode == 128 + signal.SIGPIPE
    assert done.stderr == ""


# tests of Ctrl-C: PRESS sends SIGINT at a given stage of the process

PRESS = """
import os, signal, sys
from importlib.abc import MetaPathFinder

def press(*_):
    os.kill(os.getpid(), signal.SIGINT)

class At(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == module:
            press()

def before(owner, name, times=1):
    plain = getattr(owner, name)
    def pressed(*arguments, **options):
        for _ in range(times):
            press()
        return plain(*arguments, **options)
    setattr(owner, name, pressed)

module = ""
sys.meta_path.insert(0, At())
"""
# llama.cpp calls Python to write its log. If an exception occurs in this callback, Python prints the
# exception and drops it.
IN_A_CALLBACK = """
from kvtool.llama.libllama.library import api
class Errors:
    write = press
    def flush(self): pass
    def isatty(self): return False
plain = api.llama_model_load_from_file
def load(*arguments):
    was, sys.stderr = sys.stderr, Errors()
    def end(*_):
        sys.stderr = was
        interrupt.end()
    if signal.getsignal(signal.SIGINT) is interrupt.end:
        signal.signal(signal.SIGINT, end)
    try:
        return plain(*arguments)
    finally:
        sys.stderr = was
from kvtool.system import interrupt
api.llama_model_load_from_file = load
sys.argv.append("-vv")
"""
STAGES = {
    "import of the commands": "module = 'kvtool.cli.generate'",
    "import of numba": "module = 'numba'; from kvtool.kernels import load; load.find = lambda *_: None",
    "import of llama.cpp": "module = 'kvtool_llama'",
    "header": "from kvtool.models import resolve; before(resolve, 'check')",
    "load": IN_A_CALLBACK,
    "cache": "from kvtool.llama.libllama.library import api; before(api, 'llama_init_from_model')",
    "prompt": "from kvtool.llama.cache.context import Context; before(Context, 'decode')",
    "reply": "from kvtool.llama.sampler import Sampler; before(Sampler, 'sample')",
    "reply, twice": "from kvtool.llama.sampler import Sampler; before(Sampler, 'sample', 2)",
}


@pytest.mark.parametrize("stage", STAGES)
def test_an_interrupt_ends_the_process_at_every_stage(stage, model):
    # An eviction imports numba if there is no library of compiled kernels. The small budget causes an
    # eviction.
    options = ["--policy", "streamingllm", "--budget", "24"] if stage == "import of numba" else []
    popen = subprocess.Popen if stage.startswith("import") else fork_server.Popen
    done = python(f"{PRESS}\n{STAGES[stage]}\n{RUN}", *WRITE, "-m", model, *options, popen=popen)
    assert done.returncode == 130, done.stderr
    assert "Exception ignored" not in done.stderr
    assert done.stderr.endswith("kvtool: stopped\n")
    if stage != "load":
        assert done.stderr == "kvtool: stopped\n"
    # after one Ctrl-C in a reply, the current step ends and the text so far is printed; a second Ctrl-C
    # interrupts the step, and nothing is printed
    assert bool(done.stdout.strip()) == (stage in ("reply", "import of numba"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupted_json_reply_has_finish_reason_interrupted(model, number):
    press = PRESS.replace("signal.SIGINT", str(int(number)))
    done = python(f"{press}\n{STAGES['reply']}\n{RUN}", *WRITE, "-m", model, "--json")
    assert (done.returncode, done.stderr) == (128 + number, "kvtool: stopped\n")
    assert json.loads(done.stdout)["finish_reason"] == "interrupted"
    # a second signal interrupts the step, and nothing is printed
    done = python(f"{press}\n{STAGES['reply, twice']}\n{RUN}", *WRITE, "-m", model, "--json")
    assert (done.returncode, done.stderr, done.stdout) == (128 + number, "kvtool: stopped\n", "")


DOWNLOAD = """
from kvtool.models import catalogue, download, resolve
line = "tiny | pip:kvtool-no-such==1.0 | tiny.gguf | " + "0" * 64 + " | 5 | MIT | -"
for module in (catalogue, download, resolve):
    module.registry = lambda: catalogue.parse(line)
# pip would go to the network: something that lasts stands in for it
popen = download.subprocess.Popen
lasts = [sys.executable, "-c", "while True: pass"]
download.subprocess.Popen = lambda command, **options: popen(lasts, **options)
before(download, "_bytes_in")
"""


def test_an_interrupted_download_leaves_nothing(tmp_path):
    environment = os.environ | {"KVTOOL_CACHE": str(tmp_path)}
    done = python(f"{PRESS}\n{DOWNLOAD}\n{RUN}", "models", "pull", "tiny", env=environment)
    assert done.returncode == 130
    assert done.stderr == "kvtool: stopped\n"
    assert not os.listdir(tmp_path / "models")


def test_interrupt_between_turns_of_a_pipe_gets_one_line(smollm2):
    chat = start(RUN, "chat", "--temp", 0, "-t", 1, "-n", 2, "-m", smollm2, stdin=subprocess.PIPE)
    chat.stdin.write("Hello!\n")
    chat.stdin.flush()
    assert chat.stdout.readline().strip()
    # the program reads this empty line only after the turn has ended
    chat.stdin.write("\n")
    chat.stdin.flush()
    until(lambda: not _unread(chat.stdin))
    chat.send_signal(signal.SIGINT)
    assert chat.wait(TIMEOUT_S) == 130
    assert re.fullmatch(f"{RECALL_LINE}{CUT_LINE}kvtool: stopped\n", chat.communicate()[1])


def _unread(pipe):
    """Return the number of unread bytes in a pipe."""
    return struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))[0]


@pytest.fixture
def blocking_policy(tmp_path):
    """Policy that waits in its first eviction.

    Prompts fit into the cache, so this eviction happens during a reply.
    """
    return BlockingPolicy(tmp_path)


@pytest.fixture
def terminal(talker, blocking_policy):
    started = []

    def start(*more, is_controlling=True):
        options = ("--policy", blocking_policy.policy, "--budget", 80, "-n", 200)
        started.append(Terminal(talker, *options, *more, is_controlling=is_controlling))
        return started[0]

    yield start
    started[0].kill()


def test_ctrl_c_stops_a_reply_and_keeps_the_chat(terminal, blocking_policy):
    terminal = terminal()
    terminal.wait_for("> ")
    # Python's readline loses a signal that arrives after the prompt is shown and before the first read, so
    # the test repeats Ctrl-C
    terminal.wait_for(" leaves", pressing="\x03")
    terminal.type("Tell me a long story of the sea.\n")
    blocking_policy.wait()
    terminal.type("\x03")
    blocking_policy.go()
    terminal.until("\nstopped; /continue goes on\n")
    assert terminal.ended(pressing="\x04") == 0
    os.close(terminal.master)


def test_input_typed_during_a_reply_waits_for_its_end(terminal, blocking_policy):
    terminal = terminal()
    terminal.wait_for("> ")
    terminal.type("Tell me a long story of the sea.\n")
    blocking_policy.wait()
    terminal.type("/stats\n\x04")
    blocking_policy.go()
    terminal.wait_for("tokens/s")
    # /stats was typed during the reply, but it runs only at the next prompt
    terminal.wait_for("> ")
    terminal.wait_for("policy state")
    assert terminal.process.wait(TIMEOUT_S) == 0
    assert "/stats" not in terminal.text.partition("tokens/s")[0].partition("long story")[2]
    os.close(terminal.master)


# Allowed exit codes. Without a signal, the process notices the end of its input. With a signal, it may notice
# either first.
HUNG_UP = {"signal": (-signal.SIGHUP, 128 + signal.SIGHUP), "no signal": (128 + signal.SIGHUP,)}


@pytest.mark.parametrize("ending", HUNG_UP)
def test_closed_terminal_ends_the_chat(terminal, ending):
    chat = terminal(is_controlling=ending == "signal")
    chat.wait_for("> ")
    os.close(chat.master)
    assert chat.process.wait(TIMEOUT_S) in HUNG_UP[ending]


@pytest.mark.parametrize("ending", HUNG_UP)
def test_terminal_closed_during_a_reply_keeps_the_turn(terminal, blocking_policy, tmp_path, ending):
    path = tmp_path / "chat.kv"
    chat = terminal("--session", path, is_controlling=ending == "signal")
    chat.wait_for("> ")
    chat.type("Tell me a long story of the sea.\n")
    blocking_policy.wait()
    os.close(chat.master)
    blocking_policy.go()
    assert chat.process.wait(TIMEOUT_S) in HUNG_UP[ending]
    user, reply = sessions.read(path)[0]["messages"]
    assert user["content"] == "Tell me a long story of the sea."
    assert reply["content"]


def test_sigterm_during_a_reply_keeps_the_turn(terminal, blocking_policy, tmp_path):
    path = tmp_path / "chat.kv"
    chat = terminal("--session", path)
    chat.wait_for("> ")
    chat.type("Tell me a long story of the sea.\n")
    blocking_policy.wait()
    chat.process.terminate()
    blocking_policy.go()
    assert chat.process.wait(TIMEOUT_S) == -signal.SIGTERM
    _, reply = sessions.read(path)[0]["messages"]
    assert reply["content"]
    os.close(chat.master)


@pytest.mark.parametrize("end", [signal.SIGHUP, signal.SIGTERM, "pipe"])
def test_signal_or_closed_pipe_during_a_reply_keeps_the_turn(talker, blocking_policy, tmp_path, end):
    path = tmp_path / "chat.kv"
    options = (
        "--policy",
        blocking_policy.policy,
        "--budget",
        80,
        "-n",
        200,
        "--temp",
        0,
        "-t",
        1,
        "--session",
        path,
    )
    chat = start(RUN, "chat", "-m", talker, *options, stdin=subprocess.PIPE)
    chat.stdin.write("Tell me a long story of the sea.\n")
    chat.stdin.flush()
    blocking_policy.wait()
    if end == "pipe":
        chat.stdout.close()
    else:
        chat.send_signal(end)
    blocking_policy.go()
    assert chat.wait(TIMEOUT_S) == (128 + signal.SIGPIPE if end == "pipe" else -end)
    assert sessions.read(path)[0]["messages"][1]["content"]
    for pipe in (chat.stdin, chat.stdout, chat.stderr):
        pipe.close()


JUMPS = """
import itertools, time
day = itertools.cycle([0, 2e9, -2e9])
time.time = lambda: next(day)
time.time_ns = lambda: int(next(day) * 1e9)
"""


def test_jumping_clock_does_not_change_measured_times(model, tmp_path):
    result = json.loads(python(f"{JUMPS}\n{RUN}", *WRITE, "-m", model, "--json").stdout)
    assert 0 < result["prompt_s"] < 60
    assert 0.1 < result["tokens_per_s"] < 1e5
    (tmp_path / "text").write_text("Hello, hello. " * 20)
    done = python(f"{JUMPS}\n{RUN}", "perplexity", tmp_path / "text", "-t", 1, "-m", model, "--json")
    scored = json.loads(done.stdout)
    assert 0 < scored["seconds"] < 60
    assert 0.1 < scored["tokens_per_s"] < 1e5
