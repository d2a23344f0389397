"""What is exported for speedscope opens in the real speedscope."""

from __future__ import annotations

import functools
import shutil
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tb_memplugin.exports import speedscope
from tests.exports.test_speedscope import SPEEDSCOPE, STACKED

pytestmark = pytest.mark.skipif(
    not SPEEDSCOPE.is_dir(), reason="speedscope is not installed in frontend/node_modules"
)


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture
def site(tmp_path):
    """Where speedscope's own page is served, with a profile beside it."""
    folder = Path(shutil.copytree(SPEEDSCOPE, tmp_path / "site"))
    speedscope.write(STACKED, folder / "peak.json", "peak of a test")
    handler = functools.partial(Quiet, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_it_opens_and_shows_the_name_and_the_weight(context, site):
    page = context.new_page()
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto(f"{site}/index.html#profileURL={site}/peak.json")
    page.wait_for_function("document.title.includes('peak of a test')")
    page.get_by_text("Sandwich").first.click()
    row = page.locator("tr", has_text="inner").first
    row.wait_for()
    assert "107 B" in row.inner_text()
    page.close()
    assert wrong == []
