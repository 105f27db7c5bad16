"""What the tests of Triton kernels share: running a part of their own file where kernels are interpreted on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

CODE = "import json, runpy, sys\nmodule = runpy.run_path(sys.argv[1])\nprint(json.dumps(eval(sys.argv[2], module)))\n"


@pytest.fixture(scope="session")
def interpret() -> Callable[[str, str], Any]:
    """A function (file, expression) -> value of the expression in a process whose Triton interprets its kernels.

    A process of its own, because Triton decides when a kernel is defined.
    """

    def run(file: str, expression: str) -> Any:
        done = subprocess.run(
            [sys.executable, "-c", CODE, file, expression],
            env={**os.environ, "TRITON_INTERPRET": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run
