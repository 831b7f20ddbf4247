"""Settings of every Python process that tests start, found by PYTHONPATH: importing PyTorch takes a third less time.

Its import makes a million objects that stay until the end: looking through them in vain, then and once more at the
end, is most of what the collector does in a short process.
"""

import atexit
import gc

gc.set_threshold(100_000, 20, 100)
atexit.register(gc.freeze)  # registered first, called last
