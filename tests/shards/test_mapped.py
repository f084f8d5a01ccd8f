"""A frozen base is read where it lies in the checkpoint: not copied, and bitwise as in plain PyTorch."""

import contextlib
import itertools
import os
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Mxfp4Config

import infinity
from infinity.comm.collectives import Collectives
from infinity.core.errors import BudgetError, ChangedCheckpointError, ChangedFileError, DiskError, StateError
from infinity.core.lifecycle import Tier
from infinity.engine.runtime import runtime_of
from infinity.shards.base import BaseHome
from tests.helpers import models, quantized
from tests.helpers.cases import few
from tests.helpers.launch import run_ranks
from tests.helpers.reference import Reference, Rule
from tests.helpers.training import optimizer_for, recipe, small_units, streaming
from tests.test_bytes import settled

pytestmark = [  # what peft itself says to users of plain PyTorch
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
]

#: Layers whose adapters have peft's bits; those of packed experts equal peft's within rounding.
TARGETS = {kind: ["q_b_proj", "o_proj"] for kind in ("deepseek_v3", "kimi_k2", "mixed")}
TARGETS |= {kind: ["q_proj", "o_proj"] for kind in quantized.KINDS if kind.startswith("gpt_oss")}


@pytest.fixture(autouse=True)
def quiet():
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


@pytest.fixture
def checkpoint(tmp_path):
    return save(tmp_path / "checkpoint")


def save(directory: Path, *, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Path:
    models.build("llama", 1)[0]().to(dtype).save_pretrained(directory, **options)
    return directory


def load(checkpoint: Path, nvme: Any, *more: str, dtype: str = "bf16", **options: Any) -> Any:
    """The frozen model of a checkpoint, on NVMe, with a window for a part of it."""
    overrides = streaming(nvme, "memory.device=400KiB", *more)
    with small_units():
        return infinity.from_pretrained(checkpoint, recipe(dtype, overrides), **({"frozen": True} | options))


@contextlib.contextmanager
def loaded(*args: Any, **options: Any):
    model = load(*args, **options)
    try:
        yield model
    finally:
        infinity.close(model)


def adapted(model: Any, targets: list[str] | None = None) -> Any:
    torch.manual_seed(5)
    with small_units():
        return infinity.add_lora(model, rank=4, alpha=8.0, target_modules=targets or ()).train()


def train(model: Any, steps: int = 3, *, rank: int = 0, world: int = 1, **options: Any) -> list[float]:
    """Losses of adapters that are trained on ``model``."""
    _, batch = models.build("llama", 1)
    model = adapted(model, **options)
    optimizer, losses = optimizer_for(model, Rule()), []
    for step in range(steps):
        loss = model(**batch(step, rank, world)).loss
        optimizer.scale(loss).backward()
        optimizer.step()
        losses.append(loss.item())
    optimizer.synchronize()
    return losses


def train_plain(model: Any, targets: list[str] | None = None, steps: int = 3) -> list[float]:
    """The same by plain PyTorch and peft."""
    _, batch = models.build("llama", 1)
    torch.manual_seed(5)
    settings = {"r": 4, "lora_alpha": 8.0, "target_modules": targets or "all-linear"}
    model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **settings))
    loop = Reference(model.train(), torch.bfloat16, Rule())
    return [float(loss) for step in range(steps) for loss in loop.step([batch(step)]).losses]


def written_nbytes(model: Any) -> int:
    return runtime_of(model).tiers.store.engine.nbytes_written


def said(model: Any) -> str:
    lines: list[str] = []
    runtime_of(model).say.attach(lines.append)
    return "\n".join(lines)


def held(model: Any) -> list[Any]:
    return [unit for unit in runtime_of(model).units if unit.home.stored_form is not None]


def mapped(model: Any) -> list[Any]:
    runtime = runtime_of(model)
    return [unit for unit in runtime.units if isinstance(unit.home, BaseHome)]


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in infinity.state_dict(model).items()}


def assert_same(weights: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> None:
    assert weights.keys() == others.keys()
    assert [name for name in weights if not torch.equal(weights[name], others[name])] == []


def content(directory: Path) -> dict[str, tuple[bytes, int]]:
    return {each.name: (each.read_bytes(), each.stat().st_mtime_ns) for each in directory.iterdir()}


# --- numbers -------------------------------------------------------------------------------------


#: Linear layers, experts in one tensor, values of another shape than what is stored; the values of every kind
#: are compared in tests/checkpoint/test_quantized.py.
FEW = (
    ("qwen3_fp8", False), ("gpt_oss", False), ("kimi_k2", True), ("gptq", True), ("mixed", False),
    ("nf4", False),
)  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "in_host"),
    few(FEW, itertools.product(quantized.KINDS, (False, True))),
)
def test_adapters_on_a_quantized_base_train_as_with_plain_pytorch_and_peft(tmp_path, kind, in_host):
    directory, targets = tmp_path / kind, TARGETS.get(kind)
    values = quantized.write(kind, directory)
    with loaded(directory, tmp_path / "nvme", "memory.device=1MiB") as model:
        assert mapped(model) == list(runtime_of(model).units)
        assert any(unit.stored for unit in runtime_of(model).units)
        assert written_nbytes(model) == 0
        losses = train(model, targets=targets)
    if in_host:
        more = ["memory.device=1MiB", "memory.host=16MiB", "memory.resident=true"]
        with loaded(directory, tmp_path / "nvme", *more) as model:
            assert {unit.home.tier for unit in runtime_of(model).units} == {Tier.HOST}
            assert held(model) == mapped(model) != []
            assert train(model, targets=targets) == losses
    where, options = directory, {}
    if kind == "gpt_oss":
        options = {"quantization_config": Mxfp4Config(dequantize=True)}
    elif kind not in quantized.KNOWN:
        where = quantized.without_quantization(directory, values, tmp_path / "plain")
    plain = AutoModelForCausalLM.from_pretrained(where, dtype=torch.bfloat16, **options)
    assert losses == train_plain(plain, targets)


@pytest.mark.parametrize(
    ("dtype", "stored"),
    few(
        (("fp16", torch.float32), ("fp32", torch.bfloat16)),
        [("bf16", torch.float32), ("bf16", torch.float16), ("fp16", torch.float32), ("fp32", torch.bfloat16)],
    ),
)
def test_any_stored_dtype_gives_the_exact_values_of_a_base_that_is_copied(tmp_path, dtype, stored):
    checkpoint = save(tmp_path / "checkpoint", dtype=stored, max_shard_size="40KB")
    before = content(checkpoint)
    with loaded(checkpoint, tmp_path / "own", dtype=dtype, frozen=False) as model:
        weights = weights_of(model)
        exact = [runtime_of(model).tiers.get(unit) for unit in runtime_of(model).units]
    with loaded(checkpoint, tmp_path / "nvme", dtype=dtype) as model:
        runtime = runtime_of(model)
        assert mapped(model) == list(runtime.units)
        assert "is read where it lies" in said(model)
        assert_same(weights_of(model), weights)
        assert all(torch.equal(runtime.tiers.get(u), e) for u, e in zip(runtime.units, exact, strict=True))
        assert written_nbytes(model) == 0
        assert runtime.storage.host_pool.peak_nbytes <= runtime.storage.host_nbytes
    assert content(checkpoint) == before


@pytest.mark.parametrize("stored", few((torch.float32,), (torch.float32, torch.bfloat16)))
def test_adapters_train_as_on_a_base_that_is_copied(tmp_path, stored):
    checkpoint = save(tmp_path / "checkpoint", dtype=stored, max_shard_size="40KB")
    with loaded(checkpoint, tmp_path / "own", frozen=False) as model:
        losses = train(model)
    with loaded(checkpoint, tmp_path / "nvme") as model:
        assert train(model) == losses


def test_nothing_is_frozen_unless_it_is_asked_for(tmp_path, checkpoint):
    with loaded(checkpoint, tmp_path / "nvme", frozen=False) as model:
        assert all(param.requires_grad for param in model.parameters())
        assert mapped(model) == []
    with loaded(checkpoint, tmp_path / "nvme") as model:
        assert not any(param.requires_grad for param in model.parameters())


def test_runs_at_the_same_time_read_the_same_files_and_no_drive_holds_a_copy(tmp_path, checkpoint):
    nvme = tmp_path / "nvme"
    with loaded(checkpoint, nvme) as first, loaded(checkpoint, nvme) as second:
        for model in (first, second):
            assert runtime_of(model).storage.volume.allocated_nbytes == 0
        assert train(first) == train(second)
    assert list(nvme.iterdir()) == []


@contextlib.contextmanager
def gathered_nbytes():
    """Bytes of the buffers that ranks gather weights into, one for each gather."""
    with pytest.MonkeyPatch.context() as patch:
        gather, seen = Collectives.gather, []

        def counts(self, index, where, bring, **how):
            def brought():
                full = bring()
                seen.append((index, full.nbytes))
                return full

            return gather(self, index, where, brought, **how)

        patch.setattr(Collectives, "gather", counts)
        yield seen


def ranks_of(checkpoint: str, nvme: str) -> Any:
    rank = int(os.environ["RANK"])
    more = ["memory.device=4MiB", "memory.host=2MiB"]
    resident = "memory.host=64MiB", "memory.resident=true"
    with loaded(Path(checkpoint), nvme, *more, *resident) as model, gathered_nbytes() as seen:
        runtime = runtime_of(model)
        assert held(model) == [unit for unit in runtime.units if unit.stored] != []
        for unit in mapped(model):  # a half of what they would take as weights
            assert unit.home.stored_form.nbytes == unit.stored.shard_nbytes < unit.shard_nbytes
        losses = train(model, rank=rank, world=2)
        assert seen == []  # the stored form of both ranks is in memory that they share
    with loaded(Path(checkpoint), nvme, *more) as model, gathered_nbytes() as seen:
        units = list(runtime_of(model).units)
        read = sum(unit.home.fetched_nbytes(None) for unit in units)
        assert mapped(model) == units
        assert written_nbytes(model) == 0
        assert train(model, rank=rank, world=2) == losses
        stored = {unit.index: unit.stored.nbytes for unit in units if unit.stored}
        assert {(index, nbytes) for index, nbytes in seen if index in stored} == set(stored.items())
    whole = sum(unit.nbytes for unit in units if unit.stored)
    return read, sum(unit.shard_nbytes for unit in units), sum(stored.values()), whole


def test_each_rank_reads_and_gathers_its_own_part_of_the_stored_form(tmp_path):
    directory = tmp_path / "checkpoint"
    wide(directory)
    quantized.fp8(directory)
    for read, shards, stored, whole in run_ranks(ranks_of, 2, str(directory), str(tmp_path / "nvme")):
        assert read < 0.75 * shards
        assert 0 < stored < 0.6 * whole


# --- bytes ---------------------------------------------------------------------------------------


def wide(directory: Path) -> None:
    """A model whose matrices are much larger than a block."""
    torch.manual_seed(1)
    sizes = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "vocab_size": models.VOCABULARY,
    }
    config = LlamaConfig(num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64, **sizes)
    LlamaForCausalLM(config).save_pretrained(directory)


@pytest.mark.parametrize(("form", "most"), [(quantized.fp8, 0.65), (quantized.packed, 0.45)])
def test_a_step_reads_the_bytes_of_the_stored_form_as_planned(tmp_path, form, most):
    directory = tmp_path / "checkpoint"
    wide(directory)
    form(directory) if form is quantized.fp8 else form(directory, only="_proj")
    _, batch = models.build("llama", 1)
    more = ["memory.device=1500KiB", "memory.host=4MiB"]
    with small_units(2**17), loaded(directory, tmp_path / "nvme", *more) as model:
        units = list(runtime_of(model).units)
        stored = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
        whole = sum(unit.shard_nbytes for unit in units)
        fetched = sum(unit.home.fetched_nbytes(None) for unit in units)
        assert fetched < 1.25 * stored
        assert fetched < most * whole
        [base] = {unit.home.base for unit in units}
        model = adapted(model)
        optimizer, runtime = optimizer_for(model, Rule(max_grad_norm=None)), runtime_of(model)
        read, planned = [], []
        for step in range(6):
            model(**batch(step)).loss.backward()
            optimizer.step()
            base.start(units[0], lambda: None).wait()  # its only thread has done what came before
            read.append(settled(runtime)[0])
            planned.append(runtime.executor().figures.planned)
        fetches = runtime.executor().prefetcher.training.plan.fetched()
        of_base = sum(runtime.units[index].home.fetched_nbytes(None) for index in fetches)
        state = sum(12 * unit.shard_numel for unit in runtime.units if unit.trainable)
        for step in (3, 4, 5):
            assert 0 < of_base <= read[step] - read[step - 1] <= of_base + state
            assert planned[step][0] == read[step] - read[step - 1]


def test_what_finds_room_in_host_memory_is_read_once_and_stays_there(tmp_path, checkpoint):
    with loaded(checkpoint, tmp_path / "nvme") as model:
        losses = train(model)
    more = ["memory.resident=true", "memory.host=600KiB"]
    with loaded(checkpoint, tmp_path / "some", *more) as model:
        homes = {unit.home.tier for unit in runtime_of(model).units}
        assert homes == {Tier.HOST, Tier.NVME}
        assert train(model) == losses
    with loaded(checkpoint, tmp_path / "all", *more, "memory.host=8MiB") as model:
        assert {unit.home.tier for unit in runtime_of(model).units} == {Tier.HOST}
        assert runtime_of(model).storage.host_pool.leased_nbytes == sum(
            lease.nbytes for unit in runtime_of(model).units for lease in unit.home.leases
        )
        assert train(model) == losses


def leased_per_element(model: Any) -> set[float]:
    frozen = (unit for unit in runtime_of(model).units if not unit.trainable)
    return {sum(each.nbytes for each in unit.home.leases) / unit.shard_numel for unit in frozen}


def test_a_frozen_bf16_weight_takes_two_bytes_of_host_memory_until_its_values_need_more(tmp_path, checkpoint):
    room = ["memory.resident=true", "memory.host=8MiB"]
    with loaded(checkpoint, tmp_path / "nvme", *room) as model:
        losses = train(model)
        assert leased_per_element(model) == {2.0}
        tiers, (unit, *_) = runtime_of(model).tiers, runtime_of(model).units
        rounded = tiers.get(unit).clone()
        tiers.put(unit, lambda start, stop: rounded[start:stop] + 0)
        assert torch.equal(tiers.get(unit), rounded)
        values = torch.randn(unit.numel)
        tiers.resident_nbytes = sum(tiers.taken.values())  # nothing is left
        other = runtime_of(model).units[1]
        with pytest.raises(BudgetError, match=rf"{re.escape(other.name)} is frozen.*Raise memory.host"):
            tiers.put(other, lambda start, stop: torch.randn(stop - start))
        tiers.put(unit, lambda start, stop: values[start:stop])
        assert torch.equal(tiers.get(unit), values)
        assert leased_per_element(model) == {2.0, 4.0}
    single = save(tmp_path / "single", dtype=torch.float32)
    with loaded(single, tmp_path / "nvme", *room) as model:
        train(model, 1)
        assert leased_per_element(model) == {4.0}
    with loaded(checkpoint, tmp_path / "streamed") as model:
        assert train(model) == losses


# --- what cannot be read where it lies -------------------------------------------------------------


def test_what_the_checkpoint_lacks_lies_in_the_runs_own_files_and_is_named(tmp_path, checkpoint):
    tensors = load_file(checkpoint / "model.safetensors")
    name = "model.norm.weight"
    save_file({key: each for key, each in tensors.items() if key != name}, checkpoint / "model.safetensors")
    with loaded(checkpoint, tmp_path / "nvme", new=[name]) as model:
        units = runtime_of(model).units
        own = sum(unit.shard_nbytes for unit in units if unit not in mapped(model))
        lines = said(model)
        assert "of the frozen base lie in this run's own files, as" in lines
        assert f"{name} is not in the checkpoint" in lines
        assert written_nbytes(model) == 2 * own > 0  # before it is initialised and then; no remainders


# --- files that change, faults -----------------------------------------------------------------------


def touch(path: Path) -> None:
    os.utime(path, ns=(1, 1))


def replace(path: Path) -> None:
    shutil.copy2(path, path.with_suffix(".new"))
    path.with_suffix(".new").rename(path)


CHANGES = {
    "written": (touch, "was written"),
    "cut": (lambda path: os.truncate(path, 5000), "was written .*5000 now"),
    "replaced": (replace, "was replaced"),
    "removed": (Path.unlink, "was removed"),
}


@pytest.mark.parametrize(
    ("change", "message"), few([CHANGES[name] for name in ("cut", "replaced", "removed")], CHANGES.values())
)
def test_a_file_that_changes_under_a_run_is_an_error_that_names_it(tmp_path, checkpoint, change, message):
    path = checkpoint / "model.safetensors"
    _, batch = models.build("llama", 1)
    with loaded(checkpoint, tmp_path / "nvme") as model:
        model = adapted(model)
        optimizer = optimizer_for(model, Rule())
        model(**batch(0)).loss.backward()
        optimizer.step()
        loss = model(**batch(1)).loss
        loss.backward()
        change(path)
        with pytest.raises(ChangedCheckpointError, match=f"{path} {message}") as raised:
            optimizer.step()
        assert isinstance(raised.value, ChangedFileError)
        assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)


def goes_on(checkpoint: Path, nvme: Path, steps: range) -> list[float]:
    """Losses of a run of adapters that goes on where it was interrupted, and is interrupted again."""
    _, batch = models.build("llama", 1)
    model = load(checkpoint, nvme, "run.name=mine")
    try:
        model = adapted(model)
        optimizer, losses = optimizer_for(model, Rule()), []
        assert infinity.resume(model, optimizer) == steps.start
        assert mapped(model)
        for step in steps:
            loss = model(**batch(step)).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses
    finally:
        infinity.close(model, keep=True)


def test_a_run_goes_on_with_the_base_that_it_had_and_with_no_other(tmp_path, checkpoint):
    path, nvme = checkpoint / "model.safetensors", tmp_path / "nvme"
    expected = goes_on(checkpoint, tmp_path / "whole", range(4))
    losses = goes_on(checkpoint, nvme, range(2))
    replace(path)
    touch(path)
    assert losses + goes_on(checkpoint, nvme, range(2, 4)) == expected
    kept = path.read_bytes()
    with path.open("r+b") as file:
        file.seek(len(kept) // 2)
        file.write(bytes(8192))
    with pytest.raises(StateError, match=r"is not the one .* run: model\.safetensors: .*holds ot"):
        goes_on(checkpoint, nvme, range(4, 5))
    path.write_bytes(kept)
    assert len(goes_on(checkpoint, nvme, range(4, 5))) == 1


def test_the_links_of_a_hub_cache_are_followed(tmp_path, checkpoint):
    with loaded(checkpoint, tmp_path / "nvme") as model:
        losses = train(model)
    cache = tmp_path / "cache" / "snapshots"
    cache.mkdir(parents=True)
    for path in checkpoint.iterdir():
        (cache / path.name).symlink_to(path)
    with loaded(cache, tmp_path / "nvme") as model:
        assert mapped(model) == list(runtime_of(model).units)
        assert train(model) == losses


def test_a_read_that_fails_raises_where_the_weight_is_used_and_names_the_file(tmp_path, checkpoint):
    _, batch = models.build("llama", 1)
    with loaded(checkpoint, tmp_path / "nvme") as model:
        os.truncate(checkpoint / "model.safetensors", 5000)
        with pytest.raises(DiskError, match=r"read of .*EIO") as raised:
            model(**batch(0))
        assert raised.value.path == str(checkpoint / "model.safetensors")


# --- what is written later -----------------------------------------------------------------------


def thaw(checkpoint: Path, nvme: Path, dtype: str, *more: str, frozen: bool) -> tuple[list[float], Any]:
    """Losses and weights of a model that is frozen in part for two steps, and trained for two."""
    _, batch = models.build("llama", 1)
    with loaded(checkpoint, nvme, "memory.device=1MiB", *more, dtype=dtype, frozen=frozen) as model:
        for name, param in model.train().named_parameters():
            param.requires_grad_("layers.1" in name)
        optimizer = infinity.AdamW(model, lr=1e-2, params=[{"params": list(model.parameters())}])
        losses = []
        for step in range(4):
            if step == 2:
                model.requires_grad_(True)
            loss = model(**batch(step)).loss
            optimizer.scale(loss).backward()
            optimizer.step()
            losses.append(loss.item())
        assert mapped(model) == []
        return losses, weights_of(model)


@pytest.mark.parametrize("dtype", few(("bf16",), ("bf16", "fp16")))
def test_what_is_thawed_trains_as_ever_and_leaves_the_checkpoint_as_it_is(tmp_path, dtype):
    checkpoint = save(tmp_path / "checkpoint", dtype=torch.float32)
    losses, weights = thaw(checkpoint, tmp_path / "alone", dtype, frozen=False)
    before = content(checkpoint)
    again, same = thaw(checkpoint, tmp_path / "nvme", dtype, frozen=True)
    assert again == losses
    assert_same(same, weights)
    assert content(checkpoint) == before


def test_a_bf16_base_in_host_memory_is_thawed_bitwise(tmp_path, checkpoint):
    room = ["memory.host=16MiB", "memory.resident=true"]
    losses, weights = thaw(checkpoint, tmp_path / "nvme", "bf16", frozen=False)
    again, same = thaw(checkpoint, tmp_path / "host", "bf16", *room, frozen=True)
    assert again == losses
    assert_same(same, weights)


@pytest.mark.parametrize("more", [[], ["memory.host=16MiB", "memory.resident=true"]], ids=["drive", "host"])
def test_a_quantized_base_is_thawed_with_the_values_that_it_stands_for(tmp_path, more):
    quantized.write("gpt_oss", tmp_path / "checkpoint")  # exact in bf16
    more = ["memory.device=4MiB", *more]
    losses, weights = thaw(tmp_path / "checkpoint", tmp_path / "alone", "bf16", *more, frozen=False)
    again, same = thaw(tmp_path / "checkpoint", tmp_path / "nvme", "bf16", *more, frozen=True)
    assert again == losses
    assert_same(same, weights)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("kind", ["qwen3_fp8", "gptq"])
@pytest.mark.parametrize("more", [[], ["memory.host=16MiB", "memory.resident=true"]], ids=["drive", "host"])
def test_a_quantized_base_is_exported_and_saved_with_its_values(tmp_path, kind, more):
    quantized.write(kind, tmp_path / "checkpoint")
    with loaded(tmp_path / "checkpoint", tmp_path / "nvme", "memory.device=1MiB", *more) as model:
        weights = weights_of(model)
        infinity.export(model, tmp_path / "out")
        infinity.save_checkpoint(model, None, tmp_path / "saved")
        name, param = next((n, p) for n, p in model.named_parameters() if n.endswith("q_proj.weight"))
        with infinity.gathered(param, modify=True):
            param.mul_(2)
        changed = weights_of(model)
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), exported(weights))
    saved = {key: torch.empty(value.shape) for key, value in weights.items()}
    dcp.load(saved, checkpoint_id=tmp_path / "saved", no_dist=True)
    assert_same({key: value.bfloat16() for key, value in saved.items()}, weights)
    assert torch.equal(changed.pop(name), 2 * weights.pop(name))
    assert_same(changed, weights)


def exported(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Without the second name of a tied weight."""
    tied = "lm_head.weight"
    tie = torch.equal(weights[tied], weights["model.embed_tokens.weight"])
    return {key: value for key, value in weights.items() if not (tie and key == tied)}


def test_weights_that_are_written_are_the_runs_own(tmp_path, checkpoint):
    before = content(checkpoint)
    with loaded(checkpoint, tmp_path / "nvme") as model, loaded(checkpoint, tmp_path / "nvme") as other:
        weights = weights_of(model)
        name, param = next(iter(other.named_parameters()))
        with infinity.gathered(param, modify=True):
            param.mul_(2)
        assert len(mapped(other)) == len(runtime_of(other).units) - 1
        other.load_state_dict(weights_of(other))
        changed = weights_of(other)
        assert torch.equal(changed.pop(name), 2 * weights[name])
        assert_same(changed, {key: value for key, value in weights.items() if key != name})
        assert_same(weights_of(model), weights)
    assert content(checkpoint) == before


def save_and_thaw(checkpoint: Path, tmp_path: Path, *, background: bool) -> dict[str, torch.Tensor]:
    """What a portable checkpoint has that was begun before frozen units were thawed and trained."""
    _, batch = models.build("llama", 1)
    out = tmp_path / f"saved-{background}"
    with loaded(checkpoint, tmp_path / "nvme", "memory.device=1MiB") as model:
        for name, param in model.train().named_parameters():
            param.requires_grad_("layers.1" in name)
        optimizer = infinity.AdamW(model, lr=1e-2, params=[{"params": list(model.parameters())}])
        for step in range(4):
            if step == 2:
                assert mapped(model)
                saving = infinity.save_checkpoint(model, optimizer, out, background=background)
                model.requires_grad_(True)
            model(**batch(step)).loss.backward()
            optimizer.step()
        saving.wait()
        assert mapped(model) == []
        weights = {name: torch.empty(param.shape) for name, param in model.named_parameters()}
    dcp.load(weights, checkpoint_id=out, no_dist=True)
    return weights


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_save_in_the_background_has_the_base_as_it_was_when_it_is_thawed_meanwhile(tmp_path, checkpoint):
    expected = save_and_thaw(checkpoint, tmp_path, background=False)
    assert_same(save_and_thaw(checkpoint, tmp_path, background=True), expected)


def test_a_frozen_model_is_exported_from_where_it_lies(tmp_path, checkpoint):
    seen = []
    with loaded(checkpoint, tmp_path / "nvme", on_progress=lambda *given: seen.append(given)) as model:
        assert seen[-1][1] == seen[-1][2]
        progress = list(seen)
        infinity.export(model, tmp_path / "out")
        infinity.save_checkpoint(model, None, tmp_path / "saved")
        assert seen == progress  # nothing is loaded any more
        assert written_nbytes(model) == 0
    assert_same(
        load_file(tmp_path / "out" / "model.safetensors"), load_file(checkpoint / "model.safetensors")
    )
