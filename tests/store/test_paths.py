import pytest
from hypothesis import given
from hypothesis import strategies as st

from tb_memplugin.store.paths import folder_name, is_side_file_name, readable, side_file_name


@pytest.mark.parametrize("name", ["rank0", "host-1_4242", "größe", "a.2", "数据"])
def test_ordinary_names_stay(name):
    assert folder_name(name) == name


@pytest.mark.parametrize(
    "name", ["../../etc", "/abs", "a/b", "..", ".", "", "nul\0", "line\nbreak", "C:\\x", "y" * 10_000]
)
def test_hostile_names_become_one_plain_component(name):
    clean = folder_name(name)
    assert clean not in {"", ".", ".."}
    assert not set(clean) & set('/\\:\0\n*?"<>|')
    assert len(clean.encode()) < 200


@given(st.text(), st.text())
def test_two_names_never_share_a_folder(one, other):
    assert (folder_name(one) == folder_name(other)) == (one == other)


def test_side_files_are_numbered():
    assert side_file_name(7) == "window-000007.mem"
    assert is_side_file_name("window-000007.mem")
    assert is_side_file_name("window-1234567.mem")


@pytest.mark.parametrize(
    "name", ["", "../window-000001.mem", "/etc/passwd", "window-1.mem", "window-000001.mem\n", "a.mem"]
)
def test_no_other_name_is_a_side_files(name):
    assert not is_side_file_name(name)


def test_lone_surrogates_become_question_marks():
    assert readable("a\ud800b") == "a?b"
