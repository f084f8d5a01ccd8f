"""Whatever quantized weights and their config look like, they are decoded, or there is one error of ours."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import infinity
from infinity.checkpoint.directory import Checkpoint
from infinity.checkpoint.forms import decode_checkpoint, read_quantization
from infinity.checkpoint.quantized import Decoded
from infinity.core.errors import CheckpointError
from tests.helpers import quantized, zoo
from tests.helpers.cases import LONG

CASES = 300 if LONG else 12
DTYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.int32, torch.int64,
    torch.float8_e4m3fn,
]  # fmt: skip
VALUES = [
    None, True, 0, -1, 3, 4, 8, 64, 2**31, 2**70, 1e300, float("nan"), "", "nf4", "fp4", "float16", "group",
    [], [0], [-1, 4], [2**40, 2**40], [[1]], {}, {"a": 1},
]  # fmt: skip
SHAPES = [(0,), (0, 4), (4, 0), (1,), (), (3, 5, 7)]


def other_json(chance: random.Random, value: Any) -> Any:
    """The same with one value, or key, replaced or removed."""
    if not isinstance(value, dict) or not value or chance.random() < 0.2:
        return chance.choice(VALUES)
    key = chance.choice(list(value))
    changed = dict(value)
    if chance.random() < 0.2:
        del changed[key]
    else:
        changed[key] = other_json(chance, changed[key])
    return changed


def other_tensor(chance: random.Random, key: str, tensor: Tensor) -> Tensor | None:
    """A tensor of other rows, shape, dtype or bytes; None: it is removed."""
    if "quant_state" in key and chance.random() < 0.7:
        said = other_json(chance, json.loads(bytes(tensor.tolist())))
        return torch.frombuffer(bytearray(json.dumps(said).encode()), dtype=torch.uint8)
    how = chance.randrange(6)
    if how == 0:
        return None
    if how == 1:
        return tensor[: max(0, len(tensor) - chance.randint(1, 3))] if tensor.ndim else tensor
    if how == 2:
        return tensor.reshape(-1)
    if how == 3:
        return torch.zeros(chance.choice(SHAPES), dtype=tensor.dtype)
    if how == 4:
        return torch.zeros(tensor.shape, dtype=chance.choice(DTYPES))
    raw = torch.tensor([chance.randrange(256) for _ in range(tensor.nbytes)], dtype=torch.uint8)
    return raw.view(tensor.dtype).view(tensor.shape) if tensor.numel() else tensor


@pytest.mark.parametrize("kind", quantized.KINDS)
def test_any_change_of_a_quantized_checkpoint_is_decoded_or_an_error(tmp_path: Path, kind: str) -> None:
    transformers.utils.logging.set_verbosity_error()
    chance, found, errors = random.Random(kind), set(), []
    quantized.write(kind, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    whole = load_file(tmp_path / "model.safetensors")
    plain = ("norm.weight", "embed_tokens.weight", "lm_head.weight")
    tensors = {key: each for key, each in whole.items() if "layers.0." in key and not key.endswith(plain)}
    for _ in range(CASES):
        changed, said = dict(tensors), dict(config)
        if chance.random() < 0.3:
            said["quantization_config"] = other_json(chance, config["quantization_config"])
        else:
            key = chance.choice(list(changed))
            new = other_tensor(chance, key, changed.pop(key))
            changed |= {} if new is None else {key: new}
        save_file(
            {key: each.clone().contiguous() for key, each in changed.items()}, tmp_path / "model.safetensors"
        )
        (tmp_path / "config.json").write_text(json.dumps(said))
        try:
            form = read_quantization(tmp_path)
            with Checkpoint(tmp_path) as checkpoint:
                if form is not None:
                    decode_checkpoint(checkpoint, form)
                for tensor in checkpoint.values():
                    if isinstance(tensor, Decoded):
                        tensor.read(dtype=torch.float32)
            found.add("decoded")
        except CheckpointError as error:
            errors.append(str(error))
            found.add("refused")
    assert found == {"decoded", "refused"}
    assert [error for error in errors if str(tmp_path) not in error] == []


@pytest.mark.parametrize(
    ("kind", "entries", "message"),
    [
        (
            "int8",
            {"strategy": "group", "group_size": 7},
            r"_scale: got shape .*wanted one for each 7 of",
        ),
        ("int8", {"num_bits": 5}, r"num_bits is 5; wanted 8 in int-quantized"),
        ("mxfp4", {"group_size": 24}, r"group_size is 24; wanted 32 in mxfp4-pack-quantized"),
        ("nvfp4", {"group_size": 12}, r"group_size is 12; wanted 16 in nvfp4-pack-quantized"),
        ("fp8", [1, 2, 3], r"weight_block_size is \[1, 2, 3\]; wanted rows and columns"),
        ("fp8", ["x", 2], r"weight_block_size: got 'x', wanted a positive whole number"),
    ],
)
def test_an_odd_size_of_groups_is_an_error_that_names_it(
    tmp_path: Path, kind: str, entries: Any, message: str
) -> None:
    transformers.utils.logging.set_verbosity_error()
    zoo.build("qwen2_moe", 3)[0]().bfloat16().save_pretrained(tmp_path / "plain")
    infinity.quantize(tmp_path / "plain", tmp_path / "out", kind)
    path = tmp_path / "out/config.json"
    config = json.loads(path.read_text())
    said = config["quantization_config"]
    if kind == "fp8":
        said["weight_block_size"] = entries
    else:
        said["config_groups"]["group_0"]["weights"] |= entries
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=rf"{tmp_path}/out.*{message}"):
        infinity.from_pretrained(path.parent, infinity.load_recipe(overrides=["memory.host=64MiB"]))


def test_an_expert_that_is_missing_or_has_another_shape_is_named(tmp_path: Path) -> None:
    transformers.utils.logging.set_verbosity_error()
    zoo.build("qwen2_moe", 3)[0]().bfloat16().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = load_file(file)
    key = next(key for key in whole if "experts.2.up_proj" in key)
    for other, message in (
        (None, f"{key} is missing"),
        (whole[key][:-1], rf"{key} has shape \(\d+, \d+\), others \(\d+, \d+\)"),
    ):
        changed = {name: value for name, value in whole.items() if name != key}
        save_file(changed if other is None else changed | {key: other.contiguous()}, file)
        with pytest.raises(CheckpointError, match=rf"gate_up_proj: cannot be made from .*more: {message}\n"):
            infinity.from_pretrained(tmp_path, infinity.load_recipe(overrides=["memory.host=64MiB"]))


def other_tensors(tensor: Tensor) -> dict[str, Tensor | None]:
    """What may stand in place of a tensor, by what is wrong with it."""
    shapes = {(*tensor.shape[:d], n + step, *tensor.shape[d + 1 :])
              for d, n in enumerate(tensor.shape) for step in (-1, 1) if n + step >= 0}  # fmt: skip
    made = {f"shape {shape}": torch.ones(shape).to(tensor.dtype) for shape in sorted(shapes)}
    made |= {f"{dtype}": torch.ones(tensor.shape, dtype=dtype) for dtype in (torch.float64, torch.int16)}
    made["empty"] = torch.ones(0, dtype=tensor.dtype)
    made["a dimension more"] = tensor.unsqueeze(0)
    return {"removed": None, **made}


@pytest.mark.parametrize("kind", quantized.KINDS)
def test_each_tensor_that_is_wrong_is_named_with_what_was_got_and_wanted(tmp_path: Path, kind: str) -> None:
    """Or what is decoded has other keys or shapes, which loading compares with the model's."""
    transformers.utils.logging.set_verbosity_error()
    quantized.write(kind, tmp_path)
    file = tmp_path / "model.safetensors"
    whole = {key: each for key, each in load_file(file).items() if ".0." in key}

    def decoded() -> dict[str, Tensor]:
        form = read_quantization(tmp_path)
        assert form is not None
        with Checkpoint(tmp_path) as checkpoint:
            decode_checkpoint(checkpoint, form)
            return {key: each.read(dtype=torch.float32).view(each.shape) for key, each in checkpoint.items()}

    save_file(whole, file)
    expected, seen, wrong = decoded(), set[str](), list[str]()
    for key, tensor in whole.items():
        ending = key.rpartition(".")[2].partition("_proj")[2] or key.rpartition(".")[2]
        if key in expected and expected[key].shape == tensor.shape and tensor.dtype == torch.bfloat16:
            continue
        if (what := f"{ending} {tensor.ndim}") in seen:
            continue
        seen.add(what)
        for name, other in other_tensors(tensor).items():
            changed = {other_key: each for other_key, each in whole.items() if other_key != key}
            save_file(changed if other is None else changed | {key: other.contiguous()}, file)
            try:
                found = decoded()
            except CheckpointError as error:
                named = re.search(
                    rf"{tmp_path}: .* cannot be decoded as .*: .*(got|missing).*; wanted", str(error)
                )
                if not named and "no tensor ends with" not in str(error):
                    wrong.append(f"{key} {name}: {error}")
                continue
            same_keys = found.keys() == expected.keys()
            if same_keys and all(found[k].shape == expected[k].shape for k in found):
                same = all(torch.equal(found[k], expected[k]) for k in found)
                # Of FP8 two scales of each row are as good as one.
                if not same and (kind, name) != ("mixed", "shape (32, 2)"):
                    wrong.append(f"{key} {name}: is decoded to other values")
    assert len(seen) > 1
    assert wrong == []
