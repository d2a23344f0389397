"""What `tb_memplugin.analysis` offers by name."""

import inspect

import pytest

import tb_memplugin.analysis.lanes
import tb_memplugin.analysis.modules  # noqa: F401  # modules that are imported later take no name away
from tb_memplugin import analysis
from tests.traces import trace


@pytest.mark.parametrize("name", analysis.__all__)
def test_every_name_is_a_thing_and_no_module(name):
    assert not inspect.ismodule(getattr(analysis, name))


def test_each_question_is_one_call():
    from tb_memplugin.analysis import compare, leaks, pools, stages, usage
    from tb_memplugin.analysis import peak as highest

    recorded = trace("alloc 5 a", "alloc 6 b")
    assert highest(recorded).bytes == 11
    assert compare(recorded, recorded)[0].delta_bytes == 0
    assert usage(recorded, 0x2000).bytes_after == 11
    assert stages(recorded) == ()
    assert leaks(recorded, 0) == ()
    assert pools(recorded, 0, 1)[0].allocated_bytes == 11
