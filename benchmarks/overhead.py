"""Processor time of the thread that runs a step, beside plain PyTorch, where arithmetic is negligible.

It is what an accelerator waits for where its kernels are short: hooks of modules, saved tensors, gradients.
The time is that of one thread (forward and backward, without the update), so reads and writes that others do
beside it do not count. Both models are in one process, and their steps take turns.

    python benchmarks/overhead.py [--quick] [--json FILE] [--cases linear,adapters] [--steps 9]
"""

import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from options import Options, folder_on, say
from report import Claim, print_claims, print_table
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

import infinity

#: Keys of the recipe, by where the states are.
PLACES = {
    "host memory": ["memory.host=4GiB"],
    "NVMe": ["memory.host=4GiB", "memory.resident=false", "memory.nvme=[{folder}]"],
}
#: The most that a case should take of plain PyTorch's time, by place.
WANTED = {
    ("linear", "host memory"): 1.3,
    ("adapters", "host memory"): 1.15,
    ("adapters", "NVMe"): 1.5,
}


class Block(nn.Module):
    """A convolution, a norm and an activation with a residual, as image models have hundreds of."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.act(self.norm(self.conv(x)))


class Experts(nn.Module):
    """Experts in a list, of which a fixed half is used."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(64))

    def forward(self, x: Tensor) -> Tensor:
        return x + sum(expert(x) for expert in self.experts[::2])


class Checkpointed(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def llama(layers: int) -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=128, intermediate_size=344, num_hidden_layers=layers, num_attention_heads=4,
            vocab_size=512, max_position_embeddings=64,
        )
    )  # fmt: skip


class Case(NamedTuple):
    """A model, and its loss; with adapters of rank 8 of all its linear layers, or without."""

    title: str
    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module], Tensor]
    adapted: bool = False


def cases(scale: float) -> dict[str, Case]:
    """Return by name: what it is, what makes the model (plain or ours), and its loss."""
    number = lambda full: max(2, int(full * scale))  # noqa: E731
    x, image = torch.randn(4, 16), torch.randn(1, 8, 4, 4)
    ids = torch.randint(0, 512, (1, 32))
    features = lambda model: model(x).sum()  # noqa: E731
    language = lambda model: model(input_ids=ids, labels=ids).loss  # noqa: E731

    def stack(make: Callable[[], nn.Module], count: int, kind: Any = nn.Sequential) -> Any:
        return lambda: kind(*(make() for _ in range(number(count))))

    def linear() -> nn.Module:
        return nn.Linear(16, 16)

    layers = number(64)
    return {
        "linear": Case(f"{number(3000)} linear layers of 16 x 16", stack(linear, 3000), features),
        "small": Case(
            f"{4 * number(500)} small tensors of convolutions and norms",
            stack(Block, 500),
            lambda model: model(image).sum(),
        ),
        "experts": Case(f"{number(16)} lists of 64 experts, half of them used", stack(Experts, 16), features),
        "checkpointed": Case(
            f"{number(500)} recomputed linear layers",
            stack(linear, 500, Checkpointed),
            lambda model: model(x.requires_grad_()).sum(),
        ),
        "llama": Case(f"Llama, {layers} layers", lambda: llama(layers), language),
        "adapters": Case(f"Llama, {layers} layers, adapters", lambda: llama(layers), language, adapted=True),
    }


def adapters() -> Any:
    import peft

    return peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")


@contextmanager
def built(case: Case, overrides: list[str]) -> Iterator[tuple[nn.Module, Any, float]]:
    """Yield a model of ours, its optimizer, and the seconds that they took."""
    began = time.thread_time()
    with infinity.Init(infinity.load_recipe(overrides=["train.dtype=fp32", *overrides])):
        model = case.make()
    if case.adapted:
        infinity.add_lora(model, adapters())
    optimizer = infinity.AdamW(model, lr=1e-4)
    try:
        yield model, optimizer, time.thread_time() - began
    finally:
        infinity.close(model)


def measure(case: Case, overrides: list[str], steps: int) -> tuple[float, float, float, float]:
    """Return medians of plain and of our seconds of a step, and our seconds of Init and of the first step."""
    plain = case.make()
    if case.adapted:
        import peft

        plain = peft.get_peft_model(plain, adapters())  # type: ignore[arg-type]

    def step(model: nn.Module) -> float:
        began = time.thread_time()
        case.loss(model).backward()
        return time.thread_time() - began

    with built(case, overrides) as (model, optimizer, init_s):
        first, ours, theirs = step(model), [], []
        optimizer.step()
        for number in range(steps + 2):
            plain.zero_grad()
            both = step(plain), step(model)
            optimizer.step()
            if number >= 2:  # those before record what a step uses
                theirs.append(both[0])
                ours.append(both[1])
    return statistics.median(theirs), statistics.median(ours), init_s, first


def main(argv: list[str] | None = None) -> None:
    parser = Options(__doc__, "a twentieth of the layers, two steps", dtype=False)
    parser.add_argument("--cases", default=",".join(cases(1)), help="which ones")
    parser.add_argument("--steps", type=int, default=9, help="that are measured")
    options = parser.parse(argv, steps=2)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    found, rows, claims = cases(0.05 if options.quick else 1), [], []
    with folder_on(options.nvme, "overhead") as folder:
        for name in options.cases.split(","):
            for place, keys in PLACES.items():
                say(f"{name}, {place}")
                overrides = [*(key.format(folder=folder) for key in keys), f"run.dir={folder / 'runs'}"]
                plain, ours, init_s, first = measure(found[name], overrides, options.steps)
                figures = 1e3 * plain, 1e3 * ours, ours / plain, init_s, first
                rows.append([found[name].title, place, *(f"{figure:.2f}" for figure in figures)])
                if (wanted := WANTED.get((name, place))) is not None:
                    text = f"{found[name].title}, {place}: ours / plain PyTorch"
                    claims.append(Claim.at_most(text, ours / plain, wanted, "x"))
    print_table(["model", "states", "plain ms", "ours ms", "ratio", "Init s", "first step s"], rows)
    print_claims(claims, options.json)


if __name__ == "__main__":
    main()
