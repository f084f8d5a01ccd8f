"""A mixture of experts far larger than memory: adapters on its quantized checkpoint, read where it lies.

The checkpoint has the shape of Qwen3-30B-A3B in FP8 with block scales, and random values. It is written
tensor by tensor, and deleted in the end. A process trains LoRA adapters on it in 3 GiB of resident memory.
Between its steps fio reads the same files with requests of the same size, as many at one time.

    python benchmarks/moe.py [--quick] [--layers 48] [--source DIR] [--json FILE]

How fast the base is read is shown in two ways: while some read is on its way (``reading GB/s``), and over the
whole step (``step GB/s``). What keeps the second below the first is in the same row: the seconds of a step in
which compute waits for bytes (``wait read s``) and for their decoding (``wait decode s``), and those that
threads decode. ``compute s`` is processor time of the thread that computes, ``cores s`` of all threads. For
``queued s`` the thread that computes could have gone on, but no core was free: other programs had them, or
this one's threads. A step's limit is the larger of its compute and of its bytes' time at fio's rate.

Each step is planned, too, as by ``infinity plan`` with the operators timed here, and shown beside what was
measured: bytes from drives, seconds, the peak of units in their pool, and by how much resident memory grew
beyond what the process had before its first step.
"""

import argparse
import contextlib
import json
import math
import os
import shutil
import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import fio
import numpy as np
import processes
import torch
from options import Options, folder_on, say
from report import Claim, print_claims, print_table
from worker import peak_rss_nbytes

from infinity.device.accelerator import tunables

GIB = 2**30
#: Rows and columns that share a scale.
BLOCK = 128
#: Most bytes of values in a file of the checkpoint, and of what is made of them at one time.
FILE_NBYTES, PIECE_NBYTES = 4 * 10**9, 2**26
#: What may be left on the drive when the checkpoint is written (bytes).
SPARE_NBYTES = 3 * 10**9
LORA_RANK = 16


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a Qwen3-MoE."""

    layers: int
    hidden: int = 2048
    heads: int = 32
    kv_heads: int = 4
    head_dim: int = 128
    experts: int = 128
    per_token: int = 8
    inner: int = 768
    vocabulary: int = 151_936

    def tensors(self) -> Iterator[list[tuple[str, str, tuple[int, ...]]]]:
        """Name, dtype and shape of stored tensors, in groups that lie in one file."""
        yield [("model.embed_tokens.weight", "BF16", (self.vocabulary, self.hidden))]
        for layer in range(self.layers):
            yield list(self._layer(f"model.layers.{layer}"))
        yield [
            ("lm_head.weight", "BF16", (self.vocabulary, self.hidden)),
            ("model.norm.weight", "BF16", (self.hidden,)),
        ]

    def _layer(self, name: str) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        wide, narrow = self.heads * self.head_dim, self.kv_heads * self.head_dim
        matrices = {
            "self_attn.q_proj": (wide, self.hidden), "self_attn.k_proj": (narrow, self.hidden),
            "self_attn.v_proj": (narrow, self.hidden), "self_attn.o_proj": (self.hidden, wide),
        }  # fmt: skip
        for expert in range(self.experts):
            place = f"mlp.experts.{expert}"
            matrices |= {f"{place}.gate_proj": (self.inner, self.hidden)}
            matrices |= {f"{place}.up_proj": (self.inner, self.hidden)}
            matrices |= {f"{place}.down_proj": (self.hidden, self.inner)}
        for key, (rows, columns) in matrices.items():
            yield f"{name}.{key}.weight", "F8_E4M3", (rows, columns)
            yield f"{name}.{key}.weight_scale_inv", "F32", (-(-rows // BLOCK), -(-columns // BLOCK))
        yield f"{name}.mlp.gate.weight", "BF16", (self.experts, self.hidden)
        for key, numel in (("input_layernorm", self.hidden), ("post_attention_layernorm", self.hidden)):
            yield f"{name}.{key}.weight", "BF16", (numel,)
        for key in ("q_norm", "k_norm"):
            yield f"{name}.self_attn.{key}.weight", "BF16", (self.head_dim,)

    @property
    def numel(self) -> int:
        """Parameters, without scales."""
        return sum(
            math.prod(shape) for group in self.tensors() for _, dtype, shape in group if dtype != "F32"
        )

    @property
    def nbytes(self) -> int:
        """Of all stored tensors."""
        return sum(nbytes_of(*each[1:]) for group in self.tensors() for each in group)

    def config(self) -> dict[str, Any]:
        """What ``config.json`` says."""
        from transformers import Qwen3MoeConfig

        config = Qwen3MoeConfig(
            vocab_size=self.vocabulary, hidden_size=self.hidden, num_hidden_layers=self.layers,
            intermediate_size=3 * self.hidden, num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads, head_dim=self.head_dim, num_experts=self.experts,
            num_experts_per_tok=self.per_token, moe_intermediate_size=self.inner,
            tie_word_embeddings=False, use_cache=False, architectures=["Qwen3MoeForCausalLM"],
        )  # fmt: skip
        quantized = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
        return {
            **config.to_dict(),
            "dtype": "bfloat16",
            "quantization_config": {**quantized, "weight_block_size": [BLOCK, BLOCK]},
        }


QUICK = Shape(
    2, hidden=256, heads=4, kv_heads=2, head_dim=64, experts=32, per_token=2, inner=128, vocabulary=2000
)

ITEMSIZE = {"BF16": 2, "F32": 4, "F8_E4M3": 1}


def nbytes_of(dtype: str, shape: tuple[int, ...]) -> int:
    return ITEMSIZE[dtype] * math.prod(shape)


# --- the checkpoint ----------------------------------------------------------------------------------


def write_checkpoint(shape: Shape, folder: Path) -> None:
    """Write ``config.json``, the index and the files into a new folder, piece by piece.

    Raises:
        OSError: The drive has too little room for it.
    """
    free, wanted = shutil.disk_usage(folder.parent).free, shape.nbytes + SPARE_NBYTES
    if free < wanted:
        raise OSError(
            f"{folder.parent} has {free / 1e9:.1f} GB free. The checkpoint takes {shape.nbytes / 1e9:.1f} "
            f"GB, and {SPARE_NBYTES / 1e9:.0f} GB are to stay free: make room, choose another drive with "
            "--nvme, or fewer layers with --layers"
        )
    folder.mkdir()
    files: list[list[tuple[str, str, tuple[int, ...]]]] = [[]]
    for group in shape.tensors():
        if sum(nbytes_of(*each[1:]) for each in [*files[-1], *group]) > FILE_NBYTES and files[-1]:
            files.append([])
        files[-1] += group
    values, where = Values(), dict[str, str]()
    for number, tensors in enumerate(files, start=1):
        name = f"model-{number:05}-of-{len(files):05}.safetensors"
        write_file(folder / name, tensors, values)
        where |= {tensor: name for tensor, _, _ in tensors}
    index = {"metadata": {"total_size": shape.nbytes}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(shape.config(), indent=2), encoding="utf-8")


def write_file(path: Path, tensors: list[tuple[str, str, tuple[int, ...]]], values: "Values") -> None:
    """Write one file, its tensors in the order in which safetensors' own writer has them."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    ordered, at = sorted(tensors, key=lambda each: (-ITEMSIZE[each[1]], each[0])), 0
    for name, dtype, shape in ordered:
        end = at + nbytes_of(dtype, shape)
        header[name], at = {"dtype": dtype, "shape": shape, "data_offsets": (at, end)}, end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, dtype, shape in ordered:
            for piece in values.of(name, dtype, math.prod(shape)):
                file.write(piece)
        file.flush()
        os.fdatasync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Values:
    """Random values: matrices with a standard deviation of 0.02, norms of 1."""

    def __init__(self) -> None:
        self._random = np.random.Generator(np.random.SFC64(0))
        codes = (torch.arange(256) & 0xBF).to(torch.uint8)  # no exponent above 2, and no NaN
        self._scale = 0.02 / codes.view(torch.float8_e4m3fn).float().square().mean().sqrt().item()

    def of(self, name: str, dtype: str, numel: int) -> Iterator[memoryview]:
        """Yield the bytes of a tensor, piece by piece."""
        step = PIECE_NBYTES // ITEMSIZE[dtype]
        for count in (min(step, numel - at) for at in range(0, numel, step)):
            yield memoryview(self._piece(name, dtype, count)).cast("B")

    def _piece(self, name: str, dtype: str, count: int) -> Any:
        if dtype == "F8_E4M3":
            words = self._random.integers(2**64, size=-(-count // 8), dtype=np.uint64, endpoint=False)
            words &= np.uint64(0xBFBFBFBFBFBFBFBF)
            return words.view(np.uint8)[:count]
        if dtype == "F32":
            return self._random.uniform(0.5, 1.5, count).astype(np.float32) * np.float32(self._scale)
        if name.endswith("norm.weight"):
            return torch.ones(count, dtype=torch.bfloat16).view(torch.int16).numpy()
        normal = torch.from_numpy(self._random.standard_normal(count, dtype=np.float32)).mul_(0.02)
        return normal.bfloat16().view(torch.int16).numpy()


# --- training on it, in a process of its own ---------------------------------------------------------


class ReadingTime:
    """Seconds in which some read of an engine was on its way."""

    def __init__(self, engine: Any) -> None:
        self._read, self._lock, self._reads, self._since = engine.read, threading.Lock(), 0, 0.0
        self.seconds = 0.0
        engine.read = self._timed

    def _timed(self, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            self._since = self._since if self._reads else time.perf_counter()
            self._reads += 1
        move = self._read(*args, **kwargs)
        move.then(self._ended)
        return move

    def _ended(self) -> None:
        with self._lock:
            self._reads -= 1
            self.seconds += 0.0 if self._reads else time.perf_counter() - self._since


@dataclass(frozen=True, slots=True)
class Job:
    """A fine-tune; paths are of directories."""

    way: str  # what the row says
    source: str
    tokens: int  # of a sequence
    sequences: int  # of a step
    micro_batches: int
    layer_by_layer: bool
    warmup: int
    steps: int
    fio_s: float  # how long fio reads after each step; 0: there is no fio
    threads: int  # of compute
    vocabulary: int
    overrides: list[str] = field(default_factory=list)


def train(job: Job) -> dict[str, Any]:
    """Each measured step's figures, and the most resident memory."""
    import infinity
    from infinity.engine.runtime import runtime_of
    from infinity.shards.base import FrozenBase

    torch.set_num_threads(job.threads)
    decoding_s, decode = [0.0], FrozenBase.decode

    def timed(*args: Any) -> None:
        began = time.perf_counter()
        decode(*args)
        decoding_s[0] += time.perf_counter() - began

    FrozenBase.decode = timed  # type: ignore[method-assign]
    recipe = infinity.load_recipe(overrides=job.overrides)
    began = time.perf_counter()
    model = infinity.from_pretrained(job.source, recipe, frozen=True).train()
    model = infinity.add_lora(model, rank=LORA_RANK, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    optimizer = infinity.AdamW(model, lr=1e-4)
    start_s = time.perf_counter() - began
    runtime, start_rss = runtime_of(model), rss_nbytes()
    engine: Any = runtime.tiers.store.engine
    reading = ReadingTime(engine)
    schedule = infinity.layer_schedule(model, job.micro_batches) if job.layer_by_layer else None
    files, results = sorted(Path(job.source).glob("*.safetensors")), []
    before = engine.nbytes_read, reading.seconds, decoding_s[0]
    for step in range(job.warmup + job.steps):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(job.vocabulary, (job.sequences, job.tokens), generator=generator)
        cpu = time.thread_time(), time.process_time(), queued_s()
        began = time.perf_counter()
        if schedule is not None:
            loss = schedule(input_ids=ids, labels=ids).loss
            loss.backward()
        else:
            for number, rows in enumerate(ids.chunk(job.micro_batches), start=1):
                last = number == job.micro_batches
                with contextlib.nullcontext() if last else infinity.no_sync(model):
                    loss = model(input_ids=rows, labels=rows).loss / job.micro_batches
                    loss.backward()
        optimizer.step()
        step_s = time.perf_counter() - began
        cpu_s = time.thread_time(), time.process_time(), queued_s()
        report = optimizer.report(loss=float(loss.detach()), tokens=ids.numel())
        last, before = before, (engine.nbytes_read, reading.seconds, decoding_s[0])
        if step < job.warmup:
            continue
        results.append(
            {
                "step_s": step_s,
                "read": before[0] - last[0],  # also what came for it after the step before
                "reading_s": before[1] - last[1],
                "decoding_s": before[2] - last[2],
                "compute_s": cpu_s[0] - cpu[0],
                "cpu_s": cpu_s[1] - cpu[1],
                "queued_s": cpu_s[2] - cpu[2],
                "loss": float(loss.detach()),
                "fio_per_s": fio.read_bytes_per_s(files, job.fio_s) if job.fio_s else None,
                **{key: getattr(report, key) for key in ("stall_s", "tiles", "tiles_used", "nbytes_written")},
            }
        )
    peaks = {"peak_rss": peak_rss_nbytes(), "units": runtime.peak_nbytes()["device"], "start_rss": start_rss}
    optimizer.close()
    return {"steps": results, "start_s": start_s, **peaks}


def queued_s() -> float:
    """Seconds in which the calling thread could have run, and no core was free."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def rss_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def plan(job: Job) -> dict[str, float]:
    """What ``infinity plan`` says of a step."""
    import infinity
    from infinity.predict.dry_run import dry_run
    from infinity.predict.machines import measurable, probe

    adapters = ["lora.target_modules=[q_proj,k_proj,v_proj,o_proj]", f"lora.rank={LORA_RANK}"]
    step = [f"train.batch_size={job.sequences // job.micro_batches}", f"model.seq_len={job.tokens}"]
    step += [f"train.threads={job.threads}", "optim.max_grad_norm=null", f"model.path={job.source}"]
    recipe = infinity.load_recipe(overrides=[*job.overrides, *adapters, *step])
    planned = dry_run(recipe, probe(measurable(recipe.memory.nvme)), 1, here=True)
    cost = planned.cost
    return {
        "read": cost.nbytes.get("NVMe read", 0),
        "step_s": cost.step_s,
        "units": cost.device_peak_nbytes,
        "memory": cost.device_peak_nbytes + planned.trace.peak_nbytes,
    }


# --- the benchmark -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Way:
    """A row of the table."""

    tokens: int  # of a sequence
    micro_batches: int
    layer_by_layer: bool
    device: str  # memory.device
    sequences: int = 1  # of a micro-batch
    logits: str = "auto"  # memory.logits


WAYS = {
    "few tokens": Way(8, 1, False, "1GiB"),
    "more tokens": Way(64, 1, False, "1GiB"),
    "layer by layer": Way(64, 16, True, "1GiB"),
    "in one": Way(64, 1, True, "1GiB", sequences=16, logits="slices"),
}
#: What reads at most so many times the bytes of the other, whose tokens are the same.
SAME_TOKENS, MOST_TIMES = ("layer by layer", "in one"), 1.05
#: A step is to take at most so many times its limit.
MOST_OF_LIMIT = 1.15
COLUMNS = [
    *("run", "tokens", "M", "step s", "read GB", "reading s", "reading GB/s", "step GB/s", "fio GB/s"),
    *("/ fio", "compute s", "/ limit", "wait read s", "wait decode s", "decoding s"),
    *("queued s", "cores s", "tiles"),
    "peak RSS GiB",
]


OF_PLAN = {
    "read": "read GB", "step_s": "step s", "units": "peak of units GB", "memory": "peak beyond the start GB"
}  # fmt: skip


class Bench:
    """Each way's steps."""

    def __init__(self, shape: Shape, options: argparse.Namespace, folder: Path) -> None:
        self.shape, self.options, self.folder = shape, options, folder
        self.results: dict[str, dict[str, Any]] = {}
        self.planned: dict[str, dict[str, float]] = {}

    def run(self) -> None:
        source = self.options.source or self.folder / "source"
        if not source.exists():
            say(f"writing {self.shape.numel / 1e9:.2f} B parameters, {self.shape.nbytes / 1e9:.1f} GB")
            write_checkpoint(self.shape, source)
        for way in self.options.ways:
            say(f"training: {way}")
            job = Job(
                way=way,
                source=str(source),
                tokens=WAYS[way].tokens,
                sequences=WAYS[way].sequences * WAYS[way].micro_batches,
                micro_batches=WAYS[way].micro_batches,
                layer_by_layer=WAYS[way].layer_by_layer,
                warmup=self.options.warmup,
                steps=self.options.steps,
                fio_s=self.options.fio_s if fio.available() else 0.0,
                threads=self.options.threads,
                vocabulary=self.shape.vocabulary,
                overrides=self.overrides(way),
            )
            [[self.results[way]]] = processes.run(job, worker=Path(__file__))
            for step in self.results[way]["steps"]:
                say(json.dumps(step))  # what follows may be interrupted
            [[self.planned[way]]] = processes.run(replace(job, steps=0), worker=Path(__file__))
            say(json.dumps(self.planned[way]))

    def overrides(self, way: str) -> list[str]:
        tile, device = ("256KiB", "16MiB") if self.options.quick else ("auto", WAYS[way].device)
        return [
            f"train.dtype={self.options.dtype}",
            f"memory.nvme=[{self.folder / 'nvme'}]",
            f"memory.device={self.options.device or device}",
            f"memory.host={self.options.host}",
            f"train.schedule={'layer' if WAYS[way].layer_by_layer else 'step'}",
            f"train.accumulate={WAYS[way].micro_batches}",
            "memory.activations=keep",
            f"memory.logits={WAYS[way].logits}",
            f"partition.tile={tile}",
            f"run.dir={self.folder / 'runs'}",
        ]

    def median(self, way: str, key: str) -> float:
        return statistics.median(step[key] for step in self.results[way]["steps"])

    def stall(self, way: str, cause: str) -> float:
        return statistics.median(step["stall_s"].get(cause, 0.0) for step in self.results[way]["steps"])

    def ratio(self, way: str, seconds: str) -> float:
        """The median over steps of what a step reads in ``seconds`` to what fio reads then."""
        steps = self.results[way]["steps"]
        return statistics.median(
            step["read"] / max(step[seconds], 1e-9) / step["fio_per_s"] for step in steps
        )

    def of_limit(self, way: str) -> float:
        """The median over steps of a step's time to its limit."""
        return statistics.median(
            step["step_s"] / max(step["compute_s"], step["read"] / step["fio_per_s"])
            for step in self.results[way]["steps"]
        )

    def rows(self) -> list[list[str]]:
        rows = []
        for way, result in self.results.items():
            micro_batches = WAYS[way].micro_batches
            tokens = WAYS[way].tokens * WAYS[way].sequences
            step_s, read, reading_s = (self.median(way, key) for key in ("step_s", "read", "reading_s"))
            has_fio = result["steps"][0]["fio_per_s"] is not None
            last = result["steps"][-1]
            rows.append(
                [
                    *(way, str(tokens * micro_batches), str(micro_batches), f"{step_s:.2f}"),
                    *(f"{read / 1e9:.2f}", f"{reading_s:.2f}"),
                    *(f"{read / max(reading_s, 1e-9) / 1e9:.2f}", f"{read / step_s / 1e9:.2f}"),
                    f"{self.median(way, 'fio_per_s') / 1e9:.2f}" if has_fio else "",
                    f"{self.ratio(way, 'reading_s'):.3f}" if has_fio else "",
                    f"{self.median(way, 'compute_s'):.2f}",
                    f"{self.of_limit(way):.3f}" if has_fio else "",
                    *(f"{self.stall(way, cause):.2f}" for cause in ("read", "decode")),
                    *(f"{self.median(way, key):.2f}" for key in ("decoding_s", "queued_s", "cpu_s")),
                    f"{last['tiles_used']} of {last['tiles']}",
                    f"{result['peak_rss'] / GIB:.2f}",
                ]
            )
        return rows

    def plans(self) -> list[list[str]]:
        """Return what was planned, measured, and their ratio, by way."""
        rows = []
        for way, planned in self.planned.items():
            result = self.results[way]
            measured = {
                "read": self.median(way, "read"), "step_s": self.median(way, "step_s"),
                "units": result["units"], "memory": result["peak_rss"] - result["start_rss"],
            }  # fmt: skip
            for key, value in planned.items():
                unit = 1.0 if key == "step_s" else 1e9
                numbers = f"{value / unit:.2f}", f"{measured[key] / unit:.2f}"
                rows.append([way, OF_PLAN[key], *numbers, f"{value / measured[key]:.3f}"])
        return rows

    def claims(self) -> list[Claim]:
        """What is to be at most as large."""
        claims = []

        def claim(what: str, value: float, most: float, unit: str = "x") -> None:
            claims.append(Claim.at_most(what, value, most, unit))

        for way, result in self.results.items():
            last = result["steps"][-1]
            claim(f"{way}: peak RSS", result["peak_rss"] / GIB, self.options.rss / GIB, " GiB")
            claim(f"{way}: bytes read / checkpoint", self.median(way, "read") / self.shape.nbytes, 2.0)
            claim(f"{way}: tiles of experts read / there", last["tiles_used"] / max(1, last["tiles"]), 1.0)
            if way == SAME_TOKENS[0] and SAME_TOKENS[1] in self.results:
                times = self.median(way, "read") / self.median(SAME_TOKENS[1], "read")
                claim(f"{way}: bytes read / of one micro-batch of as many tokens", times, MOST_TIMES)
            if last["fio_per_s"] is not None:
                what = f"{way}: step / the larger of compute and bytes at fio's rate"
                claim(what, self.of_limit(way), MOST_OF_LIMIT)
        return claims


def options_of(argv: list[str] | None) -> argparse.Namespace:
    from infinity.core.nbytes import parse_nbytes

    parser = Options(__doc__, "2 small layers: under a minute")
    parser.add_argument("--layers", type=int, default=48, help="of the model; each takes 0.63 GB")
    parser.add_argument("--source", type=Path, help="the checkpoint; written there if it is not, and kept")
    parser.add_argument("--ways", default=",".join(WAYS), help=f"of {', '.join(WAYS)}")
    parser.add_argument("--rss", type=parse_nbytes, default=3 * GIB, help="most resident memory allowed")
    parser.add_argument("--host", default="256MiB", help="memory.host")
    parser.add_argument("--device", help="memory.device, if another than that of each way")
    parser.add_argument("--threads", type=int, default=1, help="of compute; others read and decode")
    parser.add_argument("--steps", type=int, default=3, help="measured steps")
    parser.add_argument("--warmup", type=int, default=1, help="steps before them")
    parser.add_argument("--fio-s", type=float, default=8.0, help="how long fio reads after each step")
    options = parser.parse(argv, steps=3, warmup=4, fio_s=0.5, host="8MiB")
    options.ways = options.ways.split(",")
    return options


def main(argv: list[str] | None = None) -> None:
    options = options_of(argv)
    if (wanted := tunables(os.environ)) is not None:  # as infinity train; it begins with the next process
        os.environ["GLIBC_TUNABLES"] = wanted
    shape = QUICK if options.quick else replace(Shape(48), layers=options.layers)
    try:
        with folder_on(options.nvme, "moe") as folder:
            bench = Bench(shape, options, folder)
            bench.run()
    except OSError as error:
        say(f"not measured: {error}")
        raise SystemExit(1) from None
    print_table(COLUMNS, bench.rows())
    print_table(["run", "", "planned", "measured", "planned / measured"], bench.plans())
    print_claims(bench.claims(), options.json)


def work(job: Job) -> list[dict[str, Any]]:
    """The process that trains, or (no steps) plans."""
    return [train(job) if job.steps else plan(job)]


if __name__ == "__main__":
    processes.serve(Job, work, main)
