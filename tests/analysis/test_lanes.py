from tb_memplugin.analysis.lanes import MOST_LEVELS, lanes, what_ran
from tests.traces import EPOCH, MICROSECOND, trace

FILLER = [f"alloc 1 b{row}" for row in range(20)]


def drawn(recorded, first=0, last=20, columns=1_000):
    t0, t1 = EPOCH + MICROSECOND * first, EPOCH + MICROSECOND * last
    ran = what_ran(recorded.steps, recorded.phases, recorded.calls, recorded.modules)
    return lanes(ran, t0, t1, columns)


def named(recorded, spans):
    columns = (spans.name, spans.start_ns, spans.end_ns)
    return [
        (recorded.modules[name].key, (start - EPOCH) // MICROSECOND, (end - EPOCH) // MICROSECOND)
        for name, start, end in zip(*(column.tolist() for column in columns), strict=True)
    ]


def test_forward_calls_lie_at_their_depth():
    recorded = trace(
        *FILLER, calls=[("net", 0, 9, "forward"), ("net.a", 1, 3, "forward"), ("net.b", 4, 8, "forward")]
    )
    outer, inner = drawn(recorded).modules
    assert named(recorded, outer) == [("net", 0, 10)]
    assert named(recorded, inner) == [("net.a", 1, 4), ("net.b", 4, 9)]


def test_a_depth_without_calls_takes_no_lane():
    recorded = trace(*FILLER, calls=[("net", 0, 9, "forward"), ("net.a", 1, 3, "forward")])
    recorded.calls.depth[1] = 1_000
    outer, inner = drawn(recorded).modules
    assert (named(recorded, outer), named(recorded, inner)) == ([("net", 0, 10)], [("net.a", 1, 4)])


def test_autograd_nodes_of_one_module_become_one_span_at_each_depth():
    recorded = trace(
        *FILLER,
        calls=[
            ("net.a", 0, 1, "backward"),
            ("net.a", 3, 4, "backward"),
            ("net.b", 5, 6, "backward"),
            ("net.a", 8, 9, "backward"),
        ],
    )
    outer, inner = drawn(recorded).modules
    assert named(recorded, outer) == [("net", 0, 10)]
    assert named(recorded, inner) == [("net.a", 0, 5), ("net.b", 5, 7), ("net.a", 8, 10)]


def test_nodes_in_a_deep_chain_of_modules_count_to_the_last_level():
    chain = [".".join("m" * depth) for depth in range(1, MOST_LEVELS + 4)]
    recorded = trace(*FILLER, calls=[(chain[-1], 0, 1, "backward"), (chain[-2], 3, 4, "backward")])
    levels = drawn(recorded).modules
    assert len(levels) == MOST_LEVELS
    assert named(recorded, levels[-1]) == [(chain[MOST_LEVELS - 1], 0, 5)]


def test_containers_that_are_never_called_have_no_lane_in_either_direction():
    recorded = trace(
        *FILLER,
        calls=[
            ("net", 0, 9, "forward"),
            ("net.layers.0", 1, 3, "forward"),
            ("net.layers.0", 11, 12, "backward"),
            ("net.layers.1", 14, 15, "backward"),
        ],
    )
    recorded.calls.depth[1] = 1
    outer, inner = drawn(recorded).modules
    assert named(recorded, outer) == [("net", 0, 10), ("net", 11, 16)]
    assert named(recorded, inner) == [
        ("net.layers.0", 1, 4),
        ("net.layers.0", 11, 13),
        ("net.layers.1", 14, 16),
    ]


def test_nothing_is_merged_across_steps():
    recorded = trace(
        "step 1",
        *FILLER[:5],
        "step 2",
        *FILLER[5:],
        calls=[("net", 2, 4, "backward"), ("net", 8, 9, "backward")],
    )
    assert named(recorded, drawn(recorded).modules[0]) == [("net", 2, 5), ("net", 8, 10)]


def test_calls_narrower_than_a_column_are_counted_and_left_out():
    recorded = trace(
        *FILLER, calls=[("a", 0, 9, "forward"), ("b", 12, 12, "forward"), ("c", 14, 14, "forward")]
    )
    shown = drawn(recorded, columns=10)
    assert named(recorded, shown.modules[0]) == [("a", 0, 10)]
    assert shown.omitted == 2
    assert drawn(recorded, columns=20).omitted == 0


def test_only_what_touches_the_stretch_is_there():
    recorded = trace(
        "step 1",
        *(f"{line} phase=forward" for line in FILLER[:5]),
        "step 2",
        *(f"{line} phase=backward" for line in FILLER[5:]),
        calls=[("a", 0, 3, "forward"), ("b", 12, 15, "forward")],
    )
    shown = drawn(recorded, 10, 20)
    assert [step.number for step in shown.steps] == [2]
    assert shown.phases.name.tolist() == [2]
    assert named(recorded, shown.modules[0]) == [("b", 12, 16)]


def test_a_trace_without_calls_has_empty_lanes():
    shown = drawn(trace(*FILLER))
    assert (shown.modules, len(shown.phases), shown.omitted) == ((), 0, 0)
