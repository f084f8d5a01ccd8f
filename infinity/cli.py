"""The command line: ``infinity train | resume | runs | verify | export | save | plan | doctor | ...``."""

import argparse
import io
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from types import FrameType
from typing import Any, NoReturn, TypeAlias

from infinity import __version__
from infinity.core.errors import InfinityError, RecipeError, library_errors
from infinity.core.process import launched

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
    args = _parse(sys.argv[1:] if argv is None else argv)
    if argv is None and args.command in ("train", "resume"):
        from infinity.device.accelerator import restart_with_tunables

        restart_with_tunables(sys.argv[0], sys.argv[1:])  # before torch is imported
    # Neither a recipe nor a checkpoint fetches anything, whatever the environment says.
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", USE_HUB_KERNELS="0")
    try:
        with _terminable():
            code = args.run_command(args)
            sys.stdout.flush()
    except BrokenPipeError:  # as in infinity recipe | head; what is left is not flushed at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except InfinityError as error:
        if os.environ.get("INFINITY_TRACEBACK") == "1":
            raise
        _say(f"{type(error).__name__}: {error}", error)
        return 1
    except (_Stopped, KeyboardInterrupt) as stop:
        number = stop.signal if isinstance(stop, _Stopped) else signal.SIGINT
        how = "interrupted" if number == signal.SIGINT else f"stopped by {number.name}"
        _say(f"{how}; the run's files are closed", stop)
        return STOPPED[number]
    return code or 0


def _say(line: str, error: BaseException) -> None:
    """Print a line and the notes of an error, such as how a run goes on; or of one that it interrupted."""
    noted: BaseException | None = error
    while noted is not None and not hasattr(noted, "__notes__"):
        noted = noted.__context__
    rank = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
    lines = f"infinity: {rank}{line}", *getattr(noted, "__notes__", ())
    print("\n".join(lines), file=sys.stderr, flush=True)


class _Stopped(SystemExit):
    """A signal other than Ctrl-C stops the command."""

    def __init__(self, number: int) -> None:
        self.signal = signal.Signals(number)
        super().__init__(STOPPED[self.signal])


@contextmanager
def _terminable() -> Iterator[None]:
    """Turn the signals of ``STOPPED`` into exceptions, so that every ``finally`` runs.

    After the first one all but SIGINT are ignored: launchers send SIGTERM after Ctrl-C, while files are being
    closed. Under ``nohup`` SIGHUP stays ignored.
    """

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        for other in STOPPED:
            signal.signal(other, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        raise KeyboardInterrupt if number == signal.SIGINT else _Stopped(number)

    numbers = set(STOPPED)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        numbers.remove(signal.SIGHUP)
    before = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_PARSER = argparse.ArgumentParser(
    prog="infinity", description="Train models that are larger than the machine's memory."
)
_PARSER.add_argument("--version", action="version", version=f"infinity {__version__}")
_COMMANDS = _PARSER.add_subparsers(dest="command", required=True, metavar="COMMAND")
_Argument: TypeAlias = tuple[str, dict[str, Any]]


def _command(*arguments: _Argument) -> Callable[[Callable[..., int | None]], object]:
    """Decorator that makes ``_name`` the command ``infinity name``; its docstring is the help."""

    def add(run: Callable[..., int | None]) -> object:
        text = run.__doc__ or ""
        summary = text[:1].lower() + text.partition(".")[0][1:]
        parser = _COMMANDS.add_parser(run.__name__[1:], help=summary, description=text)
        for name, options in arguments:
            parser.add_argument(name, **options)
        parser.set_defaults(run_command=run)
        return run

    return add


def _argument(name: str, metavar: str, help: str, **options: Any) -> _Argument:
    return name, {"metavar": metavar, "help": help, **options}


def _flag(name: str, help: str) -> _Argument:
    return name, {"action": "store_true", "help": help}


def _overrides(help: str) -> _Argument:
    return _argument("overrides", "key=value", help, nargs="*", default=())


def _at_least(least: int, kind: Callable[[str], float]) -> Callable[[str], float]:
    """Return what reads an argument of a ``kind``, a number from ``least`` on."""

    def read(text: str) -> float:
        number = kind(text)
        if not least <= number < math.inf:
            raise argparse.ArgumentTypeError(f"got {text[:100]}; wanted a number >= {least}")
        return number

    read.__name__ = kind.__name__  # argparse names it where the text is no number
    return read


_RUN = _argument("run", "RUN", "a run's folder, such as runs/2026-01-31_12-00-00_1")
_HARDWARE = (
    _argument(
        "--on", "HARDWARE", "a file, or a name such as hgx-h100 (configs/hardware); default: this machine"
    ),
    _argument("--ranks", "N", "ranks in all (default: one for each device)", type=_at_least(1, int)),
    _argument(
        "--tokens", "N", "tokens to train on, such as 1e9 (default: train.steps)", type=_at_least(1, float)
    ),
)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the arguments of a command; leave the process where they are wrong."""
    args, more = _PARSER.parse_known_args(argv)
    if more and (not hasattr(args, "overrides") or any(each.startswith("-") for each in more)):
        _PARSER.error(f"unrecognized arguments: {' '.join(more)}")
    if more:  # argparse ends a list of arguments at the first option
        args.overrides = [*args.overrides, *more]
    for name, value in vars(args).items():
        if value == []:  # argparse takes the -- of --steps=-- for no value
            _PARSER.error(f"argument --{name}: expected one argument")
    return args


# Each command imports what it needs, so that --help starts at once.
@_command(
    _argument("recipe", "RECIPE", "a YAML file, as in configs/"),
    _overrides("such as train.steps=10 memory.nvme=[/mnt/a,/mnt/b]"),
    _flag("--dry-run", "train nothing: say what the run would need and take"),
    *_HARDWARE,
)
def _train(args: argparse.Namespace) -> None:
    """Train a model with a recipe. On several ranks: torchrun -m infinity train ..."""
    if args.dry_run:
        _show_recipe(args.recipe, args)
        return
    if given := _hardware_options(args):
        raise RecipeError(f"--{next(iter(given))} is for --dry-run, which trains nothing")
    from infinity.recipes.loading import load_recipe

    recipe = load_recipe(args.recipe, args.overrides)
    from infinity.app.train import train

    train(recipe)


@_command(
    _argument("recipe", "RECIPE", "a YAML file, as in configs/"),
    _overrides("such as data.files=[chat.jsonl] data.fields='{prompt: question}'"),
)
def _data(args: argparse.Namespace) -> None:
    """Show what a recipe's data becomes: examples with their mask, lengths, and what is left out.

    Tokens are made and cached as infinity train would. No weight of a model is read.
    """
    from infinity.app.data import show_data

    show_data(args.recipe, args.overrides, _console())


@_command(_RUN, _overrides("such as memory.host=16GiB; what changes a run's numbers must stay"))
def _resume(args: argparse.Namespace) -> None:
    """Go on with a run that was interrupted, after its last committed step.

    Its recipe is in its folder. On several ranks: torchrun -m infinity resume ...
    """
    from infinity.app.runs import interrupted_run

    recipe = interrupted_run(args.run, args.overrides)
    from infinity.app.train import train

    train(recipe)


@_command(
    _argument("dir", "DIR", "their directory (default: runs)", nargs="?", default="runs"),
    _argument("--remove", "NAME", "remove these, after asking", nargs="+"),
    _flag("--yes", "remove without asking"),
)
def _runs(args: argparse.Namespace) -> None:
    """List runs, or remove some: their folders, and their files on the drives of this machine.

    A run has its state, step, bytes on drives, and the time since they were written.
    """
    from infinity.app.runs import list_runs, remove_runs, runs_table
    from infinity.core.files import user_path

    folder = user_path(args.dir, "DIR")
    if args.remove:
        removed = remove_runs(folder, args.remove, (lambda line: True) if args.yes else _confirm)
        print("removed" if removed else "nothing was removed; --yes removes without asking")
    else:
        _console().print(runs_table(list_runs(folder)))


def _confirm(line: str) -> bool:
    try:
        return input(f"{line}? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


@_command(
    _argument(
        "run",
        "RUN",
        "a run's folder; of a loop of your own, the run's directory on every drive (memory.nvme/NAME)",
        nargs="+",
    )
)
def _verify(args: argparse.Namespace) -> None:
    """Check everything that an interrupted run keeps on drives.

    That is its records, and with memory.verify=true each block of states. The exit code is 1 if something is
    damaged.
    """
    from infinity.app.runs import verify_run

    for line in verify_run(args.run):
        print(line, flush=True)


@_command(
    _RUN,
    _argument("out", "OUT", "the new directory"),
    _flag(
        "--stored",
        "quantize the weights again, in the files and the form (such as FP8) of the checkpoint that "
        "the run trained (model.path), and say how far they are from the trained ones",
    ),
    _flag("--best", "the model of the best evaluation (train.keep_best), in place of the last one"),
    _flag("--ema", "the average of the weights that the run keeps (optim.ema), in place of the last ones"),
    _flag("--merge", "merge adapters into the weights of their base; RUN may be a directory of adapters"),
    _flag(
        "--per-expert",
        "write adapters of packed experts as those of a layer for each expert, as vLLM and SGLang load them",
    ),
    _argument("--base", "DIR", "the base of a directory of adapters (default: as they say)"),
    _argument(
        "--adapter", "NAME", "of several adapters this one (default: all, each in a folder of its name)"
    ),
)
def _export(args: argparse.Namespace) -> None:
    """Export a run's trained model as a Hugging Face directory.

    It is the model that the run saved (run.save), by hard links if the file system supports them. Of a run
    that was interrupted it is the model after its last committed step; the run can still go on.
    """
    from infinity.app.export import publish_run

    names = "stored", "merge", "per_expert", "base", "adapter", "best", "ema"
    with _progress() as show:
        given = {name: getattr(args, name) for name in names}
        what = publish_run(args.run, args.out, on_progress=show, **given)
    _say_once(f"exported {what} to {args.out}")


@_command(_RUN, _argument("--output", "FILE", "the page to write (default: report.html in the run's folder)"))
def _report(args: argparse.Namespace) -> None:
    """Write a page about a run: one HTML file, which needs no network.

    It has curves (by matplotlib: extra plots), the run's summary, samples and the recipe.
    """
    from infinity.app.report import write_report

    print(f"wrote {write_report(args.run, _new_file(args.output, may_exist=True))}")


@_command(
    _argument("run", "RUN|DIR", "a run's folder, or a model or adapters that were exported"),
    _argument("--prompt", "TEXT", "answer this, and end (default: the lines of standard input)"),
    _argument("--tokens", "N", "tokens of an answer, at most", type=_at_least(1, int), default=512),
    _argument(
        "--temperature", "T", "0: the likeliest token each time", type=_at_least(0, float), default=0.0
    ),
    _flag("--plain", "continue each text, in place of answering it with the chat template"),
    _argument("--adapter", "NAME", "of several adapters this one"),
)
def _chat(args: argparse.Namespace) -> None:
    """Talk to a run's model, or an exported one, with the chat template of its tokenizer.

    Weights of a run are those that it saved (run.save), or, where it was interrupted, those of its last
    committed step; it can still go on.
    """
    from infinity.app.export import chat
    from infinity.app.samples import Writing

    prompts = _typed() if args.prompt is None else [args.prompt]
    how = Writing(args.tokens, args.temperature)
    chat(args.run, prompts, how, plain=args.plain, adapter=args.adapter)


def _typed() -> Iterator[str]:
    """Yield lines of standard input, which a terminal is asked for; an empty one is passed over."""
    while True:
        try:
            line = input("> ") if sys.stdin.isatty() else input()
        except EOFError:
            return
        if line.strip():
            yield line


@_command(
    _argument("model", "DIR", "a Hugging Face checkpoint directory with plain weights"),
    _argument("out", "OUT", "the new directory"),
    _argument("--as", "FORM", "fp8, int8, mxfp4, nvfp4 or nf4", dest="form", required=True),
)
def _quantize(args: argparse.Namespace) -> None:
    """Quantize the linear layers and experts of a checkpoint, and say how far they are from it.

    Numbers are rounded to the nearest, without data. Embeddings, norms, routers and the head stay as they
    are. Memory holds a piece of a matrix at a time. The directory is one that the form's own library reads.
    """
    import infinity

    with _progress() as show:
        result = infinity.quantize(args.model, args.out, args.form, on_progress=show)
    _say_once(f"{args.out}: {result}")


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], object]]:
    """Yield what shows, on rank 0, how far a command is that may take long."""
    from infinity.observe.metrics import ProgressDisplay, View

    with closing(ProgressDisplay(0) if launched().rank == 0 else View()) as view:
        yield view.progress


@_command(_RUN, _argument("dir", "DIR", "the new directory"))
def _save(args: argparse.Namespace) -> None:
    """Save an interrupted run's last step as a portable checkpoint.

    It is a directory of torch.distributed.checkpoint, which FSDP2 and torchtitan load on any number of ranks.
    The run can still go on. On several ranks: torchrun -m infinity save ...
    """
    from infinity.app.export import save_run

    _say_once(f"saved {save_run(args.run, args.dir)} to {args.dir}")


def _say_once(line: str) -> None:
    if launched().rank == 0:  # all ranks come here
        print(line)


@_command(
    _argument("run", "RECIPE|RUN", "a recipe, as in configs/, or a run's folder, such as runs/mine"),
    _overrides(
        "of a recipe, such as train.batch_size=4 memory.host=100GiB; of the hardware, such as "
        "drives.per_node=4"
    ),
    *_HARDWARE,
    _argument(
        "--budget",
        "SIZE",
        "of a recipe: memory.device; of a run: plan for another budget of device memory for all that a step "
        "allocates, such as 2GiB",
    ),
    _flag("--best", "of a recipe: find the fastest one that fits, which keeps all keys that it names"),
    _argument(
        "--tokens-per-step",
        "N",
        "with --best: tokens of a step on all ranks (default: those of the recipe)",
        type=_at_least(1, int),
    ),
    _argument("--output", "FILE", "with --best: write the recipe, for infinity train, such as best.yaml"),
)
def _plan(args: argparse.Namespace) -> None:
    """Say what a recipe needs and takes on some hardware, or show a run's plan for activations.

    Of a recipe: what lies where, least budgets, bytes and time of a step and its bound, cost, life of drives,
    and what would be faster. Of a run: its plan for activations, block by block, beside alternatives.
    """
    from infinity.core.files import is_file

    if is_file(args.run):
        if not args.best and (args.output, args.tokens_per_step) != (None, None):
            raise RecipeError("--output and --tokens-per-step are for --best")
        output = _new_file(args.output)
        more = {"best": args.best, "tokens_per_step": args.tokens_per_step, "output": output}
        _show_recipe(args.run, args, budget=args.budget, **more)
        return
    if args.overrides or _hardware_options(args) or args.best:
        raise RecipeError(
            f"{args.run}: no such file; key=value, --on, --ranks, --tokens and --best are for a recipe"
        )
    from infinity.predict.plan_run import show_plan

    show_plan(args.run, args.budget, _console())


def _hardware_options(args: argparse.Namespace) -> dict[str, Any]:
    given = {name: getattr(args, name) for name in ("on", "ranks", "tokens")}
    return {name: value for name, value in given.items() if value is not None}


def _show_recipe(path: str, args: argparse.Namespace, **more: Any) -> None:
    from infinity.predict.plan_recipe import show_recipe

    show_recipe(path, args.overrides, _console(), **_hardware_options(args), **more)


def _new_file(name: str | None, *, may_exist: bool = False) -> Any:
    """Return the path of a file that ``--output`` names, in a folder that exists; None: it names none."""
    from infinity.core.files import user_path

    if name is None:
        return None
    output = user_path(name, "--output")
    with library_errors(RecipeError, f"--output {name}"):
        if output.is_dir() or not output.parent.is_dir():
            raise RecipeError(f"--output {name}: wanted a file's path, in a folder that exists")
    if output.exists() and not may_exist:
        raise RecipeError(f"--output {name}: exists; remove it, or name another file")
    return output


@_command(
    _argument("dir", "DIR", "a directory on each drive; none: no drive is measured", nargs="*", default=()),
    _argument("--output", "FILE", "the hardware file to write, such as here.yaml"),
)
def _probe(args: argparse.Namespace) -> None:
    """Measure this machine, and write a hardware file for infinity plan --on.

    What computes, host memory and the drives of the given directories are measured, in some seconds.
    """
    from infinity.predict.machines import describe_machine, probe, write_machine

    output = _new_file(args.output, may_exist=True)
    machine = probe(args.dir)
    print(describe_machine(machine))
    if output is not None:
        with library_errors(RecipeError, f"--output {args.output}"):
            write_machine(machine, output)
        print(f"wrote {args.output}; plan for it with: infinity plan RECIPE --on {args.output}")


@_command(
    _argument("recipe", "RECIPE", "a YAML file, as in configs/ (default: the defaults)", nargs="?"),
    _overrides("such as memory.nvme=[/mnt/a,/mnt/b], whose drives are measured"),
    _argument(
        "--timeout", "S", "of each check, and for late ranks (s)", type=_at_least(1, float), default=60.0
    ),
    _flag("--json", "print what every rank found as JSON"),
)
def _doctor(args: argparse.Namespace) -> int:
    """Say what this machine has, or each rank under torchrun, srun or mpirun, and what is wrong.

    Devices, links and drives are measured, in some seconds. The exit code is 1 if a run would fail.
    """
    from infinity.recipes.loading import load_recipe

    path, overrides = args.recipe, args.overrides
    if path is not None and "=" in path:
        path, overrides = None, [path, *overrides]
    recipe = load_recipe(path, overrides)
    from infinity.app.doctor import doctor

    return doctor(recipe, _console(), patience_s=args.timeout, as_json=args.json)


@_command(
    _argument(
        "--from",
        "FILE",
        "of DeepSpeed, Axolotl, LLaMA-Factory or transformers' TrainingArguments: write the recipe with the "
        "same settings, and say what it cannot have",
        dest="source",
    ),
    _argument("--output", "FILE", "with --from: where to write it, such as recipe.yaml"),
)
def _recipe(args: argparse.Namespace) -> None:
    """List every recipe key with type, default and meaning; or write a recipe from another tool's file."""
    if args.source is not None:
        _write_translated(args.source, args.output)
        return
    if args.output is not None:
        raise RecipeError("--output is for --from")
    from rich.table import Table
    from rich.text import Text

    from infinity.recipes.recipe import recipe_table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("key", "type and range", "default", "meaning"):
        table.add_column(name, no_wrap=name == "key", overflow="fold")
    for row in recipe_table():
        table.add_row(*(Text(cell) for cell in row))
    _console(400).print(table)


def _write_translated(source: str, name: str | None) -> None:
    from infinity.recipes.translation import translate

    output = _new_file(name)
    found = translate(source)
    text = f"# from {source} ({found.tool})\n{found.recipe.to_yaml(found.keys)}"
    if output is None:
        print(text, end="", flush=True)
    else:
        with library_errors(RecipeError, f"--output {name}"):
            output.write_text(text, encoding="utf-8")
        print(f"wrote {name}; train it with: infinity train {name}")
    for line in found.lines():
        print(line, file=sys.stderr if output is None else sys.stdout)


def _console(width: int = 160) -> Any:
    """Return a console of standard output; a pipe gets lines of ``width`` characters."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else width)
