"""The sizes that batches are padded to on an accelerator, so that it meets few of them. Knows nothing of batches."""

from bisect import bisect_left
from collections.abc import Sequence

from seedrl.config import LearnerConfig
from seedrl.sizes import group_size

STEP = 16  # rows; below it sizes are powers of two


def bucket_sizes(most: int) -> tuple[int, ...]:
    """Return the sizes for batches of up to `most` rows, smallest first: 1, 2, 4, 8, then multiples of 16."""
    powers = [size for size in (1, 2, 4, 8) if size < most]
    return (*powers, *range(STEP, most, STEP), most)


def sizes_of_run(config: LearnerConfig) -> tuple[int, ...]:
    """Return the sizes for the batches that these settings allow."""
    serving = config.serving
    return bucket_sizes(min(serving.max_slots, max(serving.max_rows, group_size(config))))


def padded_size(rows: int, sizes: Sequence[int]) -> int:
    """Return the smallest size that is large enough; the number of rows itself if none is."""
    at = bisect_left(sizes, rows)
    return sizes[at] if at < len(sizes) else rows
