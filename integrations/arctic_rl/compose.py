"""Put one of our mixins before the class of an object that a recipe built, so that any recipe's classes work."""

from __future__ import annotations


def with_mixin(mixin: type, base: type) -> type:
    """``base`` with ``mixin`` in front; ``base`` itself where it has the mixin already."""
    if issubclass(base, mixin):
        return base
    name = f"Arctic{base.__name__}"
    return type(name, (mixin, base), {"__doc__": base.__doc__, "__module__": base.__module__})


def apply_mixin[T](mixin: type, instance: T) -> T:
    """Turn ``instance`` into one of ``with_mixin(mixin, type(instance))`` in place; no ``__init__`` runs.

    Raises:
        TypeError: when the class of the object cannot be changed (it has ``__slots__`` or is not a Python class).
    """
    instance.__class__ = with_mixin(mixin, type(instance))
    return instance
