"""Anomaly detector: an isolation forest (F. T. Liu, K. M. Ting, Z.-H. Zhou, 2008). scikit-learn trains it.

Its trees are stored as arrays, so that prediction needs neither that library nor any of its objects.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from relight.errors import ConfigError, CorruptCheckpoint, extra_hint
from relight.prediction.detect import KIND_OF, Risk
from relight.prediction.features import FeatureWindow, Scale, columns
from relight.prediction.sealed_file import Arrays
from relight.prediction.signals import SIGNALS, WORDS

Array = np.ndarray[Any, Any]
INSTALL = extra_hint("predict")
_USED = columns("last", "mean30", "slope30", "spread300", "slope300")
_TREES, _OF_EACH = 100, 512


class Forest:
    """A trained forest. It has no state of a run."""

    name = "forest"

    def __init__(self, scale: Scale, arrays: Arrays) -> None:
        """``arrays``: of each tree's nodes the feature, the threshold, the left child and the depth.

        The right child is the node after the left one.
        """
        try:
            self._feature, self._left = arrays["feature"].astype(np.intp), arrays["left"].astype(np.intp)
            self._threshold, self._depth = arrays["threshold"], arrays["depth"]
            self.scale, self._usual = scale, float(arrays["usual"][0])
            shape = self._feature.shape
            fits = (
                len(shape) == 2
                and shape[1] > 0
                and all(array.shape == shape for array in (self._left, self._threshold, self._depth))
            )
            inside = ((self._left >= 0) & (self._left < shape[1] - 1) | (self._left == -1)).all()
            if (
                not fits
                or not inside
                or not ((self._feature >= 0) & (self._feature < len(_USED))).all()
                or not self._usual > 0
            ):
                raise ValueError
        except (KeyError, ValueError, IndexError):
            raise CorruptCheckpoint("a forest with invalid trees") from None
        self.arrays = arrays
        self._trees = np.arange(shape[0])
        self._levels = int(self._depth.max()) + 1

    def follow(self, features: Array) -> Array:
        """See ``Detector``."""
        rows = self.scale(features)[:, _USED]
        return (
            np.concatenate([self._scores(rows[row : row + 512]) for row in range(0, len(rows), 512)])
            if len(rows)
            else np.empty(0)
        )

    def update(self, window: FeatureWindow) -> Risk:
        """See ``Detector``.

        The reason names the signal that is furthest from the history, because the trees give no reason.
        """
        scaled = self.scale(window.values)
        far = np.abs(scaled[columns("mean30")])
        name = SIGNALS[int(np.argmax(far))]
        why = f"unlike the healthy history; furthest is {WORDS[name]}, by {float(far.max()):.1f} standard deviations"
        return Risk(float(self._scores(scaled[_USED][None])[0]), why, KIND_OF[name])

    def fresh(self) -> Forest:
        """See ``Detector``."""
        return self

    def _scores(self, rows: Array) -> Array:
        """Return 2 ** −(mean depth / usual depth) for each row."""
        trees, which = self._trees[None, :], np.arange(len(rows))[:, None]
        nodes = np.zeros((len(rows), len(self._trees)), np.intp)
        for _ in range(self._levels):
            left = self._left[trees, nodes]
            right = rows[which, self._feature[trees, nodes]] > self._threshold[trees, nodes]
            nodes = np.where(left >= 0, left + right, nodes)
        return np.asarray(2.0 ** (-self._depth[trees, nodes].mean(axis=1) / self._usual))


def grow(rows: Array, scale: Scale, seed: int) -> Forest:
    """Train a forest on rows of features of healthy runs. Raise ``ConfigError`` if scikit-learn is not installed."""
    try:
        from sklearn.ensemble import IsolationForest
    except ModuleNotFoundError as error:
        message = f"the forest is trained with scikit-learn, and {error.name} is not installed"
        raise ConfigError(message, hint=f"{INSTALL}; or --detectors without forest") from None
    grown = IsolationForest(n_estimators=_TREES, max_samples=min(_OF_EACH, len(rows)), random_state=seed % (1 << 32))
    grown.fit(scale(rows)[:, _USED])
    trees = [_flat(estimator.tree_) for estimator in grown.estimators_]
    longest = max(len(tree[0]) for tree in trees)
    stacked = [
        np.stack([np.pad(tree[part], (0, longest - len(tree[part])), constant_values=fill) for tree in trees])
        for part, fill in ((0, 0), (1, 0.0), (2, -1), (3, 0.0))
    ]
    return Forest(
        scale,
        {
            "feature": stacked[0].astype("<i4"),
            "threshold": stacked[1].astype("<f8"),
            "left": stacked[2].astype("<i4"),
            "depth": stacked[3].astype("<f4"),
            "usual": np.array([_usual_depth(float(grown.max_samples_))], "<f8"),
        },
    )


def _flat(tree: Any) -> tuple[Array, Array, Array, Array]:
    """Return a tree in breadth-first order, so that a node's children are adjacent.

    Leaf depths include the samples that were not split.
    """
    order, left, depth = [0], [-1], [0.0]
    for place, node in enumerate(order):  # ``order`` grows meanwhile
        if tree.children_left[node] < 0:
            depth[place] += _usual_depth(float(tree.n_node_samples[node]))
            continue
        left[place] = len(order)
        for child in (tree.children_left[node], tree.children_right[node]):
            order.append(int(child))
            left.append(-1)
            depth.append(depth[place] + 1)
    return np.maximum(tree.feature[order], 0), tree.threshold[order], np.array(left), np.array(depth)


def _usual_depth(count: float) -> float:
    """Return the mean depth of an unsuccessful search in a binary tree of ``count`` samples: formula 1 of the paper."""
    if count <= 1:
        return 0.0
    return 1.0 if count == 2 else 2 * (np.log(count - 1) + np.euler_gamma) - 2 * (count - 1) / count
