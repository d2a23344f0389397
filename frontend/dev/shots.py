"""Takes pictures of every view from the stand-in server: python dev/shots.py OUT [name…]."""

import sys

from playwright.sync_api import ConsoleMessage, Error, Page, sync_playwright

BASE = "http://localhost:6100/"


def hash_of(**keys: str) -> str:
    """The part of the address that chooses a view of the tab."""
    return "#tb_memplugin&" + "&".join(f"p.tb_memplugin.{key}={value}" for key, value in keys.items())


BASELINE = {"run": "demo%2Fbaseline", "step": "20"}
SHOTS = {
    "overview": ("", hash_of(view="overview", **BASELINE)),
    "timeline": ("", hash_of(view="timeline", **BASELINE)),
    "modules": ("", hash_of(view="modules", **BASELINE)),
    "compare": ("", hash_of(view="compare", run="demo%2Fbaseline", step="12")),
    "over": ("", hash_of(view="compare", run="demo%2Fbaseline", step="12", curves="over", what="category")),
    "bymodule": ("", hash_of(view="timeline", by="module", **BASELINE)),
    "byphase": ("", hash_of(view="timeline", by="phase", **BASELINE)),
    "flat": ("", hash_of(view="modules", shape="flat", **BASELINE)),
    "many": ("", hash_of(view="modules", run="demo%2F5000-modules", fold="off")),
    "cpu": ("", hash_of(view="overview", run="demo%2Fcpu")),
    "one": ("", hash_of(view="overview", run="demo%2Fone-step")),
    "onecompare": ("", hash_of(view="compare", run="demo%2Fone-step")),
    "coarse": ("", hash_of(view="timeline", run="demo%2Fside-file-missing")),
    "hostile": (
        "",
        hash_of(
            view="overview",
            run="%3Cscript%3Ealert(1)%3C%2Fscript%3E%0A%00%E2%80%AEgnp.evil" + "%2Fvery%2Flong" * 40,
        ),
    ),
    "hostilemodules": (
        "",
        hash_of(
            view="modules",
            run="%3Cscript%3Ealert(1)%3C%2Fscript%3E%0A%00%E2%80%AEgnp.evil" + "%2Fvery%2Flong" * 40,
        ),
    ),
    "empty": ("empty/", ""),
    "failing": ("failing/", ""),
    "problems": ("problems/", ""),
}


def listen(page: Page, name: str) -> None:
    """Tell on stderr what goes wrong in a page."""

    def heard(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            sys.stderr.write(f"{name} {message.type} {message.text[:300]}\n")

    def thrown(error: Error) -> None:
        sys.stderr.write(f"{name} PAGEERROR {str(error)[:400]}\n")

    page.on("console", heard)
    page.on("pageerror", thrown)


def main(out: str, names: list[str]) -> None:
    """Take the pictures: of all views, or of those named ("timeline", or "timeline-dark" for one theme)."""
    with sync_playwright() as p:
        browser = p.chromium.launch(
            executable_path="/usr/bin/chromium",
            args=[
                "--no-sandbox",
                "--disable-gpu",
                "--disable-background-networking",
                "--disable-component-update",
                "--disable-sync",
            ],
        )
        for theme in ("light", "dark"):
            for name in names or SHOTS:
                if "-" in name and not name.endswith(theme):
                    continue
                key = name.split("-")[0]
                path, fragment = SHOTS[key]
                page = browser.new_page(viewport={"width": 1280, "height": 960})
                listen(page, name)
                page.goto(BASE + path + ("?dark" if theme == "dark" else "") + fragment)
                frame = page.frames[1]
                frame.wait_for_selector("main")
                page.wait_for_timeout(1500)
                if key == "problems":
                    frame.get_by_test_id("problems-toggle").click()
                height = frame.evaluate("document.getElementById('memory-tab').scrollHeight")
                page.set_viewport_size({"width": 1280, "height": min(2000, max(700, height + 48))})
                page.wait_for_timeout(400)
                page.screenshot(path=f"{out}/{key}-{theme}.png")
                page.close()
        browser.close()


main(sys.argv[1], sys.argv[2:])
