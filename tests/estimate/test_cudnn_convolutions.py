"""What cuDNN answers for convolutions, and what happens where it does not.

The sizes are those that PyTorch 2.13.0+cu130 allocated with cuDNN 9.20.0 on the stand-in for a GPU, with
STANDIN_CUDNN_WORKSPACES=1 (docs/gpu.md).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from benchmarks.on_gpu.programs import LARGE, Program
from tb_memplugin import MemoryEstimator
from tb_memplugin.estimate.gpu_spec import GpuSpec
from tb_memplugin.estimate.kernels.convolutions import Layer, View, is_pytorchs_own
from tb_memplugin.estimate.libraries.cudnn.convolution import Convolution, Operand
from tb_memplugin.estimate.libraries.cudnn.questions import VARIABLE, Cudnn, has_driver, installed
from tb_memplugin.read.cublas import keeps_workspaces
from tests.estimate.fake_runs import estimated, sizes

HALF = torch.float16
CHANNELS_LAST = torch.channels_last
IMAGES, FILTERS = (32, 64, 56, 56), (64, 64, 3, 3)


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> str:
    """Ask the installed cuDNN, and return its version."""
    monkeypatch.delenv(VARIABLE)
    if not installed().version:
        pytest.skip(f"there is no cuDNN to ask: {installed().refusal}")
    return installed().version


@pytest.fixture
def cudnn_9_20(cudnn: str) -> None:
    if not cudnn.startswith("9.20."):
        pytest.skip(f"recorded with cuDNN 9.20, not {cudnn}")


def convolve(dtype: torch.dtype = torch.float32, form: torch.memory_format = torch.contiguous_format) -> Any:
    """Run forward and backward of 3x3 filters on 32 images with 64 channels."""
    images = torch.ones(IMAGES, dtype=dtype, device="cuda").contiguous(memory_format=form).requires_grad_()
    filters = torch.ones(FILTERS, dtype=dtype, device="cuda").contiguous(memory_format=form).requires_grad_()
    result = functional.conv2d(images, filters, padding=1)
    result.backward(torch.empty_like(result))
    return images, filters, result


def notes(program: Callable[[], Any] = convolve, **options: Any) -> list[str]:
    told = estimated(program, **options).estimate().notes
    return [note for note in told if note.startswith("Convolutions")]


@pytest.mark.parametrize(
    ("gpu", "dtype", "form", "forward", "of_input", "of_filters"),
    [
        ("a100-40gb", torch.float32, torch.contiguous_format, 25_837_584, 51_527_696, 54_641_215),
        ("h100", torch.float32, torch.contiguous_format, 25_837_584, 51_527_696, 51_822_803),
        ("a100-40gb", HALF, torch.contiguous_format, 25_763_856, 25_763_856, 26_944_311),
        ("h100", HALF, torch.contiguous_format, 25_763_987, 25_763_987, 26_058_963),
        ("h100", HALF, CHANNELS_LAST, 131, 131, 295_107),
    ],
    ids=str,
)
@pytest.mark.usefixtures("cudnn_9_20")
def test_a_convolution_has_the_workspaces_that_cudnn_asks_for(
    gpu: str,
    dtype: torch.dtype,
    form: torch.memory_format,
    forward: int,
    of_input: int,
    of_filters: int,
) -> None:
    """The forward has a result and a workspace; the backward has two of each, in turn."""
    done = estimated(lambda: convolve(dtype, form), gpu=gpu)
    images, filters = 6_422_528 * dtype.itemsize, 36_864 * dtype.itemsize
    assert sizes(done, "convolution") == [images, forward]
    assert sizes(done, "convolution_backward") == [images, of_input, filters, of_filters]


@pytest.mark.usefixtures("cudnn_9_20")
@pytest.mark.skipif(
    not torch.__version__.startswith("2.13.") or not keeps_workspaces(), reason="counted with PyTorch 2.13"
)
@pytest.mark.parametrize(
    ("program", "gpu", "counted"),
    [
        (Program("CNN", "fp32", "SGD"), "a100-40gb", (4_864_329_216, 5_437_915_136)),
        (Program("CNN", "AMP", "SGD"), "a100-40gb", (2_454_762_496, 2_757_754_880)),
        (Program("CNN", "bf16", "Adam"), "a100-40gb", (2_446_120_448, 2_753_560_576)),
        (Program("CNN", "fp32", "SGD"), "h100", (4_910_647_296, 5_165_285_376)),
        (Program("CNN", "AMP", "Adam"), "h100", (2_501_296_128, 2_619_342_848)),
    ],
    ids=str,
)
def test_an_estimate_equals_the_allocators_counters(
    program: Program, gpu: str, counted: tuple[int, int]
) -> None:
    with MemoryEstimator("cuda", gpu=gpu) as estimator:
        program.train("cuda", LARGE)
    answer = estimator.estimate()
    assert (answer.peak_allocated_bytes, answer.peak_reserved_bytes) == counted


@pytest.mark.usefixtures("cudnn_9_20")
def test_the_first_call_of_a_shape_has_the_workspace_in_which_benchmark_tries_all_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It holds any kernel's, so it is no smaller than the first's; PyTorch empties its cache afterwards."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    done = estimated(lambda: (convolve(), convolve()), gpu="h100")
    images, forward = 25_690_112, 25_837_584
    assert sizes(done, "convolution") == [images, 207_765_504, forward, images, forward]
    of_input, filters, of_filters = 51_527_696, 147_456, 51_822_803
    assert sizes(done, "convolution_backward") == [
        *(images, 53_625_043, of_input, filters, 164_102_144, of_filters),
        *(images, of_input, filters, of_filters),
    ]


def test_a_kernel_that_is_chosen_is_kept_when_benchmark_goes_on(
    cudnn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def program() -> None:
        convolve()
        monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
        convolve()

    assert len(sizes(estimated(program, gpu="h100"), "convolution")) == 4


@pytest.mark.usefixtures("cudnn")
def test_convolutions_of_single_pixels_multiply_matrices_as_on_a_gpu() -> None:
    """On an H200, cuDNN 9.19 answered 400, 400 and 33,554,432 bytes: 400 are cuBLASLt's own."""

    def convolve() -> Any:
        images = torch.ones(64, 512, 28, 28, device="cuda", requires_grad=True)
        filters = torch.ones(256, 512, 1, 1, device="cuda", requires_grad=True)
        result = functional.conv2d(images, filters)
        result.backward(torch.empty_like(result))
        return images, filters, result

    done = estimated(convolve, gpu="h200")
    result, *forward = sizes(done, "convolution")
    of_images, *of_input, of_filters, workspace = sizes(done, "convolution_backward")
    assert (result, of_images, of_filters) == (51_380_224, 102_760_448, 524_288)
    assert sum(forward) <= 400
    assert sum(of_input) <= 400
    assert workspace == 64 * of_filters == 33_554_432


@pytest.mark.usefixtures("cudnn")
@pytest.mark.skipif(has_driver(), reason="with NVIDIA's driver, cuDNN leaves no kernels out")
def test_without_a_compiler_other_kernels_answer_and_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    image, result = (
        Operand((64, channels, size, size), (channels * size * size, size * size, size, 1))
        for channels, size in ((512, 28), (256, 28))
    )
    filters = Operand((256, 512, 1, 1), (512, 1, 1, 1))
    question = Convolution("forward", "FLOAT", image, filters, result, (0, 0), (1, 1), (1, 1))
    gpu = GpuSpec.named("h200")
    whole = Cudnn("")
    monkeypatch.setenv("CC", "no such compiler")
    without = Cudnn("")
    assert "a C compiler" in without.missing
    assert "a C compiler" not in whole.missing
    least, most = (asked.workspace_bytes(gpu, question) for asked in (whole, without))
    assert (least, (most or 0) > 100_000_000) == (0, True)


def test_a_note_says_which_cudnn_answered(cudnn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (note,) = notes()
    assert f"cuDNN {cudnn} " in note
    assert "benchmark" not in note
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    (note,) = notes()
    assert "benchmark" in note


def test_a_note_says_that_cudnn_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "enabled", False)
    (note,) = notes()
    assert "enabled is off" in note


@pytest.mark.usefixtures("cudnn")
def test_without_a_gpu_by_name_nothing_is_asked() -> None:
    (note,) = notes(gpu=None)
    assert "no GPU is named" in note


def library(folder: Path, source: str) -> Path:
    """Compile a library from a line of C."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs a compiler, on Linux")
    file, made = folder / "cudnn.cpp", folder / "libcudnn.so.9"
    file.write_text(f'#include <cstdlib>\nextern "C" {{ {source} }}', encoding="utf-8")
    subprocess.run([compiler, "-shared", "-fPIC", str(file), "-o", str(made)], check=True)
    return made


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("__attribute__((constructor)) void start() { abort(); }", "ended"),
        ("int nothing() { return 0; }", "not a cuDNN"),
        ("size_t cudnnGetVersion() { return 90701; }", "9.7.1 is older than 9.8"),
        (
            "size_t cudnnGetVersion() { return 92000; } int cudnnBackendCreateDescriptor() { abort(); }",
            "ended",
        ),
    ],
    ids=["crashes at load", "another library", "old", "crashes when asked"],
)
def test_a_library_that_fails_does_not_end_the_estimate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, why: str
) -> None:
    monkeypatch.setenv(VARIABLE, str(library(tmp_path, source)))
    (note,) = notes()
    assert why in note


@pytest.mark.parametrize(
    ("path", "why"), [("none", "TB_MEMPLUGIN_CUDNN=none"), ("/no/such/libcudnn.so.9", "cannot open")]
)
def test_without_a_library_a_note_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, path: str, why: str
) -> None:
    monkeypatch.setenv(VARIABLE, path)
    (note,) = notes()
    assert why in note
    assert "pip install nvidia-cudnn-cu13" in note


@pytest.mark.parametrize(
    ("shape", "dtype", "groups", "transposed", "own"),
    [
        ((8, 32, 28, 28), torch.float32, 32, False, True),
        ((8, 32, 28, 28), torch.bfloat16, 32, False, True),
        ((8, 32, 28, 28), HALF, 32, False, False),
        ((8, 16, 28, 28), HALF, 16, False, True),
        ((8, 32, 6, 6), HALF, 32, False, True),
        ((8, 32, 28, 28), torch.float32, 32, True, False),
        ((8, 32, 28, 28), torch.float32, 16, False, False),
    ],
)
def test_pytorch_computes_some_depthwise_convolutions(
    shape: tuple[int, ...], dtype: torch.dtype, groups: int, transposed: bool, own: bool
) -> None:
    """What `torch._C._select_conv_backend` says on the stand-in, as an A100."""
    given = View.of(torch.empty(shape, dtype=dtype, device="meta"))
    filters = View.of(torch.empty(32, shape[1] // groups, 3, 3, dtype=dtype, device="meta"))
    layer = Layer((1, 1), (1, 1), (1, 1), transposed, groups)
    assert is_pytorchs_own(given, filters, layer) == own


def test_the_process_that_asks_does_not_import_torch() -> None:
    code = "import sys, tb_memplugin.estimate.libraries.cudnn.convolution; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "False"
