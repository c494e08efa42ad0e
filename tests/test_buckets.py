"""The sizes of batches: few, in order, and large enough."""

import pytest

from seedrl.serving.buckets import bucket_sizes, padded_size


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, (1,)),
        (3, (1, 2, 3)),
        (16, (1, 2, 4, 8, 16)),
        (40, (1, 2, 4, 8, 16, 32, 40)),
        (256, (1, 2, 4, 8, *range(16, 257, 16))),
    ],
)
def test_bucket_sizes_end_with_the_largest_batch(most: int, sizes: tuple[int, ...]) -> None:
    assert bucket_sizes(most) == sizes


def test_padded_size_is_the_smallest_that_is_large_enough() -> None:
    assert [padded_size(rows, (1, 4, 6)) for rows in (1, 2, 4, 5, 6, 7)] == [1, 4, 4, 6, 6, 7]


def test_padded_size_without_sizes_is_the_number_of_rows() -> None:
    assert padded_size(5, ()) == 5
