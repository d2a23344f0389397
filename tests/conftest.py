"""What all tests share."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

from tests.leftovers import end_with_this_process

# No test is timed: on a busy machine a first example takes as long as it takes.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


def pytest_configure(config: pytest.Config) -> None:
    """Tests of the CPU see no GPU, whether there is one or not; those of a GPU run alone, with `-m gpu`.

    Nor do they ask cuDNN, except for those that are about it: an estimate is the same with and without.
    What they start ends with them.
    """
    end_with_this_process()
    if config.getoption("markexpr") != "gpu":
        os.environ["TB_MEMPLUGIN_CUDNN"] = "none"
        for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
            os.environ[name] = ""
