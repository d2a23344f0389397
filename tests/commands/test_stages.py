import pytest

from tests.commands.files import real, refused, run, step_snapshot, stranger, told, write


def annotated(*rows):
    """`name stage time in µs`, on device 0."""
    found = [row.split() for row in rows]
    return [{"name": name, "stage": stage, "device": 0, "time_us": int(time)} for name, stage, time in found]


@pytest.fixture
def step(tmp_path):
    notes = annotated(
        "outer START 5", "inner START 10", "inner END 10", "inner START 30", "inner END 30", "outer END 35"
    )
    return write(tmp_path / "step.pickle", step_snapshot(external_annotations=notes))


def test_the_bytes_at_every_beginning_and_end(step):
    found = told("stages", step)["stages"]
    assert [(stage["key"], stage["bytes"]) for stage in found] == [
        ("outer_START", 300),
        ("inner_START", 390),
        ("inner_END", 390),
        ("inner_START(1)", 300),
        ("inner_END(1)", 300),
        ("outer_END", 300),
    ]
    assert found[0] == {
        "key": "outer_START",
        "name": "outer",
        "stage": "START",
        "device": "cuda:0",
        "time_ns": 5_000,
        "bytes": 300,
    }


@pytest.mark.parametrize(
    "asked", [("--annotation", "inner", "outer"), ("--annotation", "inner", "--annotation", "outer")]
)
def test_several_names_one_way_or_the_other(step, asked):
    assert len(told("stages", step, *asked)["stages"]) == 6
    assert len(told("stages", step, *asked[:2])["stages"]) == 4


def test_a_device_can_be_chosen(step):
    assert len(told("stages", step, "--device", "cuda:0")["stages"]) == 6
    assert "cuda:3" in refused("stages", step, "--device", "cuda:3")


def test_people_get_a_row_a_stage(step, tmp_path):
    assert "inner_START(1)" in run("stages", step).stdout
    bare = write(tmp_path / "bare.pickle", step_snapshot())
    assert "has no annotations" in run("stages", bare).stdout
    assert told("stages", bare) == {"stages": []}


def test_a_name_that_is_not_there_is_refused_with_those_that_are(step):
    assert "Choose from: outer, inner" in refused("stages", step, "--annotation", "other")
    assert "One file at a time" in refused("stages", step, step)


@real
def test_real_stages_as_mosaic_gives_them_where_mosaic_is_right():
    found = told("stages", stranger("snapshots/01*"), "--device", "cuda:0")["stages"]
    assert {stage["key"]: stage["bytes"] for stage in found} == {
        f"{name}_{stage}": 2634772736
        for name in (
            "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__",
            "Optimizer.zero_grad#AdamW.zero_grad",
        )
        for stage in ("START", "END")
    }
