"""Files appear whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tb_memplugin.errors import MemPluginError
from tb_memplugin.exports.output import at_most, replacing


def names(folder):
    return [path.name for path in folder.iterdir()]


def test_a_file_appears_when_it_is_whole(tmp_path):
    target = tmp_path / "out.json"
    target.write_text("old")
    with replacing(target) as stream:
        stream.write(b"new")
        stream.flush()
        assert target.read_text() == "old"
    assert target.read_text() == "new"
    assert names(tmp_path) == ["out.json"]


def test_a_failure_leaves_the_old_file_and_no_other(tmp_path):
    target = tmp_path / "out.json"
    target.write_text("old")
    with pytest.raises(UnicodeEncodeError), replacing(target) as stream:
        stream.writelines(text.encode("ascii") for text in ("half", "é"))
    assert target.read_text() == "old"
    assert names(tmp_path) == ["out.json"]


def test_a_file_that_would_be_too_large_is_refused_and_the_old_one_stays(tmp_path):
    target = tmp_path / "out.csv"
    with at_most(20_000, "Do without."):
        with replacing(target) as stream:
            stream.writelines([b"x" * 999 + b"\n"] * 20)
        with pytest.raises(MemPluginError, match="than 20,000 bytes") as told, replacing(target) as stream:
            stream.writelines([b"x" * 999 + b"\n"] * 20 + [b"y"])
        with replacing("/dev/null") as stream:
            stream.write(bytes(20_001))
    assert (told.value.where, told.value.fix) == (str(target), "Do without.")
    assert target.stat().st_size == 20_000
    assert names(tmp_path) == ["out.csv"]
    with replacing(target) as stream:
        stream.write(bytes(20_001))
    assert target.stat().st_size == 20_001


def test_the_root_folder_is_no_place_either():
    with pytest.raises(MemPluginError, match="it is a folder"), replacing("/"):
        pass


@pytest.mark.parametrize("place", ["absent/out.json", "", "file/out.json", "x" * 300 + "/out.json"])
def test_a_place_that_cannot_be_written_is_told(tmp_path, place):
    (tmp_path / "file").write_text("a file, no folder")
    with pytest.raises(MemPluginError, match="cannot be written") as told, replacing(tmp_path / place):
        pass
    assert told.value.where == str(tmp_path / place)
    assert "Choose another file" in told.value.fix


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with replacing(tmp_path / "link") as stream:
        stream.write(b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"


def test_a_device_is_written_to_and_stays_one():
    with replacing("/dev/null") as stream:
        stream.write(b"gone")
    assert not Path("/dev/null").is_file()


def test_where_it_is_not_known_whether_a_device_is_there_nothing_is_replaced(tmp_path, monkeypatch):
    def stale(*_, **__):
        raise OSError(116, "Stale file handle")

    (tmp_path / "device").write_text("stands for a device")
    with monkeypatch.context() as patched:
        patched.setattr("os.stat", stale)
        with pytest.raises(MemPluginError, match="Stale file handle"), replacing(tmp_path / "device"):
            pass
    assert (tmp_path / "device").read_text() == "stands for a device"
