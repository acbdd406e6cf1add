"""Write the quickstart's BIRD-shaped data: ``python -m examples.make_data --output_dir D --seed S``."""

import argparse
import sys
from functools import partial
from pathlib import Path

from tqdm import tqdm

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from envs.bird.synthetic.dataset import write_dataset


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output_dir", type=Path, required=True, help="folder to write to; created if missing")
    parser.add_argument("--seed", type=int, default=0, help="equal seeds give equal bytes")
    parser.add_argument(
        "--relative_paths", action="store_true", help="store database paths relative to the output folder"
    )
    parser.add_argument(
        "--env_class", default="bird", choices=["bird", "bird_multi_turn"], help="the environment that rows name"
    )
    arguments = parser.parse_args(argv)
    rows = write_dataset(
        arguments.output_dir,
        seed=arguments.seed,
        relative_paths=arguments.relative_paths,
        env_class=arguments.env_class,
        progress=partial(tqdm, desc="databases"),
    )
    for split, count in rows.items():
        print(f"{arguments.output_dir / split}.parquet: {count} questions")


if __name__ == "__main__":
    main()
