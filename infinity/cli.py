"""The command line: ``infinity train | plan | rok | export | recipe``."""

import argparse
import io
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from types import FrameType
from typing import Any

from infinity.core.errors import InfinityError

#: Exit code after Ctrl-C, as a shell reports it.
INTERRUPTED = 128 + signal.SIGINT


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0, 1 for an error, 2 for wrong usage, 130 for Ctrl-C."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # paths may contain what the locale cannot encode
            stream.reconfigure(errors="backslashreplace")
    parser = _parser()
    args = parser.parse_args(argv)
    for name, value in vars(args).items():
        if value == [] and name != "overrides":  # argparse takes the -- of --steps=-- for no value
            parser.error(f"argument --{name}: expected one argument")
    if argv is None and args.command == "train":
        from infinity.device.allocator import restart_with_tunables

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
        print(f"infinity: {rank}{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt as interrupt:
        more = f"; {interrupt}" if str(interrupt) else ""
        print(f"infinity: {rank}interrupted; the run's files are closed{more}", file=sys.stderr, flush=True)
        return INTERRUPTED
    return 0


# --- commands; each imports what it needs, so that --help starts at once --------------------------


def _train(args: argparse.Namespace) -> None:
    from infinity.app.recipe import load_recipe

    recipe = load_recipe(args.recipe, args.overrides)
    from infinity.app.train import train

    train(recipe)


def _export(args: argparse.Namespace) -> None:
    from infinity.api.export import export_run

    export_run(args.run, args.out)
    print(f"exported the model of {args.run} to {args.out}")


def _plan(args: argparse.Namespace) -> None:
    from infinity.app.plan import show_plan

    show_plan(args.run, args.budget, _console())


def _rok(args: argparse.Namespace) -> None:
    from infinity.app.rok import show_rok

    show_rok(args.recipe, args.overrides, batches=args.batches, steps=args.steps, console=_console())


def _recipe(args: argparse.Namespace) -> None:
    from rich.table import Table
    from rich.text import Text

    from infinity.app.recipe import recipe_table

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

    train = commands.add_parser(
        "train",
        help="train a model with a recipe",
        description="Train a model with a recipe. On several ranks: torchrun -m infinity train ...",
    )
    _add_recipe(train)
    train.set_defaults(run_command=_train)

    export = commands.add_parser(
        "export",
        help="export a run's trained model as a Hugging Face directory",
        description="Export the model that a run saved (run.save) as a Hugging Face directory. Weights are "
        "hard links if the file system supports them, else copies.",
    )
    _add_run(export)
    export.add_argument("out", metavar="OUT", help="the new directory")
    export.set_defaults(run_command=_export)

    plan = commands.add_parser(
        "plan",
        help="show a run's plan for activations, or plan for another budget",
        description="Show a run's plan for activations: each block, the step time beside alternatives, and a "
        "picture. Nothing is trained, even if --budget asks for another plan.",
    )
    _add_run(plan)
    plan.add_argument(
        "--budget",
        metavar="SIZE",
        help="plan for another budget of device memory for all that a step allocates, such as 2GiB",
    )
    plan.set_defaults(run_command=_plan)

    rok = commands.add_parser(
        "rok",
        help="measure throughput against activation memory: the recompute-offload-keep curve",
        description="Measure throughput against the activation peak for keep, recompute, offload and plans, "
        "each in a short training of its own. Writes a table, rok.json and rok.png.",
    )
    _add_recipe(rok)
    rok.add_argument("--batches", default="1,2,4", help="factors of train.batch_size (default: 1,2,4)")
    rok.add_argument("--steps", type=int, default=5, help="timed steps per point (default: 5)")
    rok.set_defaults(run_command=_rok)

    recipe = commands.add_parser("recipe", help="list every recipe key with type, default and meaning")
    recipe.set_defaults(run_command=_recipe)
    return parser


def _add_recipe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="a YAML file, as in configs/")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="such as train.steps=10 memory.nvme=[/mnt/a,/mnt/b]"
    )


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run's folder, such as runs/2026-01-31_12-00-00_1")


@contextmanager
def _terminable() -> Iterator[None]:
    """Turn SIGINT, SIGTERM and SIGHUP (the terminal closed) into exceptions, so that every ``finally`` runs.

    After the first signal SIGTERM and SIGHUP are ignored, because launchers send SIGTERM after Ctrl-C while
    files are being closed. A second Ctrl-C interrupts that as well. Under ``nohup`` SIGHUP stays ignored.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        for other in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(other, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = [(number, signal.signal(number, leave)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)
