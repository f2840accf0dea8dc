"""The Fréchet distance between two sets of pictures, each taken as a normal distribution of features.

This is the formula of the FID (Heusel et al. 2017), but with the features of our own small classifier instead of an
Inception network: it orders generators trained here, and its values compare with nobody else's.
"""

import numpy as np
import scipy.linalg
from torch import Tensor


class Moments:
    """Mean and covariance of rows that arrive in batches, summed in FP64."""

    def __init__(self, features: int) -> None:
        self.count = 0
        self.sum = np.zeros(features)
        self.products = np.zeros((features, features))

    def add(self, rows: Tensor) -> None:
        """Takes rows (batch, features)."""
        values = rows.detach().cpu().double().numpy()
        self.count += len(values)
        self.sum += values.sum(0)
        self.products += values.T @ values

    def mean(self) -> np.ndarray:
        return self.sum / self.count

    def covariance(self) -> np.ndarray:
        """Unbiased, so it takes at least two rows."""
        mean = self.mean()
        return (self.products - self.count * np.outer(mean, mean)) / (self.count - 1)


def frechet_distance(one: Moments, other: Moments) -> float:
    """|m1 - m2|^2 + trace(C1 + C2 - 2 (C1 C2)^1/2); NaN if a feature is not finite.

    The trace of the root is that of (C1^1/2 C2 C1^1/2)^1/2, which is symmetric: real and stable even where a generator
    has collapsed and its covariance is singular.
    """
    c1, c2 = one.covariance(), other.covariance()
    if not (np.isfinite(c1).all() and np.isfinite(c2).all()):
        return float("nan")
    values, vectors = scipy.linalg.eigh(c1)
    root = (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T
    product = scipy.linalg.eigvalsh(root @ c2 @ root)
    distance = np.sum((one.mean() - other.mean()) ** 2) + np.trace(c1) + np.trace(c2)
    return float(distance - 2 * np.sqrt(np.maximum(product, 0)).sum())
