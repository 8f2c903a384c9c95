"""`sagetrain doctor` on one process, on two that meet, and with problems that it should find."""

import json
import os
import re
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from distributed import run_distributed
from forked import PATIENCE, Command
from runs import ROOT, free_port, write_config
from sagetrain import doctor, stress
from sagetrain.auto import attention_choice, linear_choice
from sagetrain.config.schema import ModelConfig, ParallelConfig
from sagetrain.costs.hardware import H200
from sagetrain.doctor import Check, clocks, disagreements, disk, host_limits, show

SMALL = ModelConfig(num_layers=1, hidden_size=64, ffn_hidden_size=64, num_attention_heads=2)


def checks_of(words: list[str], tmp_path: Path) -> list[dict]:
    log, errors = tmp_path / "out", tmp_path / "err"
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    assert Command(words, env, log, ROOT, errors).wait(PATIENCE) == 0, errors.read_text()
    text = log.read_text()
    return json.loads(text[text.index("[\n") :])


def test_two_ranks_report_to_one_table(tmp_path: Path, corpus: Path) -> None:
    config = write_config(tmp_path / "run.yaml", corpus, tmp_path / "new" / "run")
    words = ["ranks", "2", str(free_port()), "doctor", str(config), "--disk-mib", "1", "--json"]
    found = checks_of(words, tmp_path)
    whats = [check["what"] for check in found]
    assert whats.count("GPU") == whats.count("attention") == 2, "each rank for itself"
    assert whats.count("disk") == 1, "once a host"
    assert [check for check in found if check["verdict"] == "bad"] == []
    (links,) = [check for check in found if check["what"] == "links"]
    assert "4 MiB over 2 ranks" in links["found"] and float(links["found"].split()[-4]) > 0
    (clock,) = [check for check in found if check["what"] == "clocks"]
    assert clock["verdict"] == "ok"
    (attention, _) = [check for check in found if check["what"] == "attention"]
    assert {"sage fine", "sage scores", "sage paper", "sdpa"} <= {*attention["found"].partition(": ")[2].split(", ")}
    assert not (tmp_path / "new").exists(), "nothing is made"


def test_an_attention_function_that_is_wrong_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    right = attention_choice._plain

    def wrong(function):
        return lambda *problem: right(function)(*problem) * (1.5 if function.name == "sdpa" else 1)

    monkeypatch.setattr(attention_choice, "_plain", wrong)
    (good, bad) = doctor._attention(torch.device("cpu"), doctor.EXAMPLE, ParallelConfig(), "here")
    assert good.verdict == "ok" and "sdpa" not in good.found
    assert bad.verdict == "bad" and bad.found.startswith("sdpa: ")


def test_attention_is_tried_with_the_heads_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    tried, plain = set(), attention_choice._plain

    def watched(function):
        def call(q, k, v, cu_seqlens):
            tried.add((q.shape[2], k.shape[2]))
            return plain(function)(q, k, v, cu_seqlens)

        return call

    monkeypatch.setattr(attention_choice, "_plain", watched)
    split = ParallelConfig(tensor_parallel_size=2, context_parallel_size=4)
    (good,) = doctor._attention(torch.device("cpu"), doctor.EXAMPLE, split, "here")
    assert good.verdict == "ok" and tried == {(2, 1)}, "of 16 and 4, which have copies"
    (bad,) = doctor._attention(torch.device("cpu"), doctor.EXAMPLE, ParallelConfig(tensor_parallel_size=8), "here")
    assert (bad.verdict, bad.found) == ("bad", "16 and 4 heads do not divide among 8 ranks")


def test_matmuls_in_8_bits_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    fp8, int8 = doctor._linear(torch.device("cpu"), SMALL, 1, "here")
    assert fp8.verdict == "ok" and fp8.found.startswith("agree with float32")
    assert int8.verdict == "ok" and int8.found.startswith("agree with float32")
    monkeypatch.setitem(linear_choice.LIMITS, "fp8", 1e-6)
    bad, good = doctor._linear(torch.device("cpu"), SMALL, 1, "here")
    assert bad.verdict == "bad" and "qkv in fp8: the output is wrong by 0.0" in bad.found
    assert good.verdict == "ok"


def examined(folder: str) -> None:
    assert doctor.examine(SMALL, ParallelConfig(), Path(folder), None, 1)
    assert not dist.is_initialized(), "torch warns of what is left"
    with warnings.catch_warnings(record=True) as said:
        warnings.warn("Attempting to run cuBLAS, but there was no current CUDA context! Attempting to", stacklevel=1)
        warnings.warn("another one", stacklevel=1)
    assert [str(warning.message) for warning in said] == ["another one"]
    # The group belongs to the caller and must stay.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def test_nothing_is_left_to_warn_of(tmp_path: Path) -> None:
    run_distributed(examined, 1, str(tmp_path))


def test_the_expected_link_follows_the_ranks_of_a_host() -> None:
    """Two hosts that give one GPU each are joined by the network, however many GPUs they have."""
    inside, across = doctor.expected("NVIDIA H200", 2, local=2), doctor.expected("NVIDIA H200", 2, local=1)
    assert inside == H200.nvlink_bandwidth and across == H200.network_bandwidth * H200.network_efficiency
    assert doctor.expected("Radeon", 2, local=2) is None


def test_hosts_with_other_versions_are_bad() -> None:
    checks = [
        Check("versions", host, "ok", found) for host, found in (("a", "torch 1"), ("b", "torch 2"), ("c", "torch 1"))
    ]
    (bad,) = disagreements(checks)
    assert (bad.where, bad.verdict) == ("b", "bad") and "constraints.txt" in bad.fix


@pytest.mark.parametrize(("lacking", "wanted"), [
    ([], ""), (["lm_eval"], "lm-eval"), (["lm_eval", "wandb"], "lm-eval,wandb"),
    (["fla", "gcsfs", "lm_eval", "s3fs", "transformers", "wandb"], "all"),
])  # fmt: skip
def test_extras_that_lack_are_listed_with_what_asks_for_them(monkeypatch, lacking: list[str], wanted: str) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda module: None if module in lacking else module)
    check = doctor.extras("here")
    for name, (module, what) in doctor.EXTRAS.items():
        assert (f"{name} not installed (for {what})" in check.found) == (module in lacking)
    assert check.verdict == "ok" and check.fix == (f"pip install 'sagetrain[{wanted}]'" if wanted else "")


def test_clocks_that_differ() -> None:
    assert clocks({}) == []
    assert clocks({1: 0.01, 2: -0.02})[0].verdict == "ok"
    (check,) = clocks({1: 0.01, 2: -75.0})
    assert (
        check.verdict == "look"
        and "rank 2 is furthest from rank 0's: 75.000 s behind" in check.found
        and "NTP" in check.fix
    )


def test_a_folder_that_cannot_be_written_is_bad(tmp_path: Path) -> None:
    (check,) = disk(Path("/proc/run"), 1, "here")
    assert check.verdict == "bad" and "training.run_dir" in check.fix
    speed, locks = disk(tmp_path / "not" / "there", 1, "here")
    assert "GB/s" in speed.found and locks.verdict == "ok" and list(tmp_path.iterdir()) == []


def test_8_bits_are_tried_on_a_layer_that_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run keeps layers with odd sides in 16 bits. If all layers are such, doctor says so."""
    tried: list[str] = []
    # These sides are multiples of 16 on one rank, and on two they are not.
    even = {"head_dim": 8, "ffn_hidden_size": 48}
    right = linear_choice.time_layers
    monkeypatch.setattr(linear_choice, "time_layers", lambda x, *etc, **how: tried.extend(x) or right(x, *etc, **how))
    for change, ranks, verdict, says in (
        # The sides of qkv and of attention's output are no multiples of 16.
        ({"head_dim": 20}, 1, "ok", "agree with float32"),
        ({"hidden_size": 24}, 1, "look", "no: all have sides that are no multiples of 16 (qkv 24, "),
        (even, 1, "ok", "agree with float32"),
        (even, 2, "look", "no: all have sides that are no multiples of 16 (qkv 8, out 8, gate_up 24, down 24)"),
    ):
        for check in doctor._linear(torch.device("cpu"), SMALL.model_copy(update=change), ranks, "here"):
            assert check.verdict == verdict and says in check.found
    assert tried == ["gate_up"] * 2 + ["qkv"] * 2


def test_the_command_tries_what_a_rank_of_the_configuration_has(monkeypatch: pytest.MonkeyPatch) -> None:
    from sagetrain.cli import main as cli

    asked: list[object] = []
    monkeypatch.setattr(doctor, "examine", lambda *how: asked.extend(how[:2]) or [])
    for overrides, model, ranks in (
        ([], None, 1),
        ([str(ROOT / "configs/1b.yaml"), "parallel.tensor_parallel_size=2"], 2048, 2),
    ):
        CliRunner().invoke(cli.app, ["doctor", *overrides], catch_exceptions=False)
        assert (asked[0] and asked[0].hidden_size, asked[1].tensor_parallel_size) == (model, ranks)
        asked.clear()


def test_limits_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hard limit of open files counts for the ranks of this host, because a run raises the soft limit."""
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda _: (1024, 4096))
    enough, short = (host_limits("here", ranks)[1] for ranks in (1_000, 2_000))
    assert enough.verdict == "ok" and "enough for 1,194 ranks" in enough.found
    assert short.verdict == "bad" and "rank 0 of 2,000 ranks needs 6,512" in short.found and "limits.conf" in short.fix


def test_a_name_server_that_does_not_answer_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store where ranks meet asks for the name of each rank that connects."""
    answered = doctor._names("localhost")
    monkeypatch.setattr(doctor.socket, "getnameinfo", lambda *_: time.sleep(0.6))
    silent = doctor._names("localhost")
    assert (answered.what, silent.verdict) == ("names", "look")
    assert re.search(r"is found in [\d.,]+ s", silent.found)


def test_equal_findings_share_a_line(capsys: pytest.CaptureFixture) -> None:
    checks = [Check("GPU", f"a, rank {rank}", "ok", "H200") for rank in range(8)]
    show([*checks, Check("disk", "a", "bad", "no room, " * 20, "make some")])
    out = capsys.readouterr().out
    assert out.count("H200") == 1 and "a, rank 0 and 7 more" in out and "fix: make some" in out
    assert max(map(len, out.splitlines())) <= 100, "a log is read without scrolling"


def test_the_command_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from sagetrain.cli import main as cli

    found = [Check("run_dir", "here", "bad", "no room", "make some")]
    monkeypatch.setattr(doctor, "examine", lambda *_: found)
    result = CliRunner().invoke(cli.app, ["doctor"])
    assert result.exit_code == 2 and "no room" in result.output and "make some" in result.output


def flips_a_bit(function, call: int, of=lambda result, args: result):
    """Return the function, with the highest bit of one value of what a call made, or changed, in the other state."""
    calls = []

    def wrapped(*args):
        result = function(*args)
        calls.append(1)
        if len(calls) == call:
            changed = of(result, args).view(-1)[77:78].view(torch.uint8)
            changed[-1] ^= 128
        return result

    return wrapped


@pytest.mark.parametrize("planted", ["nothing", "product", "copy", "error"])
def test_a_stress_test_finds_one_wrong_bit(monkeypatch: pytest.MonkeyPatch, planted: str) -> None:
    from sagetrain.cli import main as cli

    if planted == "product":
        monkeypatch.setattr(torch, "_int_mm", flips_a_bit(torch._int_mm, 5))
    if planted == "copy":
        monkeypatch.setattr(stress, "_copy", flips_a_bit(stress._copy, 3, lambda _, args: args[1]))
    if planted == "error":
        monkeypatch.setattr(stress, "digest", lambda values: 1 // 0)
    result = CliRunner().invoke(cli.app, ["doctor", "--stress", "0.1", "--json"])
    (check,) = json.loads(result.output)
    words = {
        "nothing": ("look", "no wrong bit"),
        "product": ("bad", "wrong bits: 1 of INT8 products;"),
        "copy": ("bad", " of rounds of copies;"),
        "error": ("bad", "ZeroDivisionError: "),
    }
    verdict, said = words[planted]
    assert check["verdict"] == verdict and said in check["found"]
    assert result.exit_code == (2 if verdict == "bad" else 0)
    assert ("dcgmi diag" in check["fix"]) == (verdict == "bad")


def test_a_slow_gpu_and_one_that_gives_no_answer_are_said() -> None:
    cpu = torch.device("cpu")
    slow, silent = (stress.Stressed(cpu, 8, 8e9, 1.0, error=error) for error in ("", "no answer in time"))
    assert stress._check(slow, 1e10).verdict == "look"
    assert stress._check(slow, 1e10).found.endswith("no wrong bit: 0.80 times the host's median")
    assert stress._check(silent, 8e9).verdict == "bad" and "no answer" in stress._check(silent, 8e9).found


def test_a_stress_test_takes_no_configuration_and_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    from sagetrain.cli import main as cli

    words = ["doctor", "--stress", "1"]
    several = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    for extra, env in ((["configs/1b.yaml"], {}), ([], several)):
        result = CliRunner().invoke(cli.app, [*words, *extra], env=env)
        assert result.exit_code == 2 and "once on each host" in result.output
