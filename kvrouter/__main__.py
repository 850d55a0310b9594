"""The `kvrouter` command, and `python -m kvrouter`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the `kvrouter` command. Older releases of Python must be able to parse this file."""
    if sys.version_info < (3, 11):  # noqa: UP036
        sys.exit(f"kvrouter: Python 3.11 or later is needed, and this is {sys.version_info[0]}.{sys.version_info[1]}")
    # The imports are late: they need this release, and packages that an installation for engines does not have.
    from kvrouter.installation import ForeignPackageError, check_packages, missing_extra

    try:
        check_packages()
        from kvrouter.cli import app

        app()
    except ForeignPackageError as error:
        sys.exit(f"kvrouter: {error}")
    except ModuleNotFoundError as error:
        if message := missing_extra(error.name, sys.argv[1:]):
            sys.exit(f"kvrouter: {message}")
        raise


if __name__ == "__main__":  # child processes import this module under another name
    main()
