"""The command line: ``infinity train | resume | runs | verify | export | save | plan | probe | ...``."""

import argparse
import io
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from types import FrameType
from typing import Any, TypeAlias

from infinity.core.errors import InfinityError, RecipeError

#: Exit codes of the signals that stop a command: as a shell reports them, and "try again later" for SIGUSR1,
#: which schedulers send before the time is up (SLURM: --signal=USR1@60).
STOPPED = {
    signal.SIGINT: 128 + signal.SIGINT,
    signal.SIGTERM: 128 + signal.SIGTERM,
    signal.SIGHUP: 128 + signal.SIGHUP,
    signal.SIGUSR1: os.EX_TEMPFAIL,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0, 1 for an error, 2 for wrong usage, or one of ``STOPPED``."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # paths may contain what the locale cannot encode
            stream.reconfigure(errors="backslashreplace")
    parser = _parser()
    if (sys.argv[1:] if argv is None else argv)[:1] == ["rok"]:
        parser.error("infinity rok is now python benchmarks/rok.py, with the same arguments")
    args, more = parser.parse_known_args(argv)
    if more and (not hasattr(args, "overrides") or any(each.startswith("-") for each in more)):
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    if more:  # argparse ends a list of arguments at the first option
        args.overrides = [*args.overrides, *more]
    for name, value in vars(args).items():
        if value == [] and name != "overrides":  # argparse takes the -- of --steps=-- for no value
            parser.error(f"argument --{name}: expected one argument")
    if argv is None and args.command in ("train", "resume"):
        from infinity.device.accelerator import restart_with_tunables

        restart_with_tunables(sys.argv[0], sys.argv[1:])  # before torch is imported
    # Neither a recipe nor a checkpoint fetches anything, whatever the environment says.
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", USE_HUB_KERNELS="0")
    rank = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
    try:
        with _terminable():
            args.run_command(args)
            sys.stdout.flush()
    except BrokenPipeError:  # as in infinity recipe | head; what is left is not flushed at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except InfinityError as error:
        if os.environ.get("INFINITY_TRACEBACK") == "1":
            raise
        _say(f"{rank}{type(error).__name__}: {error}", error)
        return 1
    except _Stopped as stop:
        _say(f"{rank}stopped by {stop.signal.name}; the run's files are closed", stop)
        return STOPPED[stop.signal]
    except KeyboardInterrupt as interrupt:
        _say(f"{rank}interrupted; the run's files are closed", interrupt)
        return STOPPED[signal.SIGINT]
    return 0


def _say(line: str, error: BaseException) -> None:
    """Print a line and the notes of an error, such as how a run goes on; or of one that it interrupted."""
    noted: BaseException | None = error
    while noted is not None and not hasattr(noted, "__notes__"):
        noted = noted.__context__
    notes = getattr(noted, "__notes__", ())
    print("\n".join((f"infinity: {line}", *notes)), file=sys.stderr, flush=True)


# --- commands; each imports what it needs, so that --help starts at once --------------------------


def _train(args: argparse.Namespace) -> None:
    if args.dry_run:
        from infinity.predict.plan_recipe import show_recipe

        show_recipe(args.recipe, args.overrides, _console(), on=args.on, ranks=args.ranks, tokens=args.tokens)
        return
    for name in ("on", "ranks", "tokens"):
        if getattr(args, name) is not None:
            raise RecipeError(f"--{name} is for --dry-run, which trains nothing")
    from infinity.recipes.recipe import load_recipe

    recipe = load_recipe(args.recipe, args.overrides)
    from infinity.app.train import train

    train(recipe)


def _resume(args: argparse.Namespace) -> None:
    from infinity.app.runs import interrupted_run

    recipe = interrupted_run(args.run, args.overrides)
    from infinity.app.train import train

    train(recipe)


def _runs(args: argparse.Namespace) -> None:
    from infinity.app.runs import list_runs, remove_runs, runs_table
    from infinity.core.files import user_path

    folder = user_path(args.dir, "DIR")
    if args.remove:
        removed = remove_runs(folder, args.remove, (lambda line: True) if args.yes else _confirm)
        print("removed" if removed else "nothing was removed; --yes removes without asking")
    else:
        _console().print(runs_table(list_runs(folder)))


def _verify(args: argparse.Namespace) -> None:
    from infinity.app.runs import verify_run

    for line in verify_run(args.run):
        print(line, flush=True)


def _confirm(line: str) -> bool:
    try:
        return input(f"{line}? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


def _export(args: argparse.Namespace) -> None:
    from infinity.app.save import publish_run

    _report(f"exported {publish_run(args.run, args.out, stored=args.stored)} to {args.out}")


def _save(args: argparse.Namespace) -> None:
    from infinity.app.save import save_run

    _report(f"saved {save_run(args.run, args.dir)} to {args.dir}")


def _report(line: str) -> None:
    if os.environ.get("RANK", "0") == "0":  # all ranks of torchrun come here
        print(line)


def _plan(args: argparse.Namespace) -> None:
    from infinity.core.files import is_file

    if is_file(args.run):
        from infinity.predict.plan_recipe import show_recipe

        show_recipe(
            args.run, args.overrides, _console(), on=args.on, ranks=args.ranks, budget=args.budget,
            tokens=args.tokens,
        )  # fmt: skip
    elif args.overrides or any(getattr(args, name) is not None for name in ("on", "ranks", "tokens")):
        raise RecipeError(
            f"{args.run}: no such file; key=value, --on, --ranks and --tokens are for plans of a recipe"
        )
    else:
        from infinity.predict.plan_run import show_plan

        show_plan(args.run, args.budget, _console())


def _probe(args: argparse.Namespace) -> None:
    from infinity.core.files import user_path
    from infinity.predict.machines import describe_machine, probe, write_machine

    machine = probe(args.dir)
    print(describe_machine(machine))
    if args.output is not None:
        write_machine(machine, user_path(args.output, "--output"))
        print(f"wrote {args.output}; plan for it with: infinity plan RECIPE --on {args.output}")


def _recipe(args: argparse.Namespace) -> None:
    from rich.table import Table
    from rich.text import Text

    from infinity.recipes.recipe import recipe_table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("key", "type and range", "default", "meaning"):
        table.add_column(name, no_wrap=name == "key", overflow="fold")
    for row in recipe_table():
        table.add_row(*(Text(cell) for cell in row))
    _console(400).print(table)


def _console(width: int = 160) -> Any:
    """Return a console of standard output; a pipe gets lines of ``width`` characters."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else width)


# --- arguments -----------------------------------------------------------------------------------

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def _parser() -> argparse.ArgumentParser:
    try:
        installed = version("infinity-offload")
    except PackageNotFoundError:
        installed = "(source tree, not installed)"
    parser = argparse.ArgumentParser(
        prog="infinity", description="Train models that are larger than the machine's memory."
    )
    parser.add_argument("--version", action="version", version=f"infinity {installed}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    for add in (
        _add_train_command, _add_resume_command, _add_runs_command, _add_verify_command, _add_export_command,
        _add_save_command, _add_plan_command, _add_probe_command, _add_recipe_command,
    ):  # fmt: skip
        add(commands)
    return parser


def _add_train_command(commands: Commands) -> None:
    train = commands.add_parser(
        "train",
        help="train a model with a recipe",
        description="Train a model with a recipe. On several ranks: torchrun -m infinity train ...",
    )
    _add_recipe(train)
    train.add_argument(
        "--dry-run", action="store_true", help="train nothing: say what the run would need and take"
    )
    _add_hardware(train)
    train.set_defaults(run_command=_train)


def _add_resume_command(commands: Commands) -> None:
    resume = commands.add_parser(
        "resume",
        help="go on with a run that was interrupted",
        description="Go on after the last committed step of a run that was interrupted, with the recipe in "
        "its folder. On several ranks: torchrun -m infinity resume ...",
    )
    _add_run(resume)
    _add_overrides(resume, "such as memory.host=16GiB; what changes a run's numbers must stay")
    resume.set_defaults(run_command=_resume)


def _add_runs_command(commands: Commands) -> None:
    runs = commands.add_parser(
        "runs",
        help="list runs, or remove some",
        description="List runs with their state, step, bytes on drives, and the time since they were "
        "written. With --remove: remove their folders, and their files on the drives of this machine.",
    )
    runs.add_argument("dir", nargs="?", default="runs", metavar="DIR", help="their directory (default: runs)")
    runs.add_argument("--remove", nargs="+", metavar="NAME", help="remove these, after asking")
    runs.add_argument("--yes", action="store_true", help="remove without asking")
    runs.set_defaults(run_command=_runs)


def _add_verify_command(commands: Commands) -> None:
    verify = commands.add_parser(
        "verify",
        help="check everything that an interrupted run keeps on drives",
        description="Check what an interrupted run goes on from: its records, and, if it ran with "
        "memory.verify=true, each block of weights and optimizer states. The exit code is 1 if something is "
        "damaged.",
    )
    verify.add_argument(
        "run",
        nargs="+",
        metavar="RUN",
        help="a run's folder; of a loop of your own, the run's directory on every drive (memory.nvme/NAME)",
    )
    verify.set_defaults(run_command=_verify)


def _add_export_command(commands: Commands) -> None:
    export = commands.add_parser(
        "export",
        help="export a run's trained model as a Hugging Face directory",
        description="Export the model that a run saved (run.save) as a Hugging Face directory. Weights are "
        "hard links if the file system supports them, else copies. Of a run that was interrupted: the model "
        "after its last committed step; the run can still go on.",
    )
    _add_run(export)
    export.add_argument("out", metavar="OUT", help="the new directory")
    export.add_argument(
        "--stored",
        action="store_true",
        help="quantize the weights again, in the files and the form (FP8, MXFP4, INT4) of the checkpoint "
        "that the run trained (model.path), and say how far they are from the trained ones",
    )
    export.set_defaults(run_command=_export)


def _add_save_command(commands: Commands) -> None:
    save = commands.add_parser(
        "save",
        help="save an interrupted run's last step as a portable checkpoint",
        description="Save the weights and optimizer states of the last committed step of a run that was "
        "interrupted as a directory of torch.distributed.checkpoint, which FSDP2 and torchtitan load on any "
        "number of ranks. The run can still go on. On several ranks: torchrun -m infinity save ...",
    )
    _add_run(save)
    save.add_argument("dir", metavar="DIR", help="the new directory")
    save.set_defaults(run_command=_save)


def _add_plan_command(commands: Commands) -> None:
    plan = commands.add_parser(
        "plan",
        help="say what a recipe needs and takes on some hardware, or show a run's plan for activations",
        description="Of a recipe: what lies where, the least budgets, bytes and time of a step and what "
        "bounds it, cost, the drives' life, and what would be faster, without reading a weight. Of a run: "
        "its plan for activations, block by block, beside alternatives, with a picture. Nothing is trained.",
    )
    plan.add_argument(
        "run", metavar="RECIPE|RUN", help="a recipe, as in configs/, or a run's folder, such as runs/mine"
    )
    _add_overrides(
        plan,
        "of a recipe, such as train.batch_size=4 memory.host=100GiB; of the hardware, such as "
        "drives.per_node=4",
    )
    _add_hardware(plan)
    plan.add_argument(
        "--budget",
        metavar="SIZE",
        help="of a recipe: memory.device; of a run: plan for another budget of device memory for all that a "
        "step allocates, such as 2GiB",
    )
    plan.set_defaults(run_command=_plan)


def _add_probe_command(commands: Commands) -> None:
    probe = commands.add_parser(
        "probe",
        help="measure this machine, and write a hardware file",
        description="Measure what computes, host memory and the drives of the given directories, in some "
        "seconds, and write a hardware file for infinity plan --on.",
    )
    probe.add_argument("dir", nargs="*", metavar="DIR", help="a directory on each drive")
    probe.add_argument("--output", metavar="FILE", help="the hardware file to write, such as here.yaml")
    probe.set_defaults(run_command=_probe)


def _add_recipe_command(commands: Commands) -> None:
    recipe = commands.add_parser("recipe", help="list every recipe key with type, default and meaning")
    recipe.set_defaults(run_command=_recipe)


def _add_recipe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="a YAML file, as in configs/")
    _add_overrides(parser, "such as train.steps=10 memory.nvme=[/mnt/a,/mnt/b]")


def _add_overrides(parser: argparse.ArgumentParser, help: str) -> None:
    # The default says to argparse that none is needed.
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=help)


def _add_hardware(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--on",
        metavar="HARDWARE",
        help="a hardware file, or a name such as hgx-h100 (configs/hardware); default: this machine",
    )
    parser.add_argument(
        "--ranks", type=_at_least_one(int), metavar="N", help="ranks in all (default: one for each device)"
    )
    parser.add_argument(
        "--tokens",
        type=_at_least_one(float),
        metavar="N",
        help="tokens to train on, such as 1e9 (default: train.steps)",
    )


def _at_least_one(kind: Callable[[str], float]) -> Callable[[str], float]:
    """Return what reads an argument of a ``kind``, a number of things."""

    def read(text: str) -> float:
        number = kind(text)
        if not 1 <= number < math.inf:
            raise argparse.ArgumentTypeError(f"got {text[:100]}; wanted a number >= 1")
        return number

    read.__name__ = kind.__name__  # argparse names it where the text is no number
    return read


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run's folder, such as runs/2026-01-31_12-00-00_1")


class _Stopped(SystemExit):
    """A signal other than Ctrl-C stops the command."""

    def __init__(self, number: int) -> None:
        self.signal = signal.Signals(number)
        super().__init__(STOPPED[self.signal])


@contextmanager
def _terminable() -> Iterator[None]:
    """Turn the signals of ``STOPPED`` into exceptions, so that every ``finally`` runs.

    After the first one all but SIGINT are ignored, because launchers send SIGTERM after Ctrl-C while files
    are being closed. A second Ctrl-C interrupts that as well. Under ``nohup`` SIGHUP stays ignored.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        for other in STOPPED:
            signal.signal(other, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        raise KeyboardInterrupt if number == signal.SIGINT else _Stopped(number)

    numbers = set(STOPPED)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        numbers.remove(signal.SIGHUP)
    before = [(number, signal.signal(number, leave)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)
