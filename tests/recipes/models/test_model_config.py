"""A model is either new, with sizes, or a checkpoint's, without."""

import pytest

from infinity.core.errors import RecipeError
from infinity.recipes.loading import load_recipe


def test_a_checkpoint_comes_with_its_own_sizes(tmp_path):
    recipe = load_recipe(overrides=[f"model.path={tmp_path}", "model.seq_len=64", "model.new=classifier.*"])
    assert recipe.model.path == str(tmp_path)
    assert recipe.model.seq_len == 64
    assert recipe.model.new == ("classifier.*",)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["model.path=DIR", "model.n_layers=4"],
            "model.n_layers on the command line: got 4; wanted no value together",
        ),
        (["model.path=DIR", "model.vocab_size=500"], "model.vocab_size on the command line: got 500"),
        (["model.path=''"], "model.path on the command line: got ''; wanted the directory of a checkpoint"),
        (
            ["model.new=[head.*]"],
            "model.path in the defaults: got null; wanted the directory of a checkpoint",
        ),
        (
            ["model.ignore=[head.*]"],
            "model.path in the defaults: got null; wanted the directory of a checkpoint",
        ),
    ],
)
def test_keys_that_exclude_each_other_are_named(overrides, message):
    with pytest.raises(RecipeError) as raised:
        load_recipe(overrides=overrides)
    assert message in str(raised.value)
