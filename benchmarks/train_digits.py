"""Train the zoo's `digits`: a perceptron on the handwritten digits that scikit-learn ships, and write its weights.

1797 pictures of 8 x 8 pixels; a fifth of them is held out, and ten of these become the samples of the zoo. It takes
half a minute. Sums differ between machines in the last digits, so the weights are a file of the zoo.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits  # pyright: ignore[reportMissingImports]
from sklearn.neural_network import MLPClassifier  # pyright: ignore[reportMissingImports]

WEIGHTS = Path(__file__).parents[1] / "zoo" / "digits.npz"
HIDDEN = 128
MOST = 16  # of a pixel
HELD_OUT = 360
LEAST_ACCURACY = 0.97


def main() -> int:
    """Train, print the accuracy on held-out pictures, and write the weights; return 1 if they are too bad."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=WEIGHTS, help="the file of weights and samples")
    options = parser.parse_args()
    digits = load_digits()
    pictures, values = (digits.images / MOST).astype(np.float32), digits.target
    order = np.random.default_rng(0).permutation(len(pictures))
    held_out, used = order[:HELD_OUT], order[HELD_OUT:]
    network = MLPClassifier((HIDDEN,), alpha=1e-2, max_iter=300, random_state=1)
    network.fit(pictures[used].reshape(-1, 64), values[used])
    weights = {
        f"{kind}{layer}": numbers.astype(np.float16)
        for kind, all_numbers in (("weights", network.coefs_), ("bias", network.intercepts_))
        for layer, numbers in enumerate(all_numbers)
    }
    hidden = np.maximum(pictures[held_out].reshape(-1, 64) @ weights["weights0"] + weights["bias0"], 0)
    guessed = (hidden @ weights["weights1"] + weights["bias1"]).argmax(1)
    accuracy = float((guessed == values[held_out]).mean())
    print(f"{accuracy:.1%} of {HELD_OUT} held-out pictures are recognised")
    firsts = [held_out[np.flatnonzero(values[held_out] == digit)[0]] for digit in range(10)]
    samples = digits.images[firsts].astype(np.uint8)
    np.savez_compressed(options.output, samples=samples, **weights)
    print(f"{options.output}: {options.output.stat().st_size} bytes")
    return 0 if accuracy >= LEAST_ACCURACY else 1


if __name__ == "__main__":
    sys.exit(main())
