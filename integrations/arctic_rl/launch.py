"""``python -m integrations.arctic_rl.launch MODULE <arguments>``: run a recipe's own entry module on our backend.

Half of the public SkyRL recipes start through a module of their own, which never looks at
``trainer.override_entrypoint``. ``MODULE`` is such a module, as a dotted name or the path of a file, and
``<arguments>`` are all that it takes. Its ``main()`` runs here as it would by itself, and its remote function in a Ray
task of ours:

- ``main()`` parses with the recipe's own config class, to which ``trainer.arctic_rl`` and the settings of our
  environments are added, and makes its own changes and checks (``entry_main``);
- SkyRL's ``validate_cfg`` becomes our check, which says everything at once and comes before Ray starts;
- calling the remote function starts Ray and the task; what it returns is the task's own reference;
- in the task the function registers, and builds the experiment, which is composed with our parts (``entry_task``).

What is not run: SkyRL's ``initialize_ray`` (Ray starts a little later, without its GPU probe), and the parts of an
experiment and trainer that start SkyRL's workers and engines.
"""

from __future__ import annotations

import argparse
import sys

from .errors import ArcticError


def main() -> None:
    """Run the module that the command line names.

    Ends the process with status 1 and one message when the module or its recipe is refused, or the run fails.
    """
    parser = argparse.ArgumentParser(
        prog="python -m integrations.arctic_rl.launch", description="Run a SkyRL recipe's own entry module."
    )
    parser.add_argument("--entry", metavar="NAME", help="the remote function that trains, where MODULE has several")
    parser.add_argument("module", metavar="MODULE", help="dotted name, or path of a file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="handed to the module as its command line")
    options = parser.parse_args()
    try:
        launch(options.module, options.arguments, options.entry)
    except ArcticError as error:
        sys.exit(f"error: {error}")


def launch(reference: str, arguments: list[str], entry_name: str | None = None) -> None:
    """Run an entry module's ``main()`` with its remote function in our Ray task.

    Args:
        reference: the module's dotted name, or the path of its file.
        arguments: its command line.
        entry_name: the remote function that trains; None = the module's only one.

    Raises:
        ConfigError: for a module that cannot be imported, and for what stands against its recipe.
        UnsupportedError: for a module of another shape; the message says what to write.
        ArcticError: when the run fails.
    """
    from .spared_imports import spare_vllm

    spare_vllm()
    from .entry_main import EntryMain
    from .entry_module import choose_entry, load_module, require_main

    module = load_module(reference)
    name = choose_entry(module, entry_name)
    require_main(module)
    argv = sys.argv
    sys.argv = [module.__file__, *arguments]
    try:
        EntryMain(module, name).run()
    finally:
        sys.argv = argv


if __name__ == "__main__":
    main()
