"""The formats by name."""

from __future__ import annotations

import re

import pytest

from tb_memplugin.exports.formats import FORMATS, write_as
from tests.commands.files import WRITTEN_FORMATS
from tests.traces import trace

MADE = trace(
    "step 0", "alloc 100 a module=layer category=activation", "alloc 60 b category=gradient", "free a"
)


@pytest.mark.parametrize("format_", WRITTEN_FORMATS)
def test_every_format_is_written_the_same_twice(tmp_path, format_):
    for name in ("first", "second"):
        notes = write_as(format_, MADE, tmp_path / name, "a title")
        assert bool(notes) == (format_ == "snapshot")
    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes() != b""


def test_endings_tell_formats_apart():
    assert len({one.ending for one in FORMATS.values()}) == len(FORMATS)


def test_a_page_is_coloured_by_what_divides_the_trace(tmp_path):
    write_as("html", MADE, tmp_path / "page.html", "a title")
    page = (tmp_path / "page.html").read_text("utf-8")
    assert re.findall(r'"by":"(\w+)"', page)[:2] == ["category", "module"]
    assert '"by":"annotation"' not in page
