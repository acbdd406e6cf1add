"""Put one of our mixins before the class of an object that a recipe built, so that any recipe's classes work."""

from __future__ import annotations


def with_mixin(mixin: type, base: type) -> type:
    """``base`` with ``mixin`` in front; ``base`` itself where it has the mixin already."""
    if issubclass(base, mixin):
        return base
    name = f"Arctic{base.__name__}"
    return type(name, (mixin, base), {"__doc__": base.__doc__, "__module__": base.__module__})


def apply_mixin[T](mixin: type, instance: T) -> T:
    """An object of ``with_mixin(mixin, type(instance))`` that shares ``instance``'s attributes; no ``__init__`` runs.

    Both objects have one ``__dict__``, so that whoever kept the first one sees every later change.

    Raises:
        TypeError: when the object's state is not all in its ``__dict__``.
    """
    slotted = [base.__name__ for base in type(instance).__mro__ if vars(base).get("__slots__")]
    if slotted or not hasattr(instance, "__dict__"):
        raise TypeError(f"{type(instance).__name__} keeps state outside its __dict__ (__slots__ of {slotted})")
    composed = object.__new__(with_mixin(mixin, type(instance)))
    composed.__dict__ = instance.__dict__
    return composed
