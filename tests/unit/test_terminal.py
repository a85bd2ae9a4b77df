"""A reader that has gone away changes neither the work nor the exit code."""

from __future__ import annotations

import os
import subprocess
import sys

from p3o_launch.terminal import tell

PROGRAM = """
import sys
from p3o_launch.cli import guarded
from p3o_launch.errors import RunInterrupted

def command():
    raise RunInterrupted("stopped", hint="x" * 100_000)

sys.exit(guarded(command))
"""


def test_the_exit_code_of_an_error_does_not_depend_on_who_reads_it():
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([sys.executable, "-c", PROGRAM], stderr=writing, check=False, timeout=60)
    os.close(writing)
    assert done.returncode == 130


def test_after_the_first_failure_the_stream_leads_nowhere():
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream:
        tell(stream, "heard\n")
        assert os.read(reading, 100) == b"heard\n"
        os.close(reading)
        tell(stream, "unheard\n")
        stream.write("still no error")
