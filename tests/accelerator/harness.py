"""Runs training of the product on an accelerator: a real one, or the simulated one under several schedules.

A scenario knows no device. ``train`` trains it on this process's; ``simulate`` in processes of their own
(forks of the suite's server, one for each rank) on the simulated one, under each schedule in turn.
"""

import contextlib
import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infinity
from infinity.activations import tensor_cache
from infinity.core.plan import CodedForm
from infinity.engine.runtime import runtime_of
from tests.accelerator.process import needs_simulator
from tests.accelerator.simulator import Schedule, Wait
from tests.helpers import models, quantized, training
from tests.helpers.launch import run_ranks
from tests.helpers.reference import Rule
from tests.helpers.training import Trained, optimizer_for

#: All that a test tries; the first reports every race, the others let many of them change numbers.
SCHEDULES: tuple[tuple[Schedule, int], ...] = (("eager", 0), ("lazy", 0), ("random", 1), ("random", 2))

NVME = ("memory.nvme=[{folder}]", "memory.host=4MiB", "memory.resident=false", "memory.engine=threads")
#: On the CPU, and updated there.
HOST = ("memory.host=1GiB", "memory.updates=host")
#: In accelerator memory, as far as ``memory.device`` has room.
DEVICE = ("memory.host=1GiB", "memory.device=64MiB")


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One way to train a tiny model.

    Attributes:
        model: A name of :mod:`tests.helpers.models`, or ``mixtral``.
        place: Overrides of the recipe that say where states are; ``{folder}`` is a directory of the test.
        more: Further overrides.
        clip: The rule's ``max_grad_norm``.
        update: Name of the rule.
        through: Micro-batches that go through the layers together; 0: no layer schedule.
        lora: Rank of the adapters; 0: none.
        base: A kind of :mod:`tests.helpers.quantized`: of the frozen checkpoint that has the adapters.
        resumed: Between two steps all is exported and loaded again.
        forgets: Before each step are backward passes, all but its last, that ``zero_grad`` forgets.
        peeks: Before each step the model is evaluated; the loss is looked at after the step.
        around: A policy of ``offload_activations`` around a plain model; its weights are the device's own.
        codec: Of activations around a plain model; ``exact``: all that gets smaller is coded.
        world: Ranks.
    """

    model: str = "llama"
    place: tuple[str, ...] = NVME
    more: tuple[str, ...] = ()
    dtype: str = "bf16"
    steps: int = 3
    accumulate: int = 1
    clip: float | None = None
    update: str = "adamw"
    dropout: float = 0.0
    through: int = 0
    lora: int = 0
    base: str = ""
    resumed: bool = False
    forgets: bool = False
    around: str = ""
    codec: str = "auto"
    peeks: bool = False
    world: int = 1

    @property
    def rule(self) -> Rule:
        return Rule(name=self.update, lr=1e-2, max_grad_norm=self.clip)


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one run gave, and what the simulator saw of it.

    Attributes:
        digest: Of every bit of the losses, the norms and the weights.
        bits: The same without the norms, which the CPU adds up in another order.
        races: Pairs of accesses that nothing orders.
        early: Memory that was given back while something in flight used it.
        waits: How often the host waited for the device, by place and thread.
    """

    schedule: str
    losses: list[float]
    digest: str
    bits: str
    races: list[str] = field(default_factory=list)
    early: list[str] = field(default_factory=list)
    waits: Counter[Wait] = field(default_factory=Counter)
    kernels: int = 0

    @property
    def faults(self) -> list[str]:
        return [*self.races, *self.early]


def digest(trained: Trained, *, norms: bool = True) -> str:
    sha = hashlib.sha256(repr((trained.losses, trained.norms if norms else ())).encode())
    for name in sorted(trained.weights):
        sha.update(
            name.encode() + trained.weights[name].cpu().contiguous().view(torch.uint8).numpy().tobytes()
        )
    return sha.hexdigest()


# --- training ----------------------------------------------------------------------------------


def here() -> torch.device:
    """Where this process trains."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return (
        torch.device("cpu")
        if found is None
        else torch.device(
            found.type, int(os.environ.get("LOCAL_RANK", "0")) % torch.accelerator.device_count()
        )
    )


def train(
    scenario: Scenario, folder: str,
    before: Callable[[int, nn.Module, infinity.AdamW], object] = lambda step, model, optimizer: None,
) -> Trained:  # fmt: skip
    """Train on this process's device; the same numbers on every rank's.

    Args:
        before: Called before each step, with its number, the model and the optimizer.
    """
    tensor_cache.LEAST_NBYTES = 512  # tiny models have tiny activations
    overrides = [each.format(folder=folder) for each in (*scenario.place, *scenario.more)]
    torch.manual_seed(7)
    if scenario.around:
        return _train_plain(scenario, folder)
    out = Trained()
    with contextlib.ExitStack() as stack:
        model = _build(scenario, overrides, folder)
        optimizer = optimizer_for(model, scenario.rule)
        closing = stack.enter_context(contextlib.ExitStack())
        closing.callback(optimizer.close)
        for step in range(scenario.steps):
            before(step, model, optimizer)
            if scenario.resumed and step == scenario.steps - 1:
                model, optimizer = _again(scenario, model, optimizer, overrides, Path(folder))
                closing.pop_all().close()
                closing.callback(optimizer.close)
            _step(scenario, model, optimizer, step, out)
        out.weights = infinity.state_dict(model, every_rank=True)
    return out


def _train_plain(scenario: Scenario, folder: str) -> Trained:
    """A plain model and torch's own optimizer; only saved activations are ours."""
    model, out = _factory(scenario)[0]().to(here()), Trained()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    how: Any = {"policy": scenario.around, "codec": scenario.codec.replace("exact", "auto")}
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        if scenario.codec == "exact":
            patch.setattr(CodedForm, "pays", lambda form, nbytes, hardware: True)
        stack.enter_context(infinity.offload_activations(model, nvme=folder, host="64MiB", **how))
        for step in range(scenario.steps):
            loss = model(**batch_of(scenario, step)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            out.losses.append(loss.item())
    out.weights = {name: p.detach().cpu() for name, p in model.named_parameters()}
    return out


def in_memory(scenario: Scenario) -> Scenario:
    """The same numbers by the plainest way: states in host memory, activations kept."""
    keeps = ("memory.logits=",)  # slices of a loss add in another order
    more = tuple(each for each in scenario.more if not each.startswith("memory.") or each.startswith(keeps))
    return replace(
        scenario, place=HOST, more=more, around="keep" if scenario.around else "", codec="auto", resumed=False
    )


def _build(scenario: Scenario, overrides: list[str], folder: str) -> nn.Module:
    if scenario.base:
        return _on_base(scenario, overrides, folder)
    factory = _factory(scenario)[0]
    model = training.build(factory, scenario.dtype, overrides)
    if scenario.lora:
        model = infinity.add_lora(model, rank=scenario.lora)
    return model


def _on_base(scenario: Scenario, overrides: list[str], folder: str) -> nn.Module:
    directory = Path(folder) / f"{scenario.base}-{os.environ.get('RANK', '0')}"
    if not directory.exists():
        quantized.write(scenario.base, directory)
    with training.small_units():
        base = infinity.from_pretrained(
            directory, training.recipe(scenario.dtype, overrides), frozen=True, attn_implementation="eager"
        )
        torch.manual_seed(5)
        targets = ["q_proj", "o_proj"]
        model: nn.Module = infinity.add_lora(base, rank=scenario.lora, target_modules=targets).train()
    on_nvme = any(each.startswith("memory.nvme=") for each in overrides)
    assert any(unit.stored for unit in runtime_of(model).units) is on_nvme
    return model


def _factory(scenario: Scenario) -> tuple[Callable[[], nn.Module], Callable[..., dict[str, Tensor]]]:
    if scenario.model in models.NAMES:
        return models.build(scenario.model, seed=1, dropout=scenario.dropout)
    return _mixtral, models.build("llama", seed=1)[1]


def _mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(1)
    config = MixtralConfig(
        vocab_size=models.VOCABULARY, hidden_size=models.HIDDEN, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, num_local_experts=4, num_experts_per_tok=2,
        use_cache=False,
    )  # fmt: skip
    return MixtralForCausalLM(config).train()


def _step(scenario: Scenario, model: nn.Module, optimizer: infinity.AdamW, step: int, out: Trained) -> None:
    called: Callable[..., Any] = model
    if scenario.through:
        called = infinity.layer_schedule(model, scenario.through)
    for micro in range(scenario.forgets * max(1, scenario.accumulate - 1)):
        with contextlib.nullcontext() if scenario.accumulate == 1 else infinity.no_sync(model):
            optimizer.scale(called(**batch_of(scenario, micro)).loss).backward()
    if scenario.forgets:
        optimizer.zero_grad()
    for micro in range(scenario.accumulate):
        last = micro == scenario.accumulate - 1
        with contextlib.nullcontext() if last else infinity.no_sync(model):
            loss = called(**batch_of(scenario, step * scenario.accumulate + micro)).loss
            optimizer.scale(loss).backward()
            out.losses.append(loss.item())
    with torch.no_grad():
        seen = [model(**batch_of(scenario, step)).loss] if scenario.peeks else []
    optimizer.step()
    out.losses += [loss.item() for loss in seen]
    assert optimizer.grad_norm is not None
    out.norms.append(optimizer.grad_norm)


def batch_of(scenario: Scenario, number: int) -> dict[str, Tensor]:
    """This rank's part of a batch, on its device."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    given = _factory(scenario)[1](number, rank, world)
    return {key: value.to(here()) for key, value in given.items()}


def _again(
    scenario: Scenario, model: nn.Module, optimizer: infinity.AdamW, overrides: list[str], folder: Path
) -> tuple[nn.Module, infinity.AdamW]:
    """The same model and optimizer, from what the first ones gave out."""
    weights, states = infinity.state_dict(model, every_rank=True), [optimizer.state_dict()]
    if scenario.world > 1:
        torch.distributed.broadcast_object_list(states, src=0)
    optimizer.close()
    again = _build(scenario, overrides, str(folder))
    again.load_state_dict(weights)
    new = optimizer_for(again, scenario.rule)
    new.load_state_dict(states[0])
    return again, new


# --- simulated -----------------------------------------------------------------------------------


@contextlib.contextmanager
def math_attention() -> Iterator[None]:
    """Attention by the composite operators, as on the simulated device; the CPU has a fused kernel."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        yield


def simulate(
    scenario: Scenario, folder: Path, schedules: Sequence[tuple[Schedule, int]] = SCHEDULES
) -> list[list[Run]]:
    """For each rank the runs of ``scenario``, by schedule."""
    needs_simulator()
    return run_ranks(play, scenario.world, scenario, str(folder), tuple(schedules), group=False)


def play(scenario: Scenario, folder: str, schedules: Sequence[tuple[Schedule, int]]) -> list[Run]:
    """On each rank, in a process of its own: train under each schedule."""
    from tests.accelerator import device, observe

    simulator = device.start()
    observe.install()
    runs = []
    for schedule, seed in schedules:
        simulator.reset(schedule, 2 * seed + int(os.environ["RANK"]))
        trained = train(scenario, folder)
        runs.append(
            Run(
                schedule=f"{schedule} {seed}",
                losses=trained.losses,
                digest=digest(trained),
                bits=digest(trained, norms=False),
                races=simulator.races,
                early=simulator.early,
                waits=simulator.waits,
                kernels=simulator.kernels,
            )
        )
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return runs
