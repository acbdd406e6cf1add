"""The command line: ``python -m envs.bird.preprocess --bird_dir D --output_dir O``.

Exit status: 0 = written, whatever was left out; 1 = written, and the check found golds that do not score 1.0 against
themselves and that were not dropped; 2 = nothing or not everything could be written, the reason is on standard error.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from .find import LayoutError
from .pipeline import preprocess
from .report import check_lines, summary_lines
from .settings import ENV_CLASSES, SOURCES, SPLITS, DescribeLimits, PreprocessSettings, SettingError
from .workspace import WorkspaceBusyError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    arguments = vars(_parser().parse_args(argv))
    limits = DescribeLimits.__dataclass_fields__.keys() & arguments.keys()
    try:
        describe = DescribeLimits(**{name: arguments.pop(name) for name in limits})
        for name in ("sources", "splits"):
            arguments[name] = tuple(arguments[name])
        report = preprocess(PreprocessSettings(describe=describe, **arguments), progress=tqdm)
    except (SettingError, LayoutError, WorkspaceBusyError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    output_dir = arguments["output_dir"]
    print("\n".join(summary_lines(report, output_dir)))
    if report.check is None:
        return 0
    print("\n".join(check_lines(report.check, output_dir)))
    return 1 if report.check.failed and not arguments["drop_failed"] else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}",
        description="Write verl-format parquet from raw BIRD, Spider and GretelAI folders.",
        epilog="Exit status: 0 = written; 1 = written, but --check found golds that do not score 1.0 against "
        "themselves (and --drop_failed was not given); 2 = not written, the reason is on standard error.",
    )
    add = parser.add_argument
    add("--output_dir", type=Path, required=True, help="folder to write to; created if missing")
    add("--bird_dir", type=Path, help="folder with the unpacked BIRD downloads, at most three levels deep")
    add("--spider_dir", type=Path, help="the same for Spider (default: BIRD_DIR/spider)")
    add("--gretelai_dir", type=Path, help="folder with GretelAI's files (default: BIRD_DIR/gretelai)")
    add("--sources", nargs="+", choices=SOURCES, default=["bird"], help="which to read, in this order (default: bird)")
    add("--splits", nargs="+", choices=SPLITS, default=list(SPLITS), help="which files to write (default: both)")
    add("--env_class", choices=ENV_CLASSES, default="bird", help="environment that rows name (default: bird)")
    add("--relative_to", type=Path, metavar="ROOT", help="store database paths relative to ROOT (the env's db_root)")
    add("--max_tokens", type=int, metavar="N", help="drop questions whose prompt has more tokens")
    add("--tokenizer", metavar="T", help="name or folder of the Hugging Face tokenizer that counts them")
    defaults = DescribeLimits()
    for name, what in (
        ("examples", "different values shown for each column"),
        ("sample_rows", "first rows shown of each table"),
        ("max_cell_chars", "longest value shown"),
        ("max_description_chars", "longest description shown of a column"),
    ):
        default = vars(defaults)[name]
        add(f"--{name}", type=int, metavar="N", default=default, help=f"{what} (default: {default})")
    add("--check", action="store_true", help="run every gold through the scorer and report")
    add("--drop_failed", action="store_true", help="with --check, leave out the golds that do not score 1.0")
    add(
        "--timeout_s", type=float, default=30.0, dest="query_timeout_s", metavar="S",
        help="time limit of one query of the check, in seconds (default: 30)",
    )  # fmt: skip
    add(
        "--database_timeout_s", type=float, default=120.0, metavar="S",
        help="seconds after which a database that is still being read is skipped (default: 120)",
    )  # fmt: skip
    add("--workers", type=int, metavar="N", help="processes (default: the CPUs of this process)")
    return parser
