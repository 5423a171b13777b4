"""`python -m chatmill` runs the `chatmill` command."""

from chatmill.cli.main import main

main()
