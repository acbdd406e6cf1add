"""A module that fails while it is imported."""

import a_package_that_is_not_installed  # noqa: F401
