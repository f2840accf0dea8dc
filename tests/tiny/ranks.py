"""Several processes on one run, as torchrun would start them."""

import os
import socket
import time

import torch
from tiny.runs import started

from mptrain.train import train


def free_port():
    with socket.socket() as server:
        server.bind(("localhost", 0))
        return server.getsockname()[1]


def rank(config, number, size, port, said):
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    with open(said / f"said{number}", "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    train(config)


def ranks(config, size, said):
    port = free_port()
    return [started(rank, config, number, size, port, said) for number in range(size)]


def together(config, size, said):
    processes = ranks(config, size, said)
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * size, (said / "said0").read_text()


def close(found, expected, **tolerance):
    assert found.keys() == expected.keys()
    for key in found:
        torch.testing.assert_close(found[key], expected[key], **tolerance)


def waiting_for(*conditions, seconds=60):
    end = time.monotonic() + seconds
    while not all(condition() for condition in conditions):
        assert time.monotonic() < end
        time.sleep(0.01)
