"""`python -m stepfast.cli`: the command, by this interpreter."""

from stepfast.cli import main

main()
