"""Skip connections under their earlier module name: programs may import them from here."""

from hpctrain.parallel.skip import Join, Keep

__all__ = ["Join", "Keep"]
