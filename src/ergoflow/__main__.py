"""The command `ergoflow`, also as `python -m ergoflow`; a Ctrl-C while libraries are read in leaves no traceback."""

from __future__ import annotations

import sys


def main() -> None:
    """Read in the command line, which takes a second or two, and run it."""
    try:
        from ergoflow.cli import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
