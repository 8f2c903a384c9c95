"""Generated text: batches, seeds, the end of a text, several ranks, and the printed output."""

import io
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import saved_runs
from distributed import run_distributed
from forked import PATIENCE, Command
from prepare_inputs import published_tokenizer
from runs import free_port, sagetrain
from sagetrain import load_run as open_run
from sagetrain.__main__ import main
from sagetrain.checkpoint.state import Texts
from sagetrain.config import ConfigError
from sagetrain.data.tokenizer import Tokenizer
from sagetrain.inference.generate import Completion, Sampling, choose, generate
from sagetrain.inference.load import TrainedRun, load_run
from sagetrain.inference.prompts import read_prompts
from sagetrain.inference.ranks import Ranks
from sagetrain.parallel.topology import ParallelGroups, Topology

PROMPTS = ["a", "the quick brown fox", "", "über uns", "the quick", "b c d e f g h", "a", "fox"]
GREEDY = Sampling(max_tokens=12, temperature=0)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """The folder of two runs with random weights and a context of 16 tokens: `int8` attention, and `sdpa`."""
    root = tmp_path_factory.mktemp("generate")
    made = []
    for name, backend in (("int8", "sage"), ("sdpa", "sdpa")):
        cfg = saved_runs.config(root / name)
        cfg = cfg.model_copy(update={"attention": cfg.attention.model_copy(update={"backend": backend})})
        made.append((root / name, cfg, 1))
    saved_runs.make(made, model)
    return root


@pytest.fixture(scope="module")
def loaded(runs: Path) -> TrainedRun:
    return load_run(runs / "sdpa", print)


def finished(run: TrainedRun, prompts: list[str], sampling: Sampling, batch_size: int = 1) -> list[Completion]:
    """Return the completions in the order of the prompts. Check that the yielded pieces make up their texts."""
    texts: dict[int, str] = {}
    last: dict[int, Completion] = {}
    for done, piece in generate(run, prompts, sampling, batch_size):
        assert done.number not in last, "it had ended"
        texts[done.number] = texts.get(done.number, "") + piece
        if done.finish:
            last[done.number] = done
    assert {number: done.text for number, done in last.items()} == texts
    return [last[number] for number in range(len(prompts))]


# -- batches and seeds -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["int8", "sdpa"])
def test_a_batch_gives_the_tokens_of_each_prompt_alone(runs: Path, name: str) -> None:
    """The prompts have different lengths and go past the full context of 16 tokens. Later prompts start when others
    have ended."""
    run = load_run(runs / name, print)
    alone = [finished(run, [prompt], GREEDY)[0] for prompt in PROMPTS]
    assert {done.finish for done in alone} == {"max_tokens"}
    assert max(done.prompt_tokens for done in alone) + 12 > 16
    for batch_size in (3, 8):
        together = finished(run, PROMPTS, GREEDY, batch_size)
        assert [done.tokens for done in together] == [done.tokens for done in alone]
        assert [done.text for done in together] == [done.text for done in alone]


def test_a_seed_gives_the_same_text_whatever_the_batch(loaded: TrainedRun) -> None:
    how = Sampling(max_tokens=6, temperature=1.0, top_p=0.9, seed=5)
    first = {done.prompt: done.text for done in finished(loaded, PROMPTS[:6], how)}
    again = {done.prompt: done.text for done in finished(loaded, PROMPTS[5::-1], how, batch_size=4)}
    assert first == again
    other = {done.prompt: done.text for done in finished(loaded, PROMPTS[:6], Sampling(max_tokens=6, seed=6))}
    assert all(first[prompt] != other[prompt] for prompt in first)
    same = finished(loaded, ["fox", "fox"], how)
    assert same[0].tokens != same[1].tokens


def test_the_likeliest_text_is_that_of_the_whole_context(loaded: TrainedRun) -> None:
    """Cached keys and values change nothing. A full context (16 tokens here) goes on with its later half."""
    (done,) = finished(loaded, ["the quick"], Sampling(max_tokens=40, temperature=0))
    tokens = [*loaded.tokenizer.encode("the quick"), *done.tokens]
    first = 0
    for end in range(done.prompt_tokens, len(tokens)):
        if end - first > 16:
            first = end - 9
        with torch.no_grad():
            logits = loaded.model(torch.tensor([tokens[first:end]]))[0, -1, : loaded.vocab_size]
        assert logits.max() - logits[tokens[end]] < 1e-5


# -- sampling ----------------------------------------------------------------------------------------------------

SHARES = torch.tensor([0.05, 0.5, 0.15, 0.3])


@pytest.mark.parametrize(("how", "expected"), [
    ({"top_k": 0}, [0.05, 0.5, 0.15, 0.3]),
    ({"top_k": 2}, [0, 0.625, 0, 0.375]),
    ({"top_k": 50, "top_p": 0.6}, [0, 0.625, 0, 0.375]),
    ({"top_k": 0, "top_p": 0.9}, [0, 0.5 / 0.95, 0.15 / 0.95, 0.3 / 0.95]),
    ({"top_k": 3, "top_p": 0.52}, [0, 1, 0, 0]),  # The largest probability among the three is 0.526.
    ({"top_k": 0, "top_p": 0.52}, [0, 0.625, 0, 0.375]),
    ({"top_k": 0, "top_p": 1e-6}, [0, 1, 0, 0]),
    ({"top_k": 0, "temperature": 0.5}, [0.0025 / 0.365, 0.25 / 0.365, 0.0225 / 0.365, 0.09 / 0.365]),
    ({"temperature": 0}, [0, 1, 0, 0]),
])  # fmt: skip
def test_tokens_are_drawn_by_their_probability(how: dict, expected: list[float]) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = SHARES.log().expand(20_000, -1)
    drawn = torch.tensor(choose(rows, Sampling(**{"temperature": 1.0, **how}), [generator] * len(rows)))
    found = drawn.bincount(minlength=4) / len(rows)
    assert (found - torch.tensor(expected)).abs().max() < 0.012  # The limit is three standard deviations.
    assert ((found == 0) == (torch.tensor(expected) == 0)).all()


@pytest.mark.parametrize(("how", "said"), [
    ({"temperature": 1e-40}, "--temperature 1e-40: neither 0 nor at least 1e-6"),
    ({"temperature": float("nan")}, "--temperature nan"),
    ({"top_p": 0.0}, "--top-p 0.0: not above 0 and at most 1"),
    ({"top_p": 1.5}, "--top-p 1.5"), ({"top_p": float("nan")}, "--top-p nan"),
    ({"stop": ("x", "")}, "--stop '': every text ends before an empty one"),
])  # fmt: skip
def test_options_out_of_range_are_refused(how: dict, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Sampling(**how)
    assert said in str(refused.value)


def test_no_token_is_sampled_that_the_tokenizer_lacks(loaded: TrainedRun, monkeypatch) -> None:
    """model.vocab_size may be larger than the tokenizer's vocabulary."""
    monkeypatch.setattr(loaded.tokenizer, "vocab_size", 3 + 256)  # The vocabulary has only bytes now.
    for how in ((5.0, 0), (5.0, 500), (0.0, 0)):
        for done in finished(loaded, ["\n", "a"], Sampling(20, *how), 2):
            assert done.tokens and max(done.tokens) < 259


# -- where a text ends, and what of it is shown when ---------------------------------------------------------------


def scripted(tokenizer: Tokenizer, tokens: list[int]) -> TrainedRun:
    """Return a run whose model emits these tokens, one after the other."""
    script = iter(tokens)

    class Scripted:
        blocks = ()
        groups = ParallelGroups.single()

        def parameters(self) -> Iterator[torch.Tensor]:
            return iter([torch.empty(0)])

        def __call__(self, context: torch.Tensor, positions: torch.Tensor, last: bool) -> torch.Tensor:
            logits = torch.zeros(1, 1, 512)
            logits[0, 0, next(script)] = 1.0
            return logits

    cfg = saved_runs.config(Path("none"))
    return TrainedRun(cfg, Scripted(), tokenizer, 512, 1, 1, torch.device("cpu"), Texts([], [], 0))


def test_a_text_ends_with_any_end_token(tokenizer: Tokenizer) -> None:
    """The folder that a model was imported from names end tokens. An answer also ends with the token that the chat
    template puts after it."""
    said = [*spelled("ab"), tokenizer.bos_id, *spelled("c")]
    marked = "{% for m in messages %}{{ m.content }}{{ bos_token if m.role == 'assistant' }}\n{% endfor %}"
    for ends, template in (([7, tokenizer.bos_id], None), ([], marked)):
        run = replace(scripted(tokenizer, said), texts=Texts([], ends, 0))
        *_, (done, _) = generate(run, ["a"], Sampling(len(said), 0), template=template)
        assert (done.text, done.tokens, done.finish) == ("ab", said[:2], "eos")
    for template in (None, marked.replace("assistant", "user")):
        *_, (done, _) = generate(scripted(tokenizer, said), ["a"], Sampling(len(said), 0), template=template)
        assert (done.text, done.finish) == ("abc", "max_tokens")


def pieces_of(tokenizer: Tokenizer, tokens: list[int], stop: tuple[str, ...] = ()) -> tuple[list[str], str]:
    how = Sampling(max_tokens=len(tokens), temperature=0, stop=stop)
    grown = [(piece, done.finish) for done, piece in generate(scripted(tokenizer, tokens), ["a"], how)]
    return [piece for piece, _ in grown], grown[-1][1]


def spelled(text: str) -> list[int]:
    """Return a text in byte tokens."""
    return [3 + byte for byte in text.encode()]


def test_a_character_is_shown_when_it_is_whole(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(spelled("é")) == "é"
    assert pieces_of(tokenizer, spelled("é€.")) == (["", "é", "", "", "€", "."], "max_tokens")
    # An incomplete character is shown at the last token.
    assert pieces_of(tokenizer, spelled("x€")[:3]) == (["x", "", "��"], "max_tokens")
    pieces, finish = pieces_of(tokenizer, [*spelled("ab"), tokenizer.eos_id, *spelled("c")])
    assert ("".join(pieces), finish) == ("ab", "eos")


@pytest.mark.parametrize(("text", "stop", "pieces", "finish"), [
    ("one END two", ("END",), "one ", "stop"),
    ("one EEND two", ("END",), "one E", "stop"),  # The first E does not begin the stop string.
    ("one EN", ("END",), "one EN", "max_tokens"),
    ("ab\n\nc", ("\n\n", "c"), "ab", "stop"),
    ("abcd", ("cd", "bc"), "a", "stop"),  # The stop string that comes first in the text counts.
    ("é€", ("€",), "é", "stop"),
    ("END", ("END",), "", "stop"),
    ("aaab", ("aab",), "a", "stop"),
])  # fmt: skip
def test_a_text_ends_before_a_stop_string(tokenizer, text, stop, pieces, finish) -> None:
    """The stop string is split over tokens, one for each byte. No part of it is ever shown."""
    shown, why = pieces_of(tokenizer, spelled(text), stop)
    assert ("".join(shown), why) == (pieces, finish)


def test_the_space_before_the_first_word_is_kept() -> None:
    """Some tokenizers put a space before every text and leave it out when they decode."""
    tokenizer = published_tokenizer()
    assert tokenizer.decode(tokenizer.encode("get")) == "get"
    run = scripted(tokenizer, [*tokenizer.encode("get one"), tokenizer.eos_id])
    (done,) = finished(run, ["def"], Sampling(temperature=0))
    assert (done.text, done.finish) == (" get one", "eos")


def test_a_prompt_longer_than_the_context_is_refused_first(loaded: TrainedRun) -> None:
    said = r"has 20 tokens, 4 more than the context of 16 .*data\.seq_length\); shorten it"
    with pytest.raises(ConfigError, match=f"the prompt {said}"):
        next(generate(loaded, ["é" * 10], GREEDY))
    with pytest.raises(ConfigError, match=f"prompt 2 of 3 {said}"):
        next(generate(loaded, ["a", "é" * 10, "b"], GREEDY))


# -- prompts -----------------------------------------------------------------------------------------------------


def test_prompts_come_from_words_files_and_standard_input(monkeypatch, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes("über\n\nuns\r\n".encode())
    (tmp_path / "lines.jsonl").write_text('{"prompt": "a\\nb", "id": 1}\n\n{"prompt": ""}\n')
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("über\n".encode())))
    assert read_prompts() == [""]
    assert read_prompts(["as is", "-"]) == ["as is", "über\n"]
    assert read_prompts(file=tmp_path / "text.txt") == ["über\n\nuns\r\n"]
    assert read_prompts(prompt_file=tmp_path / "text.txt") == ["über", "uns"]
    assert read_prompts(prompt_file=tmp_path / "lines.jsonl") == ["a\nb", ""]
    shutil.copyfile(tmp_path / "lines.jsonl", tmp_path / "LINES.JSONL")
    assert read_prompts(prompt_file=tmp_path / "LINES.JSONL") == ["a\nb", ""]
    (tmp_path / "marked.txt").write_bytes(b"\xef\xbb\xbfa\n")  # Some editors begin a file with this mark.
    assert read_prompts(prompt_file=tmp_path / "marked.txt") == ["a"]
    (tmp_path / "marked.txt").write_bytes(b"\xef\xbb\xbf")
    with pytest.raises(
        ConfigError, match=r"--file .*marked\.txt is empty; leave it out for a text that begins with no"
    ):
        read_prompts(file=tmp_path / "marked.txt")


@pytest.mark.parametrize(("content", "said"), [
    (b"\xfcber\n", r"the text of .*p\.jsonl is not UTF-8"),
    (b"\n \n", r"--prompt-file .*p\.jsonl holds no prompt: every line is empty"),
    (b'{"prompt": "a"}\nprompt\n', r'p\.jsonl, line 2: not JSON .*a record is {"prompt": "some text"}'),
    (b'{"text": "a"}\n', r'p\.jsonl, line 1: has no text in "prompt"; a record is'),
    (b'{"prompt": 3}\n', r'p\.jsonl, line 1: has no text in "prompt"'),
    (b'["a"]\n', r'p\.jsonl, line 1: has no text in "prompt"'),
    (b'{"prompt": "\\ud800"}\n', r"p\.jsonl, line 1: its prompt is not valid Unicode"),
])  # fmt: skip
def test_prompt_files_that_are_refused(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "p.jsonl").write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        read_prompts(prompt_file=tmp_path / "p.jsonl")
    (tmp_path / "p.json").write_text('{"prompt": "a"}\n')
    with pytest.raises(ConfigError, match=r"p\.json: its first line is a record; rename it to end in \.jsonl"):
        read_prompts(prompt_file=tmp_path / "p.json")


@pytest.mark.parametrize(("name", "content", "said"), [
    ("p.json", b'[\n{"prompt": "a"}\n]\n', r"a JSON array or JSON lines, which is not read as prompts: write a \.txt"),
    ("p.csv", b"prompt\na\n", "a table, which is not read"),
    ("p.parquet", b"PAR1", "Parquet, which is not read"),
    ("p.jsonl.gz", b"\x1f\x8b", r"packed as \.gz, which is not read"),
])  # fmt: skip
def test_prompt_files_of_other_kinds(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=f"--prompt-file {tmp_path / name} is {said}"):
        read_prompts(prompt_file=tmp_path / name)


@pytest.mark.parametrize("name", ["p.jsonl", "P.NDJSON", "p.jsonl.zst"])
def test_records_are_not_the_text_of_one_prompt(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('{"prompt": "a"}\n')
    with pytest.raises(ConfigError, match=f"--file {tmp_path / name}: its JSON .*; --prompt-file {tmp_path / name}"):
        read_prompts(file=tmp_path / name)


def test_prompts_that_cannot_be_read(monkeypatch, tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes("über".encode("latin1"))
    for given, said in (
        ({"file": tmp_path / "latin.txt"}, r"the text of .*latin\.txt is not UTF-8"),
        ({"file": tmp_path / "none"}, "--file .*none cannot be read: No such file"),
        ({"prompt_file": tmp_path / "none"}, "--prompt-file .*none cannot be read: No such file"),
        ({"words": ["x"], "file": tmp_path / "latin.txt"}, "give either a prompt or --file, not both"),
        ({"words": ["x"], "prompt_file": tmp_path / "none"}, "give either a prompt or --prompt-file, not both"),
        ({"words": ["caf\udce9"]}, "the prompt 'caf.udce9' is not UTF-8"),
    ):
        with pytest.raises(ConfigError, match=said):
            read_prompts(**given)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xfc")))
    with pytest.raises(ConfigError, match="standard input is not UTF-8"):
        read_prompts(["-"])


# -- the command -------------------------------------------------------------------------------------------------


def printed(monkeypatch, capsys, *words: object, typed: str | None = None) -> str:
    """Run `sagetrain generate` in this process and return what it prints."""
    if typed is not None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed.encode())))
    assert main(["generate", *map(str, words)]) == 0
    return capsys.readouterr().out


def test_one_text_is_streamed_and_several_are_in_their_order(runs, loaded, monkeypatch, capsys, tmp_path) -> None:
    how = [runs / "sdpa", "--temperature", 0, "--max-tokens", 5]
    expected = [done.prompt + done.text for done in finished(loaded, PROMPTS, Sampling(5, temperature=0))]
    assert printed(monkeypatch, capsys, *how, PROMPTS[1]) == expected[1] + "\n"
    several = [word for prompt in PROMPTS[:3] for word in ("--prompt", prompt)]
    assert printed(monkeypatch, capsys, *how, *several) == "\n\n".join(expected[:3]) + "\n"
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    lines = printed(monkeypatch, capsys, *how, "--prompt-file", tmp_path / "p.jsonl", "--json").splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["prompt"] + record["text"] for record in records] == expected
    assert records[1] | {"text": ""} == {
        "prompt": PROMPTS[1], "text": "", "prompt_tokens": len(loaded.tokenizer.encode(PROMPTS[1])), "tokens": 5,
        "finish": "max_tokens",
    }  # fmt: skip
    typed = f"{PROMPTS[1]}\n\n{'é' * 10}\n{PROMPTS[4]}"
    assert printed(monkeypatch, capsys, *how, "-i", typed=typed) == f"{expected[1]}\n{expected[4]}\n"


def test_a_prompt_that_ends_in_a_joined_space_is_named(runs, monkeypatch, capsys) -> None:
    """In Python it is a warning, at the prompt it is a line before the text."""
    monkeypatch.setattr(Tokenizer, "ends_inside", lambda self, text: text.endswith(" "))
    said = "the prompt 'the '.*leave the white space out"
    with pytest.warns(UserWarning, match=said):
        open_run(runs / "sdpa").generate("the ", max_tokens=1)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"the \nthe\n")))
    assert main(["generate", str(runs / "sdpa"), "-i", "--max-tokens", "1"]) == 0
    assert len(re.findall(said, capsys.readouterr().err)) == 1


def test_what_the_command_refuses(runs: Path) -> None:
    for words, said in (
        (["a", "--prompt", "b"], "give either a prompt or --prompt, not both"),
        (["a", "--interactive"], "--interactive reads its prompts from standard input"),
        (["é" * 10], "the prompt has 20 tokens, 4 more than the context of 16"),
    ):
        done = sagetrain("generate", runs / "sdpa", *words)
        assert (done.returncode, done.stdout) == (2, "")
        assert f"error: {said}" in done.stderr


def test_two_ranks_generate_what_one_does(runs: Path, loaded: TrainedRun, tmp_path: Path) -> None:
    """The ranks are tensor parallel, and only rank 0 reads and prints."""
    (tmp_path / "p.txt").write_text("\n".join(PROMPTS[:2]))
    words = ["generate", str(runs / "sdpa"), "--prompt-file", "p.txt", "--json", "--max-tokens", "20"]
    words += ["--temperature", "1", "--top-p", "0.9", "--batch-size", "2"]
    command = ["ranks", "2", str(free_port()), *words]
    done = Command(command, {**os.environ, "OMP_NUM_THREADS": "1"}, tmp_path / "out", tmp_path, tmp_path / "errors")
    assert done.wait(PATIENCE) == 0, (tmp_path / "errors").read_text()
    records = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    expected = finished(loaded, PROMPTS[:2], Sampling(20, temperature=1.0, top_p=0.9))
    assert [record["text"] for record in records] == [done.text for done in expected]


def told() -> list[str]:
    """Return the text that rank 0 reads and its error, on each of two ranks."""
    ranks = Ranks.join()
    found = [ranks.tell(lambda: f"read by {ranks.groups.rank}")]
    try:
        ranks.tell(lambda: read_prompts(prompt_file=Path(f"none{ranks.groups.rank}")))
    except ConfigError as error:
        found.append(str(error))
    return found


def test_what_rank_0_reads_is_told_to_all() -> None:
    first, second = run_distributed(told, 2)
    assert first == second == ["read by 0", "--prompt-file none0 cannot be read: No such file or directory"]


def test_more_ranks_than_heads_are_refused(runs: Path) -> None:
    ranks = Ranks(ParallelGroups(Topology(3, 3), rank=0), torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"4 heads and 2 key/value heads do not divide .*_size \(3\) .* fewer ranks"):
        load_run(runs / "sdpa", print, ranks=ranks)
