"""What this machine has: free memory."""

import os


def free_host_nbytes() -> int:
    """Host memory that is free for one rank of this machine (bytes)."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    with open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024 // local
    return 8 * 2**30 // local
