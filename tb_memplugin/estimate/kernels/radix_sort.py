"""The temporary storage of CUB's radix sort, with which PyTorch sorts long rows on a GPU.

Sources: cub/device/dispatch/dispatch_radix_sort.cuh (InvokeOnesweep, InvokePasses, InvokeSingleTile) and
tuning/tuning_radix_sort.cuh of CUDA 13.0. PyTorch counts elements in 64 bits there.
"""

from __future__ import annotations

from tb_memplugin.estimate.gpu_spec import GpuSpec

_DIGIT_BITS, _DIGITS = 8, 256
"""One pass of the onesweep algorithm sorts by so many bits; it counts so many digits."""

_OFFSET, _COUNTER = 8, 4
"""Bytes of an offset into all elements, and of a counter within one portion of them."""

_PORTION = (1 << 28) - 1
"""The most elements of one portion."""

_TINY = {1: 5, 2: 7}
"""By bytes of a key: the bits of a pass of the older algorithm, for short keys before Hopper."""

_SMALL_ON_HOPPER = {(1, 4): (512, 14), (1, 8): (384, 18), (2, 4): (512, 12), (2, 8): (512, 23)}
"""By bytes of key and value: threads, and 4-byte items of each (sm90_small_key_tuning, 64-bit offsets)."""


def sort_bytes(count: int, key: int, value: int, gpu: GpuSpec, bits: int | None = None) -> int:
    """Return the bytes of temporary storage to sort `count` pairs.

    Args:
        count: how many there are; at least 1.
        key: bytes of a key.
        value: bytes of a value, 0 if keys alone are sorted.
        gpu: the GPU that sorts.
        bits: the bits of a key that are sorted by; None for all.
    """
    if count <= 256 * _items(19, key, value):  # one block sorts them
        return 1
    keys, values = count * key, count * value
    if key < 4 and gpu.compute_capability < (9, 0):
        # An occupancy as if threads were all that limits it: registers may allow fewer blocks.
        blocks = gpu.processors * (gpu.threads // (128 if key == 1 else 256)) * 5
        return _together(((blocks << _TINY[key]) + 512 * 11) * _OFFSET, keys, values)
    tile = _tile(key, value, gpu)
    portion = _PORTION // tile * tile
    passes, portions = -(-(bits or 8 * key) // _DIGIT_BITS), -(-count // portion)
    lookback = -(-min(count, portion) // tile) * _DIGITS * _COUNTER
    counters = portions * passes
    several = passes > 1
    return _together(
        counters * _DIGITS * _OFFSET, lookback, keys * several, values * several, counters * _COUNTER
    )


def segmented_sort_bytes(count: int, key: int, value: int) -> int:
    """Return the bytes of temporary storage to sort pairs in many short segments."""
    return _together(count * key, count * value)


def _together(*sizes: int) -> int:
    """Return the bytes of several buffers in one, each at a multiple of 256 (AliasTemporaries)."""
    return sum(-(-size // 256) * 256 for size in sizes) + 255


def _tile(key: int, value: int, gpu: GpuSpec) -> int:
    """Return how many elements one block sorts."""
    width, nominal = 384, 21
    if gpu.compute_capability < (8, 0):
        width, nominal = 256, 46 if key == value == 4 else 23
    elif gpu.compute_capability < (9, 0):
        nominal = 17 if key == 4 and value else 21
    elif key < 4:
        width, nominal = _SMALL_ON_HOPPER.get((key, value), (384, 23))
    elif key == 4:
        nominal = (17 if value < 8 else 29) if value else 19
    else:
        nominal = 30 if value < 8 else 24
    return width * _items(nominal, key, value)


def _items(nominal: int, key: int, value: int) -> int:
    """Return how many elements a thread sorts where it would sort `nominal` of 4 bytes (RegBoundScaling)."""
    return max(1, nominal * 4 // max(4, key, value))
