"""The Memory tab in a real browser: how tests open it, point at it, and read numbers off it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlsplit

from playwright.sync_api import FrameLocator, Locator, Page, ViewportSize, expect

UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_NUMBER = re.compile(r"([+−>< ]*)([0-9][0-9,]*(?:\.[0-9]+)?)\s*([KMGT]?i?B)?")
SIZE: ViewportSize = {"width": 1280, "height": 1000}


@dataclass
class Tab:
    """One page with TensorBoard in it. `wrong` gathers what no page may do."""

    page: Page
    home: str
    wrong: list[str] = field(default_factory=list)
    origin: str = ""

    def __post_init__(self) -> None:
        self.page.set_default_timeout(30_000)
        address = urlsplit(self.home)
        self.origin = f"{address.scheme}://{address.netloc}/"
        self.page.on("console", self._heard)
        self.page.on("pageerror", lambda error: self.wrong.append(f"page error: {error}"))
        self.page.on("request", self._asked)
        self.page.on("dialog", self._interrupted)

    def _heard(self, message: Any) -> None:
        if message.type == "error" and not self._is_a_font(message.location["url"]):
            self.wrong.append(f"console: {message.text} ({message.location})"[:2000])

    def _asked(self, request: Any) -> None:
        """Of TensorBoard's own pages too: 2.21 asks nobody else for anything either."""
        inside = request.url.startswith((f"{self.home}/", "data:", "blob:", "about:"))
        if not inside and not self._is_a_font(request.url):
            self.wrong.append(f"asked elsewhere: {request.url}"[:2000])

    def _is_a_font(self, address: str) -> bool:
        """TensorBoard 2.21 asks for its own fonts at the root of the origin, whatever the path prefix."""
        return address.startswith(f"{self.origin}font-roboto/")

    def _interrupted(self, dialog: Any) -> None:
        self.wrong.append(f"opened a dialog: {dialog.message[:100]}")
        dialog.dismiss()

    @property
    def frame(self) -> FrameLocator:
        return self.page.frame_locator("iframe[src*='name=tb_memplugin']")

    def address(self, view: str = "overview", query: str = "", **route: Any) -> str:
        keys = {"view": view, **route}
        pairs = (f"p.tb_memplugin.{key}={quote(str(value), safe='')}" for key, value in keys.items())
        return f"{self.home}/{query}#tb_memplugin&{'&'.join(pairs)}"

    def open(self, view: str = "overview", query: str = "", **route: Any) -> Tab:
        """Go to a view by its shared address and wait until it shows something."""
        self.page.goto(self.address(view, query, **route))
        self(f"view-{view}").wait_for()
        return self

    def open_anew(self, view: str = "overview", **route: Any) -> Tab:
        """The same, quicker: TensorBoard's page stays, and our frame in it is loaded from its beginning."""
        frames = [frame for frame in self.page.frames if "name=tb_memplugin" in frame.url]
        if not frames:
            return self.open(view, **route)
        source = frames[0].url.partition("#")[0]
        frames[0].goto(
            "about:blank"
        )  # first, so that nothing of ours is left that could still write the address
        self.page.evaluate("address => history.replaceState(null, '', address)", self.address(view, **route))
        frames[0].goto(source)
        self(f"view-{view}").wait_for()
        return self

    def __call__(self, testid: str, **data: str) -> Locator:
        """Whatever carries a test id, and data attributes with these values."""
        if not data:
            return self.frame.get_by_test_id(testid)
        wanted = "".join(f"[data-{name}={_quoted(value)}]" for name, value in data.items())
        return self.frame.locator(f"[data-testid={_quoted(testid)}]{wanted}")

    def plot_box(self, testid: str) -> tuple[float, float, float, float]:
        """Left, top, width and height in the page of the plot within a canvas that says where it is."""
        self(testid).wait_for()
        left, top, width, height = json.loads(self(testid).get_attribute("data-box") or "")
        box = self(testid).bounding_box()
        assert box is not None
        return box["x"] + left, box["y"] + top, width, height

    def keys(self, testid: str) -> list[str]:
        """`data-key` of all rows of a kind, from the top."""
        return self(testid).evaluate_all("rows => rows.map((row) => row.dataset.key)")

    def pick(self, picker: str, label: str) -> None:
        if self(f"picker-{picker}").evaluate("(element) => element.tagName") == "SELECT":
            self(f"picker-{picker}").select_option(label=label)
            return
        self(f"picker-{picker}").click()
        self(f"picker-{picker}-search").fill(label)
        self(f"picker-{picker}-option").get_by_text(label, exact=True).click()

    def picked(self) -> dict[str, str]:
        """The labels that run, worker and step show."""
        chosen = "(shown) => shown.selectedOptions ? shown.selectedOptions[0].label : shown.textContent"
        return {name: self(f"picker-{name}").evaluate(chosen) for name in ("run", "worker", "step")}

    def settle(self) -> str:
        """Wait until there is nothing more to load, and give all that our frame says."""
        before, text = "", None
        while text != before:
            self.wait_until(lambda: self.frame.locator("[aria-busy=true], .loading").count() == 0, "loading")
            self.page.wait_for_timeout(150)
            before, text = text or "", self.frame.locator("body").inner_text()
        return before

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """For what no selector can say. Looks ten times a second, for half a minute."""
        for _ in range(300):
            if condition():
                return
            self.page.wait_for_timeout(100)
        raise AssertionError(f"Waited in vain: {what}")


def exact(element: Locator) -> int:
    """The bytes in an element's hover text. Waits until there are any."""
    expect(element).to_have_attribute("title", re.compile("[0-9] bytes"))
    return bytes_in(element.get_attribute("title") or "")


def bytes_in(title: str) -> int:
    """The number in "1,234 bytes" or "−1,234 bytes in 5"."""
    number, _, rest = title.partition(" bytes")
    assert rest is not None
    return int(number.replace(",", "").replace("−", "-"))


def assert_rounds(text: str, size: int) -> None:
    """A text such as "28.09 MiB" is the size in three or four digits, in a unit of at least a tenth."""
    found = re.search(_NUMBER, text)
    assert found is not None, text
    unit = UNITS[found.group(3)]
    value = abs(size) / unit
    decimals = 0 if unit == 1 or value >= 999.95 else 1 if value >= 99.995 else 2
    assert f"{value:,.{decimals}f}" == found.group(2), (text, size)
    assert value >= 0.1 or unit == 1, (text, size)


def colors(canvas: Locator) -> dict[tuple[int, int, int], int]:
    """How many pixels of a canvas have which color; transparent ones not counted."""
    counts: dict[str, int] = canvas.evaluate(
        """(canvas) => {
            const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            const counts = {};
            for (let i = 0; i < data.length; i += 4) {
                if (data[i + 3] < 255) continue;
                const key = `${data[i]},${data[i + 1]},${data[i + 2]}`;
                counts[key] = (counts[key] ?? 0) + 1;
            }
            return counts;
        }"""
    )
    return {tuple(map(int, key.split(","))): count for key, count in counts.items()}  # type: ignore[misc]


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
