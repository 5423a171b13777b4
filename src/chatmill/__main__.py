"""`python -m chatmill`: the command `chatmill`."""

from chatmill.cli.main import main

main()
