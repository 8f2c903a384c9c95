"""The token files of one data source as one: its windows are those of its files, one file after the other."""

from __future__ import annotations

import hashlib
import resource
from bisect import bisect_right
from itertools import accumulate

from sagetrain.config.errors import ConfigError
from sagetrain.config.schema import DataSource
from sagetrain.data.token_file import TokenFile

_OTHER_FILES = 512  # libraries, sockets, the files of everything else


class TokenFiles:
    """One or thousands of files; a window is found in O(log files)."""

    def __init__(self, source: DataSource, seq_length: int):
        """Open the files. ConfigError if one is missing or damaged, or if they hold no sequence of `seq_length`."""
        self.weight = source.weight
        if not source.files:
            raise ConfigError(f"token file {source.path}: no {source.path}.idx; `sagetrain prepare` makes them")
        self.files = [TokenFile(path) for path in source.files]
        self.num_tokens = sum(file.num_tokens for file in self.files)
        self._ends = list(accumulate(max(0, file.num_tokens - 1) // seq_length for file in self.files))
        self.num_windows = self._ends[-1]
        if self.num_windows < 1:
            raise ConfigError(
                f"token file {source.path} has {self.num_tokens:,} tokens, too few for one sequence of "
                f"data.seq_length {seq_length:,} (and the token after it); more text, or a shorter data.seq_length"
            )

    def window(self, number: int) -> tuple[TokenFile, int]:
        """(the file that holds window `number`, which of the file's windows it is)."""
        file = bisect_right(self._ends, number)
        return self.files[file], number - (self._ends[file - 1] if file else 0)

    def identity(self) -> str:
        """Which files these are (TokenFile.identity)."""
        first, *others = [file.identity() for file in self.files]
        return hashlib.sha256("".join([first, *others]).encode()).hexdigest() if others else first


def open_sources(sources: list[DataSource], seq_length: int) -> list[TokenFiles]:
    """The files of all sources, each open for the life of the run. ConfigError as of TokenFiles, or if the system does
    not let a process have so many files open."""
    files = sum(len(source.files) for source in sources)
    wanted = 2 * files + _OTHER_FILES  # a large index is open a second time, by its map
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        if hard != resource.RLIM_INFINITY and hard < wanted:
            raise ConfigError(
                f"the token files of the run are {files:,}, which take {wanted:,} open files, and a process may have "
                f"{hard:,} here (ulimit -Hn): raise that, or prepare the text into fewer files"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return [TokenFiles(source, seq_length) for source in sources]
