"""The ``spool`` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from spool.errors import SpoolError, StoreError, explain

Command = Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments without the program's name; those of the process by default.

    Returns
    -------
    int
        The exit status: 2 for an error that the message explains.
    """
    arguments = _parser().parse_args(argv)
    command: Command = arguments.command
    try:
        return command(arguments)
    except SpoolError as error:
        print(f"spool: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"spool: {explain(error)}; mend that and run the same command again", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="spool", description="Find the API calls of a training run that are wrong."
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    init = commands.add_parser("init", help="write the workflow into a directory")
    init.add_argument("dir", nargs="?", default=".", type=Path, help="default: this one")
    init.set_defaults(command=_init)

    status = commands.add_parser("status", help="how far capture and checking are")
    status.add_argument(
        "spool_dir", nargs="?", type=Path, help="default: the one that the work directory follows"
    )
    status.add_argument("--spool-dir", type=Path, dest="spool", help=argparse.SUPPRESS)
    status.add_argument("--work-dir", default="work", type=Path, help="default: %(default)s")
    status.set_defaults(command=_status)

    close = commands.add_parser(
        "close", help="after a kill -9 of the training: mark its ranks as complete"
    )
    close.add_argument("spool_dir", nargs="?", default="spool-data", type=Path)
    close.add_argument("--rank", type=int, action="append", help="default: all that are open")
    close.add_argument("--force", action="store_true", help="even if the trainer seems alive")
    close.set_defaults(command=_close)

    clear = commands.add_parser("clear", help="delete what was captured")
    clear.add_argument("spool_dir", nargs="?", default="spool-data", type=Path)
    clear.add_argument("--rank", type=int, action="append", help="default: all, and the run")
    clear.add_argument("--yes", action="store_true", help="do not ask")
    clear.add_argument("--force", action="store_true", help="even if the trainer seems alive")
    clear.set_defaults(command=_clear)

    unlock = commands.add_parser(
        "unlock", help="release a work directory whose workflow died on another host"
    )
    unlock.add_argument("work_dir", nargs="?", default="work", type=Path)
    unlock.set_defaults(command=_unlock)

    receive = commands.add_parser(
        "receive", help="take shards from training hosts without shared storage"
    )
    receive.add_argument("--spool-dir", default="spool-data", type=Path)
    receive.add_argument("--host", default="", help="address to listen at; default: all")
    receive.add_argument("--port", required=True, type=int)
    receive.add_argument(
        "--tls-path", required=True, help="directory of certificates; '' listens without TLS"
    )
    receive.add_argument(
        "--rank", type=int, action="append", help="end when these are closed; default: never"
    )
    receive.set_defaults(command=_receive)

    ship = commands.add_parser(
        "ship", help="send what a training process left when its receiver was away"
    )
    ship.add_argument("dir", type=Path, help="the directory that it named")
    ship.set_defaults(command=_ship)

    certs = commands.add_parser(
        "certs", help="make certificates to try the socket out, of an authority of their own"
    )
    certs.add_argument("dir", type=Path)
    certs.set_defaults(command=_certs)

    selftest = commands.add_parser(
        "selftest", help="check the fused operators of a device against their references"
    )
    selftest.add_argument(
        "--device", choices=("npu", "cuda", "cpu"), default="npu", help="default: %(default)s"
    )
    selftest.set_defaults(command=_selftest)

    demo = commands.add_parser("demo", help="train a small model with a fault, and find it")
    demo.add_argument("--dir", default="demo", type=Path, help="default: %(default)s")
    demo.add_argument("--cores", default=2, type=int, help="default: %(default)s")
    demo.set_defaults(command=_demo)
    return parser


def _init(arguments: argparse.Namespace) -> int:
    from spool.workflow import init

    for path in init(arguments.dir):
        print(path)
    print(f"next: cd {arguments.dir} && snakemake --cores 2 --config 'rank_list=[0]'")
    return 0


def _status(arguments: argparse.Namespace) -> int:
    from spool.status import status_lines

    for line in status_lines(arguments.spool_dir or arguments.spool, arguments.work_dir):
        print(line)
    return 0


def _close(arguments: argparse.Namespace) -> int:
    from spool.close import close_rank
    from spool.store import Store

    store = Store.open(arguments.spool_dir)
    ranks = _ranks(arguments, store.ranks())
    todo = [rank for rank in ranks if store.rank_closed(rank) is None]
    if not todo:
        print(f"every rank of {store.root} is closed already")
    for rank in todo:
        counts = close_rank(store, rank, force=arguments.force)
        total = sum(step.shards for step in counts.steps.values())
        print(f"rank {rank} closed: {total} calls in {len(counts.steps)} steps")
    return 0


def _clear(arguments: argparse.Namespace) -> int:
    from spool.close import refuse_living
    from spool.store import Store

    store = Store.open(arguments.spool_dir)
    ranks = _ranks(arguments, store.ranks())
    named = ", ".join(map(str, ranks)) or "none"
    what = f"rank{'s' * (len(ranks) != 1)} {named} of {store.root}"
    size = sum(store.usage(rank) for rank in ranks)
    if not arguments.force:
        for rank in ranks:
            refuse_living(store, rank)
    if not arguments.yes:
        if not sys.stdin.isatty():
            raise StoreError(f"{what} would be deleted ({size} bytes); add --yes")
        if input(f"delete {what} ({size} bytes)? [y/N] ").strip().lower() != "y":
            return 1
    if arguments.rank:
        for rank in ranks:
            store.clear(rank)
    else:
        store.clear()
    print(f"deleted {what}")
    return 0


def _unlock(arguments: argparse.Namespace) -> int:
    from spool.intake.lock import WorkLock
    from spool.workdir import WorkDir

    path = WorkDir(arguments.work_dir).lock
    owner = WorkLock(path).force()
    print(f"{path}: released, was held by {owner}" if owner else f"{path}: nobody holds it")
    return 0


def _receive(arguments: argparse.Namespace) -> int:
    from spool.transport.receive import receive

    directory = Path(arguments.tls_path) if arguments.tls_path else None
    return receive(
        arguments.spool_dir, arguments.host, arguments.port, directory, arguments.rank or []
    )


def _ship(arguments: argparse.Namespace) -> int:
    from spool.transport.shipper import Shipper, load_order

    root = arguments.dir.absolute()
    shipper = Shipper(root, load_order(root), lambda line: print(f"spool: {line}"), linger=0.0)
    done = shipper.run()
    print(f"{shipper.shards} shards sent{'' if done else '; the rest waits'}")
    return 0 if done else 1


def _certs(arguments: argparse.Namespace) -> int:
    from spool.transport.certs import make

    for path in make(arguments.dir):
        print(path)
    return 0


def _selftest(arguments: argparse.Namespace) -> int:
    from spool.replay.selftest import operators_of, selftest

    bad = count = 0
    for row in selftest(arguments.device, operators_of(arguments.device)):
        name = f"{row.operator} ({row.what})" if row.what else row.operator
        said = "" if row.verdict == "pass" else f"  {row.message}"
        print(f"{row.verdict:8}{row.dtype:9}{name}{said}", flush=True)
        bad, count = bad + row.is_bad, count + 1
    print(f"{count} calls, {bad} wrong")
    return 1 if bad else 0


def _demo(arguments: argparse.Namespace) -> int:
    from spool.demo import main as demo

    return demo(arguments.dir, arguments.cores)


def _ranks(arguments: argparse.Namespace, there: Sequence[int]) -> list[int]:
    wanted: list[int] = arguments.rank or list(there)
    absent = [rank for rank in wanted if rank not in there]
    if absent:
        ranks = ", ".join(map(str, there)) or "none"
        raise StoreError(f"rank {absent[0]} is not in {arguments.spool_dir} (ranks there: {ranks})")
    return wanted


if __name__ == "__main__":
    sys.exit(main())
