"""Revisions whose weights cannot be what their name says, found from digests and fingerprints of one series.

A *fingerprint* is a small vector for each tensor, of which distances tell how far two revisions' weights are apart:
``mean``, ``norm``, then projections onto fixed random directions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

# The ratio of `find_strangers` is 1/2 on a straight path, 1/sqrt(2) on a random walk, 1 where values scatter about one
# place: above that no point lies between its neighbours. Estimated from m projections it scatters by 1/sqrt(m).
LARGEST_RATIO, DEVIATIONS = 1.3, 4


@dataclass(frozen=True)
class Weights:
    """What is kept of a revision's weights: a digest, and a fingerprint [2 + projections] for each matrix."""

    revision: str
    digest: str
    fingerprints: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Flag:
    """Something wrong with a revision.

    Its kind is ``identical``, ``final``, ``shared``, ``neighbours`` or ``numbers``, all of which leave the revision out of
    slopes and correlations, or ``reading`` or ``order``, which do not.
    """

    kind: str
    text: str

    @property
    def excludes(self) -> bool:
        return self.kind not in ("reading", "order")


def find_copies(series: Sequence[Weights]) -> dict[str, Flag]:
    """Revisions with the bytes of another: of the last (the final model), or of an earlier one.

    Args:
      series: in order of steps, the final model last.

    Returns:
      A flag for every copy; the final model itself, and the first of equal ones, have none.
    """
    flags: dict[str, Flag] = {}
    first: dict[str, str] = {}
    for weights in series:
        if weights is not series[-1] and weights.digest == series[-1].digest:
            flags[weights.revision] = Flag("final", f"holds the weights of the last revision, {series[-1].revision}")
        elif weights.digest in first and weights is not series[-1]:
            flags[weights.revision] = Flag("identical", f"holds the weights of {first[weights.digest]}")
        first.setdefault(weights.digest, weights.revision)
    return flags


def _same(a: np.ndarray, b: np.ndarray | None) -> bool:
    """Fingerprints of one matrix, up to the rounding of another machine."""
    return b is not None and a.shape == b.shape and np.allclose(a, b, rtol=1e-6, atol=1e-6 * a[1])


def find_shared(series: Sequence[Weights]) -> dict[str, Flag]:
    """Revisions that share some, not all, of their matrices with the last one, as where one shard of it is served.

    A matrix that no revision changes (a frozen one) says nothing.
    """
    if len(series) < 3:
        return {}
    last, flags = series[-1], {}
    moving = [
        name
        for name, values in last.fingerprints.items()
        if any(not _same(values, other.fingerprints.get(name)) for other in series[:-1])
    ]
    for weights in series[:-1]:
        equal = [name for name in moving if _same(last.fingerprints[name], weights.fingerprints.get(name))]
        if equal:
            text = f"shares {len(equal)} of {len(moving)} matrices with the last revision, {last.revision}"
            flags[weights.revision] = Flag("shared", text)
    return flags


def _layer(name: str) -> str:
    """The first number in a tensor's name; tensors without one stand together."""
    found = re.search(r"\d+", name)
    return found.group() if found else ""


def _ratio(before: Weights, weights: Weights, after: Weights, names: Sequence[str]) -> float:
    """The smaller distance to a neighbour over the distance of the neighbours, each matrix relative to its norm."""
    squares = np.zeros(3)
    for name in names:
        a, b, c = (np.asarray(w.fingerprints[name], np.float64) for w in (before, weights, after))
        scale = max(a[1], c[1], np.finfo(np.float64).tiny)
        squares += [np.sum(((x - y)[2:] / scale) ** 2) for x, y in ((a, b), (b, c), (a, c))]
    nearest = np.sqrt(min(squares[:2]))
    return float(nearest / np.sqrt(squares[2])) if squares[2] > 0 else np.inf if nearest > 0 else 0.0


def find_strangers(series: Sequence[Weights]) -> dict[str, Flag]:
    """Revisions further from both neighbours than these are from one another, in all weights or in one layer.

    The first and the last revision have one neighbour and cannot be judged. Give the series without its copies.
    """
    flags: dict[str, Flag] = {}
    for before, weights, after in zip(series, series[1:], series[2:], strict=False):
        names = sorted(before.fingerprints.keys() & weights.fingerprints.keys() & after.fingerprints.keys())
        groups = {"": names}
        for layer in sorted({_layer(name) for name in names}, key=lambda text: int(text or -1)):
            where = f" of layer {layer}" if layer else " outside the layers"
            groups[where] = [name for name in names if _layer(name) == layer]
        for where, own in groups.items():
            projections = sum(len(weights.fingerprints[name]) - 2 for name in own)
            ratio = _ratio(before, weights, after, own)
            if projections and ratio > LARGEST_RATIO * np.exp(DEVIATIONS / np.sqrt(projections)):
                far = "many" if np.isinf(ratio) else f"{ratio:.1f}"
                flags[weights.revision] = Flag(
                    "neighbours",
                    f"weights{where} do not follow from their neighbours: {far} times as far from {before.revision} and "
                    f"{after.revision} as these from one another",
                )
                break
    return flags


def find_suspects(series: Sequence[Weights], unplaced: Sequence[Weights] = ()) -> dict[str, list[Flag]]:
    """All of these for one series; a revision without flags is not there.

    Args:
      series: in order of steps.
      unplaced: revisions without a step, of which only copies can be told.
    """
    copies = find_copies(series)
    kept = [weights for weights in series if weights.revision not in copies]
    shared = find_shared(kept)
    strangers = find_strangers([weights for weights in kept if weights.revision not in shared])
    originals = {weights.digest: weights.revision for weights in reversed(kept)}
    for weights in unplaced:
        if weights.digest in originals:
            copies[weights.revision] = Flag("identical", f"holds the weights of {originals[weights.digest]}")
        originals.setdefault(weights.digest, weights.revision)
    found: dict[str, list[Flag]] = {}
    for flags in (copies, shared, strangers):
        for revision, flag in flags.items():
            found.setdefault(revision, []).append(flag)
    return found
