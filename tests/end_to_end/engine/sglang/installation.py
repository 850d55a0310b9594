"""A real SGLang for CPU in a directory, with a model and an adapter of random weights.

    python installation.py DIR

SGLang's kernels exist for CUDA only, and are not used on CPU: an empty module replaces them (`shim/`), as empty
libraries replace CUDA's (`torch_for_cpu.py`). SGLang itself is not changed.
Does nothing if the directory holds a working installation already. Uses the standard library only.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SGLANG = "0.5.23"
TORCH = "2.14.1"
TORCHVISION = "0.29.1"
GRAMMARS = "xgrammar==0.2.7"
MODEL = "tiny"
SIZES = (128, 2, 4, 2)  # hidden size, layers, attention heads, key-value heads
ADAPTERS = {"poet": 1, "clerk": 2}  # LoRA adapters, each with its seed
_HERE = Path(__file__).parent


class InstallationError(Exception):
    """A part of the installation is missing. The message says what to do."""


@dataclass(frozen=True)
class SglangInstallation:
    """The paths of an installation."""

    directory: Path

    @property
    def python(self) -> Path:
        return self.directory / "venv" / "bin" / "python"

    @property
    def model(self) -> Path:
        return self.directory / "models" / MODEL

    def adapter(self, name: str) -> Path:
        """The folder of a LoRA adapter."""
        return self.directory / "adapters" / name

    @property
    def environment(self) -> dict[str, str]:
        """The variables that the engine's Python needs."""
        home = self.directory / "home"
        return {
            "PYTHONPATH": str(_HERE / "shim"),
            "HOME": str(home),
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "SGLANG_USE_CPU_ENGINE": "1",
            "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
            "OMP_NUM_THREADS": "1",
        }

    def complete(self) -> bool:
        """Return whether all parts are installed in the right versions."""
        weights = [self.model / "model.safetensors", *(self.adapter(a) / "adapter_model.safetensors" for a in ADAPTERS)]
        return all(each.exists() for each in weights) and self._has_sglang()

    def install(self) -> None:
        """Make everything that is missing. Raises InstallationError."""
        if not self._has_sglang():
            self._install_sglang(_python_311())
        scripts = _HERE.parent
        if not (self.model / "model.safetensors").exists():
            _run(self.python, scripts / "make_model.py", self.model, *SIZES, more=self.environment)
        for name, seed in ADAPTERS.items():
            _run(self.python, scripts / "make_adapter.py", self.adapter(name), self.model, seed, more=self.environment)

    def _install_sglang(self, python: str) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        _run(python, "-m", "venv", self.directory / "venv")
        pip = (self.python, "-m", "pip", "--quiet", "--disable-pip-version-check", "install")
        torch = (f"torch=={TORCH}", f"torchvision=={TORCHVISION}")
        _run(python, _HERE.parent / "torch_for_cpu.py", self.python, *torch)
        _run(*pip, "--requirement", _HERE / "requirements.txt")
        _run(*pip, "--no-deps", f"sglang=={SGLANG}", GRAMMARS)  # its other requirements are for CUDA

    def _has_sglang(self) -> bool:
        ask = "import torch; from importlib.metadata import version; print(torch.__version__, version('sglang'))"
        if not self.python.exists():
            return False
        answer = subprocess.run(
            [self.python, "-c", ask], capture_output=True, text=True, check=False, env=os.environ | self.environment
        )
        return [version.partition("+")[0] for version in answer.stdout.split()] == [TORCH, SGLANG]


def _run(*command: str | Path | int, more: Mapping[str, str] | None = None) -> None:
    """Run a command, with these variables beside the present ones. Raises InstallationError."""
    try:
        subprocess.run([str(word) for word in command], check=True, env={**os.environ, **(more or {})})
    except (OSError, subprocess.CalledProcessError) as error:
        raise InstallationError(str(error)) from error


def _python_311() -> str:
    """Return the path of Python 3.11. Raises InstallationError."""
    own = sys.executable if sys.version_info[:2] == (3, 11) else shutil.which("python3.11")
    python = os.environ.get("PYTHON311") or own
    if python is None:
        raise InstallationError("torch and sglang need Python 3.11: say where it is with PYTHON311=/path/to/python3.11")
    return python


def main(directory: str) -> None:
    installation = SglangInstallation(Path(directory).absolute())
    if installation.complete():
        print(f"SGLang {SGLANG} for CPU is in {directory}")
        return
    print(f"installing SGLang {SGLANG} for CPU in {directory}: some minutes, 4 GB", flush=True)
    try:
        installation.install()
    except InstallationError as error:
        sys.exit(f"{directory}: not installed: {error}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
