"""Write scikit-learn's images of handwritten digits as an array file, 1,437 to train on and 360 to validate by.

    python jobs/digits.py runs/digits.h5

The images are 8 x 8, float32 from 0 to 1, the targets classes from 0 to 9. What is 0 to 16 there is divided by 16, and
every fifth image, after a shuffle that is always the same, is for validation. Your own images go the same way.
"""

import sys
from pathlib import Path

import numpy as np

from hpctrain.data.arrays import write_arrays
from hpctrain.errors import HpctrainError

BRIGHTEST = 16
VALIDATION = 5  # one image of so many


def splits(images, classes):
    """Return two pairs of images and classes: to train on, and to validate by."""
    order = np.random.default_rng(0).permutation(len(images))  # they come writer by writer
    images = (images[order] / BRIGHTEST).astype(np.float32)
    classes = classes[order].astype(np.int64)
    held_out = np.arange(len(images)) % VALIDATION == 0
    return (images[~held_out], classes[~held_out]), (images[held_out], classes[held_out])


def main(path):
    """Write the file, and say what is in it."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        return "the digits are scikit-learn's: pip install 'hpctrain[digits]', or call make digits, which does"
    found = load_digits()
    train, validation = splits(found.images, found.target)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        write_arrays(path, train=train, validation=validation)
    except (HpctrainError, OSError) as error:
        return str(error)
    print(f"wrote {len(train[0]):,} images to train on and {len(validation[0]):,} to validate by into {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])) if len(sys.argv) == 2 else "usage: python jobs/digits.py FILE")
