"""The slot manifest: which planes make a page complete. A page that lacks one is never stored."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from hiradix.errors import ConfigError
from hiradix.memory.shape import CacheShape


@dataclass(frozen=True)
class SlotManifest:
    """Bytes per page of every plane that a page of a model has, by name: one per array of each pool.

    A plane of the backbone's pool has its array's name ("k", "latent", "index_k"); one of a further pool is
    "pool.array" ("window.k", "state.conv").
    """

    planes: Mapping[str, int]

    @staticmethod
    def of(shape: CacheShape, page_size: int, **further: CacheShape) -> SlotManifest:
        """The manifest of pools of `shape` and, by pool name, of `further` shapes."""
        planes = _planes(shape, page_size, "")
        for pool, other in further.items():
            planes |= _planes(other, page_size, f"{pool}.")
        return SlotManifest(planes)

    @property
    def page_bytes(self) -> int:
        return sum(self.planes.values())

    def missing(self, present: Iterable[str]) -> list[str]:
        """The planes not among `present`, in manifest order."""
        given = set(present)
        return [name for name in self.planes if name not in given]

    def is_storable(self, present: Iterable[str]) -> bool:
        """Whether a page with these planes is complete."""
        return not self.missing(present)

    def require(self, present: Collection[str]) -> None:
        """Raise ConfigError unless `present` names every plane, and no other."""
        if missing := self.missing(present):
            raise ConfigError(f"device pool: planes {missing} of a page are declared but not given")
        if strange := sorted(set(present) - set(self.planes)):
            raise ConfigError(f"device pool: planes {strange} are not declared; declared: {[*self.planes]}")


def _planes(shape: CacheShape, page_size: int, prefix: str) -> dict[str, int]:
    return {
        prefix + spec.name: shape.num_layers * spec.rows(page_size) * spec.row_bytes for spec in shape.arrays
    }
