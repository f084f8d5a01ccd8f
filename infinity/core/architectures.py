"""Models of our own that a ``config.json`` may name beside those of transformers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model of our own, and how to build it from ``config.json``.

    Attributes:
        config: A dataclass, whose fields are the entries of the file.
        model: Takes one.
        longest: The field that says how many tokens a sequence may have.
    """

    config: type[Any]
    model: Callable[[Any], Any]
    longest: str

    def read(self, values: Mapping[str, Any], overrides: Mapping[str, Any]) -> Any:
        """The config of a file's ``values``, some of them overridden; entries that it does not know are left.

        Raises:
            ValueError: A value is impossible, or an override unknown.
        """
        assert is_dataclass(self.config)
        names = {field.name for field in fields(self.config)}
        if unknown := sorted(set(overrides) - names):
            raise ValueError(f"{self.config.__name__} has no {', '.join(unknown)}")
        return self.config(**{k: v for k, v in {**values, **overrides}.items() if k in names})


#: By the name in ``architectures``. A module that defines such a model puts it here.
ARCHITECTURES: dict[str, Architecture] = {}
