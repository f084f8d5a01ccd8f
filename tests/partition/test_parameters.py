"""The dictionary in place of ``_parameters``: asking by key serves, iterating does not."""

import copy

import pytest
import torch
from torch import nn

from infinity.partition.init_context import ServedParameters, install_parameter_dict


class Counting:
    """A server that notes what is touched, and whose copies are one larger."""

    def __init__(self) -> None:
        self.touched: list[nn.Parameter] = []

    def touch(self, param, siblings) -> None:
        self.touched.append(param)

    def deep_copy(self, param) -> nn.Parameter:
        return nn.Parameter(param.detach() + 1)

    def check(self, param) -> None: ...


@pytest.fixture
def served():
    module, server = nn.Linear(3, 2), Counting()
    install_parameter_dict(module, server)
    return module, server.touched


def test_asking_by_name_serves_the_parameter(served):
    module, touched = served
    weight = module.weight
    assert touched == [weight]
    module(torch.randn(1, 3))
    assert len(touched) == 3


def test_iterating_serves_nothing(served):
    module, touched = served
    list(module.parameters())
    dict(module.named_parameters())
    module.state_dict()
    module.requires_grad_(False)
    module.train()
    assert not touched


def test_a_missing_bias_is_none_and_touches_nothing():
    module, server = nn.Linear(3, 2, bias=False), Counting()
    install_parameter_dict(module, server)
    assert module.bias is None
    assert not server.touched


def test_serving_twice_is_serving_once(served):
    module, _ = served
    before = module._parameters
    install_parameter_dict(module, Counting())
    assert module._parameters is before


def test_modules_still_add_replace_and_delete_parameters(served):
    module, _ = served
    module.extra = nn.Parameter(torch.ones(1))
    module.weight = nn.Parameter(torch.zeros(2, 3))
    del module.bias
    assert set(dict(module.named_parameters())) == {"extra", "weight"}
    assert module.weight.sum() == 0


def test_a_deep_copy_is_plain_and_keeps_ties(served):
    module, _ = served
    tied = nn.Linear(3, 2)
    tied.weight = module.weight
    install_parameter_dict(tied, Counting())
    both = copy.deepcopy(nn.ModuleList([module, tied]))
    assert both[0].weight is both[1].weight
    assert torch.equal(both[0].weight, module.weight + 1)
    assert not isinstance(both[0]._parameters, ServedParameters)
