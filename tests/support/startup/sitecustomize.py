"""Settings of every Python process that tests start, found by PYTHONPATH: a fifth less CPU time in short processes.

The garbage collector looks in vain through the objects that the import of PyTorch makes, then and once more at the
end. Over 101 tests that start processes, 403 s of CPU time instead of 495.
"""

import atexit
import gc

gc.set_threshold(100_000, 20, 100)
atexit.register(gc.freeze)  # registered first, called last
