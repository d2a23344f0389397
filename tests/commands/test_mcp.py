"""`tb-memplugin mcp`: each answer in bytes that a person can add up, and the real client over stdio."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tb_memplugin.commands.mcp import RecordingTools
from tb_memplugin.errors import MemPluginError
from tb_memplugin.store.writer import StepsWriter
from tests.commands.files import refused, run, step_snapshot, write
from tests.commands.test_apart import ENDLESS
from tests.step_figures import figures


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The file one.pickle peaks at 390 bytes: 300 of the forward and 90 of the optimizer. Rank 1 at 490."""
    root = tmp_path / "root"
    write(root / "one.pickle", step_snapshot())
    ranks = [write(tmp_path / f"rank{rank}.pickle", step_snapshot(300 + 100 * rank)) for rank in (0, 1)]
    assert run("import", *ranks, "--logdir", root / "runs", "--run", "job").exit_code == 0
    return root


@pytest.fixture
def tools(root: Path) -> RecordingTools:
    return RecordingTools(root)


def parts(answer: Any) -> dict[str, tuple[int, int]]:
    return {part.key: (part.bytes, part.blocks) for part in answer.parts}


def test_recordings_are_listed_with_paths_for_the_other_tools(tools: RecordingTools) -> None:
    answer = tools.recordings()
    assert [(each.path, each.worker, each.recorded_steps, each.peak_bytes) for each in answer.runs] == [
        ("runs/job/rank0", "rank0", [0], {"cuda:0": 390}),
        ("runs/job/rank1", "rank1", [0], {"cuda:0": 490}),
    ]
    assert [each.path for each in answer.files] == ["one.pickle"]


def test_the_parts_of_the_peak_sum_to_it(tools: RecordingTools) -> None:
    answer = tools.peak("one.pickle", "line")
    assert (answer.device, answer.event, answer.events, answer.bytes) == ("cuda:0", 1, 4, 390)
    assert parts(answer) == {"model.py:7 (forward)": (300, 1), "optim.py:3 (step)": (90, 1)}
    assert parts(tools.peak("one.pickle", "line", top=1)) == {
        "model.py:7 (forward)": (300, 1),
        "(rest)": (90, 1),
    }
    assert [block.bytes for block in answer.largest] == [300, 90]


def test_of_a_folder_the_highest_worker_is_taken(tools: RecordingTools) -> None:
    assert (tools.peak("runs").source, tools.peak("runs").bytes) == ("runs/job/rank1", 490)
    assert tools.peak("runs", worker="rank0").bytes == 390


def test_any_moment_can_be_asked_for(tools: RecordingTools) -> None:
    assert [tools.moment("one.pickle", event).bytes for event in range(-1, 4)] == [0, 300, 390, 390, 300]
    with pytest.raises(MemPluginError, match="There is no event 4"):
        tools.moment("one.pickle", 4)


def test_steps_of_a_recording(tools: RecordingTools) -> None:
    answer = tools.steps("one.pickle")
    assert (answer.measured_by, answer.steps) == ("recording", 1)
    assert asdict(answer.rows[0]) == {
        "step": 0,
        "peak_bytes": 390,
        "is_lower_bound": False,
        "end_bytes": 300,
        "peak_reserved_bytes": 2 << 20,
    }


def test_steps_that_a_monitor_watched(root: Path, tools: RecordingTools) -> None:
    writer = StepsWriter(str(root / "watched"), "w", 0, "2.13", lambda _: None)
    writer.write(figures([100, 400, 200, 300]))
    writer.close()
    answer = tools.steps("watched", first=2, count=1)
    assert (answer.measured_by, answer.steps, answer.highest.step) == ("monitor", 4, 1)
    assert [(row.step, row.peak_bytes, row.peak_reserved_bytes) for row in answer.rows] == [(2, 200, 400)]
    assert "cuda:0, growth" in " ".join([*tools.advice("watched").fine, *tools.advice("watched").not_judged])


def test_a_comparison_sums_to_the_difference(tools: RecordingTools) -> None:
    (device,) = tools.compare("one.pickle", "runs/job/rank1", "line").devices
    assert (device.base_peak_bytes, device.other_peak_bytes, device.delta_bytes) == (390, 490, 100)
    assert [(row.key, row.status, row.delta_bytes) for row in device.rows] == [
        ("model.py:7 (forward)", "grown", 100),
        ("optim.py:3 (step)", "same", 0),
    ]


def test_advice_says_what_every_rule_saw(tools: RecordingTools) -> None:
    from tb_memplugin.analysis.advice_rules import RULES

    answer = tools.advice("one.pickle")
    judged = len(answer.findings) + len(answer.fine) + len(answer.not_judged)
    assert judged == len(RULES)


def outside(root: Path) -> list[str]:
    (root.parent / "secret.pickle").write_bytes(pickle.dumps(step_snapshot()))
    (root / "link.pickle").symlink_to(root.parent / "secret.pickle")
    (root / "up").symlink_to(root.parent)
    (root / "loop").symlink_to(root / "loop")
    return [
        *("../secret.pickle", str(root.parent / "secret.pickle"), "link.pickle", "up/secret.pickle", "loop"),
        *("one.pickle\0", "runs/../../secret.pickle", "file:///etc/passwd", "s3://bucket/x", "-", ""),
    ]


def test_nothing_outside_of_the_root_is_read(root: Path, tools: RecordingTools) -> None:
    for path in outside(root)[:-1]:
        with pytest.raises(MemPluginError, match=r"outside of the folder|no such file or folder"):
            tools.peak(path)
    assert [each.path for each in tools.recordings().files] == ["one.pickle"]


def test_a_file_that_hangs_a_reader_is_refused(
    root: Path, tools: RecordingTools, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TB_MEMPLUGIN_LIMIT_SECONDS", "1")
    (root / "hangs.pickle").write_bytes(ENDLESS)
    with pytest.raises(MemPluginError, match="takes far too long"):
        tools.peak("hangs.pickle")


def test_names_are_short_and_printable(root: Path, tools: RecordingTools) -> None:
    snapshot = step_snapshot()
    snapshot["device_traces"][0][0]["frames"] = [
        {"filename": "\x1b[2J" + "a" * 1000, "name": "f", "line": 1} for _ in range(100)
    ]
    write(root / "hostile.pickle", snapshot)
    answer = tools.peak("hostile.pickle", "stack")
    key = answer.parts[0].key
    assert "\x1b" not in key
    assert len(key) < 13 * 301
    assert key.endswith("… 88 more")


def test_a_file_that_changed_is_read_again(root: Path, tools: RecordingTools) -> None:
    assert tools.peak("one.pickle").bytes == 390
    write(root / "one.pickle", step_snapshot(3000))
    assert tools.peak("one.pickle").bytes == 3090


def test_without_the_sdk_it_says_what_to_install(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    message = refused("mcp", "--root", root)
    assert "mcp is not installed" in message
    assert "pip install 'tb-memplugin[mcp]'" in message


def test_a_root_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    assert "There is no such folder" in refused("mcp", "--root", tmp_path / "absent")


def asked(root: Path, talk: Callable[[Any], Any]) -> Any:
    """Start the command as an agent does, and talk to it with the SDK's client."""
    mcp = pytest.importorskip("mcp")

    async def talking() -> Any:
        program = mcp.StdioServerParameters(
            command=sys.executable,
            args=["-m", "tb_memplugin", "mcp", "--root", str(root)],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )
        async with mcp.Client(mcp.stdio_client(program)) as client:
            return await talk(client)

    return asyncio.run(asyncio.wait_for(talking(), 120))


def test_the_real_client_lists_the_tools_with_their_types(root: Path) -> None:
    listed = asked(root, lambda client: client.list_tools()).tools
    assert [tool.name for tool in listed] == ["recordings", "peak", "moment", "steps", "advice", "compare"]
    assert all(tool.annotations.read_only_hint for tool in listed)
    schema = next(tool for tool in listed if tool.name == "peak")
    assert "module" in json.dumps(schema.input_schema["properties"]["by"])
    assert schema.output_schema["properties"]["bytes"]["type"] == "integer"


def test_the_real_client_gets_the_answer_of_the_tool(root: Path, tools: RecordingTools) -> None:
    async def talk(client: Any) -> Any:
        return [
            await client.call_tool("peak", {"path": "one.pickle", "by": "line"}),
            await client.call_tool("recordings", {}),
            await client.call_tool("peak", {"path": "../secret.pickle"}),
            await client.call_tool("peak", {"path": "one.pickle", "by": "colour"}),
            await client.call_tool("peak", {"path": "runs/job", "rank": "rank0", "by": "line"}),
        ]

    peak, recordings, outside, wrong, misspelt = asked(root, talk)
    assert misspelt.is_error
    assert misspelt.content[0].text.endswith(
        "There is no such argument.\n  where: peak rank\n"
        "  fix: Choose from: path, by, device, step, worker, top"
    )
    assert peak.structured_content == asdict(tools.peak("one.pickle", "line"))
    assert recordings.structured_content == asdict(tools.recordings())
    assert outside.is_error
    assert wrong.is_error
    assert "There is no such file or folder" in outside.content[0].text
    assert str(root) not in outside.content[0].text
