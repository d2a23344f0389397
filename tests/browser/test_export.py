"""Export: what the tab saves is what the command writes, and what cannot be saved says why in the tab."""

from __future__ import annotations

import shlex
from importlib.util import find_spec

from playwright.sync_api import expect

from tb_memplugin.commands import main
from tb_memplugin.exports.formats import FORMATS
from tb_memplugin.store.writer import RunWriter, StepsWriter
from tests.browser.recorded import recorded
from tests.cli import CliRunner
from tests.step_figures import figures
from tests.traces import trace

CHOSEN = {"run": "baseline", "worker": "rank0", "step": 2}
GIB = 1 << 30


def menu(tab):
    tab("export").click()
    tab("export-panel").wait_for()
    return tab("export-panel")


def saved(tab, format_, folder):
    with tab.page.expect_download() as started:
        tab(f"export-{format_}").click()
    path = folder / started.value.suggested_filename
    started.value.save_as(path)
    return path


def peak_of(logdir):
    return f"{recorded(logdir).trace.live(0).max() / 2**20:.2f} MiB"


def copied(tab, button, begins):
    tab.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    tab(button).click()

    def text():
        return tab.page.evaluate("navigator.clipboard.readText()")

    tab.wait_until(lambda: text().startswith(begins), "the text in the clipboard")
    return text()


def commanded(side_file, format_, folder):
    path = folder / f"commanded-{format_}"
    result = CliRunner().invoke(main, ["export", side_file, "--to", format_, "-o", str(path)])
    assert result.exit_code == 0, result.output
    return path.read_bytes()


def test_every_format_is_saved_as_the_command_writes_it(each_tab, logdir, tmp_path):
    each_tab.open_anew("modules", **CHOSEN)
    panel = menu(each_tab)
    expect(panel).to_contain_text("Everything recorded on rank0 in steps 2 to 3")
    for format_, kind in FORMATS.items():
        if format_ == "parquet" and find_spec("pyarrow") is None:
            continue
        file = saved(each_tab, format_, tmp_path)
        assert file.name == f"memory-baseline-rank0-steps-2-3{kind.ending}"
        assert file.read_bytes() == commanded(recorded(logdir).side_file, format_, tmp_path)
        expect(each_tab("export-status")).to_contain_text(file.name)
    expect(each_tab("export-status")).to_contain_text("cpu is written as cuda:0.")


def test_the_saved_report_opens_and_says_what_the_tab_says(tab, logdir, tmp_path):
    tab.open_anew("overview", **CHOSEN)
    menu(tab)
    report = saved(tab, "html", tmp_path)
    page = tab.page.context.new_page()
    wrong = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto(report.as_uri())
    expect(page.locator("body")).to_contain_text(peak_of(logdir))
    page.close()
    assert wrong == []


def test_the_keyboard_opens_walks_and_closes_it(tab):
    tab.open_anew("overview", **CHOSEN)
    tab("headline").wait_for()
    tab("export").focus()
    tab.page.keyboard.press("Enter")
    tab("copy-command").wait_for()
    expect(tab("export-html")).to_be_focused()
    tab.page.keyboard.press("ArrowDown")
    expect(tab("export-perfetto")).to_be_focused()
    tab.page.keyboard.press("ArrowUp")
    tab.page.keyboard.press("ArrowUp")
    expect(tab("copy-command")).to_be_focused()
    tab.page.keyboard.press("Escape")
    expect(tab("export-panel")).to_have_count(0)
    expect(tab("export")).to_be_focused()
    menu(tab)
    tab("headline").click()
    expect(tab("export-panel")).to_have_count(0)


def test_what_is_copied_leads_back_to_the_view_and_tells_the_same(tab, logdir):
    tab.open_anew("modules", **CHOSEN, shape="flat")
    assert "p.tb_memplugin.shape=flat" in copied(tab, "copy-link", tab.home)
    menu(tab)
    name, *words = shlex.split(copied(tab, "copy-command", "tb-memplugin "))
    assert name == "tb-memplugin"
    told = CliRunner().invoke(main, [*words, "--top", "0"])
    assert peak_of(logdir) in told.output
    assert "blocks.0.mlp" in told.output


def test_what_cannot_be_saved_says_why_and_what_can_is_saved_below_a_path_prefix_too(
    tmp_path, start_tensorboard, open_tab
):
    RunWriter(str(tmp_path / "run"), "rank0").write(trace("step 1", "alloc 100 a"))
    StepsWriter(str(tmp_path / "watched"), "rank0", 0).write(figures([GIB, 2 * GIB]))
    side_file = tmp_path / "run/rank0/plugins/tb_memplugin/window-000000.mem"
    server = start_tensorboard(tmp_path, "--path_prefix=/some/where")
    tab = open_tab(f"{server.url}/some/where")
    downloads = []
    tab.page.on("download", lambda one: downloads.append(one.url))
    tab.open("overview", run="watched")
    menu(tab)
    expect(tab("export-why")).to_contain_text("MemoryMonitor recorded figures of this step")
    expect(tab("export-why")).to_contain_text("The same figures are in TensorBoard's Scalars")
    expect(tab("export-csv")).to_have_count(0)
    expect(tab("copy-link")).to_be_enabled()

    tab.open_anew("overview", run="run")
    menu(tab)
    wanted = commanded(str(side_file), "csv", tmp_path)
    assert saved(tab, "csv", tmp_path).read_bytes() == wanted
    side_file.write_bytes(b"junk")
    tab("export-csv").click()
    expect(tab("export-failed")).to_contain_text("window-000000.mem")
    expect(tab("export")).to_have_text("Export failed")

    side_file.unlink()
    tab.open_anew("overview", run="run")
    menu(tab)
    expect(tab("export-why")).to_contain_text("plugins/tb_memplugin/window-000000.mem is missing")
    expect(tab("export-csv")).to_have_count(0)
    assert len(downloads) == 1
    tab.wrong = [told for told in tab.wrong if "status of 404" not in told]


def test_the_menu_closes_where_the_address_changes_under_it(tab):
    tab.open_anew("overview", **CHOSEN)
    tab("tab-modules").click()
    tab("view-modules").wait_for()
    menu(tab)
    tab.page.go_back()
    tab("view-overview").wait_for()
    expect(tab("export-panel")).to_have_count(0)
