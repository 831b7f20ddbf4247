"""Converter of scikit-learn's handwritten digits into an array file: 1,437 images for training, 360 for validation.

    python jobs/digits.py runs/digits.h5

The images are 8 x 8, float32 from 0 to 1; the targets are classes from 0 to 9. Pixel values of 0 to 16 are divided by
16. After a shuffle with a fixed seed, every fifth image is for validation. Your own images can be converted the same
way.
"""

import sys
from pathlib import Path

import numpy as np

from hpctrain.data.dataset import write_arrays
from hpctrain.errors import HpctrainError

BRIGHTEST = 16
VALIDATION = 5  # one of this many images is for validation


def splits(images, classes):
    """Return two pairs of images and classes: for training, and for validation."""
    order = np.random.default_rng(0).permutation(len(images))  # the data set is ordered by writer
    images = (images[order] / BRIGHTEST).astype(np.float32)
    classes = classes[order].astype(np.int64)
    held_out = np.arange(len(images)) % VALIDATION == 0
    return (images[~held_out], classes[~held_out]), (images[held_out], classes[held_out])


def main(path):
    """Write the file and print its contents; return the exit code, or an error message."""
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
