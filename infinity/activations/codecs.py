"""Code the bytes of saved storages in fewer: exactly, or with less precision where the user says so.

[Note: pieces]
A storage is coded in pieces, each by itself. Of a piece a codec takes whole blocks of 256 elements; what is
left follows as it is, and a piece that would not get smaller stays as it is. Where a storage is, it is coded:
only codes leave an accelerator.

[Note: what loses precision]
Only floating-point tensors that gradients flow through, but weights and weights in another dtype. So indices,
masks, the noise of dropout, statistics of a norm or of attention, and what a compiled block saves, are exact.
Such a storage is coded in every pass, wherever it waits, and is read as decoded even if it has not left yet:
where it waits changes no number. A piece with a value that is not finite stays as it is.

[Note: unbiased]
A group of 256 elements in 2 bits has its least value, and three steps up to its largest one. An element goes
to the step below or above it, with the probability that makes its expected value its own. The random numbers
are a hash of a seed and of the element's position, so that a step that runs again draws the same.

Sources: zeros and single bits: Gist (Jain et al., ISCA 2018); 2 bits: ActNN (arXiv:2104.14129), section 3.
"""

import ctypes
import math
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from infinity.activations.store import Form
from infinity.core.config import LOSSY_CODECS, SettingError
from infinity.core.plan import CodedForm, Hardware, SlotKey
from infinity.device import accelerator

Array = Any  # numpy's, of one dimension and contiguous

_BLOCK = 256  # elements
#: Of a storage so many parts, evenly spread, are coded to measure what a codec makes of it (bytes of each).
_SAMPLES, _SAMPLE_NBYTES = 4, 2**16
#: A codec that saves less than this share is not used.
_LEAST_GAIN = 0.05


def _is_float(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point


#: Whether a codec takes a dtype; a storage that may not lose precision is tried with each exact one.
CODECS: dict[str, Callable[[torch.dtype], bool]] = {
    "bits": lambda dtype: True,
    "zeros": lambda dtype: dtype.itemsize > 1,
    **dict.fromkeys(LOSSY_CODECS, _is_float),
}
_EXACT = CODECS.keys() - LOSSY_CODECS


@dataclass(frozen=True, slots=True)
class Code(Form):
    """Codes pieces of one storage, of elements of ``dtype``, by the codec of a name: see [Note: pieces]."""

    name: str
    dtype: torch.dtype
    seed: int = 0

    @property
    def rounds(self) -> torch.dtype | None:
        return self.dtype if self.name in LOSSY_CODECS else None

    def put(self, piece: Tensor, out: Tensor) -> int:
        """Write the code of a piece, uint8, to ``out``, which is as large; return its bytes."""
        body, rest, nbytes = self._body(piece), piece[len(piece) // self._block * self._block :], 0
        if len(body):
            at = self.seed, int(piece.storage_offset()) // self.dtype.itemsize
            room = out[: len(body)] if piece.device.type != "cpu" else _array(out[: len(body)])
            nbytes = int(_loop(f"encode_{self.name}", piece)(self._words(body), room, at))
        if not 0 < nbytes < len(body):
            nbytes, rest = 0, piece
        out[nbytes : nbytes + len(rest)].copy_(rest, non_blocking=True)
        return nbytes + len(rest)

    def get(self, there: Tensor, piece: Tensor) -> None:
        """Write a piece, uint8, from its code."""
        if len(there) == len(piece):
            piece.copy_(there, non_blocking=True)
            return
        there = there.to(piece.device, non_blocking=True)
        body, on_cpu = self._body(piece), piece.device.type == "cpu"
        end = len(there) - len(piece) + len(body)
        piece[len(body) :].copy_(there[end:])
        values = body.view(self.dtype)
        floats = torch.empty_like(values, dtype=torch.float32) if self.rounds else None
        words = self._words(body) if floats is None else _floats(floats)
        _loop(f"decode_{self.name}", piece)(_array(there[:end]) if on_cpu else there[:end], words)
        if floats is not None:
            values.copy_(floats)

    @property
    def _block(self) -> int:
        return _BLOCK * self.dtype.itemsize

    def _body(self, piece: Tensor) -> Tensor:
        return piece[: len(piece) // self._block * self._block]

    def _words(self, body: Tensor) -> Array:
        if self.rounds is not None:
            return _floats(body.view(self.dtype).float())
        size = min(self.dtype.itemsize, 4)
        return _array(body).view(f"u{size}") if body.device.type == "cpu" else body.view(_INTEGERS[size])


#: Integers that have the bits of words on a device, by their bytes.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def _loop(name: str, piece: Tensor) -> Callable[..., Any]:
    """Return a loop for where a piece is; imported late: numba takes 0.3 s."""
    module = "loops" if piece.device.type == "cpu" else "device_loops"
    found: Callable[..., Any] = getattr(import_module(f"infinity.activations.{module}"), name)
    return found


def _floats(values: Tensor) -> Array:
    return _array(values.view(torch.uint8)).view(np.float32) if values.device.type == "cpu" else values


def _array(tensor: Tensor) -> Array:
    """Return a tensor's bytes, ``(n,)``; Tensor.numpy() would make its storage one that is not resizable."""
    memory: Any = (ctypes.c_ubyte * len(tensor)).from_address(tensor.data_ptr())
    memory.tensor = tensor  # alive as long as the array
    return np.frombuffer(memory, np.uint8)


#: Names of nodes that only view, copy or cast: also one expert's, or a part of a joint projection.
_VIEWS = (
    *("T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Unsqueeze", "Squeeze", "Alias"),
    *("Select", "Slice", "Split", "SplitWithSizes", "Unbind", "Expand", "AsStrided", "Clone", "ToCopy"),
)


def _is_weight(tensor: Tensor) -> bool:
    """Return whether a tensor is a leaf, or a view of one, or one in another dtype (autocast's)."""
    node = tensor.grad_fn
    while node is not None and type(node).__name__.rstrip("0123456789").removesuffix("Backward") in _VIEWS:
        node = node.next_functions[0][0]
    return node is None or type(node).__name__ == "AccumulateGrad"


def _is_mask(tensor: Tensor, samples: Sequence[Tensor]) -> bool:
    """Return whether a tensor has two values in every step, as far as one step tells; plans count on it.

    What gradients flow through, indices, and what is constant now, may have other values later.
    """
    if tensor.dtype is torch.bool:
        return True
    words = (sample.view(-1, tensor.itemsize) for sample in samples)
    both = all(bool((word != word[0]).any()) for word in words)
    return tensor.is_floating_point() and not tensor.requires_grad and both


class Coding:
    """Chooses the codec of each storage: ``codec`` is auto, or one that loses precision.

    ``step`` returns the number of the step that runs, ``say`` gets what was measured. Called by the training
    thread.
    """

    def __init__(self, codec: str, step: Callable[[], int], rank: int, say: Callable[[str], object]) -> None:
        self.lossy = None if codec == "auto" else codec
        self.chosen: dict[SlotKey, str] = {}  # exact codecs where no plan says
        self._step, self._rank, self._say = step, rank, say
        self._pass = (-1, 0)  # the step, and how many passes of it there were before
        #: What was measured, with whole bytes; None: nothing is.
        self._forms: dict[SlotKey, tuple[CodedForm, int]] | None = None
        #: Squares of errors, and of values, by region, as measured.
        self._squares: defaultdict[int, Array] = defaultdict(lambda: np.zeros(2))

    def begin_pass(self, *, measures: bool) -> None:
        step, before = self._step(), self._pass
        self._pass = step, before[1] + 1 if before[0] == step else 0
        self._forms = {} if measures else None

    def end_pass(self, hardware: Callable[[], Hardware] | None) -> None:
        """Say what was measured, and choose codecs by it (None: a plan does); called again, do nothing."""
        forms, self._forms = self._forms, None
        blocks = (squares for region, squares in sorted(self._squares.items()) if region % 2)
        shares = [f"{math.sqrt(error / size):.3g}" for error, size in blocks if size]
        if shares:
            self._say(f"memory.codec={self.lossy}: relative error of each block: {' '.join(shares)}")
        self._squares.clear()
        if forms and hardware is not None:
            measured = hardware()
            self.chosen = {key: f.codec for key, (f, nbytes) in forms.items() if f.pays(nbytes, measured)}

    def code(self, key: SlotKey, tensor: Tensor, wanted: str | None) -> Code | None:
        """Return how the storage of ``tensor`` is coded where a plan says ``wanted``; None: it is not."""
        loses = self._loses(tensor)
        name = self.lossy if loses else wanted
        if name is None or not CODECS[name](tensor.dtype) or (name in LOSSY_CODECS) is not loses:
            return None
        return Code(name, tensor.dtype, zlib.crc32(repr((self._rank, self._pass, key)).encode()))

    def measure(self, key: SlotKey, tensor: Tensor) -> CodedForm | None:
        """Return what the best codec makes of the storage of ``tensor``, if it saves enough, and if asked."""
        if self._forms is None:
            return None
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        size = min(_SAMPLE_NBYTES, len(whole) // _SAMPLES // 8 * 8)
        samples = [whole[i * (len(whole) // _SAMPLES) // 8 * 8 :][:size] for i in range(_SAMPLES)]
        exact = _EXACT if _is_mask(tensor, samples) else _EXACT - {"bits"}
        names = [self.lossy] if self._loses(tensor) else [*exact]
        forms = [
            self._measure(Code(name, tensor.dtype), samples, len(whole) / (size * _SAMPLES), key.region)
            for name in names
            if name is not None and CODECS[name](tensor.dtype)
        ]
        best = min(forms, key=lambda form: form.nbytes, default=None)
        if best is None or best.nbytes > (1 - _LEAST_GAIN) * len(whole):
            return None
        self._forms[key] = best, len(whole)
        return best

    def _measure(self, code: Code, samples: Sequence[Tensor], times: float, region: int) -> CodedForm:
        nbytes, encode_s, decode_s = 0, 0.0, 0.0
        out, back = torch.empty_like(samples[0]), torch.empty_like(samples[0])
        code.get(out[: code.put(samples[0], out)], back)  # compiled, and in caches as far as it ever is
        for sample in samples:
            began_s = time.perf_counter()
            there = out[: code.put(sample, out)]
            put_s = time.perf_counter()
            code.get(there, back)
            accelerator.wait_on_host(accelerator.record(back.device))
            encode_s, decode_s = encode_s + put_s - began_s, decode_s + time.perf_counter() - put_s
            nbytes += len(there)
            if code.rounds:
                values, decoded = (each.view(code.dtype).double() for each in (sample, back))
                squares = [float((each * each).sum()) for each in (decoded - values, values)]
                self._squares[region] += squares if math.isfinite(sum(squares)) else 0.0
        return CodedForm(
            code.name, math.ceil(nbytes * times), encode_s * times, decode_s * times, not code.rounds
        )

    def _loses(self, tensor: Tensor) -> bool:
        return (
            self.lossy is not None
            and tensor.requires_grad
            and tensor.is_floating_point()
            and not _is_weight(tensor)
        )


def coding_of(
    codec: str, policy: str, step: Callable[[], int], rank: int, say: Callable[[str], object]
) -> Coding | None:
    """Return what codes activations under a policy; None: nothing does. See :class:`Coding`."""
    may = policy in ("offload", "plan")
    if codec in LOSSY_CODECS and not may:
        wanted = "auto or never, or activations under the policy offload or plan"
        raise SettingError("memory.codec", codec, wanted)
    return Coding(codec, step, rank, say) if may and codec != "never" else None
