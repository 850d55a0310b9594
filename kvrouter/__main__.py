"""The `kvrouter` command, and `python -m kvrouter`."""

from __future__ import annotations

import sys

from kvrouter.installation import ForeignPackageError, check_packages, missing_extra


def main() -> None:
    """The entry point of the `kvrouter` command."""
    try:
        check_packages()
        from kvrouter.cli import app  # it, and what it runs, want packages that engines do without

        app()
    except ForeignPackageError as error:
        sys.exit(f"kvrouter: {error}")
    except ModuleNotFoundError as error:
        if message := missing_extra(error.name, sys.argv[1:]):
            sys.exit(f"kvrouter: {message}")
        raise


if __name__ == "__main__":  # else a process that was started by one
    main()
