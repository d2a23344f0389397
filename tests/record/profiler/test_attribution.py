"""Every byte has the right module, checked against the autograd graph and Python's own frames."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile

from tb_memplugin.record.modules import ModuleNames, ModuleRecorder
from tb_memplugin.record.profiler.roles import NODE_PREFIX
from tb_memplugin.trace import Category, Kind, Phase
from tests.training import CNN, LSTM, MODELS, Cycle, Transformer, train

CPU = 0


class Twice(nn.Module):
    """One layer called twice, one layer under two names, containers in containers."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(20, 20)
        self.groups = nn.ModuleDict({"a": nn.ModuleList([nn.Sequential(nn.Linear(20, 20), nn.Tanh())])})
        self.alias = self.shared

    def forward(self, x):
        return self.get_submodule("groups.a.0")(self.shared(x).relu_()) + self.alias(x) * 2

    @staticmethod
    def batch():
        return torch.randn(5, 20), torch.randint(0, 20, (5,))


ALL = {**MODELS, "twice": Twice}


class GraphOwners:
    """Which module made each autograd node, read off the graph itself: an inner module claims first."""

    def __init__(self, model: nn.Module) -> None:
        self.of: dict[int, str] = {}
        self.edges: list[object] = []
        for fqn, module in model.named_modules():
            module.register_forward_pre_hook(self._enter)
            module.register_forward_hook(lambda module, inputs, output, fqn=fqn: self._claim(fqn, output))
        self._inputs: list[set[object]] = []

    def _enter(self, module, inputs):
        given = (*inputs, *module.parameters())  # `functional_call` gives parameters that have a graph, too
        self._inputs.append(
            {t.grad_fn for t in given if isinstance(t, torch.Tensor) and t.grad_fn is not None}
        )

    def _claim(self, fqn, output):
        stop = self._inputs.pop()
        pending = [
            t.grad_fn
            for t in (output if isinstance(output, tuple) else (output,))
            if isinstance(t, torch.Tensor)
        ]
        seen = set()
        while pending:
            node = pending.pop()
            if node is None or node in stop or node in seen or "AccumulateGrad" in node.name():
                continue
            seen.add(node)
            self.of.setdefault(node._sequence_nr(), fqn)
            pending += [edge for edge, _ in node.next_functions]


def born_in_nodes(cycle: Cycle) -> list[tuple[int, str, int]]:
    """(sequence number, module key in the trace, bytes) of allocations directly under autograd nodes."""
    found = []
    key_at = {}
    events = cycle.trace.events
    for time, address, module, kind in zip(
        events.time_ns, events.address, events.module, events.kind, strict=True
    ):
        if kind == Kind.ALLOC:
            key_at[int(time), int(address)] = cycle.trace.modules[module].key

    def visit(event, sequence):
        if event.name.startswith(NODE_PREFIX):
            sequence = event.typed[1].sequence_number
        if (
            event.name == "[memory]"
            and event.typed[1].alloc_size > 0
            and sequence is not None
            and sequence >= 0
        ):
            found.append(
                (sequence, key_at[event.start_time_ns, event.typed[1].ptr], event.typed[1].alloc_size)
            )
        for child in event.children:
            visit(child, sequence)

    for root in cycle.tree:
        visit(root, None)
    return found


@pytest.mark.parametrize("name", [name for name in ALL if name not in ("checkpointed", "reentrant")])
def test_backward_bytes_belong_to_the_module_that_made_the_node(name):
    model = ALL[name]()
    graph = GraphOwners(model)
    (cycle,) = train(model)
    checked = [
        (key, graph.of[sequence], size)
        for sequence, key, size in born_in_nodes(cycle)
        if sequence in graph.of
    ]
    assert len(checked) > 10
    assert [row for row in checked if row[0] != row[1]] == []


@pytest.mark.parametrize("name", ALL)
def test_forward_bytes_belong_to_the_innermost_module_frame(name):
    """Python's own frames (`with_stack`) say which module ran; identities say which FQN it has."""
    model = ALL[name]()
    (cycle,) = train(model, with_stack=True)
    names: dict[int, str] = {}
    for fqn, module in model.named_modules():
        names.setdefault(id(module), fqn)
    frames = []

    def visit(event):
        if event.name.startswith("nn.Module: ") and event.typed[1].module is not None:
            frames.append((event.start_time_ns, event.end_time_ns, names[event.typed[1].module.self_ptr]))
        for child in event.children:
            visit(child)

    for root in cycle.tree:
        visit(root)
    frames.sort()
    blocks, checked = cycle.trace.allocations, 0
    for row in np.flatnonzero((blocks.phase == Phase.FORWARD) & (blocks.born >= 0)):
        time = cycle.trace.events.time_ns[blocks.born[row]]
        around = [fqn for start, end, fqn in frames if start <= time < end]
        key = cycle.trace.modules[blocks.module[row]].key
        assert key == around[-1] if around else key.startswith("outside:")
        checked += bool(around)
    assert checked > 10


@pytest.mark.parametrize("name", ["checkpointed", "reentrant"])
def test_recomputed_activations_belong_to_the_recomputing_module(name):
    (cycle,) = train(MODELS[name]())
    blocks = cycle.trace.allocations
    again = np.flatnonzero(blocks.category == Category.RECOMPUTED)
    keys = {cycle.trace.modules[blocks.module[row]].key for row in again}
    assert {"blocks.0.mlp.0", "blocks.1.mlp.0", "blocks.0.qkv", "blocks.1.ln1"} <= keys
    assert not {key for key in keys if not key.startswith("blocks.")}
    assert set(blocks.phase[again]) == {Phase.BACKWARD}


def test_what_no_module_owns_is_named_by_its_operator_in_both_directions():
    (cycle,) = train(CNN())
    blocks = cycle.trace.allocations
    rows = [
        row
        for row in range(len(blocks))
        if cycle.trace.modules[blocks.module[row]].key == "outside:cross_entropy_loss"
    ]
    assert {Phase(blocks.phase[row]) for row in rows} == {Phase.FORWARD, Phase.BACKWARD}


def test_the_roots_own_bytes_have_the_empty_key():
    (cycle,) = train(Twice())
    blocks = cycle.trace.allocations
    own = [
        int(blocks.bytes[row])
        for row in np.flatnonzero(blocks.phase == Phase.FORWARD)
        if cycle.trace.modules[blocks.module[row]].key == "" and blocks.category[row] == Category.ACTIVATION
    ]
    # alias(x) * 2 and the sum, 5 x 20 floats, in each of two steps; the 2 itself is an 8-byte tensor
    assert sorted(own) == [8, 8, 400, 400, 400, 400]


@pytest.mark.parametrize(
    "options",
    [{}, {"record_shapes": True}, {"with_stack": True}, {"with_stack": True, "record_shapes": True}],
)
def test_names_do_not_depend_on_the_profilers_options(options):
    (plain,) = train(Transformer())
    (other,) = train(Transformer(), **options)
    assert _by_module(plain) == _by_module(other)


def _by_module(cycle: Cycle) -> dict[str, int]:
    blocks = cycle.trace.allocations
    keys: dict[str, int] = {}
    for row in range(len(blocks)):
        key = cycle.trace.modules[blocks.module[row]].key
        keys[key] = keys.get(key, 0) + int(blocks.bytes[row])
    return keys


def test_without_a_model_names_come_from_python_frames():
    (cycle,) = train(Transformer(), given=False, with_stack=True)
    blocks = cycle.trace.allocations
    keys = {
        cycle.trace.modules[blocks.module[row]].key for row in np.flatnonzero(blocks.phase == Phase.BACKWARD)
    }
    assert any(key.startswith("Transformer_") and ".Block_" in key and ".Linear_" in key for key in keys)
    state = int(blocks.bytes[blocks.category == Category.OPTIMIZER_STATE].sum())
    assert state >= 0
    gradients = int(blocks.bytes[(blocks.category == Category.GRADIENT)].sum())
    assert gradients > 0


def test_without_a_model_and_stacks_operators_name_everything():
    (cycle,) = train(Transformer(), given=False)
    assert {module.key.partition(":")[0] for module in cycle.trace.modules} <= {"outside", "(not named)"}


def test_two_models_keep_their_names_apart():
    from torch.profiler import ProfilerActivity, profile

    from tb_memplugin.record.profiler.trace import trace_from_profile
    from tb_memplugin.record.profiler.window import WindowRecorder, watch

    first, second = nn.Linear(10, 10), nn.Sequential(nn.Linear(10, 30))
    recorder = WindowRecorder({"gen": first, "disc": second}, [])
    watch(recorder)
    traces = []

    def ready(prof):
        window = recorder.take()
        assert window is not None
        traces.append(trace_from_profile(prof, window))

    with profile(
        activities=[ProfilerActivity.CPU],
        profile_memory=True,
        on_trace_ready=ready,
    ):
        second(first(torch.randn(4, 10))).sum().backward()
    blocks = traces[0].allocations
    held: dict[str, list[int]] = {}
    for row in np.flatnonzero(blocks.phase == Phase.FORWARD):
        held.setdefault(traces[0].modules[blocks.module[row]].key, []).append(int(blocks.bytes[row]))
    assert held["gen"] == [160]
    assert held["disc.0"] == [480]


def test_a_module_of_two_models_has_its_name_in_the_first():
    shared = nn.Linear(20, 3)
    names = ModuleNames.of({"actor": nn.Sequential(shared), "critic": nn.Sequential(shared, nn.ReLU())})
    assert [module.key for module in names.modules] == ["actor", "actor.0", "critic", "critic.1"]
    assert names.row_of[id(shared)] == names.owner_of[id(shared.weight)][0] == 1


def test_a_compiled_region_belongs_to_the_module_that_was_compiled():
    net = CNN()
    compiled = torch.compile(net, backend="aot_eager")
    (cycle,) = train(compiled, batch=CNN.batch, steps=5)
    blocks = cycle.trace.allocations
    rows = np.flatnonzero((blocks.phase == Phase.FORWARD) & (blocks.category == Category.ACTIVATION))
    keys = {cycle.trace.modules[blocks.module[row]].key for row in rows}
    assert keys <= {
        "",
        "outside:cross_entropy_loss",
        "outside:ones_like",
    }  # the loss, and the seed of its gradient
    held = {cycle.trace.modules[row].key for row in cycle.trace.start.module}
    assert {"features.0", "head"} <= held  # parameters keep their FQNs, without `_orig_mod`


def test_a_module_compiled_in_place_is_logged_and_left_as_it_was():
    net = CNN()
    net.features.compile(backend="aot_eager")
    before = net.features._compiled_call_impl
    (cycle,) = train(net, steps=5)
    assert net.features._compiled_call_impl is before
    blocks = cycle.trace.allocations
    keys = {
        cycle.trace.modules[blocks.module[row]].key for row in np.flatnonzero(blocks.phase == Phase.FORWARD)
    }
    assert {"features", "head"} <= keys
    assert "features.0" not in keys


def test_a_function_compiled_around_a_hooked_model_stays_one_graph():
    model, log = CNN(), ModuleRecorder()
    log.start({"": model}, ModuleNames.of({"": model}))
    try:
        compiled = torch.compile(lambda x: model(x) * 2, backend="eager", fullgraph=True)
        found = compiled(torch.ones(1, 3, 16, 16))
    finally:
        log.stop()
    assert log.log == []  # nothing of the graph is a call in Python
    assert torch.allclose(found, model(torch.ones(1, 3, 16, 16)) * 2)


def test_a_module_call_adds_thirteen_events_to_a_profile_with_stacks():
    import torch._dynamo  # noqa: F401  # as every optimizer does; without it `_watchers_of` and `look` are called

    model, log = nn.Identity(), ModuleRecorder()
    log.start({"": model}, ModuleNames.of({"": model}))
    with profile(activities=[ProfilerActivity.CPU], with_stack=True) as recorded:
        model(None)
    log.stop()
    pending, ours = list(recorded.profiler.kineto_results.experimental_event_tree()), 0
    while pending:
        event = pending.pop()
        names = [
            one.name for one in (event, event.parent) if one is not None and "nn/modules" not in event.name
        ]
        beside = "nn/modules" in event.name  # what the watched call calls is the module's own
        ours += not beside and any(
            f"tb_memplugin/record/{file}" in name for file in ("module", "guard") for name in names
        )
        pending += event.children
    begins = ["enter", "_call_of", "_getframe", "id", "get", "_begin", "entered", "next", "append"]
    assert ours == len([*begins, "__del__", "left", "next", "append"])
    assert len(log.log) == 2


def test_modules_called_on_other_threads_do_not_disturb_the_names():
    model = CNN()
    stop = threading.Event()

    def elsewhere():
        other_input = torch.randn(1, 3, 16, 16)
        with torch.no_grad():
            while not stop.is_set():
                model.features(other_input)

    worker = threading.Thread(target=elsewhere)
    worker.start()
    try:
        (busy,) = train(model)
    finally:
        stop.set()
        worker.join()
    (quiet,) = train(CNN())
    assert _forward(busy) == _forward(quiet)


def _forward(cycle: Cycle) -> dict[str, list[int]]:
    blocks = cycle.trace.allocations
    held: dict[str, list[int]] = {}
    for row in np.flatnonzero((blocks.phase == Phase.FORWARD) & (blocks.category == Category.ACTIVATION)):
        held.setdefault(cycle.trace.modules[blocks.module[row]].key, []).append(int(blocks.bytes[row]))
    return held


def test_optimizer_state_and_temporaries_belong_to_the_parameters_owner():
    (cycle,) = train(
        LSTM(),
        steps=3,
        plan=lambda step: (
            torch.profiler.ProfilerAction.RECORD_AND_SAVE if step == 0 else torch.profiler.ProfilerAction.NONE
        ),
    )
    blocks = cycle.trace.allocations
    owner: dict[str, dict[str, list[int]]] = {}
    for row in np.flatnonzero(blocks.phase == Phase.OPTIMIZER):
        key = cycle.trace.modules[blocks.module[row]].key
        owner.setdefault(key, {}).setdefault(Category(blocks.category[row]).key, []).append(
            int(blocks.bytes[row])
        )
    weights = [p.nbytes for p in LSTM().lstm.parameters()]
    assert sum(owner["lstm"]["optimizer_state"]) == 2 * sum(weights) + 4 * len(weights)
    assert sum(owner["lstm"]["temporary"]) >= 2 * sum(weights)


def test_a_gradient_belongs_to_its_parameters_owner_before_a_window_and_in_it():
    class Attending(nn.Module):
        """Its attention uses the weights of `out_proj`, which is never called."""

        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2)

        def forward(self, x):
            return self.attention(x, x, x)[0]

        @staticmethod
        def batch():
            return torch.randn(4, 2, 8), torch.randint(0, 2, (4, 8))

    (cycle,) = train(Attending())
    blocks = cycle.trace.allocations
    owners = {
        (cycle.trace.labels[blocks.label[row]], cycle.trace.modules[blocks.module[row]].key)
        for row in np.flatnonzero(blocks.category == Category.GRADIENT)
    }
    assert owners == {
        (f"attention.{name} (gradient)", f"attention.{name}".rpartition(".")[0])
        for name in ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")
    }
    assert {int(born < 0) for born in blocks.born[blocks.category == Category.GRADIENT]} == {0, 1}


def test_functional_calls_inside_a_module_belong_to_it():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(30, 10))

        def forward(self, x):
            return F.linear(x, self.weight).softmax(-1)

        @staticmethod
        def batch():
            return torch.randn(4, 10), torch.randint(0, 30, (4,))

    (cycle,) = train(Mixed())
    blocks = cycle.trace.allocations
    keys = {
        cycle.trace.modules[blocks.module[row]].key
        for row in np.flatnonzero(blocks.operator >= 0)
        if cycle.trace.operators[blocks.operator[row]]
        in ("aten::linear", "aten::softmax", "MmBackward0", "SoftmaxBackward0")
    }
    assert keys == {""}
