"""Configuration of the model."""

from dataclasses import dataclass, fields

from infinity.app.models.gpt import GPTConfig
from infinity.core.config import SettingError, setting


@dataclass(frozen=True, kw_only=True)
class ModelConfig(GPTConfig):
    """A new GPT, or the model of a Hugging Face checkpoint directory."""

    path: str | None = setting(
        None, "directory of a Hugging Face checkpoint to fine-tune; null: a new GPT of these sizes", path=True
    )
    new: tuple[str, ...] = setting(
        (), "patterns of parameters that the checkpoint lacks, such as a new head: classifier.*"
    )
    ignore: tuple[str, ...] = setting(
        (), "patterns of checkpoint keys to ignore, which the model does not have"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.path in ("", "???"):  # OmegaConf's mark of a mandatory value
            raise SettingError(
                "path", self.path, "the directory of a checkpoint, as in model.path=DIR; or null"
            )
        for each in fields(GPTConfig):
            value = getattr(self, each.name)
            if self.path is not None and each.name != "seq_len" and value != each.default:
                raise SettingError(
                    each.name, value, "no value together with model.path, whose config.json has the sizes"
                )
        if self.path is None and (self.new or self.ignore):
            raise SettingError(
                "path", None, "the directory of a checkpoint, since model.new or model.ignore is set"
            )
