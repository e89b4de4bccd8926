"""Keys: which tokens, in which namespace, with what else on each page.

A tree of page size S sees a key as rows of S tokens. An EAGLE key is seen as rows of S bigrams; bigram i is
(token i, token i+1), so a row of S bigrams is S + 1 tokens of the same array, and nothing is copied.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, Final, SupportsIndex

import numpy as np
import numpy.typing as npt

from hiradix.errors import BadNamespace, Misuse
from hiradix.tree import ids
from hiradix.tree.hashing import namespace_seed

Tokens = npt.NDArray[np.int64]
Extras = tuple[bytes | None, ...]


@dataclass(frozen=True, slots=True)
class Namespace:
    """The part of a key that separates equal tokens: adapter (extra_key), tenant (cache_salt) and the kind of
    row."""

    extra_key: str | None = None
    cache_salt: str | None = None
    is_bigram: bool = False

    @property
    def lookahead(self) -> int:
        """Tokens a row needs beyond its page."""
        return 1 if self.is_bigram else 0

    @property
    def seed(self) -> bytes:
        """The seed of this namespace's chains of page hashes."""
        return namespace_seed(self.extra_key, self.cache_salt)

    @property
    def tenant(self) -> str:
        """Whose quota pages in storage count against: `salt:` and the salt, else `key:` and the extra key.

        "" in the plain namespace.
        """
        if self.cache_salt is not None:
            return f"salt:{self.cache_salt}"
        return "" if self.extra_key is None else f"key:{self.extra_key}"


PLAIN: Final = Namespace()


def namespace(extra_key: Any, cache_salt: Any, is_bigram: bool) -> Namespace:
    """The namespace of these three; the shared `PLAIN` where none is given. Raises BadNamespace for values that
    are not text."""
    if extra_key is None and cache_salt is None and not is_bigram:
        return PLAIN
    return Namespace(_text("extra_key", extra_key), _text("cache_salt", cache_salt), is_bigram)


def _text(field: str, value: Any) -> str | None:
    """`value`, if it can be part of a storage key: None or valid Unicode text. Raises BadNamespace."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise BadNamespace(field, f"must be a text, got {type(value).__name__}")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise BadNamespace(field, f"half a character at {error.start} of the text") from error
    return value


def private(value: Any) -> str | None:
    """`value` itself if it can name a namespace, else a text that stands for it and for no other value.

    For adapters, whose engines have taken the request already: an exception on their scheduler's thread would
    end it, and no two values may share pages.
    """
    try:
        return _text("", value)
    except BadNamespace:
        kind = type(value).__name__
        return f"\0not text: {kind} {hashlib.sha256(ascii(value).encode()).hexdigest()}"


ADAPTER: Final = "\0adapter:"
"""How the extra keys of adapters begin, in every engine: no client may name one."""
_CLIENT: Final = "\0client:"


def of_client(extra_key: str) -> str:
    """A client's extra key as it is used in a namespace: escaped if it begins as the engines' own keys do."""
    return _CLIENT + extra_key if extra_key.startswith("\0") else extra_key


def as_client_gave(extra_key: str) -> str:
    """The inverse of `of_client`."""
    return extra_key[len(_CLIENT) :] if extra_key.startswith(_CLIENT) else extra_key


NARROW: Final = 4  # bytes per packed token, all of them in [0, 2**31)
WIDE: Final = 8  # and otherwise
FIRST_WINDOW: Final = 4096  # tokens of a key packed at once, so that no more is packed than is looked at
WINDOW_TOKENS: Final = 16384  # and at once further on
FEW_TOKENS: Final = 1536  # up to here array('q') is packed without numpy, which is slower with cold caches
_IN_HALVES: Final = sys.byteorder == "little" and not ids.IS_BUILT
_LARGEST: Final = np.iinfo(np.int64).max
_NO_TOKENS: Final[Tokens] = np.empty(0, np.int64)


def packed(tokens: Tokens, start: int, stop: int) -> tuple[bytes, int]:
    """Tokens [start, stop) as bytes, and the bytes per token: 4 (int32) if all are in [0, 2**31), else 8."""
    run = ids.narrow(tokens, start, stop)
    return (tokens[start:stop].tobytes(), WIDE) if run is None else (run, NARROW)


def _packed_array(tokens: array[int], start: int, stop: int) -> tuple[bytes, int]:
    """`packed` for `array('q')`: picks the lower four bytes of each token, without arithmetic."""
    halves: Any
    if stop - start <= FEW_TOKENS:
        halves = memoryview(tokens)[start:stop].cast("B").cast("I")
    else:
        halves = np.frombuffer(tokens, np.uint32)[2 * start : 2 * stop]
    low, high = halves[::2].tobytes(), halves[1::2].tobytes()
    is_narrow = high == bytes(len(high)) and low[3::NARROW].isascii()  # the top bit of none is set
    return (low, NARROW) if is_narrow else (halves.tobytes(), WIDE)


def unpacked(run: bytes, width: int) -> npt.NDArray[Any]:
    """The tokens of a packed run: a read-only view, int32 or int64."""
    return np.frombuffer(run, np.int32 if width == NARROW else np.int64)


def as_tokens(token_ids: Any) -> Tokens:
    """`token_ids` as an int64 array [N]: a view of an int64 array, array('q') or CPU tensor, else a copy."""
    if isinstance(token_ids, array) and token_ids.typecode == "q":
        return np.frombuffer(token_ids, np.int64)
    tokens = np.asarray(token_ids)
    if tokens.dtype != np.int64:
        if tokens.size and tokens.dtype.kind not in "iu":
            raise TypeError(f"token ids must be integers, got {tokens.dtype}")
        if tokens.dtype == np.uint64 and tokens.size and tokens.max() > _LARGEST:
            raise TypeError(f"token ids must fit into 63 bits, got {tokens.max()}")
        tokens = tokens.astype(np.int64)
    if tokens.ndim != 1:
        raise TypeError(f"token ids must be one-dimensional, got shape {tokens.shape}")
    return tokens


def _is_pairs(token_ids: Any) -> bool:
    return isinstance(token_ids, (list, tuple)) and len(token_ids) > 0 and isinstance(token_ids[0], tuple)


def _unpaired(pairs: Sequence[Any]) -> Tokens:
    """The tokens of bigrams written out, [(a, b), (b, c), ...], as SGLang 0.5.9 has them: [a, b, c, ...]."""
    both = np.asarray(pairs)
    if both.ndim != 2 or both.shape[1] != 2 or not np.array_equal(both[1:, 0], both[:-1, 1]):
        raise TypeError(
            "token_ids: bigrams must be pairs of which each begins with the token that one ends in"
        )
    return as_tokens(np.append(both[:, 0], both[-1, 1]))


def _extra(given: Any) -> bytes | None:
    if given and not isinstance(given, bytes):
        raise TypeError(f"page extras must be bytes, got {type(given).__name__}")
    return given or None


def num_of(count: SupportsIndex) -> int:
    """A count of tokens or pages, of whatever integer type; ValueError where it is negative."""
    number = index(count)
    if number < 0:
        raise ValueError(f"a count must not be negative, got {number}")
    return number


class Bookmark:
    """The place in a tree where the keys of one growing sequence were found last. node: read and written by
    the tree alone. slots: the prefix cache's last answer, read and written by it alone."""

    __slots__ = ("node", "slots")

    def __init__(self) -> None:
        self.node: Any = None
        self.slots: Any = None


class RadixKey:
    """Tokens int64 [N] in a namespace. `len()` counts tokens, or the N - 1 bigrams if `is_bigram`.

    It is a sequence of these: it iterates, is cut by slices, and equals a list of the same; an index gives the
    key of that one token, as upstream's does.

    token_ids: list, `array('q')`, numpy array or CPU tensor; int64 buffers are viewed, not copied, so the
        caller must not change tokens it has put into a key. With `is_bigram` also a list of pairs.
    extra_key, cache_salt: text or None; anything else is refused with BadNamespace.
    limit: tokens of `token_ids` that count, None for all of them.
    page_extras: per page, a digest of what else decides the page's data (an image behind placeholder
        tokens), or None (or empty). Pages beyond its end have none. It counts pages from the key's start.
    bookmark: where it was found last, shared with its heads, and by all keys of a `TokenLog`.

    >>> key = RadixKey([1, 2, 3, 4, 5], extra_key="adapter-1")
    >>> len(key), key.num_pages(page_size=2)
    (5, 2)
    >>> key.page_aligned(2)
    RadixKey([1, 2, 3, 4], len=4, Namespace(extra_key='adapter-1', cache_salt=None, is_bigram=False))
    >>> key.bigrams()
    RadixKey([1, 2, 3, 4, 5], len=4, Namespace(extra_key='adapter-1', cache_salt=None, is_bigram=True))
    >>> list(key), key[1:3] == [2, 3], key[-1] == [5], list(key[:3].bigrams())
    ([1, 2, 3, 4, 5], True, True, [(1, 2), (2, 3)])
    >>> RadixKey([1.5])
    Traceback (most recent call last):
    TypeError: token ids must be integers, got float64
    """

    __slots__ = (
        "_array", "_tokens", "num_tokens", "space", "extras", "bookmark", "_len",
        "run", "run_start", "run_end", "run_width",
    )  # fmt: skip

    def __init__(
        self,
        token_ids: Any,
        extra_key: Any = None,
        is_bigram: bool = False,
        limit: Any = None,
        cache_salt: Any = None,
        *,
        page_extras: Sequence[bytes | None] | None = None,
    ):
        self._array: array[int] | None = None
        self._tokens = _NO_TOKENS  # of an array, each look at it makes a view of its own: it may grow
        if isinstance(token_ids, array) and token_ids.typecode == "q":
            self._array = token_ids
        elif is_bigram and _is_pairs(token_ids):
            self._tokens = _unpaired(token_ids)
        else:
            self._tokens = as_tokens(token_ids)
        self.bookmark = Bookmark()
        self.extras: Extras | None = None
        if page_extras and any(page_extras):
            self.extras = tuple(map(_extra, page_extras))
        self.run, self.run_start, self.run_end, self.run_width = b"", 0, 0, NARROW
        num_tokens = len(self._tokens if self._array is None else self._array)
        if limit is not None and num_of(limit) < num_tokens:
            num_tokens = index(limit)
            if self._array is None:
                self._tokens = self._tokens[:num_tokens]
        self._set(namespace(extra_key, cache_salt, is_bigram), num_tokens)

    def _set(self, space: Namespace, num_tokens: int) -> None:
        self.space, self.num_tokens = space, num_tokens
        self._len = max(num_tokens - 1, 0) if space.is_bigram else num_tokens

    @staticmethod
    def first(token_ids: Any, num_tokens: SupportsIndex, space: Namespace) -> RadixKey:
        """The key of the first `num_tokens` tokens, or of all if there are fewer. O(1): reads no token.

        An `array('q')` may grow while the key lives; its tokens may not change. Raises ValueError for a negative
        count.
        """
        count = num_of(num_tokens)
        key = RadixKey(token_ids)
        if count < key.num_tokens and key._array is None:
            key._tokens = key._tokens[:count]
        key._set(space, min(count, key.num_tokens))
        return key

    def resume(self, token_ids: Any, num_tokens: SupportsIndex, space: Namespace) -> bool:
        """Make this the key of the first `num_tokens` tokens, more or fewer than before, and keep what is
        packed: a sequence that grows needs no new key. False, with nothing changed, unless it is a key of this
        very `array('q')` and of this namespace.
        """
        known = self._array
        if known is None or known is not token_ids or self.space != space:
            return False
        self._set(space, min(num_of(num_tokens), len(known)))
        return True

    @property
    def tokens(self) -> Tokens:
        """int64 [num_tokens]: a view. While it is referred to, an `array('q')` cannot grow."""
        return self._tokens if self._array is None else as_tokens(self._array)[: self.num_tokens]

    def _like(self, tokens: Tokens, space: Namespace) -> RadixKey:
        key = RadixKey(tokens)
        key.extras = self.extras
        key._set(space, len(tokens))
        return key

    # -- SGLang's names -------------------------------------------------------------------

    @property
    def extra_key(self) -> str | None:
        return self.space.extra_key

    @property
    def cache_salt(self) -> str | None:
        return self.space.cache_salt

    @property
    def is_bigram(self) -> bool:
        return self.space.is_bigram

    @property
    def token_ids(self) -> list[int]:
        """The tokens as a list, which is made at each call; `tokens` is a view."""
        tokens: list[int] = self.tokens.tolist()
        return tokens

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[Any]:
        """Each token, or the two tokens of each bigram."""
        tokens = self.token_ids
        return iter(list(zip(tokens, tokens[1:], strict=False)) if self.space.is_bigram else tokens)

    def __eq__(self, other: object) -> bool:
        """Whether it is the same key; of a list, whether it has what this iterates over."""
        if isinstance(other, RadixKey):
            is_same = self.space == other.space and self.extras == other.extras
            return is_same and np.array_equal(self.tokens, other.tokens)
        if isinstance(other, (list, array)):
            return len(other) == self._len and list(self) == list(other)
        return NotImplemented

    def __hash__(self) -> int:
        return hash((self.space, self.tokens.tobytes()))

    def __repr__(self) -> str:
        shown = ", ".join(map(str, self.tokens[:8].tolist())) + (", ..." if len(self.tokens) > 8 else "")
        return f"RadixKey([{shown}], len={self._len}, {self.space})"

    # -- parts of it ------------------------------------------------------------------------

    def __getitem__(self, part: Any) -> RadixKey:
        """The key of these tokens (or bigrams), in its namespace: `key[:n]`, `key[m:n]`, `key[i]`. A view.

        ValueError for other steps than 1, and of a key with page extras for what does not start where it does:
        extras belong to pages. IndexError.
        """
        if not isinstance(part, slice):
            at = index(part)
            at += self._len if at < 0 else 0
            if not 0 <= at < self._len:
                raise IndexError(f"a key of {self._len} has no {part}")
            part = slice(at, at + 1)
        start, stop, step = part.indices(self._len)
        if step != 1 or (start and self.extras is not None):
            raise ValueError(f"only key[:n] is a key, got {part}")
        if stop <= start:
            return self._like(self.tokens[:0], self.space)
        head = self._like(self.tokens[start : stop + self.space.lookahead], self.space)
        if start == 0:
            head.bookmark = self.bookmark
        return head

    def page_aligned(self, page_size: SupportsIndex) -> RadixKey:
        """The key's whole pages."""
        rest = self._len % index(page_size)
        return self if rest == 0 else self[: self._len - rest]

    def num_pages(self, page_size: SupportsIndex) -> int:
        """Whole pages in the key."""
        return self._len // index(page_size)

    def head(self, num_pages: SupportsIndex, page_size: SupportsIndex) -> RadixKey:
        """The key of the first `num_pages` pages: itself, if it has no more. Raises ValueError for a negative
        count."""
        end = num_of(num_pages) * index(page_size)
        return self if end == self._len else self[:end]

    def bigrams(self) -> RadixKey:
        """The same tokens seen as bigrams. A view."""
        return self._like(self.tokens, Namespace(self.extra_key, self.cache_salt, True))

    # -- for the tree -------------------------------------------------------------------------

    def load(self, start: int, num_tokens: int) -> None:
        """Pack a window of the key into `run` that has at least tokens [start, start + num_tokens).

        run: the bytes of tokens [run_start, run_end), 4 each, or 8 if one of them does not fit.
        """
        window = WINDOW_TOKENS if self.run else FIRST_WINDOW
        self.run_start = start
        self.run_end = min(self.num_tokens, start + max(num_tokens, window))
        self.run, self.run_width = self._packed(start, self.run_end)

    def packed(self, start: int, end: int) -> tuple[bytes, int]:
        """Tokens [start, end) as bytes, and the bytes per token: 4 if they fit, else 8."""
        if self.run_width == NARROW and self.run_start <= start and end <= self.run_end:
            if start == self.run_start and end == self.run_end:
                return self.run, NARROW  # no second copy of a prompt that is one node
            first = (start - self.run_start) * NARROW
            return self.run[first : first + (end - start) * NARROW], NARROW
        return self._packed(start, end)

    def span(self, start: int, end: int) -> tuple[bytes, int, int]:
        """The packed tokens from `start` to `end` as (buffer, first byte, end); no copy if `run` has them."""
        if self.run_width == NARROW and self.run_start <= start and end <= self.run_end:
            return self.run, (start - self.run_start) * NARROW, (end - self.run_start) * NARROW
        run = self._packed(start, end)[0]
        return run, 0, len(run)

    def _packed(self, start: int, end: int) -> tuple[bytes, int]:
        if not 0 <= start <= end <= self.num_tokens:
            raise Misuse(f"tokens {start}..{end} of {self.num_tokens}")
        if self._array is not None:
            if _IN_HALVES:
                return _packed_array(self._array, start, end)
            run = ids.narrow(self._array, start, end)  # no array of numpy's is made
            if run is not None:
                return run, NARROW
        return packed(self.tokens, start, end)

    def row(self, page: int, page_size: int) -> Hashable:
        """The key of a page among its parent's children: equal if and only if tokens, extra and (for page 0)
        namespace are equal."""
        at = page * page_size
        row: Hashable = self.packed(at, at + page_size + self.space.lookahead)[0]
        if self.extras is not None and (extra := self.extra(page)) is not None:
            row = (row, extra)
        return row if page or self.space is PLAIN else (row, self.space)

    def extra(self, page: int) -> bytes | None:
        """The extra of page `page`, or None."""
        return self.extras[page] if self.extras is not None and page < len(self.extras) else None

    def extras_of(self, start: int, end: int) -> Extras | None:
        """Extras of pages [start, end), None if they have none."""
        if self.extras is None or not any(part := self.extras[start:end]):
            return None
        return part + (None,) * (end - start - len(part))
