import gzip

import pytest

from tb_memplugin.server import loader, static_files


@pytest.fixture
def bundle(tmp_path, monkeypatch):
    root = tmp_path / "static"
    (root / "assets").mkdir(parents=True)
    (root / "index.js").write_text("export function render() {}")
    (root / "assets" / "worker-a1b2c3d4.js").write_text("x")
    (root / "style.css").write_text("body{}")
    (tmp_path / "secret.js").write_text("secret")
    monkeypatch.setattr(static_files.serve, "__defaults__", (root,))
    return root


def test_the_bundle_is_served_with_types_that_browsers_run(tab, bundle):
    script = tab.static("index.js")
    assert script.status_code == 200
    assert script.content_type.startswith("text/javascript")
    assert script.headers["Cache-Control"].startswith("no-cache")
    assert tab.static("style.css").content_type.startswith("text/css")


def test_names_with_a_hash_stay_in_the_browsers_cache(tab, bundle):
    assert "max-age=31536000" in tab.static("assets/worker-a1b2c3d4.js").headers["Cache-Control"]


def test_text_is_sent_compressed(tab, bundle):
    answer = tab.static("index.js", **{"Accept-Encoding": "gzip"})
    assert answer.headers["Content-Encoding"] == "gzip"
    assert gzip.decompress(answer.get_data()) == b"export function render() {}"


def test_a_new_build_is_served_without_a_restart(tab, bundle):
    tab.static("index.js")
    (bundle / "index.js").write_text("export function render() { /* new */ }")
    assert b"new" in tab.static("index.js").get_data()


@pytest.mark.parametrize(
    "name",
    [
        "../secret.js",
        "assets/../../secret.js",
        "%2e%2e/secret.js",
        "/etc/passwd",
        "",
        "assets",
        "no.js",
        "a\\..\\b.js",
        "x\0.js",
    ],
)
def test_nothing_outside_the_bundle_is_served(tab, bundle, name):
    assert static_files.find(name, bundle) is None
    assert tab.static(name.replace("\0", "%00")).status_code == 404


def test_a_link_out_of_the_bundle_is_not_followed(bundle, tmp_path):
    (bundle / "link.js").symlink_to(tmp_path / "secret.js")
    assert static_files.find("link.js", bundle) is None


def test_a_checkout_without_a_build_says_how_to_build(tab, tmp_path, monkeypatch):
    monkeypatch.setattr(static_files.serve, "__defaults__", (tmp_path / "absent",))
    answer = tab.static("index.js")
    assert answer.status_code == 200
    assert b"make bundle" in answer.get_data()
    assert b"export function render" in answer.get_data()


def test_a_backend_that_cannot_be_loaded_says_why_in_the_tab(monkeypatch):
    from werkzeug.test import Client

    import tb_memplugin.server.backend as backend

    def fail(context):
        raise ImportError("numpy <script> is missing")

    monkeypatch.setattr(backend, "Backend", fail)
    broken = loader.MemoryPluginLoader().load(None)
    assert broken.is_active()
    assert broken.frontend_metadata().tab_name == "Memory"
    path = "/data/plugin/tb_memplugin/static/index.js"
    script = Client(broken.get_plugin_apps()["/*"]).get(path).get_data(as_text=True)
    assert "ImportError: numpy \\u003cscript> is missing" in script


def test_a_route_that_does_not_exist_is_refused_in_words(tmp_path):
    from tensorboard.plugins.base_plugin import TBContext
    from werkzeug.test import Client

    plugin = loader.MemoryPluginLoader().load(TBContext(logdir=str(tmp_path)))
    answer = Client(plugin.get_plugin_apps()["/*"]).get("/data/plugin/tb_memplugin/stepz")
    assert answer.status_code == 404
    assert answer.get_json()["error"]["what"] == "There is no such route."


def test_every_step_is_kept():
    import argparse

    flags = argparse.Namespace(samples_per_plugin={})
    loader.MemoryPluginLoader().fix_flags(flags)
    assert flags.samples_per_plugin == {"tb_memplugin": 0}
    flags = argparse.Namespace(samples_per_plugin={"tb_memplugin": 5})
    loader.MemoryPluginLoader().fix_flags(flags)
    assert flags.samples_per_plugin == {"tb_memplugin": 5}
