"""Kills training processes at named points and at random times, and starts them again until they are done.

A *life* is one set of ranks from start to end. A *trial* is a series of lives of one named run; all but the
last are killed. Lives are forks of one process (the *nursery*), which has imported everything and has
compiled the kernels, so a life of a tiny model takes a fraction of a second::

    run_ranks(play, 1, str(tmp_path), trials, group=False)
"""

import hashlib
import importlib
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import infinity
from infinity.comm import peers
from infinity.engine.runtime import runtime_of
from infinity.optim.elementwise import ADAMW
from infinity.optim.rules import prepare
from tests.helpers.launch import free_port
from tests.helpers.limits import HANG_S, comes_true, hang
from tests.helpers.training import build

STEPS = 6
PLACES = {
    "nvme": ["memory.host=200KiB", "memory.resident=false"],
    "host": ["memory.host=64MiB", "durability.every=1"],
    "both": ["memory.host=260KiB", "durability.every=1"],
}
#: Where a process can be killed: the function before or after a call of which it ends.
POINTS = {
    "placing a unit": "infinity.shards.tiers:Tiers.put",
    "a write": "infinity.nvme.engines:QueuedEngine.write",
    "an update": "infinity.shards.updates:Updates._landed",
    "the commit": "infinity.shards.updates:Updates.commit",
    "handing the record over": "infinity.shards.records:Records.end_commit",
    "the head": "infinity.shards.journal:Head.write",
    "in the transaction": "infinity.shards.journal:Journal._keep_from",
    "the rename": "pathlib:Path.replace",
    "the record": "infinity.shards.journal:Journal.append",
    "a removal": "pathlib:Path.unlink",
    "retire": "infinity.shards.journal:Journal.retire",
    "invalidate": "infinity.shards.journal:Journal.invalidate",
    "finding the commit": "infinity.shards.saved:find_saved",
    "clearing": "infinity.shards.saved:clear",
    "restore": "infinity.engine.runtime:restore",
    "adopting": "infinity.shards.tiers:Tiers.adopt",
    "making anew": "infinity.shards.records:_make_anew",
    "taking over": "infinity.shards.records:Records.take_over",
    "loading the small state": "infinity.api.optimizer:Optimizer.load_committed",
    "discard": "infinity.shards.records:_discard",
    "closing old files": "infinity.nvme.volume:Volume.drop_sealed",
    "close": "infinity.engine.runtime:Runtime.close",
    "settle": "infinity.engine.runtime:Runtime._settle",
    "finishing": "infinity.nvme.run_directory:RunDirectory.finish",
    "removing files": "infinity.nvme.run_directory:RunDirectory.remove_finished",
    "a saved unit": "infinity.api.portable:_write_unit",
    "a spare place": "infinity.shards.homes:DiskHome.add_version",
    "publishing": "infinity.api.portable:PortableSave._publish",
}


@dataclass(frozen=True, slots=True)
class Kill:
    """How a life is ended.

    Attributes:
        point: Of ``POINTS``; empty: at a time.
        nth: Call of it, from 1.
        after: When the call has returned, not before it.
        seconds: After the start of the life, if at a time.
        rank: Which rank; None: each, when it comes there.
        keep: Not killed, but closed after this many steps, its files kept.
        worlds: Ranks of the life; 0: the trial's.
    """

    point: str = ""
    nth: int = 1
    after: bool = False
    seconds: float = 0.0
    rank: int | None = None
    keep: int | None = None
    world: int = 0

    def __str__(self) -> str:
        who = "all" if self.rank is None else f"rank {self.rank}"
        if self.keep is not None:
            return f"{self.world or 'all'} closed after step {self.keep}"
        if not self.point:
            return f"{who} after {self.seconds:.2f} s"
        return f"{who} {'after' if self.after else 'before'} {self.point} {self.nth}"


@dataclass(frozen=True, slots=True)
class Trial:
    """Lives of a run: one for each kill, and one more that ends by itself.

    Attributes:
        world: Ranks of the last life.
        clip: Gradients are clipped, so updates start at ``step()``.
        more: Overrides.
        saves: Portable checkpoints are saved in the background.
        rule: By which it is updated.
    """

    kills: tuple[Kill, ...]
    world: int = 1
    place: str = "nvme"
    clip: bool = False
    more: tuple[str, ...] = ()
    saves: bool = False
    rule: str = "adamw"

    def __str__(self) -> str:
        clip = f", {self.rule}" + (", clipped" if self.clip else "") + (", saving" if self.saves else "")
        return f"{self.place}, {self.world} ranks{clip} {self.more}: " + "; ".join(map(str, self.kills))


@dataclass(slots=True)
class Outcome:
    """What became of a trial: an empty ``wrong`` is good."""

    trial: str
    wrong: str = ""
    reached: list[bool] = field(default_factory=list)  # whether each life was killed
    seconds: float = 0.0


class Net(nn.Module):
    """Embedding, blocks with dropout and batch norm, tied output; draws random numbers in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(61, 32)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 32)) for _ in range(3)
        )
        self.norm = nn.BatchNorm1d(32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = x + block(x)
        x = self.norm(x.flatten(0, 1))
        logits = x @ self.embed.weight.T
        return nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())


class Loader:
    """Batches from a position of its own."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world, self.position = rank, world, 0

    def next(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.position)
        self.position += 1
        tokens = torch.randint(61, (4, 9), generator=generator)
        return tokens[self.rank :: self.world]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


TOKENS = torch.arange(36).reshape(4, 9) % 61


def go_on(
    folders: Path | Sequence[Path], steps: int, *more: str, place: str = "nvme", name: str = "mine",
    dtype: str = "fp32", make: Callable[[], nn.Module] = Net, groups: Any = None, follow: Any = None,
    keep: bool = True,
) -> list[str]:  # fmt: skip
    """Go on with a run of a tiny model up to ``steps``, in this process; the losses."""
    torch.manual_seed(3)
    listed = str(folders) if isinstance(folders, Path) else ",".join(map(str, folders))
    model = build(make, dtype, [f"memory.nvme=[{listed}]", *PLACES[place], f"run.name={name}", *more])
    try:
        params = None if groups is None else groups(model)
        optimizer = infinity.AdamW(model, lr=0.01, params=params, follow=follow)
        losses = []
        for _ in range(infinity.resume(model, optimizer), steps):
            loss = model(TOKENS)
            loss.backward()
            optimizer.step()
            losses.append(loss.item().hex())
    except BaseException:
        infinity.close(model)
        raise
    infinity.close(model, keep=keep)
    return losses


# --- a life ------------------------------------------------------------------------------------------


def train(folder: Path, trial: Trial, rank: int, world: int, keep: int | None) -> None:
    """Build, resume, train, leave losses and final states in ``folder``."""
    settings = [
        f"memory.nvme=[{folder / 'nvme'}]", *PLACES[trial.place], "run.name=mine", "partition.timeout_s=20",
        f"optim.name={trial.rule}", *trial.more,
    ]  # fmt: skip
    torch.manual_seed(5)
    model = build(Net, "fp32", settings)
    try:
        damaged = [line for line in runtime_of(model).notes if "The run goes on from" in line]
        assert not damaged, damaged  # a kill damages nothing
        groups = [{"params": list(model.parameters())}]
        loader = Loader(rank, world)
        following: dict[str, Any] = {"loader": loader}
        optimizer = infinity.optim.Optimizer(
            model, trial.rule, lr=0.01, params=groups, follow=following,
            max_grad_norm=0.5 if trial.clip else None,
        )  # fmt: skip
        torch.manual_seed(11 + rank)
        start = infinity.resume(model, optimizer)
        log = os.open(folder / f"losses.{rank}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        save = None

        def save_beside(step: int) -> None:
            nonlocal save
            if save is not None:
                save.wait()
            out = folder / f"saved-{step}-{os.getpid()}"
            save = infinity.save_checkpoint(model, optimizer, out, background=True)

        for step in range(start, STEPS if keep is None else keep):
            loss = model(loader.next())
            loss.backward()
            optimizer.step()
            os.write(log, f"{step} {loss.item().hex()}\n".encode())
            if trial.saves and step % 3 == 0:
                save_beside(step)
        if trial.saves and keep is None:  # so that each life saves, however far the one before came
            save_beside(STEPS)
        if save is not None:
            save.wait()
        if keep is None:
            weights, states = infinity.state_dict(model), optimizer.state_dict()["state"]
            if rank == 0:
                torch.save((weights, states), folder / "final.part")
                (folder / "final.part").rename(folder / "final")
        infinity.close(model, keep=keep is not None)
    except BaseException:
        infinity.close(model)
        raise


def arm(kill: Kill) -> None:
    """Let this process die where ``kill`` says."""
    if not kill.point:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # which ends a process as SIGKILL does: at once
        signal.setitimer(signal.ITIMER_REAL, max(kill.seconds, 0.001))
        return
    module, _, path = POINTS[kill.point].partition(":")
    owner: Any = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    original, lock, calls = getattr(owner, name), threading.Lock(), [0]

    def patched(*args: Any, **given: Any) -> Any:
        with lock:
            calls[0] += 1
            mine = calls[0] == kill.nth
        if mine and not kill.after:
            die()
        result = original(*args, **given)
        if mine:
            die()
        return result

    setattr(owner, name, patched)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    hang()


def live(folder: Path, trial: Trial, kill: Kill | None, rank: int, world: int, port: int) -> None:
    """One rank of a life: a fork of the nursery; does not return."""
    code = 1
    try:
        os.setpgid(0, 0)
        out = os.open(folder / f"log.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        (folder / f"error.{rank}").unlink(missing_ok=True)
        numbers = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world}
        for key, number in numbers.items():
            os.environ.pop(key, None)
            if world > 1:
                os.environ[key] = str(number)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        if kill is not None and kill.keep is None and kill.rank in (None, rank):
            arm(kill)
        train(folder, trial, rank, world, None if kill is None else kill.keep)
        if dist.is_initialized():
            dist.destroy_process_group()
        code = 0
    except BaseException as error:
        traceback.print_exc()
        (folder / f"error.{rank}").write_text(f"{type(error).__name__}: {error}")
    finally:
        os._exit(code)


# --- a trial -----------------------------------------------------------------------------------------


def run_life(folder: Path, trial: Trial, kill: Kill | None, *, limit_s: float = HANG_S) -> list[int | None]:
    """Exit codes of the ranks of a life; None: it hung."""
    world = kill.world if kill is not None and kill.world else trial.world
    port = free_port() if world > 1 else 0
    pids = []
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            live(folder, trial, kill, rank, world, port)
        pids.append(pid)
    codes: dict[int, int] = {}

    def ended() -> bool:
        for pid in pids:
            if pid not in codes:
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    codes[pid] = os.waitstatus_to_exitcode(status)
        return len(codes) == world

    comes_true(ended, limit_s)
    for pid in pids:
        if pid not in codes:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return [codes.get(pid) for pid in pids]


def run_trial(folder: Path, trial: Trial, expected: "Expected", allowed: Sequence[str]) -> Outcome:
    folder.mkdir()
    outcome, began = Outcome(str(trial)), time.monotonic()
    try:
        wanted = expected.of(trial)
        lives: list[Kill | None] = [*trial.kills, None]
        reshards, spurious = any(kill.keep is not None for kill in trial.kills), 0
        while lives:
            kill = lives.pop(0)
            codes = run_life(folder, trial, kill)
            problem, killed = judge(folder, kill, codes, allowed)
            if kill is not None:
                outcome.reached.append(killed)
            elif problem.startswith("PeerError") and spurious < 2:  # a slow machine
                spurious += 1
                lives.insert(0, None)
                continue
            if problem:
                raise AssertionError(f"{kill}: {codes} {problem}\n{log_of(folder)}")
            nvme = folder / "nvme"
            over = not list(nvme.glob("*/*.commits-head")) or list(nvme.glob("*/*.finished"))
            if reshards and (folder / "final").exists() and over:
                break  # it has ended; another life would begin anew, with the last number of ranks
        compare(folder, wanted)
        left = list((folder / "nvme").glob("*/*"))
        assert not left or (reshards and killed), f"left behind: {left}"
    except AssertionError as error:
        outcome.wrong = str(error)
    outcome.seconds = time.monotonic() - began
    return outcome


def judge(
    folder: Path, kill: Kill | None, codes: list[int | None], allowed: Sequence[str]
) -> tuple[str, bool]:
    """What is wrong with the end of a life, and whether it was killed."""
    died = [code in (-signal.SIGKILL, -signal.SIGALRM) for code in codes]
    for rank, code in enumerate(codes):
        if code is None:
            return f"rank {rank} hung", True
        if code == 0 or (died[rank] and kill is not None):
            continue
        error = (folder / f"error.{rank}").read_text() if (folder / f"error.{rank}").exists() else "no error"
        if any(died) and error.startswith(("PeerError", *allowed)):
            continue
        return error, any(died)
    return "", any(died)


def log_of(folder: Path) -> str:
    return "\n".join(
        f"{path.name}: {path.read_text(errors='replace')[-3000:]}" for path in sorted(folder.glob("log.*"))
    )


#: SHA-256 of every file of each saved step.
Saved = dict[str, set[str]]
Final = tuple[dict[str, torch.Tensor], dict[int, dict[str, torch.Tensor]]]


def results(folder: Path) -> tuple[dict[int, dict[int, set[str]]], Final, Saved]:
    """Losses by rank and step, all that were seen; final weights and states; what was saved."""
    losses: dict[int, dict[int, set[str]]] = {}
    for path in folder.glob("losses.*"):
        for line in path.read_text().splitlines():
            step, loss = line.split(" ")
            losses.setdefault(int(path.suffix[1:]), {}).setdefault(int(step), set()).add(loss)
    saved: Saved = {}
    for path in folder.glob("saved-*/*.distcp"):
        name = f"{path.parent.name.rpartition('-')[0]} {path.name}"
        saved.setdefault(name, set()).add(hashlib.sha256(path.read_bytes()).hexdigest())
    return losses, torch.load(folder / "final"), saved


def compare(folder: Path, wanted: tuple[dict[int, dict[int, set[str]]], Final, Saved]) -> None:
    losses, (weights, states), saved = results(folder)
    for name, seen in saved.items():
        assert seen <= wanted[2][name], f"{name} was saved with other bytes"
    for rank, steps in losses.items():
        for step, seen in steps.items():
            assert seen <= wanted[0][rank][step], f"rank {rank} step {step}: {seen} {wanted[0][rank][step]}"
    for key, value in wanted[1][0].items():
        assert torch.equal(weights[key], value), key
    for index, fields in wanted[1][1].items():
        for name, value in fields.items():
            assert torch.equal(torch.as_tensor(states[index][name]), torch.as_tensor(value)), (index, name)


class Expected:
    """Results of runs that nothing interrupted, but to change the number of ranks."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[Any, Any] = {}

    def of(self, trial: Trial) -> Any:
        kept = tuple(kill for kill in trial.kills if kill.keep is not None)
        key = trial.world, trial.clip, trial.saves, trial.rule, kept
        if key not in self._made:
            folder = self._folder / f"expected{len(self._made)}"
            folder.mkdir()
            clean = replace(trial, kills=kept, place="nvme", more=("memory.host=16MiB",))
            for kill in (*kept, None):
                codes = run_life(folder, clean, kill)
                assert not any(codes), f"{codes} {log_of(folder)}"
            self._made[key] = results(folder)
        return self._made[key]


def play(folder: str, trials: Sequence[Trial], allowed: Sequence[str] = ()) -> list[Outcome]:
    """The nursery: runs trials one after the other."""
    peers.BEAT_S = 0.2  # of the lives: who survives learns sooner
    prepare(ADAMW, torch.float32, torch.float32)
    here = Path(folder)
    expected = Expected(here)
    return [run_trial(here / str(number), trial, expected, allowed) for number, trial in enumerate(trials)]
