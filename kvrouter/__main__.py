"""`python -m kvrouter`."""

from kvrouter.cli import main

if __name__ == "__main__":  # else a process that was started by one
    main()
