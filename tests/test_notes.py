"""Every note on a recording tells its bytes: each sentence that can become one has a number of them.

Found are all sentences in the modules that write notes, but those of errors, of logs and of docstrings. A new
one without bytes fails here, unless `WITHOUT_BYTES` gives a reason.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import tb_memplugin

PACKAGE = Path(tb_memplugin.__file__).parent

WRITERS = (
    "read/**/*.py",
    "record/**/*.py",
    "loading.py",
    "simulator/simulated_trace.py",
    "trace/step_figures.py",
)
"""The modules that write notes of recordings."""

WITH_MESSAGES = ("arguments", "line_tracer", "memory_tracer", "monitor", "oom")
"""Modules of `record/` whose sentences are messages to a user, no notes."""

NO_WRITERS = {
    "store/windows.py": "reads back what was written",
    "estimate/run/fake_recording.py": "an estimate records nothing",
    "dryrun/engine.py": "its notes are those of an estimate",
}

BYTES = re.compile(r"\{[^}]*\} (\w+ )?bytes")

FILE = "the file is whole: it is about its form, and what no value can be read for has notes of its own"
NAMES = "only names are missing or others; all bytes are counted, with their modules and operators"
STEPS = "only the numbers or edges of steps; all bytes are in the window"
ADDED = "it says what else the recording has; nothing is missing"
REPORT = "a figure that the report leaves out, and shows as left out or as a bound in bytes"
ERROR = "part of an error's message"

WITHOUT_BYTES = {
    "The file contains {} infinities or NaNs": FILE,
    "{}, the first {}: the last value of each is used.": FILE,
    "{} labels, compile contexts or names of annotations": NAMES,
    "{} annotations have no known device, stage or time": NAMES,
    "The snapshot contains the steps of several profiles": STEPS,
    "Call stacks show modules, but {} distinct ones": NAMES,
    "The profile has several steps {}": STEPS,
    "{} {} written twice, after an error of the file system.": STEPS,
    "The profile has no steps": STEPS,
    "Step {} did not end": STEPS,
    "The trace has no steps": STEPS,
    "{}: the snapshot tells no times": "only times are missing; the bytes after each entry are exact",
    "The snapshot is empty": "there is no memory in it",
    "The file does not name its device": NAMES,
    "No {} device was in use when this window began": "the profile has all bytes",
    "The allocator's history of {} could not be recorded": "the same",
    "Memory that kernels allocate and free within an operator": "no counter of these devices tells it",
    "The block ended on another thread": "it is about a mode that stays; no bytes are missing",
    "{} has the highest peak of {} windows.": ADDED,
    "Iteration {} of epoch {}.": ADDED,
    "Epoch {}: {}, {} reported": ADDED,
    "{}: addresses, segments and reserved memory are simulated": ADDED,
    "{} tensors that were alive before have no memory": "they have no bytes",
    "The program has set {} objects aside": "only a counter of the allocator has their bytes",
    "The model no longer exists, so its weights": REPORT,
    "This version of torch cannot reset the allocator's peak counters": REPORT,
    "The model is compiled ({}). Following every storage": REPORT,
    "The cached memory is not known. {}": REPORT,
    "Recording at {} failed": "`_open_problems` adds the bytes that only the whole trace tells",
    "{} model(s) given to memory_trace_handler no longer exist": "the same",
    "The handler was unpickled without": ERROR,
    "{} ({}: {}). The training continues without it.": ERROR,
    "The allocator's history could not be read": ERROR,
    "PyTorch {} has no `{}`": ERROR,
    "The gzip file is": ERROR,
    "The gzip file consists of": ERROR,
    "The JSON ends too early": ERROR,
    "The JSON is damaged": ERROR,
    "The file is empty.": ERROR,
    "The file is not a pickle": ERROR,
}
"""Beginning of a note without bytes -> why it has none."""


def text_of(node: ast.expr) -> str | None:
    """Return the text of a string or a sum of strings, with `{}` for what is put in; None for others."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(text_of(part) or "{}" for part in values)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            both = text_of(left), text_of(right)
            return None if both == (None, None) else "".join(part or "{}" for part in both)
    return None


def strings(node: ast.AST) -> Iterator[str]:
    """Yield the strings below a node that can become notes: not docstrings, nor what is raised or logged."""
    match node:
        case ast.Raise() | ast.Assert() | ast.Expr(value=ast.Constant()):
            return
        case ast.Call(func=function) if re.search(r"logger|Error$", ast.unparse(function)):
            return
        case ast.Assign(targets=[ast.Name(id=name)]) if re.search(r"FIX|RECORD|READABLE", name):
            return  # what errors tell to do
        case ast.keyword(arg="fix"):
            return
        case ast.Call(func=ast.Name(id="Note"), args=[first, *_]) if (note := text_of(first)) and note[
            0
        ].islower():
            yield f"{{}}: {note}"  # the device's name is put before it
            return
    text = text_of(node) if isinstance(node, ast.expr) else None
    if text is not None:
        yield text
    else:
        for child in ast.iter_child_nodes(node):
            yield from strings(child)


def sentences(source: str) -> list[str]:
    return [text for text in strings(ast.parse(source)) if is_sentence(text)]


def is_sentence(text: str) -> bool:
    begins = text.count(" ") >= 3 and (text[0].isupper() or text.startswith("{"))
    return begins and (text.endswith(".") or (text.endswith("{}") and bool(re.search("[.:] ", text))))


def all_sentences() -> list[tuple[str, str]]:
    """Return (module, sentence) of each that can become a note."""
    messages = {PACKAGE / "record" / f"{name}.py" for name in WITH_MESSAGES}
    paths = sorted({path for pattern in WRITERS for path in PACKAGE.glob(pattern)} - messages)
    return [(str(path.relative_to(PACKAGE)), text) for path in paths for text in sentences(path.read_text())]


def has_bytes(sentence: str) -> bool:
    return bool(BYTES.search(sentence))


def test_every_note_tells_its_bytes_or_why_it_has_none():
    bare = [
        f"{module}: {text}" for module, text in all_sentences() if not has_bytes(text) and not reason(text)
    ]
    assert bare == []


def reason(sentence: str) -> str:
    return next((why for start, why in WITHOUT_BYTES.items() if sentence.startswith(start)), "")


def test_every_exception_is_of_a_note_without_bytes():
    bare = [text for _, text in all_sentences() if not has_bytes(text)]
    assert [start for start in WITHOUT_BYTES if not any(text.startswith(start) for text in bare)] == []


def test_notes_are_put_on_traces_only_where_they_are_looked_for():
    looked_for = {path for pattern in WRITERS for path in PACKAGE.glob(pattern)}
    others = set(PACKAGE.rglob("*.py")) - looked_for - {PACKAGE / name for name in NO_WRITERS}
    assert [path for path in sorted(others) if puts_notes_on_traces(path.read_text())] == []
    assert all(puts_notes_on_traces((PACKAGE / name).read_text()) for name in NO_WRITERS)


def puts_notes_on_traces(source: str) -> bool:
    return any(
        isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("MemoryTrace", "replace")
        and any(keyword.arg == "notes" for keyword in node.keywords)
        for node in ast.walk(ast.parse(source))
    )


@pytest.mark.parametrize(
    ("code", "found"),
    [
        (
            'yield f"{count:,} blocks ({size:,} bytes) are left out."',
            [("{} blocks ({} bytes) are left out.", True)],
        ),
        (
            'notes.append(f"{count:,} blocks of it " + "are left out.")',
            [("{} blocks of it are left out.", False)],
        ),
        ('raise ValueError("The file is not there.")', []),
        ('"""The notes of a file."""', []),
        ('logger.warning("The file is not there.")', []),
    ],
)
def test_the_search_finds_notes_and_their_bytes(code, found):
    assert [(text, has_bytes(text)) for text in sentences(code)] == found
