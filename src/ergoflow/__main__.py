"""The command `ergoflow`, also as `python -m ergoflow`; a library that is missing, or a Ctrl-C, leaves no traceback."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Read in the command line, which takes a second or two, and run it."""
    try:
        from ergoflow.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library in ("", "ergoflow") or "ERGOFLOW_TRACEBACK" in os.environ:
            raise
        sys.stderr.write(
            f"error: the library {library} is missing; install it, or ergoflow once more with pip. What is made stays\n"
        )
        sys.exit(2)


if __name__ == "__main__":
    main()
