"""``infinity train | plan | rok | export | recipe``: the command line."""

import argparse
import io
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from types import FrameType

from infinity.core.errors import InfinityError

#: Exit codes: what a shell gives a process that ends by the same signal.
INTERRUPTED = 128 + signal.SIGINT
TERMINATED = 128 + signal.SIGTERM


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 1 for an error, 2 for wrong usage, 130 for Ctrl-C."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a path that the locale cannot write must not end a run
            stream.reconfigure(errors="backslashreplace")
    args = _parser().parse_args(argv)
    try:
        with _terminable():
            if args.command == "recipe":
                show_recipe_table()
            elif args.command == "export":
                _export(args.run, args.out)
            elif args.command == "plan":
                _plan(args.run, args.budget)
            elif args.command == "rok":
                _rok(args.recipe, args.overrides, args.batches, args.steps)
            else:
                _train(args.recipe, args.overrides)
    except InfinityError as error:
        if os.environ.get("INFINITY_TRACEBACK") == "1":
            raise
        print(f"infinity: {_rank()}{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt as interrupt:
        more = f"; {interrupt}" if str(interrupt) else ""
        text = f"infinity: {_rank()}interrupted; the run's files are closed{more}"
        print(text, file=sys.stderr, flush=True)
        return INTERRUPTED
    return 0


def show_recipe_table() -> None:
    """Print every key of a recipe with type, default and meaning."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from infinity.app.recipe import recipe_table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("key", "type", "default", "meaning"):
        table.add_column(name, no_wrap=name == "key", overflow="fold")
    for row in recipe_table():
        table.add_row(*(Text(cell) for cell in row))
    Console(width=None if sys.stdout.isatty() else 400).print(table)  # a pipe gets whole lines


def _train(path: str | None, overrides: Sequence[str]) -> None:
    from infinity.app.recipe import load_recipe

    recipe = load_recipe(path, overrides)
    from infinity.app.train import train

    train(recipe)


def _export(run: str, out: str) -> None:
    from infinity.api.export import export_run

    export_run(run, out)
    print(f"the model of {run} is in {out}")


def _plan(run: str, budget: str | None) -> None:
    from rich.console import Console

    from infinity.app.plan import show_plan

    show_plan(run, budget, Console(width=None if sys.stdout.isatty() else 160))


def _rok(path: str, overrides: Sequence[str], batches: str, steps: int) -> None:
    from rich.console import Console

    from infinity.app.rok import show_rok

    console = Console(width=None if sys.stdout.isatty() else 160)
    show_rok(path, overrides, batches=batches, steps=steps, console=console)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="infinity", description="Train models far larger than the memory of the machine."
    )
    parser.add_argument("--version", action="version", version=f"infinity {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    train = commands.add_parser(
        "train",
        help="train the recipe's model on its data",
        description="Train the recipe's model on its data. For many ranks: torchrun -m infinity train ...",
    )
    train.add_argument("recipe", metavar="RECIPE", help="a YAML file, as in configs/")
    train.add_argument(
        "overrides", nargs="*", metavar="key=value", help="as in train.steps=10 memory.nvme=[/mnt/a,/mnt/b]"
    )
    export = commands.add_parser(
        "export",
        help="publish a run's trained model as a directory of its own",
        description="Publish the model that a run kept (run.save) as a Hugging Face directory of its own: "
        "weights are hard links where the file system allows it, and copies elsewhere.",
    )
    export.add_argument("run", metavar="RUN", help="the run's folder, as in runs/2026-01-31_12-00-00_1")
    export.add_argument("out", metavar="OUT", help="the new directory")
    plan = commands.add_parser(
        "plan",
        help="show what a run does with its activations, or would do in another budget",
        description="Print a run's plan for its activations: each block, what the step costs beside other "
        "ways, and a picture. Nothing is trained, also when it is planned again for another budget.",
    )
    plan.add_argument("run", metavar="RUN", help="the run's folder, as in runs/2026-01-31_12-00-00_1")
    plan.add_argument(
        "--budget", metavar="SIZE", help="plan again: device memory for all that a step makes, as in 2GiB"
    )
    rok = commands.add_parser(
        "rok",
        help="measure what memory for activations buys: the recompute-offload-keep curve",
        description="Measure throughput against the activation peak for keep, recompute, offload and plan, "
        "each in a short training of its own on the recipe's data. Table, rok.json and rok.png.",
    )
    rok.add_argument("recipe", metavar="RECIPE", help="a YAML file, as in configs/")
    rok.add_argument("overrides", nargs="*", metavar="key=value", help="as of infinity train")
    rok.add_argument("--batches", default="1,2,4", help="factors of train.batch_size (default: 1,2,4)")
    rok.add_argument("--steps", type=int, default=5, help="timed steps of each point (default: 5)")
    commands.add_parser("recipe", help="list every key of a recipe, with type, default and meaning")
    return parser


@contextmanager
def _terminable() -> Iterator[None]:
    """Leave by way of every ``finally`` when a launcher or Ctrl-C ends this rank.

    After the first signal SIGTERM changes nothing, because launchers send one after Ctrl-C, while
    files are being closed. A second Ctrl-C does not wait for that.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(TERMINATED)

    before = [(number, signal.signal(number, leave)) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def _version() -> str:
    try:
        return version("infinity-offload")
    except PackageNotFoundError:
        return "(a source tree that is not installed)"


def _rank() -> str:
    return f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
