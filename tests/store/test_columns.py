import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tb_memplugin.proto.recording_pb2 import CONSTANT, DELTA, DICTIONARY, OFFSET
from tb_memplugin.store.columns import SMALL_ROWS, decode, encode

NAMES = ("events.time_ns", "events.address", "events.bytes", "events.operator", "start.module")
COLUMNS = st.sampled_from(["<i8", "<u8", "<i4", "|u1"]).flatmap(
    lambda dtype: arrays.arrays(np.dtype(dtype), st.sampled_from([1, 2, 3, 100, SMALL_ROWS, SMALL_ROWS + 1]))
)


@given(st.sampled_from(NAMES), COLUMNS)
def test_any_block_comes_back_as_it_was(name, block):
    chunk, raw = encode(name, block)
    back = decode(chunk, raw, block.dtype)
    assert back.dtype == block.dtype
    assert np.array_equal(back, block)


@pytest.mark.parametrize("values", [[5], [0, 2**63 - 1], [-(2**63), 2**63 - 1], [-1, -1, -1]])
def test_extreme_numbers_come_back(values):
    block = np.array(values, np.int64)
    for name in NAMES:
        assert decode(*encode(name, block), block.dtype).tolist() == values


def test_a_constant_column_takes_no_bytes():
    chunk, raw = encode("events.device", np.full(60_000, 3, np.uint8))
    assert (chunk.encoding, raw) == (CONSTANT, b"")


def test_small_numbers_far_from_zero_take_one_byte_each():
    chunk, raw = encode("events.operator", np.array([1_000_000, 1_000_001, 1_000_255] * 300, np.int32))
    assert (chunk.encoding, chunk.width, len(raw)) == (OFFSET, 1, 900)


def test_times_are_kept_as_differences():
    chunk, raw = encode("events.time_ns", 10**18 + np.cumsum([100, 355] * 300))
    assert (chunk.encoding, chunk.width, len(raw)) == (DELTA, 1, 599)


def test_addresses_are_kept_as_places_in_a_list():
    chunk, raw = encode("events.address", np.array([0x7F00, 0xFFFF00000000] * 500, np.uint64))
    assert (chunk.encoding, chunk.values, len(raw)) == (DICTIONARY, 2, 8 + 1000)


def test_a_small_block_is_stored_as_it_is():
    chunk, raw = encode("events.bytes", np.array([7, -1, 7], np.int64))
    assert (chunk.encoding, chunk.width, len(raw)) == (OFFSET, 8, 24)


def test_bytes_that_do_not_fit_the_description_are_refused():
    chunk, raw = encode("events.bytes", np.arange(10, dtype=np.int64))
    with pytest.raises(ValueError, match="holds"):
        decode(chunk, raw[:-1], np.dtype(np.int64))


def test_a_place_behind_the_list_is_refused():
    chunk, raw = encode("events.bytes", np.array([7, 9, 7] * 300, np.int64))
    with pytest.raises(ValueError, match="behind the end"):
        decode(chunk, raw[:-1] + b"\x05", np.dtype(np.int64))


@pytest.mark.parametrize(
    ("field", "value"), [("rows", 0), ("rows", 70_000), ("width", 3), ("encoding", 9), ("values", 99)]
)
def test_a_description_that_cannot_be_is_refused(field, value):
    chunk, raw = encode("events.bytes", np.array([7, 9, 7], np.int64))
    setattr(chunk, field, value)
    with pytest.raises(ValueError, match=r"claims|unknown|holds"):
        decode(chunk, raw, np.dtype(np.int64))
