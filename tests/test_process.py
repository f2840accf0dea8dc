"""What a run does to its process."""

import platform
import subprocess
import sys

import pytest

COUNTED = """
import resource, torch
from mptrain import process

def faults():
    for step in range(3):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        held = [torch.ones(2**20) for _ in range(32)]  # 4 MiB each, 32,768 pages in all
        del held
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(faults())
process.keep_freed_memory()
print(faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told")
def test_a_step_gets_the_memory_that_the_last_one_freed_without_the_kernel_clearing_it():
    found = subprocess.run([sys.executable, "-c", COUNTED], check=True, capture_output=True, text=True)
    before, after = map(int, found.stdout.split())
    assert after < before / 10, f"{before} pages were cleared in a step, then {after}"


def test_a_c_library_that_cannot_be_told_is_left_alone(monkeypatch):
    from mptrain import process

    monkeypatch.setattr(process.ctypes, "CDLL", lambda name: object())
    process.keep_freed_memory()
