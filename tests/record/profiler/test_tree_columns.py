"""Rows of packed numbers become columns, whose numbers are those that were packed."""

from tb_memplugin.record.profiler.tree_columns import (
    ProfilerTree,
    pack_memory,
    pack_node,
    pack_operator,
    pack_position,
)


def test_an_event_gets_the_operator_node_and_frame_of_its_place() -> None:
    tree = ProfilerTree()
    tree.positions += [pack_position(-1, -1, 5), pack_position(0, 2, -1)]
    tree.memory += [pack_memory(10, 0x40, 64, 64, 1), pack_memory(20, 0x40, -64, 0, 0)]
    time, address, size, total, operator, node, frame = (c.tolist() for c in tree.memory_columns())
    assert (time, address, size, total) == ([10, 20], [0x40, 0x40], [64, -64], [64, 0])
    assert (operator, node, frame) == ([0, -1], [2, -1], [-1, 5])


def test_a_node_that_no_thread_ran_has_thread_minus_one() -> None:
    tree = ProfilerTree()
    tree.node_rows += [pack_node(1, 4, -1, 7, 3), pack_node(2, 3, 0, -1, 2**64 - 1)]
    assert [column.tolist() for column in tree.nodes] == [[1, 2], [4, 3], [-1, 0], [7, -1], [3, -1]]


def test_operators_keep_their_order_and_no_rows_are_empty_columns() -> None:
    tree = ProfilerTree()
    assert [len(column) for column in (*tree.nodes, *tree.maker_columns())] == [0] * 8
    tree.operator_rows += [pack_operator(5, 9, -1, 12), pack_operator(1, 2, 0, -2)]
    assert [column.tolist() for column in tree.operators] == [[5, 1], [9, 2], [-1, 0], [12, -2]]
