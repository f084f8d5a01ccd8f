"""What torchrun, srun and mpirun say of a process, and what happens where they leave something out."""

import pytest

from infinity.core.errors import LaunchError
from infinity.core.process import Launch, check_meeting_point, launched

SLURM = {
    "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "11", "SLURM_LOCALID": "1", "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),3,4", "SLURM_NTASKS": "11",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip
INTEL = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
CRAY = {"PMI_RANK": "2", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "4"}
TORCHRUN = {"RANK": "6", "WORLD_SIZE": "8", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4"}


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, Launch()),
        (TORCHRUN, Launch(6, 8, 2, 4, "torchrun")),
        (SLURM, Launch(5, 11, 1, 3, "srun")),
        (OPEN_MPI, Launch(3, 8, 1, 2, "mpirun")),
        (INTEL, Launch(2, 4, 0, 2, "mpiexec")),
        (CRAY, Launch(2, 4, 1, 4, "mpiexec")),
        (SLURM | TORCHRUN, Launch(6, 8, 2, 4, "torchrun")),
        (SLURM | OPEN_MPI, Launch(3, 8, 1, 2, "mpirun")),
        (SLURM | {"RANK": "5", "WORLD_SIZE": "11"}, Launch(5, 11, 1, 3, "torchrun")),
        ({"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8"}, Launch(local_rank=0)),
        (SLURM | {"WORLD_SIZE": "1"}, Launch(0, 1, 1, 3, "torchrun")),
    ],
    ids=[
        "nothing", "torchrun", "srun", "Open MPI", "Intel MPI", "Cray", "torchrun in srun", "mpirun in srun",
        "a script of one's own in srun", "a batch script is one process", "runs that do not belong together",
    ],
)  # fmt: skip
def test_a_process_finds_its_place_among_those_of_its_launcher(environment, found):
    assert launched(environment) == found


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"WORLD_SIZE": "2"}, "RANK: got None; wanted a number"),
        (TORCHRUN | {"WORLD_SIZE": "eight"}, "WORLD_SIZE: got 'eight'"),
        (SLURM | {"SLURM_LOCALID": ""}, "SLURM_LOCALID: got ''"),
        (TORCHRUN | {"RANK": "8"}, "RANK=8; wanted less than WORLD_SIZE=8"),
    ],
)
def test_a_variable_that_makes_no_sense_is_named(environment, told):
    with pytest.raises(LaunchError) as raised:
        launched(environment)
    assert told in str(raised.value)


def test_ranks_that_do_not_know_where_they_meet_are_told_what_to_export():
    found = launched(SLURM)
    with pytest.raises(LaunchError, match=r"srun started 11 ranks, but MASTER_PORT is not set.*scontrol"):
        check_meeting_point(found, SLURM | {"MASTER_ADDR": "node1"})
    check_meeting_point(found, SLURM | {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"})
