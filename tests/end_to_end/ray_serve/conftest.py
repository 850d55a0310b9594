"""One Ray for all tests of this folder, whose workers can import the tests and a part of verl."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[3]
# verl needs torch, so its other modules stay in the wheel.
VERL_FILES = ("verl/workers/rollout/router.py", "verl/utils/import_utils.py")


@pytest.fixture(scope="session")
def verl_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The modules of verl's load balancers from its wheel, in packages that are otherwise empty."""
    folder = tmp_path_factory.mktemp("verl")
    (wheel,) = (ROOT / ".ray").glob("verl-0.9.1-*.whl")
    with ZipFile(wheel) as files:
        for name in VERL_FILES:
            files.extract(name, folder)
            for parent in list(Path(name).parents)[:-1]:
                (folder / parent / "__init__.py").touch()
    return folder


@pytest.fixture(scope="session")
def cluster(verl_folder: Path) -> Iterator[None]:
    """A Ray on this machine."""
    import ray

    paths = [str(ROOT), str(ROOT / "tests/end_to_end"), str(verl_folder)]
    environment = {"PYTHONPATH": os.pathsep.join(paths)}
    sys.path.append(str(verl_folder))
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": environment})
    yield
    ray.shutdown()
    sys.path.remove(str(verl_folder))
