"""What a process holds after large blocks were freed."""

import subprocess
import sys

SCRIPT = """
import sys
import torch
from agentgym.models.memory import return_large_blocks

if sys.argv[1] == "returned":
    return_large_blocks()
torch.ones(7 << 20).add_(1)  # glibc's threshold grows with what is freed
small, large = [], []
for _ in range(60):
    large.append(torch.ones(1 << 20))  # 4 MiB
    small.append(torch.ones(1 << 10))  # stays, so that no end of the heap is free
del large
pages = int(open("/proc/self/statm").read().split()[1])
print(pages * 4096 >> 20)
"""


def held_mib(how):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, check=True, timeout=120
    )
    return int(done.stdout)


def test_large_blocks_go_back_to_the_system_when_they_are_freed():
    assert held_mib("returned") < held_mib("kept") - 150
