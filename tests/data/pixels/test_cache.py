"""The cache of pixels makes what it does not have, and keeps what fits."""

import numpy as np

from unpad.data.pictures.album import PixelCache


def test_values_are_made_once_while_they_fit():
    made: list[int] = []

    def values(image: int) -> np.ndarray:
        made.append(image)
        return np.full(10, image, np.uint8)

    for most, kept in ((19, [0]), (20, [0, 1]), (0, [])):
        cache = PixelCache(most)
        made.clear()
        for _ in range(2):
            for image in range(3):
                assert (cache.get(image, lambda image=image: values(image)) == image).all()
        assert made == [0, 1, 2, *(image for image in range(3) if image not in kept)]
        assert (sorted(cache.made), cache.used) == (kept, 10 * len(kept))
