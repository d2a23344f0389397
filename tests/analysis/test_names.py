"""What `tb_memplugin.analysis` offers by name."""

from pathlib import Path

import pytest

from tb_memplugin import analysis
from tests.traces import trace


@pytest.mark.parametrize("name", analysis.__all__)
def test_no_module_has_the_name_of_a_function_and_hides_it(name):
    assert callable(getattr(analysis, name)) or name == "ALL_DIVISIONS"
    assert not (Path(analysis.__file__).parent / f"{name}.py").exists()


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
