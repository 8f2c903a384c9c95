"""Load Hugging Face datasets, and read their rows as chunks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sagetrain.config.arguments import spelled
from sagetrain.config.errors import ConfigError, many, pointer_at
from sagetrain.corpus.chunk import Chunk, Place
from sagetrain.corpus.files import Wanted
from sagetrain.data.tokenizer_config import keys_in


def load_from_hub(name: str, config_name: str | None, split: str) -> Any:
    """Load a dataset of the hub as a stream. The datasets library (4 and later) runs no code of a dataset."""
    import datasets
    import huggingface_hub

    # The hub is asked once. datasets would retry for half a minute and print each failure.
    if not datasets.config.HF_HUB_OFFLINE:
        try:
            there = huggingface_hub.HfApi().repo_exists(name, repo_type="dataset")
        except Exception as error:  # The HTTP library of huggingface_hub may raise anything.
            raise ConfigError(
                f"{name}: no such file or folder here, and the Hugging Face hub cannot be asked for a dataset of this "
                f"name: {error}. Mend the path or the network; HF_HUB_OFFLINE=1 reads what was downloaded before"
            ) from error
        if not there:
            raise ConfigError(
                f"{name}: no such file or folder here, and the Hugging Face hub has no dataset of this name (or it is "
                "private: log in with `hf auth login`)"
            )
    try:
        return datasets.load_dataset(name, config_name, split=split, streaming=True)
    except (ValueError, RuntimeError, OSError) as error:  # DatasetNotFoundError and a missing network are OSErrors.
        raise ConfigError(
            f"{name}: no such file or folder here, and the Hugging Face dataset cannot be read: {error}"
        ) from error


def load_saved(path: str, split: str) -> Any:
    """Load a dataset that Dataset.save_to_disk or DatasetDict.save_to_disk wrote."""
    import datasets

    try:
        loaded = datasets.load_from_disk(path)
    except Exception as error:  # Files that are something else make the library raise anything.
        if said := max(map(pointer_at, Path(path).rglob("*"))):
            raise ConfigError(said) from error
        if any(keys_in(file).get("_data_files") == [] for file in sorted(Path(path).rglob("*.json"))):
            raise ConfigError(f"{path}: a saved dataset without rows") from error
        fix = "copy the folder again, or save it anew (save_to_disk)"
        raise ConfigError(f"{path}: cannot read the saved dataset: {error}; {fix}") from error
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise ConfigError(f"{path}: no split {split!r}; the splits are: {', '.join(loaded)}")
        return loaded[split]
    if split not in ("train", str(loaded.split)):  # The former is the default.
        raise ConfigError(f"{path}: no split {split!r}; it is a single dataset: leave {spelled('dataset_split')} out")
    return loaded


def check_parts(name: str, dataset: Any, number: int, count: int) -> None:
    """Check that the dataset can be divided into so many parts. Raises ConfigError if it cannot."""
    import datasets

    if isinstance(dataset, datasets.Dataset):
        there, why, otherwise = dataset.num_rows, f"{name} has {many(dataset.num_rows, 'row')}", ""
    else:
        there, otherwise = dataset.num_shards, ", or give its files as sources (`hf download` fetches them)"
        why = f"{name} is a stream of {many(there, 'file')}, and a file is read whole"
    if there < count:
        raise ConfigError(f"{spelled('shard')} {number}/{count}: {why}: use at most {many(there, 'part')}{otherwise}")


def read_dataset(name: str, dataset: Any, place: Place, wanted: Wanted) -> Iterator[Chunk]:
    """Yield chunks of a dataset, as read_parquet does for a file."""
    from sagetrain.corpus.arrow_tables import chunks_of, roots_of  # This import loads pyarrow.

    names = dataset.column_names
    if names is not None:  # None means that the stream does not know its columns yet.
        dataset = dataset.select_columns(roots_of(name, names, wanted))  # Other columns may be costly to decode.
    tables = dataset.with_format("arrow").skip(place.records).iter(batch_size=512)
    yield from chunks_of(name, tables, place.records + 1, wanted, names)
