"""The limit of open descriptors, raised in a process of its own."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there is no such limit")

_SCRIPT = """
import resource
from octavo.service.descriptors import raise_limit
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), hard))
raise_limit()
print(resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard))
"""


def test_raise_limit_takes_all_that_the_system_allows_and_says_so() -> None:
    done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=True)

    assert done.stdout.splitlines()[-1] == "True"
    assert "descriptor_limit_raised" in done.stdout + done.stderr
