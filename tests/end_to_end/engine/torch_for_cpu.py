"""Install a torch for CPU from the package index, which has only a build for CUDA.

    python torch_for_cpu.py PYTHON TORCH [PACKAGE …]

TORCH and each PACKAGE are requirements like `torch==2.13.0`, installed into PYTHON's environment without what they
require. CUDA's packages, 2 GB, leave torch's requirements. Empty libraries in torch's own folder replace theirs: every
function returns `cudaErrorNoDevice`, or a constant text if it returns texts. The version ends with `+cpu`, which is
what packages for CPU require. Needs gcc and readelf. Uses the standard library only.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

_NO_DEVICE = 100
_SYSTEM = re.compile(r"lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+|gomp)\.so|ld-linux|lib(c10|torch|shm|caffe2)")
_SYSTEM_VERSION = re.compile(r"GLIBC|GCC|CXXABI|OMP|GOMP")
_CUDA_NAME = re.compile(r"_*(cu[A-Za-z]|nccl|nv[a-z]{2})")
_TEXT = re.compile(r"(ErrorString|ErrorName|GetErrorStr|StatusString)")
# The library of symbols whose version is not a library's name, and of those whose name has none.
_OF_VERSION = {"NVSHMEM": "libnvshmem_host.so.3"}
_DEFAULT = "libcudart.so.13"

# The functions of a library, by their symbol version; "" without one.
Functions = dict[str, set[str]]


def missing_libraries(torch_lib: Path) -> dict[str, Functions]:
    """Return the libraries that torch's own need and that are not on this machine, with the functions they need."""
    libraries = sorted(torch_lib.glob("*.so*"))
    needed: set[str] = set()
    defined: set[str] = set()
    undefined: set[tuple[str, str]] = set()
    for library in libraries:
        needed.update(re.findall(r"NEEDED.*\[(.*)\]", _output("readelf", "-d", library)))
        for line in _output("readelf", "-W", "--dyn-syms", library).splitlines():
            fields = line.split()
            if len(fields) < 8 or not fields[0].rstrip(":").isdigit():
                continue
            name, _, version = fields[7].partition("@")
            if fields[6] != "UND":
                defined.add(name)
            elif fields[4] == "GLOBAL":
                undefined.add((name, version.lstrip("@")))
    own = {library.name for library in libraries}
    made: dict[str, Functions] = {name: defaultdict(set) for name in sorted(needed - own) if not _SYSTEM.match(name)}
    for name, version in undefined:
        if name in defined or _SYSTEM_VERSION.match(version) or not (version or _CUDA_NAME.match(name)):
            continue
        library_name = _OF_VERSION.get(version, version) or _library_of(name, made)
        made[library_name][version].add(name)
    return made


def _library_of(name: str, libraries: dict[str, Functions]) -> str:
    """Return the library whose stem a function's name contains."""
    for library in libraries:
        stem = re.match(r"lib([a-zA-Z]+)", library)
        if stem and stem[1].lower() in name.lower():
            return library
    return _DEFAULT


def make_library(path: Path, functions: Functions) -> None:
    """Compile a library with these functions."""
    code = ['static const char text[] = "there is no CUDA here";']
    script = []
    for version, names in functions.items():
        for name in sorted(names):
            result = "(long)text" if _TEXT.search(name) else str(_NO_DEVICE)
            code.append(f"long {name}(void) {{ return {result}; }}")
        if version:
            script.append(f"{version} {{ global: {' '.join(f'{name};' for name in sorted(names))} }};")
    with tempfile.TemporaryDirectory() as folder:
        source, versions = Path(folder, "stub.c"), Path(folder, "versions")
        source.write_text("\n".join(code))
        versions.write_text("\n".join(script))
        command = ["gcc", "-shared", "-fPIC", "-w", "-fno-builtin", "-O1", f"-Wl,-soname,{path.name}"]
        command += [f"-Wl,--version-script={versions}"] if script else []
        subprocess.run([*command, "-o", str(path), str(source)], check=True)


def _output(*command: str | Path) -> str:
    return subprocess.run([str(word) for word in command], check=True, capture_output=True, text=True).stdout


def drop_cuda_requirements(metadata: Path) -> None:
    """Rewrite the metadata of an installed torch as if it were a build for CPU."""
    lines = metadata.read_text().splitlines(keepends=True)
    kept = (line for line in lines if not line.startswith(("Requires-Dist: cuda-", "Requires-Dist: nvidia-")))
    metadata.write_text(re.sub(r"^(Version: [\d.]+)$", r"\1+cpu", "".join(kept), count=1, flags=re.MULTILINE))


def main(python: str, *requirements: str) -> None:
    pip = (python, "-m", "pip", "--quiet", "--disable-pip-version-check", "install", "--no-deps")
    subprocess.run([*pip, *requirements], check=True)
    site = Path(_output(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (metadata,) = site.glob("torch-*.dist-info/METADATA")
    drop_cuda_requirements(metadata)
    libraries = site / "torch" / "lib"
    for library_name, found in missing_libraries(libraries).items():
        make_library(libraries / library_name, found)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
