"""Update rules of elastic averaging between workers and centre.

Zhang, Choromanska and LeCun, "Deep learning with Elastic Averaging SGD", NIPS 2015, equations 5 and
6. With worker i's parameters x_i, the centre x, and the moving rate alpha = learning rate x rho:

    x_i <- x_i - learning rate x gradient_i - alpha (x_i - x)
    x   <- x + alpha (sum over i of (x_i - x))

All values on the right are those before the update. Any optimizer makes the first part of a
worker's update; this module makes the rest.
"""

from __future__ import annotations

from torch import Tensor

BETA = 0.9  # fraction of the distance by which all workers together move the centre, as the authors recommend


def moving_rate(rho: float, learning_rate: float, workers: int) -> float:
    """Return alpha; without a rho, the alpha by which all workers together move the centre by ``BETA``."""
    return learning_rate * rho if rho else BETA / workers


def pull_worker(worker: Tensor, centre: Tensor, alpha: float) -> None:
    """Move a worker towards the centre, in place."""
    worker.lerp_(centre, alpha)


def pull_centre(centre: Tensor, mean: Tensor, workers: int, alpha: float) -> None:
    """Move the centre towards the ``mean`` of ``workers`` workers, in place."""
    centre.lerp_(mean, alpha * workers)  # alpha (sum over i of (x_i - x)) equals alpha workers (mean - x)
