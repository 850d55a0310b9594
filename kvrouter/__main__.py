"""`python -m kvrouter`."""

from kvrouter.cli import main

main()
