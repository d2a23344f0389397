"""Small programs of many kinds, as users write them. Each runs once for every recorder.

A program sets up what it needs, opens one window (`run.window`), and leaves what it computed (`run.value`)
and what it created (`run.keep`).
"""

from tests.certificate.programs import (
    copies,
    distributed,
    dynamo,
    generation,
    hooks,
    hostile,
    language,
    loops,
    modes,
    scripts,
    sequences,
    trainers,
    vision,
)
from tests.certificate.programs.catalog import PROGRAMS

__all__ = ["PROGRAMS", "import_libraries"]


def import_libraries() -> None:
    """Import what programs import, so that a forked child need not."""
    for module in (
        language,
        trainers,
        dynamo,
        copies,
        distributed,
        generation,
        hooks,
        hostile,
        loops,
        modes,
        scripts,
    ):
        getattr(module, "import_libraries", lambda: None)()
    for module in (sequences, vision):
        getattr(module, "import_libraries", lambda: None)()
