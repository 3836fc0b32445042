"""What the socket moves, against a bare socket and openssl's, on loopback.

    python benchmarks/transport.py [--megabytes N] [--rounds N] [--directory DIR]

One connection, shards of 1 MiB, from files to files of one directory (give one in memory,
or the disk is measured). Goals of the design: without TLS 70 % of a bare socket, with TLS
50 % of ``openssl s_client`` into ``openssl s_server``. A round is every kind once, one
after the other; the medians of the rounds are compared.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import resource
import shutil
import socket
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import numpy as np

from spool.call import Call, CallContext, TensorRef
from spool.store import RankCounts, StepCounts, Store
from spool.transport import certs
from spool.transport.link import Link, greet
from spool.transport.receiver import Receiver
from spool.transport.shipper import Shipper

SHARD = 1 << 20
SESSION = "a" * 32


def call(order: int) -> Call:
    """A call with 1 MiB of tensor."""
    region = np.random.default_rng(order).random(SHARD // 4, dtype=np.float32)
    ref = TensorRef(0, "float32", (SHARD // 4,), (1,), 0)
    return Call(
        api="Torch.sin",
        index=order,
        rank=0,
        step=0,
        order=order,
        direction="forward",
        args=(ref,),
        kwargs={},
        outputs=ref,
        mutated={},
        context=CallContext(),
        regions=[region],
    )


def receive(root: Path, directory: Path | None, port: object) -> None:
    """The receiver's process."""
    receiver = Receiver(root, "localhost", 0, directory, print)
    receiver.start()
    port.send(receiver.port)  # type: ignore[attr-defined]
    time.sleep(3600)


def ship(work: Path, shards: int, directory: Path | None) -> tuple[float, float]:
    """Seconds that shipping takes, and CPU seconds of the sending process."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.Process(target=receive, args=(work / "received", directory, there))
    process.start()
    try:
        link = Link("localhost", here.recv(), directory, 0, SESSION)
        welcome = greet(link, resume=False, versions={}, patience=10.0)
        store = Store.create(work / "local", {}, welcome.run)
        entries = [store.publish(call(order)) for order in range(shards)]
        counts = StepCounts(shards, sum(entry.nbytes for entry in entries))
        store.close_step(0, 0, counts)
        store.close_rank(0, RankCounts({0: counts}, "disabled"))
        shipper = Shipper(store.root, link, print)
        began, cpu = time.perf_counter(), time.process_time()
        assert shipper.run()
        took = time.perf_counter() - began, time.process_time() - cpu
        assert len(Store.open(work / "received").shards(0, 0)) == shards
        return took
    finally:
        process.kill()
        process.join()
        shutil.rmtree(work / "received")


def drain(server: socket.socket) -> None:
    """Takes in what comes, writes nothing."""
    end, _ = server.accept()
    while end.recv(SHARD):
        pass
    end.sendall(b"x")


def bare(work: Path, shards: int, directory: Path | None) -> tuple[float, float]:
    """The same bytes from memory through a socket."""
    data = os.urandom(SHARD)
    with socket.create_server(("localhost", 0)) as server:
        process = multiprocessing.Process(target=drain, args=(server,))
        process.start()
        began, cpu = time.perf_counter(), time.process_time()
        with socket.create_connection(server.getsockname()) as end:
            for _ in range(shards):
                end.sendall(data)
            end.shutdown(socket.SHUT_WR)
            end.recv(1)
        took = time.perf_counter() - began, time.process_time() - cpu
        process.join()
    return took


def count(stream: IO[bytes], arrived: list[int]) -> None:
    """Takes in what a program prints."""
    while data := stream.read1(SHARD):  # type: ignore[attr-defined]
        arrived.append(len(data))


def openssl(work: Path, shards: int, directory: Path | None) -> tuple[float, float]:
    """The same bytes from a file through openssl's own client and server."""
    assert directory is not None
    source = work / "bytes"
    with open(source, "wb") as file:
        for _ in range(shards):
            file.write(os.urandom(SHARD))
    with socket.create_server(("localhost", 0)) as probe:
        port = probe.getsockname()[1]
    own = {end: ("-cert", f"{end}.crt", "-key", f"{end}.key") for end in ("server", "client")}
    server = subprocess.Popen(
        [
            *("openssl", "s_server", "-accept", f"localhost:{port}", *own["server"]),
            *("-CAfile", "ca.crt", "-Verify", "1", "-quiet", "-naccept", "1"),
        ],
        cwd=directory,
        stdin=subprocess.PIPE,  # it hangs up at the end of this
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    time.sleep(0.5)
    assert server.stdout is not None
    arrived: list[int] = []
    taking = threading.Thread(target=count, args=(server.stdout, arrived))
    taking.start()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    with open(source, "rb") as file:
        client = subprocess.Popen(
            [
                *("openssl", "s_client", "-connect", f"localhost:{port}", *own["client"]),
                *("-CAfile", "ca.crt", "-quiet"),
            ],
            cwd=directory,
            stdin=file,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    while sum(arrived) < shards * SHARD:
        time.sleep(0.001)
        assert time.perf_counter() - began < 600
    took = time.perf_counter() - began
    client.kill()
    client.wait()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    server.kill()
    server.wait()
    taking.join()
    source.unlink()
    return took, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


Kind = Callable[[Path, int, Path | None], tuple[float, float]]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=Path, default=Path("/dev/shm"))
    arguments = parser.parse_args()
    version = subprocess.run(["openssl", "version"], capture_output=True, text=True).stdout.strip()
    print(
        f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}, "
        f"{version}"
    )
    print(
        f"{arguments.megabytes} shards of 1 MiB, {arguments.rounds} rounds, {arguments.directory}"
    )
    found: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        work = Path(name)
        directory = work / "certificates"
        certs.make(directory)
        kinds: list[tuple[str, Kind, Path | None]] = [
            ("bare socket", bare, None),
            ("spool, without TLS", ship, None),
            ("openssl", openssl, directory),
            ("spool, TLS", ship, directory),
        ]
        for _ in range(arguments.rounds):
            for what, measure, path in kinds:
                found.setdefault(what, []).append(measure(work, arguments.megabytes, path))
    rates = {
        what: arguments.megabytes / statistics.median(took for took, _ in values)
        for what, values in found.items()
    }
    for what, values in found.items():
        cpu = statistics.median(seconds for _, seconds in values) / arguments.megabytes * 954
        print(f"{what:20} {rates[what]:7.0f} MiB/s, sender {cpu:5.2f} CPU seconds per GB")
    plain = rates["spool, without TLS"] / rates["bare socket"]
    tls = rates["spool, TLS"] / rates["openssl"]
    print(f"without TLS / bare socket: {plain:.2f} (goal 0.70)")
    print(f"TLS / openssl:             {tls:.2f} (goal 0.50)")


if __name__ == "__main__":
    main()
