"""Workers of OpenMP: a thread that stops computing has none, so that another one's wait awake."""

import subprocess
import sys

import pytest

COUNT = """
import os, sys, threading
sys.path[:0] = {paths}
import torch
from conftest import tiny_llama
from specinfer import SpeculativeDecoder
from specinfer.common.threads import release_workers

def workers():
    return len(os.listdir("/proc/self/task"))

torch.set_num_threads(3)
before = workers()
torch.ones(1 << 20).exp().sum()
computing = workers()
release_workers()
print(computing - before, workers() - before)
decoder = SpeculativeDecoder(tiny_llama(), None, ["ngram"])
torch.ones(1 << 20).exp().sum()
print(workers() - before)
decoder.generate([1, 2, 3], max_new_tokens=4)
print(workers() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_workers_end_with_a_call() -> None:
    paths = [path for path in sys.path if path.endswith(("tests", "src")) or "site-packages" in path]
    run = subprocess.run([sys.executable, "-c", COUNT.format(paths=paths)], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["2", "0", "2", "0"], run.stderr
