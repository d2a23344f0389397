import os
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

from tb_memplugin.store import records as store_records
from tb_memplugin.store.records import checked, crc32c, framed, masked, record, records


def reading(content):
    return lambda offset, size: content[offset : offset + size]


def all_records(content):
    return [data for data, _, _ in records(reading(content), len(content))]


def test_the_checksum_of_the_standard_example():
    assert crc32c(b"123456789") == 0xE3069283  # RFC 3720, appendix B.4


@given(st.binary(max_size=2_000))
def test_checksums_are_those_of_tensorboard(data):
    assert masked(crc32c(data)) == masked_crc32c(data)


@pytest.mark.parametrize("size", [55, 56, 511, 512, 513, 1_025, 4_095, 4_096, 4_097, 100_001])
def test_checksums_around_block_edges_are_those_of_tensorboard(size):
    data = os.urandom(size)
    assert masked(crc32c(data)) == masked_crc32c(data)


def test_records_come_back_in_order():
    assert all_records(record(b"a") + record(b"") + record(b"c" * 5_000)) == [b"a", b"", b"c" * 5_000]


def test_a_record_cut_short_ends_the_file_and_spoils_nothing_before_it():
    whole, cut = record(b"first"), record(b"second")
    for size in range(len(cut)):
        content = whole + cut[:size]
        assert all_records(content) == [b"first"]
        assert framed(reading(content), len(content)) == len(whole)


@pytest.mark.parametrize("at", [0, 3, 9, 14, -1], ids=["length", "length's end", "checksum", "data", "end"])
def test_records_after_a_damaged_one_are_read(at):
    damaged = bytearray(record(b"second"))
    damaged[at] ^= 1
    content = record(b"first") + bytes(damaged) + record(b"third")
    one, two = len(record(b"first")), len(damaged)
    assert list(records(reading(content), len(content))) == [
        (b"first", 0, one),
        (b"third", one + two, len(content)),
    ]


@pytest.mark.parametrize("foreign", [b"x", b"\0" * 4_096, record(b"cut short")[:-1], os.urandom(300_000)])
def test_records_after_something_foreign_are_read(foreign, monkeypatch):
    monkeypatch.setattr(store_records, "_SEARCHED", 1_000)  # heads lie across the edges of what is searched
    content = record(b"first") + foreign + record(b"second" * 100) + foreign
    assert all_records(content) == [b"first", b"second" * 100]


def test_records_that_lie_within_each_other_do_not_take_for_ever(monkeypatch):
    head = record(b"x" * 5_000)[:12]
    monkeypatch.setattr(store_records, "MOST_WRONG", 20_000)
    read = list[int]()

    def reading_counted(offset, size):
        read.append(size)
        return content[offset : offset + size]

    content = head * 1_000 + record(b"last")
    assert list(records(reading_counted, len(content))) == []
    assert read.count(5_004) == 4


def test_an_enormous_record_ends_the_file_unread(monkeypatch):
    content = record(b"first") + record(b"x" * 100)
    monkeypatch.setattr(store_records, "MOST_RECORD", 100)
    assert all_records(content) == [b"first"]


def test_records_are_checked_from_any_record_on():
    one = len(record(b"first"))
    content = bytearray(record(b"first") * 4)
    content[3 * one + 12] ^= 1
    assert list(checked(reading(content), one, len(content))) == [
        (2 * one, b"first"),
        (3 * one, b"first"),
        (4 * one, None),
    ]
    assert list(checked(reading(content), one, 3 * one - 1)) == [(2 * one, b"first")]


@pytest.mark.parametrize("zeros", [1, 11, 12, (1 << 18) - 13, (1 << 18) - 11, 1 << 18, (1 << 19) + 5])
def test_the_record_after_zeros_is_found(zeros):
    content = record(b"first") + bytes(zeros) + record(b"second") + bytes(zeros)
    found = list(records(lambda offset, count: content[offset : offset + count], len(content)))
    second = len(record(b"first")) + zeros
    assert found == [
        (b"first", 0, len(record(b"first"))),
        (b"second", second, second + len(record(b"second"))),
    ]


def test_bytes_of_no_record_are_searched_up_to_a_number(monkeypatch):
    monkeypatch.setattr(store_records, "MOST_SEARCHED", 1 << 20)
    zeros = bytes((1 << 20) - 5_000)
    content = record(b"first") + zeros + record(b"second") + record(b"third") + zeros + record(b"fourth")
    assert all_records(content) == [b"first", b"second", b"third"]


@pytest.mark.parametrize("size", [2 << 30, 1 << 40])
def test_a_sparse_file_is_searched_quickly(size):
    begin, zeros = record(b"first"), bytes(1 << 20)

    def read(offset, count):
        return begin[offset : offset + count] if offset < len(begin) else zeros[: min(count, size - offset)]

    since = time.process_time()
    assert [data for data, _, _ in records(read, size)] == [b"first"]
    assert time.process_time() - since < 10  # computing a checksum at each offset takes 27
