"""Bindings of the patch's C API in llama.cpp's shared library, and a check of its version."""

from __future__ import annotations

import ctypes

import numpy as np

from kvtool.errors import LibraryError, OutOfMemory, StreamEnd

# re-exported: callers of llama.cpp import this file
from kvtool.llama.libllama.bindings import api as api
from kvtool.llama.libllama.bindings import bind as bind
from kvtool.llama.libllama.bindings import lib as lib
from kvtool.llama.libllama.bindings import library_path as library_path
from kvtool.system.paths import build_command

ABI = 28
"""Version of the patch's C API that this kvtool needs."""

_NO_ROOM = -2
"""Status that C API calls return if memory or disk has no room for the archive."""

_NO_MEMORY = "std::bad_alloc"
"""Text of the exception that C++ throws if an allocation fails."""


class Edit(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("moves", "terms")),
        *((name, ctypes.c_int32) for name in ("n_move", "n_term", "n_keep", "pos_0")),
        ("n_keep_row", ctypes.c_void_p),
        ("n_hidden", ctypes.c_int32),
        ("force_graph", ctypes.c_bool),
    ]


class EnableParams(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint32) for name in ("signals", "group")),
        *((name, ctypes.c_int32) for name in ("n_query", "n_future", "n_draft", "n_defer", "n_recall")),
        *((name, ctypes.c_int32) for name in ("n_synthetic", "n_exact", "n_near", "type_k", "type_v")),
        *((name, ctypes.c_bool) for name in ("plain", "logn", "ragged")),
    ]


class ModelLayer(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("il", "kind", "owner", "n_head", "n_embd_k", "n_embd_v")),
        ("n_bytes", ctypes.c_int64),
    ]


ENDS = 1 << 30
"""Bit of a token's attributes: LLAMA_KVTOOL_TOKEN_ENDS."""

TERM = np.dtype([("row", "<i4"), ("dst", "<i4"), ("src", "<i4"), ("weight", "<f4")])


def _bind_all() -> None:
    pointer, i32, i64, u32 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_uint32
    bind("llama_kvtool_abi", i32)
    bind("llama_kvtool_digest", ctypes.c_char_p)
    if lib.llama_kvtool_abi() != ABI:
        # a library of another version may lack functions; `check_library` reports the version
        return
    bind("llama_kvtool_error", ctypes.c_char_p)
    bind("llama_kvtool_guard", i32, ctypes.c_char_p, i32, ctypes.c_bool)
    bind("llama_kvtool_token_attrs", i32, pointer, pointer)
    bind("llama_kvtool_pieces", i64, pointer, pointer, i64, pointer)
    bind("llama_kvtool_layers", i32, pointer, pointer, i32)
    bind("llama_kvtool_most_cells", i32, pointer)
    bind("llama_kvtool_has_alibi", ctypes.c_bool, pointer)
    bind("llama_kvtool_can_drop", ctypes.c_bool, pointer)
    bind("llama_kvtool_has_mtp", ctypes.c_bool, pointer)
    bind("llama_kvtool_output_hidden", i32, pointer, ctypes.c_bool)
    bind("llama_kvtool_get_hidden", i32, pointer, i32, i32, pointer)
    bind("llama_kvtool_arch", ctypes.c_char_p, i32)
    bind("llama_kvtool_enable", i32, pointer, ctypes.POINTER(EnableParams))
    bind("llama_kvtool_n_dim", i32, pointer)
    bind("llama_kvtool_watch", i32, pointer, ctypes.c_bool)
    bind("llama_kvtool_seen", i32, pointer, i32)
    bind("llama_kvtool_resize", i32, pointer, pointer, i32)
    bind("llama_kvtool_row_layers", i32, pointer, pointer, i32)
    bind("llama_kvtool_cache_bytes", i64, pointer)
    bind("llama_kvtool_deferred_bytes", i64, pointer)
    bind("llama_kvtool_read", i32, pointer, u32, pointer, i32, i32)
    bind("llama_kvtool_write", i32, pointer, u32, pointer, i32, i32)
    bind("llama_kvtool_read_recent", i32, pointer, pointer, i32, i32, i32)
    bind("llama_kvtool_write_recent", i32, pointer, pointer, i32, i32, i32)
    bind("llama_kvtool_enable_joint", i32, pointer, pointer, i32)
    bind("llama_kvtool_decode_joint", i32, pointer, api.llama_batch, pointer, pointer, i32)
    bind("llama_kvtool_mark_drafts", i32, pointer, i32)
    bind("llama_kvtool_drop", i32, pointer, i32)
    bind("llama_kvtool_read_keys", i32, pointer, pointer, pointer, pointer, i32, i32, i32)
    bind("llama_kvtool_read_future", i32, pointer, i32, i64, pointer, pointer, i32, i32, i32)
    bind("llama_kvtool_get_queries", i64, pointer, pointer, pointer)
    bind("llama_kvtool_set_queries", i64, pointer, pointer, pointer)
    bind("llama_kvtool_read_value_norms", i32, pointer, pointer, i32, i32)
    bind("llama_kvtool_get_cells", i64, pointer, i32, pointer, i32)
    bind("llama_kvtool_set_cells", i64, pointer, i32, pointer, i32)
    bind("llama_kvtool_set_positions", i32, pointer, pointer, i32, i32)
    bind("llama_kvtool_n_fixed_state", i32, pointer)
    bind("llama_kvtool_get_fixed_state", i64, pointer, pointer, pointer)
    bind("llama_kvtool_set_fixed_state", i64, pointer, pointer, pointer)
    bind("llama_kvtool_archive_file", i32, pointer, ctypes.c_char_p)
    bind("llama_kvtool_archive", i32, pointer, pointer, i32, i64, i64)
    bind("llama_kvtool_base", i32, pointer, i64)
    bind("llama_kvtool_forget", i32, pointer)
    bind("llama_kvtool_stage", i64, pointer, i64)
    bind("llama_kvtool_stage_bytes", i64, pointer)
    bind("llama_kvtool_reside", i64, pointer, i32, i32, i32)
    bind("llama_kvtool_resident_bytes", i64, pointer, i32, i32, i32)
    bind("llama_kvtool_missed", ctypes.c_float, pointer)
    bind("llama_kvtool_rewind", i32, pointer, i32, i32, i64, i64, i64)
    bind("llama_kvtool_get_archive", i64, pointer, i32, pointer, i64, i64)
    bind("llama_kvtool_set_archive", i64, pointer, i32, pointer, pointer, i32, i64, i64)
    bind("llama_kvtool_get_archive_table", i32, pointer, pointer, i32)
    bind("llama_kvtool_set_archive_table", i32, pointer, pointer, i32)
    bind("llama_kvtool_get_centers", i64, pointer, pointer, i64, i64)
    bind("llama_kvtool_set_centers", i64, pointer, pointer, i64, i64)
    bind("llama_kvtool_clusters", i64, pointer, pointer)
    bind("llama_kvtool_get_clusters", i64, pointer, pointer, i64, i64, ctypes.c_bool)
    bind("llama_kvtool_set_clusters", i64, pointer, pointer, i64, i64, ctypes.c_bool)
    bind("llama_kvtool_seal", i32, pointer, i64)
    bind("llama_kvtool_archive_slab", i64, pointer, pointer)
    bind("llama_kvtool_trace", i32, pointer, i32)
    bind("llama_kvtool_attended", i32, pointer, pointer, pointer, i32, i32)
    bind("llama_kvtool_archive_bytes", i64, pointer)
    bind("llama_kvtool_apply", i32, pointer, ctypes.POINTER(Edit))
    bind("llama_kvtool_use_spares", i32, pointer, pointer, pointer)
    bind("llama_kvtool_limit", i32, pointer, ctypes.c_uint64)
    bind("llama_kvtool_spare", pointer, pointer)


def _bind_ggml() -> None:
    pointer, text, size = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t
    bind("ggml_backend_dev_count", size)
    bind("ggml_backend_dev_get", pointer, size)
    bind("ggml_backend_dev_by_name", pointer, text)
    bind("ggml_backend_dev_name", text, pointer)
    bind("ggml_backend_dev_description", text, pointer)
    bind("ggml_backend_dev_type", ctypes.c_int, pointer)
    bind("ggml_backend_dev_memory", None, pointer, ctypes.POINTER(size), ctypes.POINTER(size))
    bind("ggml_backend_dev_buffer_type", pointer, pointer)
    bind("ggml_backend_buft_name", text, pointer)
    bind("ggml_backend_dev_backend_reg", pointer, pointer)
    bind("ggml_backend_reg_by_name", pointer, text)
    bind("ggml_backend_reg_get_proc_address", pointer, pointer, text)
    bind("ggml_backend_reg_dev_count", size, pointer)
    bind("ggml_backend_reg_dev_get", pointer, pointer, size)
    bind("ggml_backend_device_register", None, pointer)


_bind_ggml()
_bind_all()


def check_library() -> None:
    """Raise LibraryError if the library's patch has another version than this kvtool needs."""
    if (abi := lib.llama_kvtool_abi()) != ABI:
        raise LibraryError(
            f"the llama.cpp in {library_path().parent} speaks kvtool's ABI {abi}, "
            f"this kvtool ABI {ABI}; build the right one: {build_command()}"
        )


def error_text() -> str:
    """Return the reason why the last C API call failed."""
    message: bytes = lib.llama_kvtool_error()
    return message.decode()


def check(status: int) -> None:
    """Raise StreamEnd (no room for the archive), OutOfMemory or LibraryError if a C API call failed."""
    if status >= 0:
        return
    text = error_text()
    if status == _NO_ROOM:
        raise StreamEnd(f"{text}; choose a smaller --archive" if "the archive" in text else text)
    if text == _NO_MEMORY:
        raise OutOfMemory
    raise LibraryError(f"llama.cpp refused: {text}")
