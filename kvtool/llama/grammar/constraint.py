"""Constraints on the next token of a text that must fit a grammar, computed by llguidance."""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np

from kvtool.errors import UsageError
from kvtool.llama.grammar.rules import Rules, token_rule
from kvtool.llama.loaded.markers import CONTROL

if TYPE_CHECKING:
    import llguidance

    from kvtool.llama.loaded.model import Model

_STACK_BYTES = 256 * 2**20
"""Stack size of the thread that compiles a grammar.

It is large because llguidance recurses, and a stack overflow would end the process.
"""

_stack_size_lock = threading.Lock()

_Result = TypeVar("_Result")


class Vocabulary:
    """A model's tokens in the form that llguidance needs.

    Use `of`, which caches one object for each model, because each object takes a second and 60 MB for 150,000
    tokens.

    Attributes
    ----------
    pieces
        Bytes of each token. For a control token, the bytes of its name.
    control
        Control tokens. They match no text, so a grammar refers to them by number.
    """

    def __init__(self, model: Model) -> None:
        self.n = model.n_vocab
        self.pieces = model.pieces()
        self.control = frozenset(np.flatnonzero(model.token_attrs & CONTROL).tolist())
        self.ends = model.ends
        # a weak reference: `_vocabularies` must not keep the model alive
        self._model = weakref.ref(model)
        self._inside: dict[bytes, list[int]] = {}
        self._continuing: dict[bytes, list[int]] = {}

    @classmethod
    def of(cls, model: Model) -> Vocabulary:
        """Return the cached vocabulary of a model."""
        vocabulary = _vocabularies.get(model)
        if vocabulary is None:
            vocabulary = _vocabularies[model] = cls(model)
        return vocabulary

    def tokens_of(self, data: bytes) -> list[int]:
        """Tokenize bytes with the model's tokenizer.

        If the tokens do not have exactly these bytes, tokenize greedily instead: each time, take the longest
        token that fits.
        """
        model = self._model()
        if model is None or not data:
            return []
        try:
            text = data.decode()
        except UnicodeDecodeError:
            # not valid UTF-8: `tokenize_bytes` calls this method again, with the valid bytes at the start
            return self.tokenizer.tokenize_bytes(data)
        # some tokenizers add a space at the start of a text; a control character before the text prevents it
        for lead in ("", "\x01"):
            tokens: list[int] = model.tokenize(lead + text, special=True).tolist()
            first = model.tokenize(lead).tolist() if lead else []
            if tokens[: len(first)] == first and self.bytes_of(rest := tokens[len(first) :]) == data:
                return rest
        return self.tokenizer.greedy_tokenize(text)

    def bytes_of(self, tokens: Sequence[int]) -> bytes:
        return b"".join(self.pieces[token] for token in tokens)

    @cached_property
    def tokenizer(self) -> llguidance.LLTokenizer:
        """llguidance's trie of the vocabulary."""
        import llguidance

        # llguidance needs an end-of-generation token. If the model has none, add an empty token, which is
        # never sampled
        none = [] if self.ends else [b""]
        tokenizer = _Tokenizer(self, [*self.pieces, *none], [*self.ends, self.n][0])
        slices = llguidance.LLTokenizer.json_slices()
        return llguidance.LLTokenizer(tokenizer, eos_token=list(self.ends) or [self.n], slices=slices)  # type: ignore[arg-type]

    @cached_property
    def n_word(self) -> int:
        """Number of 32-bit words of a mask."""
        return -(-self.tokenizer.vocab_size // 32)

    def mask_of(self, tokens: Sequence[int]) -> np.ndarray:
        """Return u32[n_word] with the bits of these tokens set."""
        mask = np.zeros(self.n_word, np.uint32)
        if len(tokens):
            bits = np.asarray(tokens, np.uint32)
            np.bitwise_or.at(mask, bits >> 5, np.uint32(1) << (bits & 31))
        return mask

    @cached_property
    def all_but_ends(self) -> np.ndarray:
        """u32[n_word] with the bits of all tokens except end-of-generation tokens. Read only."""
        mask = ~self.mask_of(self.ends)
        mask.flags.writeable = False
        return mask

    def continuing(self, text: bytes) -> list[int]:
        """Return the tokens that are a prefix of the text, and the tokens of which the text is a prefix."""
        if text not in self._continuing:
            self._continuing[text] = [
                token
                for token, piece in enumerate(self.pieces)
                if piece and (text.startswith(piece) or piece.startswith(text))
            ]
        return self._continuing[text]

    def with_inside(self, byte: bytes) -> list[int]:
        """Return the tokens that contain this byte before their last byte."""
        if byte not in self._inside:
            self._inside[byte] = [token for token, piece in enumerate(self.pieces) if byte in piece[:-1]]
        return self._inside[byte]


_vocabularies: weakref.WeakKeyDictionary[Model, Vocabulary] = weakref.WeakKeyDictionary()


class _Tokenizer:
    """Tokenizer with the attributes that llguidance expects."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, tokens: list[bytes], eos: int) -> None:
        self.tokens, self.eos_token_id = tokens, eos
        self.special_token_ids = sorted(vocabulary.control)
        # a weak reference, because the vocabulary refers to the tokenizer
        self._vocabulary = weakref.ref(vocabulary)

    def __call__(self, text: str) -> list[int]:
        vocabulary = self._vocabulary()
        return vocabulary.tokens_of(text.encode()) if vocabulary else []


class Constraint(Protocol):
    """Restricts which tokens may come next. `accept` advances it by one token of the text."""

    def mask(self) -> np.ndarray | None:
        """Return a mask u32[n_word] of the tokens that fit. Return None if every token fits.

        Bit i % 32 of word i // 32 is set if token i fits. Raises UsageError if the grammar is too complex.
        """

    def accept(self, token: int) -> bool:
        """Advance by this token and return True if it fits. Otherwise change nothing and return False."""

    def n_fitting(self, tokens: Sequence[int]) -> int:
        """Return how many of these tokens fit one after another, without advancing."""

    def forced(self) -> Sequence[int]:
        """Return the tokens that must come next, up to the first place where several tokens fit."""

    def restart(self) -> None:
        """Return to the start of the text."""


class Matcher(Constraint):
    """Makes a text follow rules. Once the text is complete, only end-of-generation tokens fit.

    Raises UsageError for rules that llguidance rejects.
    """

    def __init__(self, vocabulary: Vocabulary, rules: Rules) -> None:
        import llguidance

        self._vocabulary, self._name = vocabulary, rules.name
        self._begun: Sequence[int] = ()
        self._mask = np.zeros(vocabulary.n_word, np.uint32)
        make, tokenizer, text = llguidance.LLMatcher, vocabulary.tokenizer, rules.text
        for n, token in enumerate(rules.tokens):
            text += f"{token_rule(n)}: {self._token(token)}\n"
        self._matcher = with_large_stack(lambda: make(tokenizer, text, log_level=0, limits=limits()))
        if self._matcher.is_error():
            raise UsageError(f"{self._name} cannot be used: {self._why()}")

    def _token(self, name: str) -> str:
        """Return the Lark expression for a token of `Rules.tokens`."""
        text = name.removeprefix("!")
        tokens = self._vocabulary.tokens_of(text.encode())
        if len(tokens) != 1:
            raise UsageError(f"{self._name} cannot be used: {text} is not one token of this model")
        if tokens[0] in self._vocabulary.ends and name == text:
            raise UsageError(f"{self._name} cannot be used: {text} ends a reply in any case; leave it out")
        return f"<[{'^' * name.startswith('!')}{tokens[0]}]>"

    def mask(self) -> np.ndarray:
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        self._check()
        return self._mask

    def accept(self, token: int) -> bool:
        fits = self._matcher.try_consume_tokens([token]) == 1
        self._check()
        return fits or (self._matcher.is_stopped() and token in self._vocabulary.ends)

    @property
    def is_complete(self) -> bool:
        """True if only an end-of-generation token may follow."""
        return self._matcher.is_stopped()

    def n_fitting(self, tokens: Sequence[int]) -> int:
        n = self._matcher.validate_tokens([*tokens])
        self._check()
        return n

    def forced(self) -> Sequence[int]:
        return self._matcher.compute_ff_tokens()

    def restart(self) -> None:
        self._matcher.reset()
        if not all(map(self.accept, self._begun)):
            raise UsageError("the beginning of the reply does not fit its grammar or JSON schema")

    def begin(self, tokens: Sequence[int]) -> None:
        """Start the text with these tokens. Each later `restart` also starts with them.

        Raises UsageError if the tokens do not fit.
        """
        self._begun = tokens
        try:
            self.restart()
        except UsageError:
            # do not let later texts start with these tokens
            self._begun = ()
            raise

    def _check(self) -> None:
        if self._matcher.is_error():
            raise UsageError(f"{self._name} is too complex at this place; simplify it ({self._why()})")

    def _why(self) -> str:
        text = self._matcher.get_error()
        # the reason for refusing a regular expression comes some lines after the first line
        reason = re.search("^error: (.+)$", text, re.M)
        return " ".join((reason[1] if reason else text.partition("\n")[0]).split())[:200]


def accepts(rules: Rules, text: str) -> bool:
    """True if a whole text fits rules without control tokens. False if the rules are too complex."""
    matcher = _byte_matcher(rules.text).deep_copy()
    # the half of a surrogate pair, which UTF-8 does not have, counts as a character
    return bool(matcher.consume_tokens([*text.encode("utf-8", "replace")])) and matcher.is_accepting()


# cached, because a reply often has several calls of the same tool
@lru_cache(16)
def _byte_matcher(rules: str) -> llguidance.LLMatcher:
    """Return a matcher whose tokens are single bytes. It is at the start of the text."""
    import llguidance

    make, tokenizer = llguidance.LLMatcher, llguidance.LLTokenizer("byte")
    return with_large_stack(lambda: make(tokenizer, rules, log_level=0, limits=limits()))


def limits() -> llguidance.LLParserLimits:
    """Return limits that keep llguidance to about 200 MB.

    On a slow core they limit it to about 0.5 s per token, and to a few seconds at the start.
    """
    import llguidance

    return llguidance.LLParserLimits(
        initial_lexer_fuel=5_000_000,
        step_lexer_fuel=2_000_000,
        max_lexer_states=100_000,
        verbose_errors=False,
    )


def with_large_stack(call: Callable[[], _Result]) -> _Result:
    """Call the function in a thread with a large stack. Return its result or raise its error."""
    results: list[_Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    thread = threading.Thread(target=run)
    # the stack size applies to all new threads of the process, so only one caller at a time may set it
    with _stack_size_lock:
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
