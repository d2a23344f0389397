"""No pickle runs code here, and the message names what it asked for."""

from __future__ import annotations

import codecs
import copyreg
import datetime as dt
import functools
import gc
import importlib
import io
import os
import pickle
import struct
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path, PureWindowsPath
from typing import Any

import numpy as np
import pytest

from tb_memplugin.errors import UnreadableFileError
from tb_memplugin.read.snapshot import safe_pickle
from tests.snapshots import load_plain

PLAIN: dict[str, Any] = {
    "segments": [{"device": 0, "pool": (0, 0), "big": 1 << 80, "path": "C:\\run\\train.py", "none": None}],
    "data": [b"bytes", bytearray(b"more"), 1.5, True, {1, 2}, frozenset({3}), "é\ud800"],
}


class Calls:
    """Pickled as a call; unpickled with pickle.load it would run."""

    def __init__(self, function: Callable[..., Any], *arguments: Any, more: tuple[Any, ...] = ()) -> None:
        self.reduced = (function, arguments, *more)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.reduced


def text_call(module: str, name: str, argument: str) -> bytes:
    return f"c{module}\n{name}\n(V{argument}\ntR.".encode()


def touching(path: Path) -> dict[str, tuple[bytes, str]]:
    """Pickles that would create `path`, and the name that each message must tell."""
    shell, code = f"touch {path}", f"open({str(path)!r}, 'w')"
    system, run = Calls(os.system, shell), Calls(eval, code)
    text = b"X" + struct.pack("<I", len(shell)) + shell.encode()
    forms: dict[str, tuple[Any, str]] = {
        "os.system": (system, f"{os.name}.system"),
        "eval": (run, "builtins.eval"),
        "exec": (Calls(exec, code), "builtins.exec"),
        "open": (Calls(open, str(path), "w"), "io.open"),
        "getattr": (Calls(getattr, "", "upper"), "builtins.getattr"),
        "__import__": (Calls(__import__, "this"), "builtins.__import__"),
        "compile": (Calls(compile, code, "f", "exec"), "builtins.compile"),
        "subprocess.run": (Calls(subprocess.run, ["touch", str(path)]), "subprocess.run"),
        "subprocess.Popen": (Calls(subprocess.Popen, ["touch", str(path)]), "subprocess.Popen"),
        "functools.partial": (functools.partial(os.system, shell), "functools.partial"),
        "importlib": (Calls(importlib.import_module, "this"), "importlib.import_module"),
        "codecs": (Calls(codecs.encode, "x", "rot13"), "_codecs.encode"),
        "copyreg.add_extension": (
            Calls(copyreg.add_extension, "os", "system", 7),
            "copyreg.add_extension",
        ),
        "pickle.loads": (Calls(pickle.loads, pickle.dumps(system)), "_pickle.loads"),
        "numpy scalar": (np.int64(3), "scalar"),
        "numpy array": (np.arange(3), "_reconstruct"),
        "a datetime": (dt.timedelta(1), "datetime.timedelta"),
        "a fraction": (Fraction(1, 3), "fractions.Fraction"),
        "a path": (PureWindowsPath("C:\\x"), "PureWindowsPath"),
        "a class alone": (subprocess.Popen, "subprocess.Popen"),
        "in a list": ([1, [2, [system]]], "system"),
        "in a dict's value": ({"segments": [], "device_traces": {"a": system}}, "system"),
        "in a dict's key": ({(1, run): 2}, "builtins.eval"),
        "in a tuple": ((1, (2, run)), "builtins.eval"),
        "with state": (Calls(run.reduced[0], code, more=({"a": 1},)), "builtins.eval"),
        "with list items": (Calls(list, more=(None, iter([system]))), "builtins.list"),
        "shared by memo": ([run, run], "builtins.eval"),
    }
    raw: dict[str, tuple[bytes, str]] = {
        "GLOBAL": (text_call("os", "system", shell), "os.system"),
        "GLOBAL posix": (text_call("posix", "system", shell), "posix.system"),
        "GLOBAL of python 2": (text_call("__builtin__", "eval", code), "eval"),
        "GLOBAL commands": (text_call("commands", "getoutput", shell), "getoutput"),
        "GLOBAL dotted": (text_call("os", "path.os.system", shell), "os.path.os.system"),
        "INST": (f"(V{shell}\nios\nsystem\n.".encode(), "os.system"),
        "OBJ": (f"(cos\nsystem\nV{shell}\no.".encode(), "os.system"),
        "STACK_GLOBAL": (b"\x80\x04\x8c\x02os\x8c\x06system\x93" + text + b"\x85R.", "os.system"),
        "STACK_GLOBAL from the memo": (
            b"\x80\x04\x8c\x02os\x94\x8c\x06system\x9400h\x00h\x01\x93)R.",
            "os.system",
        ),
        "NEWOBJ": (b"\x80\x02csubprocess\nPopen\n)\x81.", "subprocess.Popen"),
        "NEWOBJ_EX": (b"\x80\x04\x8c\nsubprocess\x8c\x05Popen\x93)}\x92.", "subprocess.Popen"),
        "BUILD": (b"\x80\x02cos\n_wrap_close\n)\x81}b.", "os._wrap_close"),
        "behind a POP": (b"\x80\x02cos\nsystem\n0N.", "os.system"),
        "behind a memo and a mark": (b"\x80\x02(cos\nsystem\nq\x01h\x01\x31N.", "os.system"),
        "persistent id, text": (b"Psecret-id\n.", "secret-id"),
        "persistent id, binary": (b"\x80\x02U\x09secret-idQ.", "secret-id"),
        "persistent id, no text": (b"\x80\x02(K\x01K\x02tQ.", "tuple"),
    }
    made = {name: (pickle.dumps(value, 4), told) for name, (value, told) in forms.items()}
    return made | raw


NAMES = sorted(touching(Path("x")))


@pytest.mark.parametrize("name", NAMES)
def test_nothing_runs_and_the_global_is_named(name: str, tmp_path: Path) -> None:
    witness = tmp_path / "w"
    data, told = touching(witness)[name]
    with pytest.raises(UnreadableFileError) as caught:
        load_plain(data, "a.pickle")
    assert not witness.exists()
    assert told in caught.value.what
    assert "refused" in caught.value.what
    assert caught.value.where == "a.pickle"
    assert caught.value.fix


def test_there_are_enough_hostile_forms() -> None:
    assert len(NAMES) >= 30


def test_the_witness_would_be_made_by_a_bare_load(tmp_path: Path) -> None:
    for name in ("os.system", "eval", "GLOBAL", "INST", "OBJ", "STACK_GLOBAL"):
        witness = tmp_path / name
        pickle.loads(touching(witness)[name][0])
        assert witness.exists()


@pytest.mark.parametrize("protocol", range(2, 6))
@pytest.mark.parametrize("value", [os.system, eval, Fraction(1, 2), functools.partial(eval, "1")])
def test_every_protocol_is_refused_alike(protocol: int, value: object) -> None:
    with pytest.raises(UnreadableFileError, match="asks for the global"):
        load_plain(pickle.dumps(value, protocol), "a.pickle")


@pytest.mark.parametrize("opcode", [b"\x82\xf0", b"\x83\xf0\x00", b"\x84\xf0\x00\x00\x00"])
def test_extension_codes_are_refused_even_where_the_process_knows_them(opcode: bytes) -> None:
    data = b"\x80\x02" + opcode + b"."
    with pytest.raises(UnreadableFileError, match="extension code 240"):
        load_plain(data, "a.pickle")
    copyreg.add_extension("os", "system", 0xF0)
    try:
        assert pickle.loads(data) is os.system  # and now the process holds it in its cache
        with pytest.raises(UnreadableFileError, match=r"os\.system"):
            load_plain(data, "a.pickle")
    finally:
        copyreg.remove_extension("os", "system", 0xF0)


def test_a_refused_module_is_not_even_imported() -> None:
    with pytest.raises(UnreadableFileError, match=r"antigravity\.x"):
        load_plain(b"cantigravity\nx\n.", "a.pickle")
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize(
    "data", [b"N)R.", b"\x80\x02N)\x81.", b"N}K\x01K\x02sb.", b"\x80\x05\x97.", b"h\x07.", b"."]
)
def test_opcodes_that_have_nothing_to_work_on_are_damage(data: bytes) -> None:
    with pytest.raises(UnreadableFileError, match="damaged"):
        load_plain(data, "a.pickle")


@pytest.mark.parametrize("protocol", range(6))
def test_plain_data_comes_back_equal(protocol: int) -> None:
    plain = PLAIN if protocol >= 4 else {"segments": PLAIN["segments"]}  # sets are globals before 4
    if protocol == 4:
        plain = {"data": [item for item in PLAIN["data"] if not isinstance(item, bytearray)]}
    assert load_plain(pickle.dumps(plain, protocol), "a.pickle") == plain


def test_a_stream_is_read_from_where_it_stands() -> None:
    stream = io.BytesIO(b"head" + pickle.dumps(PLAIN, 5))
    stream.seek(4)
    assert load_plain(stream, "a.pickle") == PLAIN


def test_more_than_one_chunk_is_read_across_its_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tb_memplugin.read.snapshot.pickle_reader.CHUNK_BYTES", 7)
    for protocol in range(6):
        plain = [{"name": f"frame {number}", "line": number * 10**number} for number in range(40)]
        assert load_plain(pickle.dumps(plain, protocol), "a.pickle") == plain


HUGE = 1 << 62


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04\x95" + struct.pack("<Q", HUGE) + b"N.",
        b"\x80\x04\x8d" + struct.pack("<Q", HUGE) + b"abc.",
        b"\x80\x02X" + struct.pack("<I", (1 << 32) - 1) + b"abc.",
        b"\x80\x02T" + struct.pack("<i", (1 << 31) - 1) + b"abc.",
        b"\x80\x02\x8b" + struct.pack("<i", (1 << 31) - 1) + b"abc.",
        b"\x80\x04\x8e" + struct.pack("<Q", HUGE) + b"abc.",
        b"\x80\x05\x96" + struct.pack("<Q", HUGE) + b"abc.",
        b"\x80\x04\x8e" + struct.pack("<Q", (1 << 64) - 1) + b"abc.",
    ],
    ids=[
        "FRAME",
        "BINUNICODE8",
        "BINUNICODE",
        "BINSTRING",
        "LONG4",
        "BINBYTES8",
        "BYTEARRAY8",
        "beyond 64 bits",
    ],
)
def test_a_size_beyond_the_file_is_a_clear_error(data: bytes) -> None:
    with pytest.raises(UnreadableFileError):
        load_plain(data, "a.pickle")


def test_empty_is_told() -> None:
    with pytest.raises(UnreadableFileError, match="empty"):
        load_plain(b"", "a.pickle")


@pytest.mark.parametrize("data", [b'{"segments": []}', b"\x1f\x8b\x08\x00", b"PK\x03\x04", b"\x80\x09N."])
def test_what_is_no_pickle_is_told(data: bytes) -> None:
    with pytest.raises(UnreadableFileError, match="not a pickle"):
        load_plain(data, "a.pickle")


def test_every_truncation_is_a_clear_error() -> None:
    for protocol in (2, 4, 5):
        data = pickle.dumps({"segments": [{"a": 1 << 40, "b": "text" * 30, "c": b"x" * 300}] * 3}, protocol)
        for length in range(len(data)):
            with pytest.raises(UnreadableFileError):
                load_plain(data[:length], "a.pickle")


def test_the_collector_is_as_it_was() -> None:
    assert gc.isenabled()
    load_plain(pickle.dumps(1), "a.pickle")
    assert gc.isenabled()
    gc.disable()
    try:
        load_plain(pickle.dumps(1), "a.pickle")
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_pickle_that_needs_more_memory_than_was_free_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safe_pickle, "free_bytes", lambda: -1)
    with pytest.raises(UnreadableFileError, match="needs more memory than there is"):
        load_plain(pickle.dumps(PLAIN, 5), "a.pickle")
