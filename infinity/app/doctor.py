"""Implements ``infinity doctor``: what every rank of a launch has, what is wrong, and what to do.

[Note: ranks that do not come]
Ranks meet in a store, not in a process group, so that one that does not come is named. Each examines its
machine, tries to reach the others where gloo would, and sends what it found to rank 0. Every wait has a time
limit: a check that blocks, as one of a dead drive does, is left on its thread and named.
"""

import contextlib
import json
import os
import platform
import resource
import shutil
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from importlib import metadata
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

import infinity
from infinity.checkpoint.model import read_config
from infinity.comm.ranks import Ranks, choose_device, own_address
from infinity.comm.shared import NodeMemory
from infinity.core.errors import InfinityError, first_line, listed, quiet_libraries
from infinity.core.files import shared_directory
from infinity.core.nbytes import format_nbytes
from infinity.core.process import Launch, find_meeting_point, launched
from infinity.data.sources import find_files
from infinity.device import accelerator, machine
from infinity.device.memory import measure_link
from infinity.engine.device_budget import check_memory
from infinity.nvme.probe import measure
from infinity.nvme.run_directory import leftovers_line
from infinity.predict.machines import measurable
from infinity.predict.plan_run import make_table, print_line
from infinity.recipes.recipe import Recipe

_PACKAGES = "torch", "numba", "numpy", "safetensors", "transformers", "libaio", "kvikio-cu12", "kvikio-cu13"
#: Packages that every rank must have in one version.
_SAME = "python", "infinity", "torch"
#: Ranks after this one that it tries to reach, and how long each may take.
_NEIGHBORS, _REACH_S = 32, 3.0
#: NCCL's buffers between devices of one machine, and files that a rank opens beside its connections.
_LEAST_SHM_NBYTES, _FILES = 2**30, 32
_PAUSE_S, _FAREWELL_S = 0.05, 5.0
#: Clocks that differ by more are told of: logs of several machines, and ages of files, are compared (s).
_MOST_SKEW_S = 1.0


@dataclass(slots=True)
class Found:
    """What one rank found; names of numbers end with their units."""

    rank: int
    host: str = field(default_factory=socket.gethostname)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)  # a run would fail
    notes: list[str] = field(default_factory=list)
    met_s: float | None = None  # this machine's clock when all ranks were examined


class Examination:
    """Examines the machine of this rank, check by check."""

    def __init__(self, recipe: Recipe, launch: Launch) -> None:
        self.recipe, self.launch, self.found = recipe, launch, Found(launch.rank)
        self.device, self._doing = torch.device("cpu"), ""

    def run(self, patience_s: float) -> Found:
        """Make every check on a thread, wait at most ``patience_s``, and return what was found by then."""
        thread = threading.Thread(target=self._run, name="infinity-doctor", daemon=True)
        thread.start()
        thread.join(patience_s)
        if thread.is_alive():
            self.found.wrong.append(
                f"{self._doing}: the check did not end in {patience_s:g} s: a drive, a network file system "
                "or an accelerator does not answer; see dmesg"
            )
        return self.found

    def _run(self) -> None:
        checks: dict[str, Callable[[], dict[str, Any]]] = {
            "software": self._software, "device": self._device, "threads": self._threads,
            "memory": self._memory, "limits": self._limits, "inputs": self._inputs,
            **{path: partial(self._drive, path) for path in self.recipe.memory.nvme},
        }  # fmt: skip
        for self._doing, check in checks.items():
            try:
                self.found.facts[self._doing] = check()
            except InfinityError as error:
                self.found.wrong.append(str(error))
            except Exception as error:  # of a library or a driver: the other checks go on
                self.found.wrong.append(f"{self._doing}: {type(error).__name__}: {first_line(error)}")
        if line := leftovers_line(self.recipe.memory.nvme, self.recipe.run.name or ""):
            self.found.notes.append(line)

    def _software(self) -> dict[str, Any]:
        versions = {"python": platform.python_version(), "infinity": infinity.__version__}
        for name in _PACKAGES:
            with contextlib.suppress(metadata.PackageNotFoundError):
                versions[name] = metadata.version(name)
        return versions

    def _device(self) -> dict[str, Any]:
        device = self.device = choose_device(self.recipe.train.device, self.launch.local_rank)
        _, line = machine.choose_dtype(self.recipe.train.dtype, device, lambda ratio: ratio)
        self.found.notes += [line] if "slow" in line else []
        if device.type == "cpu":
            return {"name": f"{device}, {platform.machine()}"}
        free, total = accelerator.memory_nbytes(device)
        upload, download = measure_link(device)
        node = machine.node_of_device(device)
        return {
            "name": f"{device}, {accelerator.name_of(device)}", "memory_nbytes": total, "free_nbytes": free,
            "NUMA_node": None if node < 0 else node, "upload_bytes_per_s": upload,
            "download_bytes_per_s": download, "id": accelerator.hardware_id(device),
            "reaches_others": "yes" if accelerator.reaches_others(device) else "no",
        }  # fmt: skip

    def _threads(self) -> dict[str, Any]:
        cores, local = machine.usable_cores(), machine.local_ranks()
        threads = self.recipe.train.threads or machine.default_threads()
        if threads * local > cores:
            self.found.notes.append(
                f"{local} ranks of this machine compute on {threads} threads each and have {cores} cores: "
                f"set train.threads={max(1, cores // local)}, or leave it and OMP_NUM_THREADS out"
            )
        return {"cores": cores, "ranks_here": local, "threads": threads, "NUMA_nodes": machine.count_nodes()}

    def _memory(self) -> dict[str, Any]:
        shm = shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0
        if self.device.type != "cpu" and machine.local_ranks() > 1 and shm < _LEAST_SHM_NBYTES:
            self.found.notes.append(
                f"/dev/shm has {format_nbytes(shm)}, too little for NCCL between many devices: docker run "
                "--ipc=host or --shm-size=8g; under Kubernetes an emptyDir of medium Memory there"
            )
        free, total = machine.free_host_nbytes(), machine.total_host_nbytes()
        self.found.notes += [line for line in [machine.missing_huge_pages()] if line]
        check_memory(self.recipe.memory, Ranks(self.launch.rank, self.launch.world_size, self.device))
        return {
            "host_nbytes": total, "free_for_a_rank_nbytes": free, "shared_memory_nbytes": shm,
            "shared_by_ranks": "yes" if NodeMemory.works() else "no",
        }  # fmt: skip

    def _limits(self) -> dict[str, Any]:
        least, files = _FILES + 4 * self.launch.world_size, resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if files != resource.RLIM_INFINITY and files < least:
            self.found.wrong.append(
                f"this rank may open {files} files and needs {least}, most of them connections to other "
                f"ranks: ulimit -n {least}"
            )
        return {"open_files": None if files == resource.RLIM_INFINITY else files}

    def _inputs(self) -> dict[str, Any]:
        model, files = self.recipe.model.path, find_files(self.recipe.data.files)
        if model is not None:
            read_config(Path(model))
        return {"model": model or "a new one", "data_files": len(files)}

    def _drive(self, directory: str) -> dict[str, Any]:
        path = Path(directory)
        if path.exists():
            shared_directory(path)
        [place] = measurable([directory])
        free = shutil.disk_usage(place).free
        facts: dict[str, Any] = {"free_nbytes": free}
        if self.launch.local_rank:
            return facts  # the first rank of the machine measures its drives
        speed = measure(place, both=True, engine=self.recipe.memory.engine)
        self.found.notes += [line for line in speed.notes if line not in self.found.notes]
        return facts | {
            "read_bytes_per_s": speed.read_bytes_per_s, "write_bytes_per_s": speed.write_bytes_per_s,
            "both_bytes_per_s": speed.both_bytes_per_s, "O_DIRECT": "yes" if speed.direct else "no",
            "engine": speed.engine,
        }  # fmt: skip


class Meeting:
    """The ranks of a launch, in a store that rank 0 or torchrun keeps; raises a RuntimeError without one.

    Each rank listens at a port.
    """

    def __init__(self, launch: Launch, patience_s: float) -> None:
        self.launch, self.patience_s = launch, patience_s
        self._server = socket.create_server(("", 0), backlog=128)
        by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        store = TCPStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), wait_for_workers=False,
            is_master=launch.rank == 0 and not by_agent, timeout=timedelta(seconds=patience_s),
        )  # fmt: skip
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._store: Any = PrefixStore(f"infinity/doctor/{start}", store)
        self._put("at", (socket.gethostname(), own_address(), self._server.getsockname()[1]))

    def _put(self, what: str, value: Any) -> None:
        self._store.set(f"{what}/{self.launch.rank}", json.dumps(value))

    def _wait_for(self, what: str, ranks: Sequence[int], patience_s: float) -> dict[int, Any]:
        """Return what ``ranks`` have written, as far as it comes in time."""
        until, come = time.monotonic() + patience_s, False
        while not come:
            come = self._store.check([f"{what}/{rank}" for rank in ranks]) or time.monotonic() >= until
            time.sleep(0 if come else _PAUSE_S)
        here = [rank for rank in ranks if self._store.check([f"{what}/{rank}"])]
        return {rank: json.loads(self._store.get(f"{what}/{rank}")) for rank in here}

    def look_around(self, found: Found) -> None:
        """Wait for the other ranks, and try to reach some."""
        rank, size = self.launch.rank, self.launch.world_size
        places = self._wait_for("at", range(size), self.patience_s)
        self._put("examined", 0)
        if len(self._wait_for("examined", sorted(places), self.patience_s)) == size:
            found.met_s = time.time()
        silent = []
        for other in [(rank + each) % size for each in range(1, min(size, _NEIGHBORS + 1))]:
            host, address, port = places.get(other, ("", "", 0))
            try:
                if host:
                    socket.create_connection((address, port), timeout=_REACH_S).close()
            except OSError:
                silent.append(f"rank {other} at {address}:{port} ({host})")
        if silent:
            found.wrong.append(
                f"cannot connect to {listed(silent, 4)}: open all TCP ports between the machines of a run, "
                "and export GLOO_SOCKET_IFNAME, the interface that joins them (if a machine is "
                "127.0.0.1 for itself, or mend /etc/hosts)"
            )
        found.facts["network"] = {"address": places[rank][1]}

    def gather(self, found: Found) -> list[Found]:
        """Return what all ranks have found, on rank 0; its own elsewhere. A rank without a word is named."""
        rank, size = self.launch.rank, self.launch.world_size
        self._put("found", asdict(found))
        if rank:
            return [found]
        came = self._wait_for("at", range(size), 0.0)
        told = self._wait_for("found", sorted(came), 2 * self.patience_s)
        everyone = {number: Found(**each) for number, each in told.items()}
        for number in sorted({*range(size)} - everyone.keys()):
            host = came[number][0] if number in came else "an unknown machine"
            how = "came, and then said nothing" if number in came else "did not come"
            text = f"{how} in {self.patience_s:g} s: see its own output; --timeout waits longer"
            everyone[number] = Found(number, host, wrong=[text])
        return [everyone[number] for number in range(size)]

    def agree(self, wrong: bool) -> bool:
        """Return whether rank 0 found something ``wrong``, on every rank, whose ports are open until then."""
        if self.launch.rank == 0:
            self._put("verdict", wrong)
            came = self._wait_for("found", range(1, self.launch.world_size), 0.0)
            self._wait_for("left", sorted(came), _FAREWELL_S)  # it keeps the store
            return wrong
        verdict = self._wait_for("verdict", [0], 4 * self.patience_s)
        self._put("left", 0)
        return bool(verdict.get(0, True))

    def close(self) -> None:
        self._server.close()


def doctor(recipe: Recipe, console: Console, *, patience_s: float, as_json: bool) -> int:
    """Examine every rank; rank 0 prints what was found. Returns 1 on all ranks if a run would fail."""
    launch, meeting = launched(), None
    examination = Examination(recipe, launch)
    with contextlib.ExitStack() as stack:
        stack.enter_context(quiet_libraries())
        try:
            if launch.world_size > 1:
                find_meeting_point(launch)
                meeting = stack.enter_context(contextlib.closing(Meeting(launch, patience_s)))
        except (InfinityError, OSError, RuntimeError, ValueError) as error:
            at = ":".join(os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
            text = f"rank {launch.rank} did not meet the others at {at} in {patience_s:g} s"
            why = f"{text}: {first_line(error).rstrip('.')}. Is rank 0 there, and the port open, and free?"
            examination.found.wrong.append(str(error) if isinstance(error, InfinityError) else why)
        found = examination.run(patience_s)
        if meeting is not None:
            try:
                meeting.look_around(found)
                everyone = meeting.gather(found)
                wrong = _show(everyone, console, as_json) if launch.rank == 0 else 0
                return int(meeting.agree(bool(wrong)))
            except RuntimeError as error:
                found.wrong.append(f"rank 0, or the launcher, ended before the others ({first_line(error)})")
        return _show([found], console, as_json)


def _compare(everyone: Sequence[Found]) -> None:
    """Add to what ranks found what only the comparison of several tells."""
    devices = Counter((each.host, each.facts.get("device", {}).get("id")) for each in everyone)
    software = [each.facts.get("software", {}) for each in everyone]
    usual = {name: Counter(each.get(name) for each in software).most_common(1)[0][0] for name in _SAME}
    for each in everyone:
        late_s = (everyone[0].met_s or 0.0) - (each.met_s or 0.0)
        if None not in (everyone[0].met_s, each.met_s) and abs(late_s) > _MOST_SKEW_S:
            each.notes.append(
                f"its clock is {abs(late_s):,.0f} s {'late' if late_s > 0 else 'early'} beside rank 0's: "
                "keep time by NTP or chrony"
            )
        own = each.facts.get("device", {}).get("id")
        if own and devices[each.host, own] > 1:
            each.wrong.append(
                f"shares its device ({own}) with another rank: start as many ranks as devices, or show each "
                "rank one of its own (srun --gpus-per-task=1, CUDA_VISIBLE_DEVICES)"
            )
        for name, version in usual.items():
            mine = each.facts.get("software", {}).get(name, version)
            if mine != version:
                each.wrong.append(f"has {name} {mine}, most ranks {version}: install one version everywhere")


def _show(everyone: Sequence[Found], console: Console, as_json: bool) -> int:
    _compare(everyone)
    wrong = _by_text((each, each.wrong) for each in everyone)
    notes = _by_text((each, each.notes) for each in everyone)
    if as_json:
        console.out(json.dumps({"ok": not wrong, "ranks": [*map(asdict, everyone)]}, indent=2))
        return int(bool(wrong))
    several, rows = len(everyone) > 1, list[tuple[str, str, str]]()
    for what in dict.fromkeys(what for each in everyone for what in each.facts):
        texts = _by_text((each, [", ".join(_words(each.facts.get(what, {})))]) for each in everyone)
        rows += [(what, who if several else "", text) for who, text in texts if text]
    table = make_table(["", "ranks", "found"], rows)
    table.columns[-1].no_wrap, table.columns[-1].justify = False, "left"
    console.print(table)
    for title, found in (("wrong", wrong), ("note", notes)):
        for who, text in found:
            print_line(console, f"{title}: {f'{who}: ' if several else ''}{text}")
    print_line(console, "a run would fail" if wrong else "nothing is wrong")
    return int(bool(wrong))


def _by_text(told: Iterable[tuple[Found, Sequence[str]]]) -> list[tuple[str, str]]:
    """Return each text once, with the ranks that have it and, where they are few, their machines."""
    ranks: dict[str, list[Found]] = {}
    for each, texts in told:
        for text in texts:
            ranks.setdefault(text, []).append(each)
    found = []
    for text, those in ranks.items():
        hosts = dict.fromkeys(each.host for each in those)
        where = f" ({', '.join(hosts)})" if len(hosts) <= 2 else f" ({len(hosts)} machines)"
        found.append((f"{_ranges([each.rank for each in those])}{where}", text))
    return found


def _ranges(numbers: Sequence[int]) -> str:
    """Return growing numbers as text: 0-3, 6."""
    groups = groupby(enumerate(numbers), key=lambda item: item[1] - item[0])
    runs = [[number for _, number in group] for _, group in groups]
    return ", ".join(f"{run[0]}-{run[-1]}" if run[1:] else f"{run[0]}" for run in runs)


def _words(facts: dict[str, Any]) -> Iterator[str]:
    for name, value in facts.items():
        ending = next(each for each in _SHOWN if name.endswith(each))
        shown, unknown = _SHOWN[ending]
        text = unknown if value is None else shown(value)
        yield text if name == "name" else f"{name.removesuffix(ending).replace('_', ' ')} {text}"


#: How values are shown, by the end of their names, and what None means there.
_SHOWN: dict[str, tuple[Callable[[Any], str], str]] = {
    "_bytes_per_s": (lambda value: f"{value / 1e9:.2g} GB/s", "not measured"),
    "_nbytes": (format_nbytes, "unlimited"),
    "": (str, "unknown"),
}
