"""Types of the arrays in which the cache returns many rows at once."""

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
"""Ids of completions, `[n]`."""

Mask = NDArray[np.bool_]
"""One boolean for each completion, `[n]`."""
