"""Modules from stacks that a person can follow."""

from __future__ import annotations

import copy
import pickle
import textwrap
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from tb_memplugin.analysis.divisions import breakdown
from tb_memplugin.analysis.moments import peak
from tb_memplugin.analysis.reasons import why
from tb_memplugin.analysis.stacks import stack_table
from tb_memplugin.exports import json
from tb_memplugin.read.layers.backward import Backward, meaning_of
from tb_memplugin.read.layers.calls import Call
from tb_memplugin.read.layers.frames import Frames
from tb_memplugin.read.layers.inferred import with_inferred_layers
from tb_memplugin.read.layers.parameters import (
    Gradient,
    Moved,
    before_the_window,
    in_parameter_order,
    match_moved,
    match_state,
    registered,
)
from tb_memplugin.read.layers.source_text import SourceText
from tb_memplugin.read.snapshot.trace import trace_from_snapshot
from tb_memplugin.store.windows import read_window, write_window
from tb_memplugin.trace import Category, Kind, MemoryTrace
from tb_memplugin.trace.tables import MODULE_MARK, NOT_NAMED
from tests.read.layers.stacks import APPLY, CALL, LINEAR, MAIN, Frame, inferred, modules, native, snapshot_of

MODEL: Frame = ("forward", "model.py", 10)
NODE = native("torch::autograd::generated::AddmmBackward0::apply(std::vector<at::Tensor>&&)")
ENGINE = native("torch::autograd::Engine::evaluate_function(std::shared_ptr<torch::autograd::GraphTask>&)")


def _block(line: int) -> list[Frame]:
    return [MAIN, CALL, MODEL, CALL, ("forward", "block.py", line)]


def test_a_line_that_goes_back_is_the_next_call_of_a_loop() -> None:
    trace = inferred((1, _block(20)), (2, _block(21)), (4, _block(20)), (8, _block(21)))
    assert modules(trace) == ["block:10.0", "block:10.0", "block:10.1", "block:10.1"]


def test_what_the_model_itself_allocates_is_the_roots() -> None:
    assert modules(inferred((1, [MAIN, CALL, MODEL]), (2, _block(20)))) == ["", "block:10"]


def test_a_second_step_has_the_same_modules() -> None:
    later: Frame = ("forward", "model.py", 12)
    step = [(1, _block(20)), (2, _block(20)), (4, [MAIN, CALL, later])]
    assert modules(inferred(*step, *step)) == ["block:10", "block:10", ""] * 2


def test_the_same_linear_again_is_the_next_linear_of_its_line() -> None:
    stack = [MAIN, CALL, MODEL, CALL, LINEAR]
    assert modules(inferred((4, stack), (4, stack))) == ["Linear:10.0", "Linear:10.1"]


def test_a_loss_does_not_take_the_name_of_the_model() -> None:
    loss: list[Frame] = [MAIN, CALL, ("forward", "site-packages/torch/nn/modules/loss.py", 9)]
    assert modules(inferred((1, _block(20)), (2, loss), (4, _block(21)))) == ["block:10", "?Loss", "block:10"]


def test_two_models_of_a_program_do_not_share_names() -> None:
    other: list[Frame] = [MAIN, CALL, ("forward", "critic.py", 10), CALL, ("forward", "block.py", 20)]
    assert modules(inferred((1, _block(20)), (2, other))) == ["?model.block:10", "?critic.block:10"]


def test_a_part_that_is_also_called_alone_is_no_second_model() -> None:
    alone: list[Frame] = [MAIN, CALL, ("forward", "block.py", 20), CALL, LINEAR]
    trace = inferred((1, [*_block(20), CALL, LINEAR]), (2, alone))
    assert modules(trace) == ["block:10.Linear:20", "?block.Linear:20"]


def test_a_module_that_calls_itself_has_a_path_as_deep_as_its_stack() -> None:
    deep = [MAIN, *[CALL, MODEL] * 3]
    assert modules(inferred((1, deep))) == ["model:10.model:10"]


def test_calls_without_a_function_between_them_are_no_error() -> None:
    """As where a wrapper's own frames were left out."""
    trace = inferred(*[(100, [MAIN, CALL, CALL, line]) for line in (MODEL, LINEAR, MODEL, LINEAR)])
    assert sum(trace.allocations.bytes.tolist()) == 400
    assert len(modules(trace)) == 4


def test_forwards_that_begin_at_many_lines_are_no_error() -> None:
    """At so many that none of them is a frequent one."""
    rng = Random(1315)
    calls = [
        (rng.randrange(1, 120), rng.choice([LINEAR, ("forward", "b.py", rng.randrange(1, 120))]))
        for _ in range(40)
    ]
    stacks = [[MAIN, CALL, ("forward", "model.py", line), CALL, inner] for line, inner in calls]
    assert len(modules(inferred(*[(512, stack) for stack in stacks * 2]))) == 80


def test_recorded_modules_win() -> None:
    trace = inferred((1, _block(20), MODULE_MARK + "layers.0"), (2, _block(21), ""))
    assert modules(trace) == ["layers.0", NOT_NAMED]
    assert trace.events.module_confidence.tolist() == [100, 100]


@pytest.mark.parametrize(
    "stack",
    [
        [],
        [native("at::native::empty(long)")],
        [("helper", "model.py", 4)],
        [("forward", "model.py", 4)],
        [APPLY, APPLY],
    ],
)
def test_without_a_module_call_nothing_is_named_and_bytes_stay(stack: list[Frame]) -> None:
    trace = inferred((5, stack), (7, _block(20)))
    assert modules(trace)[0] == NOT_NAMED
    assert {part.key: part.bytes for part in breakdown(trace, 0, 1, "module")} == {
        NOT_NAMED: 5,
        "block:10": 7,
    }


def test_half_a_stack_is_named_from_where_it_begins() -> None:
    assert modules(inferred((5, _block(20)[3:]))) == [""]


def test_inferred_modules_are_marked_and_a_note_says_their_bytes() -> None:
    trace = inferred((5, [MAIN]), (7, _block(20)))
    assert trace.events.module_confidence.tolist() == [0, 95]
    assert trace.allocations.module_confidence.tolist() == [0, 95]
    assert [(note.code, note.bytes) for note in trace.notes if note.code == "modules_inferred"] == [
        ("modules_inferred", 7)
    ]


def test_many_distinct_stacks_are_no_error() -> None:
    trace = inferred(*((1, [*_block(line), (f"f{line}", "block.py", line)]) for line in range(1, 5001)))
    assert np.bincount(trace.events.module, minlength=3).sum() == 5000


def test_stacks_that_are_too_many_for_their_events_name_nothing_and_a_note_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Six frames each, and two are allowed for each event."""
    stacks = [(1, [*_block(line), (f"f{line}", "block.py", line)]) for line in range(1, 101)]
    monkeypatch.setattr("tb_memplugin.read.layers.inferred.MOST_FRAMES", 400)
    assert set(modules(inferred(*stacks))) == {"block:10"}
    monkeypatch.setattr("tb_memplugin.read.layers.inferred.MOST_FRAMES", 399)
    trace = inferred(*stacks)
    assert set(modules(trace)) == {NOT_NAMED}
    assert trace.allocations.bytes.sum() == 100
    assert [note.code for note in trace.notes if "modules" in note] == ["too_many_stacks"]


def test_nothing_is_inferred_until_modules_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def frames(*_: object, **__: object) -> Frames:
        read.append("frames")
        return Frames([])

    monkeypatch.setattr("tb_memplugin.read.layers.inferred.Frames", frames)
    trace = inferred((5, [MAIN]), (7, _block(20)))
    top = peak(trace)
    assert (top.bytes, sum(part.bytes for part in top.parts("category"))) == (12, 12)
    assert sum(row.bytes for row in stack_table(trace, 0, top.event)) == 12
    assert not read
    assert [block.module for block in top.largest] == [NOT_NAMED, NOT_NAMED]
    assert read == ["frames"]


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda trace: pickle.loads(pickle.dumps(trace))]
)
def test_a_trace_is_copied_and_pickled_with_its_modules(
    copied: Callable[[MemoryTrace], MemoryTrace],
) -> None:
    again = copied(inferred((1, _block(20)), (2, _block(21)), (4, _block(20)), (8, _block(21))))
    assert modules(again) == ["block:10.0", "block:10.0", "block:10.1", "block:10.1"]


def test_json_has_the_modules_of_a_trace_that_nobody_asked_for_them(tmp_path: Path) -> None:
    json.write(inferred((1, _block(20)), (2, _block(21))), tmp_path / "trace.json")
    assert '"block:10"' in (tmp_path / "trace.json").read_text("utf-8")


def test_a_step_that_comes_again_is_named_as_the_first() -> None:
    """Autograd's allocation, without Python frames, ends a forward: sizes differ from step to step."""
    addmm = native("at::_ops::addmm::call(at::Tensor const&)")
    node = [ENGINE, NODE, native("at::_ops::mm::call(at::Tensor const&)")]
    step = [([*_block(line), addmm], size) for line, size in ((20, 1), (21, 2), (20, 4), (21, 8))]
    steps = [
        allocation
        for times in (1, 3)
        for allocation in [*((times * size, stack) for stack, size in step), (times, node), (2 * times, node)]
    ]
    trace = inferred(*steps)
    first = ["block:10.0", "block:10.0", "block:10.1", "block:10.1", "block:10.1", "block:10.1"]
    assert modules(trace) == first * 2
    assert trace.events.module_confidence.tolist() == [95] * 12


TEXT = """
from torch import nn

class Block(nn.Module):
    def __init__(self):
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        x = self.up(x).relu()
        return self.down(x)

class Model(nn.Module):
    def __init__(self, depth):
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList(Block() for _ in range(depth))
        self.by_name = nn.ModuleDict({"a": Block()})

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        for block in self.by_name.values():
            x = block(x)
        return x
"""


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    file = tmp_path / "net.py"
    file.write_text(textwrap.dedent(TEXT), encoding="utf-8")
    return file


def _line(text: str) -> int:
    return 1 + TEXT.split("\n").index(next(line for line in TEXT.split("\n") if text in line))


def _linear_of_block(file: Path, call: str, linear: str) -> list[Frame]:
    model = ("forward", str(file), _line(call))
    return [MAIN, CALL, model, CALL, ("forward", str(file), _line(linear)), CALL, LINEAR]


def test_source_text_names_attributes_and_indices(model_file: Path) -> None:
    first = [MAIN, CALL, ("forward", str(model_file), _line("self.first(x)")), CALL, LINEAR]
    up, down = (_linear_of_block(model_file, "= layer(x)", call) for call in ("self.up(x)", "self.down(x)"))
    relu = up[:5]  # what Block itself allocates between its two Linears
    assert modules(inferred((1, first), *[(8, up), (8, relu), (4, down)] * 2)) == [
        *("first", "layers.0.up", "layers.0", "layers.0.down"),
        *("layers.1.up", "layers.1", "layers.1.down"),
    ]


def test_a_layer_that_may_be_checkpointed_in_an_expression_has_its_index(model_file: Path) -> None:
    """Both branches call the same, one by a function that takes it."""
    line = "            x = layer(x)"
    text = model_file.read_text(encoding="utf-8")
    chosen = line.replace("layer(x)", "checkpoint(layer, x) if self.recomputes else layer(x)")
    model_file.write_text(text.replace(line, chosen), encoding="utf-8")
    up, down = (_linear_of_block(model_file, "= layer(x)", call) for call in ("self.up(x)", "self.down(x)"))
    assert modules(inferred(*[(8, up), (4, down)] * 2)) == [
        f"layers.{layer}.{part}" for layer in (0, 1) for part in ("up", "down")
    ]


def test_frees_with_the_stack_of_their_allocation_do_not_say_where_the_program_is(model_file: Path) -> None:
    """PyTorch writes them so without `context="all"`, however much later the block is freed."""
    up, down = (_linear_of_block(model_file, "= layer(x)", call) for call in ("self.up(x)", "self.down(x)"))
    content = snapshot_of(*[(8, up), (4, down), (4, down[:5])] * 2)
    entries: list[dict[str, Any]] = content["device_traces"][0]
    for at in (3, 0):  # each result of `up` is freed after `down` has run, and then the block allocates
        free = entries[at] | {"action": "free_requested", "time_us": entries[at + 1]["time_us"]}
        entries[at + 2 : at + 2] = [free, free | {"action": "free_completed"}]
    for block in content["segments"][0]["blocks"][::3]:
        block["state"] = "inactive"
    trace = with_inferred_layers(trace_from_snapshot(content, "test"))
    is_alloc = trace.events.kind == Kind.ALLOC
    names = np.array(modules(trace))[is_alloc].tolist()
    assert names == [f"layers.{layer}{part}" for layer in (0, 1) for part in (".up", ".down", "")]


def test_a_key_that_the_text_does_not_tell_is_a_question_mark(model_file: Path) -> None:
    trace = inferred((8, _linear_of_block(model_file, "= block(x)", "self.up(x)")[:5]))
    assert modules(trace) == ["by_name.?0"]
    assert trace.events.module_confidence.tolist() == [60]


def test_a_loop_over_a_part_of_a_list_has_no_indices(tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    file.write_text(TEXT.replace("in self.layers", "in self.layers[1:]"), encoding="utf-8")
    up = _linear_of_block(file, "= layer(x)", "self.up(x)")
    assert modules(inferred((8, up[:5]))) == ["layers.?0"]


LOOPS = """
class Block(nn.Module):
    def forward(self, x):
        return x + 1

class Model(nn.Module):
    def __init__(self, parts, depth):
        self.first = nn.Linear(4, 4)
        self.layers = {layers}

    def forward(self, x):
        x = self.first(x)
        for at, layer in enumerate(self.layers):
            if at > 1:
                x = layer(x)  # other
            else:
                x = layer(x)  # one
        for layer in self.layers:
            x = layer(x)  # each
        for up, down in self.layers:
            x = up(x)
            x = down(x)
        for pair in self.layers:
            left, right = pair
            x = left(x)  # left
            x = right(x)  # right
        x = self.first(x) if at else self.first(-x)  # either
        x = self.layers(x)
        return x
"""


@pytest.mark.parametrize(
    ("layers", "lines", "expected"),
    [
        (
            "nn.ModuleList([nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 4)])",
            ["# each"] * 2,
            "layers.0 layers.2",
        ),
        ("nn.ModuleList([nn.Linear(4, 4) for _ in range(depth)])", ["# each"] * 2, "layers.0 layers.1"),
        ("nn.ModuleList(parts)", ["# each"] * 2, "layers.?0 layers.?1"),
        ("nn.ModuleList(parts)", ["= up(x)", "= down(x)"] * 2, "layers.0.0 layers.0.1 layers.1.0 layers.1.1"),
        ("nn.ModuleList(parts)", ["# left", "# right"] * 2, "layers.0.0 layers.0.1 layers.1.0 layers.1.1"),
        ("nn.ModuleList(parts)", ["# one", "# other"], "layers.?0 layers.?0"),
        ("nn.ModuleList(parts)", ["# either"], "first"),
    ],
)
def test_a_loop_has_indices_if_none_of_its_modules_can_be_hidden(
    tmp_path: Path, layers: str, lines: list[str], expected: str
) -> None:
    """A dropout may allocate nothing; of two branches each counts its own rounds."""
    file, text = tmp_path / "net.py", LOOPS.replace("{layers}", layers)
    file.write_text(text, encoding="utf-8")

    def linear(part: str) -> tuple[int, list[Frame]]:
        number = 1 + next(at for at, line in enumerate(text.split("\n")) if part in line)
        return 8, [MAIN, CALL, ("forward", str(file), number), CALL, LINEAR]

    assert modules(inferred(linear("self.first(x)"), *map(linear, lines))) == ["first", *expected.split()]


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ("nn.Sequential(*[Block() for _ in range(depth)])", "layers.0"),
        ("nn.Sequential(*parts)", "layers.0"),
        ("nn.Sequential(parts)", "layers.?0"),
    ],
)
def test_a_sequential_that_may_have_names_has_no_indices(tmp_path: Path, layers: str, expected: str) -> None:
    """An `OrderedDict` gives the modules of a `Sequential` their names."""
    file, text = tmp_path / "net.py", LOOPS.replace("{layers}", layers)
    file.write_text(text, encoding="utf-8")
    first, whole, inner = (
        ("forward", str(file), 1 + next(at for at, line in enumerate(text.split("\n")) if part in line))
        for part in ("self.first(x)", "= self.layers(x)", "return x + 1")
    )
    container: Frame = ("forward", "site-packages/torch/nn/modules/container.py", 250)
    block = [MAIN, CALL, whole, CALL, container, CALL, inner]
    assert modules(inferred((8, [MAIN, CALL, first, CALL, LINEAR]), (8, block)))[1:] == [expected]


def test_a_loop_with_all_lines_of_a_forward_may_be_another_call_of_it(tmp_path: Path) -> None:
    file, text = tmp_path / "net.py", LOOPS.replace("{layers}", "nn.ModuleList(parts)")
    file.write_text(text, encoding="utf-8")
    up, down = (
        [MAIN, CALL, ("forward", str(file), 1 + text.split("\n").index(line)), CALL, LINEAR]
        for line in ("            x = up(x)", "            x = down(x)")
    )
    stacks = [(8, up), (4, down)] * 2
    assert modules(inferred(*stacks)) == ["layers.?0.0", "layers.?0.1"] * 2


def test_the_classes_of_what_is_appended_to_a_list_are_known(tmp_path: Path) -> None:
    source = """
class Model(nn.Module):
    def __init__(self):
        self.layers = nn.ModuleList()
        for _ in range(2):
            self.layers.append(nn.Sequential(Block(), nn.Linear(4, 4)))
        self.parts = nn.ModuleDict({"a": nn.Linear(4, 4)})

    def forward(self, x):
        x = self.parts["a"](x)
        for layer in self.layers:
            x = layer(x)
"""
    file = tmp_path / "net.py"
    file.write_text(source, encoding="utf-8")
    text = SourceText([(str(file), 10, "forward")])
    ((appended,), (of_key,)) = (text.called(str(file), line) for line in (12, 10))
    assert (appended.class_name, appended.elements) == ("Sequential", ("Block", "Linear"))
    assert of_key.class_name == "Linear"


def test_a_class_that_depends_on_a_condition_is_not_known(tmp_path: Path) -> None:
    """None of `Identity` runs; of two other classes either may."""
    source = """
class Model(nn.Module):
    def __init__(self, kind):
        if kind:
            self.norm = nn.BatchNorm1d(4)
        else:
            self.norm = nn.LayerNorm(4)
        self.drop = nn.Dropout() if kind else nn.Identity()
        self.parts = nn.Sequential(nn.Linear(4, 4), kind(), nn.Dropout() if 1 else nn.Identity(), nn.GELU())

    def forward(self, x):
        return self.parts(self.drop(self.norm(x)))
"""
    file = tmp_path / "net.py"
    file.write_text(source, encoding="utf-8")
    targets = SourceText([(str(file), 12, "forward")]).called(str(file), 12)
    assert [(target.path, target.class_name) for target in targets] == [
        ("norm", ""),
        ("drop", "Dropout"),
        ("parts", "Sequential"),
    ]
    assert targets[2].elements == ("Linear", "", "Dropout", "GELU")


def test_a_module_of_no_known_class_is_the_one_whose_class_is_not_known(tmp_path: Path) -> None:
    """With two of them it may be either, and nothing after it is sure."""
    inner: Frame = ("forward", "act.py", 2)
    container: Frame = ("forward", "site-packages/torch/nn/modules/container.py", 250)
    for layers, expected in (
        ("nn.Linear(4, 4), depth(), nn.Dropout(), nn.Linear(4, 4)", ["layers.0", "layers.1", "layers.3"]),
        ("nn.Linear(4, 4), depth(), depth(), nn.Linear(4, 4)", ["layers.0", "layers.?1", "layers.?2"]),
    ):
        file, text = tmp_path / "net.py", LOOPS.replace("{layers}", f"nn.Sequential({layers})")
        file.write_text(text, encoding="utf-8")
        first, whole = (
            ("forward", str(file), 1 + next(at for at, line in enumerate(text.split("\n")) if part in line))
            for part in ("= self.first(x)\n".strip(), "= self.layers(x)")
        )
        stacks = [[MAIN, CALL, whole, CALL, container, CALL, each] for each in (LINEAR, inner, LINEAR)]
        trace = inferred((8, [MAIN, CALL, first, CALL, LINEAR]), *[(8, stack) for stack in stacks])
        assert modules(trace)[1:] == expected


def test_a_text_that_does_not_fit_the_frames_is_not_used(model_file: Path) -> None:
    stack = [MAIN, CALL, ("forward", str(model_file), _line("self.first(x)")), CALL, LINEAR]
    other_version = [MAIN, CALL, ("forward", str(model_file), _line("self.first =")), CALL, LINEAR]
    assert modules(inferred((1, stack))) == ["first"]
    assert modules(inferred((1, other_version), (1, stack))) == [
        f"Linear:{line}" for line in map(_line, ("self.first =", "self.first(x)"))
    ]


@pytest.mark.parametrize("content", [b"def forward(:", b"\0", b"\xff\xfe", b"x = 1\n" * 400_000])
def test_a_file_that_is_no_text_of_the_program_is_no_error(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "net.py"
    file.write_bytes(content)
    assert modules(inferred((1, [MAIN, CALL, ("forward", str(file), 1), CALL, LINEAR]))) == ["Linear:1"]


def test_a_node_is_of_the_module_whose_operator_it_reverses() -> None:
    forward = [[*_block(20), native("at::_ops::addmm::call(at::Tensor const&)")]] * 2
    forward[1] = [
        *_block(30)[:-1],
        ("forward", "head.py", 30),
        native("at::_ops::addmm::call(at::Tensor const&)"),
    ]
    node = [ENGINE, NODE, native("at::_ops::mm::call(at::Tensor const&)")]
    trace = inferred((1, forward[0]), (2, forward[1]), (3, node), (1, [ENGINE]), (3, node))
    assert modules(trace) == ["block:10", "head:10", "head:10", "head:10", "block:10"]
    assert trace.events.module_confidence.tolist() == [95, 95, 95, 95, 95]


def test_a_text_with_other_classes_at_the_lines_is_not_used(model_file: Path) -> None:
    """The file changed after the recording: the line that called a Linear now calls a Block."""
    model = [MAIN, CALL, ("forward", str(model_file), _line("= layer(x)")), CALL]
    other: Frame = ("forward", str(model_file), _line("x = self.first(x)"))
    assert modules(inferred((1, [*model, other]))) == [f"net:{_line('= layer(x)')}"]
    block: Frame = ("forward", str(model_file), _line("self.up(x)"))
    assert modules(inferred((1, [*model, block]))) == ["layers.0"]


def test_a_snapshot_without_entries_names_nothing() -> None:
    snapshot = snapshot_of((7, _block(20)))
    (entry,) = snapshot["device_traces"].pop()
    snapshot["segments"][0]["blocks"][0]["frames"] = entry["frames"]
    trace = with_inferred_layers(trace_from_snapshot(snapshot, "test"))
    assert [part.key for part in breakdown(trace, 0, -1, "module")] == [NOT_NAMED]


def test_the_sentence_about_a_block_says_that_its_module_is_inferred() -> None:
    trace = inferred((7, _block(20)), (5, [MAIN]))
    assert why(trace, 0).endswith("(the module is inferred, 95 % sure)")
    assert "inferred" not in why(trace, 1)


def test_how_sure_a_module_is_survives_a_side_file() -> None:
    trace = inferred((7, _block(20)), (5, [MAIN]))
    file = BytesIO()
    write_window(file, trace)
    content = file.getvalue()
    read = read_window(lambda first, size: content[first : first + size], len(content), "window")
    assert read.events.module_confidence.tolist() == [95, 0]


OF_OTHERS = """
from torch import nn
from torch.nn.functional import relu

class Coder(nn.Module):
    def __init__(net):
        net.up = nn.Linear(4, 8)

    def encode(net, x):
        return net.up(x)

class Model(nn.Module):
    def __init__(this):
        this.image, this.text = Coder(), Coder()

    def forward(this, x, layers):
        x = this.image.encode(x)
        y = this.text.encode(x) + this.image.encode(x)
        for layer in layers:
            y = relu(layer(y))
        return y
"""


@pytest.mark.parametrize(
    ("line", "expected"),
    [("        x = this.image.encode(x)", ["image.up"]), ("        y = this.text", ["?0.up", "?1.up"])],
)
def test_a_method_of_another_module_calls_what_is_below_that_module(
    tmp_path: Path, line: str, expected: list[str]
) -> None:
    """The second line has the methods of two modules: which of them ran is not known."""
    file, lines = tmp_path / "net.py", OF_OTHERS.split("\n")
    file.write_text(OF_OTHERS, encoding="utf-8")
    number = next(at for at, text in enumerate(lines, 1) if text.startswith(line))
    method = ("encode", str(file), lines.index("        return net.up(x)") + 1)
    stack = [MAIN, CALL, ("forward", str(file), number), method, CALL, LINEAR]
    assert modules(inferred(*[(8, stack)] * len(expected))) == expected


def test_a_module_that_a_function_of_its_line_takes_is_not_its_parent(tmp_path: Path) -> None:
    file, lines = tmp_path / "net.py", OF_OTHERS.split("\n")
    file.write_text(OF_OTHERS, encoding="utf-8")
    number = lines.index("            y = relu(layer(y))") + 1
    assert modules(inferred((8, [MAIN, CALL, ("forward", str(file), number), CALL, LINEAR]))) == [
        f"?Linear:{number}"
    ]


STACKED = """
from torch import nn

class Block(nn.Module):
    def __init__(self):
        self.up = nn.Linear(4, 4)

    def forward(self, x):
        x = self.up(x)
        return x + 1

def main():
    net = nn.Sequential(nn.Linear(4, 4), nn.Flatten(), *[Block() for _ in range(2)], nn.Linear(4, 2))
    other = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return net(1)
"""


def test_a_model_that_is_a_sequential_has_the_indices_of_the_text_that_makes_it(tmp_path: Path) -> None:
    """`Flatten` allocates nothing. Of the two that are made, only one has blocks."""
    file, lines = tmp_path / "net.py", STACKED.split("\n")
    file.write_text(STACKED, encoding="utf-8")
    call: Frame = ("main", str(file), lines.index("    return net(1)") + 1)
    up: Frame = ("forward", str(file), lines.index("        x = self.up(x)") + 1)
    end: Frame = ("forward", str(file), lines.index("        return x + 1") + 1)
    around: list[Frame] = [call, CALL, ("forward", "site-packages/torch/nn/modules/container.py", 250), CALL]
    linear = (8, [*around, LINEAR])
    block = [(8, [*around, up, CALL, LINEAR]), (8, [*around, end])]
    assert modules(inferred(linear, *block, *block, linear)) == ["0", "2.up", "2", "3.up", "3", "4"]
    assert modules(inferred(linear, block[1], block[1], linear)) == [
        "?0",
        "?1",
        "?1",
        "?2",
    ]  # one or two blocks
    assert modules(inferred(linear, *block, linear, *block))[-1] == "?3"  # no Sequential of the file fits


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        (["online(1)", "target(2)"], ["?online.?0", "?online.?1", "?target.?0", "?target.?1"]),
        (["loss(online(1), self.target(2))", "online(1)"], ["?0", "?1", "?0", "?1"]),
        (["online(1)", "print(online(2))"], ["?0", "?1", "?0", "?1"]),
    ],
)
def test_two_variables_that_a_function_calls_are_two_models(
    tmp_path: Path, calls: list[str], expected: list[str]
) -> None:
    """Of one line with several variables, and of one variable in several lines, none is known."""
    file = tmp_path / "train.py"
    file.write_text("\n".join(["def main(self, online, target, loss):", *(f"    {call}" for call in calls)]))
    container: Frame = ("forward", "site-packages/torch/nn/modules/container.py", 250)
    stacks = [
        (8, [("main", str(file), 2 + number), CALL, container, CALL, layer])
        for number in range(2)
        for layer in (LINEAR, ("forward", "site-packages/torch/nn/modules/activation.py", 100))
    ]
    assert modules(inferred(*stacks)) == expected


def _match(*stacks: tuple[int, list[Frame]], calls: list[Call]) -> list[int]:
    """Return the call of each allocation; -1 bytes are a free by the engine."""
    distinct = list(dict.fromkeys(tuple(stack) for _, stack in stacks))
    texts = [[f"{name} {file}:{line}" for name, file, line in reversed(stack)] for stack in distinct]
    rows = np.array([distinct.index(tuple(stack)) for _, stack in stacks], np.int32)
    sizes = np.array([size for size, _ in stacks])
    owner = np.array([_call_of(stack) for _, stack in stacks], np.int32)
    is_free = sizes < 0
    return (
        Backward(calls, [meaning_of(text) for text in texts])
        .match(rows, sizes, owner, is_free)
        .owner.tolist()
    )


def _call_of(stack: list[Frame]) -> int:
    return stack[0][2] if stack[0][0] == "call" else -1


def _in(call: int, operator: str) -> list[Frame]:
    return [("call", "", call), native(f"at::_ops::{operator}::call(at::Tensor const&)")]


def _node(kind: str, operator: str) -> list[Frame]:
    node = native(f"torch::autograd::generated::{kind}Backward0::apply(std::vector<at::Tensor>&&)")
    return [ENGINE, node, native(f"at::_ops::{operator}::call(at::Tensor const&)")]


def _engine(operator: str) -> list[Frame]:
    return [ENGINE, native(f"at::_ops::{operator}::call(at::Tensor const&)")]


def _tree(*parents: int) -> list[Call]:
    """Calls, each in the one with its parent's row."""
    calls: list[Call] = []
    for row, parent in enumerate(parents):
        calls.append(Call(calls[parent] if parent >= 0 else None, (row,), (), 0, row))
        if parent >= 0:
            calls[parent].children[row,] = [calls[row]]
    return calls


def test_a_custom_function_whose_native_frame_has_no_name_is_a_node() -> None:
    """The Python frames of its backward are inside the engine."""
    apply: Frame = ("apply", "torch/autograd/function.py", 1)
    mul = native("at::_ops::mul::call(at::Tensor const&)")
    forward = [("call", "", 1), apply, ("forward", "act.py", 2), mul]
    backward = [apply, ENGINE, ("backward", "act.py", 3), mul]
    stacks = ((1, forward), (1, _in(2, "addmm")), (1, _node("Addmm", "mm")), (1, backward))
    assert _match(*stacks, calls=_tree(-1, 0, 0))[2:] == [2, 1]


def test_what_shape_a_gradient_gets_between_two_modules_is_sure_only_without_a_bias() -> None:
    """A linear with a bias reshapes its output itself: the copy may be its own or the outer module's."""
    for linear, node, expected in (("addmm", "Addmm", -1), ("mm", "Mm", 0)):
        stacks = (
            (1, _in(1, linear)),
            (2, _in(2, "gelu")),
            (2, _node("Gelu", "gelu_backward")),
            (1, _node("View", "clone")),
            (1, _node(node, "mm")),
        )
        assert _match(*stacks, calls=_tree(-1, 0, 0))[2:] == [2, expected, 1]


def test_a_sum_is_of_the_node_before_it_until_that_is_over() -> None:
    """After a free the engine sums for a node that allocated nothing, whose module is not known."""
    forward = ((1, _in(1, "add")), (2, _in(2, "addmm")))
    node = (1, _node("Addmm", "mm"))
    calls = _tree(-1, 0, 0)
    assert _match(*forward, node, (1, _engine("sum")), calls=calls)[2:] == [2, 2]
    assert _match(*forward, node, (-1, [ENGINE]), (1, _engine("sum")), calls=calls)[2:] == [2, -1, -1]


def test_a_sum_is_not_named_if_a_module_around_may_begin_with_a_view() -> None:
    """The node of a view allocates nothing: between it and the product, or after it."""
    stacks = ((1, _in(3, "gelu")), (2, _in(2, "addmm")), (1, _node("Addmm", "mm")), (1, _engine("add")))
    after = (1, _node("Gelu", "gelu_backward"))
    assert _match(*stacks, after, calls=_tree(-1, 0, 0, 0))[2:] == [2, 2, 3]
    assert _match(*stacks, after, calls=_tree(-1, 0, 1, 0))[2:] == [2, -1, 3]


def test_a_node_of_what_may_have_run_in_place_is_not_of_the_modules_around_it() -> None:
    stacks = ((1, _in(1, "gelu")), (2, _in(2, "addmm")), (1, _node("Addmm", "mm")))
    after = (1, _node("Gelu", "gelu_backward"))
    for node, expected in (("Relu", -1), ("Select", 0)):
        between = (1, _node(node, "zeros"))
        assert _match(*stacks, between, after, calls=_tree(-1, 0, 0))[2:] == [2, expected, 1]


def test_two_convolutions_in_a_row_are_two_nodes() -> None:
    """Each allocates for its input, then for its weight, whose code comes again with the next node."""
    forward = [(1, _in(call, "convolution")) for call in (1, 2)]
    own = [(size, _node("Convolution", name)) for size, name in ((8, "cudnn_input"), (4, "cudnn_weight"))]
    after = [(2 * size, stack) for size, stack in own]
    assert _match(*forward, *own, *after, calls=_tree(-1, 0, 0))[2:] == [2, 2, 1, 1]


def test_a_module_without_a_backward_does_not_take_the_node_of_another() -> None:
    """The last product runs without gradients, or the first does: which, nothing says."""
    forward = [(1, _in(call, "mul")) for call in (1, 2)]
    assert _match(*forward, (1, _node("Mul", "mul")), calls=_tree(-1, 0, 0))[2:] == [2]
    forward = [(1, _in(call, name)) for call, name in ((1, "gelu"), (2, "mul"), (3, "mul"), (4, "gelu"))]
    backward = [(1, _node(*names)) for names in (("Gelu", "gelu_backward"), ("Mul", "mul"))]
    backward += [(1, _node("Gelu", "gelu_backward"))]
    assert _match(*forward, *backward, calls=_tree(-1, 0, 0, 0, 0))[4:] == [4, -1, 1]


def test_a_linear_without_a_bias_that_copies_its_gradient_does_not_move_the_others() -> None:
    """`matmul` has two nodes for one allocation; the clone is not that of another operator."""
    linear = [
        native("at::_ops::matmul::call(at::Tensor const&)"),
        native("at::_ops::mm::call(at::Tensor const&)"),
    ]
    forward = [(1, [("call", "", call), *linear]) for call in (1, 2, 3)]
    backward = [(1, _node("Mm", "mm")), (1, _node("UnsafeView", "clone")), (1, _node("Mm", "mm"))]
    stacks = (*forward[:1], (1, _in(0, "clone")), *forward[1:], *backward)
    last = ((-1, [ENGINE]), (1, _node("Mm", "mm")))
    assert _match(*stacks, *last, calls=_tree(-1, 0, 0, 0))[4:] == [3, 2, 2, -1, 1]


def test_a_result_that_is_not_used_has_no_backward_and_does_not_move_the_others() -> None:
    """Of three products two ran backward: the one that did not may be any of them."""
    forward = [(1, _in(0, "convolution")), *((1, _in(call, "addmm")) for call in (1, 2, 3))]
    product = (1, _node("Addmm", "mm"))
    backward = [
        product,
        (-1, [ENGINE]),
        product,
        (-1, [ENGINE]),
        (1, _node("Convolution", "convolution_backward")),
    ]
    assert _match(*forward, *backward, calls=_tree(-1, 0, 0, 0))[4::2] == [-1, -1, 0]
    assert _match(*forward[:3], *backward, calls=_tree(-1, 0, 0, 0))[3::2] == [2, 1, 0]


LENDS = """
import torch
from torch import nn

class Mixer(nn.Module):
    def __init__(self):
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = x.to(self.first.weight.dtype)
        x = self.second.weight @ x
        return x.matmul(torch.cat([self.first.weight, self.second.weight]))
"""


@pytest.mark.parametrize(
    ("line", "expected"),
    [("x.to(", []), ("x = self.second", ["second"]), ("return x", ["first", "second"])],
)
def test_the_modules_whose_weights_a_line_uses(tmp_path: Path, line: str, expected: list[str]) -> None:
    """The dtype of a weight is no use of it."""
    file, lines = str(tmp_path / "net.py"), LENDS.split("\n")
    Path(file).write_text(LENDS, encoding="utf-8")
    number = next(at for at, text in enumerate(lines, 1) if line in text)
    text = SourceText([(file, number, "forward")])
    assert [target.path for target in text.weights(file, number)] == expected
    assert text.uses_weights(file, number)


def test_a_modules_own_parameters_are_before_those_below_it() -> None:
    """They are moved after them. The depth keeps what is not known beside what is moved before it."""
    outer, inner = Call(None, (), (), 0, 0), Call(None, (), (), 0, 1)
    root = Call(None, (), (), 0, 2)
    outer.parent, outer.name, inner.parent, inner.name = root, "attention", outer, "out"
    moved = [(8, 3, inner), (4, 3, inner), (24, 2, outer), (12, 2, None)]
    assert in_parameter_order(moved) == [(24, outer), (12, None), (8, inner), (4, inner)]


def test_a_weight_is_before_its_bias_where_its_gradient_comes_later() -> None:
    linear, norm = Call(None, (), (), 0, 0, name="up"), Call(None, (), (), 0, 1, name="norm")
    linear.parent = norm.parent = Call(None, (), (), 0, 2)
    gradients = [Gradient(8, linear), Gradient(64, linear), Gradient(6, norm), Gradient(9, norm)]
    assert [gradient.size for gradient in registered(gradients)] == [6, 9, 64, 8]


def _layers(*names: str, position: int = 0) -> tuple[list[Call], list[Call]]:
    """Return the calls of modules in each of two layers, in time order, and all calls."""
    every = [Call(None, (), (), 0, 0)]
    parts: list[Call] = []
    for index in range(2):
        layer = Call(every[0], (), (), 0, len(every), name=f"layers.{index}", position=1)
        every.append(layer)
        for at, name in enumerate(names):
            parts.append(Call(layer, (), (), 0, len(every), name=name, position=position and position + at))
            every.append(parts[-1])
    return parts, every


@pytest.mark.parametrize(
    ("position", "expected"),
    [
        (1, ["layers.0.q", "layers.0.k", "layers.1.q", "layers.1.k"]),
        (0, ["layers.0.?"] * 2 + ["layers.1.?"] * 2),
    ],
)
def test_weights_of_one_size_are_told_apart_if_the_order_of_their_modules_is_known(
    position: int, expected: list[str]
) -> None:
    """Without the text of the class, nothing says which of a layer's two is registered first."""
    parts, every = _layers("q", "k", position=position)
    gradients = registered(Gradient(64, call) for call in parts)
    moved = [Moved(event, 64, 4) for event in range(4)]
    assert [match_moved(moved, gradients, every)[event].fqn() for event in range(4)] == expected
    parameters = [(gradient.size, gradient.call) for gradient in gradients]
    state = match_state([(event, 64) for event in range(8)], parameters, every, is_order_known=False)
    assert [state[event].fqn() for event in range(8)] == [name for name in expected for _ in range(2)]


def test_more_tensors_of_a_size_than_gradients_are_not_named_without_an_order() -> None:
    parts, every = _layers("q", "k")
    gradients = registered(Gradient(64, call) for call in parts)
    assert match_moved([Moved(event, 64, 4) for event in range(5)], gradients, every) == {}


def test_blocks_from_before_have_the_name_that_modules_with_gradients_of_their_size_share() -> None:
    parts, _ = _layers("up", "down")
    gradients = [Gradient(size, call) for call, size in zip(parts, (64, 32, 64, 32), strict=True)]
    kinds = [*[Category.PARAMETER] * 5, *[Category.OPTIMIZER_STATE] * 6]
    sizes = [64, 64, 32, 32, 32, *[64] * 4, 32, 32]
    blocks = before_the_window(np.array(kinds, np.uint8), np.array(sizes), gradients)
    # Of the three parameters of 32 bytes one is another module's, so nothing is said of them and their state.
    assert [(rows.tolist(), name) for rows, name in blocks] == [
        ([0, 1], "layers.?.up"),
        ([5, 6, 7, 8], "layers.?.up"),
    ]


TIED = """
from torch import nn

class Model(nn.Module):
    def __init__(self):
        self.{first} = nn.{First}(4, 16)
        self.{second} = nn.{Second}(16, 4)

    def forward(self, x):
        x = self.embed(x)
        return self.head(x)
"""


@pytest.mark.parametrize("first", ["embed", "head"])
def test_a_gradient_of_two_modules_is_of_the_one_that_is_registered_first(tmp_path: Path, first: str) -> None:
    """The head makes its gradient, then the embedding, then the engine adds them and frees both."""
    second = {"embed": "head", "head": "embed"}[first]
    classes = {"embed": "Embedding", "head": "Linear"}
    source = TIED.format(first=first, second=second, First=classes[first], Second=classes[second])
    file = tmp_path / "net.py"
    file.write_text(source, encoding="utf-8")
    line = {
        name: 1 + source.split("\n").index(f"        {code}")
        for name, code in (("embed", "x = self.embed(x)"), ("head", "return self.head(x)"))
    }
    sparse: Frame = ("forward", "site-packages/torch/nn/modules/sparse.py", 190)
    model = [MAIN, CALL]
    embed = [*model, ("forward", str(file), line["embed"]), CALL, sparse]
    head = [*model, ("forward", str(file), line["head"]), CALL, LINEAR]
    step: list[tuple[int, list[Frame]]] = [
        (8, [*embed, native("at::_ops::embedding::call(at::Tensor const&)")]),
        (16, [*head, native("at::_ops::mm::call(at::Tensor const&)")]),
        (512, _node("Mm", "mm")),
        (4, _node("Mm", "mm")),
        (-4, [ENGINE]),
        (512, _node("Embedding", "embedding_backward")),
        (512, _engine("add")),
        (-512, [ENGINE]),
        (-512, [ENGINE]),
    ]
    trace = with_inferred_layers(trace_from_snapshot(_with_frees(*step), "test"))
    gradients = trace.events.category == Category.GRADIENT
    named = [trace.modules[row].key for row in trace.events.module[gradients].tolist()]
    assert trace.events.bytes[gradients].tolist() == [512]
    assert named == [first]


def _with_frees(*entries: tuple[int, list[Frame]]) -> dict[str, Any]:
    """Return a snapshot; negative bytes free the block of that size that was allocated first."""
    snapshot = snapshot_of(*[entry for entry in entries if entry[0] > 0])
    allocations = iter(snapshot["device_traces"][0])
    alive: list[dict[str, Any]] = []
    result: list[dict[str, Any]] = []
    for size, stack in entries:
        if size > 0:
            alive.append(next(allocations))
            result.append(alive[-1])
            continue
        block = alive.pop(next(at for at, each in enumerate(alive) if each["size"] == -size))
        frames = [{"name": name, "filename": file, "line": line} for name, file, line in reversed(stack)]
        result += [
            {**block, "action": action, "frames": frames} for action in ("free_requested", "free_completed")
        ]
        freed = next(b for b in snapshot["segments"][0]["blocks"] if b["address"] == block["addr"])
        freed["state"] = "inactive"
    for time, entry in enumerate(result):
        entry["time_us"] = time + 1
    snapshot["device_traces"][0] = result
    return snapshot
