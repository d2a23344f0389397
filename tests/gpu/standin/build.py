"""Build the stand-in for a GPU beside the CUDA build of PyTorch that runs this: two shared libraries.

What the libraries of PyTorch and transformer-engine want of NVIDIA's is read from them (`nm`). What the C++
files beside this one do not answer gets a function that says "done" (mathematics) or "not supported" (the
runtime).
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).parent
_LINKED = ("libc10_cuda", "libtorch_cuda", "libtorch_python", "libtorch_cuda_linalg", "libtorch_cpu")
_TRANSFORMER_ENGINE = "transformer_engine/wheel_lib/libtransformer_engine.so"
_MATHEMATICS = ("cublas", "cudnn", "cupti", "nccl")
_NOT_SUPPORTED = 801


def build(folder: Path) -> tuple[Path, Path]:
    """Compile both libraries into `folder`.

    Returns:
        The library to preload, and the folder in which `libcuda.so.1` is found.

    Raises:
        RuntimeError: if PyTorch is not a build with CUDA, or brings no CUDA headers.
    """
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    torch = Path(spec.origin or "").parent
    site = torch.parent
    # The wheels of CUDA 13 share a folder, `cu13`. Before, each has its own, and the rest of the headers is
    # Triton's or, before PyTorch 2.2, nvidia-cuda-nvcc's.
    homes = [home.parent.parent for home in (site / "nvidia").glob("cu*/include/cuda_runtime_api.h")]
    if not homes:
        raise RuntimeError(f"{torch} is not a CUDA build of PyTorch with the headers of its CUDA runtime.")
    others = (site / "triton/backends/nvidia/include", site / "nvidia/cuda_nvcc/include")
    include = [f"-I{folder}" for folder in (homes[0] / "include", *others)]
    numbers = [f"-DSTANDIN_CUDA={_cuda_version(homes[0])}", f"-DSTANDIN_CUDNN={_cudnn_version(site)}"]
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "standin.so"
    parts = ("convolutions", "cudart", "libraries", "nccl", "pool", "recurrent", "transformer_engine")
    options = [
        *(*include, *numbers, f'-DSTANDIN_RECURRENT_SIZES="{HERE / "recurrent_sizes.txt"}"'),
        f'-DSTANDIN_CUDNN_LIBRARY="{site / "nvidia/cudnn/lib/libcudnn.so.9"}"',
    ]
    wanting = [torch / "lib" / f"{name}.so" for name in _LINKED]
    wanting += [file for file in (site / _TRANSFORMER_ENGINE,) if file.exists()]
    _compile([HERE / f"{part}.cpp" for part in parts], library, options, others=_functions(_wanted(wanting)))
    driver = folder / "lib" / "libcuda.so.1"
    driver.parent.mkdir(exist_ok=True)
    declared = set(_found(r"CUDAAPI\s+(cu[A-Z]\w+)\(", homes[0] / "include/cuda.h"))
    counted = set(_found(r" standin_(cuMem\w+)\(", HERE / "cudart.cpp"))
    made = "\n".join([*map(_done, sorted(declared - counted)), *map(_passed_on, sorted(counted))])
    _compile([HERE / "driver.cpp"], driver, numbers, others=made)
    management = driver.with_name("libnvidia-ml.so.1")
    management.unlink(missing_ok=True)
    management.symlink_to(driver.name)
    return library, driver.parent


def _wanted(libraries: Iterable[Path]) -> set[str]:
    names: set[str] = set()
    for library in libraries:
        command = ["nm", "-D", "--undefined-only", str(library)]
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        names |= {line.split()[-1].split("@")[0] for line in listed.splitlines()}
    return names


def _functions(wanted: set[str]) -> str:
    made = []
    for name in sorted(wanted):
        if re.fullmatch(r"(cublas|cublasLt|cudnn|nccl)\w*Create\w*", name):
            made.append(f"__attribute__((weak)) int {name}(void **out) {{ *out = malloc(256); return 0; }}")
        elif name.startswith(_MATHEMATICS):
            made.append(_done(name))
        elif name.startswith(("cuda", "__cuda")):
            made.append(f"__attribute__((weak)) int {name}(void) {{ return {_NOT_SUPPORTED}; }}")
    return "\n".join(["#include <stdlib.h>", *made])


def _done(name: str) -> str:
    return f"__attribute__((weak)) int {name}(void) {{ return 0; }}"


def _passed_on(name: str) -> str:
    """PyTorch before 2.8 looks the driver's functions up in libcuda itself."""
    values = ", ".join(f"long {letter}" for letter in "abcde")
    return (
        f"int standin_{name}({values}) __attribute__((weak));\n"
        f"int {name}({values}) {{ return standin_{name} ? standin_{name}(a, b, c, d, e) : 0; }}"
    )


def _found(pattern: str, file: Path) -> list[str]:
    return re.findall(pattern, file.read_text(encoding="utf-8"))


def _compile(sources: list[Path], library: Path, options: list[str], *, others: str) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        rest, made = Path(scratch) / "rest.c", Path(scratch) / "rest.o"
        rest.write_text(others, encoding="utf-8")
        subprocess.run(["gcc", "-fPIC", "-w", "-c", str(rest), "-o", str(made)], check=True)
        command = ["g++", "-std=c++17", "-shared", "-fPIC", "-O2", *options, *map(str, sources), str(made)]
        subprocess.run([*command, "-o", str(library), "-ldl"], check=True)


def _cuda_version(home: Path) -> int:
    found = re.search(r"#define CUDA_VERSION (\d+)", (home / "include/cuda.h").read_text(encoding="utf-8"))
    assert found is not None
    return int(found[1]) // 10


def _cudnn_version(site: Path) -> int:
    text = (site / "nvidia/cudnn/include/cudnn_version.h").read_text(encoding="utf-8")
    major, minor, patch = (
        int(re.search(rf"#define CUDNN_{part} (\d+)", text)[1])  # type: ignore[index]
        for part in ("MAJOR", "MINOR", "PATCHLEVEL")
    )
    return major * 10_000 + minor * 100 + patch
