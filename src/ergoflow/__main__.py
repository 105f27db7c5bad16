"""`python -m ergoflow` is the command `ergoflow`."""

from ergoflow.cli import main

main()
