"""Registry of model classes outside transformers that a ``config.json`` may name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model class outside transformers that is built from the entries of ``config.json``.

    Attributes:
        config: A dataclass whose fields are the entries of the file.
        model: Builds the model from such a config.
        longest: The field with the maximum sequence length.
    """

    config: type[Any]
    model: Callable[[Any], Any]
    longest: str

    def read(self, values: Mapping[str, Any], overrides: Mapping[str, Any]) -> Any:
        """Return the config of a file's ``values`` with ``overrides``; ignore unknown entries of the file.

        Raises a ValueError if a value is invalid or an override is unknown.
        """
        assert is_dataclass(self.config)
        names = {field.name for field in fields(self.config)}
        if unknown := sorted(set(overrides) - names):
            raise ValueError(f"{self.config.__name__} has no {', '.join(unknown)}")
        return self.config(**{k: v for k, v in {**values, **overrides}.items() if k in names})


#: Keyed by the name in ``architectures``; a module that defines such a model registers it here.
ARCHITECTURES: dict[str, Architecture] = {}
