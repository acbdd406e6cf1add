"""Spider's raw layout: `train_spider.json`, `train_others.json`, `dev.json` and `database/`."""

from .find import LayoutError, find_databases, find_file, require_folder
from .questions import FieldNames, SourceData, add_questions, read_records
from .settings import PreprocessSettings, Split

NAMES = FieldNames(question="question", sql="query", db_id="db_id")

FILES: dict[Split, tuple[str, ...]] = {
    "train": ("train_spider.json", "train_others.json"),
    "validation": ("dev.json",),
}
_OPTIONAL = frozenset({"train_others.json"})


def read_spider(settings: PreprocessSettings) -> SourceData:
    """Reads the questions of the splits asked for.

    Raises LayoutError if one of the files is not there; `train_others.json` may be missing, which is told.
    """
    root = settings.folder("spider")
    require_folder(root, "--spider_dir")
    skip = [settings.output_dir]
    data = SourceData()
    databases = find_databases(root, "database", skip=skip)
    data.found.append(f"spider databases: {databases}")
    for split in settings.splits:
        for name in FILES[split]:
            try:
                path = find_file(root, lambda path, name=name: path.name == name, name, skip=skip)
            except LayoutError:
                if name not in _OPTIONAL:
                    raise
                data.found.append(f"spider {split} questions: no {name}, so those of {FILES[split][0]} only")
                continue
            data.found.append(f"spider {split} questions: {path}")
            add_questions(data, read_records(path), NAMES, "spider", split, databases)
    return data
