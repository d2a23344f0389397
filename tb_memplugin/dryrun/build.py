"""Build the stand-in for a GPU for the CUDA build of PyTorch that runs this: two shared libraries, kept.

What the libraries of PyTorch and transformer-engine want of NVIDIA's is read from them (`nm`). What the C++
files in `standin/` do not answer gets a function that says "done" (mathematics) or "not supported" (the
runtime).
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from tb_memplugin.errors import MemPluginError
from tb_memplugin.record.compiling import CACHE_VARIABLE, cache_folder, compile_library
from tb_memplugin.temporary import new_folder

SOURCES = Path(__file__).parent / "standin"
_CUBLASLT = SOURCES.parents[1] / "estimate/libraries/cudnn/cublaslt.c"
_PARTS = ("convolutions", "cudart", "libraries", "nccl", "pool", "recurrent")
_TOOLS = ("gcc", "g++", "nm")
_LINKED = ("libc10_cuda", "libtorch_cuda", "libtorch_python", "libtorch_cuda_linalg", "libtorch_cpu")
_TRANSFORMER_ENGINE = "transformer_engine/wheel_lib/libtransformer_engine.so"
_MATHEMATICS = re.compile(r"cublas|cudnn|cufft|cupti|nccl|cusolver|cusparse(?!Lt)")
_DECIDES_SIZES = re.compile(r"cusparseSpGEMM_|cusparse\w*csrgeam2")
"""Functions that count elements of results, which are not known: products and sums of two sparse matrices."""
_ANSWERS_ZERO = re.compile(r"cu(solver|sparse)\w*_bufferSize|cublas[SDCZ](geqrf|gels)Batched")
"""Functions that write numbers on the host: how large workspaces are, or which argument is wrong."""
_HEADERS = ("cublas_api.h", "cusolverDn.h", "cusparse.h")
_NOT_SUPPORTED, _SPARSE_NOT_SUPPORTED = 801, 10
_FIX = "Install g++ 10 or newer. Or use --engine fake."


@dataclass(frozen=True, slots=True)
class StandIn:
    """The built libraries: the one to preload, and the folder in which `libcuda.so.1` is found."""

    preloaded: Path
    libraries: Path


def stand_in() -> StandIn:
    """Return the stand-in for the installed PyTorch; it is compiled once, and kept in the cache folder.

    Raises:
        MemPluginError: PyTorch is not a build with CUDA, a compiler is missing or fails, or the cache cannot
            be written.
    """
    site, cuda = _installed()
    folder = cache_folder() / f"standin-{_key(site)}"
    if not folder.is_dir():
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with new_folder(folder.parent) as scratch:
                _build(Path(scratch) / "built", site, cuda)
                _keep(Path(scratch) / "built", folder)
        except OSError as error:
            raise MemPluginError(
                f"The stand-in for a GPU cannot be written: {error}.",
                where=os.fspath(folder.parent),
                fix=f"Set the environment variable {CACHE_VARIABLE} to a folder that can be written.",
            ) from error
    return StandIn(folder / "standin.so", folder / "lib")


def values_library() -> Path:
    """Return the library that computes values (values.cpp), compiled once.

    Raises:
        MemPluginError: PyTorch is not a build with CUDA, or compiling fails.
    """
    site, cuda = _installed()
    torch, source = site / "torch", SOURCES.parent / "values.cpp"
    words = f"{version('torch')} {torch}".encode()
    key = hashlib.sha256(b"\0".join([source.read_bytes(), Path(__file__).read_bytes(), words])).hexdigest()
    path = cache_folder() / f"dryrun_values-{key[:16]}.so"
    if not path.is_file():
        include = (torch / "include", cuda / "include", *_headers_beside(site))
        command = [
            *("g++", "-std=c++20", "-shared", "-fPIC", "-O1", "-w", "-DNDEBUG"),
            *(f"-I{folder}" for folder in include),
            *(str(source), f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", "-lc10_cuda"),
        ]
        compile_library(path, command, purpose="computes values in dry runs", fix=_FIX)
    return path


def _headers_beside(site: Path) -> tuple[Path, Path]:
    """Return folders with headers that are not beside the CUDA runtime's."""
    return site / "triton/backends/nvidia/include", site / "nvidia/cuda_nvcc/include"


def _installed() -> tuple[Path, Path]:
    """Return the folder of installed packages, and that of the CUDA runtime in it."""
    spec = find_spec("torch")
    site = Path((spec.origin if spec is not None else None) or "torch/torch").parent.parent
    # The wheels of CUDA 13 share a folder, `cu13`. Before, each has its own, and the rest of the headers is
    # Triton's or, before PyTorch 2.2, nvidia-cuda-nvcc's.
    homes = [home.parent.parent for home in (site / "nvidia").glob("cu*/include/cuda_runtime_api.h")]
    if not homes:
        raise MemPluginError(
            "The runtime engine runs PyTorch's CUDA code, but this PyTorch is not a build with CUDA.",
            where=f"torch {version('torch')}" if spec is not None else "torch",
            fix="On Linux: pip install torch, which is the build with CUDA. Or use --engine fake.",
        )
    return site, homes[0]


def _key(site: Path) -> str:
    """Return what names a build: its sources, the versions of what it stands between, and where they are."""
    sources = [Path(__file__), _CUBLASLT, *sorted(SOURCES.iterdir())]
    engine = (site / _TRANSFORMER_ENGINE).exists()
    words = [version("torch"), str(_cudnn_version(site)), str(engine), os.fspath(site), os.fspath(SOURCES)]
    parts = [*(file.read_bytes() for file in sources), *(word.encode() for word in words)]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _keep(built: Path, folder: Path) -> None:
    """Move a build into its place, unless another process was first."""
    try:
        built.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


def _build(folder: Path, site: Path, cuda: Path) -> None:
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        raise MemPluginError(
            f"The runtime engine compiles a stand-in for a GPU, and {', '.join(missing)} is not installed.",
            where="PATH",
            fix="Install gcc, g++ and binutils. Or use --engine fake.",
        )
    torch = site / "torch"
    include = [f"-I{folder}" for folder in (cuda / "include", *_headers_beside(site))]
    numbers = [f"-DSTANDIN_CUDA={_cuda_version(cuda)}", f"-DSTANDIN_CUDNN={_cudnn_version(site)}"]
    driver = folder / "lib" / "libcuda.so.1"
    driver.parent.mkdir(parents=True)
    options = [*include, *numbers, f'-DSTANDIN_CUDNN_LIBRARY="{site / "nvidia/cudnn/lib/libcudnn.so.9"}"']
    wanting = [torch / "lib" / f"{name}.so" for name in _LINKED]
    wanting += [file for file in (site / _TRANSFORMER_ENGINE,) if file.exists()]
    wanting += (site / "nvidia").glob("*/lib/libcublas.so.*")  # finds the stand-in in place of libcublasLt
    sources = [*(SOURCES / f"{part}.cpp" for part in _PARTS), _CUBLASLT]
    name = f"-Wl,-soname,libcublasLt.so.{_cuda_version(cuda) // 100}"  # cuDNN opens it by this name
    headers = [header for name in _HEADERS for header in (site / "nvidia").glob(f"*/include/{name}")]
    declared = "".join(header.read_text(encoding="utf-8") for header in headers)
    _compile(sources, folder / "standin.so", [*options, name], stubs=_functions(_wanted(wanting), declared))
    driver_functions = set(_matches(r"CUDAAPI\s+(cu[A-Z]\w+)\(", cuda / "include/cuda.h"))
    counted = set(_matches(r" standin_(cuMem\w+)\(", SOURCES / "cudart.cpp"))
    stubs = "\n".join([*map(_done, sorted(driver_functions - counted)), *map(_passed_on, sorted(counted))])
    _compile([SOURCES / "driver.cpp"], driver, numbers, stubs=stubs)
    driver.with_name("libnvidia-ml.so.1").symlink_to(driver.name)


def _wanted(libraries: Iterable[Path]) -> set[str]:
    names: set[str] = set()
    for library in libraries:
        command = ["nm", "-D", "--undefined-only", str(library)]
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        names |= {line.split()[-1].split("@")[0] for line in listed.splitlines()}
    return names


def _functions(wanted: set[str], headers: str) -> str:
    stubs = []
    for name in sorted(wanted):
        declared = re.search(rf"\b{name}\s*\(([^)]*)\)", headers) if _ANSWERS_ZERO.match(name) else None
        if _DECIDES_SIZES.match(name):
            stubs.append(f"int {name}(void) {{ return {_SPARSE_NOT_SUPPORTED}; }}")
        elif re.fullmatch(r"(cublas|cublasLt|cudnn|nccl|cusolver|cusparse)\w*[cC]reate\w*", name):
            stubs.append(f"__attribute__((weak)) int {name}(void **out) {{ *out = malloc(256); return 0; }}")
        elif declared is not None:
            stubs.append(_answers_zero(name, declared[1].split(",")))
        elif _MATHEMATICS.match(name):
            stubs.append(_done(name))
        elif name.startswith(("cuda", "__cuda")):
            stubs.append(f"__attribute__((weak)) int {name}(void) {{ return {_NOT_SUPPORTED}; }}")
    return "\n".join(["#include <stdlib.h>", *stubs])


def _done(name: str) -> str:
    return f"__attribute__((weak)) int {name}(void) {{ return 0; }}"


def _answers_zero(name: str, parameters: list[str]) -> str:
    """A function that writes 0 to every `int *` and `size_t *`."""
    types = [re.match(r"\s*(int|size_t)\s*\*", each) for each in parameters]
    values = [f"{f'{kind[1]} *' if kind else 'long '}a{row}" for row, kind in enumerate(types)]
    writes = [f"*a{row} = 0;" for row, kind in enumerate(types) if kind]
    return f"int {name}({', '.join(values)}) {{ {' '.join(writes)} return 0; }}"


def _passed_on(name: str) -> str:
    """PyTorch before 2.8 looks the driver's functions up in libcuda itself."""
    values = ", ".join(f"long {letter}" for letter in "abcde")
    return (
        f"int standin_{name}({values}) __attribute__((weak));\n"
        f"int {name}({values}) {{ return standin_{name} ? standin_{name}(a, b, c, d, e) : 0; }}"
    )


def _matches(pattern: str, file: Path) -> list[str]:
    return re.findall(pattern, file.read_text(encoding="utf-8"))


def _compile(sources: list[Path], library: Path, options: list[str], *, stubs: str) -> None:
    rest, compiled = library.with_suffix(".c"), library.with_suffix(".o")
    rest.write_text(stubs, encoding="utf-8")
    commands = (
        ["gcc", "-fPIC", "-w", "-c", str(rest), "-o", str(compiled)],
        [
            *("g++", "-std=c++17", "-shared", "-fPIC", "-O2", *options, *map(str, sources), str(compiled)),
            *("-o", str(library), "-ldl"),
        ],
    )
    for command in commands:
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        if ran.returncode:
            raise MemPluginError(
                f"The compiler failed:\n{ran.stderr[:2000].strip()}", where=command[0], fix=_FIX
            )
    rest.unlink()
    compiled.unlink()


def _cuda_version(home: Path) -> int:
    version = re.search(r"#define CUDA_VERSION (\d+)", (home / "include/cuda.h").read_text(encoding="utf-8"))
    assert version is not None
    return int(version[1]) // 10


def _cudnn_version(site: Path) -> int:
    text = (site / "nvidia/cudnn/include/cudnn_version.h").read_text(encoding="utf-8")
    major, minor, patch = (
        int(re.search(rf"#define CUDNN_{part} (\d+)", text)[1])  # type: ignore[index]
        for part in ("MAJOR", "MINOR", "PATCHLEVEL")
    )
    return major * 10_000 + minor * 100 + patch
