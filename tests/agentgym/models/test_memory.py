"""What a process holds after blocks were freed, and what it costs to use them again."""

import json
import subprocess
import sys

import pytest

SCRIPT = """
import json, resource
import torch
from agentgym.models.memory import keep_blocks, return_memory

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 >> 20

keep_blocks()
torch.ones(1 << 20)
faults = -resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(60):
    torch.ones(1 << 20)  # 4 MiB
faults += resource.getrusage(resource.RUSAGE_SELF).ru_minflt
small, large = [], []
for _ in range(60):
    large.append(torch.ones(1 << 20))
    small.append(torch.ones(1 << 10))  # stays, so that no end of the heap is free
before = resident()
del large
return_memory()
print(json.dumps([before - resident(), faults]))
"""


@pytest.fixture(scope="module")
def measured():
    """(MiB given back of 240 that were freed, page faults of 60 blocks of 4 MiB in turn)."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=120
    )
    return json.loads(done.stdout)


def test_blocks_go_back_to_the_system_between_rollouts_and_updates(measured):
    assert measured[0] > 200


def test_a_block_that_is_used_again_costs_no_new_pages(measured):
    assert measured[1] < 20_000  # 61,440 pages are used
