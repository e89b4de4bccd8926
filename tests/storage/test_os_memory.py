"""The memory pages pass through: this process's alone, on huge pages, and wherever a backend needs some."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from hiradix.os_memory import HUGE_PAGE, address_of, staging_memory
from hiradix.storage.backends.disk.engines import ThreadEngine
from hiradix.storage.backends.disk.moves import PageIO
from hiradix.storage.kit.call_threads import CallThread
from hiradix.storage.kit.registered import RegisteredMemory

MIB = 1 << 20


def mapping(address: int) -> tuple[str, set[str]]:
    """Permissions and kernel flags of the mapping that an address is in; ("", set()) where there is none."""
    permissions, flags, inside = "", set[str](), False
    with Path("/proc/self/smaps").open() as lines:  # as a whole it might be put where memory was given back
        for line in lines:
            head, _, rest = line.partition(" ")
            if "-" in head and not head.endswith(":"):
                begin, _, end = head.partition("-")
                inside = int(begin, 16) <= address < int(end, 16)
                permissions = rest.split()[0] if inside else permissions
            elif inside and head == "VmFlags:":
                flags = set(rest.split())
    return permissions, flags


def in_lane() -> memoryview:
    thread = CallThread(lambda _: None)
    thread.stop()
    return thread.staging(3 * MIB)


def in_block() -> memoryview:
    with ExitStack() as stack:
        return stack.enter_context(RegisteredMemory(3 * MIB, lambda *_: None)._block(MIB))


def in_bounce() -> memoryview:
    return PageIO(ThreadEngine(1), True, False)._take_bounce(MIB)


@pytest.mark.parametrize("made", [lambda: staging_memory(3 * MIB), in_lane, in_block, in_bounce])
def test_pages_pass_through_private_memory_on_huge_pages(made: Callable[[], memoryview]) -> None:
    memory = made()
    address = address_of(memory)
    permissions, flags = mapping(address)
    assert permissions == "rw-p" and address % HUGE_PAGE == 0 and len(memory) >= 3 * MIB
    if Path("/sys/kernel/mm/transparent_hugepage").exists():
        assert "hg" in flags, "MADV_HUGEPAGE"
    assert "dc" in flags, "MADV_DONTFORK"


@pytest.mark.parametrize("num_bytes", [1, 4096, 2 * MIB - 1, 2 * MIB, 2 * MIB + 1, 8 * MIB])
def test_all_of_it_is_there_and_zero(num_bytes: int) -> None:
    memory = staging_memory(num_bytes)
    assert len(memory) >= num_bytes and not any(memory[:: os.sysconf("SC_PAGE_SIZE")])
    memory[:] = b"x" * len(memory)
    assert memory[-1:] == b"x" and address_of(memory) % 4096 == 0


def test_memory_ends_with_the_last_view_of_it() -> None:
    memory = staging_memory(3 * MIB)
    address, part = address_of(memory), memory[5:6]
    del memory
    part[:] = b"x"
    assert mapping(address)[0] == "rw-p"
    del part
    assert mapping(address)[0] == ""
