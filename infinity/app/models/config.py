"""Which model a run trains."""

from dataclasses import dataclass, fields

from infinity.app.models.gpt import GPTConfig
from infinity.core.config import SettingError, setting


@dataclass(frozen=True, kw_only=True)
class ModelConfig(GPTConfig):
    """A new GPT of these sizes, or the model of a Hugging Face checkpoint directory."""

    path: str | None = setting(
        None, "directory of a Hugging Face checkpoint to train further; null: a new GPT of these sizes"
    )
    new: tuple[str, ...] = setting(
        (), "patterns of parameters that the checkpoint lacks, as a new head: classifier.*", many=True
    )
    ignore: tuple[str, ...] = setting(
        (), "patterns of checkpoint keys that the model does not have, and need not", many=True
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.path in ("", "???"):  # a recipe's mark for what the command line must give
            raise SettingError("path", self.path, "a checkpoint's directory, as in model.path=DIR; or null")
        for each in fields(GPTConfig):
            value = getattr(self, each.name)
            if self.path is not None and each.name != "seq_len" and value != each.default:
                raise SettingError(
                    each.name, value, "nothing beside model.path, whose config.json has the sizes"
                )
        if self.path is None and (self.new or self.ignore):
            raise SettingError(
                "path", None, "the checkpoint's directory, where model.new or model.ignore is given"
            )
