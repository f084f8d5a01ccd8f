"""The place of this process among the ranks that a launcher started, as its environment says.

Rank and number of ranks are taken from one launcher; the place on the machine from the first that says it,
because scripts often set ``RANK`` and ``WORLD_SIZE`` themselves and leave the rest to SLURM.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from infinity.core.errors import LaunchError


class _Launcher(NamedTuple):
    """The names of a launcher's variables."""

    name: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str


#: The first that is there counts: torchrun may be started by srun, and mpirun starts processes through it.
#: SLURM_NTASKS is not among them, as it is also set where a batch script runs, which is one process.
_LAUNCHERS = (
    _Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    _Launcher(
        "mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    _Launcher(
        "mpirun", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    _Launcher("mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    _Launcher("mpiexec", "PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
    _Launcher(
        "srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Launch:
    """This process among those that a launcher started.

    Attributes:
        rank: The number of this process, from 0.
        world_size: Number of ranks.
        local_rank: Number of this rank on its machine, from 0; None: no launcher says so.
        local_world_size: Ranks on this machine; None likewise.
        launcher: Who said it; empty: nothing did, and this is the only process.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int | None = None
    local_world_size: int | None = None
    launcher: str = ""


def launched(environment: Mapping[str, str] | None = None) -> Launch:
    """Return the place of this process.

    Args:
        environment: Variables; None: those of this process.

    Raises:
        LaunchError: A variable is missing, or has no valid value.
    """
    env = os.environ if environment is None else environment
    named = next((each for each in _LAUNCHERS if each.world_size in env), None)
    local = next((each.local_rank for each in _LAUNCHERS if each.local_rank in env), None)
    several = next((each.local_world_size for each in _LAUNCHERS if each.local_world_size in env), None)
    local_rank = None if local is None else _number(env, local)
    local_world_size = None if several is None else max(1, _number(env, several))
    if named is None:
        return Launch(local_rank=local_rank, local_world_size=local_world_size)
    world_size = max(1, _number(env, named.world_size))
    rank = _number(env, named.rank) if world_size > 1 else 0
    if rank >= world_size:
        raise LaunchError(f"{named.rank}={rank}; wanted less than {named.world_size}={world_size}")
    return Launch(rank, world_size, local_rank, local_world_size, named.name)


def check_meeting_point(found: Launch, environment: Mapping[str, str] | None = None) -> None:
    """Raise unless the environment says where the ranks meet.

    Raises:
        LaunchError: It does not.
    """
    env = os.environ if environment is None else environment
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in env]
    if missing:
        raise LaunchError(
            f"{found.launcher} started {found.world_size} ranks, but {' and '.join(missing)} "
            f"{'are' if len(missing) > 1 else 'is'} not set, where they meet: export MASTER_ADDR, the name "
            "of rank 0's machine (under SLURM $(scontrol show hostnames $SLURM_NODELIST | head -n 1)), and "
            "MASTER_PORT, a free port of it such as 29500, before the launcher; for runs that do not belong "
            "together export WORLD_SIZE=1"
        )


def _number(env: Mapping[str, str], name: str) -> int:
    text = env.get(name, "")
    if name.endswith("TASKS_PER_NODE"):
        text = _on_this_node(text, env.get("SLURM_NODEID", "0"))
    if not text.isdecimal():
        raise LaunchError(
            f"{name}: got {env.get(name)!r}; wanted a number, as torchrun, srun and mpirun set it. Start the "
            "ranks with one of them, or unset its other variables"
        )
    return int(text)


def _on_this_node(text: str, node: str) -> str:
    """Return this node's part of SLURM's list of tasks per node, such as ``4(x2),3``."""
    counts: list[str] = []
    for part in text.split(","):
        count, _, times = part.removesuffix(")").partition("(x")
        counts += [count] * (int(times) if times.isdecimal() else 1)
    return counts[int(node)] if node.isdecimal() and int(node) < len(counts) else text
