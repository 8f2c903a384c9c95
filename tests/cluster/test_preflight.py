"""The start-up table, and the facts in which hosts must agree. tests/cluster/test_hosts.py sees both at work."""

import copy
import os
import re
import socket
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import DistStoreError, TCPStore

import tiny
from distributed import run_distributed
from sagetrain.cluster import preflight
from sagetrain.cluster.interfaces import use_interface
from sagetrain.config.errors import ConfigError
from sagetrain.parallel.topology import Topology


def rows(hosts: int = 2, per_host: int = 2) -> list[preflight.Row]:
    """Return the rows of ranks that agree, tensor parallel inside a host. Each host is a pipeline stage."""
    return [
        {
            "host": f"node{rank // per_host}",
            "problem": "",
            "rank": rank,
            "pp": rank // per_host,
            "dp": 0,
            "cp": 0,
            "tp": rank % per_host,
            "device": "NVIDIA H200",
            "gpus": per_host,
            "versions": {"sagetrain": "1 (sources ab)", "torch": "2.9.0"},
            "configuration": {"training.seed": 0, "model.vocab_size": None},
            "files": {"tokenizer": "0123"},
            "devices": {"device": "cuda", "compute capability": "9.0"},
            "environment": {"NCCL_DEBUG": "WARN"},
        }
        for rank in range(hosts * per_host)
    ]


def test_a_line_a_host_and_one_for_all() -> None:
    mixed = rows()
    mixed[3]["device"] = "NVIDIA H100"
    for row in mixed:
        row["files"] = {"tokenizer": "0123"} | {f"data.train.{n} (samples)": 12 * "a" for n in range(8)}
    *head, versions, hashes, more, _, end = preflight.table(mixed)
    assert [line.split("  ")[0] for line in head] == ["host", "node0", "node1"]
    cells = [re.split("  +", line) for line in head]
    assert cells[0][2:6] == ["pipeline parallel", "data parallel", "context parallel", "tensor parallel"]
    assert cells[1] == ["node0", "0..1", "0", "0", "0", "0..1", "2 x NVIDIA H200"]
    assert cells[2] == ["node1", "2..3", "1", "0", "0", "0..1", "1 x NVIDIA H200, 1 x NVIDIA H100"]
    assert versions == "versions: sagetrain 1 (sources ab), torch 2.9.0"
    assert hashes.startswith("hashes: configuration ") and max(map(len, (hashes, more, end))) <= 100
    assert preflight.disagreements(mixed) == [] == preflight.differing_environment(mixed)


def test_both_sides_are_named_and_every_kind_has_its_fix() -> None:
    differing = rows()
    for row in differing[2:]:
        row["versions"]["torch"] = "2.8.0"
        row["configuration"] = {"training.seed": 5, "model.vocab_size": 512}
        row["files"] = {**row["files"], "data.valid": "45"}
    text = "\n".join(preflight.disagreements(differing))
    assert "torch: 2.9.0 on node0 (ranks 0..1); 2.8.0 on node1 (ranks 2..3)\n  fix: install" in text
    assert "training.seed: 0 on node0 (ranks 0..1); 5 on node1 (ranks 2..3)" in text
    assert "model.vocab_size: null on node0 (ranks 0..1); 512 on node1" in text
    assert "data.valid: unset on node0 (ranks 0..1); 45 on node1 (ranks 2..3)\n  fix: copy" in text
    assert "sagetrain" not in text
    assert "tokenizer:" not in text


BF16 = {"linear": {"precision": "bf16"}}


@pytest.mark.parametrize(("sections", "told"), [
    ({"attention": {"backend": "sage"}, **BF16}, "8.0"),  # Sage's recipe is auto by default.
    ({"attention": {"backend": "sage", "recipe": "fine"}, **BF16}, None),
    ({"attention": {"backend": "sdpa"}, **BF16}, None),
    ({"attention": {"backend": "auto"}, **BF16}, "8.0"),
    ({"attention": {"backend": "sdpa"}, "linear": {"precision": "auto"}}, "8.0"),
])  # fmt: skip
def test_where_auto_decides_ranks_have_gpus_of_one_kind(sections: dict, told: str | None, monkeypatch) -> None:
    """A rank of another kind of GPU might have no choice to make, and the others would wait for it."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    config = tiny.config(1, **sections)
    mixed = [
        {**row, "devices": preflight._told_apart(config.attention, config.linear.precision, torch.device("cuda", 0))}
        for row in rows()
    ]
    assert mixed[3]["devices"].get("compute capability") == told
    assert preflight.disagreements(mixed) == []
    if told:
        mixed[0]["devices"]["compute capability"] = "9.0"
        named, fix = preflight.disagreements(mixed)
        assert named == "compute capability: 9.0 on node0 (rank 0); 8.0 on node0 (rank 1), node1 (ranks 2..3)"
        assert "linear.precision" in fix
    mixed[0]["devices"] = preflight._told_apart(config.attention, config.linear.precision, torch.device("cpu"))
    assert "device: cpu on node0 (rank 0); cuda on" in preflight.disagreements(mixed)[0]


def test_auto_wants_flash_attn_on_all_hosts_or_on_none(monkeypatch) -> None:
    """The first rank chooses from the packages that it finds. A rank without the package would end in a traceback."""
    topology, gpu = Topology(1, 1), torch.device("cuda", 0)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")

    def brought(backend: str, found: tuple | None, device: torch.device = gpu) -> dict[str, str]:
        monkeypatch.setattr("sagetrain.model.backends.find_flash", lambda device: found)
        return preflight._row(tiny.config(1, attention={"backend": backend}), topology, device, {})["versions"]

    with_it, without = brought("auto", ("4", None)), brought("auto", None)
    assert (with_it["flash-attn"], without["flash-attn"]) == ("4", "none")
    assert brought("sage", ("4", None)) == brought("auto", ("4", None), torch.device("cpu")) == preflight.versions()
    one, other = rows(1)
    named, fix = preflight.disagreements([{**one, "versions": with_it}, {**other, "versions": without}])
    assert named == "flash-attn: 4 on node0 (rank 0); none on node0 (rank 1)" and "same versions" in fix


def test_files_are_told_by_the_first_rank_of_each_host() -> None:
    agreeing = rows()
    for row in (agreeing[1], agreeing[3]):
        row["files"] = {}
    assert preflight.disagreements(agreeing) == []
    agreeing[2]["files"] = {"tokenizer": "45"}
    assert preflight.disagreements(agreeing)[0] == "tokenizer: 0123 on node0 (rank 0); 45 on node1 (rank 2)"


def check_in_on_two_hosts(damaged: list[int | None], local_ranks: list[int]) -> list[tuple[dict | str, list[int], int]]:
    """Check in for one run after the other, each with the rank whose file is damaged. Return, for each run, the result
    of check_in on this rank, or its error, the ranks that were asked to read, and how often this rank warned that there
    is no GPU."""
    os.environ["LOCAL_RANK"] = str(local_ranks[dist.get_rank()])
    return [check_in(each) for each in damaged]


def check_in(damaged: int | None) -> tuple[dict | str, list[int], int]:
    rank, asked, heard = dist.get_rank(), [], []

    def read(say) -> dict[str, str]:
        asked.append(rank)
        say("half way")
        if rank == damaged:
            raise ConfigError("token file x: damaged")
        return {"data.train": "abcdef"}

    try:
        cfg, topology = tiny.config(1, "bf16"), Topology(2, 1, 1)
        found = preflight.check_in(cfg, topology, torch.device("cpu"), read, heard.append)
        return found, asked, sum("no GPU is seen: the run trains on the CPU" in line for line in heard)
    except ConfigError as error:
        return str(error), asked, 0


def test_every_host_checks_its_own_files_and_all_hear_of_damage() -> None:
    agreed = {"data.train": "abcdef"}
    (one, (first, *_)), (two, (second, *_)) = run_distributed(check_in_on_two_hosts, 2, [None, 1], [0, 0])
    assert (one, two) == ((agreed, [0], 1), (agreed, [1], 0)) and first == second
    assert re.search(r"some hosts cannot take part .*\n  on .* \(rank 1\): token file x: damaged", first)
    assert run_distributed(check_in_on_two_hosts, 2, [None], [0, 1]) == [[(agreed, [0], 1)], [(agreed, [], 0)]]


def test_ranks_wait_for_the_checker_of_files_while_it_reports() -> None:
    """The checker gives a sign of life within the patience six times, and then the verdict."""
    store, left = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), iter(range(6))
    patience = timedelta(milliseconds=10)

    def wait(keys: list[str], length: timedelta) -> None:
        store.add("preflight/alive", 1)
        if (given := next(left, None)) is None:
            store.set("verdict", "fine")
        # The store may take longer than the patience to find the verdict.
        store.wait(keys, length if given is None else patience)

    reporting = SimpleNamespace(add=store.add, get=store.get, wait=wait)
    assert preflight._when_there(reporting, "verdict") == b"fine"
    assert store.add("preflight/alive", 0) == 7
    with pytest.raises(DistStoreError):
        preflight._when_there(store, "never", patience)


def test_a_host_that_cannot_take_part_is_named() -> None:
    failing = rows()
    assert preflight._verdict(failing) == ""
    failing[2]["problem"] = failing[3]["problem"] = "no such file: x.bin"
    first, second = preflight._verdict(failing).split("\n  ")
    assert first == "some hosts cannot take part in this run; nothing was started or written"
    assert second == "on node1 (ranks 2..3): no such file: x.bin"
    assert preflight._verdict(failing[2:]) == "no such file: x.bin"


def test_many_hosts_stay_readable() -> None:
    differing = rows(hosts=100)
    differing[7] = copy.deepcopy(differing[7])
    differing[7]["versions"]["torch"] = "2.8.0"
    line, _ = preflight.disagreements(differing)
    assert line == (
        "torch: 2.9.0 on node0 (ranks 0..1), node1 (ranks 2..3), node2 (ranks 4..5) and 97 more; "
        "2.8.0 on node3 (rank 7)"
    )


def test_a_variable_that_reached_one_host_only_is_a_warning() -> None:
    differing = rows()
    for row in differing[2:]:
        row["environment"] = {}
    (line,) = preflight.differing_environment(differing)
    assert "NCCL_DEBUG differs between hosts: WARN on node0 (ranks 0..1); unset on node1 (ranks 2..3)." in line


def test_an_interface_is_set_for_both_libraries_or_refused(monkeypatch) -> None:
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "lo,lo")
    use_interface(None)
    assert os.environ["NCCL_SOCKET_IFNAME"] == "lo,lo"
    use_interface("lo")
    assert os.environ["NCCL_SOCKET_IFNAME"] == "=lo"
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    with pytest.raises(ConfigError, match=f"ib7: {socket.gethostname()} has no such interface, it has .*lo"):
        use_interface("ib7")


@pytest.mark.parametrize(("gloo", "nccl", "gpu", "lacks"), [
    ("ib7", "", False, "GLOO_SOCKET_IFNAME=ib7"), ("lo,ib7", "", True, "GLOO_SOCKET_IFNAME=lo,ib7"),
    ("", "ib7", False, None), ("", "ib7,eth99", True, "NCCL_SOCKET_IFNAME=ib7,eth99"),
    ("", "=l", True, "NCCL_SOCKET_IFNAME==l"), ("lo", "l:7000,ib7", True, None), ("", "^docker,lo", True, None),
    ("", "=ib7,lo", True, None),
])  # fmt: skip
def test_interfaces_that_another_host_had_are_named(monkeypatch, gloo, nccl, gpu, lacks) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", gloo)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", nccl)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    if lacks is None:
        use_interface(None)
        return
    with pytest.raises(ConfigError, match=f"^{re.escape(lacks)} in the environment: .* it has .*lo.*unset"):
        use_interface(None)


def test_gpus_without_a_rank_are_named() -> None:
    assert preflight.idle_gpus(rows()) == []
    alone = rows(hosts=1, per_host=1)
    alone[0]["gpus"] = 8
    (line,) = preflight.idle_gpus(alone)
    assert line.startswith("warning: node0 has 8 GPUs, of which this run uses 1: ")
    assert "torchrun --nproc-per-node 8 -m sagetrain train" in line


def test_a_rank_without_a_gpu_says_so_before_it_waits(monkeypatch) -> None:
    """A host has more ranks than GPUs, or Slurm gives each task one GPU, which the task sees as GPU 0."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ConfigError, match=r"rank 2 of this host has no GPU: .* sees 2"):
        preflight.init_distributed(1)


@pytest.mark.parametrize(("tasks", "hosts", "gpus", "world_size", "said"), [
    (None, None, None, 1, None),
    ("16", "2", "8", 16, None),
    ("2", "2", "8", 16, None),  # One torchrun runs on each host.
    ("16", "2", None, 16, None),
    ("16", "2", "8", 8, "8 ranks, Slurm's allocation has 2 hosts with 8 GPUs each. If"),
    ("2", "2", "8", 1, "1 rank, Slurm's allocation has 2 tasks, 2 hosts with 8 GPUs each. If"),
])  # fmt: skip
def test_the_allocation_of_slurm_is_compared(monkeypatch, tasks, hosts, gpus, world_size, said) -> None:
    names = ("SLURM_NTASKS", "SLURM_JOB_NUM_NODES", "SLURM_GPUS_ON_NODE")
    for name, value in zip(names, (tasks, hosts, gpus), strict=True):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    lines = preflight.differing_allocation(world_size)
    assert len(lines) == (said is not None)
    assert said is None or said in lines[0]
