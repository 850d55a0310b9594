"""The `kvrouter` command, and `python -m kvrouter`."""

from __future__ import annotations

import sys

from kvrouter.installation import ForeignPackageError, check_packages, missing_extra


def main() -> None:
    """Run the `kvrouter` command."""
    try:
        check_packages()
        from kvrouter.cli import app  # imported late: it needs packages that an installation for engines does not have

        app()
    except ForeignPackageError as error:
        sys.exit(f"kvrouter: {error}")
    except ModuleNotFoundError as error:
        if message := missing_extra(error.name, sys.argv[1:]):
            sys.exit(f"kvrouter: {message}")
        raise


if __name__ == "__main__":  # child processes import this module under another name
    main()
