import io
import struct
import zlib
from contextlib import suppress
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tb_memplugin.errors import MemPluginError, UnreadableFileError
from tb_memplugin.proto.recording_pb2 import Footer
from tb_memplugin.store import pairing, windows
from tb_memplugin.store.columns import decode
from tb_memplugin.store.envelope import HEAD, TAIL
from tb_memplugin.store.windows import read_window, write_window
from tb_memplugin.trace import (
    Annotations,
    Category,
    Cause,
    Counter,
    CounterReading,
    Device,
    DevicePart,
    Events,
    Kind,
    MemoryTrace,
    Module,
    Moment,
    Note,
    OutOfMemory,
    Phase,
    Reason,
    Segments,
    Spans,
    StartState,
    Step,
    TensorMetadata,
    WholeDevice,
)
from tb_memplugin.trace.tables import EVENT_DTYPES, start_state
from tb_memplugin.trace.tables import events as event_table
from tests.traces import same, trace


def written(recorded):
    stream = io.BytesIO()
    assert write_window(stream, recorded) == len(stream.getvalue())
    return stream.getvalue()


def read(content, name="window.mem"):
    return read_window(lambda offset, size: content[offset : offset + size], len(content), name)


TEXT = st.text(st.characters(), max_size=20)
TIMES = st.integers(-(2**62) + 1, 2**62 - 1)
STEPS = st.builds(Step, st.integers(-9, 9), TIMES, TIMES)
CAUSES = st.lists(st.tuples(st.sampled_from(Cause), st.integers(-(2**62), 2**62)), max_size=2).map(tuple)
READINGS = st.builds(
    CounterReading,
    st.integers(0, 1),
    st.sampled_from(Moment),
    st.sampled_from(Counter),
    st.none() | st.integers(0, 2**62),
    st.booleans(),
    CAUSES,
)
DIMENSIONS = st.lists(st.tuples(st.integers(0, 2**63), st.integers(-(2**62), 2**62)), max_size=3)
TENSORS = st.tuples(TEXT, DIMENSIONS).map(
    lambda drawn: TensorMetadata(drawn[0], *map(tuple, zip(*drawn[1], strict=True) if drawn[1] else ((), ())))
)
WHOLE = st.builds(
    WholeDevice,
    st.integers(0, 1),
    st.sampled_from(Moment),
    st.sampled_from(Moment),
    st.lists(st.tuples(st.sampled_from(DevicePart), st.integers(-(2**62), 2**62)), max_size=4).map(tuple),
    st.booleans(),
)


@st.composite
def traces(draw):
    """Any trace that the types allow, columns of all kinds of numbers, names of all kinds of text."""
    size = st.none() | st.integers(0, 2**62)
    devices = tuple(Device(name, draw(size), "", draw(size)) for name in ("cpu", draw(TEXT)))
    operators, labels, contexts, ranges = (tuple(draw(st.lists(TEXT, max_size=4))) for _ in range(4))
    word = st.integers(0, 2**64 - 1)
    streams = tuple(draw(st.lists(word, max_size=3)))
    pools = tuple(draw(st.lists(st.tuples(word, word), max_size=3)))
    stacks = tuple(map(tuple, draw(st.lists(st.lists(TEXT, max_size=3), max_size=3))))
    tensors = tuple(draw(st.lists(TENSORS, max_size=3)))
    keys = draw(st.lists(TEXT, max_size=5))
    modules = tuple(Module(key, draw(st.integers(-1, row - 1)), draw(TEXT)) for row, key in enumerate(keys))
    steps = draw(st.lists(STEPS, min_size=1, max_size=3, unique_by=lambda step: step.start_ns))
    rows = draw(st.integers(0, 40))
    tables = {"operator": operators, "module": modules, "label": labels, "stack": stacks, "forward": stacks}
    tables |= {"stream": streams, "pool": pools, "context": contexts, "tensor": tensors}
    limits = {name: (-1, len(table) - 1) for name, table in tables.items()}
    limits |= {
        "kind": (0, len(Kind) - 1),
        "phase": (0, len(Phase) - 1),
        "category": (0, len(Category) - 1),
        "reason": (0, len(Reason) - 1),
    }
    limits |= {
        "address": (0, 2**64 - 1),
        "bytes": (0, 2**55),
        "reserved": (-1, 2**60),
        "rounded": (-1, 2**60),
    }
    limits |= dict.fromkeys(("time_ns", "start_ns", "end_ns"), (1 - 2**62, 2**62 - 1))
    limits |= {"depth": (0, 50), "event": (-1, max(rows - 1, -1))}

    def columns(kind, count, **own):
        found = {}
        for name, dtype in kind.items():
            numbers = st.integers(*{**limits, **own}.get(name, (0, 1)))
            found[name] = draw(arrays.arrays(np.dtype(dtype), count, elements=numbers))
        return {name: np.sort(one) if name in ("time_ns", "start_ns") else one for name, one in found.items()}

    def table(kind, most, **own):
        dtypes = {name: getattr(kind(), name).dtype for name in kind.__slots__}
        return kind(**columns(dtypes, draw(st.integers(0, most)), **own))

    return MemoryTrace(
        source=draw(TEXT),
        events=Events(**columns(EVENT_DTYPES, rows)),
        start=table(StartState, 10),
        devices=devices,
        steps=tuple(sorted(steps, key=lambda step: step.start_ns)),
        operators=operators,
        modules=modules,
        labels=labels,
        stacks=stacks,
        calls=table(Spans, 10 if modules else 0, name=(0, max(len(modules) - 1, 0))),
        segments=table(Segments, 5),
        annotations=table(Annotations, 5 if ranges else 0, name=(0, max(len(ranges) - 1, 0))),
        annotation_names=ranges,
        tensors=tensors,
        streams=streams,
        pools=pools,
        contexts=contexts,
        ooms=tuple(OutOfMemory(row, draw(st.integers(0, 2**62)), draw(size)) for row in range(min(rows, 2))),
        counters=tuple(draw(st.lists(READINGS, max_size=4))),
        whole_devices=tuple(draw(st.lists(WHOLE, max_size=3))),
        notes=tuple(map(Note, draw(st.lists(TEXT, max_size=3)))),
        properties=draw(st.dictionaries(TEXT, TEXT, max_size=3)),
    )


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(traces())
def test_any_trace_comes_back_equal_in_every_column(recorded):
    assert same(read(written(recorded)), recorded)


def test_events_that_are_as_far_apart_as_a_number_can_say_are_in_order() -> None:
    recorded = trace("alloc 1 a", "alloc 1 b")
    recorded = replace(recorded, events=replace(recorded.events, time_ns=np.array([1 - 2**62, 2**62 - 1])))
    assert same(read(written(recorded)), recorded)


def test_a_segment_of_nothing_comes_back() -> None:
    nothing = {"device": 0, "address": 0, "bytes": 0, "stream": -1, "pool": -1, "expandable": 0}
    columns = {name: np.full(1, value, getattr(Segments(), name).dtype) for name, value in nothing.items()}
    recorded = trace("alloc 1 a", segments=Segments(**columns))
    assert same(read(written(recorded)), recorded)


def test_a_window_longer_than_a_block_comes_back():
    lines = [f"{'alloc 512' if row % 2 == 0 else 'free'} b{row // 2}" for row in range(70_000)]
    recorded = trace(*lines)
    content = written(recorded)
    assert same(read(content), recorded)
    assert len(content) / 70_000 < 2


def test_names_of_all_kinds_come_back():
    hostile = ("<script>", "../", "\0", "line\nbreak", "x" * 10_000, "\ud800 alone", "")
    recorded = trace("alloc 1 a", notes=tuple(map(Note, hostile)))
    assert read(written(recorded)).notes == hostile


def data(note: Note):
    return str(note), note.code, note.bytes, note.level, note.device


def test_what_notes_say_comes_back():
    notes = (
        Note("one", "no_times", level="warning", device="cuda:0\ud800"),
        Note("two", "contradiction", 2**70),
        Note("three"),
    )
    assert [data(note) for note in read(written(trace("alloc 1 a", notes=notes))).notes] == [
        ("one", "no_times", None, "warning", "cuda:0\ud800"),
        ("two", "contradiction", 2**63 - 1, "info", ""),
        ("three", "other", None, "info", ""),
    ]


def test_columns_read_from_a_file_cannot_be_changed():
    with pytest.raises(ValueError, match="read-only"):
        read(written(trace("alloc 1 a"))).events.bytes[0] = 5


SMALL = written(trace("start 400 w category=parameter", "alloc 100 a module=layer", "alloc 7 b", "free a"))


def test_a_file_cut_short_anywhere_is_refused_by_name():
    for size in range(len(SMALL)):
        with pytest.raises(UnreadableFileError, match=r"window\.mem"):
            read(SMALL[:size])


def test_a_flipped_bit_anywhere_is_refused_or_changes_nothing():
    recorded = read(SMALL)
    for place in range(len(SMALL)):
        damaged = bytearray(SMALL)
        damaged[place] ^= 0x10
        with suppress(UnreadableFileError):
            assert same(read(bytes(damaged)), recorded), place


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 a zip", b"x" * 10_000, bytes(1000)])
def test_a_foreign_file_is_refused(content):
    with pytest.raises(UnreadableFileError, match=r"is empty|not a tb_memplugin|zeros only"):
        read(content)


def test_a_newer_version_is_refused_with_what_to_do():
    newer = HEAD.pack(b"\x89TBMEM\r\n", 99, 0) + SMALL[HEAD.size :]
    with pytest.raises(UnreadableFileError, match="version 99") as caught:
        read(newer)
    assert "newest version of tb-memplugin" in caught.value.fix


def with_footer(content, change):
    """The same file with another index, its checksums right."""
    length = TAIL.unpack(content[-TAIL.size :])[0]
    body = content[: -TAIL.size - length]
    footer = Footer.FromString(content[-TAIL.size - length : -TAIL.size])
    changed = change(footer, body)
    body = changed if isinstance(changed, bytes) else body
    packed = footer.SerializeToString()
    return body + packed + TAIL.pack(len(packed), zlib.crc32(packed), 1, b"TBMEMEND")


def column_of(footer, name):
    return next(column for column in footer.columns if column.name == name)


def test_an_index_that_claims_endless_rows_is_refused_before_memory_is_taken():
    def change(footer, body):
        column = column_of(footer, "events.device")
        column.rows = 1 << 40
        column.chunks[0].rows = 1 << 31

    with pytest.raises(UnreadableFileError, match="claims"):
        read(with_footer(SMALL, change))


def test_a_chunk_that_unpacks_to_more_than_it_says_is_refused():
    def change(footer, body):
        bomb = zstandard.ZstdCompressor().compress(bytes(1 << 28))
        chunk = column_of(footer, "events.bytes").chunks[0]
        chunk.offset, chunk.size, chunk.checksum = len(body), len(bomb), zlib.crc32(bomb)
        return body + bomb

    with pytest.raises(UnreadableFileError, match="another size"):
        read(with_footer(SMALL, change))


def test_names_that_claim_endless_bytes_are_refused():
    def change(footer, body):
        footer.names.raw_size = (1 << 32) - 1

    with pytest.raises(UnreadableFileError, match="claim"):
        read(with_footer(SMALL, change))


def test_a_column_that_points_outside_its_table_is_refused():
    def change(footer, body):
        footer.devices.pop()

    with pytest.raises(UnreadableFileError, match="points outside"):
        read(with_footer(SMALL, change))


@pytest.mark.parametrize(
    ("table", "column", "value"),
    [("phases", "name", 9), ("phases", "phase", 9), ("calls", "name", 7), ("calls", "phase", 9)],
)
def test_a_span_of_what_is_not_there_is_refused(table, column, value):
    recorded = trace("alloc 1 a module=layer phase=forward", calls=[("layer", 0, 0, "forward")])
    spans = getattr(recorded, table)
    wrong = replace(spans, **{column: np.full_like(getattr(spans, column), value)})
    assert same(read(written(recorded)), recorded)
    with pytest.raises(UnreadableFileError, match=rf"{table}\.{column} points outside"):
        read(written(replace(recorded, **{table: wrong})))


def test_a_counter_and_a_cause_of_a_newer_version_are_read_as_others():
    def change(footer, body):
        footer.counters[0].counter = footer.counters[0].causes[0] = 99

    reading = CounterReading(0, Moment.PEAK, Counter.ALLOCATED, 107, causes=((Cause.UNSEEN, 7),))
    content = written(trace("alloc 100 a", counters=(reading,)))
    assert read(content).counters == (reading,)
    assert read(with_footer(content, change)).counters == (
        replace(reading, counter=Counter.OTHER, causes=((Cause.OTHER, 7),)),
    )


def test_modules_that_no_program_can_call_are_neither_written_nor_read(monkeypatch):
    deepest, too_deep = (
        replace(trace("alloc 1 a"), modules=tuple(Module("0", row - 1, "") for row in range(levels)))
        for levels in (2048, 2049)
    )
    assert read(written(deepest)).modules == deepest.modules
    with pytest.raises(MemPluginError, match="2,048 modules in each other"):
        written(too_deep)
    with monkeypatch.context() as patched:
        patched.setattr(windows, "is_too_deep", lambda _: False)
        content = written(too_deep)
    with pytest.raises(UnreadableFileError, match="2,048 modules are in each"):
        read(content)


@pytest.mark.parametrize(("field", "value"), [("device", 1), ("moment", 3), ("causes", [1])])
def test_a_counter_of_what_is_not_there_is_refused(field, value):
    def change(footer, body):
        setattr(footer.counters[0], field, value) if field != "causes" else footer.counters[0].causes.extend(
            value
        )

    content = written(trace("alloc 1 a", counters=(CounterReading(0, Moment.END, Counter.ALLOCATED, 1),)))
    with pytest.raises(UnreadableFileError):
        read(with_footer(content, change))


def test_a_part_of_a_newer_version_is_not_known_and_the_sum_stays():
    def change(footer, body):
        footer.whole_devices[0].parts[0] = 99

    parts = ((DevicePart.ALLOCATED, 70), (DevicePart.UNKNOWN, -5), (DevicePart.FREE, 35))
    whole = WholeDevice(0, Moment.PEAK, Moment.END, parts)
    content = written(trace("alloc 100 a", whole_devices=(whole,)))
    assert read(content).whole_devices == (whole,)
    (changed,) = read(with_footer(content, change)).whole_devices
    assert changed.parts == ((DevicePart.UNKNOWN, 70), *parts[1:])
    assert changed.total == 100


@pytest.mark.parametrize(("field", "value"), [("device", 1), ("moment", 3), ("read_at", 3), ("parts", [1])])
def test_a_whole_device_that_is_damaged_is_refused(field, value):
    def change(footer, body):
        whole = footer.whole_devices[0]
        whole.parts.extend(value) if field == "parts" else setattr(whole, field, value)

    whole = WholeDevice(0, Moment.END, Moment.END, ((DevicePart.FREE, 1),))
    content = written(trace("alloc 1 a", whole_devices=(whole,)))
    with pytest.raises(UnreadableFileError):
        read(with_footer(content, change))


def test_an_absent_column_is_refused():
    def change(footer, body):
        footer.columns.remove(column_of(footer, "calls.depth"))

    with pytest.raises(UnreadableFileError, match=r"calls\.depth is missing"):
        read(with_footer(SMALL, change))


def test_a_window_with_too_many_events_is_refused_in_words(monkeypatch):
    monkeypatch.setattr(windows, "MOST_ROWS", 2)
    with pytest.raises(Exception, match="Profile fewer steps"):
        written(trace("alloc 1 a", "alloc 1 b", "alloc 1 c"))


def test_the_head_says_what_the_file_is():
    assert struct.unpack("<8sII", SMALL[:16]) == (b"\x89TBMEM\r\n", 1, 0)


def test_a_small_file_that_claims_many_rows_or_names_is_refused():
    def many_rows(footer, body):
        column = column_of(footer, "events.device")
        column.rows = 100 * 65_536
        column.chunks[0].rows = 65_536
        column.chunks.extend([column.chunks[0]] * 99)

    def many_names(footer, body):
        footer.names.raw_size = 17 << 20

    for change in (many_rows, many_names):
        with pytest.raises(UnreadableFileError, match="claim"):
            read(with_footer(SMALL, change))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bytes": np.full(2, (1 << 62) - 1)}, "sum to more bytes"),
        ({"time_ns": np.array([0, 1 << 62])}, "events.time_ns points outside"),
        ({"time_ns": np.array([2, 1])}, "events are not in time order"),
    ],
)
def test_events_with_impossible_numbers_are_refused(fields, message):
    recorded = trace("alloc 1 a", "alloc 1 b")
    with pytest.raises(UnreadableFileError, match=message):
        read(written(replace(recorded, events=replace(recorded.events, **fields))))


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([Step(1, 9, 10), Step(2, 8, 9)], "steps are not in time order"),
        ([Step(1, 9, 10), Step(2, 9, 12)], "Two steps begin at the same moment"),
        ([Step(1, 0, 1 << 62)], "centuries"),
    ],
)
def test_steps_with_impossible_times_are_refused(steps, message):
    with pytest.raises(UnreadableFileError, match=message):
        read(written(replace(trace("alloc 1 a"), steps=tuple(steps))))


def simulated(seed, events=400, devices=2):
    """Random blocks on two devices, some of the start state, some never freed, some freed twice."""
    random = np.random.default_rng(seed)
    kind = random.choice([Kind.ALLOC, Kind.FREE_COMPLETED, Kind.SEGMENT_ALLOC], events, p=[0.5, 0.45, 0.05])
    return MemoryTrace(
        source="simulated",
        events=event_table(
            np.sort(random.integers(0, 10 * events, events)),
            kind=kind,
            device=random.integers(0, devices, events),
            address=random.integers(1, 40, events) * 512,
            bytes=random.integers(1, 100, events) * 512,
            category=random.integers(0, len(Category), events),
        ),
        start=start_state(
            np.full(5, 64), address=random.integers(0, 5, 5) * 512, device=np.arange(5) % devices
        ),
        devices=tuple(Device(f"cuda:{row}") for row in range(devices)),
        steps=(Step(0, 0, 10 * events),),
    )


@pytest.fixture
def small_is_large(monkeypatch):
    """Windows of any size are written and read as those of many events."""
    monkeypatch.setattr(pairing, "PAIRED_FROM", 0)
    monkeypatch.setattr(windows, "UNPACKED_LATER", 0)


def paired(trace):
    blocks = trace.allocations
    columns = [blocks.born, blocks.freed, blocks.unmatched_frees, [blocks.unseen_frees], blocks.category]
    return [list(map(int, column)) for column in columns]


@pytest.mark.parametrize("seed", range(20))
def test_a_stored_pairing_is_that_of_the_events(seed, small_is_large, monkeypatch):
    recorded = simulated(seed)
    content = written(recorded)
    monkeypatch.setattr(MemoryTrace, "allocations", None)  # what was not stored cannot be asked for
    back = read(content)
    monkeypatch.undo()
    assert "allocations" in vars(back)
    assert paired(back) == paired(recorded)
    assert same(back, recorded)


def columns_of(content):
    """The columns of a file by name."""
    (length,) = struct.unpack("<Q", content[-TAIL.size :][:8])
    footer = Footer.FromString(content[-TAIL.size - length : -TAIL.size])
    return {column.name: column for column in footer.columns}


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("blocks.life", np.full(3, 1)),
        ("blocks.life", np.array([5, 5, 1])),  # two blocks end at one event
        ("blocks.life", np.array([9, 1, 1])),  # an end behind the last event
        ("blocks.life", np.array([4, 0, 1])),
        ("blocks.life", np.array([4, 2])),  # of fewer blocks
        ("blocks.unmatched", np.array([7])),
        ("blocks.origin", np.array([1])),
        ("blocks.origin", np.zeros(0, np.int64)),
    ],
)
def test_a_pairing_that_cannot_be_of_the_events_is_computed_anew(name, values, small_is_large, monkeypatch):
    recorded = trace("start 5 w", "alloc 1 a", "alloc 2 b", "free a", "free w")
    stored = dict(pairing.pairing_columns(recorded, {}))
    assert stored["blocks.life"].tolist() == [4, 2, 3]
    monkeypatch.setattr(
        "tb_memplugin.store.windows.pairing_columns",
        lambda *args: (dict(pairing.pairing_columns(*args)) | {name: values}).items(),
    )
    assert paired(read(written(recorded))) == paired(recorded)


def test_a_damaged_pairing_is_computed_anew_and_damaged_events_are_refused(small_is_large):
    recorded = simulated(1)
    content = bytearray(written(recorded))
    columns = columns_of(bytes(content))
    for name in ("blocks.life", "events.category"):
        damaged = bytearray(content)
        damaged[columns[name].chunks[0].offset + 9] ^= 1
        if name == "blocks.life":
            assert paired(read(bytes(damaged))) == paired(recorded)
        else:
            with pytest.raises(UnreadableFileError, match="checksum"):
                read(bytes(damaged))  # although nobody has asked for the column yet


def test_a_column_of_a_large_window_is_unpacked_when_it_is_read(small_is_large, monkeypatch):
    content = written(simulated(1))
    unpacked = Mock(wraps=decode)
    monkeypatch.setattr("tb_memplugin.store.windows.decode", unpacked)
    back = read(content)
    before = unpacked.call_count
    assert back.events.category.tolist() == simulated(1).events.category.tolist()
    assert back.events.category is back.events.category
    assert unpacked.call_count == before + 1


def test_few_events_are_stored_without_their_pairing():
    assert not [name for name in columns_of(written(simulated(1))) if name.startswith("blocks.")]


def test_a_window_of_equal_rows_and_alike_stacks_is_readable_though_it_takes_little_space():
    (row,) = [trace("alloc 512 a").events]
    events = Events(**{field: np.repeat(getattr(row, field), 1_100_000) for field in Events.__slots__})
    frames = tuple(f"frame {number}" for number in range(400))
    stacks = tuple((f"caller {number}", *frames) for number in range(6_000))
    window = replace(trace(), events=events, stacks=stacks)
    content = written(window)
    assert len(content) < 1 << 18
    assert len(read(content).events) == 1_100_000
    assert read(content).stacks == stacks


def test_more_devices_than_a_machine_can_have_are_refused():
    devices = tuple(Device(f"cuda:{number}") for number in range(1025))
    window = trace("alloc 512 a")
    assert read(written(replace(window, devices=devices[:1024]))).devices == devices[:1024]
    with pytest.raises(UnreadableFileError, match="The file has 1,025 devices"):
        read(written(replace(window, devices=devices)))


def test_call_stacks_that_would_fill_the_memory_where_they_are_written_out_are_refused(monkeypatch):
    deep = replace(trace("alloc 512 a"), stacks=(("f" * 1199,) * 1_000_000,))  # 1,200 bytes each, with a sign
    with monkeypatch.context() as patched:
        patched.setattr(windows, "STACK_BYTES_OF_ANY_FILE", 1 << 40)
        small = written(deep)
    assert len(small) < 2_000
    with pytest.raises(UnreadableFileError, match="The call stacks claim 1,200,000,000 bytes"):
        read(small)
    large = written(deep)  # what a writer writes is readable: the rest is zeros
    assert len(large) > 12_000_000
    assert read(large).stacks == deep.stacks
    monkeypatch.setattr(windows, "MOST_STACK_BYTES", 1_199_999_999)
    with pytest.raises(MemPluginError, match="call stacks have 1,200,000,000 bytes"):
        written(deep)


@pytest.mark.parametrize("lengths", [[2], [2, 2], [2, 1, 1]])
def test_call_stacks_of_other_lengths_than_they_claim_are_refused(lengths, monkeypatch):
    texts = windows._names(replace(trace("alloc 1 a"), stacks=(("inner", "outer"), ("outer",))))
    texts.stack_lengths[:] = lengths
    with monkeypatch.context() as patched:
        patched.setattr(windows, "_names", lambda _: texts)
        patched.setattr(windows, "_stack_bytes", lambda _: 0)
        content = written(trace("alloc 1 a"))
    with pytest.raises(UnreadableFileError, match="other lengths than they claim"):
        read(content)
