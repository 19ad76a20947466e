"""The only module that talks to llama.cpp: models, contexts, samplers, and the patched library's calls.

Return codes become LibraryError here, and nothing of ctypes leaves this file.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from kvtool import rpc
from kvtool.errors import KvtoolError, LibraryError, ModelError, OutOfMemory, UsageError
from kvtool.paths import build_command
from kvtool.policy import Merge, Signal

try:
    import llama_cpp.llama_cpp as api
except (
    ImportError,
    OSError,
    RuntimeError,
) as error:  # no package, no library in it, or one that does not load
    if isinstance(error, ModuleNotFoundError) and error.name == "llama_cpp":
        raise LibraryError(f"there is no llama.cpp yet; build it: {build_command()}") from None
    # ggml's CUDA part is linked to the driver
    how = "install NVIDIA's driver, or: kvtool build --cpu" if "libcuda." in str(error) else build_command()
    raise LibraryError(f"llama.cpp does not load ({error}); mend it with: {how}") from None

ABI = 3

HOW_TO_BUILD = f"build the one that has it: {build_command()}"
"""The end of what is said where the patch is missing."""

CACHE_TYPES = {
    "f32": 0,
    "f16": 1,
    "bf16": 30,
    "q8_0": 8,
    "q5_1": 7,
    "q5_0": 6,
    "q4_1": 3,
    "q4_0": 2,
}
"""The names of -ctk and -ctv, and ggml's numbers for them."""

FLASH = {"auto": -1, "off": 0, "on": 1}

GROUPS = {"sum": 0, "max": 1, "first": 2}

_N_PENALTY = 64
"""Tokens that the repeat penalty looks back at, llama.cpp's own default."""

_QUANTIZED = {name for name in CACHE_TYPES if name.startswith("q")}

_lib = api._lib


class _Move(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int32) for name in ("row", "dst", "src", "delta")]


class _Term(ctypes.Structure):
    _fields_ = [*((name, ctypes.c_int32) for name in ("row", "dst", "src")), ("weight", ctypes.c_float)]


class _Edit(ctypes.Structure):
    _fields_ = [
        ("moves", ctypes.POINTER(_Move)),
        ("terms", ctypes.POINTER(_Term)),
        ("n_move", ctypes.c_int32),
        ("n_term", ctypes.c_int32),
        ("n_keep", ctypes.c_int32),
        ("pos_0", ctypes.c_int32),
        ("n_keep_row", ctypes.c_void_p),
        ("n_hidden", ctypes.c_int32),
        ("force_graph", ctypes.c_bool),
    ]


class _Params(ctypes.Structure):
    _fields_ = [
        ("signals", ctypes.c_uint32),
        ("group", ctypes.c_uint32),
        ("n_query", ctypes.c_int32),
        ("log_n", ctypes.c_bool),
        ("ragged", ctypes.c_bool),
    ]


TERM = np.dtype([("row", "<i4"), ("dst", "<i4"), ("src", "<i4"), ("weight", "<f4")])


def _bind(name: str, result: type | None, *arguments: object) -> None:
    function = getattr(_lib, name)
    function.restype = result
    function.argtypes = list(arguments)


def is_patched() -> bool:
    """Whether the library has our patch."""
    return hasattr(_lib, "llama_kvtool_abi")


def _bind_all() -> None:
    pointer, i32, i64, u32 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_uint32
    _bind("llama_kvtool_abi", i32)
    _bind("llama_kvtool_digest", ctypes.c_char_p)
    if _lib.llama_kvtool_abi() != ABI:
        # what else it has is another kvtool's: check_library says so
        return
    _bind("llama_kvtool_error", ctypes.c_char_p)
    _bind("llama_kvtool_guard", i32, ctypes.c_char_p, i32, ctypes.c_bool)
    _bind("llama_kvtool_enable", i32, pointer, ctypes.POINTER(_Params))
    _bind("llama_kvtool_n_dim", i32, pointer)
    _bind("llama_kvtool_seen", i32, pointer, i32)
    _bind("llama_kvtool_resize", i32, pointer, pointer, i32)
    _bind("llama_kvtool_row_layers", i32, pointer, pointer, i32)
    _bind("llama_kvtool_cache_bytes", i64, pointer)
    _bind("llama_kvtool_read", i32, pointer, u32, pointer, i32, i32)
    _bind("llama_kvtool_write", i32, pointer, u32, pointer, i32, i32, i32)
    _bind("llama_kvtool_read_keys", i32, pointer, pointer, pointer, pointer, i32, i32, i32)
    _bind("llama_kvtool_get_cells", i64, pointer, i32, pointer, i32)
    _bind("llama_kvtool_set_cells", i64, pointer, i32, pointer, i32)
    _bind("llama_kvtool_n_window", i32, pointer)
    _bind("llama_kvtool_get_window", i64, pointer, pointer, pointer)
    _bind("llama_kvtool_set_window", i64, pointer, pointer, pointer)
    _bind("llama_kvtool_apply", i32, pointer, ctypes.POINTER(_Edit))


if is_patched():
    _bind_all()


def library_path() -> Path:
    """The shared library that is loaded."""
    return Path(_lib._name)


def library_info() -> dict[str, Any]:
    """What is built: version, path, patched, abi, abi_wanted, digest, devices, system_info."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        package = version("llama-cpp-python")
    except PackageNotFoundError:
        package = "unknown"
    return {
        "version": package,
        "path": str(library_path()),
        "patched": is_patched(),
        "abi": _lib.llama_kvtool_abi() if is_patched() else None,
        "abi_wanted": ABI,
        "digest": _lib.llama_kvtool_digest().decode() if is_patched() else None,
        "devices": devices(),
        "system_info": api.llama_print_system_info().decode().strip(),
    }


def check_library() -> None:
    """Raises LibraryError for a library with our patch of another ABI than this kvtool speaks."""
    if is_patched() and (abi := _lib.llama_kvtool_abi()) != ABI:
        raise LibraryError(
            f"the llama.cpp in {library_path().parent} speaks kvtool's ABI {abi}, "
            f"this kvtool ABI {ABI}; build the right one: {build_command()}"
        )


_DEVICE_TYPES = ("cpu", "gpu", "igpu", "accelerator", "meta")


def devices() -> list[dict[str, Any]]:
    """The devices of ggml: name, description, type, memory_total and memory_free in bytes."""
    _start_backends()
    _bind("ggml_backend_dev_count", ctypes.c_size_t)
    _bind("ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t)
    _bind("ggml_backend_dev_name", ctypes.c_char_p, ctypes.c_void_p)
    _bind("ggml_backend_dev_description", ctypes.c_char_p, ctypes.c_void_p)
    _bind("ggml_backend_dev_type", ctypes.c_int, ctypes.c_void_p)
    found = []
    for i in range(_lib.ggml_backend_dev_count()):
        device = _lib.ggml_backend_dev_get(i)
        free, total = _memory(device)
        kind = _lib.ggml_backend_dev_type(device)
        found.append(
            {
                "name": _lib.ggml_backend_dev_name(device).decode(),
                "description": _lib.ggml_backend_dev_description(device).decode(),
                "type": _DEVICE_TYPES[kind] if kind < len(_DEVICE_TYPES) else str(kind),
                "memory_total": total,
                "memory_free": free,
            }
        )
    return found


def _memory(device: int) -> tuple[int, int]:
    """(free, total) in bytes."""
    size = ctypes.POINTER(ctypes.c_size_t)
    _bind("ggml_backend_dev_memory", None, ctypes.c_void_p, size, size)
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    _lib.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
    return free.value, total.value


def has_gpu() -> bool:
    """Whether any device is not the CPU (RPC devices count)."""
    return any(device["type"] in ("gpu", "igpu") for device in devices())


_workers: list[str] = []
"""Those that have been added, host:port."""


def add_rpc(*endpoints: str) -> None:
    """Adds the devices of the workers at host:port, ...; models loaded later use them before any other.

    Raises UsageError for what is no endpoint or named twice, LibraryError for a worker that does not answer.
    """
    with rpc.reached(endpoints) as addresses:
        # llama.cpp itself would wait without an end, or end the process
        add_server = _rpc_function("ggml_backend_rpc_add_server", ctypes.c_void_p, ctypes.c_char_p)
    _workers.extend(endpoints)
    if _guarding:
        guard()
    for endpoint, address in zip(endpoints, addresses, strict=True):
        server = add_server(address.encode())
        if not server:
            raise LibraryError(f"the worker at {endpoint} has no devices")
        _register(server)


_SPARE_BYTES = 1
"""What a worker's spare says to have of memory, as in llama-kvtool.h: with none it would get layers."""


def _register(server: int) -> None:
    """Makes a worker's devices known, but for its spares: those are for edits of what lies on the others."""
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    _bind("ggml_backend_reg_dev_count", size, pointer)
    _bind("ggml_backend_reg_dev_get", pointer, pointer, size)
    _bind("ggml_backend_device_register", None, pointer)
    found = [_lib.ggml_backend_reg_dev_get(server, i) for i in range(_lib.ggml_backend_reg_dev_count(server))]
    real = [device for device in found if _memory(device)[1] != _SPARE_BYTES]
    for device in real:
        _lib.ggml_backend_device_register(device)
    n = len(real)
    if hasattr(_lib, "llama_kvtool_use_spares") and n > 0 and found[:n] == real and len(found) == 3 * n:
        _bind("llama_kvtool_use_spares", ctypes.c_int32, pointer, pointer, pointer)
        for own in zip(real, found[n : 2 * n], found[2 * n :], strict=True):
            _check(_lib.llama_kvtool_use_spares(*own))


def _rpc_function(name: str, result: type | None, *arguments: type) -> Callable[..., Any]:
    """A function of ggml's RPC. Raises LibraryError where the library is built without."""
    _start_backends()
    _bind("ggml_backend_reg_by_name", ctypes.c_void_p, ctypes.c_char_p)
    _bind("ggml_backend_reg_get_proc_address", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)
    registry = _lib.ggml_backend_reg_by_name(b"RPC")
    address = registry and _lib.ggml_backend_reg_get_proc_address(registry, name.encode())
    if not address:
        raise LibraryError(
            f"llama.cpp is built without RPC; build it with CMAKE_ARGS=-DGGML_RPC=ON {build_command()}"
        )
    return ctypes.CFUNCTYPE(result, *arguments)(address)


def served(memory: int | None = None) -> list[dict[str, object]]:
    """The devices that `server` serves, as `devices` tells them: GPUs, or the CPU where there is none.

    memory: the most bytes that they say to have, all together. Raises LibraryError where that needs a patch.
    """
    found = _served()
    if memory is not None:
        if not hasattr(_lib, "llama_kvtool_limit"):
            raise LibraryError(
                f"to say less memory than there is takes a patched llama.cpp: {build_command()}"
            )
        _bind("llama_kvtool_limit", ctypes.c_int32, ctypes.c_void_p, ctypes.c_uint64)
        for i, _ in found:
            _check(_lib.llama_kvtool_limit(_lib.ggml_backend_dev_get(i), memory // len(found)))
        found = _served()
    return [device for _, device in found]


def _served() -> list[tuple[int, dict[str, object]]]:
    local = list(enumerate(devices()))
    gpus = [(i, device) for i, device in local if device["type"] in ("gpu", "igpu")]
    return gpus or [(i, device) for i, device in local if device["type"] == "cpu"][:1]


def server(address: str, n_threads: int) -> Callable[[], None]:
    """What serves this machine's devices at "1.2.3.4:50052" to one client after the other, when it is called.

    It returns only where it cannot listen there, and writes to C's stdout what it does.
    Raises LibraryError where the library is built without RPC.
    """
    text, size, pointer = ctypes.c_char_p, ctypes.c_size_t, ctypes.c_void_p
    arguments = (text, text, size, size, ctypes.POINTER(pointer))
    start = _rpc_function("ggml_backend_rpc_start_server", None, *arguments)
    handles = [_lib.ggml_backend_dev_get(i) for i, _ in _served()]
    if hasattr(_lib, "llama_kvtool_spare"):
        # ggml's server keeps one graph a device: with two spares of each it has the decode's and both of ours
        _bind("llama_kvtool_spare", pointer, pointer)
        handles += [_lib.llama_kvtool_spare(device) for _ in range(2) for device in handles]
    array = (pointer * len(handles))(*handles)
    return lambda: start(address.encode(), None, n_threads, len(handles), array)


_LOG_ERROR = 4
_log_tail: deque[str] = deque(maxlen=8)
_verbose = False


def _log(level: int, text: bytes, _: object) -> None:
    line = text.decode("utf-8", "replace")
    if level == _LOG_ERROR and line.strip():
        _log_tail.append(line.strip().split("\n")[0])
        if _guarding and _no_memory():
            # ggml aborts where it gets none
            _set_guard(OutOfMemory())
    if _verbose:
        sys.stderr.write(line)


_log_callback = api.llama_log_callback(_log)
_started = False


def _start_backends() -> None:
    global _started
    if not _started:
        api.llama_log_set(_log_callback, ctypes.c_void_p(0))
        api.llama_backend_init()
        _started = True


def set_verbose(on: bool) -> None:
    """Whether llama.cpp's own log goes to stderr."""
    global _verbose
    _verbose = on
    _start_backends()


def _because() -> str:
    """llama.cpp's first complaint, for the end of an error message: the later ones say who passed it on."""
    return f": {_log_tail[0]}" if _log_tail else ""


def _no_memory() -> bool:
    return any("alloc" in line for line in _log_tail)


_guarding = False


def guard() -> None:
    """From now on a crash of compiled code ends the process with one line and an exit code.

    ggml aborts where something cannot be, and on a damaged model C++ may read what is not there. Without
    this the process ends with pages of backtrace; so it does with an unpatched library. Not for use as a
    library: handlers are the process's own.
    """
    global _guarding
    check_library()
    _start_backends()
    if not is_patched():
        return
    _guarding = True
    _set_guard(_lost_worker() or LibraryError(_CRASHED))


_CRASHED = (
    "llama.cpp has crashed (a device that is gone, a damaged model, a policy's kernel, or a fault of "
    "llama.cpp's own); -v shows more"
)


def _lost_worker() -> LibraryError | None:
    """What a crash most likely is where there are workers."""
    if not _workers:
        return None
    which = f"the worker at {_workers[0]}" if len(_workers) == 1 else f"one of {', '.join(_workers)}"
    return LibraryError(
        f"{which} is gone or has no memory left; start it again, then this "
        "(if it runs, llama.cpp has crashed here: -v shows more)"
    )


def _set_guard(error: KvtoolError) -> None:
    line = f"kvtool: {error}\n"
    if sys.stderr is not None and sys.stderr.isatty():
        # a progress bar has hidden the cursor
        line = f"\r\x1b[K\x1b[?25h{line}"
    _check(_lib.llama_kvtool_guard(os.fsencode(line)[:4000], error.exit_code, _verbose))


@contextmanager
def _crash_means(error: KvtoolError) -> Iterator[None]:
    """Under a guard: what a crash inside is."""
    if not _guarding:
        yield
        return
    _set_guard(error)
    try:
        yield
    finally:
        guard()


class Model:
    """A GGUF model and its vocabulary. Raises ModelError when llama.cpp cannot load it, or OutOfMemory.

    vocab_only: just to tokenize; no weights are loaded.
    """

    def __init__(
        self, path: Path | str, *, n_gpu_layers: int | None = None, vocab_only: bool = False
    ) -> None:
        check_library()
        _start_backends()
        _log_tail.clear()
        params = api.llama_model_default_params()
        params.vocab_only = vocab_only
        if n_gpu_layers is not None:
            params.n_gpu_layers = n_gpu_layers
        self.path = Path(path)
        self._model = None
        with _crash_means(_damaged(path)):
            self._model = api.llama_model_load_from_file(os.fsencode(path), params)
        if not self._model:
            if _no_memory():
                raise OutOfMemory(f"no memory for {path}{_because()}")
            raise ModelError(f"llama.cpp cannot load {path}{_because()}")
        self._vocab = api.llama_model_get_vocab(self._model)
        self.n_vocab: int = api.llama_vocab_n_tokens(self._vocab)
        self.n_ctx_train: int = api.llama_model_n_ctx_train(self._model)
        # tokens that sliding layers see, 0 where there are none
        self.window: int = api.llama_model_n_swa(self._model)
        self.bos: int = api.llama_vocab_bos(self._vocab)
        self.eos: int = api.llama_vocab_eos(self._vocab)
        self.adds_bos: bool = api.llama_vocab_get_add_bos(self._vocab)

    def close(self) -> None:
        if self._model:
            api.llama_model_free(self._model)
            self._model = None

    def tokenize(self, text: str, *, special: bool = False, start: bool = False) -> np.ndarray:
        """Tokens i32[n]. special: markers as <|im_end|> become tokens. start: BOS if the model has it so."""
        data = text.encode()
        room = len(data) + 8
        while True:
            tokens = (api.llama_token * room)()
            # a vocabulary is not looked into before
            with _crash_means(_damaged(self.path)):
                n = api.llama_tokenize(self._vocab, data, len(data), tokens, room, start, special)
            if n >= 0:
                return np.array(tokens[:n], np.int32)
            room = -n

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes of a token, perhaps a part of a character. special: markers are written out."""
        room = 64
        while True:
            buffer = ctypes.create_string_buffer(room)
            n = api.llama_token_to_piece(self._vocab, int(token), buffer, room, 0, special)
            if n >= 0:
                return buffer.raw[:n]
            room = -n

    def marker(self, token: int) -> str:
        """A special token written out; empty where the model has none."""
        return self.piece(token, special=True).decode("utf-8", "replace") if token >= 0 else ""

    def ends_turn(self, token: int) -> bool:
        """Whether the token is one of the model's end-of-generation tokens."""
        return bool(api.llama_vocab_is_eog(self._vocab, int(token)))

    def chat_template(self) -> str | None:
        """The Jinja template in the model's header."""
        text = api.llama_model_chat_template(self._model, None)
        return text.decode("utf-8", "replace") if text else None


def _damaged(path: Path | str) -> KvtoolError:
    return _lost_worker() or ModelError(
        f"{path} seems to be damaged: llama.cpp has crashed on it; download it again"
    )


class Decoder:
    """A cache of n_cell cells and the decode that fills it, for one sequence: what any llama.cpp has of both.

    n_output: the most tokens of a step whose logits are wanted. ragged: see Context.
    Raises UsageError for cache types that cannot go together, OutOfMemory, and LibraryError for what
    llama.cpp refuses.
    """

    def __init__(
        self,
        model: Model,
        n_cell: int,
        n_batch: int,
        *,
        ragged: bool = False,
        n_output: int = 1,
        type_k: str = "f16",
        type_v: str = "f16",
        flash: str = "auto",
        n_threads: int | None = None,
    ) -> None:
        self.model = model
        self.n_batch = n_batch
        self.ragged = ragged
        params = api.llama_context_default_params()
        # the sliding layers' cache is never longer than this, and must hold the window and a step
        params.n_ctx = max(n_cell, self.model.window and self.model.window + n_batch)
        params.swa_full = False
        params.n_batch = params.n_ubatch = n_batch
        params.n_seq_max = 1
        params.n_outputs_max = min(n_output, n_batch)
        params.n_threads = params.n_threads_batch = n_threads or default_threads()
        params.type_k = CACHE_TYPES[type_k]
        params.type_v = CACHE_TYPES[type_v]
        params.flash_attn_type = FLASH[choose_flash(flash, type_v, ragged)]
        _log_tail.clear()
        self._batch: Any = None
        self._context = None
        with _crash_means(_damaged(model.path)):
            self._context = api.llama_init_from_model(model._model, params)
        if not self._context:
            if _no_memory():
                raise OutOfMemory(f"no memory for a cache of {n_cell} cells{_because()}")
            raise LibraryError(f"llama.cpp cannot make a cache of {n_cell} cells{_because()}")
        self.n_ctx: int = api.llama_n_ctx(self._context)
        self._batch = batch = api.llama_batch_init(n_batch, 0, 1)
        as_array = np.ctypeslib.as_array
        self._tokens, self._pos, self._wants = (
            as_array(field, (n_batch,)) for field in (batch.token, batch.pos, batch.logits)
        )
        as_array(batch.n_seq_id, (n_batch,))[:] = 1
        self._order = np.arange(n_batch, dtype=np.int32)
        for i in range(n_batch):
            batch.seq_id[i][0] = 0
        self._n_output = 0
        self._logits_where = (0, 0)
        self._has_decoded = False

    def close(self) -> None:
        if self._context:
            api.llama_free(self._context)
            self._context = None
            if self._batch:
                api.llama_batch_free(self._batch)
                self._batch = None

    def decode(self, tokens: np.ndarray, pos_0: int, n_output: int) -> None:
        """Decodes i32[n] tokens at positions pos_0, pos_0 + 1, ...; the last n_output give logits."""
        n = len(tokens)
        self._batch.n_tokens = n
        self._tokens[:n] = tokens
        self._pos[:n] = self._order[:n] + pos_0
        self._wants[: n - n_output] = False
        self._wants[n - n_output : n] = True
        _log_tail.clear()
        # what is damaged shows in the first step
        with nullcontext() if self._has_decoded else _crash_means(_damaged(self.model.path)):
            status = api.llama_decode(self._context, self._batch)
        self._has_decoded = True
        if status != 0:
            raise LibraryError(f"llama.cpp cannot decode (status {status}){_because()}")
        self._n_output = n_output

    def logits(self) -> np.ndarray:
        """f32[n_output, n_vocab] of the last decode: a view that the next decode overwrites."""
        pointer = api.llama_get_logits(self._context)
        where = ctypes.addressof(pointer.contents), self._n_output
        if where != self._logits_where:
            # NumPy makes a type of its own for each, which takes longer than all else of a step here
            self._logits = np.ctypeslib.as_array(pointer, (self._n_output, self.model.n_vocab))
            self._logits_where = where
        return self._logits

    def remove(self, first: int, end: int) -> None:
        """Frees the cells at positions first .. end - 1."""
        if not api.llama_memory_seq_rm(self._memory, 0, first, end):
            raise LibraryError(f"llama.cpp cannot remove positions {first} to {end - 1} of its cache")

    def shift(self, first: int, end: int, delta: int) -> None:
        """The tokens at positions first .. end - 1 come delta later; keys turn before the next decode."""
        api.llama_memory_seq_add(self._memory, 0, first, end, delta)

    @property
    def _memory(self) -> object:
        return api.llama_get_memory(self._context)

    def state(self) -> bytes:
        """The raw bytes of all live cells, as llama.cpp saves a sequence; not of ragged rows."""
        if self.ragged:
            raise LibraryError("llama.cpp cannot save a cache whose rows hold different numbers of cells")
        n = api.llama_state_seq_get_size(self._context, 0)
        buffer = (ctypes.c_uint8 * n)()
        return bytes(buffer[: api.llama_state_seq_get_data(self._context, buffer, n, 0)])

    def set_state(self, data: bytes) -> None:
        """Writes what `state` returned into an empty cache."""
        buffer = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
        if api.llama_state_seq_set_data(self._context, buffer, len(data), 0) != len(data):
            raise LibraryError(f"llama.cpp cannot take back the cells that it saved{_because()}")


class Context(Decoder):
    """A cache whose cells each row has of its own, which needs the patched library.

    Layers that slide, if the model has some, have no rows: llama.cpp keeps their window beside the cells.
    signals, n_query, group: what `read` can be asked for, as a Policy has them. log_n: whether attention
    logits are scaled by log_512 of the tokens seen. ragged: whether rows may hold different numbers of cells.
    how: as Decoder has it. Raises what Decoder does, and ModelError for a model that has no rows.
    """

    def __init__(
        self,
        model: Model,
        n_cell: int,
        n_batch: int,
        signals: Signal = Signal.NONE,
        *,
        n_query: int = 0,
        group: str = "sum",
        log_n: bool = False,
        ragged: bool = False,
        **how: Any,
    ) -> None:
        super().__init__(model, n_cell, n_batch, ragged=ragged, **how)
        wanted = _Params(int(signals & ~Signal.KEYS), GROUPS[group], max(n_query, 1), log_n, ragged)
        self.n_row: int = _lib.llama_kvtool_enable(self._context, ctypes.byref(wanted))
        if self.n_row < 0:
            why = _kvtool_error()
            self.close()
            raise ModelError(f"{model.path.name} cannot be used yet: {why}")
        self.n_dim: int = _lib.llama_kvtool_n_dim(self._context)
        self.row_layers = np.empty(self.n_row, np.int32)
        _check(_lib.llama_kvtool_row_layers(self._context, self.row_layers.ctypes.data, self.n_row))
        n_layer = np.count_nonzero(np.diff(self.row_layers)) + 1
        self.layer_cells = np.full(n_layer, self.n_ctx, np.int32)
        if model.window and model.window + n_batch > n_cell:
            self.resize(np.full(n_layer, n_cell))

    @property
    def n_cell(self) -> int:
        """Cells of the longest layer."""
        return int(self.layer_cells.max())

    @property
    def cache_bytes(self) -> int:
        """Bytes of the K and V tensors, those of sliding layers among them."""
        return int(_lib.llama_kvtool_cache_bytes(self._context))

    def hide(self, n: int) -> None:
        """The first n cells stay, but no later query sees them; the next token may have any position.

        Sliding layers forget everything.
        """
        self._apply(_Edit(n_keep=n, n_hidden=n))

    def see(self, n_seen: int) -> None:
        """The first query of the next decode has seen n_seen tokens before itself."""
        _check(_lib.llama_kvtool_seen(self._context, n_seen))

    def resize(self, n_cell: np.ndarray) -> None:
        """Gives each layer i32[layer] that many cells, the live ones with what they hold."""
        n_cell = np.ascontiguousarray(n_cell, np.int32)
        _check(_lib.llama_kvtool_resize(self._context, n_cell.ctypes.data, len(n_cell)))
        self.layer_cells = n_cell

    def read_keys(self, first: np.ndarray, delta: np.ndarray) -> np.ndarray:
        """f32[row, n, n_dim]: the keys of each row's cells first i32[row] .., rotated by delta i32[row, n].

        With a quantized K all of them are turned by one orthogonal map that llama.cpp stores them under.
        """
        n_row, n = delta.shape
        out = np.empty((n_row, n, self.n_dim), np.float32)
        first, delta = (np.ascontiguousarray(array, np.int32) for array in (first, delta))
        pointers = (array.ctypes.data for array in (first, delta, out))
        _check(_lib.llama_kvtool_read_keys(self._context, *pointers, n_row, n, self.n_dim))
        return out

    def read(self, signal: Signal, n_kv: int) -> np.ndarray:
        """One signal since the last edit, f32[row, n_kv]."""
        out = np.empty((self.n_row, n_kv), np.float32)
        _check(_lib.llama_kvtool_read(self._context, int(signal), out.ctypes.data, self.n_row, n_kv))
        return out

    def write(self, signal: Signal, values: np.ndarray, n_query: int) -> None:
        """Lets a signal go on from f32[row, n_kv], as it was n_query queries after the last edit."""
        values = np.ascontiguousarray(values, np.float32)
        shape = values.shape
        _check(_lib.llama_kvtool_write(self._context, int(signal), values.ctypes.data, *shape, n_query))

    def cells(self, layer: int, n: int) -> np.ndarray:
        """u1[bytes]: the first n cells of a layer as they are stored, keys and then values, cell by cell."""
        out = np.empty(n * self.cell_bytes(layer), np.uint8)
        _check(_lib.llama_kvtool_get_cells(self._context, layer, out.ctypes.data, n))
        return out

    def fits(self, layer: int, n: int, data: np.ndarray) -> bool:
        """Whether that may be what `cells` returned of n cells of such a layer."""
        return data.nbytes == n * self.cell_bytes(layer)

    def set_cells(self, layer: int, n: int, data: np.ndarray) -> None:
        """Writes what `cells` returned."""
        assert self.fits(layer, n, data)
        assert data.flags.c_contiguous
        _check(_lib.llama_kvtool_set_cells(self._context, layer, data.ctypes.data, n))

    @property
    def n_window(self) -> int:
        """Cells of the layers that attend through a sliding window; 0 where there are none."""
        return int(_lib.llama_kvtool_n_window(self._context))

    def window(self) -> tuple[np.ndarray, np.ndarray]:
        """Of sliding layers: i32[1 + n_window], the next cell and each one's position; their u1[bytes]."""
        table, data = (np.empty(*own) for own in zip(self.window_shapes, (np.int32, np.uint8), strict=True))
        _check(_lib.llama_kvtool_get_window(self._context, table.ctypes.data, data.ctypes.data))
        return table, data

    def set_window(self, table: np.ndarray, data: np.ndarray) -> None:
        """Writes what `window` returned."""
        assert [table.shape, data.shape] == self.window_shapes
        _check(_lib.llama_kvtool_set_window(self._context, table.ctypes.data, data.ctypes.data))

    @property
    def window_shapes(self) -> list[tuple[int]]:
        """Those of the two arrays that `window` returns."""
        return [(1 + self.n_window,), (_lib.llama_kvtool_get_window(self._context, None, None),)]

    def cell_bytes(self, layer: int) -> int:
        """Bytes of K and V that a cell takes in a layer, one of those with a cache."""
        n_bytes: int = _lib.llama_kvtool_get_cells(self._context, layer, None, 1)
        _check(n_bytes)
        return n_bytes

    def apply(
        self,
        moves: np.ndarray,
        n_keep: int,
        pos_0: int,
        merge: Merge | None = None,
        *,
        n_keep_row: np.ndarray | None = None,
        force_graph: bool = False,
    ) -> None:
        """Edits the cache: i32[n, 4] moves (row, dst, src, delta) after the merge; cells 0..n_keep-1 live.

        n_keep_row i32[row]: the same for each row, at most n_keep, where rows are ragged.
        The last counts as position pos_0 + n_keep - 1, the others come before it, and the next token must
        come at pos_0 + n_keep. Sliding layers move along where that is another position than it was, and lose
        what would come before position 0.
        Raises LibraryError, with the cache unchanged, for an index or a pair of moves that cannot be.
        """
        moves = np.ascontiguousarray(moves, np.int32).reshape(-1, 4)
        edit = _Edit(
            moves=moves.ctypes.data_as(ctypes.POINTER(_Move)),
            n_move=len(moves),
            n_keep=n_keep,
            pos_0=pos_0,
            force_graph=force_graph,
        )
        if n_keep_row is not None:
            n_keep_row = np.ascontiguousarray(n_keep_row, np.int32)
            edit.n_keep_row = n_keep_row.ctypes.data
        terms = np.empty(0, TERM)
        if merge is not None:
            terms = np.empty(len(merge.row), TERM)
            for name in TERM.names or ():
                terms[name] = getattr(merge, name)
            edit.terms = terms.ctypes.data_as(ctypes.POINTER(_Term))
            edit.n_term = len(terms)
        self._apply(edit)

    def _apply(self, edit: _Edit) -> None:
        _check(_lib.llama_kvtool_apply(self._context, ctypes.byref(edit)))


def default_threads() -> int:
    """A thread for each core that this process may use; two on one core are slower than one."""
    n = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        shared = Path("/sys/devices/system/cpu/smt/active").read_text().strip() == "1"
    except OSError:
        shared = False
    return max(n // 2, 1) if shared else n


def choose_flash(flash: str, type_v: str, ragged: bool) -> str:
    """What -fa comes to with that type of V. Raises UsageError where the two cannot go together."""
    if ragged:
        # flash attention takes no mask of each head's own on most devices
        if type_v in _QUANTIZED and has_gpu():
            raise UsageError(f"a {type_v} V cache does not go with this policy on a GPU; choose -ctv f16")
        flash = "off" if flash == "auto" and type_v not in _QUANTIZED else flash
    if flash == "off" and type_v in _QUANTIZED:
        raise UsageError(f"a {type_v} V cache needs flash attention: -fa on, or another -ctv")
    if flash == "auto":
        if type_v in _QUANTIZED:
            return "on"
        # on a CPU a transposed V without flash attention is faster from 512 cells on, and never much slower
        return "auto" if has_gpu() else "off"
    return flash


def _kvtool_error() -> str:
    message: bytes = _lib.llama_kvtool_error()
    return message.decode()


def _check(status: int) -> None:
    if status < 0:
        raise LibraryError(f"llama.cpp refused: {_kvtool_error()}")


class Sampler:
    """llama.cpp's own chain of samplers, in its own order. temp <= 0 is greedy. seed: drawn unless given.

    recent: the last tokens sampled, which the repeat penalty looks back at. Raises UsageError for a penalty
    that is none.
    """

    def __init__(
        self,
        n_vocab: int,
        *,
        temp: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repeat_penalty: float = 1.0,
        seed: int | None = None,
    ) -> None:
        if repeat_penalty <= 0:
            raise UsageError(f"--repeat-penalty must be above 0, got {repeat_penalty}; 1 is none")
        self.n_vocab = n_vocab
        self.temp, self.top_k, self.top_p, self.min_p = temp, top_k, top_p, min_p
        self.repeat_penalty = repeat_penalty
        self.seed = secrets.randbits(31) if seed is None else seed
        self.recent: deque[int] = deque(maxlen=_N_PENALTY)
        self._chain = None
        self.start(0)

    def start(self, n: int) -> None:
        """Before the nth text: its draws depend on seed and n alone, not on how many there were before."""
        self.close()
        add = api.llama_sampler_chain_add
        self._chain = chain = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
        if self.repeat_penalty != 1.0:
            penalties = (_N_PENALTY, self.repeat_penalty, 0.0, 0.0)
            add(chain, api.llama_sampler_init_penalties(self.n_vocab, *penalties))
        if self.temp <= 0:
            add(chain, api.llama_sampler_init_greedy())
        else:
            if self.top_k > 0:
                add(chain, api.llama_sampler_init_top_k(self.top_k))
            if self.top_p < 1:
                add(chain, api.llama_sampler_init_top_p(self.top_p, 1))
            if self.min_p > 0:
                add(chain, api.llama_sampler_init_min_p(self.min_p, 1))
            add(chain, api.llama_sampler_init_temp(self.temp))
            # the greatest seed would be a random one
            add(chain, api.llama_sampler_init_dist((self.seed + n * 0x9E3779B9) % 0xFFFFFFFF))
        for token in self.recent:
            api.llama_sampler_accept(chain, token)

    def sample(self, context: Decoder) -> int:
        """The next token, from the last logits of the context."""
        token: int = api.llama_sampler_sample(self._chain, context._context, -1)
        self.recent.append(token)
        return token

    def close(self) -> None:
        if self._chain:
            api.llama_sampler_free(self._chain)
            self._chain = None
