"""Read the prompts that a user names: on the command line, in files, on standard input."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sagetrain.config.errors import ConfigError, refuse_pointer
from sagetrain.corpus.chunk import loads
from sagetrain.corpus.kinds import Kind, compression, kind_of


def read_prompts(words: Sequence[str] = (), file: Path | None = None, prompt_file: Path | None = None) -> list[str]:
    """Return the prompts to continue. Without any argument there is one empty prompt. Raises ConfigError if two
    arguments are given, or something cannot be read or is not UTF-8.

    Args:
        words: prompts; "-" is standard input.
        file: file whose text is one prompt.
        prompt_file: file whose lines are prompts, or, with the suffix .jsonl or .ndjson, records with a `prompt`.
    """
    named = [name for name, given in (("a prompt", words), ("--file", file), ("--prompt-file", prompt_file)) if given]
    if len(named) > 1:
        raise ConfigError(f"give either {' or '.join(named)}, not both")
    if file is not None:
        if kind_of(file) is Kind.LINES:
            raise ConfigError(
                f"--file {file}: its JSON would be the text to continue, to the last bracket; --prompt-file {file} "
                "continues the prompt of each record"
            )
        if not (text := _text_of(file, "--file")):
            raise ConfigError(f"--file {file} is empty; leave it out for a text that begins with nothing")
        return [text]
    if prompt_file is not None:
        return _lines_of(prompt_file)
    return [_word(word) for word in words or [""]]


def _word(word: str) -> str:
    try:
        if word == "-":
            return sys.stdin.buffer.read().decode()
        word.encode()
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        what = "standard input" if word == "-" else f"the prompt {word!r}"
        raise ConfigError(f"{what} is not UTF-8 ({error.reason}); convert it") from error
    return word


def _text_of(file: Path, option: str) -> str:
    refuse_pointer(file, page=False)
    try:
        return file.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{option} {file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the text of {file} is not UTF-8 ({error.reason}); convert it") from error


def _lines_of(file: Path) -> list[str]:
    kind = kind_of(file)
    as_records, what = kind is Kind.LINES, f"packed as {compression(file)}" if compression(file) else kind.value
    no_prompts = ConfigError(
        f"--prompt-file {file} is {what}, which is not read as prompts: write a .txt with a prompt in each line, or a "
        '.jsonl of records {"prompt": "some text"}'
    )
    if compression(file) or kind not in (Kind.LINES, Kind.JSON, Kind.TEXT):
        raise no_prompts
    lines = [(number, line) for number, line in enumerate(_text_of(file, "--prompt-file").split("\n"), 1)]
    prompts = [
        _prompt_in(line, f"{file}, line {number}") if as_records else line.removesuffix("\r")
        for number, line in lines
        if line.strip()
    ]
    if prompts and not as_records and _is_record(prompts[0]):
        raise ConfigError(f"--prompt-file {file}: its first line is a record; rename it to end in .jsonl")
    if not prompts:
        raise ConfigError(f"--prompt-file {file} holds no prompt: every line is empty")
    if kind is Kind.JSON:
        raise no_prompts
    return prompts


def _is_record(line: str) -> bool:
    try:
        return "prompt" in json.loads(line) if line.startswith("{") else False
    except ValueError:
        return False


def _prompt_in(line: str, where: str) -> str:
    try:
        record: Any = loads(line)
    except ValueError as error:
        raise ConfigError(f'{where}: not JSON ({error}); a record is {{"prompt": "some text"}}') from error
    prompt = record.get("prompt") if isinstance(record, dict) else None
    if not isinstance(prompt, str):
        raise ConfigError(f'{where}: has no text in "prompt"; a record is {{"prompt": "some text"}}')
    try:
        prompt.encode()
    except UnicodeError as error:
        raise ConfigError(f"{where}: its prompt is not valid Unicode: half of a surrogate pair") from error
    return prompt
