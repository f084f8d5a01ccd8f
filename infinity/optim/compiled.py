"""One function over flat tensors: compiled into one pass over memory, or eager in small pieces.

[Note: guards off] ``torch.compile`` checks before each call that nothing has changed since it traced:
types, global modes, the number of threads. Here nothing may change: each variant (types, device,
threads) is compiled once, from tensors that share no memory and with a symbolic numel, and is then
called with the same types only. So the checks are left out: a call costs 20 us in place of 25,
views of one staging buffer and outputs that are inputs are taken as they are (the functions are
elementwise: each element is read before it is written), and no setting that a user changes between
steps (grad mode, autocast, ``torch.set_num_threads``) compiles anything again.
"""

import functools
import threading
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

#: Elements per piece in eager mode: a piece and its temporaries stay in the cache, and torch hands it to
#: one thread (it divides work of 2**15 elements and more), so the number of threads changes nothing.
PIECE_NUMEL = 2**14

#: Elements per thread of the tensors that a variant is compiled from. The numel becomes a symbol, but the
#: compiler makes a parallel loop only if the example is worth it.
_EXAMPLE_NUMEL = 2**13

Function = Any  # a function of tensors that returns nothing


class CompilerWarning(UserWarning):
    """A function could not be compiled and runs eagerly: the same results, many times slower."""


def background_threads() -> int:
    """How many threads work beside training takes: half of PyTorch's, at least one."""
    return max(1, torch.get_num_threads() // 2)


class Elementwise:
    """``function(*flat, table)`` over flat tensors of one numel, bitwise the same compiled and eager.

    Args:
        function: Elementwise torch over 1-D tensors of one numel, writing into some of them, and a last
            argument, a small tensor of numbers.
        threads: CPU threads of compiled code; None for ``background_threads()``.
        compiled: False for eager.
        on_compile: Called with a line for people before a compilation, on the compiling thread.
    """

    def __init__(
        self, function: Function, *, threads: int | None, compiled: bool,
        on_compile: Callable[[str], None] | None,
    ) -> None:  # fmt: skip
        self._function, self._on_compile = function, on_compile
        self.threads = threads or background_threads()
        self.compiled = compiled
        self._variants: dict[tuple[object, ...], Function] = {}
        self._lock = threading.Lock()

    def __call__(self, *tensors: Tensor) -> None:
        """Run over flat tensors of one numel, the last argument being the table of numbers."""
        if not self.compiled or tensors[0].numel() < 2:  # compiled code takes a numel of 1 for a constant
            self._eagerly(*tensors)
            return
        variant = self._variants.get(_kind(tensors)) or self.prepare(*tensors)
        variant(*tensors)

    def prepare(self, *tensors: Tensor) -> Function:
        """Compile for types and device like ``tensors``, so that no later call waits for it."""
        with self._lock:
            kind = _kind(tensors)
            if kind not in self._variants:
                self._variants[kind] = self._compiled_or_eager(tensors) if self.compiled else self._eagerly
            return self._variants[kind]

    def _eagerly(self, *tensors: Tensor) -> None:
        *flat, table = tensors
        with torch.no_grad():
            for begin in range(0, flat[0].numel(), PIECE_NUMEL):
                self._function(*(t[begin : begin + PIECE_NUMEL] for t in flat), table)

    def _compiled_or_eager(self, tensors: tuple[Tensor, ...]) -> Function:
        try:
            return compile_once(
                self._function, _small(tensors, self.threads), threads=self.threads, say=self._on_compile
            )
        except Exception as error:  # whatever a missing or broken compiler raises, eager works
            warn_eager(self._function, error, stacklevel=4)
            return self._eagerly


#: What this process has compiled, by function, threads, device and types.
_compiled: dict[tuple[object, ...], Function] = {}
_compiling = threading.Lock()


def compile_once(
    function: Function, examples: list[Tensor], *, threads: int, say: Callable[[str], None] | None = None
) -> Function:
    """The compiled ``function`` for tensors like ``examples``; each variant once in a process.

    Args:
        function: Writes into some of its arguments, which are tensors, and returns nothing.
        examples: Share no memory; their numels become symbols. The function is run on them.
        threads: CPU threads of the compiled code.
        say: Called with a line for people before a compilation.

    Raises:
        Exception: Whatever a missing or broken compiler raises.
    """
    key = (function, threads, _kind(examples))
    with _compiling:
        if key not in _compiled:
            if say is not None:
                say(f"compiling {_title(function)} (once; cached afterwards)")
            # torch counts compilations per code object and gives up after eight: each has its own
            own = types.FunctionType(function.__code__.replace(), function.__globals__)
            variant = torch.compile(own, dynamic=True, fullgraph=True, options=_options(threads))
            _compile(variant, examples)
            _compiled[key] = functools.partial(_call, variant, own.__code__, examples)
        return _compiled[key]


def _compile(variant: Function, examples: list[Tensor]) -> None:
    with torch.no_grad(), warnings.catch_warnings():
        # torch deprecates parts of itself: where warnings are errors, that would end the compilation
        warnings.simplefilter("ignore", DeprecationWarning)
        variant(*examples)


def _call(variant: Function, code: types.CodeType, examples: list[Tensor], *tensors: Tensor) -> Any:
    """Run compiled code; when ``torch._dynamo.reset()`` has dropped it, compile it again first.

    Without its code, the call would compile from ``tensors``: their shared memory the compiler refuses, or
    takes for a property of all that follow, which no guard would then contradict.
    """
    if not _debug_get_cache_entry_list(code):
        with _compiling:
            _compile(variant, examples)
    return variant(*tensors)


def warn_eager(function: Function, error: Exception, *, stacklevel: int) -> None:
    """Say that ``function`` runs eagerly, and what the compiler said."""
    cause = " ".join(str(error).split()[:40])
    warnings.warn(
        f"{_title(function)} runs eagerly: it could not be compiled ({type(error).__name__}: {cause}). "
        "Results are the same, it is many times slower; install g++, or name a C++ compiler in CXX",
        CompilerWarning,
        stacklevel=stacklevel + 1,
    )


def _title(function: Function) -> str:
    return str(function.__name__).strip("_").replace("_", " ")


def _options(threads: int) -> dict[str, Any]:
    return {
        "cpp.threads": threads,
        "compile_threads": 1,  # no pool of worker processes for one kernel
        "guard_filter_fn": lambda guards: [False] * len(guards),  # see [Note: guards off]
    }


def _kind(tensors: Sequence[Tensor]) -> tuple[object, ...]:
    return (tensors[0].device.type, *(t.dtype for t in tensors))


def _small(like: tuple[Tensor, ...], threads: int) -> list[Tensor]:
    """Tensors of the same types, but small, and sharing no memory."""
    *flat, table = like
    small = [torch.zeros(threads * _EXAMPLE_NUMEL, dtype=t.dtype, device=t.device) for t in flat]
    return [*small, torch.ones_like(table)]
