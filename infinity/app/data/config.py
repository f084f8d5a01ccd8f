"""Where the tokens come from."""

from dataclasses import dataclass

from infinity.core.config import SettingError, Valid, check, setting


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Files, tokenizer, and how documents become sequences."""

    files: tuple[str, ...] = setting(
        ("stdlib",),
        "text and .jsonl files, globs or directories; stdlib: the sources of Python's library",
        many=True,
    )
    eval_files: tuple[str, ...] = setting(
        (), "held-out files, taken out of files; none: eval_fraction decides", many=True
    )
    eval_fraction: float = setting(
        0.01, "share of the data, at the end, that is held out", valid=Valid(least=0, below=1)
    )
    tokenizer: str | None = setting(
        None,
        "bytes, a tokenizer.json, or a Hugging Face directory; null: model.path's, else bytes",
    )
    packing: bool | None = setting(
        None,
        "true: sequences of whole documents, apart; false: one in each; null: text as one stream",
    )
    skip_malformed: bool = setting(False, "count and leave out lines of .jsonl that cannot be used")
    cache: str = setting("runs/tokens", "directory where tokens are kept between runs")
    shuffle: bool = setting(True, "a new order of sequences every epoch; false: as they stand")
    seed: int = setting(0, "seed of that order", valid=Valid(least=0))

    def __post_init__(self) -> None:
        check(self)
        if not self.files or not all(self.files):
            raise SettingError("files", self.files, "at least one path, glob or 'stdlib'")
        if self.tokenizer == "":
            raise SettingError("tokenizer", self.tokenizer, "bytes, a path, or null")
