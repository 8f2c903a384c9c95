"""The network interface through which NCCL and gloo connect ranks."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

import torch

from sagetrain.config.errors import ConfigError


def use_interface(name: str | None) -> None:
    """Make NCCL and gloo use one network interface between ranks. Without a name, check those that the environment
    names. Call this before process groups exist. Raises ConfigError if this host has no such interface."""
    names = [known for _, known in socket.if_nameindex()]
    if name is None:
        _check_named_interfaces(names)
        return
    if name not in names:
        raise ConfigError(
            f"training.network_interface {name}: {socket.gethostname()} has no such interface, it has "
            f"{', '.join(names)}. Name one of these (as an override on this host, if its name differs here), or null"
        )
    # Without "=" the name is a prefix: eth1 would also choose eth10.
    os.environ["NCCL_SOCKET_IFNAME"] = f"={name}"
    os.environ["GLOO_SOCKET_IFNAME"] = name


def _check_named_interfaces(names: Sequence[str]) -> None:
    """Check that this host has the network interfaces that gloo and NCCL are told to use. Raises ConfigError if not.

    gloo takes names, and each has to be there. NCCL takes the beginnings of names, or names behind "=", of which one
    has to be there. Behind "^" are names that it is not to use.
    """
    wanted = {each: os.environ.get(f"{each}_SOCKET_IFNAME", "") for each in ("GLOO", "NCCL")}
    gloo, nccl = ([name for name in text.removeprefix("=").split(",") if name] for text in wanted.values())
    begins = tuple(name.partition(":")[0] for name in nccl)
    found = {*begins} & {*names} if wanted["NCCL"].startswith("=") else any(name.startswith(begins) for name in names)
    lacking = {
        "GLOO": not {*gloo} <= {*names},
        "NCCL": torch.cuda.is_available() and begins and not (wanted["NCCL"].startswith("^") or found),
    }
    for library in (each for each, lacks in lacking.items() if lacks):
        raise ConfigError(
            f"{library}_SOCKET_IFNAME={wanted[library]} in the environment: {socket.gethostname()} has no such "
            f"interface, it has {', '.join(names)}. Name one of these in training.network_interface, or, if another "
            f"job left this behind: unset {library}_SOCKET_IFNAME"
        )
