from contextlib import suppress
from dataclasses import replace
from itertools import accumulate

import pytest

from tb_memplugin.analysis.account import accounts
from tb_memplugin.analysis.divisions import DIVISIONS, breakdown
from tb_memplugin.errors import UnreadableFileError
from tb_memplugin.proto.recording_pb2 import StepBlob, StepSummary
from tb_memplugin.store.blob import pack, read_metadata, read_summary
from tb_memplugin.store.reader import peak_parts, recorded_accounts, recorded_whole
from tb_memplugin.store.summary import Window, WindowSummaries
from tb_memplugin.trace import Cause, Counter, CounterReading, DevicePart, Moment, WholeDevice
from tests.traces import MICROSECOND, trace

WINDOW = Window("rank0", "abc", 3, "window-000003.mem")

TWO_STEPS = trace(
    "start 400 w category=parameter module=layer label=layer.weight",
    "step 5",
    "alloc 100 a module=layer category=activation phase=forward operator=aten::mm",
    "alloc 20 b module=layer.inner category=temporary phase=forward operator=aten::mm",
    "free b phase=forward",
    "alloc 60 g module=layer category=gradient phase=backward operator=aten::mm",
    "free a phase=backward",
    "step 6",
    "alloc 7 c phase=optimizer operator=aten::add category=optimizer_state",
    calls=[("layer", 0, 2, "forward"), ("layer", 3, 4, "backward")],
)


def summary_of(recorded, row=0):
    summaries = WindowSummaries(recorded, WINDOW)
    return read_summary(pack(summaries.summary(row)))


def test_the_numbers_of_a_step():
    stats = summary_of(TWO_STEPS).devices[0].stats
    assert (stats.start_bytes, stats.peak_bytes, stats.end_bytes) == (400, 560, 460)
    assert (stats.window_peak_bytes, stats.allocated_bytes, stats.allocations) == (160, 180, 3)
    assert (stats.stayed_bytes, stats.stayed) == (60, 1)
    assert not stats.HasField("peak_reserved_bytes")
    assert (stats.step_start_ns, stats.step_end_ns) == (0, 5 * MICROSECOND)


def test_the_curve_of_a_step_that_ends_after_the_next_begins_has_no_events_of_that():
    two = trace("step 5", "alloc 100 a", "step 6", "alloc 50 b")
    overlapping = replace(two, steps=(replace(two.steps[0], end_ns=two.steps[1].end_ns), two.steps[1]))
    highest = [max(accumulate(summary_of(overlapping, row).devices[0].curve.high)) for row in (0, 1)]
    assert highest == [100, 150]


def test_the_peak_is_divided_in_every_way():
    summary = summary_of(TWO_STEPS)
    device = summary.devices[0]
    assert {part.key: part.bytes for part in peak_parts(summary, device, "category")} == {
        "parameter": 400,
        "activation": 100,
        "gradient": 60,
    }
    (layer,) = peak_parts(summary, device, "module")
    assert (layer.key, layer.bytes, layer.count) == ("layer", 560, 3)
    assert layer.categories == {"parameter": 400, "activation": 100, "gradient": 60}
    assert [part.key for part in peak_parts(summary, device, "operator")] == [
        "(before the window)",
        "aten::mm",
    ]
    assert {p.key: p.bytes for p in peak_parts(summary, device, "phase")} == {
        "before": 400,
        "forward": 100,
        "backward": 60,
    }


@pytest.mark.parametrize("by", DIVISIONS)
@pytest.mark.parametrize("row", [0, 1])
def test_a_stored_division_is_the_one_of_the_trace(by, row):
    summary = summary_of(TWO_STEPS, row)
    event = summary.devices[0].stats.peak_event
    stored = peak_parts(summary, summary.devices[0], by)
    assert {part.key: part for part in stored} == {
        part.key: part for part in breakdown(TWO_STEPS, 0, event, by)
    }


def test_the_largest_blocks_are_named():
    largest = summary_of(TWO_STEPS).devices[0].peak.largest
    assert list(largest.bytes) == [400, 100, 60]
    assert list(largest.names) == ["layer.weight", "", ""]
    assert list(largest.born_ns) == [-1, 500, 3_500]
    assert list(largest.freed_ns) == [-1, 4_500, -1]


def test_every_step_has_the_account_of_its_window():
    readings = (
        CounterReading(0, Moment.START, Counter.ALLOCATED, 500, causes=((Cause.UNSEEN, 90),)),
        CounterReading(0, Moment.PEAK, Counter.SEEN),
    )
    recorded = replace(TWO_STEPS, counters=readings)
    summaries = WindowSummaries(recorded, WINDOW)
    outline = summaries.outline(1, summaries.metadata(1))
    for summary in (summary_of(recorded, 0), summary_of(recorded, 1), outline):
        assert recorded_accounts(summary.devices[0]) == accounts(recorded, 0)
    assert [one.missing for one in accounts(recorded, 0)] == [100, None]
    assert recorded_accounts(summary_of(TWO_STEPS).devices[0]) == ()


def test_every_step_has_the_whole_device_of_its_window():
    parts = ((DevicePart.PROCESS, 600), (DevicePart.UNKNOWN, -1), (DevicePart.FREE, 401))
    whole = WholeDevice(0, Moment.END, Moment.END, parts, is_limit=True)
    recorded = replace(TWO_STEPS, whole_devices=(whole,))
    summaries = WindowSummaries(recorded, WINDOW)
    outline = summaries.outline(1, summaries.metadata(1))
    for summary in (summary_of(recorded, 0), summary_of(recorded, 1), outline):
        assert recorded_whole(summary.devices[0]) == (whole,)
    assert recorded_whole(summary_of(TWO_STEPS).devices[0]) == ()


def test_metadata_tells_enough_to_list_steps():
    metadata = read_metadata(WindowSummaries(TWO_STEPS, WINDOW).metadata(1).SerializeToString())
    assert (metadata.worker, metadata.window, metadata.step, metadata.side_file) == (
        "rank0",
        3,
        6,
        "window-000003.mem",
    )
    assert metadata.devices[0].stats.peak_bytes == 467


@pytest.mark.parametrize(
    "blob",
    [
        b"\xff\xff\xff",
        b"not a blob at all",
        StepBlob(version=1, raw_size=5, summary=b"x").SerializeToString(),
    ],
)
def test_a_damaged_blob_is_refused(blob):
    with pytest.raises(UnreadableFileError, match="damaged"):
        read_summary(blob, "somewhere")


def test_a_blob_that_claims_to_be_huge_is_refused():
    with pytest.raises(UnreadableFileError, match="impossible size"):
        read_summary(StepBlob(version=1, raw_size=1 << 40).SerializeToString())


def test_a_newer_blob_is_refused_with_what_to_do():
    with pytest.raises(UnreadableFileError, match="version 9") as caught:
        read_summary(StepBlob(version=9).SerializeToString(), "rank0: step 5")
    assert caught.value.where == "rank0: step 5"
    assert "newest version of tb-memplugin" in caught.value.fix


def test_a_flipped_bit_anywhere_in_a_summary_is_refused_or_changes_nothing():
    summary = summary_of(TWO_STEPS)
    blob = StepBlob.FromString(pack(summary))
    for place in range(len(blob.summary)):
        damaged = bytearray(blob.summary)
        damaged[place] ^= 0x10
        whole = StepBlob(version=1, raw_size=blob.raw_size, summary=bytes(damaged))
        with suppress(UnreadableFileError):
            assert read_summary(whole.SerializeToString()) == summary


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda device: device.modules.own.pop(), "sizes have different lengths"),
        (lambda device: device.modules.modules.__setitem__(0, 99), "row's module points outside"),
        (lambda device: device.modules.parents.__setitem__(0, 0), "comes before its parent"),
        (lambda device: device.peak.largest.categories.__setitem__(0, 77), "category points outside"),
        (lambda device: device.accounts.add(moment=3), "account's moment points outside"),
        (lambda device: device.accounts.add(causes=[1]), "account's causes have different lengths"),
        (lambda device: setattr(device.peak, "phase", 77), "peak's phase points outside"),
        (lambda device: setattr(device.curve, "columns", 1 << 31), "curve have different lengths"),
        (lambda device: setattr(device.peak, "bytes", 561), "the bytes of the peak .* are 561, and not 560"),
        (lambda device: _add(device.peak.by_category.bytes), "by category .* are 561, and not 560"),
        (lambda device: _add(device.peak.by_operator.bytes), "by operator .* are 561, and not 560"),
        (lambda device: _add(device.peak.by_phase.bytes), "by phase .* are 561, and not 560"),
        (lambda device: _add(device.modules.own), "by module .* are 561, and not 560"),
        (lambda device: _add(device.curve.high), "curve's highest bytes .* are 561, and not 560"),
        (lambda device: _add(device.curve.stacks), "curve's parts in column 0 .* are 401, and not 400"),
        (lambda device: setattr(device.peak, "event", 77), "peak is at another event or time"),
        (lambda device: setattr(device.peak, "time_ns", 77), "peak is at another event or time"),
        (lambda device: setattr(device.curve, "peak_time_ns", 77), "curve's peak is at another event"),
        (lambda device: setattr(device.curve, "peak_column", 0), "curve's peak is in another column"),
        (lambda device: setattr(device.curve, "peak_column", 1 << 31), "curve's peak is in another column"),
        (lambda device: device.curve.low.__setitem__(0, 1 << 40), "lowest bytes are above its highest"),
        (lambda device: device.peak.by_category.counts.__setitem__(0, -1), "part of the peak is negative"),
        (lambda device: _exchange(device.peak.by_category.bytes), "not those of the peak"),
        (lambda device: device.peak.by_category.keys.__setitem__(0, "activation"), "stands twice"),
        (lambda device: device.peak.largest.bytes.__setitem__(0, 561), "allocations are more than the peak"),
        (lambda device: setattr(device.stats, "peak_bytes", 561), "devices are not those of its description"),
    ],
)
def test_a_summary_that_contradicts_itself_is_refused(change, message):
    summary = summary_of(TWO_STEPS)
    change(summary.devices[0])
    with pytest.raises(UnreadableFileError, match=message):
        read_summary(pack(summary))


def _exchange(column):
    column[0], column[1] = column[1], column[0]


def _add(column):
    column[0] += 1


@pytest.mark.parametrize("field", ["peak_bytes", "start_bytes", "end_bytes", "allocations", "step_end_ns"])
def test_a_summary_that_contradicts_its_metadata_is_refused(field):
    described = WindowSummaries(TWO_STEPS, WINDOW).metadata(0)
    blob = pack(WindowSummaries(TWO_STEPS, WINDOW).summary(0))
    assert read_summary(blob, "", described).devices[0].stats.peak_bytes == 560
    stats = described.devices[0].stats
    setattr(stats, field, getattr(stats, field) + 1)
    with pytest.raises(UnreadableFileError, match="figures are not those of its description"):
        read_summary(blob, "", described)
    described.writer_id = "another"  # whose event file was copied into the folder
    with pytest.raises(UnreadableFileError, match="The folder has event files of two processes"):
        read_summary(blob, "", described)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("peak_bytes", -1, "of cpu, 460 bytes are alive at a peak of -1"),
        ("entry_bytes", 561, "of cpu, 561 bytes are alive at a peak of 560"),
        ("end_bytes", -1, "bytes are alive at a peak of 560"),
        ("stayed_bytes", 181, "more stayed than that"),
        ("stayed", -1, "more stayed than that"),
    ],
)
def test_figures_that_no_step_has_are_refused(field, value, message):
    described = WindowSummaries(TWO_STEPS, WINDOW).metadata(0)
    stats = described.devices[0].stats
    assert (stats.peak_bytes, stats.entry_bytes, stats.allocated_bytes) == (560, 400, 180)
    setattr(stats, field, value)
    with pytest.raises(UnreadableFileError, match=f"The description of a step is damaged .*{message}"):
        read_metadata(described.SerializeToString())


def test_a_step_of_more_devices_than_there_can_be_is_refused():
    described = WindowSummaries(TWO_STEPS, WINDOW).metadata(0)
    described.devices.extend([described.devices[0]] * 1024)
    with pytest.raises(UnreadableFileError, match="1,025 devices"):
        read_metadata(described.SerializeToString())


def test_a_small_blob_that_claims_to_unpack_to_much_is_refused():
    summary = StepSummary(source=" " * (5 << 20))
    with pytest.raises(UnreadableFileError, match="impossible size"):
        read_summary(pack(summary))
