"""Two hosts on one machine: network namespaces with links of their own, host names, sshd, and real launchers.

Each host has eth0 (10.77.0.x: ssh, rendezvous) and eth1 (10.77.1.x), the network that the runs name for the traffic
between ranks. Everything lives in the namespaces and ends with them.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from forked import PATIENCE, Command, until
from held import file_of, hold, release
from prepare_inputs import prepare
from runs import BIN, ROOT, check_same, free_port, write_config
from stand_in import stand_in

STEPS, STEP_TOKENS = 6, 256
SCRIPT = str(ROOT / "launch/train.py")
TORCHRUN = ["torchrun", "--nnodes=2", "--rdzv-backend=c10d", "--rdzv-id=run", "--rdzv-endpoint=node0:29400"]
MISSING = [tool for tool in ("ip", "sshd", "ssh", "ssh-keygen", "pdsh", "unshare", "nsenter") if not shutil.which(tool)]

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)} (iproute2, openssh-server, pdsh)"),
]


class Host:
    """A network namespace with its own host name, /etc/hosts and sshd."""

    def __init__(self, number: int, folder: Path) -> None:
        self.name = f"node{number}"
        self.namespace = f"sagetrain{os.getpid()}{self.name}"
        self.folder, self.number = folder, number

    def up(self, hides: dict[Path, Path]) -> None:
        """Start sshd. In this host alone, each file that is a key of `hides` shows the content of its value."""
        binds = {Path("/etc/hosts"): self.folder / "hosts", **hides}
        mounts = "".join(f"mount --bind {shown} {hidden} && " for hidden, shown in binds.items())
        sshd = f"{shutil.which('sshd')} -D -e -f {self.folder}/sshd_config"
        command = f"hostname {self.name} && mount --make-rprivate / && {mounts} exec {sshd}"
        self.sshd = subprocess.Popen(
            ["ip", "netns", "exec", self.namespace, "unshare", "--mount", "--uts", "bash", "-c", command],
            stderr=(self.folder / f"{self.name}.sshd.log").open("w"),
        )

    def start(self, words: list[str], config: Path, **environment: str) -> Command:
        """Start training on this host. The output goes into a file beside the configuration, named after the host."""
        fixed = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
        env = {**os.environ, **fixed, **environment}
        log = config.with_suffix(f".{self.name}.log")
        return Command([*words, "--config", str(config)], env, log, config.parent, host=self.sshd.pid)

    def sent(self, interface: str) -> int:
        """Return the bytes that have left through an interface."""
        counter = f"/sys/class/net/{interface}/statistics/tx_bytes"
        return int(subprocess.check_output(["ip", "netns", "exec", self.namespace, "cat", counter]))

    def pids(self) -> list[int]:
        return [int(pid) for pid in subprocess.check_output(["ip", "netns", "pids", self.namespace]).split()]

    def environment_of_a_rank(self) -> dict[str, str]:
        """Wait for a rank to run on this host, and read its environment."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            for pid in self.pids():
                try:
                    pairs = [pair.partition("=") for pair in Path(f"/proc/{pid}/environ").read_text().split("\0")]
                except (FileNotFoundError, ProcessLookupError):  # The process has ended in the meantime.
                    continue
                environment = {name: value for name, _, value in pairs}
                if "LOCAL_RANK" in environment:
                    return environment
            time.sleep(0.1)
        raise AssertionError(f"no rank on {self.name}")

    def kill(self) -> None:
        """Kill every process of the namespace, by its number."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.sshd.wait()


class Cluster:
    """Two hosts, and the ways to start something on them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hosts = [Host(number, folder) for number in (0, 1)]

    def network(self) -> None:
        """Join two namespaces by two cables; nothing appears outside of them."""
        first, second = (host.namespace for host in self.hosts)
        for namespace in (first, second):
            _do("ip", "netns", "add", namespace)
            _do("ip", "-n", namespace, "link", "set", "lo", "up")
        for i in (0, 1):
            cable = ["type", "veth", "peer", "name", f"eth{i}", "netns", second]
            _do("ip", "-n", first, "link", "add", f"eth{i}", *cable)
            for host in self.hosts:
                _do("ip", "-n", host.namespace, "address", "add", f"10.77.{i}.{host.number + 1}/24", "dev", f"eth{i}")
                _do("ip", "-n", host.namespace, "link", "set", f"eth{i}", "up")

    def ssh_files(self) -> None:
        """Write keys and settings of sshd and ssh that only this test uses."""
        folder = self.folder
        _do("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "key"))
        shutil.copy(folder / "key.pub", folder / "authorized_keys")
        (folder / "hosts").write_text("127.0.0.1 localhost\n10.77.0.1 node0\n10.77.0.2 node1\n")
        (folder / "sshd_config").write_text(
            f"HostKey {folder}/key\nAuthorizedKeysFile {folder}/authorized_keys\nPidFile none\nStrictModes no\n"
            "PermitRootLogin yes\nUsePAM no\nPasswordAuthentication no\n"
        )
        (folder / "ssh_config").write_text(
            f"IdentityFile {folder}/key\nStrictHostKeyChecking no\nUserKnownHostsFile /dev/null\nLogLevel ERROR\n"
        )
        (folder / "hostfile").write_text("node0 slots=2\nnode1 slots=2\n")
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd refuses to start without this folder.

    def up(self, hides: dict[Path, Path] | None = None) -> None:
        """Start both hosts and wait for their sshd; `hides` holds for the second."""
        for host in self.hosts:
            host.up(hides if hides and host.number else {})
        for host in self.hosts:
            log = self.folder / f"{host.name}.sshd.log"
            until(lambda: "listening" in log.read_text(), lambda: host.sshd.poll() is None, log.read_text)  # noqa: B023

    @contextlib.contextmanager
    def running(self, hides: dict[Path, Path] | None = None) -> Iterator[None]:
        """Run a block with both hosts up. Everything that runs on them ends with the block."""
        try:
            self.up(hides)
            yield
        finally:
            for host in self.hosts:
                host.kill()

    def deepspeed(self, config: Path, *options: str) -> Command:
        """Start `deepspeed --hostfile` on the first host, which reaches both hosts through pdsh and ssh."""
        where = [f"--hostfile={self.folder}/hostfile", "--no_ssh_check", "--master_addr=node0", *options]
        ssh = {"PDSH_SSH_ARGS_APPEND": f"-F {self.folder}/ssh_config", "STAND_IN": str(stand_in(config.parent))}
        return self.hosts[0].start(["deepspeed", *where, SCRIPT], config, **ssh)

    def torchrun(self, config: Path, ranks: int) -> list[Command]:
        """Start torchrun on both hosts, for so many ranks on each. NCCL_DEBUG has another value on each host."""
        words = [*TORCHRUN, "--nproc-per-node", str(ranks), SCRIPT]
        return [host.start(words, config, NCCL_DEBUG=host.name) for host in self.hosts]

    def by_hand(self, config: Path) -> list[Command]:
        """Start a rank on each host, in the environment that srun gives."""
        world = {"MASTER_ADDR": "node0", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
        return [host.start(["sagetrain", "train"], config, RANK=str(host.number), **world) for host in self.hosts]


def run_config(folder: Path, corpus: Path, interface: str | None, tp_size: int = 2) -> Path:
    """Write the configuration of a run of six steps. The ranks that tensor parallelism leaves are data parallel."""
    return write_config(
        folder / "run.yaml",
        corpus,
        folder / "run",
        tp_size=tp_size,
        data={"valid": [], "micro_batch_size": 4},
        tokens_per_step={"stages": [{"from_tokens": 0, "tokens": STEP_TOKENS}]},
        training={"total_tokens": STEPS * STEP_TOKENS, "network_interface": interface, "timeout_minutes": 3},
    )


def log_of(config: Path) -> str:
    """Return the output of both hosts, the first host's before the second's."""
    return "".join(log.read_text() for log in sorted(config.parent.glob(f"{config.stem}.*log")))


def _do(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("cluster"))
    try:
        try:
            made.network()
        except subprocess.CalledProcessError as error:
            if "not permitted" in error.stderr or "denied" in error.stderr:
                pytest.skip(f"this machine makes no network namespaces: {error.stderr.strip()}")
            raise
        made.ssh_files()
        yield made
    finally:
        for host in made.hosts:
            subprocess.run(["ip", "netns", "delete", host.namespace], capture_output=True)


@pytest.fixture(scope="module")
def reference(tmp_path_factory, corpus) -> Path:
    """The run folder of the same four ranks on one host."""
    config = run_config(tmp_path_factory.mktemp("reference"), corpus, interface=None)
    ranks = ["ranks", "4", str(free_port()), "train", "--config", str(config)]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    assert Command(ranks, env, config.with_suffix(".log"), config.parent).wait(PATIENCE) == 0, log_of(config)
    return config.parent / "run"


def test_deepspeed_through_pdsh_is_bitwise_the_run_on_one_host(tmp_path, corpus, cluster, reference) -> None:
    config = run_config(tmp_path, corpus, interface="eth1")
    example = (ROOT / "launch/deepspeed_env.example").read_text()
    (tmp_path / ".deepspeed_env").write_text(f"{example}OMP_NUM_THREADS=1\nHELD={file_of(config)}\n")
    hold(config)
    with cluster.running():
        before = [cluster.hosts[0].sent(interface) for interface in ("eth0", "eth1")]
        process = cluster.deepspeed(config)
        environment = cluster.hosts[1].environment_of_a_rank()
        release(config)
        assert process.wait(PATIENCE) == 0, log_of(config)
        eth0, eth1 = (cluster.hosts[0].sent(f"eth{i}") - before[i] for i in (0, 1))
    check_same(tmp_path / "run", reference, STEPS)
    log = log_of(config)
    kept = (tmp_path / "run/log.txt").read_text()
    assert re.search(r"node0 +0\.\.1 +0 +0 +0 +0\.\.1 +2 x cpu", kept)
    assert re.search(r"node1 +2\.\.3 +0 +1 +0 +0\.\.1 +2 x cpu", kept)
    assert kept.count("versions: sagetrain ") == 1 and "versions: " not in log
    assert environment["NCCL_DEBUG"] == "WARN"  # The example sets this value.
    assert environment["OMP_NUM_THREADS"] == "1"
    assert "differs between hosts" not in log
    assert eth1 > 1_000_000 > 100_000 > eth0  # The gradients took the network that the configuration names.


def test_torchrun_with_a_rendezvous_equals_the_run_on_one_host(tmp_path, corpus, cluster, reference) -> None:
    config = run_config(tmp_path, corpus, interface="eth1")
    with cluster.running():
        assert [launcher.wait(PATIENCE) for launcher in cluster.torchrun(config, ranks=2)] == [0, 0], log_of(config)
    check_same(tmp_path / "run", reference, STEPS)
    assert "warning: environment variable NCCL_DEBUG differs between hosts: node0 on node" in log_of(config)


def test_hosts_that_disagree_stop_before_anything_is_written(tmp_path, corpus, cluster) -> None:
    """The second host has an older copy of the YAML file, and text prepared with another tokenizer."""
    config = run_config(tmp_path, corpus, interface="eth1", tp_size=1)
    older = tmp_path / "older.yaml"
    older.write_text(config.read_text().replace("timeout_minutes: 3", "timeout_minutes: 3\n  seed: 5"))
    other_corpus = tmp_path / "corpus"
    text = [str(Path(json.__file__).parent)]
    prepare(text, other_corpus / "train", glob="*.py", vocab_size=400, valid_fraction=0.2, say=lambda text: None)
    with cluster.running(hides={config: older, corpus: other_corpus}):
        assert [rank.wait(PATIENCE) for rank in cluster.by_hand(config)] == [2, 2], log_of(config)
    log = log_of(config)
    assert "error: the hosts of this run disagree; nothing was started or written" in log
    assert "training.seed: 0 on node0 (rank 0); 5 on node1 (rank 1)" in log
    assert "fix: start every host with the same YAML file" in log
    for name in ("tokenizer", "data.train"):
        assert re.search(rf"{name}: [0-9a-f]{{12}} on node0 \(rank 0\); [0-9a-f]{{12}} on node1 \(rank 1\)", log)
    assert "fix: copy tokenizer.model and the token files" in log
    for host in cluster.hosts:
        assert config.with_suffix(f".{host.name}.log").read_text().count("the hosts of this run disagree") == 1
    assert not (tmp_path / "run").exists()


def test_a_host_that_ssh_does_not_reach_is_missed_by_rank(tmp_path, corpus, cluster) -> None:
    config = run_config(tmp_path, corpus, interface=None, tp_size=1)
    config.write_text(config.read_text().replace("timeout_minutes: 3", "timeout_minutes: 0.1"))
    with cluster.running():
        cluster.hosts[1].sshd.kill()
        process = cluster.deepspeed(config, "--num_accelerators=1", "--force_multi")
        assert process.wait(PATIENCE), log_of(config)
    log = log_of(config)
    assert "Connection refused" in log  # These are ssh's own words, to which the message points.
    assert re.search(r"error: 1 of 2 ranks have not come to node0:\d+ within 0.2 minutes: rank 1", log)
    assert "Here are node0 (rank 0). Nothing was started or written" in log
    assert not (tmp_path / "run").exists()


def test_a_run_folder_that_hosts_do_not_share_is_an_error(tmp_path, corpus, cluster) -> None:
    """The run_dir lies on a disk of each host's own. Unless the start notices this, the first save fails."""
    config = run_config(tmp_path, corpus, interface="eth1", tp_size=1)
    config.write_text(config.read_text().replace(str(tmp_path / "run"), str(tmp_path / "disk/runs/run")))
    for disk in ("disk", "other"):
        (tmp_path / disk).mkdir()
    with cluster.running(hides={tmp_path / "disk": tmp_path / "other"}):
        assert all(launcher.wait(PATIENCE) for launcher in cluster.torchrun(config, ranks=1))
    log = log_of(config)
    assert "error: training.run_dir " in log and "the hosts of this run do not share this folder" in log
    assert re.search(r"Rank 0 on node\d made it; node\d \(rank 1\) has no such folder", log)
    assert not list(tmp_path.glob("*/runs/*"))  # No host has anything left there.


def test_a_host_without_the_data_ends_the_run_on_all_hosts(tmp_path, corpus, cluster) -> None:
    config = run_config(tmp_path, corpus, interface="eth1", tp_size=1)
    config.write_text(config.read_text().replace("timeout_minutes: 3", "timeout_minutes: 30"))
    (tmp_path / "empty").mkdir()
    with cluster.running(hides={corpus: tmp_path / "empty"}):
        assert all(launcher.wait(PATIENCE) for launcher in cluster.torchrun(config, ranks=1))
    log = log_of(config)
    assert "error: some hosts cannot take part in this run; nothing was started or written" in log
    assert re.search(rf"on node1 \(rank .\): .*{corpus}", log)
    assert not (tmp_path / "run").exists()
