"""Directories as ``save_pretrained`` writes them."""

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, Mxfp4Config

from tests.helpers import quantized, zoo


@pytest.fixture(autouse=True)
def quiet():
    """No progress bars of transformers."""
    transformers.utils.logging.disable_progress_bar()


@pytest.fixture
def saved(tmp_path):
    """``saved(name)``: a tiny model's directory, its plain maker and its batches."""

    def save(name, *, dtype=torch.float32, max_shard_size="50GB", seed=3):
        factory, batch = zoo.build(name, seed)
        model = factory().to(dtype)
        directory = tmp_path / f"{name}-checkpoint"
        model.save_pretrained(directory, max_shard_size=max_shard_size)
        frozen = {name for name, p in model.named_parameters() if not p.requires_grad}

        def plain():
            loaded = type(model).from_pretrained(directory, dtype=torch.float32).train()
            for param_name, p in loaded.named_parameters():
                p.requires_grad_(
                    param_name not in frozen
                )  # from_pretrained forgets what a model froze itself
            return loaded

        return directory, plain, batch

    return save


@pytest.fixture
def written(tmp_path):
    """``written(kind)``: directory, the values of quantized weights, and the plain model's maker."""
    transformers.utils.logging.set_verbosity_error()

    def make(kind):
        directory = tmp_path / kind
        values = quantized.write(kind, directory)

        def plain():
            options = {"dtype": torch.float32}
            where = directory
            if kind == "gpt_oss":
                options["quantization_config"] = Mxfp4Config(dequantize=True)
            elif kind not in quantized.KNOWN:  # transformers needs other packages for these
                where = tmp_path / "plain"
                if not where.exists():
                    quantized.without_quantization(directory, values, where)
            return AutoModelForCausalLM.from_pretrained(where, **options).train()

        return directory, values, plain

    return make
