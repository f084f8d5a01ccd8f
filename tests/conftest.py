"""What every test stands on: few threads, fixed seeds, no accelerator but for ``-m gpu``."""

import gc
import os
import random
import signal
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

# Before torch is imported: ranks and the reference take turns on few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Most tests compare with the plain loop on the CPU. Before torch looks for accelerators; workers inherit it.
if os.environ.setdefault("INFINITY_TEST_ACCELERATOR", str(int("gpu" in sys.argv))) == "0":
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "ZE_AFFINITY_MASK": ""}

# The long suite (-m slow) tries properties, too, with more examples; workers inherit it.
_words = [first + second if first == "-m" else first for first, second in pairwise([*sys.argv, ""])]
os.environ.setdefault("INFINITY_TEST_LONG", str(int(any(word.startswith("-mslow") for word in _words))))

# Images often forbid bytecode. Then every process of the suite compiles the package again, and every worker
# rewrites the assertions of all tests again: a third of the suite's processor time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A million objects of imported modules live until the end: they are never looked at for garbage.
gc.disable()

# A shell's background job is started with Ctrl-C ignored, and tests send it to themselves.
signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest  # noqa: E402
from hypothesis import HealthCheck, is_hypothesis_test, settings  # noqa: E402

from tests.helpers import engines, forks, tiers  # noqa: E402
from tests.helpers.cases import LONG  # noqa: E402

forks.own()  # before xdist starts its workers, which inherit it

# A busy machine is slow at everything, and no timing fails a test.
# The gate draws the same examples each time, as hypothesis itself does in CI; other runs draw new ones.
settings.register_profile(
    "suite",
    deadline=None,
    max_examples=60 if LONG else 15,  # of every run; a property is tried with others in the next one
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=bool(os.environ.get("CI")),
)
settings.load_profile("suite")


_frozen_modules = 0  # how many there were when what lives was frozen last


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Every test starts with the same random numbers and environment and no process group.

    Lightning, for one, leaves a group and variables for its ranks behind.
    """
    import numpy  # here, as pytest-xdist's own process needs neither of these
    import torch

    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    before = dict(os.environ)
    yield
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test with libaio among its parameters where a machine has none."""
    params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    if engines.asks_for_libaio([*params.values()]) and (why := engines.missing_libaio()):
        pytest.skip(why)


def pytest_collection_finish() -> None:
    import torch

    from infinity.activations import logits

    logits.LEAST_SLICE_NBYTES = 0  # tiny models have several slices
    if os.environ["INFINITY_TEST_ACCELERATOR"] == "0":
        # For an accelerator that is started later, each seed is kept together with a text of the whole stack.
        for kind in (torch.cuda, torch.xpu, torch.mtia):
            for module in (kind, getattr(kind, "random", kind)):
                module._lazy_call = lambda call, **options: None
    gc.enable()
    freeze()


def freeze() -> None:
    """Leave what lives now out of collections of garbage: the modules that tests imported on their way.

    A second model of a process collects garbage, which would look at a million objects.
    """
    global _frozen_modules
    gc.collect()
    gc.freeze()
    _frozen_modules = len(sys.modules)


def pytest_runtest_logfinish() -> None:
    if gc.isenabled() and len(sys.modules) > _frozen_modules + 30:
        freeze()


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with tests of guarantees, which take longest; skip those marked ``gpu`` where there is none."""
    import torch

    for item in items:
        if LONG and isinstance(item, pytest.Function) and is_hypothesis_test(item.obj):
            item.add_marker(pytest.mark.slow)

    tiers.mark_thorough(items, tiers.listed())
    items.sort(key=lambda item: item.path.parent != Path(__file__).parent)  # else one may be left at the end
    if torch.accelerator.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an accelerator"))
