"""Data for the papers' figures of a model without eviction: attention, queries, values, important keys.

- `attention`, `queries` and `share`: CORM's figures 1 to 3 (Dai et al. 2024, arXiv:2404.15949, section 3).
- `values`: WeightedKV's figure 1 (Yuan et al. 2025, arXiv:2503.01330).

Each layer is reduced while the text is read. Complete arrays are kept only for the heads of a picture. Only
layers that attend to all tokens are measured. An array [head] has an entry for each head of each such layer.
In `Values` these are KV heads, elsewhere query heads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np

from kvtool.errors import ModelError
from kvtool.llama.loaded.model import Model
from kvtool.models.layers import Kind
from lab.papers.maps.observe import Observed, observe

Place = tuple[int, int]
"""A layer, and the index of a head in this layer."""

CARRIED = 0.9
"""The rank is the smallest number of singular values whose squares sum to this share of all squares."""

Measure = Callable[[Observed, Place, np.ndarray], tuple[float, ...] | None]
"""A function that measures one array of a head.

It takes the kind of array, the layer and head, and the array. It returns the head's numbers, or None if this
kind of array adds no numbers.
"""

_SEED = 1


@dataclass(frozen=True, slots=True)
class Reading:
    """Text to read.

    Attributes
    ----------
    model
        Model that reads it.
    tokens
        i32[n], n >= 2.
    n_threads
        CPU threads; None: `Decoder` chooses.
    """

    model: Model
    tokens: np.ndarray
    n_threads: int | None = None

    def columns(self, kind: str, wanted: Collection[Observed], measure: Measure) -> list[np.ndarray]:
        """Return the layers i32[head], the heads i32[head], then an array f64[head] for each measured number.

        kind: name of the map; it decides which layers are measured. wanted: data to observe. Raises the
        errors of `observe`.
        """
        heads_seen = []

        def visit(observed: Observed, layer: int, head: int, array: np.ndarray) -> None:
            if (numbers := measure(observed, (layer, head), array)) is not None:
                heads_seen.append((layer, head, *numbers))

        observe(self.model, self.tokens, wanted, drawn_layers(self.model, kind), visit, self.n_threads)
        layers, heads, *rest = zip(*heads_seen, strict=True)
        return [np.array(layers, np.int32), np.array(heads, np.int32), *map(np.array, rest)]


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads of a map.

    Attributes
    ----------
    layer
        i32[head], layer of each head, counted from 0 in the model.
    head
        i32[head], index of the head in the layer.
    """

    layer: np.ndarray
    head: np.ndarray


@dataclass(frozen=True, slots=True)
class Share(Heads):
    """Share of keys that are important to a query. The paper's sparsity is 1 minus this share.

    Attributes
    ----------
    share
        f64[head], important keys divided by all keys that the query has seen (its own included), mean over
        the queries.
    """

    share: np.ndarray


@dataclass(frozen=True, slots=True)
class AttentionMap:
    """Attention of one head.

    Attributes
    ----------
    attention
        f32[n, n], by query and key.
    important
        b1[n, n], True for keys that are important to each query.
    similar
        i64[n - 1], for each query except the first: the earlier query that is most similar to it.
    """

    attention: np.ndarray
    important: np.ndarray
    similar: np.ndarray


@dataclass(frozen=True, slots=True)
class Attention(Share):
    """Overlap of the important keys of similar queries.

    The overlap of two queries is the number of keys that are important to both, divided by the number of keys
    that are important to at least one of them. Only keys that both queries have seen are counted. The two
    numbers are summed over all queries before the division.

    Attributes
    ----------
    similar
        f64[head], the overlap with the most similar earlier query.
    previous
        f64[head], the overlap with the query just before.
    random
        f64[head], the overlap with a random earlier query (with a fixed seed).
    maps
        Attention of the requested heads.
    """

    similar: np.ndarray
    previous: np.ndarray
    random: np.ndarray
    maps: dict[Place, AttentionMap]


@dataclass(frozen=True, slots=True)
class SimilarQueries(Heads):
    """Similarity of queries, and distance to the most similar earlier query.

    Attributes
    ----------
    distance
        i32[head, n - 1], for each query except the first: distance in tokens to the most similar earlier
        query. 1 if this is the query just before.
    cosine
        f64[head], mean cosine similarity of a query and the most similar earlier query.
    maps
        f32[n, n], cosine similarities by query and earlier query, of the requested heads.
    """

    distance: np.ndarray
    cosine: np.ndarray
    maps: dict[Place, np.ndarray]

    def within(self, n_token: int) -> np.ndarray:
        """f64[head], share of queries whose most similar earlier query is at most n_token tokens back."""
        within: np.ndarray = (self.distance <= n_token).mean(axis=1)
        return within

    def chance(self, n_token: int) -> float:
        """Return the value of `within` that chance alone gives.

        By chance, each earlier query is equally likely to be the most similar.
        """
        n_earlier = np.arange(1, self.distance.shape[1] + 1)
        return float((np.minimum(n_token, n_earlier) / n_earlier).mean())


@dataclass(frozen=True, slots=True)
class Values(Heads):
    """Singular values of the matrix [token, dim] of each KV head, not centered.

    Attributes
    ----------
    singular
        Lists of f64[dim] for each head, descending. There is a list for KEYS, VALUES, and, if llama.cpp shows
        them, KEYS_BEFORE.
    """

    singular: dict[Observed, list[np.ndarray]]

    def normalised(self, observed: Observed) -> np.ndarray:
        """Return f64[dim]: each head's singular values divided by its first, then the mean over heads.

        If heads differ in dimension, dim is the smallest.
        """
        n = min(map(len, self.singular[observed]))
        tiny = np.finfo(np.float64).tiny
        mean: np.ndarray = np.mean(
            [each[:n] / max(each[0], tiny) for each in self.singular[observed]], axis=0
        )
        return mean

    def rank(self, observed: Observed) -> np.ndarray:
        """i64[head], number of largest singular values that have 90 % of the sum of squares."""
        return np.array([effective_rank(each) for each in self.singular[observed]], np.int64)


def attention(text: Reading, places: Collection[Place] = ()) -> Attention:
    """Measure whether similar queries attend to the same keys. Raises `observe`'s errors.

    places: heads whose maps are needed.
    """
    rng = np.random.default_rng(_SEED)
    previous = np.arange(len(text.tokens) - 1)
    nearest: dict[int, np.ndarray] = {}
    maps = {}

    def measure(observed: Observed, place: Place, array: np.ndarray) -> tuple[float, ...] | None:
        _, head = place
        if observed is Observed.QUERIES:
            nearest[head] = most_similar(cosines(array))
            return None
        mask, similar = important(array), nearest[head]
        if place in places:
            maps[place] = AttentionMap(array, mask, similar)
        others = similar, previous, rng.integers(previous + 1)
        return share_of(mask), *(overlap(mask, earlier) for earlier in others)

    wanted = (Observed.QUERIES, Observed.ATTENTION)
    layer, head, shares, similar, before, random = text.columns("attention", wanted, measure)
    return Attention(layer, head, shares, similar, before, random, maps)


def queries(text: Reading, places: Collection[Place] = ()) -> SimilarQueries:
    """Measure the similarity of queries. places: heads whose maps are needed. Raises `observe`'s errors."""
    distances, maps = [], {}

    def measure(observed: Observed, place: Place, array: np.ndarray) -> tuple[float]:
        cosine = cosines(array)
        nearest = most_similar(cosine)
        query = np.arange(1, len(array))
        distances.append((query - nearest).astype(np.int32))
        if place in places:
            maps[place] = cosine
        return (float(cosine[query, nearest].mean()),)

    layer, head, cosine = text.columns("queries", (Observed.QUERIES,), measure)
    return SimilarQueries(layer, head, np.array(distances), cosine, maps)


def values(text: Reading) -> Values:
    """Measure the singular values of keys and values. Raises `observe`'s errors."""
    wanted = (Observed.KEYS_BEFORE, Observed.KEYS, Observed.VALUES)
    singular: dict[Observed, list[np.ndarray]] = {}

    def measure(observed: Observed, place: Place, array: np.ndarray) -> tuple[()] | None:
        singular.setdefault(observed, []).append(np.linalg.svd(array.astype(np.float64), compute_uv=False))
        return () if observed is Observed.VALUES else None

    layer, head = text.columns("values", wanted, measure)
    # if keys before RoPE are missing in one layer, leave them out for all layers
    whole = [observed for observed in wanted if len(singular.get(observed, ())) == len(head)]
    return Values(layer, head, {observed: singular[observed] for observed in whole})


def share(text: Reading) -> Share:
    """Measure the share of important keys. Raises `observe`'s errors."""
    columns = text.columns(
        "share", (Observed.ATTENTION,), lambda observed, place, array: (share_of(important(array)),)
    )
    return Share(*columns)


def drawn_layers(model: Model, kind: str) -> list[int]:
    """Layers of a kind of map: layers that attend to all tokens and have the data that it needs.

    Raises ModelError for a model without such layers.
    """
    layers, name = model.layers, model.path.name
    if layers.has_index:
        raise ModelError(f"{name} chooses by an index which tokens a query sees: there is no whole map of it")
    if kind in ("queries", "values") and not layers.has_values:
        raise ModelError(f"{name} keeps keys and values as one (MLA): there is no map of its {kind}")
    numbers = [each.number for each in layers.of(Kind.ROWS) if kind != "values" or each.is_owner]
    if not numbers:
        raise ModelError(f"{name} has no layer that attends to all tokens: there is no map of it")
    return numbers


def important(attention: np.ndarray) -> np.ndarray:
    """b1[n, n], True if a key is important to a query (CORM, definition 3.1). attention: f32[n, n].

    A query that has seen t tokens, itself included, finds a key important if its attention is at least 1 / t.
    """
    seen = np.arange(1, len(attention) + 1, dtype=np.float32)
    mask: np.ndarray = attention >= (1 / seen)[:, None]
    return mask


def share_of(important: np.ndarray) -> float:
    """Share of important keys b1[n, n] among the keys that a query has seen, mean over the queries."""
    return float((important.sum(axis=1) / np.arange(1, len(important) + 1)).mean())


def cosines(queries: np.ndarray) -> np.ndarray:
    """f32[n, n], cosine similarities of queries f32[n, dim]; 0 if one of the two queries is zero."""
    length = np.linalg.norm(queries, axis=1, keepdims=True)
    unit = queries / np.maximum(length, np.finfo(np.float32).tiny)
    cosine: np.ndarray = unit @ unit.T
    return cosine


def most_similar(cosine: np.ndarray) -> np.ndarray:
    """Return i64[n - 1], the most similar earlier query of each query except the first.

    cosine: f32[n, n], similarities of the queries. Among equally similar queries the newest is returned.
    """
    n = len(cosine)
    earlier = np.where(np.tri(n, k=-1, dtype=np.bool_), cosine, -np.inf)
    nearest: np.ndarray = n - 1 - earlier[1:, ::-1].argmax(axis=1)
    return nearest


def overlap(important: np.ndarray, earlier: np.ndarray) -> float:
    """Overlap of the keys that are important to a query and to an earlier query. See `Attention`.

    important: b1[n, n]. earlier: i64[n - 1], an earlier query for each query except the first. The result is
    0 if no key is important to any query.
    """
    mine = important[1:] & (np.arange(len(important)) <= earlier[:, None])
    # no mask is needed, because an earlier query attends only to keys that it has seen
    other = important[earlier]
    n_either = int((mine | other).sum())
    return int((mine & other).sum()) / n_either if n_either else 0.0


def effective_rank(singular: np.ndarray) -> int:
    """Number of largest singular values that have 90 % of the sum of squares; 0 if all of them are 0.

    singular: in descending order.
    """
    carried = np.cumsum(singular**2)
    return int(np.searchsorted(carried, CARRIED * carried[-1])) + 1 if carried[-1] > 0 else 0
