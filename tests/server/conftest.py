import pytest

from tb_memplugin.store.writer import RunWriter
from tb_memplugin.trace import Note
from tests.server.tab import Tab
from tests.traces import trace

BASELINE = trace(
    "start 400 w category=parameter module=layer label=layer.weight",
    "step 5",
    "alloc 100 a module=layer category=activation phase=forward operator=aten::mm",
    "alloc 20 b module=layer.inner category=temporary phase=forward operator=aten::relu",
    "free b phase=forward",
    "alloc 60 g module=layer category=gradient phase=backward operator=aten::mm",
    "free a phase=backward",
    "step 6",
    "alloc 7 s phase=optimizer operator=aten::add category=optimizer_state",
    calls=[("layer", 0, 2, "forward"), ("layer.inner", 1, 2, "forward"), ("layer", 3, 4, "backward")],
    notes=(Note("Something is not exact.", "unseen_frees", 60, device="cpu"),),
    properties={"torch": "2.13.0"},
)
"""Step 5 peaks at 560 bytes after its fourth event; step 6 at 467."""

BIGGER = trace(
    "start 400 w category=parameter module=layer label=layer.weight",
    "step 5",
    "alloc 200 a module=layer category=activation phase=forward operator=aten::mm",
    "alloc 50 n module=added category=activation phase=forward operator=aten::mm",
    "alloc 64 k device=cuda:0 reserved=2048 module=layer category=workspace",
)
"""Step 5 peaks at 650 bytes on the CPU, and at 64 on cuda:0."""


@pytest.fixture
def logdir(tmp_path):
    RunWriter(str(tmp_path / "demo" / "baseline"), "rank0").write(BASELINE)
    RunWriter(str(tmp_path / "demo" / "bigger"), "rank0").write(BIGGER)
    return tmp_path


@pytest.fixture
def tab(logdir):
    return Tab(logdir)


@pytest.fixture
def baseline():
    return {"run": "demo/baseline", "worker": "rank0", "step": 5, "device": "cpu"}


@pytest.fixture
def bigger():
    return {"run": "demo/bigger", "worker": "rank0", "step": 5, "device": "cpu"}


@pytest.fixture
def side_file(logdir):
    return logdir / "demo/baseline/rank0/plugins/tb_memplugin/window-000000.mem"
