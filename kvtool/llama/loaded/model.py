"""A GGUF model and its vocabulary."""

from __future__ import annotations

import ctypes
import os
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np

from kvtool.errors import InputError, ModelError, OutOfMemory, UsageError
from kvtool.llama.libllama.crash import crash_means, damaged
from kvtool.llama.libllama.devices import has_gpu, local_gpus
from kvtool.llama.libllama.library import ENDS, ModelLayer, api, check_library, error_text, lib
from kvtool.llama.libllama.log import because, log_tail, no_memory, quiet, start_backends
from kvtool.llama.loaded.adapters import Adapter, Adapters
from kvtool.llama.loaded.markers import Markers
from kvtool.llama.loaded.placement import Placement
from kvtool.models.gguf import MAX_LAYERS
from kvtool.models.header import ModelInfo, read
from kvtool.models.layers import Kind, Layer, Layers

_ROPES = {api.LLAMA_ROPE_TYPE_MROPE: "M-RoPE", api.LLAMA_ROPE_TYPE_IMROPE: "interleaved M-RoPE"}


class Model:
    """A loaded model. Raises ModelError or OutOfMemory if llama.cpp cannot load the model or an adapter.

    Raises UsageError if the placement names a device or a buffer that does not exist.

    Parameters
    ----------
    info
        The model's header. Default: it is read when it is first needed.
    n_gpu_layers
        Number of layers on a GPU. Default: all.
    placement
        Default: llama.cpp's placement.
    vocab_only
        Load only the vocabulary, to tokenize.
    no_weights
        Load everything except the weights, to tokenize and to read `layers`.
    mtp
        Also load the layers for multi-token prediction, which `MtpContext` needs.
    local
        Use only this machine's devices, even if there are workers.

    Attributes
    ----------
    n_vocab
        Size of the vocabulary: tokens are 0 .. n_vocab - 1.
    n_ctx_train
        Trained context length in tokens.
    bos, eos
        Tokens that begin and end a text, negative if the model has none.
    adds_bos
        True if the model needs its BOS token before a text.
    adapters
        LoRA adapters that all contexts of the model use.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        info: ModelInfo | None = None,
        n_gpu_layers: int | None = None,
        placement: Placement | None = None,
        adapters: tuple[Adapter, ...] = (),
        vocab_only: bool = False,
        no_weights: bool = False,
        mtp: bool = False,
        local: bool = False,
    ) -> None:
        check_library()
        start_backends()
        log_tail.clear()
        params = api.llama_model_default_params()
        params.vocab_only = vocab_only
        params.load_mtp = mtp
        if no_weights:
            params.no_alloc = True
            # do not map the file into memory, because nothing reads the weights
            params.load_mode = api.LLAMA_LOAD_MODE_NONE
        if n_gpu_layers is not None:
            params.n_gpu_layers = n_gpu_layers
        self.path = Path(path)
        if info:
            self.info = info
        self.adapters = adapters
        self._n_gpu_layers = n_gpu_layers
        self._placement = placement or Placement()
        # keep these objects alive, because llama.cpp's parameters point to them
        self._placed = self._placement.apply(params)
        if local and (devices := local_gpus()):
            params.devices = ctypes.addressof(devices)
            self._placed.append(devices)
        for adapter in adapters:
            adapter.check(self.path.name, self.info.architecture)
        self._model = None
        with crash_means(damaged(path)):
            self._model = api.llama_model_load_from_file(os.fsencode(path), params)
        if not self._model:
            if no_memory():
                raise OutOfMemory(f"no memory for {path}{because()}", on_gpu=self.uses_gpu, for_weights=True)
            raise ModelError(f"llama.cpp cannot load {path}{because()}")
        try:
            self._adapters = Adapters(self._model, self.path.name, adapters)
        except BaseException:
            self.close()
            raise
        self._vocab = api.llama_model_get_vocab(self._model)
        self.n_vocab: int = api.llama_vocab_n_tokens(self._vocab)
        self.n_ctx_train: int = api.llama_model_n_ctx_train(self._model)
        self.bos: int = api.llama_vocab_bos(self._vocab)
        self.eos: int = api.llama_vocab_eos(self._vocab)
        self.adds_bos: bool = api.llama_vocab_get_add_bos(self._vocab)

    @property
    def uses_gpu(self) -> bool:
        """True if GPUs or workers have any layers."""
        return has_gpu() and self._n_gpu_layers != 0

    @property
    def is_on_gpu(self) -> bool:
        """True if GPUs or workers compute the attention of all layers, and hold their cache.

        A layer's cache lies on its device even if a placement has tensors of the layer in host memory.
        """
        self._check_open()
        n = self._n_gpu_layers
        # n must exceed n_layer, because llama.cpp counts the output as one more layer. n_layer includes MTP
        # layers, because llama.cpp counts them even if it does not load them
        return self.uses_gpu and (n is None or n < 0 or n > self.info.weights.n_layer)

    @property
    def has_mtp(self) -> bool:
        """True if layers for multi-token prediction are loaded, and llama.cpp can compute them."""
        self._check_open()
        return bool(lib.llama_kvtool_has_mtp(self._model))

    @property
    def only_gpu(self) -> int | None:
        """Index of the GPU that has all layers; None if all GPUs share them."""
        return self._placement.main_gpu if self._placement.split_mode == "none" else None

    def adapt(self, context: object) -> None:
        """Let one of llama.cpp's contexts compute with the model's adapters."""
        self._adapters.apply(context)

    @property
    def vocab(self) -> object:
        """Pointer to the vocabulary, for llama.cpp's functions. Raises UsageError if the model is closed."""
        self._check_open()
        return self._vocab

    @cached_property
    def info(self) -> ModelInfo:
        """The model's header."""
        return read(self.path)

    @cached_property
    def layers(self) -> Layers:
        """Description of each layer's KV cache or state, as llama.cpp reports it.

        Raises ModelError for a model that cannot be used.
        """
        self._check_open()
        plain = replace(self.info.plain_layers, rope=self._rope)
        if plain.only_full:
            return plain
        n_swa: int = api.llama_model_n_swa(self._model)
        # this call makes llama.cpp allocate a cache of one cell, which aborts with some damaged models
        with quiet(), crash_means(damaged(self.path)):
            # a layer has up to three entries, one for each of its caches: cells, keys of an index, a state
            entries = (ModelLayer * (3 * MAX_LAYERS))()
            n = lib.llama_kvtool_layers(self._model, entries, len(entries))
            if n < 0:
                raise ModelError(f"{self.path.name} cannot be used: {error_text()}")
            max_cells = lib.llama_kvtool_most_cells(self._model)
            has_alibi = lib.llama_kvtool_has_alibi(self._model)
            can_drop = lib.llama_kvtool_can_drop(self._model)
        all_layers = tuple(
            Layer(e.il, Kind(e.kind), e.owner, e.n_head, e.n_embd_k, e.n_embd_v, e.n_bytes)
            for e in entries[:n]
        )
        slides = any(layer.kind is Kind.SLIDING for layer in all_layers)
        if slides and not n_swa:
            # a window of 0 tokens usually means that no layer slides. But this model has sliding layers, and
            # such a window would mask every token
            raise ModelError(f"{self.path} is damaged: its sliding layers see 0 tokens; download it again")
        n_head = self.info.n_head
        rows = [layer for layer in all_layers if layer.kind is Kind.ROWS]
        n_group = max((n_head[layer.number] // layer.n_head_kv for layer in rows), default=1)
        n_swa = n_swa if slides else 0
        return Layers(all_layers, n_swa, max_cells, n_group, has_alibi, can_drop, rope=self._rope)

    @cached_property
    def groups(self) -> list[tuple[Layer, int]]:
        """Layers of kind `ROWS`, each with its number of query heads per KV head."""
        n_head = self.info.n_head
        return [(layer, n_head[layer.number] // layer.n_head_kv) for layer in self.layers.of(Kind.ROWS)]

    @property
    def _rope(self) -> str:
        return _ROPES.get(api.llama_model_rope_type(self._model), "")

    @cached_property
    def markers(self) -> Markers:
        """Markers that `tokenize` converts if `special` is set."""
        return Markers.of(self.vocab, self.token_attrs)

    @cached_property
    def token_attrs(self) -> np.ndarray:
        """Attributes i32[n_vocab] of all tokens: bits of llama.cpp's llama_token_attr, and the bit ENDS."""
        attrs = np.empty(self.n_vocab, np.int32)
        lib.llama_kvtool_token_attrs(self.vocab, attrs.ctypes.data)
        return attrs

    def close(self) -> None:
        """Free the model. A second call does nothing."""
        if self._model:
            api.llama_model_free(self._model)
            self._model = None

    @property
    def is_open(self) -> bool:
        return self._model is not None

    def tokenize(self, text: str, *, special: bool = False, start: bool = False) -> np.ndarray:
        """Return the tokens i32[n] of a text.

        special: convert markers such as <|im_end|> to their tokens. start: begin with a BOS token if the
        model needs one. Raises InputError for a text with unpaired surrogates.
        """
        self._check_open()
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            raise InputError(f"the text is not Unicode: character {error.start} is half of a pair") from None
        room = len(data) + 8
        while True:
            tokens = (api.llama_token * room)()
            # this is the first call that reads the vocabulary, so a damaged vocabulary crashes llama.cpp here
            with crash_means(damaged(self.path)):
                n = api.llama_tokenize(self._vocab, data, len(data), tokens, room, start, special)
            if n >= 0:
                return np.array(tokens[:n], np.int32)
            room = -n

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """Return a token's bytes, which may be part of a character.

        special: True to return a text even for a marker. Raises UsageError for a token that is not in the
        vocabulary.
        """
        self._check_open()
        if not 0 <= token < self.n_vocab:
            raise UsageError(f"token {token} is not in the vocabulary, which is 0..{self.n_vocab - 1}")
        room = 64
        while True:
            buffer = ctypes.create_string_buffer(room)
            n = api.llama_token_to_piece(self._vocab, int(token), buffer, room, 0, special)
            if n >= 0:
                return buffer.raw[:n]
            room = -n

    def pieces(self) -> list[bytes]:
        """Return the bytes of all tokens. For a control token, these are the bytes of its name."""
        ends = np.empty(self.n_vocab, np.int64)
        n_bytes = lib.llama_kvtool_pieces(self.vocab, None, 0, ends.ctypes.data)
        buffer = np.empty(n_bytes, np.uint8)
        lib.llama_kvtool_pieces(self.vocab, buffer.ctypes.data, n_bytes, ends.ctypes.data)
        data = buffer.tobytes()
        return [data[begin:end] for begin, end in pairwise([0, *ends.tolist()])]

    def marker(self, token: int) -> str:
        """Return the text of a special token, or "" if the token is negative."""
        return self.piece(token, special=True).decode("utf-8", "replace") if token >= 0 else ""

    def ends_turn(self, token: int) -> bool:
        """Return True if the token is one of the model's end-of-generation tokens."""
        self._check_open()
        return bool(api.llama_vocab_is_eog(self._vocab, int(token)))

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """The model's end-of-generation tokens."""
        return tuple(np.flatnonzero(self.token_attrs & ENDS).tolist())

    @cached_property
    def suppressed(self) -> tuple[int, ...]:
        """Tokens that the model must never write, according to its file."""
        n = ctypes.c_int32()
        tokens = api.llama_vocab_get_suppress_tokens(self.vocab, ctypes.byref(n))
        return tuple(tokens[: n.value]) if tokens else ()

    def chat_template(self) -> str | None:
        """Return the Jinja template in the model's header, or None."""
        text = api.llama_model_chat_template(self._model, None)
        return text.decode("utf-8", "replace") if text else None

    def _check_open(self) -> None:
        """Raise UsageError if the model is closed, since llama.cpp would read freed memory."""
        if not self.is_open:
            raise UsageError("this model is closed; load it again")
