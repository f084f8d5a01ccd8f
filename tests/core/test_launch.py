"""What torchrun, srun and mpirun say of a process, and what happens where they leave something out."""

import pytest

from infinity.core.errors import LaunchError
from infinity.core.process import Launch, find_meeting_point, launched

SLURM = {
    "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "11", "SLURM_LOCALID": "1", "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),3,4", "SLURM_NTASKS": "11",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip
ONE_MACHINE = OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}
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


@pytest.mark.parametrize(
    ("environment", "address"),
    [
        (SLURM | {"SLURM_STEP_NODELIST": "node[01-04,07],gpu3"}, "node01"),
        (SLURM | {"SLURM_STEP_NODELIST": "rack[0-1]n[10-12]-ib,gpu[3-4]"}, "rack0n10-ib"),
        (SLURM | {"SLURM_STEP_NODELIST": "alone"}, "alone"),
        (SLURM | {"SLURM_STEP_NODELIST": "alone", "MASTER_ADDR": "10.0.0.1"}, "10.0.0.1"),
        (ONE_MACHINE | {"PMIX_NAMESPACE": "prterun-host-7@1"}, "127.0.0.1"),
    ],
)
def test_ranks_of_srun_and_of_mpirun_on_one_machine_know_where_they_meet(environment, address):
    job = {"SLURM_JOB_ID": "1234", "SLURM_STEP_ID": "0"}
    ports = set()
    for each in (environment | job, environment | job, environment | {"SLURM_STEP_ID": "1"}):
        find_meeting_point(launched(each), each)
        assert each["MASTER_ADDR"] == address
        ports.add(int(each["MASTER_PORT"]))
    assert all(20_000 <= port < 30_000 for port in ports)
    assert len(ports) == (2 if "SLURM_PROCID" in environment else 1)  # steps of a job meet apart
    given = {**environment, "MASTER_PORT": "29500"}
    find_meeting_point(launched(given), given)
    assert given["MASTER_PORT"] == "29500"


@pytest.mark.parametrize("environment", [SLURM, OPEN_MPI, INTEL])
def test_ranks_that_do_not_know_where_they_meet_are_told_what_to_export(environment):
    found = launched(environment)
    with pytest.raises(LaunchError, match=r"started \d+ ranks, but MASTER_PORT is not set.*-x MASTER_PORT"):
        find_meeting_point(found, environment | {"MASTER_ADDR": "node1"})
    find_meeting_point(found, environment | {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"})
