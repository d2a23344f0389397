"""Takes pictures of every view from the stand-in server: python dev/shots.py OUT [name…]"""
import sys
from playwright.sync_api import sync_playwright

BASE = "http://localhost:6100/"
P = "&".join
def hash_of(**keys):
    return "#tb_memplugin&" + P(f"p.tb_memplugin.{k}={v}" for k, v in keys.items())

B = dict(run="demo%2Fbaseline", step="20")
SHOTS = {
    "overview": ("", hash_of(view="overview", **B)),
    "timeline": ("", hash_of(view="timeline", **B)),
    "modules": ("", hash_of(view="modules", **B)),
    "compare": ("", hash_of(view="compare", run="demo%2Fbaseline", step="12")),
    "over": ("", hash_of(view="compare", run="demo%2Fbaseline", step="12", curves="over", what="category")),
    "bymodule": ("", hash_of(view="timeline", by="module", **B)),
    "byphase": ("", hash_of(view="timeline", by="phase", **B)),
    "flat": ("", hash_of(view="modules", shape="flat", **B)),
    "many": ("", hash_of(view="modules", run="demo%2F5000-modules", fold="off")),
    "cpu": ("", hash_of(view="overview", run="demo%2Fcpu")),
    "one": ("", hash_of(view="overview", run="demo%2Fone-step")),
    "onecompare": ("", hash_of(view="compare", run="demo%2Fone-step")),
    "coarse": ("", hash_of(view="timeline", run="demo%2Fside-file-missing")),
    "hostile": ("", hash_of(view="overview", run="%3Cscript%3Ealert(1)%3C%2Fscript%3E%0A%00%E2%80%AEgnp.evil" + "%2Fvery%2Flong" * 40)),
    "hostilemodules": ("", hash_of(view="modules", run="%3Cscript%3Ealert(1)%3C%2Fscript%3E%0A%00%E2%80%AEgnp.evil" + "%2Fvery%2Flong" * 40)),
    "empty": ("empty/", ""),
    "failing": ("failing/", ""),
    "problems": ("problems/", ""),
}

def main(out, names):
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync"])
        for theme in ("light", "dark"):
            for name in names or SHOTS:
                if "-" in name and not name.endswith(theme): continue
                key = name.split("-")[0]
                path, hash = SHOTS[key]
                page = browser.new_page(viewport={"width": 1280, "height": 960})
                page.on("console", lambda m, n=name: print(n, m.type, m.text[:300]) if m.type in ("error", "warning") else None)
                page.on("pageerror", lambda e, n=name: print(n, "PAGEERROR", str(e)[:400]))
                page.goto(BASE + path + ("?dark" if theme == "dark" else "") + hash)
                frame = page.frames[1]
                frame.wait_for_selector("main")
                page.wait_for_timeout(1500)
                if key == "problems": frame.get_by_test_id("problems-toggle").click()
                height = frame.evaluate("document.getElementById('memory-tab').scrollHeight")
                page.set_viewport_size({"width": 1280, "height": min(2000, max(700, height + 48))})
                page.wait_for_timeout(400)
                page.screenshot(path=f"{out}/{key}-{theme}.png")
                page.close()
        browser.close()

main(sys.argv[1], sys.argv[2:])
