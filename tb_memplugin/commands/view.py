"""`tb-memplugin view`: show files in the Memory tab, without a logdir of one's own."""

from __future__ import annotations

import ctypes
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial

import click

from tb_memplugin.commands.options import PATH
from tb_memplugin.errors import MemPluginError
from tb_memplugin.store import files
from tb_memplugin.temporary import new_folder

ADDRESS = re.compile(r"^TensorBoard \S+ at (https?://\S+)")
"""The line with which TensorBoard says that it serves."""

PR_SET_PDEATHSIG = 1
"""Asks Linux for a signal when the parent process has ended."""


@click.command("view")
@click.argument("sources", nargs=-1, type=PATH, required=True, metavar="FILE...")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Default: a free one.")
@click.option(
    "--device-type", default="cuda", show_default=True, help="Device type of snapshots: cuda, xpu, …"
)
def command(sources: Sequence[str], port: int, device_type: str) -> None:
    """Import each FILE to a temporary folder, serve it, and print the address. Ctrl-C ends it.

    FILE is a snapshot, a trace or a recorded window; the folder of a run is served where it is.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # also where a shell that started it ignores Ctrl-C
        signal.signal(number, signal.default_int_handler)
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # no `nohup`
        signal.signal(signal.SIGHUP, signal.default_int_handler)
    if len(sources) == 1 and files.is_folder(sources[0]):
        raise SystemExit(_serve(sources[0], port))
    with new_folder() as logdir:
        words = [sys.executable, "-m", "tb_memplugin", "import", *sources]
        with subprocess.Popen(
            [*words, "--logdir", logdir, "--device-type", device_type],
            stdout=subprocess.DEVNULL,
            preexec_fn=_ending_with_parent(),
        ) as importing:
            try:
                code = importing.wait()
            finally:
                importing.terminate()  # a kill would leave its child, which writes to the folder
                importing.wait()
        if code and not files.folders_in(logdir):
            raise SystemExit(code)
        raise SystemExit(_serve(logdir, port))


def _serve(logdir: str, port: int) -> int:
    """Run TensorBoard until it ends or Ctrl-C; print the tab's address when it serves."""
    serving = [sys.executable, "-m", "tensorboard.main", "--logdir", logdir]
    with subprocess.Popen(
        [*serving, "--host", "localhost", "--port", str(port)],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_ending_with_parent(),
    ) as server:
        try:
            assert server.stderr is not None
            output = []
            for line in server.stderr:
                output.append(line)
                if address := ADDRESS.search(line):
                    click.echo(f"Open {address[1].rstrip('/')}/#tb_memplugin   (Ctrl-C ends it)")
                    break
            else:
                raise MemPluginError(
                    f"TensorBoard did not start: {''.join(output[-3:]).strip()}", where=logdir
                )
            for _ in server.stderr:  # so that the pipe never fills
                pass
            return server.wait()
        except KeyboardInterrupt:
            return 0
        finally:
            server.terminate()


def _ending_with_parent() -> Callable[[], object] | None:
    """Return what a child calls to end with this process, also where that is killed; None but on Linux."""
    if sys.platform != "linux":
        return None
    return partial(ctypes.CDLL(None).prctl, PR_SET_PDEATHSIG, signal.SIGTERM)
