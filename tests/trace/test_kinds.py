import sys

import numpy as np
import pytest

from tb_memplugin.record.profiler.roles import Role
from tb_memplugin.record.storage_lifetimes import EntryKind
from tb_memplugin.trace import Category, Kind, Phase, Reason


@pytest.mark.parametrize("enumeration", [Kind, Category, Phase, Reason, EntryKind, Role])
def test_comparing_a_column_with_a_member_runs_no_python_code(enumeration: type[Kind]) -> None:
    """numpy would drop a Ctrl-C that comes there."""
    column, member, called = np.arange(3, dtype=np.uint8), enumeration(1), []
    sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_name) if event == "call" else None)
    try:
        equal = column == member
    finally:
        sys.setprofile(None)

    assert (equal.tolist(), called) == ([False, True, False], [])
